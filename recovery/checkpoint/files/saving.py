"""One attempt to save a checkpoint, and its report. A failed save is reported and never ends
training.

The next interval is the next attempt: the job continues with the checkpoints it has, none of which
is given up for a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.files.checkpoints import (
    Checkpoint,
    Disk,
    Guard,
    first_line,
    name_of,
    undisturbed,
)
from trainchaos.recovery.checkpoint.files.retention import Cleared, prune, set_aside
from trainchaos.recovery.transport.wire import CheckpointNote


class WriteRankEvent(Protocol):
    """Writes an event of the rank that saves."""

    def __call__(self, kind: Kind, /, **data: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended. ``bytes``: of what was committed, None: nothing was, and ``error`` says
    why, if this rank commits; ``seconds``: it took; ``blocked_s``: training was held up; ``more``:
    facts for the event.
    """

    step: int
    name: str
    seconds: float
    blocked_s: float
    bytes: int | None = None
    error: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    pruned: Cleared | None = None


class Saving:
    """The saves of one rank in one place. ``send``: to the supervisor; ``clock_s``: seconds, of any
    origin; ``name_of``: name of the checkpoint of a step.
    """

    def __init__(
        self,
        *,
        write: WriteRankEvent,
        send: Callable[[CheckpointNote], object],
        clock_s: Callable[[], float],
        name_of: Callable[[int], str] = name_of,
    ) -> None:
        self._write = write
        self._send = send
        self._clock_s = clock_s
        self._name_of = name_of

    def begin(self, step: int, *, whole: bool = True, **more: Any) -> float:
        """Report that a save begins; returns the time. ``whole``: not only a part of one, which
        another rank commits; ``more``: facts for the event.
        """
        name = self._name_of(step)
        if whole:
            self._write(Kind.CHECKPOINT_SAVING, step=step, checkpoint=name, **more)
            self._send(CheckpointNote(state="saving", checkpoint=name, step=step))
        else:
            self._part(step, "begun", 0.0)
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
        return outcome.bytes is not None

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
        return SaveOutcome(
            step=step,
            name=saved[0].name if saved is not None else self._name_of(step),
            seconds=seconds,
            blocked_s=seconds if blocked_s is None else blocked_s,
            bytes=saved[1] if saved is not None else None,
            error=error,
        )

    def failed(self, step: int, error: str, since_s: float) -> SaveOutcome:
        """The outcome of a save that was not tried."""
        seconds = self._clock_s() - since_s
        return SaveOutcome(
            step=step, name=self._name_of(step), seconds=seconds, blocked_s=seconds, error=error
        )

    def report(self, outcome: SaveOutcome, *, whole: bool = True) -> None:
        """Report how a save ended, and what retention did after it. ``whole``: see ``begin``."""
        step, name, error = outcome.step, outcome.name, outcome.error
        if not whole:
            self._part(step, "failed" if error else "written", outcome.seconds, error)
            return
        if outcome.bytes is None:
            self._write(
                Kind.CHECKPOINT_FAILED, step=step, checkpoint=name, error=error, **outcome.more
            )
            self._send(
                CheckpointNote(state="failed", checkpoint=name, step=step, error=error[:500])
            )
        else:
            self._write(
                Kind.CHECKPOINT_COMMITTED,
                step=step,
                checkpoint=name,
                bytes=outcome.bytes,
                seconds=round(outcome.seconds, 6),
                blocked_s=round(outcome.blocked_s, 6),
                **outcome.more,
            )
            self._send(CheckpointNote(state="committed", checkpoint=name, step=step))
        if outcome.pruned is not None:
            self._report_cleared(outcome.pruned)

    def _part(self, step: int, state: str, seconds: float, error: str = "") -> None:
        self._write(
            Kind.CHECKPOINT_PART,
            step=step,
            checkpoint=self._name_of(step),
            state=state,
            seconds=round(seconds, 6),
            error=error,
        )

    def prune(self, directory: Path, keep: int, **more: Any) -> None:
        """Delete what retention decides, and report it. ``more``: of
        ``recovery.checkpoint.files.retention.prune``.
        """
        self._report_cleared(prune(directory, keep, **more))

    def set_aside(
        self,
        directory: Path,
        in_doubt: Callable[[Checkpoint], bool],
        why: str,
        *,
        disk: Disk = undisturbed,
        guard: Guard = nullcontext,
        progress: Callable[[], None] | None = None,
    ) -> bool:
        """Set aside checkpoints that may hold a corrupted state, and report it with ``why``.
        Returns whether all of them are.
        """
        done = set_aside(directory, in_doubt, disk=disk, guard=guard, progress=progress)
        self._report_cleared(done, why)
        return not done.kept

    def _report_cleared(self, done: Cleared, why: str = "") -> None:
        for old, error in done.kept:
            about = (
                {"checkpoint": ""} if old is None else {"step": old.step, "checkpoint": old.name}
            )
            self._write(Kind.CHECKPOINT_KEPT, **about, error=error)
        for old in done.moved:
            self._write(Kind.CHECKPOINT_SET_ASIDE, step=old.step, checkpoint=old.name, reason=why)
        for old in done.gone:
            self._write(Kind.CHECKPOINT_DELETED, step=old.step, checkpoint=old.name, left=done.left)
        for name in done.gone_aside:
            self._write(Kind.CHECKPOINT_DELETED, checkpoint=name)
