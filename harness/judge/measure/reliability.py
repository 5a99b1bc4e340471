"""What a cell's arms say about similar jobs: how many survive, how often a healthy process is
suspected, and the cost of idle spares. All are rates of few events, so each has a bound: none in
three minutes does not mean never.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.stats import clopper_pearson, poisson_upper
from trainchaos.harness.judge.measure.measure import ArmMeasures
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.results import FalseAlarms, Spares, Survival

OWN_END = ("exit", "error", "notice")
"""Causes by which a process announces its own end, as opposed to a detector's suspicion."""


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
        hit_ns = history.first_hit_ns
        until = history.end_ns if hit_ns is None else hit_ns
        hours += history.info.ranks * max(0, until - history.start_ns) / NS / 3600
        count += sum(
            event.data["cause"] not in OWN_END and event.time_ns < until
            for event in history.log.of(Kind.FAILURE_DETECTED)
        )
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
            event.data["process"]: event
            for event in history.log.of(Kind.PROCESS_SPAWNED)
            if event.data["role"] == "spare"
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


def _usage(history: History, process: str) -> Event | None:
    log = history.log.actors.get(process)
    last = log.events[-1] if log is not None and log.events else None
    known = last is not None and last.kind is Kind.ACTOR_ENDED and "peak_rss_bytes" in last.data
    return last if known else None
