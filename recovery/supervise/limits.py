"""The one place that knows how the time limits of a job depend on each other.

A failure is to be found by the limit made for it: the sharpest, which names who failed. Where a
blunter one is as short, it strikes first, and blames nobody or somebody else. Nothing of this has
to be tuned; who changes one limit is told which other it clashes with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainchaos.chaos.errors import ScenarioError
from trainchaos.recovery.supervise.supervision import Timing


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


def check(timing: Timing) -> None:
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
