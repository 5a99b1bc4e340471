"""Cost of a failure for the supervisor, by number of ranks: ``python -m benchmarks.control_plane``.

Runs the real controller and strategies without processes; their access to the job only serializes
each message, as a link would. One rank of a training job dies, and the others park. Measured on one
core: time and additional memory from the last park until the joins are sent; the whole failure,
from the death until the last rank has joined; and one look at all progress marks.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.harness import markdown, options
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import StateFrom, Strategy
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.supervise.controller import Controller, Stage
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.stream import packed
from trainchaos.recovery.transport.wire import CheckpointNote, Joined, Message, Parked, Ready

WORLDS = (64, 256, 1024, 4096, 16384)
ROUNDS = 3
STEP = 57
READY = Ready(versions={"torch": "2"})
BLANK = Mark(generation=0, step=0, phase="idle", collective=0, time_ns=0, committed=0, last_seq=-1)


class NoJob:
    """Access to a job that does not exist: its clock stands still while the controller runs.
    ``sent``: messages by type; ``bytes``: their length on the wire; ``marks``: of progress, set by
    the benchmark.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.sent: Counter[str] = Counter()
        self.bytes = self.logged = 0
        self.marks: dict[str, Mark] = {}

    def now_s(self) -> float:
        return self.now

    def spawn(self, role: str, mode: str) -> str:
        name = f"{'s' if role == 'spare' else 'w'}{len(self.marks)}"
        self.marks[name] = BLANK
        return name

    def send(self, process: str, message: Message) -> bool:
        self.sent[type(message).__name__] += 1
        self.bytes += len(packed(message))
        return True

    def mark(self, process: str) -> Mark:
        return self.marks[process]

    def os_state(self, process: str) -> str:
        return "S"

    def pulse(self, process: str) -> Pulse:
        return Pulse(starved_s=0.0)

    def record(self, kind: Kind, /, **data: Any) -> None:
        self.logged += 1

    def nothing(self, *_: object) -> None:
        """Processes that do not exist are neither expected, killed, distrusted nor looked into."""

    expect = kill = distrust = pid = ask_stacks = stacks = nothing


@dataclass(kw_only=True)
class Cost:
    """Cost of one failure. Values are seconds, except ``messages`` and ``wire_mb`` (all four kinds)
    and ``extra_mb`` (memory).
    """

    world: int
    decide_s: float = 0.0
    whole_s: float = 0.0
    tick_s: float = 0.0
    extra_mb: float = 0.0
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
        joined = Joined(generation=self.control.generation, step=step, checkpoint=None)
        for name in self.control.members:
            self.at(name, step)
            self.control.on_message(name, joined)
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
        about: dict[str, Any] = {"generation": self.control.generation, "step": self.step}
        self.control.on_message(name, Parked(**about, valid=True, why="aborted"))


def cost_of(strategy: Strategy, world: int, *, shards: int = 1, memory: bool = False) -> Cost:
    """Cost of losing one rank. ``memory``: trace memory, which makes it slower."""
    cost, job = Cost(world=world), ControlledJob(strategy, world, shards)
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
    if strategy.keeps_survivors:
        waited_for, news = others, job.park
    else:
        waited_for = list(job.hands.marks)[world:]
        news = lambda name: job.control.on_message(name, READY)  # noqa: E731
    for name in waited_for[:-1]:
        news(name)
    if memory:
        tracemalloc.start()
    last = time.process_time()
    news(waited_for[-1])
    cost.decide_s = time.process_time() - last
    if memory:
        cost.extra_mb = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
    job.all_join(job.step)
    cost.whole_s = time.process_time() - began
    cost.sent, cost.wire_mb = job.hands.sent, job.hands.bytes / 1e6
    return cost


def table(strategy: Strategy, worlds: Sequence[int], shards: int, rounds: int) -> str:
    """The median of ``rounds`` for each number of ranks."""
    head = ["ranks", "last park to joins sent, ms", "memory, MB", "whole failure, ms"]
    rows = []
    for world in worlds:
        few = min(shards, world)
        costs = [cost_of(strategy, world, shards=few) for _ in range(rounds)]
        extra_mb = cost_of(strategy, world, shards=few, memory=True).extra_mb
        decide_s, whole_s = (
            median(getattr(cost, of) for cost in costs) for of in ("decide_s", "whole_s")
        )
        figures = (1e3 * decide_s, extra_mb, 1e3 * whole_s)
        cells = [str(world), *(f"{value:.1f}" for value in figures)]
        cells += [str(costs[0].sent.total()), f"{costs[0].wire_mb:.2f}"]
        rows.append([*cells, f"{1e3 * median(cost.tick_s for cost in costs):.1f}"])
    return markdown([*head, "messages sent", "MB", "a look, ms"], rows)


def main() -> None:
    """Print the tables."""
    parser = options(__doc__)
    parser.add_argument("--most", type=int, default=WORLDS[-1], help="ranks")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    worlds = [world for world in WORLDS if world <= given.most]
    for title, strategy, shards in (
        ("hot-spare", HotSpare(), 1),
        ("hot-spare, replicas of 8 shards", HotSpare(), 8),
        ("drop-replica", DropReplica(), 1),
        ("checkpoint-restart, from the last process ready", CheckpointRestart(), 1),
    ):
        print(f"**{title}**, one rank of all dies, median of {given.rounds}\n", flush=True)
        print(table(strategy, worlds, shards, given.rounds) + "\n", flush=True)


if __name__ == "__main__":
    main()
