"""The disk as a rank's saves see it: errors, slowness, and the death of a process or machine during
a save.

Real and simulated ranks share this code and supply their own ways to sleep and to die.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainchaos.chaos.fault.targets import DiskTrouble
from trainchaos.recovery.checkpoint.files.checkpoints import MANIFEST

RECORD_SUFFIX = ".json"
"""Suffix of the record of a part of a checkpoint: the part's manifest."""


class DiskShim:
    """Implements ``recovery.checkpoint.files.checkpoints.Disk``.

    ``sleep``: let time pass, in seconds; ``die``: end this process at once; ``say``: log an act
    before it happens.
    """

    def __init__(
        self,
        *,
        sleep: Callable[[float], None],
        die: Callable[[], None],
        say: Callable[[Mapping[str, Any], Mapping[str, Any]], None],
    ) -> None:
        self._sleep = sleep
        self._die = die
        self._say = say
        self._troubles: list[tuple[DiskTrouble, random.Random]] = []
        self._breakage: Mapping[str, Any] | None = None
        self._written: dict[str, Path] = {}
        self._synced: set[str] = set()
        self._syncing: str | None = None

    @property
    def active(self) -> bool:
        """Whether anything is wrong with the disk."""
        return bool(self._troubles) or self._breakage is not None

    def set_troubles(self, troubles: Sequence[tuple[DiskTrouble, int]]) -> None:
        """Replace all troubles, each with its seed; those present before continue."""
        before = self._troubles
        self._troubles = [
            next((one for one in before if one[0] is each), (each, random.Random(seed)))
            for each, seed in troubles
        ]

    def break_next_save(self, command: Mapping[str, Any]) -> None:
        """Die in the next save. ``command``: fault, occurrence, stage, and whether to lose unsynced
        data.
        """
        self._breakage = command

    def delay_s(self, operations: Sequence[str]) -> float:
        """How much longer these operations take, in seconds."""
        return sum(
            one.delay_s
            for what in operations
            for one, _ in self._troubles
            if what in one.operations
        )

    def __call__(self, what: str, path: Path) -> None:
        """See recovery.checkpoint.files.checkpoints.Disk. Raises OSError."""
        self._follow(what, path)
        if self._breakage is not None and self._is_due(str(self._breakage["stage"]), what, path):
            self._break(self._breakage, path)
        for trouble, rng in self._troubles:
            if what in trouble.operations:
                self._suffer(trouble, rng)

    def _suffer(self, trouble: DiskTrouble, rng: random.Random) -> None:
        if trouble.delay_s:
            self._sleep(trouble.delay_s)
        if trouble.error and rng.random() < trouble.probability:
            number = getattr(errno, trouble.error)
            raise OSError(number, os.strerror(number))

    def _follow(self, what: str, path: Path) -> None:
        """Track what is on the disk and what only in memory. It is called before each operation, so
        a sync is complete at the next call.
        """
        if what == "mkdir":
            self._written, self._synced, self._syncing = {}, set(), None
        if self._syncing is not None:
            self._synced.add(self._syncing)
        self._syncing = path.name if what == "fsync" else None
        if what == "write":
            self._synced.discard(path.name)
            self._written[path.name] = path

    def _is_due(self, stage: str, what: str, path: Path) -> bool:
        manifest = path.name == MANIFEST or path.suffix == RECORD_SUFFIX
        return {
            # at its second write, when the first part exists
            "data": what == "write" and not manifest and path.is_file() and path.stat().st_size > 0,
            "manifest": what == "write" and manifest,
            "rename": what == "rename",
            "renamed": what == "fsync" and bool(self._written) and not self._in_staging(),
        }[stage]

    def _in_staging(self) -> bool:
        return any(path.exists() for path in self._written.values())

    def _break(self, command: Mapping[str, Any], path: Path) -> None:
        lost: list[str] = []
        if command["lose"]:
            lost = self._lose(path)
        self._say(command, {"stage": command["stage"], "at": path.name, "lost": lost})
        self._die()

    def _lose(self, path: Path) -> list[str]:
        """Truncate files that were never synced, as a power failure would: their names stay,
        without content.
        """
        lost = []
        for name, where in self._written.items():
            found = where if where.exists() else self._renamed(path, name)
            if name not in self._synced and found is not None:
                os.truncate(found, 0)
                lost.append(name)
        return lost

    def _renamed(self, directory: Path, name: str) -> Path | None:
        """A file of the save in the checkpoint it was renamed to."""
        places = sorted(directory.glob(f"step-*/{name}")) if directory.is_dir() else []
        return places[-1] if places else None
