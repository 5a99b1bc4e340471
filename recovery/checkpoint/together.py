"""Restore of a state that several ranks hold together: all ranks load the same checkpoint, or none
loads one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from trainchaos.recovery.checkpoint import state_io as checkpointing
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint
from trainchaos.recovery.checkpoint.saves.reading import (
    CheckpointMismatch,
    ChunkRestore,
    HalfLoaded,
)
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.state import TrainState

_GOOD, _CORRUPT, _MISMATCH, _HALF = range(4)


def restore_together(
    state: TrainState,
    directory: Path,
    group: Group,
    layout: Layout,
    refused: Callable[[Checkpoint, str], None],
    *,
    progress: Callable[[], None],
    device: str,
    wanted: Callable[[Checkpoint], bool] = lambda _: True,
) -> Checkpoint | None:
    """Load the newest checkpoint of which every rank of the first replica can verify its part; None
    when there is none of those ``wanted``. Every rank of the group calls it; the others only learn
    which it is.

    Rank 0 proposes one after the other. ``refused`` is called on the ranks where one does not
    verify. Raises GenerationLost, and on all ranks alike CheckpointMismatch and HalfLoaded.
    """
    reads = layout.replica_of(group.rank) == 0
    found = checkpoints.newest_first(directory) if group.rank == 0 else []
    candidates = iter([checkpoint for checkpoint in found if wanted(checkpoint)])
    while True:
        candidate = next(candidates, None)
        step = _told(group, candidate.step if candidate is not None else -1, device)
        if step < 0:
            return None
        checkpoint = Checkpoint(path=directory / checkpoints.name_of(step), step=step)
        reading, vote, error = _try(state, checkpoint, progress) if reads else (None, _GOOD, None)
        given = votes(group, vote, device)
        if _MISMATCH in given:
            raise (
                error
                if vote == _MISMATCH and error is not None
                else CheckpointMismatch(
                    f"{checkpoint.name} does not fit rank {given.index(_MISMATCH)} of this job",
                    hint="its log says what differs",
                )
            )
        if _CORRUPT in given:
            if vote == _CORRUPT:
                refused(checkpoint, str(error))
            continue
        _load(state, reading, group, checkpoint.name, device)
        if group.rank == 0:
            checkpoints.note_verified(checkpoint)
        return checkpoint


def _try(
    state: TrainState, checkpoint: Checkpoint, progress: Callable[[], None]
) -> tuple[ChunkRestore | None, int, Exception | None]:
    try:
        reading = checkpointing.prepared(state, checkpoint, progress)
        reading.verify()
    except CorruptCheckpoint as error:
        return None, _CORRUPT, error
    except CheckpointMismatch as error:
        return None, _MISMATCH, error
    return reading, _GOOD, None


def _load(
    state: TrainState, reading: ChunkRestore | None, group: Group, name: str, device: str
) -> None:
    error: HalfLoaded | None = None
    try:
        if reading is not None:
            checkpointing.load(state, reading)
    except HalfLoaded as problem:
        error = problem
    given = votes(group, _HALF if error is not None else _GOOD, device)
    if error is not None:
        raise error
    if _HALF in given:
        raise HalfLoaded(
            f"{name} changed while rank {given.index(_HALF)} read it",
            hint="start these processes anew",
        )


def _told(group: Group, value: int, device: str) -> int:
    """The checkpoint that rank 0 proposes."""
    told = torch.tensor([value], dtype=torch.int64, device=device)
    group.broadcast(told, 0)
    return int(told)


def votes(group: Group, vote: int, device: str) -> list[int]:
    """The vote of each rank, by rank."""
    votes = torch.zeros(group.world, dtype=torch.int64, device=device)
    votes[group.rank] = vote
    group.wait(group.start_all_reduce(votes))
    return [int(value) for value in group.read(votes)]
