"""Measures one trial of a comparison: a faulted arm and its control."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainchaos.chaos.events.log import Log
from trainchaos.harness.compare.result.model import FOR_EVER, Trial
from trainchaos.harness.compare.result.outcome import completed, judged
from trainchaos.harness.judge.measure.measure import ArmMeasures, goodput_of, measure
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.lineage import history_of

MOST_POINTS = 200


def trial_of(
    log: Log,
    control: Log | None,
    ideal: Log | None = None,
    *,
    beside: int = 0,
    contradictions: Sequence[str] = (),
    against: Sequence[str] = (),
    **named: Any,
) -> Trial:
    """One pair of arms, measured and judged; a record that is not credible gives no values.

    ``ideal``: log whose fault-free steps are the reference for goodput, None: the control's;
    ``beside``: provisioned processes besides the ranks; ``contradictions``: why the record is not
    credible, ``against``: notes on those it is compared with
    (``harness.compare.result.records.ArmRecord``); ``named``: what it is and where, as in
    ``Trial``.
    """
    info = history_of(log).info
    provisioned = info.ranks + info.spares + beside
    if contradictions:
        witness = "; ".join(contradictions)
        return Trial(**named, outcome="refuted", witness=witness, ranks=provisioned)
    # one that committed no step cannot be compared with
    kept = control if control and history_of(control).committed_step else None
    ideal = ideal if ideal and history_of(ideal).committed_step else kept
    measures = measure(log, ideal)
    other = history_of(kept) if kept else None
    own = measure(kept, ideal) if kept else None
    seen = judged(measures, other)
    notes = [seen.pop("note", ""), *against]
    if control is not None and (other is None or not completed(other)):
        notes.append("its control did not get to its end either: see control_run")
    share = (info.ranks + info.spares) / provisioned
    worthless = seen["outcome"] == "committed bad values"
    partition = measures.partition
    lost = {name: seconds * share for name, seconds in partition.badput.items()}
    lost["spare_idle"] = lost.get("spare_idle", 0.0) + partition.wall_s * (1 - share)
    return Trial(
        **named,
        **seen,
        goodput=0.0 if worthless else _goodput(measures, share),
        ettr=0.0 if worthless else _ettr(measures),
        control_goodput=_goodput(own, share) if own else None,
        badput={name: seconds for name, seconds in lost.items() if seconds > 0},
        step_time=own.step_time if own else None,
        wall=measures.history.wall_s,
        ranks=provisioned,
        note="; ".join(filter(None, notes)),
        losses=losses_of(measures.history),
        control_losses=losses_of(other) if other else (),
        # against the own control: a stack with overhead would never reach the bare stack's rate
        **_until_whole(measures if ideal is kept else measure(log, kept), seen),
    )


def _until_whole(measures: ArmMeasures, seen: dict[str, Any]) -> dict[str, float | None]:
    """Times until the job had its full rate and its redundancy back; for several faults the
    slowest.

    If no failure was seen, a window of steps may begin before the standstill, so the rate is not
    full before the first new step.
    """
    if seen["outcome"] == "not landed":
        return {}
    if seen["outcome"] in FOR_EVER:
        return {"full_rate": math.inf, "redundancy": math.inf}
    known = measures.incidents
    full = [one.time_to_full_rate for one in known if one.time_to_full_rate is not None]
    whole = [one.time_to_redundancy for one in known if one.time_to_redundancy is not None]
    if full and seen["recovery"] is not None:
        full.append(seen["recovery"])
    return {"full_rate": max(full, default=None), "redundancy": max(whole, default=None)}


def _goodput(measures: ArmMeasures, share: float) -> float | None:
    """``share``: of the ranks among all provisioned processes. A job that did not finish has
    goodput 0.
    """
    if measures.ideal is None or measures.history.cut_short:
        return None
    if not completed(measures.history):
        return 0.0
    return goodput_of(measures.history, measures.partition) * share


def _ettr(measures: ArmMeasures) -> float | None:
    """As in a run: without idle ranks and without the ideal step."""
    if measures.history.cut_short:
        return None
    if not completed(measures.history):
        return 0.0
    return measures.partition.productive_s / measures.partition.wall_s


def losses_of(history: History) -> tuple[tuple[int, float], ...]:
    """(step, loss) of the surviving steps, evenly thinned to at most 200, always including the
    last.
    """
    points = [
        (step, float(loss))
        for step, run in history.lineage.items()
        if (loss := run.commits[0].data["loss"]) is not None
    ]
    every = max(1, math.ceil(len(points) / MOST_POINTS))
    last = len(points) - 1
    return tuple(point for at, point in enumerate(points) if at % every == 0 or at == last)
