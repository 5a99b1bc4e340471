"""Writes synthetic logs: what a faultless implementation would have written, with no process
started.

A ``Script`` writes lines in time order; tests then spoil single lines (``edit``, ``drop``) before
they are numbered.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, Log, make_log
from trainchaos.recovery.data.order import batch, share

MS = 1_000_000
SAMPLES = 500
RANKS, STEPS, BATCH, EVERY = 4, 40, 16, 10
STEP_MS = 50
STALL_MS = 20


@dataclass
class Line:
    """One event to be, still without sequence number."""

    actor: str
    kind: Kind
    time_ns: int
    generation: int
    step: int | None
    data: dict[str, Any]


def digest(*parts: object) -> str:
    """A short digest of anything."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def loss_at(step: int, seed: int, world: int = RANKS) -> float:
    """A falling loss with noise that seed and step decide; another world adds rounding noise."""
    noise = int(digest("noise", seed, step), 16) / 2**64 - 0.5
    return 1.5 + 3 * math.exp(-step / 15) + 0.2 * noise + (0.0 if world == RANKS else 1e-5 * noise)


class Script:
    """Writes one arm."""

    def __init__(
        self,
        strategy: str,
        *,
        arm: str = "faulted",
        seed: int = 17,
        spares: int = 0,
        steps: int = STEPS,
        step_ms: float = STEP_MS,
        shrink: bool = False,
        cell: str = "default",
        repeat: int = 0,
    ) -> None:
        self.lines: list[Line] = []
        self.now = 1_000 * MS
        self.strategy, self.seed, self.steps, self.shrink = strategy, seed, steps, shrink
        self.generation, self.members = 0, tuple(f"w{r}" for r in range(RANKS))
        self.step, self.step_ns, self.alive = 0, int(step_ms * MS), set[str]()
        self.pids: dict[str, int] = {}
        self.kept: list[int] = []
        self.slip = 0.0
        self.slower = 1.0  # so many times as long takes rank 2 to compute
        # process -> what is written once its end is seen
        self.killed: dict[str, dict[str, Any]] = {}
        self.orchestrator(
            Kind.RUN_STARTED,
            arm=arm,
            cell=cell,
            repeat=repeat,
            seed=seed,
            ranks=RANKS,
            spares=spares,
            steps=steps,
            global_batch=BATCH,
            strategy=strategy,
            order={"seed": seed, "samples": SAMPLES},
        )
        for name in self.members:
            self.spawn(name)
        for number in range(spares):
            self.spawn(f"s{number}", role="spare")
        self.form(self.members, state="initial", cause="start", resume=0)

    def write(
        self,
        actor: str,
        kind: Kind,
        /,
        *,
        step: int | None = None,
        when: int | None = None,
        **data: Any,
    ) -> None:
        """One line now, or at a given time."""
        line = Line(actor, kind, self.now if when is None else when, self.generation, step, data)
        self.lines.append(line)

    def orchestrator(self, kind: Kind, /, *, step: int | None = None, **data: Any) -> None:
        """One line of the orchestrator, a millisecond later."""
        self.now += MS
        self.write(ORCHESTRATOR, kind, step=step, **data)

    def spawn(self, name: str, role: str = "worker") -> None:
        """Start a process; it takes 100 ms."""
        pid = self.pids[name] = 100 + len(self.pids)
        self.orchestrator(Kind.PROCESS_SPAWNED, process=name, pid=pid, role=role, mode="warm")
        self.now += 100 * MS
        self.write(name, Kind.ACTOR_STARTED, pid=pid, host="here", wall_ns=0)
        self.orchestrator(Kind.PROCESS_READY, process=name)
        self.alive.add(name)

    def exit(self, name: str, *, signal: int | None = None, expected: bool) -> None:
        """A process is seen to end."""
        self.alive.discard(name)
        code = None if signal else 0
        self.orchestrator(
            Kind.PROCESS_EXITED,
            process=name,
            pid=self.pids[name],
            exit_code=code,
            signal=signal,
            expected=expected,
            last_seq=0,
        )
        if name in self.killed:
            self.orchestrator(Kind.FAULT_LANDED, step=27, **self.killed.pop(name))

    def form(
        self,
        members: Sequence[str],
        *,
        state: str,
        cause: str,
        resume: int,
        checkpoint: str | None = None,
        source: str | None = None,
        fresh: Sequence[str] = (),
    ) -> None:
        """Form the next generation: 10 ms to group, 5 ms for state."""
        self.generation += 1
        self.members = tuple(members)
        self.orchestrator(
            Kind.GENERATION_STARTED, members=list(members), state=state, source=source, cause=cause
        )
        self.now += 10 * MS
        for rank, name in enumerate(members):
            self.write(
                name,
                Kind.GROUP_FORMED,
                rank=rank,
                world=len(members),
                seconds=0.01,
                when=self.now + rank,
            )
        self.now += 5 * MS
        for rank, name in enumerate(members):
            origin = (
                "peer" if name in fresh else state if state in ("initial", "checkpoint") else "kept"
            )
            self.write(
                name,
                Kind.STATE_READY,
                step=resume,
                rank=rank,
                origin=origin,
                source=source,
                seconds=0.005,
            )
        self.orchestrator(
            Kind.GENERATION_READY, members=list(members), resume_step=resume, checkpoint=checkpoint
        )
        self.step = resume

    def take(self, step: int, names: Sequence[str] | None = None) -> None:
        """Members take their shares of a step's batch."""
        ids = batch(step, BATCH, SAMPLES, self.seed)
        world = RANKS if self.shrink else len(self.members)
        for rank, name in enumerate(self.members):
            part = share(rank, world, BATCH)
            if names is None or name in names:
                self.write(
                    name,
                    Kind.BATCH_TAKEN,
                    step=step,
                    rank=rank,
                    epoch=0,
                    samples=ids[part.start : part.stop],
                )

    def commit(self, step: int, names: Sequence[str] | None = None) -> None:
        """Members commit a step; digests and a checkpoint follow where due."""
        world = len(self.members)
        count = sum(len(share(r, RANKS, BATCH)) for r in range(world)) if self.shrink else BATCH
        for rank, name in enumerate(self.members):
            if names is None or name in names:
                self.write(
                    name,
                    Kind.STEP_COMMITTED,
                    step=step,
                    when=self.now + rank,
                    rank=rank,
                    world=world,
                    samples=count,
                    loss=loss_at(step, self.seed, world) + self.slip,
                    lr=1e-3 * min(1, step / 10),
                    grad_norm=1.0,
                    optimizer_step=step,
                    scheduler_step=step,
                    seconds=self._seconds(self.slower if rank == 2 else 1.0),
                )
        if names is None and (step % EVERY == 0 or step == self.steps):
            self._digests(step)
        if names is None and step % EVERY == 0:
            self._checkpoint(step)

    @staticmethod
    def _seconds(slower: float) -> dict[str, float]:
        return {
            "data": 0.001,
            "forward": 0.015 * slower,
            "backward": 0.02 * slower,
            "collective": 0.009,
        }

    def _digests(self, step: int) -> None:
        lineage = "full" if len(self.members) == RANKS and not self.slip else ("other", self.slip)
        for rank, name in enumerate(self.members):
            self.write(
                name,
                Kind.STATE_DIGEST,
                step=step,
                when=self.now + 100 + rank,
                rank=rank,
                parameters=digest("p", self.seed, step, lineage),
                optimizer=digest("o", self.seed, step, lineage),
                scheduler=digest("s", step),
                rng=digest("r", self.seed, rank, step, len(self.members)),
            )

    def _checkpoint(self, step: int) -> None:
        self.now += 200
        name = f"step-{step}"
        self.write(self.members[0], Kind.CHECKPOINT_SAVING, step=step, checkpoint=name)
        self.now += STALL_MS * MS
        self.write(
            self.members[0],
            Kind.CHECKPOINT_COMMITTED,
            step=step,
            checkpoint=name,
            bytes=9,
            seconds=0.02,
        )
        self.kept = sorted({*self.kept, step})
        while len(self.kept) > 3:
            old = self.kept.pop(0)
            self.write(self.members[0], Kind.CHECKPOINT_DELETED, step=old, checkpoint=f"step-{old}")

    def train(self, last: int) -> None:
        """Steps up to ``last`` in the present generation."""
        for step in range(self.step + 1, last + 1):
            self.now += MS // 2
            self.take(step)
            self.now += self.step_ns - MS // 2
            self.commit(step)
        self.step = last

    def finish(self, outcome: str = "completed", healed: Sequence[str] = ()) -> Script:
        """End the arm in good order."""
        for fault in healed:
            self.orchestrator(Kind.FAULT_HEALED, fault=fault, occurrence=0, how="over")
        for name in sorted(self.alive):
            self.write(name, Kind.ACTOR_ENDED)
            self.exit(name, expected=True)
        self.orchestrator(Kind.LEFTOVERS, processes=[], ports=[], shared_memory=[])
        self.orchestrator(
            Kind.RUN_FINISHED, outcome=outcome, reason="done", committed_step=self.step
        )
        return self

    # what tests spoil

    def find(
        self,
        kind: Kind,
        *,
        actor: str | None = None,
        step: int | None = None,
        generation: int | None = None,
    ) -> list[Line]:
        """Lines of a kind, narrowed."""
        return [
            line
            for line in self.lines
            if line.kind is kind
            and actor in (None, line.actor)
            and step in (None, line.step)
            and generation in (None, line.generation)
        ]

    def edit(self, kind: Kind, change: dict[str, Any], **which: Any) -> None:
        """Change data of all lines found. Raises AssertionError when there is none."""
        found = self.find(kind, **which)
        assert found, f"no {kind} {which}"
        for line in found:
            line.data.update(change)

    def drop(self, kind: Kind, **which: Any) -> None:
        """Remove all lines found."""
        found = self.find(kind, **which)
        assert found, f"no {kind} {which}"
        self.lines = [line for line in self.lines if line not in found]

    def events(self) -> dict[str, list[Event]]:
        """Numbered events by actor; exits claim the right last number, the orchestrator's file has
        its marks.
        """
        actors: dict[str, list[Event]] = {}
        ordered = sorted(self.lines, key=lambda line: line.time_ns)
        last = {line.actor: index for index, line in enumerate(ordered)}
        totals = {name: sum(line.actor == name for line in ordered) - 1 for name in last}
        head = Line(
            ORCHESTRATOR, Kind.ACTOR_STARTED, 0, 0, None, {"pid": 1, "host": "here", "wall_ns": 0}
        )
        end = max([self.now, *(line.time_ns for line in ordered)])
        tail = Line(ORCHESTRATOR, Kind.ACTOR_ENDED, end, 0, None, {})
        for line in (head, *ordered, tail):
            data = dict(line.data)
            if line.kind is Kind.ACTOR_STARTED:
                data["wall_ns"] = data["wall_ns"] or line.time_ns
            if line.kind is Kind.PROCESS_EXITED:
                data["last_seq"] = totals.get(data["process"], -1)
            mine = actors.setdefault(line.actor, [])
            event = Event(
                kind=line.kind,
                actor=line.actor,
                seq=len(mine),
                time_ns=line.time_ns,
                generation=line.generation,
                step=line.step,
                data=data,
            )
            mine.append(event)
        return actors

    def log(self) -> Log:
        """The log as ``read_log`` would give it."""
        return make_log(
            ActorLog(
                actor=name,
                events=tuple(events),
                problems=(),
                ended=events[-1].kind is Kind.ACTOR_ENDED,
            )
            for name, events in self.events().items()
        )

    def save(self, directory: Path) -> None:
        """Write one file per actor."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, events in self.events().items():
            (directory / f"{name}.jsonl").write_text(
                "".join(event.to_line() + "\n" for event in events)
            )
