"""Parses steady-state checks: conditions required before the first fault, judged from the event
log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainchaos.chaos.scenario.sla import OPERATORS, ClauseError, nearest, parse_duration

MEASURES = ("committed_steps", "step_time_cv", "healthy_replicas")
EXAMPLE = (
    "'committed_steps >= 5 within 60s', 'step_time_cv < 0.5 over 10 steps' or 'healthy_replicas"
    " >= 4'"
)
MAX_WINDOW = 10_000
_CHECK = re.compile(
    r"\s*(?P<name>\w+)\s*(?P<op>[<>=!]+)\s*(?P<limit>\d+\.?\d*|\.\d+)"
    r"(?:\s+over\s+(?P<over>\d{1,9})\s+steps?)?(?:\s+within\s+(?P<within>\S+))?\s*"
)


@dataclass(frozen=True, kw_only=True)
class SteadyRule:
    """``name op limit``. ``over``: number of steps before the first fault to use (``step_time_cv``,
    the standard deviation of step times divided by their mean); ``within_s``: seconds after
    training began.
    """

    name: str
    op: str
    limit: float
    over: int | None
    within_s: float | None
    text: str

    def holds(self, seen: float) -> bool:
        """Whether a measured value meets the limit."""
        return OPERATORS[self.op](seen, self.limit)


def parse_steady(text: str) -> SteadyRule:
    """Read one check. Raises ClauseError (a ValueError) that says which word is wrong."""
    match = _CHECK.fullmatch(text)
    if match is None:
        raise ClauseError(f"cannot read {text!r}: write {EXAMPLE}")
    name, op = match["name"], match["op"]
    if name not in MEASURES:
        near = nearest(name, MEASURES)
        also = f"; did you mean {near!r}?" if near else f"; use one of {', '.join(MEASURES)}"
        raise ClauseError(f"unknown measure {name!r}{also}", name)
    if op not in OPERATORS:
        raise ClauseError(f"unknown comparison {op!r}; use one of {', '.join(OPERATORS)}", op)
    if (name == "step_time_cv") != (match["over"] is not None):
        wanted = "needs" if name == "step_time_cv" else "takes no"
        raise ClauseError(f"{name} {wanted} 'over n steps'", name)
    over = int(match["over"]) if match["over"] else None
    if over is not None and not 2 <= over <= MAX_WINDOW:
        raise ClauseError(f"over takes 2 to {MAX_WINDOW} steps", match["over"])
    within_s = parse_duration(match["within"]) if match["within"] else None
    if name == "step_time_cv" and within_s is not None:
        raise ClauseError(
            "step_time_cv is judged just before the first fault, and takes no 'within'", "within"
        )
    return SteadyRule(
        name=name,
        op=op,
        limit=float(match["limit"]),
        over=over,
        within_s=within_s,
        text=text.strip(),
    )
