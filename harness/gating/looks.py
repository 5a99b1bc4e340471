"""Looks at a run: a gate may be asked again after repeats were added, and its level has to cover
all of these looks.

Adding repeats when the answer is open and looking again gives several chances to be wrong. So looks
are planned: each of K planned ones spends ``LEVEL / K`` (Bonferroni; no assumption about how the
values of different looks correlate). A look beyond the planned ones has no level left: it can only
show a counterexample. Looking again at the same arms does not count as a new look.

The looks at a run are kept beside it, in ``looks.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from pydantic import Field

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError
from trainchaos.chaos.files import read_model, reason, write_json
from trainchaos.chaos.stats import LEVEL
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.figures import Model
from trainchaos.harness.judge.results import Results

MOST_LOOKS = 20
FILE = "looks.json"


class LookError(ChaosError):
    """A look that is not possible as requested."""

    exit_code = EXIT_USAGE


class InterimLook(Model):
    """``arms``: cell -> repeats that were judged."""

    arms: dict[str, list[int]]


class Looks(Model):
    """All looks at a run so far, the newest last. ``planned``: how many were planned."""

    planned: int = Field(ge=1, le=MOST_LOOKS)
    looks: list[InterimLook] = Field(default=[])

    @property
    def extended(self) -> bool:
        """Whether arms were added after a look."""
        return len(self.looks) > 1

    @property
    def spent(self) -> bool:
        """Whether the newest look had no level left."""
        return len(self.looks) > self.planned

    @property
    def level(self) -> float:
        """How often chance alone may decide at the newest look, either way; 0 if it is spent."""
        return 0.0 if self.spent else LEVEL / self.planned

    @property
    def words(self) -> str:
        """Note for reports; "" for one look that was the only one planned."""
        if self.planned == 1 and not self.extended:
            return ""
        number = len(self.looks)
        how = f"look {number} of {self.planned} planned"
        if self.extended:
            before, now = (sum(map(len, self.looks[at].arms.values())) for at in (0, -1))
            how = f"extended from {before} to {now} arms: {how}"
        if self.spent:
            return (
                f"{how}: the level is spent, so that only a counterexample counts; play a new run"
            )
        return f"{how}, {100 * self.level:.3g} % each"


ONE = Looks(planned=1, looks=[InterimLook(arms={})])
"""The only look at a run, if nothing is recorded."""


def look(run: RunDirectory, results: Results, planned: int | None) -> Looks:
    """Record a look at a judged run. ``planned``: as requested; None: as before, at first one.

    Raises LookError if the first look planned another number or the record cannot be read, and
    InfrastructureError if the disk refuses.
    """
    arms = arms_of(results)
    before = _seen(run, arms)
    if before is not None and planned not in (None, before.planned):
        raise LookError(
            f"{run.root} was looked at with {before.planned} looks planned: the plan cannot be"
            " changed afterwards",
            hint="leave --looks out, or play a new run",
        )
    looks = before or Looks(planned=planned or 1)
    if not looks.looks or looks.looks[-1].arms != arms:
        looks = looks.model_copy(update={"looks": [*looks.looks, InterimLook(arms=arms)]})
        write_json(run.root / FILE, looks, "free disk space")
    return looks


def note(run: RunDirectory, results: Results) -> None:
    """Record that the stored results of a run were seen; call it before they are rewritten. If arms
    were added since, nothing else would show it afterwards. An unreadable record is left for the
    gate to refuse. Raises InfrastructureError if the disk refuses.
    """
    with suppress(LookError):
        seen = _seen(run, arms_of(results))
        if seen is not None and seen != _read(run):
            write_json(run.root / FILE, seen, "free disk space")


def _seen(run: RunDirectory, now: Mapping[str, Sequence[int]]) -> Looks | None:
    """Looks before one at these arms: from the record, plus the stored results of fewer arms, which
    count as seen when the run was played.
    """
    before = _read(run)
    try:
        stored = arms_of(read_model(run.results, Results))
    except (OSError, ValueError):
        return before
    looks = before.looks if before is not None else []
    if not _grew(stored, now) or (looks and not _grew(looks[-1].arms, stored)):
        return before
    planned = before.planned if before is not None else 1
    return Looks(planned=planned, looks=[*looks, InterimLook(arms=stored)])


def arms_of(results: Results) -> dict[str, list[int]]:
    """Repeats of each cell that have a faulted arm."""
    faulted = [arm for arm in results.arms if arm.arm == "faulted"]
    return {
        cell.id: sorted(a.repeat for a in faulted if a.cell == cell.id) for cell in results.timed
    }


def _grew(before: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> bool:
    return any(set(repeats) - set(before.get(cell, ())) for cell, repeats in now.items())


def _read(run: RunDirectory) -> Looks | None:
    path = run.root / FILE
    try:
        return read_model(path, Looks)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LookError(
            f"{path} cannot be read ({reason(error)}): how often the run was looked at is not"
            " known",
            hint="play a new run",
        ) from error
