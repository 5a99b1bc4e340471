"""Joins parts of one checkpoint that several ranks write at the same time.

Each rank puts its data file and then a record of it into the staging directory of that step and
generation; the first one waits for all records and commits. Only the file system is used, so a save
is no collective: ranks that have written their part train on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.checkpoints import Disk, write_durably
from trainchaos.recovery.checkpoint.files.pieces import Piece
from trainchaos.recovery.checkpoint.saves.part import CheckpointPart, file_of

LOOK_S = 0.005
STILL_S = 0.25
SHOW_S = 1.0


def announce(staging: Path, writer: int, part: CheckpointPart, *, disk: Disk) -> None:
    """Leave the record of a part that is written and synced. Raises OSError."""
    record = {
        "file": part.file,
        "pieces": pieces.dump(part.stream),
        "tensors": part.tensors,
        "delta": part.delta,
        **({} if part.stage is None else {"stage": part.stage}),
    }
    data = json.dumps(record).encode()
    hidden = staging / f".{_record(writer)}"
    sealed = json.dumps({"record": record, "self": pieces.checksum(data)}).encode()
    write_durably(hidden, sealed, disk)
    disk("rename", staging / _record(writer))
    hidden.rename(staging / _record(writer))


class PartProgress:
    """Progress with a part, which the waiting writer 0 can see as well: the file's time is set, at
    most once in SHOW_S. A part does not grow while it is hashed, synced, or the same as before.
    Called by any thread.
    """

    def __init__(self, part: Path, progress: Callable[[], None]) -> None:
        self._part = part
        self._progress = progress
        self._due_s = time.monotonic() + SHOW_S

    def __call__(self) -> None:
        self._progress()
        if (now_s := time.monotonic()) >= self._due_s:
            self._due_s = now_s + SHOW_S
            with suppress(OSError):  # it may not exist yet
                os.utime(self._part)


def give_up(note: Path, why: str) -> None:
    """Tell the rank that waits to stop; if the disk cannot store even that, it waits until its
    limit. ``note``: see ``recovery.checkpoint.files.checkpoints.refusal_of``.
    """
    hidden = note.with_name(f"{note.name}-{os.getpid()}")
    try:
        hidden.write_text(why)
        hidden.rename(note)
    except OSError:
        pass


def gather(
    staging: Path,
    writers: int,
    *,
    timeout_s: float,
    check: Callable[[], None],
    note_of: Callable[[int], Path],
    still: Callable[[], None] = lambda: None,
) -> list[CheckpointPart]:
    """Wait for the parts of the other writers (1 and up), and read them; the records are removed.
    ``timeout_s``: without a change of the part (see ``PartProgress``); ``note_of``: where a writer
    reports that it gave up; ``still``: called repeatedly, raises when waiting has become pointless.

    Raises TimeoutError, RuntimeError when one gave up, OSError, and what ``check`` and ``still``
    raise.
    """
    parts = []
    for writer in range(1, writers):
        record, note, last = staging / _record(writer), note_of(writer), (-1, -1)
        deadline_s, due_s = time.monotonic() + timeout_s, time.monotonic() + STILL_S
        while not record.exists():
            check()
            if note.exists():
                raise RuntimeError(f"writer {writer} gave up: {note.read_text()}")
            now_s = time.monotonic()
            seen = _look_of(staging / file_of(writer))
            if seen != last:
                last, deadline_s = seen, now_s + timeout_s
            if now_s > deadline_s:
                raise TimeoutError(
                    f"the part of writer {writer} did not come within {timeout_s:g} s"
                )
            if now_s > due_s:
                due_s = now_s + STILL_S
                still()
            time.sleep(LOOK_S)
        parts.append(_read(record))
        record.unlink()
    return parts


def merge(parts: Sequence[CheckpointPart]) -> tuple[dict[str, Any], dict[str, list[Piece]]]:
    """The manifest's facts and the streams of all parts. Raises RuntimeError when they do not make
    one whole state.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            whole = tensors.setdefault(
                name, {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": []}
            )
            if (whole["dtype"], whole["shape"]) != (entry["dtype"], entry["shape"]):
                raise RuntimeError(f"{part.file} holds another {name} than {parts[0].file}")
            whole["chunks"] += [{**chunk, "file": part.file} for chunk in entry["chunks"]]
    for name, entry in tensors.items():
        held = sum(math.prod(chunk["size"]) for chunk in entry["chunks"])
        if held != math.prod(entry["shape"]):
            raise RuntimeError(
                f"the parts hold {held} of {math.prod(entry['shape'])} values of {name}"
            )
    facts = {"tensors": tensors, "delta": max(part.delta for part in parts), "writers": len(parts)}
    return facts, {part.file: part.stream for part in parts}


def stage_of(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """What the scalars of a stage of a pipeline say of its own parameters alone."""
    optimizer = scalars["optimizer"]
    return {
        "params": [group["params"] for group in optimizer["groups"]],
        "state": optimizer["state"],
        "frozen": scalars["frozen"],
    }


def with_stages(
    scalars: Mapping[str, Any], stages: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """The scalars of the first writer with what other stages say of theirs. Raises RuntimeError
    where their optimizers have other parameter groups.
    """
    if not any(stages):
        return dict(scalars)
    optimizer = dict(scalars["optimizer"])
    groups = [{**group, "params": list(group["params"])} for group in optimizer["groups"]]
    state, frozen = dict(optimizer["state"]), dict.fromkeys(scalars["frozen"])
    for stage in stages:
        if stage is None:
            continue
        if len(stage["params"]) != len(groups):
            raise RuntimeError(
                f"the optimizers of two stages have {len(groups)} and {len(stage['params'])}"
                " parameter groups: make as many on each, empty ones too"
            )
        for group, names in zip(groups, stage["params"], strict=True):
            group["params"] += [name for name in names if name not in group["params"]]
        state |= stage["state"]
        frozen |= dict.fromkeys(stage["frozen"])
    optimizer |= {"groups": groups, "state": state}
    return {**scalars, "optimizer": optimizer, "frozen": list(frozen)}


def _read(path: Path) -> CheckpointPart:
    raw: Mapping[str, Any] = json.loads(path.read_bytes())
    record = raw["record"]
    if raw["self"] != pieces.checksum(json.dumps(record).encode()):
        raise RuntimeError(f"{path.name} does not match its own checksum")
    return CheckpointPart(
        file=record["file"],
        stream=pieces.parse(record["pieces"]),
        tensors=record["tensors"],
        delta=record["delta"],
        stage=record.get("stage"),
    )


def _record(writer: int) -> str:
    return f"part-{writer:04d}.json"


def _look_of(path: Path) -> tuple[int, int]:
    """Size and time, which show a change."""
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns
