"""Times in steps of the control arm, for SLAs that mean the same on any machine.

A step is T of the arm's own paired control arm (same cell, same repeat): the median of its steps in
a full world, without checkpoint stalls, evaluations and the first step of a generation
(``harness.judge.measure.partition.ideal_of``). Each value is divided by the step of its own repeat
before anything is aggregated: on a machine whose speed changes between repeats, the step of another
repeat, or the cell's median, would say that a recovery got slower where only the machine did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.units import enclosing, number, with_unit


@dataclass(frozen=True, kw_only=True)
class InSteps:
    """``values``: in steps, with ``arms``, the repeat of each; ``step_s``: seconds of a step in
    each of ``arms``, None where there is none, and the value infinite. ``uncounted``: repeats with
    a time that there is no step for.
    """

    values: list[float]
    arms: list[int]
    step_s: list[float | None]
    uncounted: list[int]


def in_steps(values: Sequence[float], arms: Sequence[int], steps: Mapping[int, float]) -> InSteps:
    """Times as multiples of a step. ``arms``: the repeat of each; ``steps``: repeat -> seconds of a
    step of its control arm, of those that have one. What never ended is infinite in any unit.
    """
    found = InSteps(values=[], arms=[], step_s=[], uncounted=[])
    for value, arm in zip(values, arms, strict=True):
        step_s = steps.get(arm)
        if step_s is None and math.isfinite(value):
            found.uncounted.append(arm)
            continue
        found.values.append(value / step_s if step_s is not None else value)
        found.arms.append(arm)
        found.step_s.append(step_s)
    return found


def error_in_steps(seconds: float, step_s: Sequence[float | None]) -> float:
    """The largest error of values in steps whose seconds may be wrong by so much. The step's own is
    none: both ends of it are read from the clocks of the same ranks.
    """
    return seconds / min((one for one in step_s if one is not None), default=math.inf)


def beside(observed_s: float | None, step_s: Sequence[float | None], better: str) -> str:
    """What is said beside a number of steps: `` (0.331 s, a step of 0.0295 s)``; "" without
    steps.
    """
    known = sorted(one for one in step_s if one is not None)
    if not known:
        return ""
    between = f"a step of {with_unit(known[0], 's')}"
    if number(known[0]) != number(known[-1]):
        between = "steps of {} to {} s".format(*enclosing(known[0], known[-1]))
    ended = observed_s is not None and math.isfinite(observed_s)
    return f" ({with_unit(observed_s, 's', better)}, {between})" if ended else f" ({between})"
