"""A rank hangs, in one of the ways in which ranks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from chaos.beacon import HANG_LIMIT_S
from chaos.events.log import Event
from chaos.fault.base import Fidelity, Landed, Need, Occurrence
from chaos.fault.hold import HoldsTraining
from chaos.fault.targets import RankTarget
from chaos.fault.witness import hung_by_script


class RankHang(HoldsTraining):
    """The training thread of a rank does not go on: asleep in a lock that is never released (a
    deadlock), in an endless loop on the host, or waiting for a GPU kernel that does not end.

    ``how``: ``sleep`` waits in a lock, with the interpreter's lock released (real); ``spin`` runs
    Python code (real); ``kernel`` waits for kernels that spin, each for at most a second (real on
    CUDA); on CPU it is emulated by C code that uses a processor and has released the interpreter's
    lock, which is how CUDA waits by default. ``hold_s``: seconds until it goes on; nothing ends it
    before, except the end of the process. A process that is stopped, the fourth way to hang, is
    ``process-stop``. Landed: the supervisor saw the rank's progress marks stand still, or the
    rank's own account shows a step that long; in a script with points of its own: the script's
    word, and the kernel's account of its main thread, which used a processor meanwhile, or none.
    """

    by_script: ClassVar[str] = "hang"

    how: Literal["sleep", "spin", "kernel"] = "sleep"
    hold_s: float = Field(default=60.0, gt=0, le=HANG_LIMIT_S, description="seconds it hangs")

    def acts(self, *, cuda: bool, real: frozenset[Need] = frozenset()) -> Fidelity:
        """Only a kernel needs a device to be real."""
        return Fidelity.EMULATED if self.how == "kernel" and not cuda else Fidelity.REAL

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Hang."""
        return {"hung_s": self.hold_s, "how": target.body.hang(self.how, self.hold_s)}

    def for_script(self, step: int) -> str:
        """How, and for how long."""
        return f"{self.how} {self.hold_s:g}"

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """A hang blamed on the rank, or a step as long; of a script, what the kernel saw after its
        word.
        """
        if said := hung_by_script(occurrence, events, self.by_script, busy=self.how != "sleep"):
            return Landed(witness="kernel: processor time", evidence=said)
        return super().landed(occurrence, events)
