"""Cost of a failure for the supervisor, by number of ranks: ``python -m benchmarks.control_plane``.

Runs the real controller and strategies without processes; their access to the job only serializes
each message, as a link would. One rank of a training job dies, and the others park. Measured on one
core: time and additional memory from the last park until the joins are sent; the whole failure,
from the death until the last rank has joined; and one look at all progress marks.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import StateFrom, Strategy
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.supervise.controller import Controller, Stage
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.stream import packed
from trainchaos.recovery.transport.wire import (
    CheckpointNote,
    Joined,
    Message,
    Parked,
    Ready,
)

WORLDS = (64, 256, 1024, 4096, 16384)
ROUNDS = 3
STEP = 57
READY = Ready(versions={"torch": "2"})
BLANK = Mark(generation=0, step=0, phase="idle", collective=0, time_ns=0, committed=0, last_seq=-1)


class NoJob:
    """Access to a job that does not exist. ``sent``: messages by type; ``bytes``: their length on
    the wire.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.sent: Counter[str] = Counter()
        self.bytes = 0
        self.logged = 0
        self.marks: dict[str, Mark] = {}
        self.count = 0

    def now_s(self) -> float:
        """A clock that stands still while the controller runs."""
        return self.now

    def spawn(self, role: str, mode: str) -> str:
        """Return a new process name without starting anything."""
        name = f"{'s' if role == 'spare' else 'w'}{self.count}"
        self.count += 1
        self.marks[name] = BLANK
        return name

    def expect(self, role: str, mode: str, count: int) -> None:
        """Do nothing."""

    def send(self, process: str, message: Message) -> bool:
        """Count a message; send nothing."""
        self.sent[type(message).__name__] += 1
        self.bytes += len(packed(message))
        return True

    def kill(self, process: str) -> None:
        """Do nothing."""

    def distrust(self, process: str) -> None:
        """Do nothing."""

    def mark(self, process: str) -> Mark:
        """The progress mark set by the benchmark."""
        return self.marks[process]

    def os_state(self, process: str) -> str:
        """Always asleep."""
        return "S"

    def pulse(self, process: str) -> Pulse:
        """A pulse without processor starvation."""
        return Pulse(starved_s=0.0)

    def pid(self, process: str) -> None:
        """They are no processes."""

    def ask_stacks(self, process: str) -> None:
        """Do nothing."""

    def stacks(self, process: str) -> None:
        """There are none."""

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> None:
        """Count an event."""
        self.logged += 1


@dataclass(kw_only=True)
class Cost:
    """Cost of one failure. Values are seconds, except ``messages`` and ``wire_mb`` (all four kinds)
    and ``extra_mb`` (memory).
    """

    world: int
    decide_s: float = 0.0
    whole_s: float = 0.0
    start_s: float = 0.0
    tick_s: float = 0.0
    extra_mb: float = 0.0
    messages: int = 0
    wire_mb: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)


class ControlledJob:
    """A simulated training job under a real controller."""

    def __init__(self, strategy: Strategy, world: int, shards: int = 1) -> None:
        self.hands = NoJob()
        self.control = Controller(
            strategy, self.hands, world=world, shards=shards, steps=10_000, store_port=1
        )
        self.control.start(StateFrom.INITIAL)
        for name in list(self.hands.marks):
            self.control.on_message(name, READY)
        self.step = STEP
        self.all_join(STEP)
        note = CheckpointNote(state="committed", checkpoint="some", step=STEP)
        self.control.on_message(self.control.members[0], note)

    def all_join(self, step: int) -> None:
        """Let all processes asked to join report that they joined."""
        for name in self.control.members:
            self.at(name, step)
            self.control.on_message(
                name, Joined(generation=self.control.generation, step=step, checkpoint=None)
            )
        assert self.control.stage is Stage.TRAINING

    def go_on(self) -> None:
        """Let all ranks commit a step."""
        self.step += 1
        self.hands.now += 0.1
        for name in self.control.members:
            self.at(name, self.step)

    def all_ready(self) -> None:
        """Let the processes started last report ready."""
        members = set(self.control.members)
        for name in list(self.hands.marks)[-len(members) :]:
            if name not in members:
                self.control.on_message(name, READY)

    def at(self, name: str, step: int) -> None:
        """Set a process's progress mark to the current time."""
        self.hands.marks[name] = Mark(
            generation=self.control.generation,
            step=step + 1,
            phase="forward",
            collective=1,
            time_ns=int(self.hands.now * 1e9),
            committed=step,
            last_seq=0,
        )

    def park(self, name: str) -> None:
        """Let a process report that it left the generation."""
        self.control.on_message(
            name,
            Parked(generation=self.control.generation, step=self.step, valid=True, why="aborted"),
        )


