"""Saves and restores the training state: one part or several, verified on restore.

The format (``recovery.checkpoint.files.checkpoints``, ``recovery.checkpoint.files.pieces``): raw
bytes in data files, one per writing rank; names, types, shapes and scalars in a JSON manifest. No
byte read back is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint, Disk, Guard
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint, Piece
from trainchaos.recovery.checkpoint.saves import delta, sharded
from trainchaos.recovery.checkpoint.saves.chunks import Chunk, chunks_of, described, share
from trainchaos.recovery.checkpoint.saves.part import CheckpointPart, file_of, write_part
from trainchaos.recovery.checkpoint.saves.reading import ChunkRestore, planned, table_of
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import quiet
from trainchaos.recovery.transport.atomic_rename import remove

PARTS_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """One save, as one of its writers sees it. ``writer`` 0 commits; ``delta``: a full checkpoint
    every so many, 1: each is full; ``check``: raises when the save is to be given up; ``since``:
    the step from which the generation went on (-1: unknown); ``job``: its name, if it has one;
    ``progress``: called, by any thread, at least every 32 MB and for each file that is deleted;
    ``enter``: called before the first byte, returns the epoch; ``still``: called by writer 0 while
    it waits for others, and raises when it may not write any more; ``guard``: around each rename;
    ``partial``: other writers hold other parameters.
    """

    directory: Path
    step: int
    generation: int
    scalars: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    partial: bool = False
    writer: int = 0
    writers: int = 1
    delta: int = 1
    disk: Disk
    check: Callable[[], None]
    since: int = -1
    job: str = ""
    progress: Callable[[], None] | None = None
    enter: Callable[[], int] = lambda: 0
    still: Callable[[], None] = quiet
    guard: Guard = nullcontext


def order_of(
    state: TrainState,
    directory: Path,
    *,
    generation: int,
    writer: int = 0,
    writers: int = 1,
    delta_every: int = 1,
    disk: Disk | None = None,
    check: Callable[[], None] | None = None,
    since: int = -1,
    job: str = "",
    progress: Callable[[], None] | None = None,
    enter: Callable[[], int] = lambda: 0,
    still: Callable[[], None] = quiet,
    guard: Guard = nullcontext,
) -> tuple[SaveOrder, list[Chunk]]:
    """A save of the state as it is now, and this writer's part of it: live references."""
    tensors = state.saved()
    held = chunks_of(tensors, state.learned(tensors))
    order = SaveOrder(
        directory=directory,
        step=state.step,
        generation=generation,
        scalars=state.scalars(),
        tensors=described(held),
        partial=state.partial,
        writer=writer,
        writers=writers,
        delta=delta_every,
        disk=disk or _silent,
        check=check or _unchecked,
        since=since,
        job=job,
        progress=progress,
        enter=enter,
        still=still,
        guard=guard,
    )
    cell = state.cell
    if cell is not None:  # of what several cells hold, one of them writes all
        mine = [
            c
            for c in held
            if c.bytes and (c.name in state.own or cell.speaks(c.name, tensors[c.name]))
        ]
        return order, mine
    return order, share(held, writer, writers)


def write(order: SaveOrder, chunks: Sequence[Chunk]) -> tuple[Checkpoint, int] | None:
    """Write this writer's part; writer 0 then waits for the others and commits: the checkpoint and
    its bytes.

    Raises OSError when the disk refuses, RuntimeError for a state that is not finite and for parts
    that are missing or do not fit (TimeoutError is an OSError), and what ``check``, ``enter`` and
    ``guard`` raise. Nothing is committed then.
    """
    try:
        return _written(order, chunks)
    except Exception as error:
        if order.writer:
            sharded.give_up(note_of(order, order.writer), checkpoints.first_line(error))
        raise


