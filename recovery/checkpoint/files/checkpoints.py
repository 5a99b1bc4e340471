"""Checkpoints on disk: names, manifests, verification, lineage. No torch here, so a supervisor can
verify too.

A checkpoint is a directory ``step-00000050`` holding data files and ``manifest.json``, which lists
the pieces of each file with their checksums (``recovery.checkpoint.files.pieces``) and carries a
checksum of its own. It is written under another name, flushed, and renamed: it exists whole or not
at all. Where it replaces one of the same step, the two are exchanged in one operation, so that at
each moment one of them is there.

A delta checkpoint holds only the pieces that changed; the others lie in the files of older
checkpoints, which are kept as long as one that is kept refers to them. What is said of a checkpoint
holds for all its pieces, wherever they lie.

Which checkpoint is newer is a matter of lineage: what a later generation saved comes first,
whatever its step, and what an earlier one saved beyond the step from which the later one went on
was abandoned.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.pieces import (
    CorruptCheckpoint,
    Piece,
    Progress,
    Source,
    quiet,
)
from trainchaos.recovery.transport.atomic_rename import fsync_directory, put_in_place, remove

__all__ = ["Checkpoint", "CorruptCheckpoint", "Disk", "Progress", "quiet"]

MANIFEST, REFUSED = "manifest.json", "refused.json"
FORMAT = 2
TRASH = ".deleted-"
_STAGING, _REFUSAL = ".staging-", ".refused-"
_NAME = re.compile(r"^step-(\d{8})$")
_WRITER = re.compile(rf"^{re.escape(_STAGING)}step-\d+-(\d+)-(\d+)$")

MOST_KNOWN = 512  # manifests of which something is remembered

Disk = Callable[[str, Path], None]
"""Called before each operation of a save (mkdir, write, fsync, rename, delete); may raise OSError
in its place, for the disk or for a fault injector that imitates it.
"""


@dataclass(frozen=True, kw_only=True)
class Hand:
    """How a process changes a directory of checkpoints. ``guard``: around each rename, raises where
    it may not write (any more), see ``recovery.checkpoint.files.fence``; ``progress``: called at
    least every 32 MB, and for each file that is deleted.
    """

    disk: Disk = lambda what, path: None
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    progress: Progress = quiet


FREE = Hand()
"""Nobody interferes, and nobody watches."""


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


# ---- manifests


def manifest_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Its manifest, whose own checksum and the names and sizes of whose files are checked; no data
    is read. Raises CorruptCheckpoint.
    """
    directory = checkpoint.path
    try:
        raw = (directory / MANIFEST).read_bytes()
        manifest = json.loads(raw)
        files, step = dict(manifest["files"]), manifest["step"]
    except FileNotFoundError:
        raise CorruptCheckpoint("the manifest is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"the manifest cannot be read: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CorruptCheckpoint(f"the manifest has format {manifest.get('format')!r}, not {FORMAT}")
    mark = f'"self": "{manifest.get("self")}", '.encode()
    if raw.count(mark) != 1 or _sum(raw.replace(mark, b"")) != manifest["self"]:
        raise CorruptCheckpoint("the manifest does not match its own checksum")
    if step != checkpoint.step:
        raise CorruptCheckpoint(f"the manifest is of step {step}")
    try:
        # A reader that takes every data file of the directory would read those of no manifest.
        extra = sorted(set(os.listdir(directory)) - {MANIFEST, REFUSED, *files})
    except OSError as error:
        raise CorruptCheckpoint(f"it cannot be read: {error.strerror}") from error
    if extra:
        raise CorruptCheckpoint(f"{extra[0]} is not in the manifest")
    for name in files:
        _verify_size(directory / name, files[name]["bytes"], stream_of(manifest, name))
    return dict(manifest)


def stream_of(manifest: Mapping[str, Any], name: str) -> list[Piece]:
    """The pieces of a data file. Raises CorruptCheckpoint when they are no pieces."""
    stream = pieces.parse(manifest["files"][name]["pieces"])
    bad = next((p.where for p in stream if p.where and not _NAME.match(p.where)), None)
    if bad is not None or "/" in name:
        raise CorruptCheckpoint(
            f"the manifest refers to {bad or name!r}, which is no checkpoint's file"
        )
    return stream


def _verify_size(path: Path, size: int, stream: Sequence[Piece]) -> None:
    """Check that the file has its size, and that its pieces cover each byte once."""
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


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as text with its own checksum, ``self``. Its keys are sorted; what a value holds
    stays in its order, which may matter to whoever registered it.
    """
    parts = {key: f'"{key}": {json.dumps(value)}' for key, value in manifest.items()}
    parts.pop("self", None)
    text = "{" + ", ".join(parts[key] for key in sorted(parts)) + "}"
    parts["self"] = f'"self": "{_sum(text.encode())}"'
    return ("{" + ", ".join(parts[key] for key in sorted(parts)) + "}").encode()


def _sum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def source_of(checkpoint: Checkpoint, name: str) -> Callable[[str], Source]:
    """Where the pieces of the file ``name`` lie: see ``recovery.checkpoint.files.pieces.check``."""
    return lambda where: (checkpoint.path.parent / where if where else checkpoint.path) / name


def verify(checkpoint: Checkpoint, progress: Progress = quiet) -> dict[str, Any]:
    """Check every piece of every file against the manifest and return the manifest. Raises
    CorruptCheckpoint.
    """
    manifest = manifest_of(checkpoint)
    for name in manifest["files"]:
        pieces.check(
            stream_of(manifest, name), name, source_of(checkpoint, name), progress=progress
        )
    return manifest


# ---- lineage


@dataclass(frozen=True, kw_only=True, order=True)
class Origin:
    """Which job and generation saved a checkpoint. ``epoch``: number of the job in this directory;
    ``generation``: of the job; ``since``: the step from which that generation continued, -1: not
    recorded; ``job``: "" if it has none.
    """

    epoch: int = 0
    generation: int = 0
    since: int = -1
    job: str = field(default="", compare=False)


def origin_of(checkpoint: Checkpoint) -> Origin | None:
    """The origin by its manifest, which is not verified; None: it cannot be read."""
    facts = _facts(checkpoint)
    return facts[0] if facts is not None else None


def needed_by(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of the checkpoints that hold pieces of this one."""
    facts = _facts(checkpoint)
    # without a manifest nothing can bring it back
    return facts[1] if facts is not None else frozenset()


def _facts(checkpoint: Checkpoint) -> tuple[Origin, frozenset[str]] | None:
    path = checkpoint.path / MANIFEST
    try:
        stat = os.stat(path)
        stamp = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        return _read_facts(path, stamp)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


@lru_cache(MOST_KNOWN)
def _read_facts(path: Path, stamp: tuple[int, ...]) -> tuple[Origin, frozenset[str]]:
    """Cached while the file is the same: each save asks for all of them."""
    manifest = json.loads(path.read_bytes())
    if "self" not in manifest:
        raise ValueError("no manifest")
    origin = Origin(
        epoch=int(manifest.get("epoch", 0)),
        generation=int(manifest.get("generation", 0)),
        since=int(manifest.get("since", -1)),
        job=str(manifest.get("job", "")),
    )
    streams = (entry["pieces"] for entry in manifest["files"].values())
    return origin, frozenset(str(piece[0]) for stream in streams for piece in stream)


def by_lineage(directory: Path) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """Committed checkpoints of a directory, newest first: those that the newest generation goes
    back to, and those that were abandoned. Everything else in it is ignored.
    """
    if not directory.is_dir():
        return [], []
    found = ((path, _NAME.match(path.name)) for path in directory.iterdir())
    known = [Checkpoint(path=path, step=int(match[1])) for path, match in found if match]
    origins = {checkpoint: origin_of(checkpoint) for checkpoint in known}
    newest = max((origin for origin in origins.values() if origin is not None), default=Origin())
    # One that cannot be read is placed by its step, and refused there.
    sure = {checkpoint: origin or newest for checkpoint, origin in origins.items()}
    known.sort(key=lambda c: (sure[c].epoch, sure[c].generation, c.step), reverse=True)
    kept, abandoned = list[Checkpoint](), list[Checkpoint]()
    writer, since, limit = None, -1, -1
    for checkpoint in known:
        origin = sure[checkpoint]
        if (origin.epoch, origin.generation) != writer:
            limit = min((step for step in (since, limit) if step >= 0), default=-1)
            writer = origin.epoch, origin.generation
        since = origin.since
        (abandoned if 0 <= limit < checkpoint.step else kept).append(checkpoint)
    return kept, abandoned


def newest_first(directory: Path) -> list[Checkpoint]:
    """Committed checkpoints of a directory, newest first, those that were abandoned last."""
    kept, abandoned = by_lineage(directory)
    return [*kept, *abandoned]


def newest_good(
    directory: Path,
    refused: Callable[[Checkpoint, str], None],
    wanted: Callable[[Checkpoint], bool] = lambda _: True,
) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest checkpoint of those ``wanted`` that verifies, with its manifest.

    Calls ``refused`` for each newer one that does not.
    """
    for checkpoint in filter(wanted, newest_first(directory)):
        try:
            return checkpoint, verify(checkpoint)
        except CorruptCheckpoint as error:
            refused(checkpoint, str(error))
    return None


def note_refused(checkpoint: Checkpoint, reason: str) -> None:
    """Leave a note in a checkpoint that did not verify: no delta is built on it, and it counts for
    nothing. It may verify later, if only this read failed. A disk that cannot store the note is not
    an error.
    """
    with suppress(OSError):
        (checkpoint.path / REFUSED).write_text(json.dumps({"reason": reason[:500]}))


def is_refused(checkpoint: Checkpoint) -> bool:
    """Whether it is marked as not verified."""
    return (checkpoint.path / REFUSED).exists()


def note_verified(checkpoint: Checkpoint) -> None:
    """It verified: delete the note of ``note_refused``."""
    with suppress(OSError):
        (checkpoint.path / REFUSED).unlink(missing_ok=True)


# ---- saves


def staging_of(directory: Path, step: int, generation: int, epoch: int = 0) -> Path:
    """Where the files of an uncommitted checkpoint are put, by all ranks that write a part of
    it.
    """
    return directory / f"{_STAGING}{name_of(step)}-{epoch}-{generation}"


def refusal_of(directory: Path, step: int, generation: int, writer: int, job: str = "") -> Path:
    """Where a rank that may not, or cannot, write its part reports that to the rank that waits for
    it. It knows no epoch, and therefore no staging directory.
    """
    who = hashlib.blake2b(job.encode(), digest_size=8).hexdigest()
    return directory / f"{_REFUSAL}{name_of(step)}-{generation}-{who}-{writer:04d}"


def sweep(
    directory: Path,
    *,
    but: Path | None = None,
    until: tuple[int, int] | None = None,
    step: int = -1,
    progress: Progress = quiet,
) -> None:
    """Delete the remains of saves that never ended, except ``but``, what later epochs and
    generations than ``until`` are writing, and reports of writers about the save of ``step``.
    """
    for path in directory.iterdir() if directory.is_dir() else ():
        writer = _WRITER.search(path.name)
        newer = (
            writer is not None and until is not None and (int(writer[1]), int(writer[2])) > until
        )
        old = path.name.startswith((_STAGING, TRASH)) and path != but and not newer
        if old or (path.name.startswith(_REFUSAL) and f"-{name_of(step)}-" not in path.name):
            remove(path, progress)


def commit(
    staging: Path,
    directory: Path,
    step: int,
    facts: Mapping[str, Any],
    *,
    streams: Mapping[str, Sequence[Piece]] | None = None,
    hand: Hand = FREE,
) -> tuple[Checkpoint, int]:
    """Seal the files in ``staging`` under a manifest and move them into place; returns the
    checkpoint and its bytes.

    ``streams``: the pieces of files that are written, checksummed and synced; others are read for
    it. ``facts`` go into the manifest (JSON). A checkpoint of the same step left from before a
    rollback is replaced: the staged one belongs to the lineage that survives. Raises OSError when
    the disk refuses, and what ``guard`` raises; then nothing was committed.
    """
    disk, files = hand.disk, {}
    total = 0
    for path in sorted(staging.iterdir()):
        stream = (streams or {}).get(path.name)
        if stream is None:
            disk("fsync", path)
            with open(path, "rb+") as opened:
                os.fsync(opened.fileno())
            stream = pieces.of_file(path)
        size = sum(piece.size for piece in stream if not piece.where)
        total += size
        files[path.name] = {"bytes": size, "pieces": stream}
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files, **facts}
    manifest["checksum"] = pieces.ALGORITHM
    write_durably(staging / MANIFEST, sealed(manifest), disk)
    disk("fsync", staging)
    fsync_directory(staging)
    final, trash = directory / name_of(step), directory / f"{TRASH}{name_of(step)}"
    disk("rename", final)
    with hand.guard():
        take_back = put_in_place(staging, final, trash)
    try:
        disk("fsync", directory)
        fsync_directory(directory)
    except OSError:
        with hand.guard():
            take_back()  # reported as failed, so it must not remain
        raise
    for left in (staging, trash):
        remove(left, hand.progress)
    return Checkpoint(path=final, step=step), total


def write_durably(path: Path, data: bytes, disk: Disk) -> None:
    """Write a small file and sync it. Raises OSError."""
    disk("write", path)
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        disk("fsync", path)
        os.fsync(stream.fileno())


def first_line(error: BaseException) -> str:
    """What an error says, in one line that is never empty."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__
