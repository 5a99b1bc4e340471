"""A diagnosis of runs as a document that any tool can write: who failed, of what, whose it is and
what to do, for each incident. Format version 1, JSON; ``docs/attribution.md`` has an example.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError, NewerVersion
from trainchaos.chaos.files import open_regular
from trainchaos.recovery.playbook.entry import Action

VERSION = 1
MOST_BYTES = 64 << 20
"""Of a file with diagnoses; a larger one is refused."""


class DiagnosisError(ChaosError):
    """A file with diagnoses that cannot be used. Exit code 2."""

    exit_code = EXIT_USAGE


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


class Diagnosis(BaseModel):
    """All answers of a tool: run or question -> its incidents; an empty list: nothing happened."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    tool: str = Field(min_length=1, max_length=200)
    runs: dict[str, list[DiagnosedIncident]]


def read_diagnosis(path: Path) -> Diagnosis:
    """Read a file. Raises DiagnosisError naming the first wrong entry, and NewerVersion."""
    try:
        with open_regular(path, follow=True) as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise DiagnosisError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise DiagnosisError(f"{path}: more than {MOST_BYTES >> 20} MiB")
    try:
        tree = json.loads(data)
    except json.JSONDecodeError as error:
        raise DiagnosisError(f"{path}:{error.lineno}: no JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DiagnosisError(f"{path}: no JSON: {type(error).__name__}") from error
    version = tree.get("version") if isinstance(tree, dict) else None
    if type(version) is int and version > VERSION:
        raise NewerVersion(str(path), version, VERSION)
    try:
        return Diagnosis.model_validate(tree)
    except ValidationError as error:
        raise DiagnosisError(
            f"{path}: {_first(error)}", hint="docs/attribution.md has the format and an example"
        ) from error


def _first(error: ValidationError) -> str:
    """``runs.q0003[1].cause: Input should be ...``, and how many more there are."""
    problems = error.errors(include_url=False, include_input=True)
    one = problems[0]
    where = "".join(_step(part, number) for number, part in enumerate(one["loc"]))
    given: Any = one.get("input")
    shown = f", not {given!r}"[:80] if isinstance(given, (str, int, float, bool)) else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where or 'the document'}: {one['msg']}{shown}{more}"


def _step(part: int | str, number: int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return part if number == 0 else f".{part}"
