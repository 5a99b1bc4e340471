"""Hangs a rank's training thread, in one of three ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.beacon import HANG_LIMIT_S
from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fidelity, Landed, Need, Occurrence
from trainchaos.chaos.fault.hold import HoldsTraining
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import hung_by_script


class RankHang(HoldsTraining):
    """A rank's training thread hangs: asleep in a lock that is never released (a deadlock), in an
    endless loop on the host, or waiting for a GPU kernel that does not end.

    ``how``: ``sleep`` waits in a lock with the GIL released (real); ``spin`` runs Python code
    (real); ``kernel`` waits for kernels that spin, each for at most a second (real on CUDA); on CPU
    it is emulated by C code that uses a processor with the GIL released, which is how CUDA waits by
    default. ``hold_s``: seconds until the thread continues; only the end of the process ends the
    hang earlier. For a stopped process, the fourth way to hang, see ``process-stop``. Landed: the
    supervisor saw the rank's progress marks stand still, or the rank itself reported a step that
    long; in a script that calls ``beacon.point``: the script reports the hang, and the
    kernel's account shows that its main thread used a processor meanwhile (``spin``, ``kernel``) or
    did not (``sleep``).
    """

    by_script: ClassVar[str] = "hang"

    how: Literal["sleep", "spin", "kernel"] = "sleep"
    hold_s: float = Field(default=60.0, gt=0, le=HANG_LIMIT_S, description="seconds it hangs")

    def acts(self, *, cuda: bool, real: frozenset[Need] = frozenset()) -> Fidelity:
        """``kernel`` is real only on a CUDA device."""
        return Fidelity.EMULATED if self.how == "kernel" and not cuda else Fidelity.REAL

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Hang."""
        return {"hung_s": self.hold_s, "how": target.body.hang(self.how, self.hold_s)}

    def for_script(self, step: int) -> str:
        """The way to hang, and for how many seconds."""
        return f"{self.how} {self.hold_s:g}"

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """A declared hang that blames the rank, or a step that long; for a script, the kernel's
        account after the script reported the hang.
        """
        if said := hung_by_script(occurrence, events, self.by_script, busy=self.how != "sleep"):
            return Landed(witness="kernel: processor time", evidence=said)
        return super().landed(occurrence, events)
