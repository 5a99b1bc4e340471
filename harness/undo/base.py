"""The base of all undo records, and the outcome of an undo."""

from __future__ import annotations

import re
import subprocess
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.harness.host import processes


class UndoOutcome(BaseModel):
    """The result of an undo. ``ok``: nothing is left; ``did``: there was something to undo;
    ``text``: for people.
    """

    model_config = ConfigDict(frozen=True)

    ok: bool
    did: bool
    text: str


def done(text: str) -> UndoOutcome:
    """It undid something, and nothing is left."""
    return UndoOutcome(ok=True, did=True, text=text)


def nothing(text: str) -> UndoOutcome:
    """There was nothing to do."""
    return UndoOutcome(ok=True, did=False, text=text)


def failed(text: str) -> UndoOutcome:
    """Something is left."""
    return UndoOutcome(ok=False, did=False, text=text)


class Undo(BaseModel):
    """Base of the records. ``outlives_boot``: what it undoes survives a restart of the machine;
    only then must the record itself survive a crash of the machine. ``ends_processes``: these
    records are undone first, since resources cannot be removed while processes use them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    outlives_boot: ClassVar[bool] = False
    ends_processes: ClassVar[bool] = False
    boot_id: str = Field(default_factory=processes.boot_id)

    def undo_of(self, run: Path) -> UndoOutcome:
        """Undo it, if it can belong to the run in that directory: any user may have written the
        ledger. Idempotent, bounded, and never raises.
        """
        if not self.outlives_boot and self.boot_id != processes.boot_id():
            return self.undo()
        try:
            stray = self.stray(run.resolve())
        # RuntimeError: links that form a circle
        except (OSError, ValueError, RuntimeError) as error:
            stray = str(error)
        return failed(f"{stray}: left alone") if stray else self.undo()

    def stray(self, run: Path) -> str:
        """Why it cannot belong to the run whose directory, with links resolved, is ``run``; empty
        if it can.
        """
        return ""

    def undo(self) -> UndoOutcome:
        """Undo it; idempotent, bounded, and never raises."""
        if not self.outlives_boot and self.boot_id != processes.boot_id():
            return nothing("gone with a restart of the machine (or made on another one)")
        try:
            return self._undo()
        except OSError as error:
            return failed(f"could not {self.intent()}: {error.strerror or error}")
        # a null character in a path; links that form a circle
        except (ValueError, RuntimeError) as error:
            return failed(f"could not {self.intent()}: {error}")
        except subprocess.TimeoutExpired:
            return failed(f"could not {self.intent()}: tc does not answer")

    def idle(self) -> bool:
        """Whether there is certainly nothing left to undo; changes nothing."""
        return not self.outlives_boot and self.boot_id != processes.boot_id()

    @abstractmethod
    def intent(self) -> str:
        """The action of ``undo``, for people, starting with a verb."""

    @abstractmethod
    def _undo(self) -> UndoOutcome: ...


def outside(path: Path, run: Path) -> str:
    """Why a path is not the run's directory or inside it; empty if it is. A link as the last part
    of a path is not followed, since the link itself would be removed.
    """
    if not path.is_absolute() or path.name == "..":
        return f"{path} may be anywhere"
    place = path.parent.resolve() / path.name
    return "" if run == place or run in place.parents else f"{path} is not inside {run}"


def mounts() -> list[tuple[str, str]]:
    """(place, source) of all mounts of this machine, newest last."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        found.append((_unescape(head.split()[4]), _unescape(tail.split()[1])))
    return found


def control_groups() -> set[str]:
    """Mount points of this machine's control group hierarchies, which contain no user files."""
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        if tail.split()[0] in ("cgroup", "cgroup2"):
            found.add(_unescape(head.split()[4]))
    return found


def _unescape(text: str) -> str:
    """Resolve octal escapes of mountinfo, for example of blanks."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text)