def _written(order: SaveOrder, chunks: Sequence[Chunk]) -> tuple[Checkpoint, int] | None:
    epoch = order.enter()
    staging = checkpoints.staging_of(order.directory, order.step, order.generation, epoch)
    known, number = delta.base_of(order.directory, order.step, order.writer, order.delta)
    progress = order.progress
    if order.writer == 0:
        but, step = (staging, order.step) if order.writers > 1 else (None, -1)
        until = (epoch, order.generation)
        checkpoints.sweep(order.directory, but=but, until=until, step=step, progress=progress)
        order.disk("mkdir", staging)
    staging.mkdir(parents=True, exist_ok=order.writers > 1)
    try:
        shown = progress or quiet
        if order.writer:
            shown = sharded.PartProgress(staging / file_of(order.writer), shown)
        part = write_part(
            staging,
            order.writer,
            chunks,
            order.tensors,
            disk=order.disk,
            known=known,
            delta=number,
            progress=shown,
        )
        if order.partial:
            part = replace(part, stage=sharded.stage_of(order.scalars))
        if order.writer:
            sharded.announce(staging, order.writer, part, disk=order.disk)
            return None
        facts, streams = _merged(order, staging, part, epoch)
        order.check()
        return checkpoints.commit(
            staging,
            order.directory,
            order.step,
            facts,
            streams=streams,
            disk=order.disk,
            guard=order.guard,
            progress=progress,
        )
    finally:
        if order.writer == 0:
            remove(staging, progress)
            for writer in range(1, order.writers):
                note_of(order, writer).unlink(missing_ok=True)


def _merged(
    order: SaveOrder, staging: Path, own: CheckpointPart, epoch: int
) -> tuple[dict[str, Any], dict[str, list[Piece]]]:
    """Wait for the other writers' parts; returns the manifest's facts and the pieces of each file.
    Raises as ``write``.
    """
    others = sharded.gather(
        staging,
        order.writers,
        timeout_s=PARTS_TIMEOUT_S,
        check=order.check,
        note_of=partial(note_of, order),
        still=order.still,
    )
    facts, streams = sharded.merge([own, *others])
    gone = delta.missing(order.directory, streams)
    if gone is not None:
        raise RuntimeError(
            f"{gone} is gone, to which this delta refers: the next one is tried anew"
        )
    facts |= {
        "epoch": epoch,
        "generation": order.generation,
        "since": order.since,
        **({"job": order.job} if order.job else {}),
        "scalars": sharded.with_stages(order.scalars, [part.stage for part in others]),
    }
    return facts, streams


def note_of(order: SaveOrder, writer: int) -> Path:
    """Where a writer reports that its part will not come."""
    return checkpoints.refusal_of(order.directory, order.step, order.generation, writer, order.job)


def save(
    state: TrainState, directory: Path, *, generation: int, disk: Disk | None = None
) -> tuple[Checkpoint, int]:
    """Write and commit the state of one process; returns the checkpoint and its size in bytes. See
    ``write``.
    """
    order, chunks = order_of(state, directory, generation=generation, disk=disk)
    saved = write(order, chunks)
    assert saved is not None
    return saved


def prepared(
    state: TrainState, checkpoint: Checkpoint, progress: Callable[[], None] | None = None
) -> ChunkRestore:
    """The part of the state that this process holds, ready to be read from a checkpoint that fits
    it. Raises CorruptCheckpoint and CheckpointMismatch; see ``load``.
    """
    manifest = checkpoints.manifest_of(checkpoint)
    slots = planned(checkpoint.name, state, manifest["scalars"], table_of(manifest))
    return ChunkRestore(
        checkpoint,
        chunks_of(state.saved(slots)),
        manifest=manifest,
        slots=slots,
        partial=state.partial,
        progress=progress,
    )


def load(state: TrainState, reading: ChunkRestore) -> None:
    """Fill the state from a reading that verified. Raises HalfLoaded."""
    reading.load()
    state.load_scalars(reading.scalars, reading.slots)


def restore_newest(
    state: TrainState,
    directory: Path,
    refused: Callable[[Checkpoint, str], None],
    *,
    progress: Callable[[], None] | None = None,
    wanted: Callable[[Checkpoint], bool] = lambda _: True,
) -> Checkpoint | None:
    """Load the newest checkpoint that verifies into ``state``.

    None when there is none of those ``wanted``. ``refused`` is called for bad ones. Raises
    CheckpointMismatch, with nothing loaded, for a good one of another job.
    """
    for checkpoint in checkpoints.newest_first(directory):
        if not wanted(checkpoint):
            continue
        try:
            reading = prepared(state, checkpoint, progress)
            reading.verify()
        except CorruptCheckpoint as error:
            refused(checkpoint, str(error))
            continue
        load(state, reading)
        checkpoints.note_verified(checkpoint)
        return checkpoint
    return None


def _silent(what: str, path: Path) -> None:
    """Ignores refused checkpoints."""


def _unchecked() -> None:
    """Never gives a save up."""
