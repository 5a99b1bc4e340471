"""How long a rank may be silent, by its phase, the job's history, and the user's settings.

Pure. ``docs/recovery-rules.md`` has the rule as a table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trainchaos.recovery.transport.progress_counters import Mark

WINDOW = 50
TELLING = 5  # steps after which a pace is told
MUCH = 2.0  # the factor by which it has changed when it is told again
HISTORY_FACTOR = 2.0
LEARNED = ("data", "checkpoint", "between")
"""Phases in which a rank does what differs from step to step: what it took before is what it may
take again.
"""
AT_ONCE = ("collective", "joining", "idle")
"""Phases in which a rank continuously checks whether its generation is aborted."""
NOT_COMPILING = ("collective", "between", "idle")
MOST_DOUBLED = 6
"""How often in a row the time for a wait in a collective without a culprit is doubled: a network
that is not through by then has failed, and a job has to give up some day.
"""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Bounds of the learned deadline, seconds. ``floor_s``, ``factor`` in median step times: within
    which, whichever is longer, a hang is to be declared, from its begin on. A rank may be silent
    for ``ahead_s`` less: it takes up to a look to see that it is, and something to say so.
    ``ahead_steps``: the same in median steps, as the median that is known here is not quite that of
    the record. ``stopped_s``: how long the kernel may show a process as stopped. That is no guess,
    so it is only waited for about as long as its replacement takes (0.07 to 0.1 s,
    docs/performance.md): waiting then costs about twice the best choice at the most.

    ``between_s``: in code of the user's between two steps, such as an evaluation; ``first_step_s``:
    before the job's first step is done, and ``compile_s`` for a process that uses a processor then,
    since it may compile; ``disk_factor``: as many times as long for a process that waits for a
    device, in the kernel; ``given_s``: what the user says, instead of all that is learned of steps,
    and for all ranks together too. It does not shorten what a first step may take, as that
    compiles, maps memory and starts the loader: a bound of three steps would end each job there.
    ``late_s``: added to each, where marks come that much later (``recovery.nodes.link.beat_rate``).
    """

    floor_s: float = 0.6
    ahead_s: float = 0.03
    ahead_steps: float = 0.2
    factor: float = 8.0
    stopped_s: float = 0.08
    ceiling_s: float = 7200.0
    checkpoint_floor_s: float = 5.0
    disk_factor: float = 10.0
    first_step_s: float = 60.0
    compile_s: float = 600.0
    between_s: float = 600.0
    given_s: float | None = None
    late_s: float = 0.0


@dataclass(kw_only=True)
class Pace:
    """What a detector has learned of a job: the length of its steps, silences that ended by
    themselves, and how long a process takes for the first step of its life.
    """

    limits: HangLimits
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _silences: dict[str, deque[float]] = field(default_factory=dict)
    _first_s: float = 0.0
    _began_at: dict[str, int] = field(default_factory=dict)
    _seasoned: set[str] = field(default_factory=set)
    _stuck: bool = False
    _failed_regroups: int = 0
    _deadlines: dict[tuple[str, bool], float] = field(default_factory=dict)
    """Known until something is learned: a job of many ranks asks for each of them in each look."""
    _told: dict[str, Any] = field(default_factory=dict)
    _got_through: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def news(self) -> dict[str, Any] | None:
        """What is known, for whoever takes the supervisor's place, if it is much more or other than
        what was said last.
        """
        if len(self._durations) < TELLING:
            return None
        silences = {phase: round(max(took), 6) for phase, took in self._silences.items()}
        known = {"step_s": round(self.step_s, 6), "first_s": round(self._first_s, 6)}
        before = {**self._told, **self._told.get("silences", {})}
        now = [(value, before.get(name, 0.0)) for name, value in (known | silences).items()]
        if all(told / MUCH <= value <= MUCH * told for value, told in now):
            return None
        self._told = {**known, "silences": silences}
        return self._told

    def recall(self, told: Mapping[str, Any], members: Collection[str]) -> None:
        """What the supervisor that is gone had told; these have done steps."""
        self._told, self._first_s = dict(told), float(told["first_s"])
        self._durations.append(float(told["step_s"]))
        self._silences |= {
            phase: deque([float(took)], maxlen=WINDOW) for phase, took in told["silences"].items()
        }
        self._seasoned |= set(members)
        self._deadlines.clear()

    def resumed(self, members: Collection[str]) -> None:
        """A generation of these processes starts training. Seasoned processes that are not among
        them are forgotten, or a job would remember every process it ever had.
        """
        self._failed_regroups, self._stuck = self._failed_regroups + self._stuck, False
        self._began_at = {}
        self._seasoned &= set(members)

    def step_took(self, seconds: float) -> None:
        """A step of the whole job."""
        self._deadlines.clear()
        self._durations.append(seconds)
        self._got_through.append(seconds if self._failed_regroups else 0.0)
        self._failed_regroups = 0

    def stuck(self) -> None:
        """Ranks wait in a collective without a culprit, and their group is formed again for it."""
        self._stuck = True

    def patient_s(self, usual_s: float) -> float:
        """How long ranks may wait in a collective without a culprit, who are given ``usual_s``
        otherwise. Doubled each time that the group was formed again for it and no step was done
        since: the network may be slower than it was, and would never get through. The time of a
        step that got through then is granted to the next ones too. The user's setting takes
        precedence.
        """
        if self.limits.given_s is not None:
            return usual_s
        more_s = usual_s * 2 ** min(self._failed_regroups, MOST_DOUBLED)
        known_s = HISTORY_FACTOR * max(self._got_through, default=0.0)
        return max(usual_s, min(self.limits.ceiling_s, max(more_s, known_s)))

    @property
    def usual_s(self) -> float:
        """What is left of ``factor`` median steps; 0 before the first."""
        limits = self.limits
        return max(0.0, (limits.factor - limits.ahead_steps) * self.step_s - limits.ahead_s)

    @property
    def step_s(self) -> float:
        """The median step; 0 before the first."""
        return median(self._durations) if self._durations else 0.0

    @property
    def works(self) -> float:
        """How much of the time counts in which a silent process uses a processor: before the first
        step, less.
        """
        return 1.0 if self._durations else self.limits.first_step_s / self.limits.compile_s

    def saw(self, name: str, mark: Mark) -> None:
        """A process at work: it is seasoned once it has done a step."""
        if name not in self._seasoned and mark.committed > self._began_at.setdefault(
            name, mark.committed
        ):
            self._seasoned.add(name)

    def ended(self, name: str, mark: Mark, *, alone_s: float, all_s: float) -> None:
        """A silence of length ``all_s`` ended by itself; others waited for this process for
        ``alone_s`` of it.
        """
        if mark.busy_s:
            return
        if (
            name not in self._seasoned
            and mark.phase not in NOT_COMPILING
            and all_s > self.limits.floor_s
        ):
            self._first_s = max(self._first_s, all_s)
            self._deadlines.clear()
        if mark.phase in LEARNED and alone_s > self.limits.floor_s / 4:
            self._silences.setdefault(mark.phase, deque(maxlen=WINDOW)).append(alone_s)
            self._deadlines.clear()

    def deadline_s(self, phase: str, name: str = "") -> float:
        """How long a process may be silent in a phase while others wait for it. ``name`` "": one
        that is seasoned.
        """
        fresh = bool(name) and name not in self._seasoned
        known_s = self._deadlines.get((phase, fresh))
        if known_s is None:
            known_s = self._deadline_s(phase, fresh=fresh) + self.limits.late_s
            self._deadlines[phase, fresh] = known_s
        return known_s

    def _deadline_s(self, phase: str, *, fresh: bool) -> float:
        """``fresh``: of a process that has done no step yet."""
        limits = self.limits
        least = (
            limits.checkpoint_floor_s if phase == "checkpoint" else limits.floor_s - limits.ahead_s
        )
        if phase == "between":
            least = limits.between_s
        if limits.given_s is not None:
            least = limits.given_s
        if not self._durations:
            return max(least, limits.first_step_s)
        if fresh and phase != "collective":
            least = max(least, HISTORY_FACTOR * self._first_s)
        if limits.given_s is not None:
            return least
        known = max(self._silences.get(phase, ()), default=0.0)
        return min(limits.ceiling_s, max(least, self.usual_s, HISTORY_FACTOR * known))

    def leave_s(self, mark: Mark, name: str, least_s: float) -> float:
        """How long a process may be silent before it leaves a generation that is aborted,
        ``least_s`` at least. It notices when its phase ends; out of a collective it comes at once.
        """
        if mark.busy_s:
            return max(least_s, mark.busy_s + self.limits.late_s)
        if mark.phase in AT_ONCE:
            return least_s
        return max(least_s, self.deadline_s(mark.phase, name))
