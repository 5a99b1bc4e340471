"""Hides a healthy rank's heartbeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from trainchaos.chaos.fault.targets import RankTarget


class HeartbeatDrop(Fault):
    """The supervisor no longer sees a rank's progress marks while the rank keeps training: a false
    positive. Emulated.

    The rank writes its progress to private memory instead of the page it shares with the
    supervisor. The supervisor then wrongly declares it hung; the rank must be fenced and commit
    nothing more. Landed: the supervisor declared the rank hung although the rank's own log shows
    that it kept committing steps.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    seems_still: ClassVar[bool] = True

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Hide the progress marks."""
        target.signs.drop_heartbeat(True)
        return {"marks": "hidden"}

    def heal(self, target: RankTarget) -> None:
        """Show the progress marks again."""
        target.signs.drop_heartbeat(False)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The declared hang, and how many steps the rank committed between the injection and the
        declaration.
        """
        declared = [
            e
            for e in events
            if e.kind is Kind.FAILURE_DETECTED
            and e.data["process"] == occurrence.process
            and e.data["cause"] == "hang"
            and e.time_ns > occurrence.time_ns
        ]
        if not declared:
            return None
        until_ns = declared[0].time_ns
        own = [
            e
            for e in events
            if e.actor == occurrence.process and occurrence.time_ns < e.time_ns < until_ns
        ]
        steps = sum(e.kind is Kind.STEP_COMMITTED for e in own)
        if not steps:
            return None
        evidence = {"declared": declared[0].data["detail"], "steps_committed_meanwhile": steps}
        return Landed(witness="rank: its own log", evidence=evidence)
