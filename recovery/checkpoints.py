"""Checkpoints on disk: names, manifests, verification, retention. No torch here, so a supervisor can verify
too.

A checkpoint is a directory ``step-00000050`` holding data files and ``manifest.json`` with their sizes and
SHA-256 sums. It is written under another name, flushed, and renamed: it exists whole or not at all. Where it
replaces one of the same step, the two are exchanged in one operation, so that at each moment one of them is there.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"^step-(\d{8})$")
_CHUNK = 1 << 20
_STAGING, _TRASH = ".staging-", ".deleted-"
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_CWD = -100
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)

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


class CorruptCheckpoint(Exception):
    """The checkpoint does not match its manifest; the message says which file and how."""


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


def verify(checkpoint: Checkpoint) -> dict[str, Any]:
    """Check every file against the manifest and return the manifest. Raises CorruptCheckpoint."""
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
    for name, entry in files.items():
        _verify_file(checkpoint.path / name, entry["bytes"], entry["sha256"])
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


def staging_of(directory: Path, step: int) -> Path:
    """Where this process puts the files of a checkpoint that is not committed yet."""
    return directory / f"{_STAGING}{name_of(step)}-{os.getpid()}"


def sweep(directory: Path) -> None:
    """Remove what saves that never came to their end left behind; only one process saves at a time."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((_STAGING, _TRASH)):
            shutil.rmtree(path, ignore_errors=True)


def commit(
    staging: Path, directory: Path, step: int, facts: dict[str, Any], *, disk: Disk | None = None
) -> tuple[Checkpoint, int]:
    """Seal the files in ``staging`` under a manifest and move them into place; returns the checkpoint and
    its bytes.

    ``facts`` go into the manifest (JSON). A checkpoint of the same step left from before a rollback is
    replaced: the staged one belongs to the lineage that survives. Raises OSError when the disk refuses;
    then nothing was committed.
    """
    tell = disk or _silent
    files = {}
    total = 0
    for path in sorted(staging.iterdir()):
        tell("fsync", path)
        size, digest = _seal_file(path)
        files[path.name] = {"bytes": size, "sha256": digest}
        total += size
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files, **facts}
    manifest["self"] = _seal(manifest)
    tell("write", staging / MANIFEST)
    with open(staging / MANIFEST, "wb") as stream:
        stream.write(json.dumps(manifest, sort_keys=True).encode())
        stream.flush()
        tell("fsync", staging / MANIFEST)
        os.fsync(stream.fileno())
    tell("fsync", staging)
    _fsync_directory(staging)
    final = directory / name_of(step)
    tell("rename", final)
    take_back = _put_in_place(staging, final)
    try:
        tell("fsync", directory)
        _fsync_directory(directory)
    except OSError:
        take_back()  # reported as failed, so it must not be there
        raise
    for left in (staging, directory / f"{_TRASH}{final.name}"):
        shutil.rmtree(left, ignore_errors=True)
    return Checkpoint(path=final, step=step), total


def prune(
    directory: Path, keep: int, *, refused: Callable[[Checkpoint, str], None] | None = None,
    disk: Disk | None = None,
) -> list[Checkpoint]:  # fmt: skip
    """Delete all but the newest ``keep``, unless none of those verifies; returns what is gone.

    The last good one is never deleted. ``refused`` hears of those that the disk would not give up; they stay
    whole, and are tried again next time.
    """
    checkpoints = newest_first(directory)
    kept, old = checkpoints[:keep], checkpoints[keep:]
    if not old or not any(_is_good(checkpoint) for checkpoint in kept):
        return []
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


def _put_in_place(staging: Path, final: Path) -> Callable[[], object]:
    """Move or exchange; returns how to take it back."""
    if not final.exists():
        staging.rename(final)
        return lambda: final.rename(staging)
    try:
        _exchange(staging, final)
        return lambda: _exchange(staging, final)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    # A file system that cannot exchange: for a moment the older checkpoints are the newest.
    trash = final.parent / f"{_TRASH}{final.name}"
    shutil.rmtree(trash, ignore_errors=True)
    final.rename(trash)
    try:
        staging.rename(final)
    except OSError:
        trash.rename(final)
        raise

    def take_back() -> None:
        final.rename(staging)
        trash.rename(final)

    return take_back


def _exchange(one: Path, other: Path) -> None:
    """Exchange two names at once. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(_CWD, os.fsencode(one), _CWD, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


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


def _verify_file(path: Path, size: int, digest: str) -> None:
    try:
        actual = path.stat().st_size
        if actual != size:
            raise CorruptCheckpoint(f"{path.name} has {actual} bytes, not {size}")
        found = hash_file(path)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path.name} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path.name} cannot be read: {error.strerror}") from error
    if found != digest:
        raise CorruptCheckpoint(f"{path.name} has SHA-256 {found[:12]}, not {digest[:12]}")


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _seal_file(path: Path) -> tuple[int, str]:
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())
    return path.stat().st_size, hash_file(path)


def _seal(manifest: dict[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "self"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
