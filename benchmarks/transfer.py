"""The whole state copied from one rank to another, against the same bytes over a plain TCP
connection.

    python -m benchmarks.transfer [--rounds 7] [--mb 4 40 400]

Two processes of this machine. All arms of a round move the same bytes, one after the other; each
ratio is computed within one round. ``tcp``: one connection, ``sendall`` from a buffer and
``recv_into`` another, both used again and again. ``gloo``: one broadcast of one buffer. ``copy``:
``copy_state``, as in a recovery, into a live state, over a group that stands. The receiver's clock,
from the moment at which both are ready.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.transfer import copy_state
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.state import TrainState

ARMS = ("tcp", "gloo", "copy")
GOAL = 0.7
LIMIT_S = 120.0
PIECE = 4_000_000  # elements of a parameter, at most


def state_of(mb: float) -> TrainState:
    """Parameters and momentum, ``mb`` * 10^6 bytes together."""
    elements = int(mb * 1e6 / 8)
    sizes = [min(PIECE, elements - start) for start in range(0, elements, PIECE)]
    model = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(part.sum() for part in model).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model, optimizer, None, seed=1)


def arms_of(
    rank: int, mb: float, group: Group, link: socket.socket
) -> dict[str, Callable[[], Any]]:
    """What is timed. Rank 0 sends, rank 1 receives."""
    state = state_of(mb)
    flat = torch.ones(sum(part.nbytes for part in state.parts().values()), dtype=torch.uint8)
    view = bytes_of(flat)

    def tcp() -> None:
        if rank == 0:
            link.sendall(view)
            return
        got = 0
        while got < len(view):
            got += link.recv_into(view[got:])

    def copy() -> None:
        copy_state(state, group.everyone, source=0, receive=rank == 1, progress=lambda: None)

    return {"tcp": tcp, "gloo": lambda: group.broadcast(flat, 0), "copy": copy}


def take_part(
    rank: int, port: int, link: socket.socket, mbs: list[float], rounds: int, out: Any
) -> None:
    """One of the two processes; rank 1 puts seconds into ``out``, by size and arm."""
    torch.set_num_threads(1)  # as in a rank
    link.settimeout(LIMIT_S)
    group = Group(
        generation=1,
        rank=rank,
        world=2,
        store_port=port,
        backend="gloo",
        timeout_s=LIMIT_S,
        check=lambda: None,
    )
    group.form()
    for mb in mbs:
        arms = arms_of(rank, mb, group, link)
        for number in range(rounds + 1):
            for name in ARMS:
                group.broadcast(torch.zeros(1), 0)
                started = time.perf_counter()
                arms[name]()
                if rank == 1 and number:  # the first of each is to warm up
                    out.put((mb, name, time.perf_counter() - started))
    group.broadcast(torch.zeros(1), 0)
    group.leave()


def measured(mbs: list[float], rounds: int) -> Iterator[tuple[float, str, float]]:
    """Seconds, by size and arm, in the order of the rounds."""
    _store, port = start_store()
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    ranks = [
        context.Process(target=take_part, args=(rank, port, end, mbs, rounds, out), daemon=True)
        for rank, end in enumerate((sender, receiver))
    ]
    for rank in ranks:
        rank.start()
    try:
        for _ in range(len(mbs) * rounds * len(ARMS)):
            yield out.get(timeout=LIMIT_S)
        for rank in ranks:
            rank.join(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mb", type=float, nargs="+", default=[4, 40, 400])
    given = parser.parse_args()
    found: dict[tuple[float, str], list[float]] = defaultdict(list)
    for mb, name, seconds in measured(given.mb, given.rounds):
        found[mb, name].append(seconds)
    print(f"{given.rounds} rounds, {os.cpu_count()} cores; GB/s: median (min to max)\n")
    print(f"| state | {' | '.join(ARMS)} | copy, share of tcp (goal {GOAL}) |")
    print("| --- " * (len(ARMS) + 2) + "|")
    for mb in given.mb:
        rates = [_text([mb / 1e3 / s for s in found[mb, name]]) for name in ARMS]
        shares = [tcp / copy for tcp, copy in zip(found[mb, "tcp"], found[mb, "copy"], strict=True)]
        print(f"| {mb:g} MB | {' | '.join(rates)} | {_text(shares)} |")


def _text(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
