"""Checkpoints of 1 GB in memory, saved and restored with every byte verified, against a plain copy
of the same bytes.

    python -m benchmarks.memory [--rounds 7] [--mib 1024]

The keepers are separate processes. All arms of a round move the same bytes, one after the other, in
an order that changes from round to round, and each ratio is computed within one round. A restore
includes everything a new rank does: ask for the newest checkpoint, get it, verify its checksums,
and only then copy it into the live state.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.checkpoint import state_of, timed
from trainchaos.recovery.checkpoint.memory.client import KeeperClient
from trainchaos.recovery.checkpoint.memory.keeper_host import LocalKeeperHost
from trainchaos.recovery.checkpoint.memory.keepers import Keepers
from trainchaos.recovery.checkpoint.memory_state import MemoryState
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.process.forkserver import start_cold
from trainchaos.recovery.process.host import Exited
from trainchaos.recovery.process.local import rank_environment
from trainchaos.recovery.process.processes import become_subreaper
from trainchaos.recovery.state.state import TrainState

JOB = "benchmark"
ALONE = Layout(world=1)
RESTORE_GOAL = 0.5  # of the copy's rate
SAVE_GOAL = 1.3  # times the copy


class MemoryArms:
    """The timed operations. ``state``: saved, and restored in place."""

    def __init__(self, keepers: Keepers, state: TrainState) -> None:
        self.state = state
        self.bytes = sum(t.numel() * t.element_size() for t in state.tensors().values())
        self.tensors = [t.detach() for t in state.tensors().values()]
        self.copies = [torch.empty_like(t).zero_() for t in self.tensors]
        client = KeeperClient(keepers.socket_of(0))
        self.memory = MemoryState(
            state, client, job=JOB, seat="w0", check=_nothing, progress=_nothing
        )
        self.kept_s: list[float] = []

    def copy(self) -> None:
        """Copy into existing memory."""
        for into, tensor in zip(self.copies, self.tensors, strict=True):
            into.copy_(tensor)

    def save(self) -> None:
        """The part of a save that blocks training."""
        self.state.step += 1
        self.memory.save(generation=1, layout=ALONE, rank=0)

    def kept(self) -> None:
        """The rest of a save, timed separately."""
        assert self.memory.settle(120)
        for saved in self.memory.results():
            assert not saved.error and not saved.alone, saved
            self.kept_s.append(saved.seconds)

    def restore(self) -> None:
        """Restore the newest checkpoint, verified."""
        newest = self.memory.candidates()[0]
        assert newest.step == self.state.step
        with self.memory.reading(newest, ALONE, 0) as reading:
            reading.verify()
            reading.load()
            self.state.load_scalars(reading.scalars, reading.slots)


def _nothing() -> None:
    """Do nothing, as nothing waits."""


def measure(arms: MemoryArms, rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm, round by round, without the first rounds, which allocate
    fresh memory.
    """
    acts: list[Callable[[], None]] = [arms.copy, arms.save, arms.restore]
    found: dict[str, list[float]] = {act.__name__: [] for act in acts}
    for _ in range(4):  # warm up until every buffer exists
        arms.save()
        arms.kept()
    arms.kept_s.clear()
    arms.copy()
    arms.restore()
    for number in range(rounds):
        turn = number % len(acts)
        for act in acts[turn:] + acts[:turn]:
            found[act.__name__].append(timed(act))
            if act == arms.save:
                arms.kept()
    return found


def from_the_peer(keepers: Keepers, arms: MemoryArms, rounds: int) -> list[float]:
    """Seconds of a restore through the other node's keeper, as after the loss of a node."""
    keepers.signal(keepers.keeper_of(0), signal.SIGKILL)
    while not any(isinstance(news, Exited) for news in keepers.look(1.0)):
        pass
    keepers.look(1.0)
    return [timed(arms.restore) for _ in range(rounds)]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024)
    given = parser.parse_args()
    torch.set_num_threads(1)  # as in a rank
    become_subreaper()
    state = state_of(given.mib)

    def start(config: bytes, fds: object) -> int:
        held = list(fds)  # type: ignore[call-overload]
        return start_cold(
            "trainchaos.recovery.checkpoint.memory.keeper", config, held, rank_environment()
        )

    keepers = Keepers(
        LocalKeeperHost(start, log=None), job=JOB, nodes=2, limit_bytes=8 << 30, replicate=True
    )
    try:
        arms = MemoryArms(keepers, state)
        found = measure(arms, given.rounds)
        show(arms, found, from_the_peer(keepers, arms, 3))
        arms.memory.close()
    finally:
        keepers.end()
        keepers.close()


def show(arms: MemoryArms, found: dict[str, list[float]], peer: list[float]) -> None:
    """The table, with goals."""
    size = arms.bytes / 1e9
    rates = [copy / restore for copy, restore in zip(found["copy"], found["restore"], strict=True)]
    stalls = [save / copy for copy, save in zip(found["copy"], found["save"], strict=True)]
    print(f"checkpoints of {size:.2f} GB in memory, {len(rates)} rounds, {os.cpu_count()} cores")
    print("| what | goal | measured (median, min to max) | met |\n| --- | --- | --- | --- |")
    _row(
        "verified restore, share of the copy rate",
        f">= {RESTORE_GOAL}",
        rates,
        median(rates) >= RESTORE_GOAL,
    )
    _row(
        "save: training stands still, in copies",
        f"<= {SAVE_GOAL}",
        stalls,
        median(stalls) <= SAVE_GOAL,
    )
    for name, seconds in (
        *found.items(),
        ("save until checked and copied to the peer", arms.kept_s),
    ):
        _row(f"{name}, GB/s", "", [size / s for s in seconds], None)
    _row("restore from the peer's copy over TCP, GB/s", "", [size / s for s in peer], None)


def _row(what: str, goal: str, values: list[float], met: bool | None) -> None:
    word = "" if met is None else "yes" if met else "no"
    print(
        f"| {what} | {goal} | {median(values):.2f} ({min(values):.2f} to {max(values):.2f}) |"
        f" {word} |"
    )


if __name__ == "__main__":
    main()
