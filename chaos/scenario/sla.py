"""Parses SLA clauses ("median < 2s", "median < 40 steps"), durations ("500ms") and stop conditions.

Pure, standard library only.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.stats import values_to_bound

Aggregate = Callable[[Sequence[float]], float]

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
QUANTILES: Mapping[str, float] = {"p90": 0.90, "p95": 0.95, "p99": 0.99}
AGGREGATES = ("min", "median", "mean", "max", "all", *QUANTILES)

SECONDS: Mapping[str, float] = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
}
STOP_RULES: Mapping[str, str] = {
    "no_committed_step_for": "> 60s",
    "wall_time": "> 300s",
    "healthy_replicas": "< 2",
    "failures": "> 10",
    "loss_nonfinite": "",
}
"""Name -> an example of how its limit is written."""
STEPS = ("steps", "step")
"""Units of a bound on a time that counts steps of the control arm, ``SlaResult.step_s`` long."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_CLAUSE = re.compile(
    rf"\s*(?P<aggregate>\w+)\s*(?P<op>[<>=!]+)\s*(?P<value>{_NUMBER})\s*(?P<unit>[A-Za-zµ/%]*)\s*"
)
_DURATION = re.compile(rf"\s*(?P<value>{_NUMBER})\s*(?P<unit>[A-Za-zµ]*)\s*")
_STOP = re.compile(r"\s*(?P<name>[\w-]+)\s*(?P<op>[<>=!]+)\s*(?P<limit>.+?)\s*")


class ClauseError(ValueError):
    """A clause, duration or stop condition that cannot be read; ``word``: the wrong part,
    or empty.
    """

    def __init__(self, message: str, word: str = "") -> None:
        super().__init__(message)
        self.word = word


@dataclass(frozen=True, kw_only=True)
class Clause:
    """``<aggregate> <op> <limit>``, the limit in ``unit``, the metric's; ``text``: the clause as
    written. ``in_steps``: it bounds a time in steps of the control arm, and ``unit`` is steps.
    """

    aggregate: str
    op: str
    limit: float
    unit: str
    text: str
    in_steps: bool = False


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """Halt the run when ``name op limit`` holds. ``limit``: seconds, or a number of replicas or
    failures.
    """

    name: str
    op: str
    limit: float
    text: str

    @property
    def limit_s(self) -> float:
        """The limit of a rule about time."""
        return self.limit


MOST_LETTERS = 100  # longest word for which a correction is suggested


def nearest(word: str, choices: Sequence[str]) -> str:
    """The choice most like ``word``, or "" when none is near."""
    if len(word) > MOST_LETTERS:
        return ""
    found = difflib.get_close_matches(
        word.lower().replace("_", "-"), [c.replace("_", "-") for c in choices], n=1
    )
    return next((c for c in choices if found and c.replace("_", "-") == found[0]), "")


def parse_clause(text: str, metric_unit: str) -> Clause:
    """Read one SLA clause for a metric measured in ``metric_unit`` (s, ms, ratio, steps, samples or
    count). One in seconds may also be bounded in steps of the control arm: ``median < 40 steps``.

    Raises ClauseError (a ValueError) that says which word is wrong and what would be right.
    """
    match = _CLAUSE.fullmatch(text)
    if match is None:
        raise ClauseError(
            f"cannot read {text!r}: write '<aggregate> <op> <value><unit>', such as 'median < 2s'"
        )
    aggregate, op = match["aggregate"], match["op"]
    if aggregate not in AGGREGATES:
        raise ClauseError(_unknown("aggregate", aggregate, AGGREGATES), aggregate)
    if op not in OPERATORS:
        raise ClauseError(_unknown("comparison", op, tuple(OPERATORS)), op)
    in_steps = metric_unit == "s" and match["unit"] in STEPS
    unit = "steps" if in_steps else metric_unit
    limit = _in_unit(float(match["value"]), match["unit"], unit, also=" or {:g} steps")
    if not math.isfinite(limit):
        raise ClauseError(f"{match['value']} is too large", match["value"])
    return Clause(
        aggregate=aggregate, op=op, limit=limit, unit=unit, text=text.strip(), in_steps=in_steps
    )


def samples_needed(aggregate: str) -> int:
    """Number of values an aggregate needs for 95 % confidence (p90: 29, p95: 59, p99: 299, else 1).

    A distribution-free one-sided bound: the largest of n independent values is above the q-quantile
    with probability 1 - q**n (Wilks 1941, order statistics), so n is the smallest with 1 - q**n >=
    0.95.
    """
    quantile = QUANTILES.get(aggregate)
    return 1 if quantile is None else values_to_bound(quantile)


def evaluate(clause: Clause, values: Sequence[float]) -> tuple[bool, float]:
    """Whether the clause holds, and the aggregate observed.

    Quantiles are order statistics (nearest rank, no interpolation).

    ``all`` observes the worst value for the comparison. Raises ValueError when there are no values.
    """
    if not values:
        raise ValueError(f"no values to judge '{clause.text}' by")
    observed = (
        _all_worst(clause, values)
        if clause.aggregate == "all"
        else _aggregate(clause.aggregate, values)
    )
    return OPERATORS[clause.op](observed, clause.limit), observed


