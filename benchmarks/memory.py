"""Checkpoints of 1 GB in memory, saved and restored with every byte verified, against a plain copy
of the same bytes.

    python -m benchmarks.memory [--rounds 7] [--mib 1024]

The keepers are separate processes. All arms of a round move the same bytes, one after the other, in
an order that changes from round to round, and each ratio is computed within one round. A restore
includes everything a new rank does: ask for the newest checkpoint, get it, verify its checksums,
and only then copy it into the live state.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.checkpoint import bytes_of, state_of
from benchmarks.harness import in_turns, markdown, options, ratios, seconds, spread
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.files.saving import RankHooks
from trainchaos.recovery.checkpoint.memory.keepers import Keepers, LocalKeeperHost
from trainchaos.recovery.checkpoint.memory_checkpointer import MemoryCheckpointer
from trainchaos.recovery.checkpoint.restore import restore_first
from trainchaos.recovery.policy.interval import SaveSchedule
from trainchaos.recovery.policy.jobconfig import InMemory
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
    """The timed operations. ``state``: saved, and restored in place; ``kept_s``: the rest of each
    save, during which training goes on.
    """

    def __init__(self, keepers: Keepers, state: TrainState) -> None:
        self.state = state
        self.tensors = [t.detach() for t in state.tensors().values()]
        self.copies = [torch.empty_like(t).zero_() for t in self.tensors]
        self.memory = MemoryCheckpointer(
            InMemory(socket=keepers.socket_of(0), job=JOB, every=1),
            state,
            RankHooks(write=self._write, send=print),
            timetable=SaveSchedule(1, mtbf_s=None, now_s=0.0),
            seat="w0",
        )
        self.kept_s: list[float] = []

    def copy(self) -> None:
        """Copy into existing memory."""
        for into, tensor in zip(self.copies, self.tensors, strict=True):
            into.copy_(tensor)

    def save(self) -> float:
        """Seconds of the part of a save that blocks training."""
        self.state.step += 1
        took_s = seconds(lambda: self._commit(asked=True))
        assert self.memory.settle(120)
        self._commit(asked=False)  # which takes the rest of the save
        return took_s

    def _commit(self, *, asked: bool) -> None:
        step = self.state.step if asked else 0
        self.memory.after_commit(step, rank=0, layout=ALONE, generation=1, asked=asked)

    def _write(self, kind: Kind, /, **data: Any) -> None:
        assert kind is not Kind.CHECKPOINT_FAILED and "alone" not in data, data
        if kind is Kind.CHECKPOINT_COMMITTED:
            self.kept_s.append(data["seconds"])

    def restore(self) -> None:
        """Restore the newest checkpoint, verified."""
        newest = restore_first(
            self.state,
            self.memory.candidates(),
            lambda candidate: self.memory.reading(candidate, ALONE, 0),
            self.memory.refused,
        )
        assert newest is not None and newest.step == self.state.step


def from_the_peer(keepers: Keepers, arms: MemoryArms, rounds: int) -> list[float]:
    """Seconds of a restore through the other node's keeper, as after the loss of a node."""
    keepers.signal(keepers.keeper_of(0), signal.SIGKILL)
    while not any(isinstance(news, Exited) for news in keepers.look(1.0)):
        pass
    keepers.look(1.0)
    return [seconds(arms.restore) for _ in range(rounds)]


def table(size: float, found: dict[str, list[float]], other: dict[str, Sequence[float]]) -> str:
    """With goals. ``size``: GB; ``other``: seconds of what is not compared with the copy."""
    rates = ratios(found["copy"], found["restore"])
    stalls = ratios(found["save"], found["copy"])
    met = {True: "yes", False: "no"}
    words = "verified restore, share of the copy rate", "save: training stands still, in copies"
    rows = [
        [words[0], f">= {RESTORE_GOAL}", spread(rates, 2), met[median(rates) >= RESTORE_GOAL]],
        [words[1], f"<= {SAVE_GOAL}", spread(stalls, 2), met[median(stalls) <= SAVE_GOAL]],
    ]
    for name, times in {**found, **other}.items():
        rows.append([f"{name}, GB/s", "", spread([size / time_s for time_s in times], 2), ""])
    return markdown(["what", "goal", "measured (median, min to max)", "met"], rows)


def main() -> None:
    """Measure, and print the table."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024)
    given = parser.parse_args()
    torch.set_num_threads(1)  # as in a rank
    become_subreaper()
    state = state_of(given.mib)

    def start(config: bytes, fds: object) -> int:
        held = list(fds)  # type: ignore[call-overload]
        module = "trainchaos.recovery.checkpoint.memory.keeper"
        return start_cold(module, config, held, rank_environment())

    keepers = Keepers(
        LocalKeeperHost(start, log=None), job=JOB, nodes=2, limit_bytes=8 << 30, replicate=True
    )
    try:
        arms = MemoryArms(keepers, state)
        for _ in range(4):  # until every buffer exists
            arms.save()
        arms.kept_s.clear()
        acts = {"copy": arms.copy, "save": arms.save, "restore": arms.restore}
        found = in_turns(acts, given.rounds, warm=1)
        peer = from_the_peer(keepers, arms, 3)
        arms.memory.close()
    finally:
        keepers.end()
        keepers.close()
    size = bytes_of(state) / 1e9
    print(f"checkpoints of {size:.2f} GB in memory, {given.rounds} rounds, {os.cpu_count()} cores")
    other: dict[str, Sequence[float]] = {
        "save until checked and copied to the peer": arms.kept_s,
        "restore from the peer's copy over TCP": peer,
    }
    print(table(size, found, other))


if __name__ == "__main__":
    main()
