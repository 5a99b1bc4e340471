"""What one rank reports of its saves. A failed save is reported and never ends training.

The next interval is the next attempt: the job continues with the checkpoints it has, none of which
is given up for a missing one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import (
    FREE,
    Checkpoint,
    Hand,
    Progress,
    first_line,
    quiet,
)
from trainchaos.recovery.checkpoint.files.retention import Cleared, prune, set_aside
from trainchaos.recovery.transport.wire import CheckpointNote

State = Literal["saving", "committed", "failed"]


class WriteRankEvent(Protocol):
    """Writes an event of the rank that saves."""

    def __call__(self, kind: Kind, /, **data: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RankHooks:
    """What checkpoints have to do with the rest of their rank. ``send``: to the supervisor;
    ``check`` raises GenerationLost once the generation is aborted; ``progress``: called while a
    save or restore goes on, so that it is not taken for a hang; ``entered``: called with the step
    and whether this rank writes, when a save begins; ``saves``: called before anything is done for
    a save, in memory or on disk; ``agreed``: the last step at which the replicas are known to have
    been the same (-1: not known); ``clock_s``: seconds, of any origin.
    """

    write: WriteRankEvent
    send: Callable[[Any], object]
    check: Progress = quiet
    progress: Progress = quiet
    entered: Callable[[int, bool], None] = lambda step, writes: None
    saves: Callable[[], object] = quiet
    agreed: Callable[[], int] = lambda: -1
    clock_s: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended. ``whole``: not only a part, which another rank commits; ``bytes``: of what
    was committed, None: nothing was, and ``error`` says why; ``seconds``: it took; ``blocked_s``:
    training was held up; ``more``: facts for the event.
    """

    step: int
    whole: bool = True
    seconds: float = 0.0
    blocked_s: float = 0.0
    bytes: int | None = None
    error: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    cleared: Cleared | None = None


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
        name_of: Callable[[int], str] = checkpoints.name_of,
    ) -> None:
        self._write = write
        self._send = send
        self._clock_s = clock_s
        self._name_of = name_of

    def begin(self, step: int, *, whole: bool = True, **more: Any) -> float:
        """Report that a save begins; returns the time."""
        if whole:
            self._report(Kind.CHECKPOINT_SAVING, step, "saving", more)
        else:
            self._part(step, "begun", 0.0)
        return self._clock_s()

    def attempt(
        self,
        step: int,
        save: Callable[[], tuple[Checkpoint, int] | None],
        *,
        since_s: float,
        whole: bool = True,
        blocked_s: float | None = None,
    ) -> SaveOutcome:
        """Save, without a report: safe on any thread; errors become the outcome. ``blocked_s``:
        None where training waited for all of it.
        """
        saved, error = None, ""
        try:
            saved = save()
        except Exception as problem:
            error = f"{type(problem).__name__}: {first_line(problem)}"
        seconds = self._clock_s() - since_s
        return SaveOutcome(
            step=step,
            whole=whole,
            seconds=seconds,
            blocked_s=seconds if blocked_s is None else blocked_s,
            bytes=saved[1] if saved is not None else None,
            error=error,
        )

    def report(self, outcome: SaveOutcome) -> None:
        """Report how a save ended, and what retention did after it."""
        step, error = outcome.step, outcome.error
        if not outcome.whole:
            self._part(step, "failed" if error else "written", outcome.seconds, error)
        elif outcome.bytes is None:
            self._report(Kind.CHECKPOINT_FAILED, step, "failed", {"error": error, **outcome.more})
        else:
            facts = {
                "bytes": outcome.bytes,
                "seconds": round(outcome.seconds, 6),
                "blocked_s": round(outcome.blocked_s, 6),
                **outcome.more,
            }
            self._report(Kind.CHECKPOINT_COMMITTED, step, "committed", facts)
        if outcome.cleared is not None:
            self._report_cleared(outcome.cleared)

    def _report(self, kind: Kind, step: int, state: State, facts: Mapping[str, Any]) -> None:
        name = self._name_of(step)
        self._write(kind, step=step, checkpoint=name, **facts)
        error = str(facts.get("error", ""))[:500]
        self._send(CheckpointNote(state=state, checkpoint=name, step=step, error=error))

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
        hand: Hand = FREE,
    ) -> bool:
        """Set aside checkpoints that may hold a corrupted state, and report it with ``why``.
        Returns whether all of them are.
        """
        done = set_aside(directory, in_doubt, hand=hand)
        self._report_cleared(done, why)
        return not done.kept

    def _report_cleared(self, done: Cleared, why: str = "") -> None:
        for old, error in done.kept:
            about = {"step": old.step, "checkpoint": old.name} if old else {"checkpoint": ""}
            self._write(Kind.CHECKPOINT_KEPT, **about, error=error)
        for old in done.moved:
            self._write(Kind.CHECKPOINT_SET_ASIDE, step=old.step, checkpoint=old.name, reason=why)
        for old in done.gone:
            self._write(Kind.CHECKPOINT_DELETED, step=old.step, checkpoint=old.name, left=done.left)
        for name in done.gone_aside:
            self._write(Kind.CHECKPOINT_DELETED, checkpoint=name)
