"""What every undo record has in common, and what undoing came to."""

from __future__ import annotations

import re
import subprocess
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from harness.host import processes


class UndoOutcome(BaseModel):
    """The result of an undo. ``ok``: nothing of it is left; ``did``: it had to do something;
    ``text``: for people.
    """

    model_config = ConfigDict(frozen=True)

    ok: bool
    did: bool
    text: str


def done(text: str) -> UndoOutcome:
    """It did something, and nothing is left."""
    return UndoOutcome(ok=True, did=True, text=text)


def nothing(text: str) -> UndoOutcome:
    """There was nothing to do."""
    return UndoOutcome(ok=True, did=False, text=text)


def failed(text: str) -> UndoOutcome:
    """Something is left."""
    return UndoOutcome(ok=False, did=False, text=text)


class Undo(BaseModel):
    """Base of the records. ``outlives_boot``: whether what it undoes is still there after the
    machine restarts; only then must the record itself survive a crash of the machine.
    ``ends_processes``: those come first, since what a process uses cannot be taken away under it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    outlives_boot: ClassVar[bool] = False
    ends_processes: ClassVar[bool] = False
    boot_id: str = Field(default_factory=processes.boot_id)

    def undo_of(self, run: Path) -> UndoOutcome:
        """Undo it, if it can be of the run in that directory: any user may have written its ledger.
        Idempotent, bounded, and never an exception.
        """
        if not self.outlives_boot and self.boot_id != processes.boot_id():
            return self.undo()
        try:
            stray = self.stray(run.resolve())
        # the last: links that lead in a circle
        except (OSError, ValueError, RuntimeError) as error:
            stray = str(error)
        return failed(f"{stray}: left alone") if stray else self.undo()

    def stray(self, run: Path) -> str:
        """Why it cannot be a record of that run, whose directory is given without links; empty: it
        can.
        """
        return ""

    def undo(self) -> UndoOutcome:
        """Undo it; idempotent, bounded, and never an exception."""
        if not self.outlives_boot and self.boot_id != processes.boot_id():
            return nothing("gone with a restart of the machine (or made on another one)")
        try:
            return self._undo()
        except OSError as error:
            return failed(f"could not {self.intent()}: {error.strerror or error}")
        # a null character in a path; links that lead in a circle
        except (ValueError, RuntimeError) as error:
            return failed(f"could not {self.intent()}: {error}")
        except subprocess.TimeoutExpired:
            return failed(f"could not {self.intent()}: tc does not answer")

    def idle(self) -> bool:
        """Whether there is certainly nothing left to undo; a look without touching."""
        return not self.outlives_boot and self.boot_id != processes.boot_id()

    @abstractmethod
    def intent(self) -> str:
        """What ``undo`` is about to do, for people, beginning with a verb."""

    @abstractmethod
    def _undo(self) -> UndoOutcome: ...


def outside(path: Path, run: Path) -> str:
    """Why a path is not that of a run's directory or of something in it; empty: it is. The last
    part of a path is not followed where it is a link, since it is the link that would go.
    """
    if not path.is_absolute() or path.name == "..":
        return f"{path} may be anywhere"
    place = path.parent.resolve() / path.name
    return "" if run == place or run in place.parents else f"{path} is not inside {run}"


def mounts() -> list[tuple[str, str]]:
    """(place, source) of everything mounted here, the newest last."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        found.append((_unescape(head.split()[4]), _unescape(tail.split()[1])))
    return found


def control_groups() -> set[str]:
    """Where the control groups of this machine are mounted, which are no files of anybody's."""
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        if tail.split()[0] in ("cgroup", "cgroup2"):
            found.add(_unescape(head.split()[4]))
    return found


def _unescape(text: str) -> str:
    """Octal escapes of mountinfo: blanks and the like."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text)
