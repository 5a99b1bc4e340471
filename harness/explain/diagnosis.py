"""What a diagnosis says of one incident: of what it failed, who, whose it is and what to do."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainchaos.recovery.playbook.entry import Action


class CauseClass(StrEnum):
    """What happened, as a closed list over the catalogue of faults."""

    PROCESS_DEATH = "process-death"  # a process ended, and nothing says more
    CODE = "code"  # the program's own error: an exception, a crash in native code
    NODE_LOSS = "node-loss"  # a node with all its processes
    HANG = "hang"  # a process stands still
    FALSE_ALARM = "false-alarm"  # declared failed though it works
    SLOWNESS = "slowness"  # computes slowly
    LINK = "link"  # connections between ranks: slow, lossy, down
    STORAGE = "storage"  # checkpoints: disk, file server, damaged files
    DATA = "data"  # samples: late, or bad
    NONFINITE = "nonfinite"  # a value that is no number
    SILENT_CORRUPTION = "silent-corruption"  # wrong values that look right
    MEMORY = "memory"  # out of it, on the device or the host
    DEVICE = "device"
    PREEMPTION = "preemption"  # told to end
    COORDINATOR = "coordinator"  # the supervisor, or the key-value store
    CLOCK = "clock"  # a wall clock that is wrong


class Layer(StrEnum):
    """Whose it is."""

    APPLICATION = "application"
    SYSTEM = "system"
    HARDWARE = "hardware"
    NETWORK = "network"
    STORAGE = "storage"


class DiagnosedIncident(BaseModel):
    """One incident. ``at_s``: seconds since the run began (its ``run_started``); ``rank``: at that
    time; ``node``: its number, where a whole node is meant; neither: nobody is to blame.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_s: float = Field(ge=0, allow_inf_nan=False)
    cause: CauseClass
    rank: Annotated[int, Field(ge=0)] | None = None
    node: Annotated[int, Field(ge=0)] | None = None
    layer: Layer
    action: Action
    why: str = ""

    @model_validator(mode="after")
    def _one_place(self) -> DiagnosedIncident:
        if self.rank is not None and self.node is not None:
            raise ValueError("give a rank or a node, not both")
        return self
