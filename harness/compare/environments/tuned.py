"""Recorded sweeps of a stack's options: combinations tried, results, and the resulting ``tuned``
settings.

``chaos compare --tune STACK`` writes ``harness/compare/stacks/tuned/<stack>.json``; a stack's
``tuned`` settings are the best combination in it. A stack without a file uses the values
recommended in its module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from trainchaos.chaos.errors import InfrastructureError, LogError
from trainchaos.chaos.files import read_model, reason, write_whole
from trainchaos.harness.compare.environments.stack import Settings, Stack, Value
from trainchaos.harness.judge.figures import Model

DIRECTORY = Path(__file__).resolve().parents[1] / "stacks" / "tuned"
NEVER = "never"
Seconds = Annotated[
    float,
    BeforeValidator(lambda value: float("inf") if value == NEVER else value),
    PlainSerializer(lambda value: NEVER if value == float("inf") else value),
]
"""A recovery time; infinite if the job never recovered, which JSON cannot express as a number."""


class TriedOptions(Model):
    """One combination of options. ``outcomes``, ``recovery``: family -> one value per seed, in
    order; ``lost``: number of jobs that did not survive; ``score``: seconds that rank combinations
    with equal losses (``harness.compare.tuning``), infinite if no job of some family survived.
    """

    values: dict[str, Value]
    outcomes: dict[str, list[str]]
    recovery: dict[str, list[Seconds]]
    score: Seconds
    lost: int = 0


class Sweep(Model):
    """A sweep of one stack. ``grid``: option -> values tried, in all combinations; ``best``: the
    chosen combination; ``seeds``: used only by this sweep, never by a comparison.
    """

    stack: str
    made: str
    commit: str
    machine: str
    versions: dict[str, str]
    families: list[str]
    seeds: list[int]
    grid: dict[str, list[Value]]
    tried: list[TriedOptions]
    best: dict[str, Value]

    def words(self) -> str:
        """One sentence for reports."""
        survived = sum(one.score != float("inf") and not one.lost for one in self.tried)
        least = next((one.lost for one in self.tried if one.values == self.best), 0)
        jobs = len(self.seeds) * len(self.families)
        losing = f", the best loses {least} of {jobs} jobs" if least else ""
        return (
            f"A recorded sweep of {', '.join(self.grid)}: the best median recovery of"
            f" {len(self.tried)} combinations, of which {survived} survived"
            f" {' and '.join(self.families)} with seeds {self.seeds[0]} to {self.seeds[-1]}{losing}"
            f" (harness/compare/stacks/tuned/{self.stack}.json, commit"
            f" {self.commit[:9] or 'unknown'})."
        )


def recorded(name: str, directory: Path = DIRECTORY) -> Sweep | None:
    """The sweep of a stack; None when there is none. Raises LogError when its file is damaged."""
    path = directory / f"{name}.json"
    try:
        return read_model(path, Sweep, follow=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LogError(
            f"{path} is damaged: {reason(error)}", hint="restore it, or sweep again: --tune"
        ) from error


def write(sweep: Sweep, directory: Path = DIRECTORY) -> Path:
    """Write a sweep atomically. Raises InfrastructureError if the file cannot be written."""
    path = directory / f"{sweep.stack}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, sweep.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {path}: {error.strerror}", hint="check the place"
        ) from error
    return path


def stack_of(name: str, kind: type[Stack], settings: Settings) -> Stack:
    """A stack with its settings; ``tuned`` uses the best of its recorded sweep, if there is one."""
    sweep = recorded(name) if settings == "tuned" and kind.grid else None
    return kind(settings, values=sweep.best if sweep else None)


def because(name: str, kind: type[Stack]) -> str:
    """Reason for the ``tuned`` settings."""
    sweep = recorded(name) if kind.grid else None
    return f"{kind.tuned_because} {sweep.words()}" if sweep else kind.tuned_because
