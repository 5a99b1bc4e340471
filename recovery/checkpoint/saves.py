"""Saves the training state: each writing rank its part, of which the first one makes a checkpoint.

Each writes one file, in one pass from the tensors' own memory; checksums, and whether the values
are finite, are computed on another thread meanwhile, and nothing is read back. It puts that file
and then a record of it into the staging directory of the step and generation; the first writer
waits for all records and commits. Only the file system is used, so a save is no collective: ranks
that have written their part train on.

In a delta checkpoint, pieces that an older checkpoint holds already are referred to instead of
written again. Equality is decided by size and checksum alone, so it does not matter which rank
wrote the older one, or in which lineage; a reference always leads straight to the checkpoint that
holds the bytes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainchaos.recovery.checkpoint.chunks import (
    Chunk,
    chunks_of,
    described,
    first_not_finite,
    on_host,
    placed,
    share,
)
from trainchaos.recovery.checkpoint.files import checkpoints, pieces
from trainchaos.recovery.checkpoint.files.checkpoints import (
    FREE,
    Checkpoint,
    CorruptCheckpoint,
    Disk,
    Hand,
    write_durably,
)
from trainchaos.recovery.checkpoint.files.pieces import Piece
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import Progress, quiet
from trainchaos.recovery.transport.atomic_rename import await_writeback, begin_writeback, remove

PARTS_TIMEOUT_S = 120.0
LOOK_S = 0.005
STILL_S = 0.25
SHOW_S = 1.0
MOST_AT_ONCE = 1024  # buffers given to the kernel in one call: IOV_MAX of Linux
LOOK_BYTES = 1 << 20  # checked by one task
BATCH_BYTES = 8 << 20  # written at once, and at least two in a file, so that progress shows

Known = Callable[[int, str], Piece | None]
"""Size and checksum of a piece -> where an older checkpoint holds the same bytes, or None."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What one writer saves. ``tensors``: dtype and shape of every tensor of the state; ``chunks``:
    this writer's, live references at first; ``partial``: others hold other parameters.
    """

    step: int
    scalars: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    chunks: Sequence[Chunk]
    partial: bool = False


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """One save, as one of its writers sees it. ``writer`` 0 commits; ``delta``: a full checkpoint
    every so many, 1: each is full; ``since``: the step from which the generation went on (-1:
    unknown); ``job``: its name, if it has one; ``check``: raises when the save is to be given up;
    ``enter``: called before the first byte, returns the epoch; ``still``: called by writer 0 while
    it waits for others, and raises when it may not write any more.
    """

    directory: Path
    generation: int
    writer: int = 0
    writers: int = 1
    delta: int = 1
    since: int = -1
    job: str = ""
    hand: Hand = FREE
    check: Callable[[], None] = quiet
    enter: Callable[[], int] = lambda: 0
    still: Callable[[], None] = quiet


def content_of(state: TrainState, writer: int = 0, writers: int = 1) -> Content:
    """The state as it is now, and this writer's part of it."""
    tensors = state.saved()
    held, cell = chunks_of(tensors, state.learned(tensors)), state.cell
    if cell is None:
        mine = share(held, writer, writers)
    else:  # of what several cells hold, one of them writes all
        mine = [
            c
            for c in held
            if c.bytes and (c.name in state.own or cell.speaks(c.name, tensors[c.name]))
        ]
    return Content(
        step=state.step,
        scalars=state.scalars(),
        tensors=described(held),
        chunks=mine,
        partial=state.partial,
    )


def save(
    state: TrainState, directory: Path, *, generation: int, hand: Hand = FREE
) -> tuple[Checkpoint, int]:
    """Write and commit the state of one process; returns the checkpoint and its size in bytes. See
    ``write``.
    """
    order = SaveOrder(directory=directory, generation=generation, hand=hand)
    saved = write(order, content_of(state))
    assert saved is not None
    return saved


def write(order: SaveOrder, content: Content) -> tuple[Checkpoint, int] | None:
    """Write this writer's part; writer 0 then waits for the others and commits: the checkpoint and
    its bytes.

    Raises OSError when the disk refuses, RuntimeError for a state that is not finite and for parts
    that are missing or do not fit (TimeoutError is an OSError), and what ``check``, ``enter`` and
    ``guard`` raise. Nothing is committed then.
    """
    try:
        return _written(order, content)
    except Exception as error:
        if order.writer:
            give_up(order, content.step, checkpoints.first_line(error))
        raise


