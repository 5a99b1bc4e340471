"""What the ranks of a job write of their own steps, read from the event logs that they are writing:
a rank stores those lines anyway, so that being watched costs its training path nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainchaos.chaos.events.log import ORCHESTRATOR, Kind, Tail
from trainchaos.recovery.health.readings import JOB, Place, Problem, Problems, Reading

MOST_BYTES = 1 << 20
"""Read of a file at once: a step takes about 800 bytes, so this is 1300 steps of a rank."""
MOST_STEPS = 64
"""Steps of a rank that are looked at in one read, evenly chosen, the job's own values of all: 25 in
a second are usual (docs/performance.md), and medians of blocks need no more.
"""
LEAST_STEPS = 8
MOST_READ = 1600
"""Steps of all ranks that are looked at in one read, but for ``LEAST_STEPS`` of each: at 30 us each
(docs/health.md) 5 % of a second of the reading thread, in the supervisor's process.
"""
HOLD_S = 0.5
"""Readings younger than this wait for those of ranks whose lines come later: a rank's lines are in
its file after 0.02 s (``recovery.transport.event_ring``), a node's with its next beat.
"""
OTHER_CLOCK_S = 60.0
"""A line this far from the reader's time is of another machine's clock."""
MOST_FILES = 10_000
NS = 1e9
_WANTED = {
    f'{{"kind":"{kind}"': kind
    for kind in (Kind.STEP_COMMITTED, Kind.STATE_DIGEST, Kind.BUSY, Kind.BUSY_ENDED)
}


class _File(Tail):
    """``shift_s``: what brings its clock to the reader's."""

    shift_s: float | None = None


class _Said(NamedTuple):
    """A line, on the reader's clock. ``step``: 0 where it has none; ``of_rank``: whether the rank's
    own values count, and not only what all ranks know alike.
    """

    time_s: float
    generation: int
    kind: Kind
    step: int
    data: Mapping[str, Any]
    of_rank: bool


