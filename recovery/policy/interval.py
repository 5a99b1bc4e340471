"""When the next checkpoint is due: every so many steps, every so many seconds, or as often as pays.
Pure.

The optimum for ``auto`` is the higher-order estimate of J. T. Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006)
303-312, equation 37.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Protocol

PRIOR_MTBF_S = 3 * 3600.0
"""Assumed before any failure was seen, and weighed as one failure: 419 unexpected interruptions in
54 days, as reported for the training of Llama 3 405B (Grattafiori et al., 2024, table 5), are one
in 3 hours.
"""

_SECONDS = re.compile(r"^(\d+(?:\.\d+)?)\s*(ms|s|m|h)$")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class Rewinds:
    """How often a job needed its checkpoints: of ``failures`` in ``watched_s`` s, after ``count``
    it went back to one on disk, or to the beginning, and after ``recalled`` to one in memory. After
    the others a peer's state was enough.

    A checkpoint shortens only what follows these. If each failure needs one with a chance q that
    does not depend on when it comes, those that do are a Poisson process of rate q / MTBF (S. M.
    Ross, Introduction to Probability Models, sec. 5.3.4: splitting), and the optimum is that of a
    job that fails at this rate: Daly's, with ``mtbf_s`` for the time between failures. The prior
    counts as one that needed a checkpoint, so that it is never certain that none is needed.
    """

    count: int
    failures: int
    watched_s: float
    recalled: int = 0

    @property
    def either(self) -> Rewinds:
        """By which checkpoints in memory are spaced: one would have shortened what followed each
        time that the job went back, to either kind.
        """
        return replace(self, count=self.count + self.recalled)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures that need a checkpoint, seconds."""
        return (PRIOR_MTBF_S + self.watched_s) / (1 + self.count)

    def fields(self, save_s: float) -> dict[str, float]:
        """As an event holds it; ``every_s``: Daly's optimum for saves that take ``save_s``."""
        return {
            "count": self.count,
            "recalled": self.recalled,
            "failures": self.failures,
            "watched_s": round(self.watched_s, 3),
            "mtbf_s": round(self.mtbf_s, 3),
            "save_s": round(save_s, 6),
            "every_s": round(optimum_s(save_s, self.mtbf_s), 3),
        }


@dataclass(frozen=True, kw_only=True)
class SaveHistory:
    """What the time of the next checkpoint depends on. ``saved_s``: when the last save began, or
    else when training began; ``cost_s``: how long saves held training up (the mean of those seen),
    None before the first; ``since_s``: when watching for failures began; ``failures``: seen since,
    and ``watched_s``: time watched before, by other processes.
    """

    saved_s: float
    since_s: float
    cost_s: float | None = None
    saves: int = 0
    failures: int = 0
    watched_s: float = 0.0

    def saved(self, began_s: float, cost_s: float) -> SaveHistory:
        """Note a save."""
        mean_s = ((self.cost_s or 0.0) * self.saves + cost_s) / (self.saves + 1)
        return replace(self, saved_s=began_s, cost_s=mean_s, saves=self.saves + 1)

    def failed(self) -> SaveHistory:
        """Note a failure of the job."""
        return replace(self, failures=self.failures + 1)

    def told(self, now_s: float, rewinds: Rewinds) -> SaveHistory:
        """With what the supervisor knows in place of what this process saw."""
        return replace(self, since_s=now_s, failures=rewinds.count, watched_s=rewinds.watched_s)

    def mtbf_s(self, now_s: float) -> float:
        """Mean time between failures, as far as it is known: the prior counts as one failure."""
        watched_s = self.watched_s + now_s - self.since_s
        return (PRIOR_MTBF_S + watched_s) / (1 + self.failures)


class Interval(Protocol):
    """A rule for when to save."""

    def due(self, step: int, now_s: float, history: SaveHistory) -> bool:
        """Whether a checkpoint is due after ``step``, which ends about now."""


@dataclass(frozen=True)
class Steps:
    """After each step that this number divides."""

    count: int

    def due(self, step: int, now_s: float, history: SaveHistory) -> bool:
        return step % self.count == 0


@dataclass(frozen=True)
class Seconds:
    """This long after the last save began."""

    seconds: float

    def due(self, step: int, now_s: float, history: SaveHistory) -> bool:
        return now_s - history.saved_s >= self.seconds


@dataclass(frozen=True)
class DalyInterval:
    """At Daly's optimum for the measured cost of a save and the given or observed ``mtbf_s``; the
    save of the first step measures the cost.
    """

    mtbf_s: float | None = None

    def due(self, step: int, now_s: float, history: SaveHistory) -> bool:
        if history.cost_s is None:
            return True
        mtbf_s = self.mtbf_s or history.mtbf_s(now_s)
        return now_s - history.saved_s >= optimum_s(history.cost_s, mtbf_s)


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's optimum of the training time between two checkpoints, seconds (see the module).
    ``cost_s``: how long a save holds training up; ``mtbf_s``: mean time between failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def parse(every: int | str, mtbf_s: float | None = None) -> Interval:
    """Parse an interval as users write it: 25 (steps), "30s", "5m" or "auto". Raises ValueError."""
    if every == "auto":
        return DalyInterval(mtbf_s)
    if isinstance(every, int) and every >= 1:
        return Steps(every)
    match = _SECONDS.match(every) if isinstance(every, str) else None
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"{every!r} is no interval: use a number of steps such as 25, a time such as 30s or 5m,"
            " or auto"
        )
    return Seconds(float(match[1]) * _UNITS[match[2]])


