"""What a cell's arms say about similar jobs: how many survive, how often a healthy process is
suspected, and the cost of idle spares. All are rates of few events, so each has a bound: none in
three minutes does not mean never.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.measure.measure import ArmMeasures
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.results import FalseAlarms, Spares, Survival

OWN_END = ("exit", "error", "notice")
"""Causes by which a process announces its own end, as opposed to a detector's suspicion."""
_ROUNDS = 200
_EXACT_COMB = 1000
"""Beyond it a binomial coefficient may be no float; logarithms are exact to 1e-11 then."""


def clopper_pearson(k: int, n: int, level: float = 0.05) -> tuple[float, float]:
    """Exact two-sided interval of a probability after k of n, wrong in at most ``level`` (Clopper
    and Pearson 1934): from the p at which k or more are seen with level / 2 to the one at which k
    or fewer are.
    """
    low = 0.0 if k == 0 else _root(lambda p: _at_least(k, n, p) - level / 2)
    high = 1.0 if k == n else _root(lambda p: level / 2 - (1.0 - _at_least(k + 1, n, p)))
    return low, high


def poisson_upper(k: int, level: float = 0.05) -> float:
    """The largest mean that is compatible with ``k`` observed events: the one at which k or fewer
    are seen with probability ``level`` (Garwood 1936). 3.0 for none: the rule of three.
    """
    high = k + 10.0 * math.sqrt(k + 1) + 10.0
    return high * _root(lambda share: level - _poisson_at_most(k, high * share))


def survival(arms: Sequence[ArmMeasures]) -> Survival:
    """How many faulted arms in which every fault landed survived: completed, with every incident
    masked or recovered (degraded included). Arms cut short by their harness are not counted.
    """
    judged = [
        one
        for one in arms
        if not one.history.cut_short
        and one.incidents
        and all(incident.landed for incident in one.incidents)
    ]
    well = ("masked", "recovered", "degraded")
    kept = sum(
        one.history.outcome == "completed"
        and all(incident.outcome in well for incident in one.incidents)
        for one in judged
    )
    low, high = clopper_pearson(kept, len(judged)) if judged else (0.0, 1.0)
    return Survival(
        arms=len(judged),
        survived=kept,
        probability=kept / len(judged) if judged else None,
        low=low,
        high=high,
    )


def false_alarms(controls: Sequence[History], faulted: Sequence[History]) -> FalseAlarms:
    """Failures declared while no fault had acted, except by a process's own exit, error or notice,
    per rank-hour. All time of control arms counts, and of faulted arms the time before the first
    injection. Below three rank-hours, reports state no rate but an upper bound.
    """
    count, hours = 0, 0.0
    for history in (*controls, *faulted):
        until = min(
            (e.time_ns for e in history.log.of(Kind.FAULT_INJECTED)), default=history.end_ns
        )
        hours += history.info.ranks * max(0, until - history.start_ns) / NS / 3600
        count += sum(_suspicion(event) and event.time_ns < until for event in _failures(history))
    upper = poisson_upper(count)
    return FalseAlarms(
        count=count,
        rank_hours=hours,
        rate=count / hours if hours else None,
        upper=upper / hours if hours else None,
    )


def spares_of(histories: Sequence[History]) -> Spares:
    """Cost of idle spares: spares x wall time, as rank-hours and as a share of everything
    provisioned; peak resident memory and processor time of spares that never trained, as they
    reported when they ended in good order.
    """
    provisioned = max((history.info.spares for history in histories), default=0)
    idle = sum(history.info.spares * history.wall_s for history in histories) / 3600
    whole = sum((h.info.spares + h.info.ranks) * h.wall_s for h in histories) / 3600
    memory, rates = [], []
    for history in histories:
        started = {
            e.data["process"]: e for e in history.log.of(Kind.PROCESS_SPAWNED) if _is_spare(e)
        }
        trained = {name for generation in history.generations for name in generation.members}
        for name in started.keys() - trained:
            if (end := _usage(history, name)) is not None:
                memory.append(float(end.data["peak_rss_bytes"]) / 2**20)
                life_s = (end.time_ns - started[name].time_ns) / NS
                rates.append(float(end.data["cpu_s"]) / life_s if life_s > 0 else 0.0)
    return Spares(
        provisioned=provisioned,
        idle_rank_hours=idle,
        share=idle / whole if whole else 0.0,
        measured=len(memory),
        memory_mib=statistics.median(memory) if memory else None,
        cores=statistics.median(rates) if rates else None,
    )


def _failures(history: History) -> list[Event]:
    return list(history.log.of(Kind.FAILURE_DETECTED))


def _suspicion(event: Event) -> bool:
    return event.data["cause"] not in OWN_END


def _is_spare(event: Event) -> bool:
    return bool(event.data["role"] == "spare")


def _usage(history: History, process: str) -> Event | None:
    log = history.log.actors.get(process)
    last = log.events[-1] if log is not None and log.events else None
    known = last is not None and last.kind is Kind.ACTOR_ENDED and "peak_rss_bytes" in last.data
    return last if known else None


def _at_least(k: int, n: int, p: float) -> float:
    if n <= _EXACT_COMB:
        return math.fsum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k, n + 1))
    if not 0 < p < 1:
        return float(p >= 1 or k <= 0)
    log_p, log_q, whole = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    return math.fsum(
        math.exp(whole - math.lgamma(j + 1) - math.lgamma(n - j + 1) + j * log_p + (n - j) * log_q)
        for j in range(k, n + 1)
    )


def _poisson_at_most(k: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    return math.fsum(math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(k + 1))


def _root(rises: Callable[[float], float]) -> float:
    """Root of a rising function on [0, 1], by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return (low + high) / 2