class RankLogs:
    """What the detectors of a job need, from the logs in a directory: each rank's own ``compute``,
    s (forward, backward, optimizer), and once a step what all ranks know alike (``loss``,
    ``gradient_norm``, ``throughput``, samples/s, of the place ``JOB``). Beside them
    ``generation`` where a new one begins, ``digest`` (of the parameters) and ``busy`` (seconds that
    a rank says it may be, 0: no more); and at the end of each read ``committed``, each rank's last
    step.

    Sorted by time; a line that comes more than ``HOLD_S`` late is left out. Logs that exist already
    are read from their present end on. Readers of growing files never wait for a writer.
    """

    name = "ranks"

    def __init__(self, events: Path) -> None:
        self._events = events
        self._files = {name: _File(events / name, size) for name, size in self._there()}
        self._places: dict[int, Place] = {}
        self._lead = (0, 0.0)  # the last step told for the job, and when it was committed
        self._done: dict[Place, tuple[int, float]] = {}
        self._problems = Problems(self.name)
        self._waiting: list[_Said] = []
        self._until_s = float("-inf")
        self._generation = 0

    def read(self, now_s: float) -> Sequence[Reading]:
        """What ranks have written since, ``HOLD_S`` later. ``now_s``: on the clock of the logs."""
        there = self._there()
        # a log that was deleted is forgotten: there is one of each process that the job ever had
        self._files = {n: self._files.get(n) or _File(self._events / n) for n, _ in there}
        grown = [(name, file) for name, size in there if size > (file := self._files[name]).offset]
        most = max(LEAST_STEPS, min(MOST_STEPS, MOST_READ // max(1, len(grown))))
        whole = True
        for name, file in grown:
            whole = self._take(name, file, now_s, whole=whole, most=most)
        self._waiting.sort(key=_when)
        before_s, self._until_s = self._until_s, max(self._until_s, now_s - HOLD_S)
        found: list[Reading] = []
        for said in self._waiting:
            if before_s < said.time_s <= self._until_s:
                found += self._readings(said)
        found += self._commits()
        self._waiting = [said for said in self._waiting if said.time_s > self._until_s]
        return found

    def problems(self) -> Sequence[Problem]:
        """New problems."""
        return self._problems.take()

    def _there(self) -> list[tuple[str, int]]:
        """The logs of ranks, by name, and their sizes."""
        try:
            with os.scandir(self._events) as entries:
                logs = [
                    (one.name, one.stat(follow_symlinks=False).st_size)
                    for one in entries
                    if one.name.endswith(".jsonl")
                    and one.name != f"{ORCHESTRATOR}.jsonl"
                    and one.is_file(follow_symlinks=False)
                ]
        except OSError:  # there is none yet, or it is gone
            return []
        return sorted(logs)[:MOST_FILES]

    def _take(self, name: str, file: _File, now_s: float, *, whole: bool, most: int) -> bool:
        """Read what is new in a log. ``whole``: all of its steps, since no other log was read whole
        before; returns whether the next one still has to be. ``most``: steps of the rank itself.
        """
        try:
            read = file.take(MOST_BYTES)
        except OSError as error:
            self._problems.note("log", name, error)
            return whole
        text = read.decode(errors="replace")  # json would guess the encoding of each line anew
        lines = [(kind, line) for line in text.split("\n") if (kind := _kind(line)) is not None]
        steps = sum(kind is Kind.STEP_COMMITTED for kind, _ in lines)
        every, seen = max(1, -(-steps // most)), 0
        for kind, line in lines:
            seen += kind is Kind.STEP_COMMITTED
            of_rank = kind is not Kind.STEP_COMMITTED or seen % every == 0
            if of_rank or whole:
                said = self._said(name, kind, line, file, now_s, of_rank=of_rank)
                self._waiting += [said] if said is not None else []
        return whole and not steps

    def _said(
        self, name: str, kind: Kind, line: str, file: _File, now_s: float, *, of_rank: bool
    ) -> _Said | None:
        try:
            event = json.loads(line)
            data, step, generation = event["data"], event["step"], event["generation"]
            time_s = event["time_ns"] / NS
            if type(generation) is not int or not isinstance(data, Mapping):
                raise TypeError("not an event")
            if type(step) is not int and kind not in (Kind.BUSY, Kind.BUSY_ENDED):
                raise TypeError("not a step")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._problems.note("line", name, error)
            return None
        if file.shift_s is None:
            file.shift_s = now_s - time_s if abs(now_s - time_s) > OTHER_CLOCK_S else 0.0
        return _Said(time_s + file.shift_s, generation, kind, step or 0, data, of_rank)

    def _readings(self, said: _Said) -> Iterator[Reading]:
        """What a line says; nothing if it is of a generation that is over."""
        if said.generation < self._generation:
            return
        if said.generation > self._generation:
            # A job that goes on from an earlier step, or with other ranks.
            yield from self._commits()
            self._generation, self._lead = said.generation, (0, 0.0)
            yield Reading(JOB, "generation", float(said.generation), "1", said.time_s)
        rank = said.data.get("rank")
        if type(rank) is not int:
            return  # a process that has no rank now
        where = self._places.setdefault(rank, Place(rank))
        try:
            yield from self._told(said, where)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._problems.note(str(said.kind), f"rank {rank}", error)

    def _told(self, said: _Said, where: Place) -> Iterator[Reading]:
        data, step, time_s = said.data, said.step, said.time_s
        if said.kind is Kind.STATE_DIGEST:
            yield Reading(where, "digest", 0.0, "1", time_s, step, str(data["parameters"]))
            return
        if said.kind is not Kind.STEP_COMMITTED:
            limit_s = float(data["limit_s"]) if said.kind is Kind.BUSY else 0.0
            yield Reading(where, "busy", limit_s, "s", time_s)
            return
        if said.of_rank:
            took = data["seconds"]
            own_s = float(took["forward"] + took["backward"] + took["optimizer"])
            yield Reading(where, "compute", own_s, "s", time_s, step)
            self._done[where] = step, time_s
        before, before_s = self._lead
        if step > before:
            self._lead = step, time_s
            yield Reading(JOB, "loss", float(data["loss"]), "1", time_s, step)
            yield Reading(JOB, "gradient_norm", float(data["grad_norm"]), "1", time_s, step)
            if step == before + 1 and time_s > before_s and before:
                rate = float(data["samples"]) / (time_s - before_s)
                yield Reading(JOB, "throughput", rate, "samples/s", time_s, step)

    def _commits(self) -> Iterator[Reading]:
        """The last step that each rank committed, in the order of time."""
        done = sorted(self._done.items(), key=lambda item: item[1][1])
        self._done = {}
        for where, (step, time_s) in done:
            yield Reading(where, "committed", float(step), "steps", time_s, step)


def _kind(line: str) -> Kind | None:
    """The kind of a line, if it is wanted: most lines are not, and are not parsed."""
    return _WANTED.get(line[: line.find(",")])


def _when(said: _Said) -> tuple[float, int]:
    return said.time_s, said.generation
