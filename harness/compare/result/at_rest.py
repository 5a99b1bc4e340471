"""Idle spares and false alarms of a stack while no fault acts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from trainchaos.harness.compare.result.model import FaultFreeSummary
from trainchaos.harness.judge.measure.reliability import false_alarms
from trainchaos.harness.judge.record.history import History


def at_rest(
    label: str, controls: Sequence[History], faulted: Sequence[History], beside: int
) -> FaultFreeSummary | None:
    """Facts from all arms of a stack. ``beside``: provisioned processes besides the ranks. None: no
    arm can be read.
    """
    known = [*controls, *faulted]
    if not known:
        return None
    ranks = max(history.info.ranks for history in known)
    spares = max(history.info.spares for history in known) + beside
    return FaultFreeSummary(
        label=label,
        ranks=ranks,
        spares=spares,
        share=spares / (ranks + spares),
        false_alarms=false_alarms(controls, faulted),
    )
