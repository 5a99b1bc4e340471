"""Verified save and restore of 1 GB of state against the plain disk and against
torch.distributed.checkpoint.

    python -m benchmarks.checkpoint [--rounds 5] [--mib 1024] [--directory DIR]

All arms of a round move the same bytes, one after the other, in an order that changes from round to
round; each ratio is computed within one round. Writes end with fsync; before each read the file's
pages are dropped from the page cache (lower caches affect all arms alike). Our restore verifies
every byte; plain torch.distributed.checkpoint verifies nothing. The state is a model and its AdamW
moments in float32.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from trainchaos.recovery.checkpoint import restore, saves
from trainchaos.recovery.checkpoint.background import Snapshot
from trainchaos.recovery.checkpoint.chunks import chunks_of
from trainchaos.recovery.state.state import TrainState

BLOCK = 8 << 20
WIDTH = 2048


def state_of(mib: int) -> TrainState:
    """Linear layers and AdamW: three times the parameters."""
    layers = max(1, round(mib * 2**20 / 3 / 4 / WIDTH**2))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3), None, seed=1)
    for tensor in state.tensors().values():
        if tensor.ndim:
            tensor.data.normal_()
    state.step = 1
    return state


class CheckpointArms:
    """The timed operations; each save leaves its files for the following read."""

    def __init__(self, directory: Path, state: TrainState) -> None:
        self.directory = directory
        self.state = state
        self.bytes = sum(t.numel() * t.element_size() for t in state.tensors().values())
        self.block = torch.randn(BLOCK // 4).numpy()
        self.into = memoryview(bytearray(BLOCK))

    def plain_write(self) -> None:
        """Sequential writes of the same number of bytes, and fsync."""
        with open(self.directory / "plain", "wb", buffering=0) as stream:
            for start in range(0, self.bytes, BLOCK):
                stream.write(self.block.data.cast("B")[: min(BLOCK, self.bytes - start)])
            os.fsync(stream.fileno())

    def plain_read(self) -> None:
        """Sequential reads into one buffer."""
        with open(self.directory / "plain", "rb", buffering=0) as stream:
            while stream.readinto(self.into):
                pass

    def our_save(self) -> None:
        """Checksums, finite check, manifest, commit."""
        saves.save(self.state, self.directory / "ours", generation=1)

    def our_restore(self) -> None:
        """Verified before anything is touched."""
        found = restore.restore_newest(self.state, self.directory / "ours", _refused)
        assert found is not None

    def dcp_save(self) -> None:
        """Save with torch.distributed.checkpoint on one rank, as in its tutorial."""
        writer = dcp.FileSystemWriter(self.directory / "dcp", sync_files=True)
        dcp.save(dict(self.state.tensors()), storage_writer=writer, no_dist=True)

    def dcp_restore(self) -> None:
        """Restore with torch.distributed.checkpoint, unverified."""
        dcp.load(dict(self.state.tensors()), checkpoint_id=self.directory / "dcp", no_dist=True)

    def remove(self, name: str) -> None:
        """Remove an arm's files of the previous round; not timed."""
        path = self.directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _refused(checkpoint: object, why: str) -> None:
    raise AssertionError(f"{checkpoint}: {why}")


def forget(directory: Path) -> None:
    """Drop the files' pages from the page cache, so that the next read comes from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def timed(act: Callable[[], None]) -> float:
    """Seconds."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def blocking(state: TrainState, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a plain copy of the state's bytes into existing memory, and seconds for which a
    background save blocks training.
    """
    tensors = [t.detach() for t in state.tensors().values()]
    copies = [torch.empty_like(t).zero_() for t in tensors]
    snapshot = Snapshot()
    snapshot.take(chunks_of(state.tensors()))

    def plain() -> None:
        for into, tensor in zip(copies, tensors, strict=True):
            into.copy_(tensor)

    def ours() -> None:
        snapshot.take(saves.content_of(state).chunks)

    plain()
    acts: list[Callable[[], None]] = [plain, ours]
    found: dict[Callable[[], None], list[float]] = {plain: [], ours: []}
    for number in range(rounds):
        for act in acts if number % 2 else acts[::-1]:
            found[act].append(timed(act))
    return found[plain], found[ours]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="save and restore against the plain disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument(
        "--directory", type=Path, default=None, help="directory on the disk to measure"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    state = state_of(arguments.mib)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        arms = CheckpointArms(Path(folder), state)
        names = ["plain", "ours", "dcp"]
        saves: dict[str, list[float]] = {name: [] for name in names}
        loads: dict[str, list[float]] = {name: [] for name in names}
        doing = {"plain": arms.plain_write, "ours": arms.our_save, "dcp": arms.dcp_save}
        undoing = {"plain": arms.plain_read, "ours": arms.our_restore, "dcp": arms.dcp_restore}
        for number in range(arguments.rounds + 1):  # the first is a warm-up
            for name in names[number % 3 :] + names[: number % 3]:
                arms.remove(name)
                took = timed(doing[name])
                saves[name] += [took] if number else []
            forget(arms.directory)
            for name in names[number % 3 :] + names[: number % 3]:
                took = timed(undoing[name])
                loads[name] += [took] if number else []
        report(arms.bytes, saves, loads)
    plain, ours = blocking(state, 4 * arguments.rounds)
    ratio = median(o / p for o, p in zip(ours, plain, strict=True))
    print(
        f"asynchronous: blocks {spread(ours)} s; a plain copy {spread(plain)} s; {ratio:.2f} of it"
        " (goal 1.3)"
    )


def report(size: int, saves: dict[str, list[float]], loads: dict[str, list[float]]) -> None:
    """One line per arm."""
    print(
        f"{size / 1e9:.2f} GB of state, {len(saves['ours'])} rounds; seconds: median (min to max)"
    )
    for what, times in (("save", saves), ("restore", loads)):
        for name in times:
            print(
                f"  {what:8} {name:6} {spread(times[name])}  {size / 1e9 / median(times[name]):.2f}"
                " GB/s"
            )
        for name, goal in (("plain", 0.8), ("dcp", 1.0)):
            ratio = median(
                other / ours for other, ours in zip(times[name], times["ours"], strict=True)
            )
            print(f"  {what:8} rate against {name}: {ratio:.2f} (goal {goal})")


def spread(values: list[float]) -> str:
    """Median and range as text."""
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
