"""Real text for language models: by default the source files of the running Python's standard
library.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError, ScenarioError

CAP_BYTES = 4 * 1024 * 1024
SKIPPED = frozenset({"site-packages", "__pycache__", "test", "tests"})


def prepare(data: str | None, target: Path, *, block: int) -> tuple[int, str, str]:
    """Write the corpus to ``target``; returns (bytes, SHA-256, description).

    ``data``: a file, a folder (its files in sorted order) or None for the standard library. At most
    CAP_BYTES are read. Raises ScenarioError if the data does not exist or is too small for one
    block.
    """
    source = Path(data) if data else Path(sysconfig.get_paths()["stdlib"])
    files = [source] if source.is_file() else _text_files(source, "" if data else ".py")
    digest = hashlib.sha256()
    size = 0
    try:
        with open(target, "wb") as out:
            for path in files:
                piece = _read(path, CAP_BYTES - size)
                out.write(piece)
                digest.update(piece)
                size += len(piece)
                if size >= CAP_BYTES:
                    break
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {target}: {error.strerror}", hint="free disk space"
        ) from error
    if size == 0:
        raise ScenarioError(
            f"no data at {source}", hint="workload.params.data names a file or a folder with files"
        )
    if size <= block:
        raise ScenarioError(
            f"{source} has {size} bytes, less than one sample of {block + 1}", hint="give more data"
        )
    about = f"{source.name if data else 'Python standard library'}, {size} bytes"
    return size, digest.hexdigest(), about


def _text_files(folder: Path, suffix: str) -> Iterator[Path]:
    """Files in sorted order, found lazily; folders that are links are not entered."""
    if not folder.is_dir():
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise _unreadable(folder, error) from error
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in SKIPPED:
                yield from _text_files(folder / entry.name, suffix)
        elif entry.name.endswith(suffix) and entry.is_file():
            yield folder / entry.name


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(limit)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ScenarioError:
    return ScenarioError(f"cannot read {path}: {error.strerror}", hint="check workload.params.data")
