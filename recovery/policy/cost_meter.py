"""Measures what the parts of a recovery cost, from what a supervisor sees anyway: starts, forming,
saves, and the steps between two looks. Fed with times, it reads no clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median
from typing import Literal

from trainchaos.recovery.policy.costs import (
    PRIOR_COPY_S,
    PRIOR_FORM_S,
    PRIOR_RESTORE_S,
    PRIOR_SAVE_S,
    PRIOR_START_S,
    Costs,
    Figure,
)

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
