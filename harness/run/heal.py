"""Undoes what a run did to the machine: at the end of every run, and after a harness was killed.

The run's ledger lists everything to undo. Records that end processes come first, since nothing can
be taken away from under a process; then the rest, the newest first.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.errors import EXIT_PASS, EXIT_UNSAFE, InfrastructureError, LogError
from trainchaos.harness.host.rundir import RunDirectory, no_run
from trainchaos.harness.undo import live
from trainchaos.harness.undo.base import UndoOutcome, failed
from trainchaos.harness.undo.ledger import Ledger, LedgerEntry, read_open
from trainchaos.harness.undo.records import FreeShm, KillMarked


class Healed(BaseModel):
    """The result for one run. ``alive``: its harness is at work, so it was not touched;
    ``elsewhere``: it ran where this process cannot see its processes; ``busy``: another process is
    healing it; ``left``: something is left.
    """

    model_config = ConfigDict(frozen=True)

    run: Path
    state: Literal["healed", "left", "alive", "elsewhere", "busy"]
    note: str
    outcomes: tuple[UndoOutcome, ...] = ()

    @property
    def lines(self) -> list[str]:
        """For people: the run, then a line for each thing done or not done."""
        found = [f"  {outcome.text}" for outcome in self.outcomes if outcome.did or not outcome.ok]
        if self.state in ("healed", "left") and not found:
            found = ["  nothing was left"]
        return [f"{self.run}: {self.note}", *found]


@contextmanager
def guarded(run: RunDirectory) -> Iterator[Ledger]:
    """Be the harness of a run; on leaving, everything recorded is undone, whatever happened inside.

    Two records come before everything else and cover what no other record can: processes between
    their start and their own record, by the marker that they inherit, and the shared memory of
    processes that were killed. Raises InfrastructureError when the disk refuses.
    """
    with ExitStack() as stack:
        try:
            holder = stack.enter_context(live.holding(run))
            ledger = Ledger(run.ledger)
            ledger.will(KillMarked(marker=holder.marker, since=holder.start_time))
            ledger.will(FreeShm(run=run.root.absolute(), since_ns=holder.since_ns))
        except InfrastructureError:
            shutil.rmtree(run.root, ignore_errors=True)  # nothing was begun
            raise
        try:
            yield ledger
        finally:
            finish(run)


def finish(run: RunDirectory, *, limit_s: float = float("inf")) -> tuple[UndoOutcome, ...]:
    """Undo what is open in a run's ledger; when nothing is left, the run is over. ``limit_s``:
    start no undo later than that; ``chaos heal`` does the rest.
    """
    try:
        entries = read_open(run.ledger)
    except LogError as error:
        return (failed(f"{error.message}: nothing was undone"),)
    outcomes = _undo(run, entries, time.monotonic() + limit_s)
    if all(outcome.ok for outcome in outcomes):
        live.release(run)
    return outcomes


def heal(run: RunDirectory) -> Healed:
    """Heal one run, unless its harness is alive; a run that is over needs nothing."""
    try:
        holder = live.read_holder(run)
    except OSError as error:
        return _refused(run, error)
    if holder is None and live.locked(run):
        return Healed(run=run.root, state="alive", note="its harness is alive: not touched")
    if holder is not None and not holder.here:
        if live.locked(run):
            return Healed(
                run=run.root,
                state="alive",
                note="its harness is alive in another container: not touched",
            )
        return Healed(
            run=run.root, state="elsewhere", note=f"it ran on {holder.host}: heal it there"
        )
    if holder is not None and holder.alive:
        return Healed(
            run=run.root,
            state="alive",
            note=f"its harness (process {holder.pid}) is alive: not touched",
        )
    with live.healing(run) as mine:
        if not mine:
            return Healed(run=run.root, state="busy", note="somebody else is healing it")
        try:
            outcomes = finish(run)
        except OSError as error:
            return _refused(run, error)
    gone = f"its harness (process {holder.pid}) is gone" if holder else "its harness is gone"
    left = not all(outcome.ok for outcome in outcomes)
    return Healed(run=run.root, state="left" if left else "healed", note=gone, outcomes=outcomes)


def heal_all(runs: Path) -> list[Healed]:
    """Heal every run below ``runs`` that is not over; the empty list: there was none."""
    return [heal(run) for run in live.unfinished(runs)]


def heal_everything(runs: Path) -> list[Healed]:
    """As ``heal_all``, and also removes what this machine's container engine holds of runs that
    have no usable ledger.
    """
    from trainchaos.harness.launch.containers.orphans import orphans

    healed = heal_all(runs)
    for run, records in orphans():
        outcomes = tuple(record.undo() for record in records)
        left = not all(outcome.ok for outcome in outcomes)
        note = "it is over, or its directory is gone, and its harness is"
        healed.append(
            Healed(run=run, state="left" if left else "healed", note=note, outcomes=outcomes)
        )
    return healed


def heal_named(path: Path) -> list[Healed]:
    """Heal the run at a path; the empty list: it is over. Raises NoRun when there is no run."""
    run = RunDirectory(path.resolve())
    if not any(file.exists() for file in (run.ledger, run.resolved, run.root / live.FILE)):
        raise no_run(path)
    return [heal(run)] if os.path.lexists(run.root / live.FILE) or _is_open(run) else []


def exit_code(healed: list[Healed]) -> int:
    """0 when nothing is left, 5 when something is."""
    return EXIT_UNSAFE if any(one.state == "left" for one in healed) else EXIT_PASS


def _refused(run: RunDirectory, error: OSError) -> Healed:
    return Healed(
        run=run.root, state="left", note=f"it cannot be healed by this user: {error.strerror}"
    )


def _is_open(run: RunDirectory) -> bool:
    """Whether something is to be undone, or may be."""
    try:
        return bool(read_open(run.ledger))
    except LogError:
        return True


def _undo(
    run: RunDirectory, entries: list[LedgerEntry], deadline: float
) -> tuple[UndoOutcome, ...]:
    newest_first = entries[::-1]
    newest_first.sort(key=lambda entry: entry.undo is None or not entry.undo.ends_processes)
    ledger = Ledger(run.ledger)
    outcomes = []
    for entry in newest_first:
        if time.monotonic() > deadline:
            outcome = failed("no time was left for the rest: chaos heal does it")
        elif entry.undo is None:
            outcome = failed(f"record {entry.id} is not known to this version of chaos")
        else:
            outcome = entry.undo.undo_of(run.root)
        outcomes.append(outcome)
        if outcome.ok:
            ledger.undone(entry.id, outcome.text)
        else:
            ledger.failed(entry.id, outcome.text)
    return tuple(outcomes)
