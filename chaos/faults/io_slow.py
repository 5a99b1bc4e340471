"""Slows down checkpoint writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from trainchaos.chaos.fault.targets import DiskTrouble, RankTarget

OPERATIONS = ("write", "fsync", "rename")


class IoSlow(Fault):
    """Every write, sync and rename of the rank's checkpoint saves takes longer: a busy file server.
    Emulated by sleeping.

    Target a rank that saves: rank 0, for which all others wait, or with a sharded checkpoint any
    rank that writes a part, for which rank 0 waits. ``delay_s``: added to each operation; a small
    save has about nine. An operation longer than the hang timeout of a save counts as a hang of
    that rank. Landed: the job's own save time grew by at least the delay of three operations, or
    the supervisor declared that rank hung while it saved.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True
    on_saves: ClassVar[bool] = True

    delay_s: float = Field(gt=0, le=60)

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Slow the disk down."""
        target.set_disk(DiskTrouble(delay_s=self.delay_s, operations=OPERATIONS))
        return {"delay_s": self.delay_s}

    def heal(self, target: RankTarget) -> None:
        """Full speed again."""
        target.set_disk(None)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Compares the first save under the fault with those before; or a hang declared during a
        save.
        """
        saves = [e for e in events if _is_saved(e) and e.actor == occurrence.process]
        before = [float(e.data["seconds"]) for e in saves if e.time_ns < occurrence.time_ns]
        # A save that began before the fault is only partly slowed down.
        for event in (e for e in saves if e.time_ns > occurrence.time_ns):
            seconds = float(event.data["seconds"])
            if seconds >= min(before, default=0.0) + 3 * self.delay_s:
                evidence = {
                    "save_s": seconds,
                    "before_s": min(before, default=None),
                    "delay_s": self.delay_s,
                }
                return Landed(witness="job: timing of saves", evidence=evidence)
        for event in events:
            hung = event.kind is Kind.FAILURE_DETECTED and event.data["cause"] == "hang"
            mine = (
                hung
                and event.data["process"] == occurrence.process
                and event.time_ns > occurrence.time_ns
            )
            if mine and " in checkpoint of step " in event.data["detail"]:
                seen = {"detail": event.data["detail"]}
                return Landed(witness="supervisor: a rank that hangs", evidence=seen)
        return None


def _is_saved(event: Event) -> bool:
    """A checkpoint that was saved, or a part of one."""
    part = event.kind is Kind.CHECKPOINT_PART and event.data["state"] == "written"
    return part or event.kind is Kind.CHECKPOINT_COMMITTED
