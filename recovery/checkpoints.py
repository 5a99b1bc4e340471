"""Checkpoints on disk: names, manifests, verification, retention. No torch here, so a supervisor can verify
too.

A checkpoint is a directory ``step-00000050`` holding data files and ``manifest.json`` with their sizes and
SHA-256 sums. It is written under another name, flushed, and renamed: it exists whole or not at all.
"""

from __future__ import annotations

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


def commit(staging: Path, directory: Path, step: int, facts: dict[str, Any]) -> tuple[Checkpoint, int]:
    """Seal the files in ``staging`` under a manifest and move them into place; returns the checkpoint and
    its bytes.

    ``facts`` go into the manifest (JSON). A checkpoint of the same step left from before a rollback is
    replaced: the staged one belongs to the lineage that survives. Raises OSError when the disk refuses;
    then nothing was committed.
    """
    files = {}
    total = 0
    for path in sorted(staging.iterdir()):
        size, digest = _seal_file(path)
        files[path.name] = {"bytes": size, "sha256": digest}
        total += size
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files, **facts}
    manifest["self"] = _seal(manifest)
    with open(staging / MANIFEST, "wb") as stream:
        stream.write(json.dumps(manifest, sort_keys=True).encode())
        stream.flush()
        os.fsync(stream.fileno())
    _fsync_directory(staging)
    final = directory / name_of(step)
    if final.exists():
        trash = directory / f".replaced-{final.name}-{os.getpid()}"
        final.rename(trash)
        staging.rename(final)
        shutil.rmtree(trash, ignore_errors=True)
    else:
        staging.rename(final)
    _fsync_directory(directory)
    return Checkpoint(path=final, step=step), total


def prune(directory: Path, keep: int) -> list[Checkpoint]:
    """Delete all but the newest ``keep``, unless none of those verifies.

    The last good one is never deleted.
    """
    checkpoints = newest_first(directory)
    kept, old = checkpoints[:keep], checkpoints[keep:]
    if not old or not any(_is_good(checkpoint) for checkpoint in kept):
        return []
    for checkpoint in old:
        shutil.rmtree(checkpoint.path, ignore_errors=True)
    return old


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
