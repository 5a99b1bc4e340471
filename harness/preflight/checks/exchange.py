"""What two places, or all, exchange in a process group: how fast, and whether it arrives.

Measured in the processes of the places: gloo between places of the CPU, NCCL where each place is a
GPU of its own. The bus bandwidth of an all-reduce is 2 (n - 1) / n times its size over its time
(nccl-tests, doc/PERFORMANCE.md), so that it can be compared whatever n is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from trainchaos.harness.preflight.checks.check import Task, is_cuda, torch_name
from trainchaos.harness.preflight.checks.store import connect

PAIR_BYTES = 4 << 20
CUDA_BYTES = 64 << 20
"""Of one exchange: what DistributedDataParallel sends in one bucket is 25 MiB; less than a link's
latency-bound sizes would not show its bandwidth.
"""
LEAST_REPEATS, MOST_REPEATS = 2, 64
LOOK_S = 0.0001
"""Between two looks at NCCL's operation: small beside the milliseconds that an exchange takes."""
MODULUS = 1009
"""Values are whole numbers below it, so that a sum of up to 16,000 ranks is exact in float32."""


def measure(task: Task) -> dict[str, Any]:
    """One round in one process group. ``options``: ``rank``, ``world``, ``port``, ``host``,
    ``prefix`` (of the group's keys, used once), ``kind`` (``pair`` or ``all``), ``timeout_s``.

    Returns ``rate`` in MiB/s, ``repeats``, ``wrong`` (exchanges that did not arrive as they were
    sent). Raises RuntimeError where the group cannot be formed or an exchange fails.
    """
    import torch

    options = task.options
    rank, world = int(options["rank"]), int(options["world"])
    timeout_s = float(options["timeout_s"])
    cuda = is_cuda(task.place)
    device = torch.device(torch_name(task.place))
    client = connect(int(options["port"]), str(options["host"]), timeout_s)
    made = _meet(client, str(options["prefix"]), rank, world, timeout_s, device)
    wait = partial(_wait, made, timeout_s)
    size = (CUDA_BYTES if cuda else PAIR_BYTES) // 4
    values = torch.arange(size, device=device, dtype=torch.int64) % MODULUS
    act = partial(_between if options["kind"] == "pair" else _together, made, wait)
    wrong, _ = act(values, rank, world)  # connects too; the second one counts
    more, first_s = act(values, rank, world)
    wrong += more
    count = torch.tensor([int(task.budget_s / max(1e-6, first_s))], device=device)
    wait(_broadcast(made, count, 0))
    repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(count.item())))
    seconds = 0.0
    for _ in range(repeats):
        bad, took_s = act(values, rank, world)
        wrong += bad
        seconds += took_s
    sent = size * 4 * 2.0 if options["kind"] == "pair" else size * 8.0 * (world - 1) / world
    return {"rate": repeats * sent / seconds / 2**20, "repeats": repeats, "wrong": wrong}


def _meet(client: Any, prefix: str, rank: int, world: int, timeout_s: float, device: Any) -> Any:
    """Torch's process group. Members first wait for each other in the store, where a wait has a
    limit: NCCL would wait for ever for one that does not come.
    """
    import torch
    import torch.distributed as dist

    from trainchaos.recovery.collectives import nccl
    from trainchaos.recovery.collectives.group import gloo_device

    store, limit = dist.PrefixStore(prefix, client), timedelta(seconds=timeout_s)
    store.set(f"here-{rank}", "")
    store.wait([f"here-{other}" for other in range(world)], limit)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return nccl.meet(store, rank, world, limit)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads, options._devices = limit, 2, [gloo_device("")]
    return dist.ProcessGroupGloo(store, rank, world, options)


def _wait(made: Any, timeout_s: float, work: Any) -> None:
    """Wait for an operation. Of NCCL, whose own wait ends before the operation does, look until it
    is done, and abort what is not, so that the device is free again.
    """
    if not work.is_completed() and made.name() != "nccl":
        work.wait(timedelta(seconds=timeout_s))
    until_s = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > until_s:
            made.abort()
            raise RuntimeError(f"an exchange did not end within {timeout_s:g} s")
        time.sleep(LOOK_S)


def _broadcast(made: Any, values: Any, source: int) -> Any:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = source
    return made.broadcast([values], options)


def _between(
    made: Any, wait: Callable[[Any], None], values: Any, rank: int, world: int
) -> tuple[int, float]:
    """There and back: how many came wrong here, and seconds."""
    import torch

    sent = [(values + turn).to(torch.float32) for turn in range(world)]
    held = [sent[turn].clone() if turn == rank else torch.zeros_like(sent[0]) for turn in (0, 1)]
    _finish(values)
    began_s = time.monotonic()
    for turn in (0, 1):
        wait(_broadcast(made, held[turn], turn))
    _finish(values)
    took_s = time.monotonic() - began_s
    return sum(not torch.equal(held[turn], sent[turn]) for turn in (0, 1)), took_s


def _together(
    made: Any, wait: Callable[[Any], None], values: Any, rank: int, world: int
) -> tuple[int, float]:
    """One all-reduce of all: whether the sum is wrong, and seconds."""
    import torch

    held = (values + rank).to(torch.float32)
    expected = (values * world + world * (world - 1) // 2).to(torch.float32)
    _finish(values)
    began_s = time.monotonic()
    wait(made.allreduce([held]))
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
