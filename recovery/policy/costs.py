"""What the parts of a recovery cost in this job, as a strategy sees it. Pure data.

Times are seconds on the supervisor's clock. ``CostMeter`` measures them; a part
that was not seen yet has a prior, and says so by ``n`` = 0.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from trainchaos.recovery.policy.interval import PRIOR_MTBF_S, Rewinds


@dataclass(frozen=True)
class Figure:
    """A number and how many observations it is made of; ``n`` 0: a prior."""

    value: float
    n: int = 0


PRIOR_STEP_S = 0.043
PRIOR_FORM_S = 0.007
PRIOR_COPY_S = 0.023
PRIOR_START_S = 0.17
PRIOR_RESTORE_S = 0.038
PRIOR_SAVE_S = 0.038
"""Medians of 20 incidents each with 4 ranks of gpt nano on 2 cores (docs/performance.md, "Where
each millisecond goes"): only their order of size matters, until the job has shown its own. A save
is taken for as long as a restore: both move the same bytes.
"""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured parts of a recovery, each with its number of observations.

    ``step_s``: world size -> median time of a step with so many ranks; ``form_s``: survivors form
    a group that copies nothing; ``copy_s``: what it takes longer if a state is copied from a peer;
    ``start_s``: from the order to start a process until it is ready; ``restore_s``: what forming
    takes longer if a checkpoint is restored; ``save_s``: from the beginning of a save to its
    acknowledgement. ``committed``: newest step that all have committed, ``steps``: after which the
    job is complete (0: unknown); ``failures``: incidents in the last ``watched_s`` seconds;
    ``rewound``: after so many of them the job went back to a checkpoint on disk, or to the
    beginning, ``recalled``: to one in memory.
    """

    step_s: Mapping[int, Figure] = field(default_factory=dict)
    form_s: Figure = Figure(PRIOR_FORM_S)
    copy_s: Figure = Figure(PRIOR_COPY_S)
    start_s: Figure = Figure(PRIOR_START_S)
    restore_s: Figure = Figure(PRIOR_RESTORE_S)
    save_s: Figure = Figure(PRIOR_SAVE_S)
    committed: int = 0
    steps: int = 0
    failures: int = 0
    watched_s: float = 0.0
    rewound: int = 0
    recalled: int = 0

    @property
    def rewinds(self) -> Rewinds:
        return Rewinds(
            count=self.rewound,
            recalled=self.recalled,
            failures=self.failures,
            watched_s=self.watched_s,
        )

    @property
    def mtbf_s(self) -> float:
        """Mean time between incidents, seconds; the prior counts as one
        (``recovery.policy.interval``, Grattafiori et al., 2024, table 5).
        """
        return (PRIOR_MTBF_S + self.watched_s) / (1 + self.failures)

    def step_with(self, ranks: int, *, shrinks: bool = False) -> float:
        """Seconds of a step with so many ranks: as measured, else from the nearest world that was.

        A global batch of constant size is shared by fewer ranks: the step then takes longer in
        proportion. ``shrinks``: the batch follows the world, so that it does not.
        """
        if (seen := self.step_s.get(ranks)) is not None:
            return seen.value
        near = min(self.step_s, key=lambda other: (abs(other - ranks), other), default=None)
        if near is None:
            return PRIOR_STEP_S
        return self.step_s[near].value * (1.0 if shrinks else near / ranks)

    def left(self) -> int | None:
        """Steps that are left, None where that is unknown."""
        return max(0, self.steps - self.committed) if self.steps else None


NOTHING_MEASURED = Costs()
"""Priors alone."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """One way to answer an incident. ``name``: of the option; ``rank_s``: its price in lost
    rank-seconds; ``parts``: what the price is made of, rank-seconds each.
    """

    name: str
    rank_s: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def fields(self) -> dict[str, object]:
        """As an event holds it."""
        parts = {part: round(value, 6) for part, value in self.parts.items()}
        return {"name": self.name, "rank_s": round(self.rank_s, 6), "parts": parts}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """An answer that was given since the last new step. ``option``: its name; ``places``: rank and
    cause of each failure that it answered (rank None: of no rank).
    """

    option: str
    places: frozenset[tuple[int | None, str]]


KEPT = 32
"""Observations of each part that count: the newest, since a job's costs change with its machine."""
SPAN_S = 0.2
"""A span of steps is at least so long: ten looks of a supervisor (``Timing.tick_s``), so that its
ends are known to a tenth.
"""
Forming = Literal["form", "copy", "restore"]


def _lists() -> deque[float]:
    return deque(maxlen=KEPT)


class CostMeter:
    """Collects observations; ``costs`` says what they amount to."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = defaultdict(_lists)
        self._counts: dict[int, int] = defaultdict(int)
        self._formed: dict[Forming, deque[float]] = defaultdict(_lists)
        self._starts, self._saves = _lists(), _lists()
        self._saving: dict[str, float] = {}
        self._since: tuple[int, float] | None = None  # step and time at which a span of steps began
        self._world = 0
        self._failures = self._rewound = self._recalled = 0
        self._watched_s: float | None = None

    def started(self, seconds: float) -> None:
        """A process was ready so long after it had been started."""
        self._starts.append(seconds)

    def formed(self, how: Forming, seconds: float) -> None:
        """A generation trains so long after its members were ordered to join it."""
        self._formed[how].append(seconds)

    def trains(self) -> None:
        """Another generation trains from now on."""
        self._since = None

    def saw(self, world: int, committed: int, now_s: float) -> None:
        """All members of a generation of that many ranks have committed that step. It may have
        begun under another supervisor.
        """
        self._watched_s = now_s if self._watched_s is None else self._watched_s
        if self._since is None or committed < self._since[0] or world != self._world:
            self._world, self._since = world, (committed, now_s)
            return
        step, since_s = self._since
        if committed > step and now_s - since_s >= SPAN_S:
            self._steps[self._world].append((now_s - since_s) / (committed - step))
            self._counts[self._world] += committed - step
            self._since = committed, now_s

    def failed(self) -> None:
        """An incident has to be answered; the span that it ended does not count."""
        self._failures += 1
        self._since = None

    def rewound(self) -> None:
        """After an incident the job went back to a checkpoint on disk, or to the beginning."""
        self._rewound += 1

    def recalled(self) -> None:
        """After an incident the job went back to a checkpoint in memory."""
        self._recalled += 1

    def saving(self, checkpoint: str, state: str, now_s: float) -> None:
        """A save has begun (``saving``), or ended."""
        if state == "saving":
            self._saving = {checkpoint: now_s}  # one at a time: of an earlier one nothing came
        elif state == "committed" and checkpoint in self._saving:
            self._saves.append(now_s - self._saving.pop(checkpoint))

    def costs(self, *, now_s: float, committed: int, steps: int) -> Costs:
        """What was measured up to now; see ``Costs``."""
        form = self._figure(self._formed["form"], PRIOR_FORM_S)
        save = self._figure(self._saves, PRIOR_SAVE_S)
        copy = self._beyond(self._formed["copy"], form.value, PRIOR_COPY_S)
        # one rank reads what was written, and the others copy it
        restore = save.value + copy.value if save.n else PRIOR_RESTORE_S
        return Costs(
            step_s={
                world: Figure(median(spans), self._counts[world])
                for world, spans in self._steps.items()
            },
            form_s=form,
            copy_s=copy,
            start_s=self._figure(self._starts, PRIOR_START_S),
            restore_s=self._beyond(self._formed["restore"], form.value, restore),
            save_s=save,
            committed=committed,
            steps=steps,
            failures=self._failures,
            rewound=self._rewound,
            recalled=self._recalled,
            watched_s=0.0 if self._watched_s is None else now_s - self._watched_s,
        )

    @staticmethod
    def _figure(seen: deque[float], prior: float) -> Figure:
        return Figure(median(seen), len(seen)) if seen else Figure(prior)

    @staticmethod
    def _beyond(seen: deque[float], form_s: float, prior: float) -> Figure:
        """What forming takes longer than without a transfer."""
        return Figure(max(0.0, median(seen) - form_s), len(seen)) if seen else Figure(prior)