def cost_of(strategy: Strategy, world: int, *, shards: int = 1, memory: bool = False) -> Cost:
    """Cost of losing one rank. ``memory``: trace memory, which makes it slower."""
    cost, began = Cost(world=world), time.process_time()
    job = ControlledJob(strategy, world, shards)
    cost.start_s = time.process_time() - began
    job.go_on()
    began = time.process_time()
    job.control.tick()
    cost.tick_s = time.process_time() - began
    job.hands.sent.clear()
    job.hands.bytes = 0
    gc.collect()
    others = list(job.control.members)
    victim = others.pop(world // 2)
    began = time.process_time()
    job.control.on_exit(victim, "signal 9")
    for name in others[:-1] if strategy.keeps_survivors else ():
        job.park(name)
    for name in list(job.hands.marks)[world:-1] if not strategy.keeps_survivors else ():
        job.control.on_message(name, READY)
    if memory:
        tracemalloc.start()
    last = time.process_time()
    if strategy.keeps_survivors:
        job.park(others[-1])
    else:
        for name in list(job.hands.marks)[-1:]:
            job.control.on_message(name, READY)
    cost.decide_s = time.process_time() - last
    if memory:
        cost.extra_mb = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
    job.all_join(job.step)
    cost.whole_s = time.process_time() - began
    cost.sent, cost.wire_mb = job.hands.sent, job.hands.bytes / 1e6
    return cost


def curve(
    strategy: Strategy, worlds: Sequence[int] = WORLDS, *, shards: int = 1, rounds: int = ROUNDS
) -> list[Cost]:
    """The median of ``rounds`` for each number of ranks."""
    found = []
    for world in worlds:
        costs = [cost_of(strategy, world, shards=min(shards, world)) for _ in range(rounds)]
        cost = sorted(costs, key=lambda each: each.decide_s)[rounds // 2]
        cost.whole_s = statistics.median(each.whole_s for each in costs)
        cost.extra_mb = cost_of(strategy, world, shards=min(shards, world), memory=True).extra_mb
        found.append(cost)
    return found


HEAD = (
    "ranks",
    "last park to joins sent, ms",
    "memory, MB",
    "whole failure, ms",
    "messages sent",
    "MB",
    "a look, ms",
)


def rows_of(costs: Sequence[Cost]) -> str:
    """A table in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for cost in costs:
        figures = 1e3 * cost.decide_s, cost.extra_mb, 1e3 * cost.whole_s
        rows.append(
            (
                str(cost.world),
                *(f"{each:.1f}" for each in figures),
                str(sum(cost.sent.values())),
                f"{cost.wire_mb:.2f}",
                f"{1e3 * cost.tick_s:.1f}",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def main() -> None:
    """Print the tables."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--most", type=int, default=WORLDS[-1], help="ranks")
    args.add_argument("--rounds", type=int, default=ROUNDS)
    given = args.parse_args()
    worlds = [world for world in WORLDS if world <= given.most]
    for title, strategy, shards in (
        ("hot-spare", HotSpare(), 1),
        ("hot-spare, replicas of 8 shards", HotSpare(), 8),
        ("drop-replica", DropReplica(), 1),
        ("checkpoint-restart, from the last process ready", CheckpointRestart(), 1),
    ):
        print(f"**{title}**, one rank of all dies, median of {given.rounds}\n", flush=True)
        print(rows_of(curve(strategy, worlds, shards=shards, rounds=given.rounds)), flush=True)
