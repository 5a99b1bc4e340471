"""Saves and restores the full training state through ``torch.distributed.checkpoint``.

Tensors go into safetensors files and scalars into the JSON manifest, so that no byte read back is ever
unpickled (the default storage of ``torch.distributed.checkpoint`` pickles its metadata). One rank writes:
in data-parallel training all hold the same state.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from recovery import checkpoints
from recovery.checkpoints import Checkpoint, Disk
from recovery.mechanisms.state import TrainState

PART_BYTES = 16 * 1024 * 1024  # written at once


def save(
    state: TrainState, directory: Path, *, generation: int, disk: Disk | None = None
) -> tuple[Checkpoint, int]:
    """Write and commit the state; returns the checkpoint and its size in bytes. Raises OSError or
    RuntimeError when the disk refuses (torch reports a full disk as RuntimeError), RuntimeError for a state
    that is not finite: restoring it would help nobody. Nothing is committed then.
    """
    bad = state.not_finite()
    if bad is not None:
        raise RuntimeError(f"the state is not finite ({bad}), so it is not saved")
    staging = checkpoints.staging_of(directory, state.step)
    checkpoints.sweep(directory)
    if disk is not None:
        disk("mkdir", staging)
    staging.mkdir(parents=True)
    try:
        writer = dcp.HuggingFaceStorageWriter(path=str(staging))
        if disk is not None:
            writer.fs = _WatchedFiles(disk)
        with _ordinary_errors():
            dcp.save(_storable(state), storage_writer=writer, no_dist=True)
        return checkpoints.commit(
            staging, directory, state.step, {"generation": generation, "scalars": state.scalars()}, disk=disk
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


class _WatchedFiles(FileSystem):
    """Files of a save that tells ``disk`` before each part of them is written."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """As the base does."""
        with super().create_stream(path, mode) as stream:
            self._disk("write", Path(path))
            yield cast(io.IOBase, _WatchedStream(stream, self._disk, Path(path)))


class _WatchedStream:
    """Writes bytes in two parts or more, none of them large: progress shows, and one can be there without another."""

    def __init__(self, stream: io.IOBase, disk: Disk, path: Path) -> None:
        self._stream: Any = stream
        self._disk = disk
        self._path = path

    def write(self, data: Any) -> int:
        """Both parts; text is a few words, written as it comes."""
        if isinstance(data, str):
            return int(self._stream.write(data))
        size = min(PART_BYTES, max(1, (len(data) + 1) // 2))
        for start in range(0, len(data), size):
            if start:
                self._stream.flush()
                self._disk("write", self._path)
            self._stream.write(data[start : start + size])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
