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

import multiprocessing
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness import in_turns, markdown, options, ratios, seconds, spread
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


def arms_of(rank: int, mb: float, group: Group, link: socket.socket) -> list[Callable[[], Any]]:
    """What is timed, by ARMS. Rank 0 sends, rank 1 receives."""
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

    return [tcp, lambda: group.broadcast(flat, 0), copy]


def take_part(
    rank: int, port: int, link: socket.socket, mbs: list[float], rounds: int, out: Any
) -> None:
    """One of the two processes; rank 1 puts the seconds of each arm into ``out``, size by size."""
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

    def together(act: Callable[[], Any]) -> float:
        group.broadcast(torch.zeros(1), 0)
        return seconds(act)

    for mb in mbs:
        acts = zip(ARMS, arms_of(rank, mb, group, link), strict=True)
        found = in_turns({name: partial(together, act) for name, act in acts}, rounds, warm=1)
        if rank == 1:
            out.put(found)
    group.broadcast(torch.zeros(1), 0)
    group.leave()


def measured(mbs: list[float], rounds: int) -> list[dict[str, list[float]]]:
    """Seconds of each arm, by size."""
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
        found = [out.get(timeout=LIMIT_S) for _ in mbs]
        for rank in ranks:
            rank.join(LIMIT_S)
        return found
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    """Measure, and print the table."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mb", type=float, nargs="+", default=[4, 40, 400])
    given = parser.parse_args()
    print(f"{given.rounds} rounds, {os.cpu_count()} cores; GB/s: median (min to max)\n")
    rows = []
    for mb, times in zip(given.mb, measured(given.mb, given.rounds), strict=True):
        rates = [spread([mb / 1e3 / time_s for time_s in times[name]], 2) for name in ARMS]
        rows.append([f"{mb:g} MB", *rates, spread(ratios(times["tcp"], times["copy"]), 2)])
    print(markdown(["state", *ARMS, f"copy, share of tcp (goal {GOAL})"], rows))


if __name__ == "__main__":
    main()
