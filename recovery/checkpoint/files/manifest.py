"""What the manifest of a checkpoint says: its files, their pieces, and a checksum of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint, Piece

MANIFEST = "manifest.json"
REFUSED = "refused.json"
FORMAT = 2
CHECKPOINT_NAME = re.compile(r"^step-(\d{8})$")


def read(directory: Path, step: int) -> dict[str, Any]:
    """The manifest of the checkpoint of ``step`` that lies in ``directory``, its own checksum and
    the names and sizes of its files checked; no data is read. Raises CorruptCheckpoint.
    """
    try:
        raw = (directory / MANIFEST).read_bytes()
        manifest = json.loads(raw)
        files, said = dict(manifest["files"]), manifest["step"]
    except FileNotFoundError:
        raise CorruptCheckpoint("the manifest is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"the manifest cannot be read: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CorruptCheckpoint(f"the manifest has format {manifest.get('format')!r}, not {FORMAT}")
    if not _is_sealed(raw, manifest):
        raise CorruptCheckpoint("the manifest does not match its own checksum")
    if said != step:
        raise CorruptCheckpoint(f"the manifest is of step {said}")
    _refuse_extra_files(directory, {MANIFEST, REFUSED, *files})
    for name in files:
        _verify_size(directory / name, files[name]["bytes"], stream_of(manifest, name))
    return dict(manifest)


def stream_of(manifest: Mapping[str, Any], name: str) -> list[Piece]:
    """The pieces of a data file. Raises CorruptCheckpoint when they are no pieces."""
    stream = pieces.parse(manifest["files"][name]["pieces"])
    bad = next((p.where for p in stream if p.where and not CHECKPOINT_NAME.match(p.where)), None)
    if bad is not None or "/" in name:
        raise CorruptCheckpoint(
            f"the manifest refers to {bad or name!r}, which is no checkpoint's file"
        )
    return stream


def _refuse_extra_files(path: Path, known: set[str]) -> None:
    """Refuse files that no manifest lists: a reader that takes every data file of the directory
    would read them.
    """
    try:
        extra = sorted(set(os.listdir(path)) - known)
    except OSError as error:
        raise CorruptCheckpoint(f"it cannot be read: {error.strerror}") from error
    if extra:
        raise CorruptCheckpoint(f"{extra[0]} is not in the manifest")


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
    """The manifest as text with its own checksum. Its keys are sorted; what a value holds stays in
    its order, which may matter to whoever registered it.
    """
    parts = {key: f'"{key}": {json.dumps(value)}' for key, value in manifest.items()}
    parts["self"] = f'"self": "{_sum("{" + ", ".join(parts[key] for key in sorted(parts)) + "}")}"'
    return ("{" + ", ".join(parts[key] for key in sorted(parts)) + "}").encode()


def _is_sealed(raw: bytes, manifest: Mapping[str, Any]) -> bool:
    mark = f'"self": "{manifest.get("self")}", '.encode()
    if raw.count(mark) == 1 and _sum(raw.replace(mark, b"")) == manifest.get("self"):
        # byte for byte; one that was reformatted by hand may still say the same
        return True
    return bool(manifest.get("self") == seal(manifest))


def seal(manifest: Mapping[str, Any]) -> str:
    """The checksum that a manifest carries as ``self``, hexadecimal."""
    return _sum(json.dumps({key: manifest[key] for key in sorted(manifest) if key != "self"}))


def _sum(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
