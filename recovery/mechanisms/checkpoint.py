"""Saves and restores the full training state through ``torch.distributed.checkpoint``.

Tensors go into safetensors files and scalars into the JSON manifest, so that no byte read back is ever
unpickled (the default storage of ``torch.distributed.checkpoint`` pickles its metadata). One rank writes:
in data-parallel training all hold the same state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from recovery import checkpoints
from recovery.checkpoints import Checkpoint
from recovery.mechanisms.state import TrainState


def save(state: TrainState, directory: Path, *, generation: int) -> tuple[Checkpoint, int]:
    """Write and commit the state; returns the checkpoint and its size in bytes. Raises OSError or
    RuntimeError when the disk refuses (torch reports a full disk as RuntimeError); nothing is committed
    then.
    """
    staging = directory / f".staging-{checkpoints.name_of(state.step)}-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        writer = dcp.HuggingFaceStorageWriter(path=str(staging))
        with _ordinary_errors():
            dcp.save(_storable(state), storage_writer=writer, no_dist=True)
        return checkpoints.commit(
            staging, directory, state.step, {"generation": generation, "scalars": state.scalars()}
        )
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def restore_newest(
    state: TrainState, directory: Path, refused: Callable[[Checkpoint, str], None]
) -> Checkpoint | None:
    """Load the newest checkpoint that verifies into ``state``.

    None when there is none. ``refused`` hears of bad ones.
    """
    found = checkpoints.newest_good(directory, refused)
    if found is None:
        return None
    checkpoint, manifest = found
    tensors = _storable(state)
    reader = dcp.HuggingFaceStorageReader(path=str(checkpoint.path))
    with _ordinary_errors():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    with torch.no_grad():
        for name, live in state.tensors().items():
            if live.ndim == 0:
                live.copy_(tensors[name][0])
    state.load_scalars(manifest["scalars"])
    return checkpoint


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """Torch wraps whatever fails in a BaseException, which would end a rank as if it had been interrupted."""
    try:
        yield
    except CheckpointException as error:
        causes = [wrapped[0] for wrapped in error.failures.values()]
        first = causes[0] if causes else error
        if isinstance(first, OSError | RuntimeError):
            raise first from error
        raise RuntimeError(f"{type(first).__name__}: {first}") from error


def _storable(state: TrainState) -> dict[str, Tensor]:
    """The live tensors; zero-dimensional ones as copies of shape (1,), which safetensors slices can
    address.
    """
    return {name: t.reshape(1).clone() if t.ndim == 0 else t for name, t in state.tensors().items()}
