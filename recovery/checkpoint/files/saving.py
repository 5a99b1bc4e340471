"""One attempt to save a checkpoint, and its report. A failed save is reported and never ends
training.

The next interval is the next attempt: the job continues with the checkpoints it has, none of which
is given up for a missing one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.files.checkpoints import (
    Checkpoint,
    Disk,
    Guard,
    first_line,
    name_of,
)
from trainchaos.recovery.checkpoint.files.fence import Fenced
from trainchaos.recovery.checkpoint.files.retention import prune, set_aside
from trainchaos.recovery.transport.wire import CheckpointNote


class WriteRankEvent(Protocol):
    """Writes an event of the rank that saves."""

    def __call__(self, kind: Kind, /, **data: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What retention did. ``kept``: (checkpoint, reason) of those that the disk failed to delete,
    None for all; ``left``: names of those that are to stay.
    """

    gone: tuple[Checkpoint, ...] = ()
    left: tuple[str, ...] = ()
    kept: tuple[tuple[Checkpoint | None, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended. ``saved``: the checkpoint and its bytes, or None and ``error`` says why;
    ``seconds``: it took; ``blocked_s``: training was held up.
    """

    step: int
    seconds: float
    blocked_s: float
    saved: tuple[Checkpoint, int] | None = None
    error: str = ""
    pruned: Pruned | None = None


class Saving:
    """The saves of one rank. ``send``: to the supervisor; ``clock_s``: seconds, of any origin."""

    def __init__(
        self,
        *,
        write: WriteRankEvent,
        send: Callable[[CheckpointNote], object],
        clock_s: Callable[[], float],
    ) -> None:
        self._write = write
        self._send = send
        self._clock_s = clock_s

    def begin(self, step: int, *, whole: bool = True) -> float:
        """Report that a save begins; returns the time. ``whole``: not only a part of one, which
        another rank commits.
        """
        name = name_of(step)
        if not whole:
            self._part(step, "begun", 0.0)
            return self._clock_s()
        self._write(Kind.CHECKPOINT_SAVING, step=step, checkpoint=name)
        self._send(CheckpointNote(state="saving", checkpoint=name, step=step))
        return self._clock_s()

    def attempt(
        self,
        step: int,
        save: Callable[[], tuple[Checkpoint, int]],
        *,
        since_s: float,
        passes: tuple[type[BaseException], ...] = (),
    ) -> bool:
        """Save; every error is reported and swallowed, but for errors of the kinds in ``passes``.

        Returns whether the checkpoint is committed.
        """
        outcome = self.tried(step, save, since_s=since_s, passes=passes)
        self.report(outcome)
        return outcome.saved is not None

    def tried(
        self,
        step: int,
        save: Callable[[], tuple[Checkpoint, int] | None],
        *,
        since_s: float,
        passes: tuple[type[BaseException], ...] = (),
        blocked_s: float | None = None,
    ) -> SaveOutcome:
        """As ``attempt``, without a report: safe on any thread. ``blocked_s``: None where training
        waited for all of it.
        """
        saved, error = None, ""
        try:
            saved = save()
        except passes:
            raise
        except Exception as problem:
            error = f"{type(problem).__name__}: {first_line(problem)}"
        seconds = self._clock_s() - since_s
        blocked_s = seconds if blocked_s is None else blocked_s
        return SaveOutcome(
            step=step, seconds=seconds, blocked_s=blocked_s, saved=saved, error=error
        )

    def report(self, outcome: SaveOutcome, *, whole: bool = True) -> None:
        """Report how a save ended, and what retention did after it. ``whole``: see ``begin``."""
        step, name = outcome.step, name_of(outcome.step)
        if not whole:
            self._part(
                step, "failed" if outcome.error else "written", outcome.seconds, outcome.error
            )
            return
        if outcome.saved is None:
            self._write(Kind.CHECKPOINT_FAILED, step=step, checkpoint=name, error=outcome.error)
            self._send(
                CheckpointNote(
                    state="failed", checkpoint=name, step=step, error=outcome.error[:500]
                )
            )
        else:
            self._write(
                Kind.CHECKPOINT_COMMITTED,
                step=step,
                checkpoint=outcome.saved[0].name,
                bytes=outcome.saved[1],
                seconds=round(outcome.seconds, 6),
                blocked_s=round(outcome.blocked_s, 6),
            )
            self._send(CheckpointNote(state="committed", checkpoint=name, step=step))
        if outcome.pruned is not None:
            self._report_pruned(outcome.pruned)

    def _part(self, step: int, state: str, seconds: float, error: str = "") -> None:
        self._write(
            Kind.CHECKPOINT_PART,
            step=step,
            checkpoint=name_of(step),
            state=state,
            seconds=round(seconds, 6),
            error=error,
        )

    def prune(self, directory: Path, keep: int, **more: Any) -> None:
        """Delete what retention decides; what the disk fails to delete stays, and is reported.
        ``more``: of ``recovery.checkpoint.files.retention.prune``.
        """
        self._report_pruned(pruned(directory, keep, **more))

    def set_aside(
        self,
        directory: Path,
        in_doubt: Callable[[Checkpoint], bool],
        why: str,
        *,
        disk: Disk | None = None,
        guard: Guard = nullcontext,
        progress: Callable[[], None] | None = None,
    ) -> bool:
        """Set aside checkpoints that may hold a corrupted state, and report it with ``why``.
        Returns whether all of them are.
        """
        left = list[Checkpoint]()

        def refused(old: Checkpoint, error: str) -> None:
            left.append(old)
            self._write(Kind.CHECKPOINT_KEPT, step=old.step, checkpoint=old.name, error=error)

        moved, gone = set_aside(
            directory, in_doubt, refused=refused, disk=disk, guard=guard, progress=progress
        )
        for old in moved:
            self._write(Kind.CHECKPOINT_SET_ASIDE, step=old.step, checkpoint=old.name, reason=why)
        for name in gone:
            self._write(Kind.CHECKPOINT_DELETED, checkpoint=name)
        return not left

    def _report_pruned(self, done: Pruned) -> None:
        for old, why in done.kept:
            if old is None:
                self._write(Kind.CHECKPOINT_KEPT, checkpoint="", error=why)
            else:
                self._write(Kind.CHECKPOINT_KEPT, step=old.step, checkpoint=old.name, error=why)
        for old in done.gone:
            self._write(
                Kind.CHECKPOINT_DELETED, step=old.step, checkpoint=old.name, left=list(done.left)
            )


def pruned(directory: Path, keep: int, **more: Any) -> Pruned:
    """Delete what retention decides, without a report."""
    kept: list[tuple[Checkpoint | None, str]] = []
    left: list[str] = []
    try:
        gone = prune(
            directory,
            keep,
            refused=lambda old, why: kept.append((old, why)),
            stays=lambda names: left.extend(sorted(names)),
            **more,
        )
    except Fenced:
        return Pruned()  # another process decides what goes
    except OSError as error:
        return Pruned(kept=((None, first_line(error)),))
    return Pruned(gone=tuple(gone), kept=tuple(kept), left=tuple(left))
