"""Finds and digests the checkpoint files of a command: the newest in the directory that its
scenario names, in any format.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError

UNFINISHED = (".tmp", ".temp", ".part", ".partial")
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SavedFiles:
    """One file or directory that holds a checkpoint; see chaos.fault.targets.CheckpointTarget.

    ``digests``: of its files before a fault touched them, so that a change shows when they are read
    again.
    """

    path: Path
    older: Path | None
    seed: int
    digests: dict[Path, str]

    def verify(self) -> str | None:
        """What differs from the saved files, or None."""
        for path, before in self.digests.items():
            now = digest(path)
            if now is None:
                return f"{path.name} is gone"
            if now != before:
                return f"{path.name} no longer holds what was saved"
        return None

    def break_next_save(self, stage: str, *, lose_unsynced: bool) -> None:
        """Not possible for a command: scenarios that ask for it are refused when loaded. Raises
        InfrastructureError.
        """
        raise InfrastructureError(
            "a command's save cannot be broken from outside",
            hint="corrupt a saved checkpoint instead",
        )


def newest(directory: Path, seed: int) -> SavedFiles | None:
    """The newest checkpoint, or None when there is none. Hidden and unfinished files do not count.

    Of files and directories side by side, those that hold more bytes in all are the checkpoints;
    the others are bookkeeping, such as a file that names the newest directory, or a directory of
    logs.
    """
    if not directory.is_dir():
        return None
    entries = [
        p
        for p in directory.iterdir()
        if not p.name.startswith(".")
        and p.suffix not in UNFINISHED
        and (p.is_file() or any(_files(p)))
    ]
    apart = [[p for p in entries if p.is_dir() is directories] for directories in (True, False)]
    entries = max(
        apart, key=lambda some: sum(file.stat().st_size for p in some for file in _content(p))
    )
    entries.sort(key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True)
    if not entries:
        return None
    digests = {path: found for path in _content(entries[0]) if (found := digest(path)) is not None}
    return SavedFiles(
        path=entries[0], older=entries[1] if len(entries) > 1 else None, seed=seed, digests=digests
    )


def digest(path: Path) -> str | None:
    """SHA-256 of a file; None when it is gone."""
    total = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(BLOCK):
                total.update(block)
    except OSError:
        return None
    return total.hexdigest()


def _content(entry: Path) -> list[Path]:
    return [entry] if entry.is_file() else _files(entry)


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.is_file()) if directory.is_dir() else []
