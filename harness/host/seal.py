"""Seals a run: a digest of each file that its verdict is derived from, and a root digest over all.

Written as each arm ends and once more as the run ends, so that an interrupted run is sealed as far
as it got. Who makes a run can make another one, and seal it too: a root digest shows that the files
are those of the run whose digest was printed, published or required beforehand, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.chaos.errors import DamagedRun
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.files import open_regular, parse_json, read_model, reason, write_whole
from trainchaos.harness.host.rundir import RunDirectory

FILE = "seal.json"
MOST_NAMED = 5  # files in one reason
_BLOCK = 1 << 20
_FIRST_LINE = 1 << 16


class SealedFile(BaseModel):
    """The first ``size`` bytes of a file; all of it, but for the undo ledger, to which a later
    ``chaos heal`` adds lines.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=0)
    sha256: str


class Seal(BaseModel):
    """``run``: random, another for each run, and in the first line of each log; ``complete``: the
    run has ended; ``files``: by their paths in the run directory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    run: str
    complete: bool
    files: dict[str, SealedFile]
    root: str

    def rooted(self) -> str:
        """What ``root`` has to be: SHA-256 over all else, as sorted JSON."""
        return digest_of_json(self.model_dump(mode="json", exclude={"root"}))


class Sealed(BaseModel):
    """What is known of a run's seal. ``state``: ``none``: it has none, as runs of before have;
    ``partial``: the harness ended before the run did; ``broken``: see ``problems``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Literal["whole", "partial", "broken", "none"]
    root: str = ""
    problems: list[str] = []

    @property
    def said(self) -> str:
        if self.state == "none":
            return "none: its files may have been changed since"
        if self.state == "broken":
            return f"broken: {self.reason}"
        return f"sha256:{self.root}{' (of a run that had not ended)' * (self.state == 'partial')}"

    @property
    def reason(self) -> str:
        """The problems, a few of them."""
        more = len(self.problems) - MOST_NAMED
        return "; ".join(self.problems[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


class Sealer:
    """Seals one run while it is played. Where the disk refuses, the run stays sealed as it was
    before, and its verdict says so.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.token = secrets.token_hex(16)
        self._files: dict[str, SealedFile] = {}
        with suppress(OSError):
            self._write(complete=False)  # logs name it from now on

    def arm(self, name: str) -> None:
        """An arm has ended: nobody writes its logs any more."""
        self._seal(_logs(self._run.events(name)), complete=False)

    def close(self) -> None:
        self._seal(sealed_paths(self._run), complete=True)

    def _seal(self, paths: Iterator[Path], *, complete: bool) -> None:
        with suppress(OSError):
            for path in paths:
                self._files[_name(self._run, path)] = digest_of(path)
            self._write(complete=complete)

    def _write(self, *, complete: bool) -> None:
        files = dict(sorted(self._files.items()))
        seal = Seal(run=self.token, complete=complete, files=files, root="")
        write_whole(self._run.root / FILE, _written(seal))


def check(run: RunDirectory, *, root: str = "") -> Sealed:
    """Hold a run's files against its seal: what was changed, is missing, or was added. ``root``:
    the digest that the seal must have, with or without ``sha256:``; empty: any.
    """
    path = run.root / FILE
    try:
        seal = read_model(path, Seal)
    except FileNotFoundError:
        if root:
            return Sealed(state="broken", problems=[f"it has no seal, and {root} is required"])
        if any(map(_run_of, _logs(run.root / "events"))):
            return Sealed(state="broken", problems=[f"{FILE} is missing, and its logs name one"])
        return Sealed(state="none")
    except (OSError, ValueError, DamagedRun) as error:
        return Sealed(state="broken", problems=[f"{FILE} is damaged: {reason(error)}"])
    if seal.root != seal.rooted():
        return Sealed(state="broken", root=seal.root, problems=[f"{FILE} was changed"])
    if root and root.removeprefix("sha256:") != seal.root:
        wrong = f"its root digest is sha256:{seal.root}, and {root} is required"
        return Sealed(state="broken", root=seal.root, problems=[wrong])
    problems = [
        f"{name} {wrong}" for name, told in seal.files.items() if (wrong := _wrong(run, name, told))
    ]
    if seal.complete:
        there = map(partial(_name, run), sealed_paths(run))
        problems += [f"{name} was added" for name in there if name not in seal.files]
    problems += [
        f"{_name(run, path)} is of another run"
        for path in _logs(run.root / "events")
        if _run_of(path) not in (None, seal.run)
    ]
    state: Literal["broken", "whole", "partial"] = "whole" if seal.complete else "partial"
    return Sealed(state="broken" if problems else state, root=seal.root, problems=problems)


def refuse_broken(run: RunDirectory, found: Sealed) -> None:
    """Raise DamagedRun where the figures of a run are to be used and its seal is broken. ``found``:
    by ``check``.
    """
    if found.state == "broken":
        raise DamagedRun(
            f"{run.root}: the record is not whole: {found.reason}", hint="chaos analyze says more"
        )


def sealed_paths(run: RunDirectory) -> Iterator[Path]:
    """All files that a verdict is derived from."""
    for path in (run.resolved, run.system, run.ledger):
        if path.exists():
            yield path
    yield from _logs(run.root / "events")


def digest_of(path: Path, size: int | None = None) -> SealedFile:
    """Of all of a file, or of its first ``size`` bytes. Raises OSError."""
    found, count = hashlib.sha256(), 0
    most = math.inf if size is None else size
    with open_regular(path) as stream:
        while block := stream.read(int(min(_BLOCK, most - count))):
            found.update(block)
            count += len(block)
    return SealedFile(size=count, sha256=found.hexdigest())


def of_bytes(data: bytes) -> SealedFile:
    """Of a file's content."""
    return SealedFile(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def again(run: RunDirectory, files: Mapping[str, SealedFile]) -> str:
    """The seal of a run whose files were made other ones, such as for publication. The run's own id
    is kept where it has one, else it follows from the files.
    """
    try:
        token = read_model(run.root / FILE, Seal).run
    except (OSError, ValueError, DamagedRun):
        token = digest_of_json({name: one.sha256 for name, one in files.items()})[:32]
    return _written(Seal(run=token, complete=True, files=dict(sorted(files.items())), root=""))


def digest_of_json(value: Any) -> str:
    """SHA-256 of what JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _written(seal: Seal) -> str:
    rooted = seal.model_copy(update={"root": seal.rooted()})
    return json.dumps(rooted.model_dump(mode="json"), indent=1) + "\n"


def _run_of(path: Path) -> Any:
    """The run that the first line of a log says it is of; None: it does not say."""
    try:
        with open_regular(path) as stream:
            first = parse_json(stream.readline(_FIRST_LINE))
        return first["data"].get("run") if first["kind"] == Kind.ACTOR_STARTED else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # whoever judges the log says what is wrong with it


def _wrong(run: RunDirectory, name: str, told: SealedFile) -> str:
    path = run.root / name
    grows = path == run.ledger
    try:
        if path.is_symlink() or not path.resolve().is_relative_to(run.root.resolve()):
            return "leads out of the run directory"
        size = path.stat().st_size  # of one that is endless, or a pipe, nothing is read
        if size < told.size or (size > told.size and not grows):
            return "was changed"
        return "" if digest_of(path, told.size) == told else "was changed"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _logs(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if not path.is_dir())


def _name(run: RunDirectory, path: Path) -> str:
    return path.relative_to(run.root).as_posix()
