"""Measures one trial of a comparison: a faulted arm and its control."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from trainchaos.chaos.events.log import Log
from trainchaos.harness.compare.result.model import Trial
from trainchaos.harness.compare.result.outcome import FOR_EVER, JudgedTrial, completed, judged
from trainchaos.harness.judge.measure.measure import ArmMeasures, goodput_of, measure
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.lineage import history_of

MOST_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class TrialSource:
    """A faulted arm with the logs it is compared with. ``ideal``: log whose fault-free steps are
    the reference for goodput; ``beside``: provisioned processes besides the ranks;
    ``contradictions``: why its record is not credible; ``against``: notes on the records it is
    compared with (``harness.compare.result.believed``).
    """

    label: str
    family: str
    seed: int
    log: Log
    control: Log | None
    ideal: Log | None
    run: str
    control_run: str
    verdict: str
    reproduce: str
    beside: int = 0
    contradictions: Sequence[str] = ()
    against: Sequence[str] = ()

    @property
    def named(self) -> dict[str, Any]:
        """What it is, and where, as ``Trial`` has it."""
        names = ("label", "family", "seed", "verdict", "run", "control_run", "reproduce")
        return {name: getattr(self, name) for name in names}


def trial_of(source: TrialSource) -> Trial:
    """One pair of arms, measured and judged; a record that is not credible gives no values."""
    if source.contradictions:
        info = history_of(source.log).info
        ranks = info.ranks + info.spares + source.beside
        witness = "; ".join(source.contradictions)
        return Trial(**source.named, outcome="refuted", witness=witness, ranks=ranks)
    ideal, control = _usable(source.ideal), _usable(source.control)
    measures = measure(source.log, ideal)
    against = history_of(control) if control else None
    own = measure(control, ideal) if control else None
    result = judged(measures, against)
    notes = [result.note, *source.against]
    if source.control is not None and (against is None or not completed(against)):
        notes.append("its control did not get to its end either: see control_run")
    history = measures.history
    info = history.info
    provisioned = info.ranks + info.spares + source.beside
    share = (info.ranks + info.spares) / provisioned
    worthless = result.outcome == "committed bad values"
    seen = {f.name: getattr(result, f.name) for f in fields(result) if f.name != "note"}
    return Trial(
        **source.named,
        **seen,
        goodput=0.0 if worthless else _goodput(measures, share),
        ettr=0.0 if worthless else _ettr(measures),
        control_goodput=_goodput(own, share) if own else None,
        badput=_badput(measures, share),
        step_time=own.step_time if own else None,
        wall=history.wall_s,
        ranks=provisioned,
        note="; ".join(filter(None, notes)),
        losses=losses_of(history),
        control_losses=losses_of(against) if against else (),
        **_until_whole(source.log, measures, ideal, control, result),
    )


def _until_whole(
    log: Log, measures: ArmMeasures, ideal: Log | None, control: Log | None, result: JudgedTrial
) -> dict[str, float | None]:
    """Times until the job had its full rate and its redundancy back; for several faults the
    slowest.

    If no failure was seen, a window of steps may begin before the standstill, so the rate is not
    full before the first new step.
    """
    if result.outcome == "not landed":
        return {}
    if result.outcome in FOR_EVER:
        return {"full_rate": math.inf, "redundancy": math.inf}
    # Compared with the own control: a stack with overhead would never reach the bare stack's rate.
    own = measures if ideal is control else measure(log, control)
    full = [one.time_to_full_rate for one in own.incidents if one.time_to_full_rate is not None]
    whole = [one.time_to_redundancy for one in own.incidents if one.time_to_redundancy is not None]
    if full and result.recovery is not None:
        full.append(result.recovery)
    return {"full_rate": max(full, default=None), "redundancy": max(whole, default=None)}


def _usable(log: Log | None) -> Log | None:
    """The log, if it committed a step; a control without one cannot be compared with."""
    return log if log is not None and history_of(log).committed_step else None


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


def _badput(measures: ArmMeasures, share: float) -> dict[str, float]:
    badput = {name: seconds * share for name, seconds in measures.partition.badput.items()}
    badput["spare_idle"] = badput.get("spare_idle", 0.0) + measures.partition.wall_s * (1 - share)
    return {name: seconds for name, seconds in badput.items() if seconds > 0}


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
    return tuple(
        point
        for index, point in enumerate(points)
        if index % every == 0 or index == len(points) - 1
    )
