"""Checkpoints on disk: names, manifests, verification, retention. No torch here, so a supervisor can verify
too.

A checkpoint is a directory ``step-00000050`` holding data files and ``manifest.json``, which lists the pieces of
each file with their checksums (``recovery.pieces``) and carries a checksum of its own. It is written under another
name, flushed, and renamed: it exists whole or not at all. Where it replaces one of the same step, the two are
exchanged in one operation, so that at each moment one of them is there.

A delta checkpoint holds only the pieces that changed; the others lie in the files of older checkpoints, which are kept
as long as one that is kept refers to them. What is said of a checkpoint holds for all its pieces, wherever they lie.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovery import pieces
from recovery.pieces import CorruptCheckpoint, Piece
from recovery.renaming import fsync_directory, put_in_place

__all__ = ["Checkpoint", "CorruptCheckpoint", "Disk"]

MANIFEST = "manifest.json"
FORMAT = 2
_NAME = re.compile(r"^step-(\d{8})$")
_STAGING, _TRASH = ".staging-", ".deleted-"

Disk = Callable[[str, Path], None]
"""Hears of each operation of a save (mkdir, write, fsync, rename, delete) just before it is done, and may raise
OSError in its place: the disk's own voice, or somebody who imitates it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint, not yet verified."""

    path: Path
    step: int

    @property
    def name(self) -> str:
        """Its directory's name."""
        return self.path.name


def name_of(step: int) -> str:
    """Directory name of the checkpoint of a step."""
    return f"step-{step:08d}"


def newest_first(directory: Path) -> list[Checkpoint]:
    """Committed checkpoints of a directory, newest first; anything else in it is ignored."""
    if not directory.is_dir():
        return []
    found = ((path, _NAME.match(path.name)) for path in directory.iterdir())
    checkpoints = [Checkpoint(path=path, step=int(match[1])) for path, match in found if match]
    return sorted(checkpoints, key=lambda c: c.step, reverse=True)


def manifest_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The manifest, its own checksum, and the names and sizes of the files checked; no data is read.

    Raises CorruptCheckpoint.
    """
    try:
        manifest = json.loads((checkpoint.path / MANIFEST).read_bytes())
        files, step = dict(manifest["files"]), manifest["step"]
    except FileNotFoundError:
        raise CorruptCheckpoint("the manifest is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"the manifest cannot be read: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CorruptCheckpoint(f"the manifest has format {manifest.get('format')!r}, not {FORMAT}")
    if manifest.get("self") != _seal(manifest):
        raise CorruptCheckpoint("the manifest does not match its own checksum")
    if step != checkpoint.step:
        raise CorruptCheckpoint(f"the manifest is of step {step}")
    _refuse_extra_files(checkpoint.path, {MANIFEST, *files})
    for name in files:
        _verify_size(checkpoint.path / name, files[name]["bytes"], stream_of(manifest, name))
    return dict(manifest)


def stream_of(manifest: Mapping[str, Any], name: str) -> list[Piece]:
    """The pieces of a data file. Raises CorruptCheckpoint when they are no pieces."""
    stream = pieces.parse(manifest["files"][name]["pieces"])
    bad = next((p.where for p in stream if p.where and not _NAME.match(p.where)), None)
    if bad is not None or "/" in name:
        raise CorruptCheckpoint(f"the manifest refers to {bad or name!r}, which is no checkpoint's file")
    return stream


def path_of(checkpoint: Checkpoint, name: str) -> Callable[[str], Path]:
    """Where the pieces of its file ``name`` lie: see ``recovery.pieces.check``."""
    return lambda where: (checkpoint.path.parent / where if where else checkpoint.path) / name


def verify(checkpoint: Checkpoint) -> dict[str, Any]:
    """Check every piece of every file against the manifest and return the manifest. Raises CorruptCheckpoint."""
    manifest = manifest_of(checkpoint)
    for name in manifest["files"]:
        pieces.check(stream_of(manifest, name), path_of(checkpoint, name))
    return manifest


def newest_good(
    directory: Path, refused: Callable[[Checkpoint, str], None]
) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest checkpoint that verifies, with its manifest.

    Calls ``refused`` for each newer one that does not.
    """
    for checkpoint in newest_first(directory):
        try:
            return checkpoint, verify(checkpoint)
        except CorruptCheckpoint as error:
            refused(checkpoint, str(error))
    return None


def staging_of(directory: Path, step: int, generation: int) -> Path:
    """Where the files of a checkpoint that is not committed yet are put, by all ranks that write a part of it."""
    return directory / f"{_STAGING}{name_of(step)}-{generation}"