def _written(order: SaveOrder, content: Content) -> tuple[Checkpoint, int] | None:
    epoch, hand, step = order.enter(), order.hand, content.step
    staging = checkpoints.staging_of(order.directory, step, order.generation, epoch)
    path = staging / file_of(order.writer)
    known, delta = _base_of(order, step)
    if order.writer:
        hand = replace(hand, progress=PartProgress(path, hand.progress))
    else:
        but, kept = (staging, step) if order.writers > 1 else (None, -1)
        until = (epoch, order.generation)
        checkpoints.sweep(order.directory, but=but, until=until, step=kept, progress=hand.progress)
        hand.disk("mkdir", staging)
    staging.mkdir(parents=True, exist_ok=order.writers > 1)
    try:
        part = _write_part(path, content, delta, known, hand)
        if order.writer:
            _announce(staging, order.writer, part, disk=hand.disk)
            return None
        others = gather(order, staging, step)
        facts, streams = merge([part, *others])
        gone = _missing(order.directory, streams)
        if gone is not None:
            raise RuntimeError(
                f"{gone} is gone, to which this delta refers: the next one is tried anew"
            )
        facts |= {
            "epoch": epoch,
            "generation": order.generation,
            "since": order.since,
            **({"job": order.job} if order.job else {}),
            "scalars": _with_stages(content.scalars, [part.stage for part in others]),
        }
        order.check()
        return checkpoints.commit(staging, order.directory, step, facts, streams=streams, hand=hand)
    finally:
        if order.writer == 0:
            remove(staging, hand.progress)
            for writer in range(1, order.writers):
                note_of(order, step, writer).unlink(missing_ok=True)


# ---- one part


@dataclass(frozen=True, kw_only=True)
class CheckpointPart:
    """What one rank wrote. ``tensors``: see ``recovery.checkpoint.chunks.placed``; ``delta``: how
    many checkpoints on from the last full one this is; ``stage``: scalars of parameters that others
    may not have.
    """

    file: str
    pieces: list[Piece]
    tensors: dict[str, dict[str, Any]]
    delta: int = 0
    stage: dict[str, Any] | None = None


def file_of(writer: int) -> str:
    """Name of a writer's data file."""
    return f"rank-{writer:04d}.bin"


def _write_part(
    path: Path, content: Content, delta: int, known: Known | None, hand: Hand
) -> CheckpointPart:
    """Write and sync the chunks. ``known``: finds bytes that are stored already. Raises OSError,
    RuntimeError for a state that is not finite: restoring it would be useless.
    """
    chunks, progress = content.chunks, hand.progress
    offsets, end = pieces.cut([chunk.bytes for chunk in chunks])
    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as pool:
        finite = [pool.submit(first_not_finite, some, progress) for some in _together(chunks)]
        try:
            bytes_ = list(_stream(chunks, offsets, end, progress))
            stream = _write_stream(path, bytes_, pool, known, hand)
            bad = next((found for each in finite if (found := each.result()) is not None), None)
            if bad is not None:
                raise RuntimeError(f"the state is not finite ({bad}), so it is not saved")
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return CheckpointPart(
        file=path.name,
        pieces=stream,
        tensors=placed(chunks, offsets, content.tensors),
        delta=delta,
        stage=_stage_of(content.scalars) if content.partial else None,
    )


