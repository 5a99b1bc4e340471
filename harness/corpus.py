"""Real text for language models: by default the source files of the running Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from chaos.errors import InfrastructureError, ScenarioError

CAP_BYTES = 4 * 1024 * 1024


def prepare(data: str | None, target: Path, *, block: int) -> tuple[int, str, str]:
    """Write the corpus to ``target``; returns (bytes, SHA-256, description).

    ``data``: a file, a folder (its files in sorted order) or None for the standard library. At most CAP_BYTES
    are taken. Raises ScenarioError when there is no such data or too little of it for one block.
    """
    source = Path(data) if data else Path(sysconfig.get_paths()["stdlib"])
    files = [source] if source.is_file() else sorted(_text_files(source, "*.py" if data is None else "*"))
    if not files:
        raise ScenarioError(
            f"no data at {source}", hint="workload.params.data names a file or a folder with files"
        )
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
    if size <= block:
        raise ScenarioError(
            f"{source} has {size} bytes, less than one sample of {block + 1}", hint="give more data"
        )
    about = f"{source.name if data else 'Python standard library'}, {size} bytes"
    return size, digest.hexdigest(), about


def _text_files(folder: Path, pattern: str) -> Iterable[Path]:
    if not folder.is_dir():
        return []
    skip = {"site-packages", "__pycache__", "test", "tests"}
    return (
        p for p in folder.rglob(pattern) if p.is_file() and not skip & set(p.relative_to(folder).parts[:-1])
    )


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(limit)
    except OSError as error:
        raise ScenarioError(
            f"cannot read {path}: {error.strerror}", hint="check workload.params.data"
        ) from error
