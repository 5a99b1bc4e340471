"""The undo ledger: how to undo each change to the machine, written before the change.

One JSON line for each intention (``will``) and one for its end (``undone``, or ``failed`` if it
could not be undone). Any process can read it later and finish the work of a killed harness: see
``harness.run.heal``.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainchaos.chaos.errors import InfrastructureError, LogError
from trainchaos.chaos.files import open_regular, parse_json, reason
from trainchaos.harness.undo.records import AnyUndo, Undo

MAX_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20
MOST_OPEN = 100_000
LONGEST_NAME = 80


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One intention. ``undo``: None if this version cannot read it; ``about``: arm, fault and so
    on; ``problem``: why the last attempt to undo it failed, otherwise empty.
    """

    id: str
    undo: Undo | None
    about: Mapping[str, Any]
    problem: str = ""


class Ledger:
    """Appends to the ledger of one run. Several may be open on one file, also in several
    processes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def will(self, undo: Undo, **about: Any) -> str:
        """Record how to undo an act that is about to happen; returns the record's id. ``about``:
        for people.

        Raises InfrastructureError if the disk refuses: then the act must not happen. The kernel has
        the line before the act, so killing this process cannot lose it; it is forced to the disk
        only if the act's effect survives a crash of the machine.
        """
        name = secrets.token_hex(6)
        record = {"will": name, **about, "undo": undo.model_dump(mode="json")}
        self._append(record, durable=undo.outlives_boot)
        return name

    def undone(self, record_id: str, how: str) -> None:
        """Record that nothing of it is left. A full disk is ignored: undoing it again later is
        harmless.
        """
        self._note({"undone": record_id, "how": how})

    def failed(self, record_id: str, why: str) -> None:
        """Record that it could not be undone; a later heal tries again."""
        self._note({"failed": record_id, "why": why})

    def write(self, *, durable: bool = True, **record: Any) -> None:
        """Append a record of an event that needs no undo. Raises InfrastructureError."""
        self._append(record, durable=durable)

    def _note(self, record: Mapping[str, Any]) -> None:
        try:
            self._append(record, durable=False)
        except InfrastructureError:
            pass

    def _append(self, record: Mapping[str, Any], *, durable: bool) -> None:
        line = (
            json.dumps({"wall_ns": time.time_ns(), **record}, separators=(",", ":")).encode()
            + b"\n"
        )
        try:
            flags = (
                os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
            fd = os.open(self._path, flags, 0o644)
            try:
                line = _after_torn(fd) + line
                if os.write(fd, line) != len(line):
                    raise OSError(28, "No space left on device")
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise InfrastructureError(
                f"cannot write {self._path}: {error.strerror}", hint="free disk space"
            ) from error


def read_open(path: Path) -> list[LedgerEntry]:
    """Records of a ledger that are not undone yet, oldest first; empty without a ledger.

    A torn line is skipped: its writer died, or was refused, before it acted. Raises LogError if the
    file cannot be one of our ledgers, since then it is unknown what to undo.
    """
    entries: dict[str, LedgerEntry] = {}
    for line in _lines(path):
        if "will" in line:
            about = {
                key: value for key, value in line.items() if key not in ("will", "undo", "wall_ns")
            }
            name = _name(line["will"])
            entries[name] = LedgerEntry(id=name, undo=_parse(line.get("undo")), about=about)
            if len(entries) > MOST_OPEN:
                raise LogError(
                    f"{path} cannot be read: more than {MOST_OPEN} records in it are open"
                )
        elif "undone" in line:
            entries.pop(_name(line["undone"]), None)
        elif "failed" in line and (old := entries.get(_name(line["failed"]))):
            entries[old.id] = LedgerEntry(
                id=old.id, undo=old.undo, about=old.about, problem=str(line.get("why", ""))
            )
    return list(entries.values())


def _name(found: object) -> str:
    """Id of a record; in another version it may have any type."""
    return (found if isinstance(found, str) else repr(found))[:LONGEST_NAME]


def _parse(record: object) -> Undo | None:
    if not isinstance(record, dict) or not record.get("boot_id"):
        return None  # of an unknown boot: its process ids mean nothing
    try:
        found: Undo = TypeAdapter(AnyUndo).validate_python(record)
    except ValidationError:
        return None
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        stream = open_regular(path, most=MAX_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LogError(f"{path} cannot be read: {reason(error)}") from error
    with stream:
        for line in iter(partial(stream.readline, MAX_LINE_BYTES), b""):
            try:
                record = parse_json(line, halves=True)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _after_torn(fd: int) -> bytes:
    """A line break if the file ends in the middle of a line, so that our line is not lost
    with it.
    """
    size = os.fstat(fd).st_size
    return b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
