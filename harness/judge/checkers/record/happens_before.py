"""Whether the record's times are possible: causes before effects, and clocks that agree."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, some, unknown
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.order.causality import disorder, hasty, slips, unmeasured
from trainchaos.harness.judge.order.drift import drifts
from trainchaos.harness.judge.order.slip import SAME_CLOCK_S, Slip, durations
from trainchaos.harness.judge.results import Finding


def happens_before(evidence: Evidence) -> Finding:
    """Causes precede effects, commits are in order, every event is within its process's life, no
    clock drifts, and no duration is negative, all to within the error of the machines' clocks.
    """
    history, measures = evidence.history, evidence.measures
    blur_s = 2 * history.log.clock_bound_s + SAME_CLOCK_S
    spans = {
        f"{one.fault} (occurrence {one.occurrence})": _spans(one) for one in measures.incidents
    }
    negative = durations(spans, blur_s) + _saves(evidence)
    order = slips(history)
    sure = [_in_words(slip) for slip in (*order, *negative) if slip.sure]
    problems = [*drifts(history), *disorder(history), *hasty(history), *sure]
    if problems:
        return failed(some(problems))
    doubtful = [_in_words(slip) for slip in negative if slip.near]
    if doubtful:
        return unknown(
            f"{some(doubtful)}; the clocks are right to within"
            f" {history.log.clock_bound_s * 1e3:.3f} ms"
        )
    lines = (
        f"{len(evidence.log.events)} lines of {len(evidence.log.actors)} actors are in an order"
        " that can be"
    )
    near, blind = sum(slip.near for slip in order), list(unmeasured(history))
    lines += f"; {near} pairs within the error of the clocks" if near else ""
    lines += f"; how long {some(blind)} was silent is not in the log" if blind else ""
    return passed(lines)


def _in_words(slip: Slip) -> str:
    return f"{slip.text} (by {slip.by_s * 1e3:.3f} ms)"


def _spans(incident: Incident) -> Iterator[tuple[str, float]]:
    named = [("detection", incident.detection_time), ("recovery", incident.recovery_time)]
    yield from (
        (name, value) for name, value in named if value is not None and math.isfinite(value)
    )
    yield from ((f"phase {span.name}", span.seconds) for span in incident.phases)


def _saves(evidence: Evidence) -> list[Slip]:
    """Actions with a negative duration."""
    kinds = (Kind.GROUP_FORMED, Kind.STATE_READY, Kind.CHECKPOINT_COMMITTED)
    rows = [
        (f"{e.actor} at seq {e.seq}", float(e.data["seconds"]), e.kind.value)
        for e in evidence.log.of(*kinds)
    ]
    return durations({of: [(what, seconds)] for of, seconds, what in rows if seconds < 0}, 0.0)