def steps_of(every: int | str) -> int | None:
    """The number of steps, None where it is not counted in steps."""
    return every if isinstance(every, int) else None


class SaveSchedule:
    """The saves of one rank: when rank 0 asks for one, all ranks learn of it with the gradients.
    ``every``: see ``parse``, 0: never; ``mtbf_s``: see DalyInterval.
    """

    def __init__(self, every: int | str, *, mtbf_s: float | None, now_s: float) -> None:
        self._interval = parse(every, mtbf_s) if every else None
        self._history = SaveHistory(saved_s=now_s, since_s=now_s)
        self._due = False

    def wants(self, step: int, now_s: float, *, busy: bool = False) -> bool:
        """Whether to ask for a save after ``step``. ``busy``: another one is still being written;
        the save is asked for when that has ended, and so is one that the job never reached.
        """
        if self._interval is None:
            return False
        self._due = self._due or self._interval.due(step, now_s, self._history)
        return self._due and not busy

    def asked(self, now_s: float) -> None:
        """All ranks are about to save, at the request of any of them."""
        self._due, self._history = False, replace(self._history, saved_s=now_s)

    def saved(self, began_s: float, cost_s: float) -> None:
        """A save that began then has held training up for so many seconds."""
        self._history = self._history.saved(began_s, cost_s)

    def restored(self, now_s: float) -> None:
        """Training goes on from a checkpoint: it is as new as a save would be."""
        self.asked(now_s)

    def told(self, now_s: float, rewinds: Rewinds) -> None:
        """What the supervisor knows of failures, which counts in place of what this rank saw: a
        process that has just become rank 0 saw none, and no rank knows which needed a checkpoint.
        """
        self._history = self._history.told(now_s, rewinds)

    def lost(self) -> None:
        self._history = self._history.failed()


@dataclass(frozen=True)
class Wanted:
    """Which kinds of checkpoint all ranks save after a step."""

    disk: bool = False
    memory: bool = False


class SaveSchedules:
    """The saves of one rank on disk and in memory. ``memory``: None where none are kept there;
    ``spaced``: it is ``auto``, and picks the kind as well: a checkpoint on disk then takes the
    place of the next one in memory, so that a kind that costs more and survives less is not saved.
    """

    def __init__(self, disk: SaveSchedule, memory: SaveSchedule | None, *, spaced: bool) -> None:
        self.disk = disk
        self.memory = memory
        self._spaced = spaced

    def wants(self, step: int, now_s: float, *, busy: bool = False) -> Wanted:
        """What to ask for after ``step``; see ``SaveSchedule.wants``."""
        disk = self.disk.wants(step, now_s, busy=busy)
        if self.memory is None or (disk and self._spaced):
            return Wanted(disk=disk)
        return Wanted(disk=disk, memory=self.memory.wants(step, now_s))

    def asked(self, now_s: float, wanted: Wanted) -> None:
        """All ranks are about to save, at the request of any of them."""
        if wanted.disk:
            self.disk.asked(now_s)
        if self.memory is not None and (wanted.memory or (wanted.disk and self._spaced)):
            self.memory.asked(now_s)

    def restored(self, now_s: float) -> None:
        """Training goes on from a checkpoint of either kind."""
        for each in self._each():
            each.restored(now_s)

    def told(self, now_s: float, rewinds: Rewinds) -> None:
        """What the supervisor knows of failures; see ``SaveSchedule.told``."""
        self.disk.told(now_s, rewinds)
        if self.memory is not None:
            self.memory.told(now_s, rewinds.either)

    def lost(self) -> None:
        for each in self._each():
            each.lost()

    def _each(self) -> list[SaveSchedule]:
        return [self.disk] if self.memory is None else [self.disk, self.memory]


def schedules(
    *, disk: int | str, memory: int | str, mtbf_s: float | None, now_s: float
) -> SaveSchedules:
    """The schedules of a job's checkpoints: intervals as for ``parse``, 0 for never."""
    return SaveSchedules(
        SaveSchedule(disk, mtbf_s=mtbf_s, now_s=now_s),
        SaveSchedule(memory, mtbf_s=mtbf_s, now_s=now_s) if memory else None,
        spaced=memory == "auto",
    )


def counts(step: int, every: int | str, *, asked: bool) -> bool:
    """Whether a step counts as one at which all ranks save: ``asked``, they do; a multiple of
    ``every`` counts even if its save is put off.
    """
    number = steps_of(every) or 0
    return asked or (number > 0 and step % number == 0)


def compared(step: int, *, every: int | None, steps: int, saving: bool) -> bool:
    """Whether ranks send digests of their state after ``step`` of ``steps``. ``every``: so many
    steps, 0: never, None: with each checkpoint (``saving``).
    """
    due = saving if every is None else every > 0 and step % every == 0
    return due or (step == steps and every != 0)
