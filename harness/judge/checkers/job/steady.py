"""Whether the job was in steady state before the first fault; if not, the run proves nothing."""

from __future__ import annotations

import statistics

from trainchaos.chaos.scenario.steady import SteadyRule, parse_steady
from trainchaos.harness.judge.evidence.evidence import Evidence, some, verdict_of
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.results import Finding


def steady_state(evidence: Evidence) -> Finding:
    """Every check of ``steady_state`` held before the first fault was injected."""
    history = evidence.history
    until_ns = history.end_ns if history.first_hit_ns is None else history.first_hit_ns
    held, missing = [], []
    for check in evidence.cell.scenario.steady_state:
        rule = parse_steady(check.check)
        seen = _seen(rule, history, until_ns)
        if seen is not None and rule.holds(seen):
            held.append(f"{rule.text}: {seen:.3g}")
        else:
            value = "there was nothing to measure it by" if seen is None else f"it was {seen:.3g}"
            missing.append(f"never reached before the first fault: {rule.text} ({value})")
    return verdict_of([], some(held), missing)


def _seen(rule: SteadyRule, history: History, until_ns: int) -> float | None:
    ready = [g for g in history.generations if g.ready_ns is not None and g.ready_ns <= until_ns]
    if not ready:
        return None
    began_ns = min(g.ready_ns or 0 for g in ready)
    if rule.within_s is not None:
        until_ns = min(until_ns, began_ns + int(rule.within_s * NS))
    runs = [
        run for run in history.runs if run.committed_ns is not None and run.committed_ns <= until_ns
    ]
    if rule.name == "committed_steps":
        return float(len({run.step for run in runs}))
    if rule.name == "healthy_replicas":
        newest = max(ready, key=lambda g: g.number)
        return float(newest.world // newest.shards)
    times = [run.seconds for run in sorted(runs, key=lambda run: run.end_ns)][-(rule.over or 0) :]
    if len(times) < (rule.over or 0) or statistics.fmean(times) <= 0:
        return None
    return statistics.pstdev(times) / statistics.fmean(times)