def parse_duration(value: str | float) -> float:
    """Seconds in a number, or in a string with a unit: ``2s``, ``500ms``, ``1m``, ``1.5h``.

    Raises ClauseError (a ValueError) for anything else, negative and non-finite ones included.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ClauseError(f"{value!r} is not a duration: write 2.5 (seconds) or '500ms'")
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None or not match["unit"]:
            raise ClauseError(
                f"{value!r} is not a duration: write a number and a unit, such as 2s, 500ms or 1m",
                value,
            )
        seconds = _in_unit(float(match["value"]), match["unit"], "s")
    else:
        seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0:
        raise ClauseError(f"a duration cannot be {value}", str(value))
    return seconds


def parse_stop(text: str) -> StopRule:
    """Read ``no_committed_step_for > 60s``, ``wall_time > 300s``, ``healthy_replicas < 2``,
    ``failures > 10`` or ``loss_nonfinite``. Raises ClauseError (a ValueError).
    """
    if text.strip() == "loss_nonfinite":
        return StopRule(name="loss_nonfinite", op="", limit=0.0, text="loss_nonfinite")
    match = _STOP.fullmatch(text)
    if match is None:
        bare = text.strip()
        if bare in STOP_RULES:
            raise ClauseError(f"{bare} needs a limit: '{bare} {STOP_RULES[bare]}'", bare)
        if bare.isidentifier():
            raise ClauseError(_unknown("stop condition", bare, tuple(STOP_RULES)), bare)
        raise ClauseError(
            f"cannot read {text!r}: write 'no_committed_step_for > 60s' or 'wall_time > 300s'"
        )
    name, op = match["name"], match["op"]
    if name not in STOP_RULES:
        raise ClauseError(_unknown("stop condition", name, tuple(STOP_RULES)), name)
    due = STOP_RULES[name]
    if not due:
        raise ClauseError(f"{name} stands alone", op)
    if op != due[0]:
        raise ClauseError(f"{name} uses '{due[0]}', not '{op}'", op)
    limit = parse_duration(match["limit"]) if due.endswith("s") else _whole(match["limit"])
    if limit == 0 and (due.endswith("s") or op == "<"):
        raise ClauseError("a stop condition needs a limit above zero", match["limit"])
    return StopRule(name=name, op=op, limit=limit, text=text.strip())


def _whole(text: str) -> float:
    if not text.isdecimal() or len(text) > 9:
        raise ClauseError(f"{text!r} is not a whole number", text)
    return float(text)


def _unknown(what: str, word: str, choices: Sequence[str]) -> str:
    near = nearest(word, choices)
    return f"unknown {what} {word!r}" + (
        f"; did you mean {near!r}?" if near else f"; use one of {', '.join(choices)}"
    )


def _in_unit(value: float, unit: str, metric_unit: str, also: str = "") -> float:
    """``also``: what else than a time may be written."""
    if metric_unit in ("s", "ms"):
        if unit not in SECONDS:
            given = f"{unit!r} is not a unit of time" if unit else f"{value:g} has no unit"
            raise ClauseError(
                f"{given}: use one of {', '.join(SECONDS)}, such as {value:g}s{also.format(value)}",
                unit,
            )
        # times 1000 rather than over 1e-3: 500ms must be exactly 500 in a metric of milliseconds
        return (
            value * SECONDS[unit]
            if metric_unit == "s"
            else value
            if unit == "ms"
            else value * SECONDS[unit] * 1000
        )
    if unit in STEPS and metric_unit != "steps":
        ratio = metric_unit == "ratio"
        what, instead = ("a ratio", "0.80 or 80%") if ratio else (f"in {metric_unit}", f"{value:g}")
        raise ClauseError(
            f"only a time can be bounded in steps, and this metric is {what}: write {instead}", unit
        )
    if metric_unit == "ratio":
        if unit not in ("", "%"):
            raise ClauseError(f"unit {unit!r} does not fit a ratio: write 0.80 or 80%", unit)
        return value / 100 if unit else value
    singular = metric_unit.removesuffix("s")
    if unit not in ("", metric_unit, singular):
        raise ClauseError(
            f"unit {unit!r} does not fit a metric in {metric_unit}: write {value:g}", unit
        )
    return value


def _aggregate(name: str, values: Sequence[float]) -> float:
    if name in QUANTILES:
        ordered = sorted(values)
        return ordered[math.ceil(QUANTILES[name] * len(ordered)) - 1]
    plain: Mapping[str, Aggregate] = {
        "min": min,
        "max": max,
        "mean": statistics.fmean,
        "median": statistics.median,
    }
    return float(plain[name](values))


def _all_worst(clause: Clause, values: Sequence[float]) -> float:
    if clause.op == "==":
        return max(values, key=lambda value: abs(value - clause.limit))
    return max(values) if clause.op.startswith("<") else min(values)
