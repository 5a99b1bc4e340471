"""Parts of one checkpoint, written by several ranks at the same time, become one.

Each rank puts its data file and then a record of it into the staging directory that step and generation name; the
first one waits for all records and commits. Only the file system is used, so a save is no collective: ranks that have
written their part train on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recovery import pieces
from recovery.checkpoints import Disk, write_durably
from recovery.mechanisms.saving.part import Part
from recovery.pieces import Piece

LOOK_S = 0.005


def announce(staging: Path, writer: int, part: Part, *, disk: Disk) -> None:
    """Leave the record of a part that is written and synced. Raises OSError."""
    record = {
        "file": part.file,
        "pieces": pieces.dump(part.stream),
        "tensors": part.tensors,
        "delta": part.delta,
    }
    data = json.dumps(record).encode()
    hidden = staging / f".{_record(writer)}"
    sealed = json.dumps({"record": record, "self": pieces.checksum(data)}).encode()
    write_durably(hidden, sealed, disk)
    hidden.rename(staging / _record(writer))


def give_up(staging: Path, writer: int, why: str) -> None:
    """Tell the rank that waits not to; a disk that takes not even that makes it wait its time."""
    try:
        (staging / _failure(writer)).write_text(why)
    except OSError:
        pass


def gather(staging: Path, writers: int, *, timeout_s: float, check: Callable[[], None]) -> list[Part]:
    """Wait for the parts of the other writers (1 and up), and read them; the records are removed.

    Raises TimeoutError, RuntimeError when one gave up, OSError, and what ``check`` raises.
    """
    deadline_s = time.monotonic() + timeout_s
    parts = []
    for writer in range(1, writers):
        record = staging / _record(writer)
        while not record.exists():
            check()
            failure = staging / _failure(writer)
            if failure.exists():
                raise RuntimeError(f"writer {writer} gave up: {failure.read_text()}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the part of writer {writer} did not come within {timeout_s:g} s")
            time.sleep(LOOK_S)
        parts.append(_read(record))
        record.unlink()
    return parts


def merge(parts: Sequence[Part]) -> tuple[dict[str, Any], dict[str, list[Piece]]]:
    """The manifest's facts and the streams of all parts. Raises RuntimeError when they do not make one whole state."""
    tensors: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            whole = tensors.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": []})
            if (whole["dtype"], whole["shape"]) != (entry["dtype"], entry["shape"]):
                raise RuntimeError(f"{part.file} holds another {name} than {parts[0].file}")
            whole["chunks"] += [{**chunk, "file": part.file} for chunk in entry["chunks"]]
    for name, entry in tensors.items():
        held = sum(math.prod(chunk["size"]) for chunk in entry["chunks"])
        if held != math.prod(entry["shape"]):
            raise RuntimeError(f"the parts hold {held} of {math.prod(entry['shape'])} values of {name}")
    facts = {"tensors": tensors, "delta": max(part.delta for part in parts), "writers": len(parts)}
    return facts, {part.file: part.stream for part in parts}


def _read(path: Path) -> Part:
    raw: Mapping[str, Any] = json.loads(path.read_bytes())
    record = raw["record"]
    if raw["self"] != pieces.checksum(json.dumps(record).encode()):
        raise RuntimeError(f"{path.name} does not match its own checksum")
    return Part(
        file=record["file"], stream=pieces.parse(record["pieces"]), tensors=record["tensors"], delta=record["delta"]
    )  # fmt: skip


def _record(writer: int) -> str:
    return f"part-{writer:04d}.json"


def _failure(writer: int) -> str:
    return f"part-{writer:04d}.failed"
