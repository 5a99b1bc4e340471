"""What a fault is: a plugin that acts on a target, and says from whose evidence it is known to have landed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from chaos.events import Event


class Where(StrEnum):
    """Who carries the act out."""

    PROCESS = "process"  # the supervisor, on a process from outside
    RANK = "rank"  # an agent inside the rank, at a step and phase boundary
    CHECKPOINT = "checkpoint"  # the supervisor, on files of the run's own checkpoints


class Fidelity(StrEnum):
    """Whether the real mechanism acts, or something that imitates its effect (reports say which)."""

    REAL = "real"
    EMULATED = "emulated"


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """One firing of one planned fault, with its target resolved. ``time_ns``: just before the act, monotonic."""

    fault: str
    number: int
    process: str | None = None
    rank: int | None = None
    checkpoint: str | None = None
    step: int | None = None
    time_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Landed:
    """Independent evidence that a fault took effect."""

    witness: str
    evidence: Mapping[str, Any]


class ProcessTarget(Protocol):
    """What a PROCESS fault may touch: one child of this run."""

    def signal(self, signum: int) -> None:
        """Send a signal through the held pidfd; a process already gone is no error."""

    def state(self) -> str:
        """The kernel's word on it: R, S, D, T (stopped), Z, or X when gone."""


class CheckpointTarget(Protocol):
    """What a CHECKPOINT fault may touch."""

    @property
    def path(self) -> Path:
        """Its directory."""

    @property
    def older(self) -> Path | None:
        """The directory of the committed checkpoint before it."""

    def verify(self) -> str | None:
        """The verifier's complaint about the checkpoint, or None when it is good."""


class RankTarget(Protocol):
    """What a RANK fault may touch: the training objects and the communication path of its own rank."""

    model: Any
    optimizer: Any
    rank: int
    step: int
    seed: int

    def set_link(self, bytes_per_s: float | None, latency_s: float) -> None:
        """Limit the communication path of this rank (None: unlimited)."""

    def set_slowdown(self, factor: float) -> None:
        """Stretch this rank's compute phases to ``factor`` times their length (1: not at all)."""

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        """Have ``change`` applied to this rank's loss tensor of the current step before backward."""


class Fault(BaseModel):
    """Base of a fault kind; its fields are the YAML ``params``. Class attributes say how it acts.

    ``lasting``: needs a duration and a heal; ``may_last``: takes a duration; otherwise it is over when done.
    ``harmless``: leaves nothing to recover from. ``phases``: the phases at which it can act (empty: all).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: ClassVar[Where]
    fidelity: ClassVar[Fidelity] = Fidelity.REAL
    lasting: ClassVar[bool] = False
    may_last: ClassVar[bool] = False
    harmless: ClassVar[bool] = False
    phases: ClassVar[tuple[str, ...]] = ()

    def act_on_process(self, target: ProcessTarget) -> None:
        """Act from outside. Only for ``Where.PROCESS``."""
        raise TypeError(f"{type(self).__name__} does not act on processes")

    def heal_process(self, target: ProcessTarget) -> None:
        """Undo ``act_on_process``; safe to call twice and on a dead process."""

    def act_in_rank(self, target: RankTarget) -> Mapping[str, Any]:
        """Act inside the rank, and return what was done, for the log. Only for ``Where.RANK``."""
        raise TypeError(f"{type(self).__name__} does not act in ranks")

    def heal_in_rank(self, target: RankTarget) -> None:
        """Undo ``act_in_rank``; safe to call twice."""

    def act_on_checkpoint(self, target: CheckpointTarget, seed: int) -> Mapping[str, Any]:
        """Act on a committed checkpoint's files. Only for ``Where.CHECKPOINT``."""
        raise TypeError(f"{type(self).__name__} does not act on checkpoints")

    def point(self, phase: str) -> str:
        """The phase at which this fault, with its parameters, acts when asked to act at ``phase``."""
        return phase

    @abstractmethod
    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Evidence from a witness other than the injector; None: not yet.

        Pure. ``events``: those of the orchestrator since the injection, then all of the target process.
        """
