"""What a fault injector may see and touch of an arm: its scene, and the handles it gives to faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from chaos.events import Event, Kind
from harness.launcher import ArmSetup
from recovery import checkpoints
from recovery.wire import Message


class Scene(Protocol):
    """What the injector may see and do; the orchestrator of the arm."""

    setup: ArmSetup

    def now_ns(self) -> int:
        """Clock of the arm."""

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event of the orchestrator."""

    def send(self, process: str, message: Message) -> bool:
        """Send to a rank."""

    def signal(self, process: str, signum: int) -> None:
        """Signal a process of the run."""

    def os_state(self, process: str) -> str:
        """The kernel's word on it."""

    def process_of(self, rank: int) -> str | None:
        """Who holds a rank now."""

    def spare(self, index: int) -> str | None:
        """Who waits as spare number ``index``."""

    def ledger(self, **record: Any) -> None:
        """Write an undo record to the disk."""


@dataclass(frozen=True)
class ProcessHandle:
    """One process, for a fault that acts from outside; see chaos.fault.ProcessTarget."""

    scene: Scene
    process: str

    def signal(self, signum: int) -> None:
        """Send a signal."""
        self.scene.signal(self.process, signum)

    def state(self) -> str:
        """The kernel's word on it."""
        return self.scene.os_state(self.process)


@dataclass(frozen=True)
class CheckpointHandle:
    """One committed checkpoint; see chaos.fault.CheckpointTarget."""

    checkpoint: checkpoints.Checkpoint
    older_checkpoint: checkpoints.Checkpoint | None

    @property
    def path(self) -> Any:
        """Its directory."""
        return self.checkpoint.path

    @property
    def older(self) -> Any:
        """Directory of the next older one, if any."""
        return self.older_checkpoint.path if self.older_checkpoint else None

    def verify(self) -> str | None:
        """The verifier's complaint, or None."""
        try:
            checkpoints.verify(self.checkpoint)
        except checkpoints.CorruptCheckpoint as error:
            return str(error)
        return None