def sweep(directory: Path, *, but: Path | None = None) -> None:
    """Remove what saves that never came to their end left behind, except ``but``; only one job saves at a time."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((_STAGING, _TRASH)) and path != but:
            shutil.rmtree(path, ignore_errors=True)


def commit(
    staging: Path, directory: Path, step: int, facts: Mapping[str, Any], *,
    streams: Mapping[str, Sequence[Piece]] | None = None, disk: Disk | None = None,
) -> tuple[Checkpoint, int]:  # fmt: skip
    """Seal the files in ``staging`` under a manifest and move them into place; returns the checkpoint and
    its bytes.

    ``streams``: the pieces of files that are written, checksummed and synced; others are read for it. ``facts`` go
    into the manifest (JSON). A checkpoint of the same step left from before a rollback is replaced: the staged one
    belongs to the lineage that survives. Raises OSError when the disk refuses; then nothing was committed.
    """
    tell = disk or _silent
    files = {}
    total = 0
    for path in sorted(staging.iterdir()):
        known = (streams or {}).get(path.name)
        if known is None:
            tell("fsync", path)
            known = _seal_file(path)
        size = sum(piece.size for piece in known if not piece.where)
        files[path.name] = {"bytes": size, "pieces": pieces.dump(known)}
        total += size
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files, **facts}
    manifest["checksum"] = pieces.ALGORITHM
    manifest["self"] = _seal(manifest)
    write_durably(staging / MANIFEST, json.dumps(manifest, sort_keys=True).encode(), tell)
    tell("fsync", staging)
    fsync_directory(staging)
    final, trash = directory / name_of(step), directory / f"{_TRASH}{name_of(step)}"
    tell("rename", final)
    take_back = put_in_place(staging, final, trash)
    try:
        tell("fsync", directory)
        fsync_directory(directory)
    except OSError:
        take_back()  # reported as failed, so it must not be there
        raise
    for left in (staging, trash):
        shutil.rmtree(left, ignore_errors=True)
    return Checkpoint(path=final, step=step), total


def write_durably(path: Path, data: bytes, disk: Disk) -> None:
    """Write a small file and sync it. Raises OSError."""
    disk("write", path)
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        disk("fsync", path)
        os.fsync(stream.fileno())


def prune(
    directory: Path, keep: int, *, refused: Callable[[Checkpoint, str], None] | None = None,
    disk: Disk | None = None,
) -> list[Checkpoint]:  # fmt: skip
    """Delete all but the newest ``keep`` and what those refer to, unless none of those verifies; returns what is gone.

    The last good one is never deleted. ``refused`` hears of those that the disk would not give up; they stay
    whole, and are tried again next time.
    """
    checkpoints = newest_first(directory)
    kept = checkpoints[:keep]
    needed = set().union(*(_needed_by(checkpoint) for checkpoint in kept))
    old = [checkpoint for checkpoint in checkpoints[keep:] if checkpoint.name not in needed]
    if not old or not any(_is_good(checkpoint) for checkpoint in kept):
        return []
    return _delete(directory, old, refused=refused, disk=disk)


def drop_after(
    directory: Path, step: int, *, refused: Callable[[Checkpoint, str], None] | None = None,
    disk: Disk | None = None,
) -> list[Checkpoint]:  # fmt: skip
    """Delete the checkpoints of later steps, which may hold a corrupted state; returns what is gone."""
    later = [checkpoint for checkpoint in newest_first(directory) if checkpoint.step > step]
    return _delete(directory, later, refused=refused, disk=disk)


def _delete(
    directory: Path, old: Sequence[Checkpoint], *, refused: Callable[[Checkpoint, str], None] | None,
    disk: Disk | None,
) -> list[Checkpoint]:  # fmt: skip
    gone = []
    for checkpoint in old:
        trash = directory / f"{_TRASH}{checkpoint.name}"
        try:
            (disk or _silent)("delete", checkpoint.path)
            shutil.rmtree(trash, ignore_errors=True)
            checkpoint.path.rename(trash)  # so that it is there whole or not at all
        except OSError as error:
            if refused is not None:
                refused(checkpoint, first_line(error))
            continue
        gone.append(checkpoint)
        shutil.rmtree(trash, ignore_errors=True)
    return gone


def first_line(error: BaseException) -> str:
    """What an error says, in one line that is never empty."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _silent(what: str, path: Path) -> None:
    """A disk of which nobody wants to hear."""


def _is_good(checkpoint: Checkpoint) -> bool:
    try:
        verify(checkpoint)
    except CorruptCheckpoint:
        return False
    return True


def _refuse_extra_files(path: Path, known: set[str]) -> None:
    """A reader that takes every data file of the directory would read what nobody vouches for."""
    try:
        extra = sorted(set(os.listdir(path)) - known)
    except OSError as error:
        raise CorruptCheckpoint(f"it cannot be read: {error.strerror}") from error
    if extra:
        raise CorruptCheckpoint(f"{extra[0]} is not in the manifest")


def _verify_size(path: Path, size: int, stream: Sequence[Piece]) -> None:
    """The file is there with its size, and its pieces cover it, each byte once."""
    end = 0
    for piece in sorted(p for p in stream if not p.where):
        if piece.offset != end:
            raise CorruptCheckpoint(f"the pieces of {path.name} do not meet at byte {end}")
        end += piece.size
    if end != size:
        raise CorruptCheckpoint(f"the pieces of {path.name} are {end} bytes, not {size}")
    try:
        actual = path.stat().st_size
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path.name} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path.name} cannot be read: {error.strerror}") from error
    if actual != size:
        raise CorruptCheckpoint(f"{path.name} has {actual} bytes, not {size}")


def _needed_by(checkpoint: Checkpoint) -> set[str]:
    """Names of the checkpoints that hold pieces of it."""
    try:
        manifest = manifest_of(checkpoint)
        return {piece.where for name in manifest["files"] for piece in stream_of(manifest, name)}
    except CorruptCheckpoint:
        return set()  # nothing could bring it back


def _seal_file(path: Path) -> list[Piece]:
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())
    return pieces.of_file(path)


def _seal(manifest: dict[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "self"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
