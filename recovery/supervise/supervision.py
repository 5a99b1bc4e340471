"""What a controller needs of its processes, the stages of a job, and the bounds of its waits with
their order.

A failure is to be found by the limit made for it: the sharpest, which names who failed. Where a
blunter one is as short, it strikes first, and blames nobody or somebody else. Nothing of this has
to be tuned; who changes one limit is told which other it clashes with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from trainchaos.chaos.errors import ScenarioError
from trainchaos.recovery.detection.pace import HangLimits
from trainchaos.recovery.policy.jobconfig import COLLECTIVE_TIMEOUT_S, FORM_TIMEOUT_S


class Stage(StrEnum):
    """Where the job is."""

    STARTING = "starting"
    ADOPTING = "adopting"  # taking over from a supervisor that was lost
    FORMING = "forming"
    TRAINING = "training"
    STOPPING = "stopping"  # aborting a generation, waiting for its survivors to park
    PAUSING = "pausing"
    WAITING = "waiting"  # a generation is decided, its members are not all ready
    ENDING = "ending"
    DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Bounds of every wait, seconds.

    ``max_attempts``: decisions in a row without one new committed step; ``max_deaths``: of one rank
    in a row at one step, in any process; ``settle_timeout_s``: longest wait for a new generation's
    first step before replacements are started; ``join_timeout_s``: without any sign of life of
    members that form a group, restore and copy; ``park_timeout_s``: least time a rank has to leave
    an aborted generation, more where its phase takes longer; ``examine_timeout_s``: without a sign
    of life of ranks that look for a sample that cannot be computed; ``form_timeout_s``,
    ``collective_timeout_s``: torch's own; ``tick_s``: interval of the supervisor's checks.
    ``check_limits`` checks their order.
    """

    tick_s: float = 0.02
    adopt_timeout_s: float = 2.0
    start_timeout_s: float = 120.0
    join_timeout_s: float = 60.0
    settle_timeout_s: float = 2.0
    park_timeout_s: float = 1.0
    unforced_park_s: float = 0.25
    examine_timeout_s: float = 60.0
    blame_grace_s: float = 0.3
    end_timeout_s: float = 5.0
    kill_timeout_s: float = 10.0
    form_timeout_s: float = FORM_TIMEOUT_S
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
    max_attempts: int = 10
    max_deaths: int = 4
    hang: HangLimits = field(default_factory=HangLimits)

    def with_limits(
        self, *, hang_s: float | None, park_s: float | None, join_s: float | None
    ) -> Timing:
        """With the user's values in place of the defaults; None keeps a default. A rank about to be
        aborted is given no longer than one that has been, and a stopped process no longer than one
        that is only silent.
        """
        hang = self.hang
        if hang_s is not None:
            stopped_s = min(hang.stopped_s, max(0.8 * hang_s, 1.25 * self.tick_s))
            hang = replace(hang, given_s=hang_s, stopped_s=stopped_s)
        park = self.park_timeout_s if park_s is None else park_s
        join = self.join_timeout_s if join_s is None else join_s
        return replace(
            self,
            hang=hang,
            park_timeout_s=park,
            join_timeout_s=join,
            # rounded as in ``Join.timeout_s``
            form_timeout_s=max(self.form_timeout_s, 2 * join),
            unforced_park_s=min(self.unforced_park_s, park / 2),
            blame_grace_s=min(self.blame_grace_s, park / 2),
        )


@dataclass(kw_only=True)
class StopFlag:
    """Set by a signal handler and polled by the main loop; ``signum`` 0: no signal came."""

    signum: int = 0


@dataclass(frozen=True, kw_only=True)
class LimitClash:
    """Two limits in the wrong order, seconds. ``why``: what goes wrong."""

    short: str
    short_s: float
    long: str
    long_s: float
    why: str

    def __str__(self) -> str:
        return (
            f"{self.short} ({self.short_s:g} s) must be less than {self.long} ({self.long_s:g} s):"
            f" {self.why}"
        )


def clashes(timing: Timing) -> Iterator[LimitClash]:
    """Pairs of limits whose order is wrong."""
    values = {name: value for name, value in vars(timing).items() if name.endswith("_s")}
    values |= {
        f"hang.{name}": value for name, value in vars(timing.hang).items() if value is not None
    }
    values["park_timeout_s * hang.disk_factor"] = timing.park_timeout_s * timing.hang.disk_factor
    for short, long, why in _ORDER:
        if {short, long} <= values.keys() and not values[short] < values[long]:
            yield LimitClash(
                short=short, short_s=values[short], long=long, long_s=values[long], why=why
            )


def check_limits(timing: Timing) -> None:
    """Raise ScenarioError naming the first two limits that clash, and what to change."""
    for clash in clashes(timing):
        raise ScenarioError(
            f"time limits clash: {clash}", hint=f"lower {clash.short} or raise {clash.long}"
        )


_ORDER = (
    ("tick_s", "hang.stopped_s", "a hang is counted in looks"),
    ("hang.stopped_s", "hang.floor_s", "a stopped process is certain, any other silence is not"),
    ("hang.floor_s", "hang.checkpoint_floor_s", "a save takes longer than a step"),
    (
        "hang.checkpoint_floor_s",
        "hang.first_step_s",
        "before the first step nothing is known of the job's pace",
    ),
    ("hang.first_step_s", "collective_timeout_s", "torch would give up before anybody is named"),
    (
        "hang.first_step_s",
        "hang.compile_s",
        "a process that compiles is not to have less than one that sleeps",
    ),
    ("hang.compile_s", "hang.ceiling_s", "the ceiling cuts off what is learned"),
    ("hang.floor_s", "hang.between_s", "code between steps is not bound to their length"),
    ("hang.between_s", "hang.ceiling_s", "the ceiling cuts off what is learned"),
    ("hang.stopped_s", "hang.given_s", "a stopped process is certain, any other silence is not"),
    ("hang.given_s", "collective_timeout_s", "torch would give up before anybody is named"),
    ("blame_grace_s", "park_timeout_s", "survivors that are parked wait for the news of a death"),
    (
        "unforced_park_s",
        "park_timeout_s",
        "ranks that park by themselves are aborted before they count as hung",
    ),
    (
        "park_timeout_s",
        "join_timeout_s",
        "a rank that does not leave would not be found while the next group forms",
    ),
    (
        "park_timeout_s * hang.disk_factor",
        "join_timeout_s",
        "a rank that waits for a disk and leaves late is not to break the next group",
    ),
    (
        "hang.stopped_s",
        "join_timeout_s",
        "a rank stopped while the group forms would be nobody's fault",
    ),
    ("join_timeout_s", "form_timeout_s", "torch would give up on a group that still forms"),
    (
        "form_timeout_s",
        "collective_timeout_s",
        "a collective waits for whoever restores or evaluates",
    ),
    (
        "settle_timeout_s",
        "join_timeout_s",
        "a lost rank would be replaced only after the next one is given up",
    ),
)
