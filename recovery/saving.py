"""One attempt to save a checkpoint, and what is said of it. A failed save is reported and never ends training.

The next interval is the next attempt: the job goes on with the checkpoints it has, none of which is given up
for one that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from chaos.events import Kind
from recovery.checkpoints import Checkpoint, Disk, first_line, name_of, prune
from recovery.wire import CheckpointNote


class Write(Protocol):
    """Writes an event of the rank that saves."""

    def __call__(self, kind: Kind, /, **data: Any) -> None: ...


class Saving:
    """The saves of one rank. ``send``: to the supervisor; ``clock_s``: seconds, of any origin."""

    def __init__(
        self, *, write: Write, send: Callable[[CheckpointNote], object], clock_s: Callable[[], float]
    ) -> None:
        self._write = write
        self._send = send
        self._clock_s = clock_s

    def begin(self, step: int) -> float:
        """Say that a save begins; returns the time."""
        name = name_of(step)
        self._write(Kind.CHECKPOINT_SAVING, step=step, checkpoint=name)
        self._send(CheckpointNote(state="saving", checkpoint=name, step=step))
        return self._clock_s()

    def attempt(
        self, step: int, save: Callable[[], tuple[Checkpoint, int]], *, since_s: float,
        passes: tuple[type[BaseException], ...] = (),
    ) -> bool:  # fmt: skip
        """Save; whatever goes wrong is reported and swallowed, but for errors of the kinds in ``passes``.

        Returns whether the checkpoint is committed.
        """
        name = name_of(step)
        try:
            saved, size = save()
        except passes:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            self._write(Kind.CHECKPOINT_FAILED, step=step, checkpoint=name, error=text)
            self._send(CheckpointNote(state="failed", checkpoint=name, step=step, error=text[:500]))
            return False
        seconds = round(self._clock_s() - since_s, 6)
        self._write(Kind.CHECKPOINT_COMMITTED, step=step, checkpoint=saved.name, bytes=size, seconds=seconds)
        self._send(CheckpointNote(state="committed", checkpoint=name, step=step))
        return True

    def prune(self, directory: Path, keep: int, *, disk: Disk | None = None) -> None:
        """Delete what retention says; what the disk does not give up stays, and is reported."""
        try:
            gone = prune(directory, keep, refused=self._kept, disk=disk)
        except OSError as error:
            self._write(Kind.CHECKPOINT_KEPT, checkpoint="", error=first_line(error))
            return
        for old in gone:
            self._write(Kind.CHECKPOINT_DELETED, step=old.step, checkpoint=old.name)

    def _kept(self, old: Checkpoint, why: str) -> None:
        self._write(Kind.CHECKPOINT_KEPT, step=old.step, checkpoint=old.name, error=why)
