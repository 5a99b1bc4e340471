"""The list of hardware that is not to be used: one file that every launcher reads, and that
commands, checks and persons add to.

The file is YAML (or JSON, which YAML contains)::

    version: 1
    taints:
      - node: host-a              # or device: host-a/cuda:3
        reason: XID 79 twice in one night
        since: '2026-11-26T08:00:00Z'
        expiry: null              # or a time of the same form
        by: person                # person, preflight, alarm, history
        evidence: {xid: 79}       # or a text

A file that is not understood is an error, and is never overwritten. Of several writers each waits
for a lock, and replaces the file by renaming a complete one: a reader sees it before or after.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML, YAMLError

from trainchaos.chaos.errors import NewerVersion
from trainchaos.recovery.health.taint import BY, Taint, TaintError, fault_of, written
from trainchaos.recovery.health.taint_text import Entry, read_text

__all__ = ["BY", "Taint", "TaintError", "TaintList", "taints_path"]

VERSION = 1
ENVIRONMENT = "CHAOS_TAINTS"
MAX_BYTES = 1_000_000
LOCK_LIMIT_S = 60.0
"""A writer holds the lock while one small file reaches the disk, which takes seconds on a busy one;
with several waiting, a minute of it means that a holder is stuck.
"""
_LOCK_EVERY_S = 0.01


def taints_path(given: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """Where the list is: ``given`` (an option), else ``$CHAOS_TAINTS``, else ``taints.yaml`` in the
    user's state directory, ``$XDG_STATE_HOME/trainchaos`` or ``~/.local/state/trainchaos`` (XDG
    Base Directory Specification 0.8, which has relative values ignored). ``env``: instead of the
    process's environment.
    """
    known = os.environ if env is None else env
    if given is not None:
        return given
    if known.get(ENVIRONMENT):
        return Path(known[ENVIRONMENT])
    state = known.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "trainchaos" / "taints.yaml"


class TaintList:
    """The list at ``path``. ``needed``: a file that does not exist is an error, not an empty list
    (one that a person named).
    """

    def __init__(self, path: Path, *, needed: bool = False) -> None:
        self.path = path
        self._needed = needed

    def read(self) -> tuple[Taint, ...]:
        """All taints, expired ones too, in the order of the file; none without a file. Raises
        TaintError, NewerVersion.
        """
        return self._parsed(self._text())

    def active(self, now: datetime) -> tuple[Taint, ...]:
        """Those that hold at ``now`` (with a time zone). Raises TaintError, NewerVersion."""
        return tuple(taint for taint in self.read() if not taint.expired(now))

    def add(self, taint: Taint, now: datetime) -> bool:
        """Add a taint. False: the list has one of the same place, reason and origin that holds at
        ``now``. Raises TaintError, also for a taint that has expired by then; NewerVersion.
        """
        if taint.expired(now):
            raise TaintError(
                f"the taint of {taint.place} would have expired before it is added:"
                f" {written(taint.expiry or now)}",
                hint="name a time that is to come, or leave it out: it then holds until cleared",
            )
        added = False

        def change(old: tuple[Taint, ...], tree: Any) -> bool:
            nonlocal added
            added = not any(each.same_as(taint) and not each.expired(now) for each in old)
            if added:
                if tree.get("taints") is None:
                    tree["taints"] = []
                data = taint.as_data()
                tree["taints"].append({name: said for name, said in data.items() if said})
            return added

        self._change(change)
        return added

    def clear(self, place: str) -> tuple[Taint, ...]:
        """Remove all taints of a place, expired or not, and return them. Raises TaintError,
        NewerVersion.
        """
        found: tuple[Taint, ...] = ()

        def change(old: tuple[Taint, ...], tree: Any) -> bool:
            nonlocal found
            gone = [index for index, taint in enumerate(old) if taint.place == place]
            found = tuple(old[index] for index in gone)
            for index in reversed(gone):
                del tree["taints"][index]
            return bool(gone)

        if self.path.exists():
            self._change(change)
        return found

    # ---- the file

    def _text(self) -> str:
        try:
            # Not blocking: opening a named pipe must not wait for its writer.
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as stream:
                if not os.path.isfile(fd):
                    raise TaintError(f"{self.path}: is not a regular file")
                raw = stream.read(MAX_BYTES + 1)
        except FileNotFoundError as error:
            if self._needed:
                raise TaintError(
                    f"{self.path}: no such list of taints",
                    hint="'chaos taint add' makes one; leave --taints out to use your own",
                ) from error
            return ""
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise TaintError(f"{self.path}: cannot be read: {why}") from error
        if len(raw) > MAX_BYTES:
            raise TaintError(f"{self.path}: is larger than {MAX_BYTES // 1000} kB")
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise TaintError(f"{self.path}:{line}: is not UTF-8 text") from error

    def _parsed(self, text: str) -> tuple[Taint, ...]:
        version, entries = read_text(text, str(self.path), VERSION)
        if version > VERSION:
            raise NewerVersion(self.path, version, VERSION)
        return tuple(self._taint(number, entry) for number, entry in enumerate(entries, 1))

    def _taint(self, number: int, entry: Entry) -> Taint:
        try:
            return Taint.model_validate(entry.values)
        except ValidationError as error:
            name, what = fault_of(error)
            line = entry.lines.get(name, entry.line)
            raise TaintError(
                f"{self.path}:{line}: taint {number}: {what}",
                hint="correct the file by hand; it was left as it is",
            ) from error

    def _change(self, change: Callable[[tuple[Taint, ...], Any], bool]) -> None:
        """Read, change and replace the file under the lock. ``change``: gets what is there, and the
        tree that is written; False: leave the file as it is. Comments of a person stay.
        """
        target = Path(os.path.realpath(self.path))  # renaming would replace a link by a file
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(target):
                text = self._text() if target.exists() else ""
                old = self._parsed(text)
                tree, dump = _editable(text)
                if not change(old, tree):
                    return
                new = dump(tree)
                if len(new.encode()) > MAX_BYTES:
                    raise TaintError(
                        f"{self.path}: would grow beyond {MAX_BYTES // 1000} kB",
                        hint="clear taints that have expired",
                    )
                self._parsed(new)  # what cannot be read again must not be written
                _replace(target, new.encode())
        except YAMLError as error:  # a file that the reader accepts and the editor does not
            raise TaintError(f"{self.path}: cannot be edited: {error}") from error
        except OSError as error:
            raise TaintError(
                f"{self.path}: cannot be written: {error.strerror or error}",
                hint=f"choose another file with --taints, or {ENVIRONMENT}",
            ) from error


def _editable(text: str) -> tuple[Any, Callable[[Any], str]]:
    """The tree of a text that can be read, and what writes such a tree: JSON stays JSON, and YAML
    keeps comments and order. Raises YAMLError.
    """
    with suppress(ValueError):
        return json.loads(text), lambda tree: json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
    yaml = YAML()
    yaml.width = 1 << 16
    found = yaml.load(text)

    def dump(tree: Any) -> str:
        out = io.StringIO()
        yaml.dump(tree, out)
        return out.getvalue()

    return {"version": VERSION} if found is None else found, dump


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock file beside a list, which stays there: to remove it would let two in. Raises
    TaintError, OSError.
    """
    path = target.with_name(f"{target.name}.lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until_s = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TaintError(
                        f"{path} has been locked by another process for {LOCK_LIMIT_S:g} s",
                        hint=f"'fuser {path}' names it",
                    ) from None
                time.sleep(_LOCK_EVERY_S)
        yield
    finally:
        os.close(fd)


def _replace(target: Path, data: bytes) -> None:
    """Put a complete file in the place of another, durably. Raises OSError."""
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.rename(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
