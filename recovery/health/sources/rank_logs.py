"""What the ranks of a job write of their own steps, read from the event logs that they are writing:
a rank stores those lines anyway, so that being watched costs its training path nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, Kind
from trainchaos.recovery.health.readings.reading import JOB, Problem, Problems, Reading
from trainchaos.recovery.health.sources.job import JobSource

MOST_BYTES = 1 << 20
"""Read of a file at once: a step takes about 800 bytes, so this is 1300 steps of a rank."""
MOST_STEPS = 64
"""Steps of a rank that are looked at in one read, evenly chosen, the job's own values of all: 25 in
a second are usual (docs/performance.md), and medians of blocks need no more.
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
    f'{{"kind":"{kind}"'.encode(): kind
    for kind in (Kind.STEP_COMMITTED, Kind.STATE_DIGEST, Kind.BUSY, Kind.BUSY_ENDED)
}


@dataclass(kw_only=True)
class _File:
    """``offset``: read up to there; ``shift_s``: what brings its clock to the reader's."""

    offset: int
    shift_s: float | None = None


class RankLogs:
    """Readings of ``recovery.health.sources.job``, from the logs in a directory: each rank's own
    times, and once a step what all ranks know alike (loss, gradient norm, throughput, of the place
    ``JOB``). Beside them ``generation`` where a new one begins, ``digest`` (of the parameters) and
    ``busy`` (seconds that a rank says it may be, 0: no more).

    Sorted by time; a line that comes more than ``HOLD_S`` late is left out. Logs that exist already
    are read from their present end on. Readers of growing files never wait for a writer.
    """

    name = "ranks"

    def __init__(self, events: Path) -> None:
        self._events = events
        self._files = {path: _File(offset=size) for path, size in self._there()}
        self._job = JobSource(shared=True)
        self._problems = Problems(self.name)
        self._waiting: list[Reading] = []
        self._told_s = float("-inf")
        self._generation = 0

    def read(self, now_s: float) -> Sequence[Reading]:
        """What ranks have written since, ``HOLD_S`` later. ``now_s``: on the clock of the logs."""
        for path, size in self._there():
            file = self._files.setdefault(path, _File(offset=0))
            if size > file.offset:
                self._take(path, file, now_s)
        self._waiting += self._job.read(now_s)
        self._waiting.sort(key=_when)
        until_s = now_s - HOLD_S
        due = [one for one in self._waiting if self._told_s <= one.time_s <= until_s]
        self._waiting = [one for one in self._waiting if one.time_s > until_s]
        if due:
            self._told_s = due[-1].time_s
        return due

    def problems(self) -> Sequence[Problem]:
        """New problems."""
        return [*self._problems.take(), *self._job.problems()]

    def _there(self) -> list[tuple[Path, int]]:
        """The logs of ranks and their sizes, by name."""
        try:
            with os.scandir(self._events) as entries:
                logs = [
                    (Path(one.path), one.stat(follow_symlinks=False).st_size)
                    for one in entries
                    if one.name.endswith(".jsonl")
                    and one.name != f"{ORCHESTRATOR}.jsonl"
                    and one.is_file(follow_symlinks=False)
                ]
        except OSError:  # there is none yet, or it is gone
            return []
        return sorted(logs)[:MOST_FILES]

    def _take(self, path: Path, file: _File, now_s: float) -> None:
        try:
            with open(path, "rb") as stream:
                stream.seek(file.offset)
                data = stream.read(MOST_BYTES)
        except OSError as error:
            self._problems.note("log", path.stem, error)
            return
        whole = data[: data.rfind(b"\n") + 1]
        file.offset += len(whole) or (len(data) if len(data) == MOST_BYTES else 0)
        lines = [(kind, line) for line in whole.split(b"\n") if (kind := _kind(line)) is not None]
        steps = sum(kind is Kind.STEP_COMMITTED for kind, _ in lines)
        every, seen = -(-steps // MOST_STEPS), 0
        for kind, line in lines:
            seen += kind is Kind.STEP_COMMITTED
            of_rank = kind is not Kind.STEP_COMMITTED or seen % every == 0
            # The first log that tells of a step tells it for the job, and is read whole.
            if of_rank or self._job.first(_step(line)):
                self._tell(path.stem, kind, line, file, now_s, of_rank=of_rank)

    def _tell(
        self, name: str, kind: Kind, line: bytes, file: _File, now_s: float, *, of_rank: bool
    ) -> None:
        try:
            event = json.loads(line)
            data, step = event["data"], event["step"]
            time_s, generation = event["time_ns"] / NS, event["generation"]
            rank = data.get("rank")
            if type(generation) is not int or not isinstance(data, Mapping):
                raise TypeError("not an event")
            if type(step) is not int and kind not in (Kind.BUSY, Kind.BUSY_ENDED):
                raise TypeError("not a step")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._problems.note("line", name, error)
            return
        if file.shift_s is None:
            file.shift_s = now_s - time_s if abs(now_s - time_s) > OTHER_CLOCK_S else 0.0
        time_s += file.shift_s
        if generation < self._generation:
            return
        if generation > self._generation:
            self._generation = generation
            self._job.began_anew()
            self._waiting.append(Reading(JOB, "generation", float(generation), "1", time_s))
        self._waiting += self._job.read(now_s)
        if kind is Kind.STEP_COMMITTED:
            self._job.committed(data, step, time_s, of_rank=of_rank)
        elif type(rank) is int:
            self._other(kind, rank, data, step, time_s)

    def _other(
        self, kind: Kind, rank: int, data: Mapping[str, Any], step: int | None, time_s: float
    ) -> None:
        if kind is Kind.STATE_DIGEST:
            text = str(data.get("parameters", ""))
            self._job.feed(rank, "digest", 0.0, "1", time_s, step, text)
        elif kind is Kind.BUSY:
            said = data.get("limit_s")
            limit_s = float(said) if isinstance(said, int | float) else 1.0
            self._job.feed(rank, "busy", limit_s, "s", time_s)
        else:
            self._job.feed(rank, "busy", 0.0, "s", time_s)


def _kind(line: bytes) -> Kind | None:
    """The kind of a line, if it is wanted: most lines are not, and are not parsed."""
    return _WANTED.get(line[: line.find(b",")])


def _step(line: bytes) -> int:
    """The step in the head of a line; 0 if it cannot be read."""
    begin = line.find(b'"step":') + 7
    digits = line[begin : line.find(b",", begin)]
    return int(digits) if digits.isdigit() else 0


def _when(reading: Reading) -> tuple[float, int]:
    """Sorts by time; a new generation comes before what happens in it."""
    return reading.time_s, reading.metric != "generation"


def steps_of(readings: Sequence[Reading]) -> Iterator[int]:
    """The steps that ranks committed."""
    for reading in readings:
        if reading.metric == "committed" and reading.step is not None:
            yield reading.step
