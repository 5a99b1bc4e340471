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

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.harness import in_turns, markdown, options, ratios, seconds, spread
from trainchaos.recovery.checkpoint import restore, saves
from trainchaos.recovery.checkpoint.background import Snapshot
from trainchaos.recovery.checkpoint.chunks import chunks_of
from trainchaos.recovery.state.state import TrainState

BLOCK = 8 << 20
WIDTH = 2048
GOALS = {"plain": 0.8, "dcp": 1.0}


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


def bytes_of(state: TrainState) -> int:
    """Of all its tensors."""
    return sum(tensor.nbytes for tensor in state.tensors().values())


class CheckpointArms:
    """The timed operations; each save leaves its files for the following read."""

    def __init__(self, directory: Path, state: TrainState) -> None:
        self.directory, self.state, self.bytes = directory, state, bytes_of(state)
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

    def clear(self) -> None:
        """Remove the files of the round before."""
        for path in self.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def forget(self) -> None:
        """Drop the files' pages from the page cache, so that the next read comes from the disk."""
        for path in self.directory.rglob("*"):
            if path.is_file():
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _refused(checkpoint: object, why: str) -> None:
    raise AssertionError(f"{checkpoint}: {why}")


def measure(arms: CheckpointArms, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of saves, and of the restores of what each round saved."""
    saves = {"plain": arms.plain_write, "ours": arms.our_save, "dcp": arms.dcp_save}
    restores = {"plain": arms.plain_read, "ours": arms.our_restore, "dcp": arms.dcp_restore}
    found: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in saves} for what in ("save", "restore")
    }
    names = list(saves)
    for number in range(-1, rounds):  # the first is a warm-up
        arms.clear()
        for what, acts in (("save", saves), ("restore", restores)):
            for name in names[number % 3 :] + names[: number % 3]:
                took = seconds(acts[name])
                found[what][name] += [took] if number >= 0 else []
            arms.forget()
    return found


def blocking(state: TrainState, rounds: int) -> dict[str, list[float]]:
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

    return in_turns({"plain": plain, "ours": ours}, rounds, warm=1)


def main() -> None:
    """Measure, and print the tables."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    state = state_of(given.mib)
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        found = measure(CheckpointArms(Path(folder), state), given.rounds)
    size = bytes_of(state) / 1e9
    print(f"{size:.2f} GB of state, {given.rounds} rounds; seconds: median (min to max)\n")
    rows = []
    for what, times in found.items():
        for name, values in times.items():
            rate = median(ratios(values, times["ours"]))
            goal = f"{rate:.2f} (goal {GOALS[name]})" if name in GOALS else ""
            rows.append([what, name, spread(values), f"{size / median(values):.2f}", goal])
    print(markdown(["", "arm", "s", "GB/s", "our rate against it"], rows))
    blocked = blocking(state, 4 * given.rounds)
    ratio = median(ratios(blocked["ours"], blocked["plain"]))
    print(
        f"\nasynchronous: blocks {spread(blocked['ours'])} s; a plain copy"
        f" {spread(blocked['plain'])} s; {ratio:.2f} of it (goal 1.3)"
    )


if __name__ == "__main__":
    main()