def _together(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks in groups of some size: of most states there are many small ones."""
    group, size = list[Chunk](), 0
    for chunk in chunks:
        group.append(chunk)
        size += chunk.bytes
        if size >= LOOK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _stream(
    chunks: Sequence[Chunk], offsets: Sequence[int], end: int, progress: Progress
) -> Iterator[list[memoryview]]:
    """The bytes of the stream, piece by piece, each as a list of buffers."""
    room = size = pieces.piece_bytes(end)
    parts: list[memoryview] = []
    padding = memoryview(bytes(pieces.ALIGN))
    for chunk, offset, following in zip(chunks, offsets, [*offsets, end][1:], strict=True):
        data = on_host(chunk.data, progress)
        for view in (data, padding[: following - offset - len(data)]):
            while len(view) >= room:
                parts.append(view[:room])
                yield parts
                view, parts, room = view[room:], [], size
            if len(view):
                parts.append(view)
                room -= len(view)
    if parts:
        yield parts


def _write_stream(
    path: Path,
    stream: Sequence[list[memoryview]],
    pool: ThreadPoolExecutor,
    known: Known | None,
    hand: Hand,
) -> list[Piece]:
    """Write the file in batches, which the disk begins with at once, and sync it."""

    def checksum(parts: list[memoryview]) -> str:
        digest = pieces.checksum(*parts)
        hand.progress()
        return digest

    sums: list[Future[str]] = [pool.submit(checksum, parts) for parts in stream]
    sizes = [sum(map(len, parts)) for parts in stream]
    batch = min(BATCH_BYTES, max(1, sum(sizes) // 2))
    made: list[tuple[int, Piece | None]] = []
    waiting: list[memoryview] = []
    start = end = 0

    def flush() -> None:
        hand.disk("write", path)
        _write_all(fd, waiting, start)
        begin_writeback(fd, start, end - start)

    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for parts, size, digest in zip(stream, sizes, sums, strict=True):
            old = known(size, digest.result()) if known is not None else None
            made.append((end, old))
            if old is None:
                waiting += parts
                end += size
            if end - start >= batch:
                flush()
                start, waiting = end, []
        if waiting:
            flush()
        hand.disk("fsync", path)
        await_writeback(fd, end, hand.progress)
        os.fsync(fd)
    finally:
        os.close(fd)
    return [
        old or Piece("", offset, size, digest.result())
        for (offset, old), size, digest in zip(made, sizes, sums, strict=True)
    ]


def _write_all(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    total = sum(len(part) for part in parts)
    if len(parts) > MOST_AT_ONCE:
        parts = [memoryview(b"".join(parts))]
    done = os.pwritev(fd, parts, offset)
    if done < total:  # the kernel may take less than it is given; the next call says why
        rest = memoryview(b"".join(parts))
        while done < total:
            done += os.pwrite(fd, rest[done:], offset + done)


def _base_of(order: SaveOrder, step: int) -> tuple[Known | None, int]:
    """What the newest checkpoint of the lineage before ``step`` offers this writer, and how many
    deltas on from a full one the next is: (None, 0) for a full one.
    """
    if order.delta <= 1:
        return None, 0
    lineage, _ = checkpoints.by_lineage(order.directory)
    # Nothing is built on a checkpoint that did not verify: the bytes referred to may be the damaged
    # ones.
    older = next((c for c in lineage if c.step < step and not checkpoints.is_refused(c)), None)
    if older is None:
        return None, 0
    try:
        manifest = checkpoints.manifest_of(older)
        delta = int(manifest.get("delta", 0)) + 1
        if delta >= order.delta or file_of(order.writer) not in manifest["files"]:
            return None, 0
        stream = checkpoints.stream_of(manifest, file_of(order.writer))
    except CorruptCheckpoint:
        return None, 0
    there = {(p.size, p.sum): p._replace(where=p.where or older.name) for p in stream}
    return lambda size, digest: there.get((size, digest)), delta


def _missing(directory: Path, streams: Mapping[str, Sequence[Piece]]) -> str | None:
    """A referenced file that does not exist (any more), or None."""
    wanted = {(piece.where, name) for name, stream in streams.items() for piece in stream}
    return next(
        (
            f"{where}/{name}"
            for where, name in sorted(wanted)
            if where and not (directory / where / name).is_file()
        ),
        None,
    )


# ---- all parts


def _announce(staging: Path, writer: int, part: CheckpointPart, *, disk: Disk) -> None:
    """Leave the record of a part that is written and synced. Raises OSError."""
    record = json.dumps(vars(part))
    hidden = staging / f".{_record(writer)}"
    document = {"record": record, "self": pieces.checksum(record.encode())}
    write_durably(hidden, json.dumps(document).encode(), disk)
    disk("rename", staging / _record(writer))
    hidden.rename(staging / _record(writer))


def _read(path: Path) -> CheckpointPart:
    document: Mapping[str, Any] = json.loads(path.read_bytes())
    if document["self"] != pieces.checksum(document["record"].encode()):
        raise RuntimeError(f"{path.name} does not match its own checksum")
    record = json.loads(document["record"])
    return CheckpointPart(**{**record, "pieces": pieces.parse(record["pieces"])})


def _record(writer: int) -> str:
    return f"part-{writer:04d}.json"


class PartProgress:
    """Progress with a part, which the waiting writer 0 can see as well: the file's time is set, at
    most once in SHOW_S. A part does not grow while it is hashed, synced, or the same as before.
    Called by any thread.
    """

    def __init__(self, part: Path, progress: Callable[[], None]) -> None:
        self._part = part
        self._progress = progress
        self._due_s = time.monotonic() + SHOW_S

    def __call__(self) -> None:
        self._progress()
        if (now_s := time.monotonic()) >= self._due_s:
            self._due_s = now_s + SHOW_S
            with suppress(OSError):  # it may not exist yet
                os.utime(self._part)


def note_of(order: SaveOrder, step: int, writer: int) -> Path:
    """Where a writer reports that its part will not come."""
    return checkpoints.refusal_of(order.directory, step, order.generation, writer, order.job)


def give_up(order: SaveOrder, step: int, why: str) -> None:
    """Tell the rank that waits to stop; if the disk cannot store even that, it waits until its
    limit.
    """
    note = note_of(order, step, order.writer)
    hidden = note.with_name(f"{note.name}-{os.getpid()}")
    with suppress(OSError):
        hidden.write_text(why)
        hidden.rename(note)


def gather(order: SaveOrder, staging: Path, step: int) -> list[CheckpointPart]:
    """Wait for the parts of the other writers (1 and up), each for PARTS_TIMEOUT_S without a change
    of the part (see ``PartProgress``), and read them; the records are removed.

    Raises TimeoutError, RuntimeError when one gave up, OSError, and what ``check`` and ``still`` of
    the order raise.
    """
    parts = []
    for writer in range(1, order.writers):
        record, note, last = staging / _record(writer), note_of(order, step, writer), (-1, -1)
        deadline_s, due_s = time.monotonic() + PARTS_TIMEOUT_S, time.monotonic() + STILL_S
        while not record.exists():
            order.check()
            if note.exists():
                raise RuntimeError(f"writer {writer} gave up: {note.read_text()}")
            now_s = time.monotonic()
            seen = _look_of(staging / file_of(writer))
            if seen != last:
                last, deadline_s = seen, now_s + PARTS_TIMEOUT_S
            if now_s > deadline_s:
                raise TimeoutError(
                    f"the part of writer {writer} did not come within {PARTS_TIMEOUT_S:g} s"
                )
            if now_s > due_s:
                due_s = now_s + STILL_S
                order.still()
            time.sleep(LOOK_S)
        parts.append(_read(record))
        record.unlink()
    return parts


def _look_of(path: Path) -> tuple[int, int]:
    """Size and time, which show a change."""
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def merge(parts: Sequence[CheckpointPart]) -> tuple[dict[str, Any], dict[str, list[Piece]]]:
    """The manifest's facts and the streams of all parts. Raises RuntimeError when they do not make
    one whole state.
    """
    tensors = joined(parts)
    for name, entry in tensors.items():
        held = sum(math.prod(chunk["size"]) for chunk in entry["chunks"])
        if held != math.prod(entry["shape"]):
            raise RuntimeError(
                f"the parts hold {held} of {math.prod(entry['shape'])} values of {name}"
            )
    facts = {"tensors": tensors, "delta": max(part.delta for part in parts), "writers": len(parts)}
    return facts, {part.file: part.pieces for part in parts}


def joined(parts: Sequence[CheckpointPart]) -> dict[str, dict[str, Any]]:
    """The manifest's table of the tensors that these parts hold, each box once. Raises RuntimeError
    when two hold something else under one name.
    """
    tensors: dict[str, dict[str, Any]] = {}
    seen = set[tuple[Any, ...]]()
    for part in parts:
        for name, entry in part.tensors.items():
            whole = tensors.setdefault(
                name, {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": []}
            )
            if (whole["dtype"], whole["shape"]) != (entry["dtype"], entry["shape"]):
                raise RuntimeError(f"{part.file} holds another {name} than {parts[0].file}")
            for chunk in entry["chunks"]:
                box = name, *chunk["at"], *chunk["size"]
                if box not in seen:
                    seen.add(box)
                    whole["chunks"].append({**chunk, "file": part.file})
    return tensors


def _stage_of(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """What the scalars of a stage of a pipeline say of its own parameters alone."""
    optimizer = scalars["optimizer"]
    return {
        "params": [group["params"] for group in optimizer["groups"]],
        "state": optimizer["state"],
        "frozen": scalars["frozen"],
    }


def _with_stages(
    scalars: Mapping[str, Any], stages: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """The scalars of the first writer with what other stages say of theirs. Raises RuntimeError
    where their optimizers have other parameter groups.
    """
    if not any(stages):
        return dict(scalars)
    optimizer = dict(scalars["optimizer"])
    groups = [{**group, "params": list(group["params"])} for group in optimizer["groups"]]
    state, frozen = dict(optimizer["state"]), dict.fromkeys(scalars["frozen"])
    for stage in stages:
        if stage is None:
            continue
        if len(stage["params"]) != len(groups):
            raise RuntimeError(
                f"the optimizers of two stages have {len(groups)} and {len(stage['params'])}"
                " parameter groups: make as many on each, empty ones too"
            )
        for group, names in zip(groups, stage["params"], strict=True):
            group["params"] += [name for name in names if name not in group["params"]]
        state |= stage["state"]
        frozen |= dict.fromkeys(stage["frozen"])
    optimizer |= {"groups": groups, "state": state}
    return {**scalars, "optimizer": optimizer, "frozen": list(frozen)}
