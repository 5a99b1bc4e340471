"""What two places, or all, exchange in a process group: how fast, and whether it arrives.

Measured in the processes of the places: gloo between places of the CPU, NCCL where each place is a
GPU of its own. The bus bandwidth of an all-reduce is 2 (n - 1) / n times its size over its time
(nccl-tests, doc/PERFORMANCE.md), so that it can be compared whatever n is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from trainchaos.harness.preflight.check import Task, is_cuda, torch_name
from trainchaos.harness.preflight.store import connect

PAIR_BYTES = 4 << 20
CUDA_BYTES = 64 << 20
"""Of one exchange: what DistributedDataParallel sends in one bucket is 25 MiB; less than a link's
latency-bound sizes would not show its bandwidth.
"""
LEAST_REPEATS, MOST_REPEATS = 2, 64
MODULUS = 1009
"""Values are whole numbers below it, so that a sum of up to 16,000 ranks is exact in float32."""


def measure(task: Task) -> dict[str, Any]:
    """One round in one process group. ``options``: ``rank``, ``world``, ``port``, ``host``,
    ``prefix`` (of the group's keys, used once), ``kind`` (``pair`` or ``all``), ``timeout_s``.

    Returns ``rate`` in MiB/s, ``repeats``, ``wrong`` (exchanges that did not arrive as they were
    sent). Raises RuntimeError where the group cannot be formed or an exchange fails.
    """
    import torch
    import torch.distributed as dist

    options = task.options
    rank, world = int(options["rank"]), int(options["world"])
    timeout_s = float(options["timeout_s"])
    cuda = is_cuda(task.place)
    device = torch.device(torch_name(task.place))
    if cuda:
        torch.cuda.set_device(device)
    store = dist.PrefixStore(
        str(options["prefix"]), connect(int(options["port"]), str(options["host"]), timeout_s)
    )
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        size = (CUDA_BYTES if cuda else PAIR_BYTES) // 4
        values = torch.arange(size, device=device, dtype=torch.int64) % MODULUS
        act = _between if options["kind"] == "pair" else _together
        wrong, first_s = act(values, rank, world)  # connects too; the second one counts
        more, first_s = act(values, rank, world)
        wrong += more
        count = torch.tensor([int(task.budget_s / max(1e-6, first_s))], device=device)
        dist.broadcast(count, 0)
        repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(count.item())))
        seconds = 0.0
        for _ in range(repeats):
            bad, took_s = act(values, rank, world)
            wrong += bad
            seconds += took_s
        sent = size * 4 * 2.0 if options["kind"] == "pair" else size * 8.0 * (world - 1) / world
        return {"rate": repeats * sent / seconds / 2**20, "repeats": repeats, "wrong": wrong}
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _between(values: Any, rank: int, world: int) -> tuple[int, float]:
    """There and back: how many came wrong here, and seconds."""
    import torch
    import torch.distributed as dist

    sent = [(values + turn).to(torch.float32) for turn in range(world)]
    held = [sent[turn].clone() if turn == rank else torch.zeros_like(sent[0]) for turn in (0, 1)]
    _finish(values)
    began_s = time.monotonic()
    for turn in (0, 1):
        dist.broadcast(held[turn], turn)
    _finish(values)
    took_s = time.monotonic() - began_s
    return sum(not torch.equal(held[turn], sent[turn]) for turn in (0, 1)), took_s


def _together(values: Any, rank: int, world: int) -> tuple[int, float]:
    """One all-reduce of all: whether the sum is wrong, and seconds."""
    import torch
    import torch.distributed as dist

    held = (values + rank).to(torch.float32)
    expected = (values * world + world * (world - 1) // 2).to(torch.float32)
    _finish(values)
    began_s = time.monotonic()
    dist.all_reduce(held)
    _finish(values)
    took_s = time.monotonic() - began_s
    return int(not torch.equal(held, expected)), took_s


def _finish(values: Any) -> None:
    import torch

    if values.device.type == "cuda":
        torch.cuda.synchronize(values.device)


def merged(answers: Mapping[str, Mapping[str, Any]]) -> tuple[float, int]:
    """Of the members' measurements of one exchange: the lowest rate, and all that came wrong."""
    return (
        min(float(one["rate"]) for one in answers.values()),
        sum(int(one["wrong"]) for one in answers.values()),
    )
