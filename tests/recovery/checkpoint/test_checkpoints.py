"""Checkpoints: whole or not at all, refused when one bit is wrong, the last good one kept, no
pickles.
"""

from __future__ import annotations

import json
import os
import pickletools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from trainchaos.recovery.checkpoint import restore as restoring
from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.files import checkpoints, retention
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint, CorruptCheckpoint
from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.state import TrainState


def put(
    directory: Path, step: int, *, files: dict[str, bytes] | None = None, **facts: Any
) -> Checkpoint:
    """Commit a checkpoint of small files."""
    staging = directory / f".staging-{step}"
    staging.mkdir(parents=True)
    for name, data in (
        files or {"a.bin": b"alpha" * 10 + bytes((step % 256,)), "b.bin": b"beta"}
    ).items():
        (staging / name).write_bytes(data)
    checkpoint, _ = checkpoints.commit(staging, directory, step, facts)
    return checkpoint


def flip(path: Path, place: int, bit: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def refusals(directory: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """The newest good checkpoint's name, and what was refused before it with the reasons."""
    refused: list[tuple[str, str]] = []
    found = checkpoints.newest_good(directory, lambda c, why: refused.append((c.name, why)))
    return found[0].name if found else None, refused


def test_a_committed_checkpoint_verifies_and_keeps_its_facts(tmp_path: Path) -> None:
    checkpoint = put(tmp_path, 50, generation=3, scalars={"lr": [0.1 + 0.2]})
    manifest = checkpoints.verify(checkpoint)
    assert checkpoint.name == "step-00000050"
    assert (manifest["step"], manifest["generation"], manifest["scalars"]) == (
        50,
        3,
        {"lr": [0.1 + 0.2]},
    )
    assert set(manifest["files"]) == {"a.bin", "b.bin"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000050"], "no staging is left"


@pytest.mark.slow
def test_every_single_bit_of_every_file_counts(tmp_path: Path) -> None:
    checkpoint = put(tmp_path, 50, generation=3)
    whole = checkpoints.verify(checkpoint)
    for path in sorted(checkpoint.path.iterdir()):
        size = path.stat().st_size
        for place in range(size):
            bit = 1 << (place % 8)
            flip(path, place, bit)
            try:
                manifest = checkpoints.verify(checkpoint)
            except CorruptCheckpoint as error:
                assert str(error)
            else:
                assert manifest == whole, f"bit {bit} of byte {place} of {path.name} went unnoticed"
            flip(path, place, bit)
    assert checkpoints.verify(checkpoint) == whole


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: os.truncate(p / "a.bin", 10), "a.bin has 10 bytes, not 51"),
    "emptied": (lambda p: os.truncate(p / "a.bin", 0), "a.bin has 0 bytes"),
    "longer": (lambda p: os.truncate(p / "a.bin", 60), "a.bin has 60 bytes"),
    "same size": (lambda p: (p / "a.bin").write_bytes(bytes(51)), "a.bin has checksum"),
    "missing": (lambda p: (p / "b.bin").unlink(), "b.bin is missing"),
    "extra": (
        lambda p: (p / "c.safetensors").write_bytes(b"x"),
        "c.safetensors is not in the manifest",
    ),
    "a folder": (lambda p: ((p / "b.bin").unlink(), (p / "b.bin").mkdir()), "b.bin"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "the manifest is missing"),
    "empty manifest": (
        lambda p: os.truncate(p / "manifest.json", 0),
        "the manifest cannot be read",
    ),
    "half a manifest": (
        lambda p: os.truncate(p / "manifest.json", 100),
        "the manifest cannot be read",
    ),
    "not JSON": (
        lambda p: (p / "manifest.json").write_bytes(b"\x80\x04."),
        "the manifest cannot be read",
    ),
    "a list": (lambda p: (p / "manifest.json").write_text("[1]"), "the manifest cannot be read"),
    "null files": (
        lambda p: (p / "manifest.json").write_text('{"files": null, "step": 50}'),
        "manifest",
    ),
    "nobody's": (
        lambda p: (p / "manifest.json").write_text('{"files": {}, "step": 50, "format": 2}'),
        "does not match its own checksum",
    ),
    "of another format": (
        lambda p: (p / "manifest.json").write_text('{"files": {}, "step": 50, "format": 1}'),
        "has format 1, not 2",
    ),
    "a file instead": (
        lambda p: (shutil.rmtree(p), p.write_bytes(b"x")),
        "the manifest cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_with_its_reason_and_the_older_one_taken(
    tmp_path: Path, damage: str
) -> None:
    put(tmp_path, 25)
    act, reason = DAMAGES[damage]
    act(put(tmp_path, 50).path)
    name, refused = refusals(tmp_path)
    assert name == "step-00000025"
    assert [bad for bad, _ in refused] == ["step-00000050"]
    assert reason in refused[0][1]


def test_stale_data_under_a_new_manifest_is_refused(tmp_path: Path) -> None:
    old, new = put(tmp_path, 25), put(tmp_path, 50)
    shutil.copyfile(old.path / "a.bin", new.path / "a.bin")
    assert refusals(tmp_path) == ("step-00000025", [("step-00000050", refusals(tmp_path)[1][0][1])])
    shutil.copyfile(old.path / "manifest.json", new.path / "manifest.json")
    assert "the manifest is of step 25" in refusals(tmp_path)[1][0][1]


def test_what_is_torn_or_foreign_is_ignored(tmp_path: Path) -> None:
    put(tmp_path, 25)
    for name in (
        ".staging-step-00000050-1",
        "step-50",
        "step-00000050.tmp",
        "step-000000500",
        "latest",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(b"torn")
    assert [c.name for c in checkpoints.newest_first(tmp_path)] == ["step-00000025"]
    assert refusals(tmp_path / "nowhere") == (None, [])


def test_a_later_lineage_replaces_the_checkpoint_of_an_abandoned_one(tmp_path: Path) -> None:
    put(tmp_path, 50, generation=1)
    put(tmp_path, 50, files={"a.bin": b"new"}, generation=2)
    name, refused = refusals(tmp_path)
    assert (name, refused) == ("step-00000050", [])
    assert (
        checkpoints.verify(Checkpoint(path=tmp_path / "step-00000050", step=50))["generation"] == 2
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000050"]


def test_newest_means_the_highest_step_not_the_latest_file(tmp_path: Path) -> None:
    for step in (100, 9, 50):
        put(tmp_path, step)
    assert [c.step for c in checkpoints.newest_first(tmp_path)] == [100, 50, 9]


def steps(directory: Path) -> list[int]:
    return [c.step for c in checkpoints.newest_first(directory)]


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        put(tmp_path, step)
    assert [c.step for c in retention.prune(tmp_path, 2).gone] == [20, 10]
    assert steps(tmp_path) == [40, 30]
    assert retention.prune(tmp_path, 2).gone == []


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("good", [10, 20, 30, 40])
def test_the_last_good_checkpoint_is_never_deleted(tmp_path: Path, keep: int, good: int) -> None:
    for step in (10, 20, 30, 40):
        checkpoint = put(tmp_path, step)
        if step != good:
            flip(checkpoint.path / "a.bin", 0)
    retention.prune(tmp_path, keep)
    assert refusals(tmp_path)[0] == checkpoints.name_of(good)


# ---- with torch: save and restore


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def adamw(seed: int = 0) -> TrainState:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95), fused=True)
    return TrainState(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 3)), seed=7)


def momentum(seed: int = 0) -> TrainState:
    model = net(seed)
    return TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None, seed=7
    )


MAKES = pytest.mark.parametrize("make", [adamw, momentum], ids=lambda make: make.__name__)


def train(state: TrainState, count: int) -> TrainState:
    for step in range(state.step + 1, state.step + count + 1):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        state.model.zero_grad()
        state.model(x).square().mean().backward()
        state.apply(0.0)
        state.step = step
    return state


def values(state: TrainState) -> dict[str, bytes]:
    return {name: bytes(bytes_of(tensor)) for name, tensor in state.tensors().items()}


def restore(state: TrainState, directory: Path) -> tuple[str | None, list[str]]:
    refused: list[str] = []
    found = restoring.restore_newest(
        state, directory, lambda c, why: refused.append(f"{c.name}: {why}")
    )
    return found.name if found else None, refused


@MAKES
def test_a_restored_state_is_exact_and_goes_on_exactly(
    tmp_path: Path, make: Callable[..., TrainState]
) -> None:
    original = train(make(), 5)
    saved, size = saves.save(original, tmp_path, generation=2)
    assert size > 0
    restored = train(make(seed=1), 2)
    assert restore(restored, tmp_path) == (saved.name, [])
    assert restored.step == 5
    assert values(restored) == values(original)
    assert restored.scalars() == original.scalars()
    assert restored.digests() == original.digests()
    assert values(train(restored, 4)) == values(train(original, 4))


@MAKES
def test_a_corrupt_checkpoint_is_refused_and_the_older_one_restored(
    tmp_path: Path, make: Callable[..., TrainState]
) -> None:
    original = train(make(), 5)
    saves.save(original, tmp_path, generation=1)
    wanted = values(original)
    newer, _ = saves.save(train(original, 5), tmp_path, generation=1)
    data = max(newer.path.glob("*.bin"), key=lambda p: p.stat().st_size)
    flip(data, data.stat().st_size - 1)
    restored = make(seed=1)
    name, refused = restore(restored, tmp_path)
    assert name == "step-00000005"
    assert len(refused) == 1
    assert "has checksum" in refused[0]
    assert values(restored) == wanted


@MAKES
def test_nothing_on_disk_is_a_pickle(tmp_path: Path, make: Callable[..., TrainState]) -> None:
    saved, _ = saves.save(train(make(), 2), tmp_path, generation=1)
    files = sorted(saved.path.iterdir())
    assert [path.name for path in files] == ["manifest.json", "rank-0000.bin"]
    for path in files:
        data = path.read_bytes()
        assert not data.startswith(b"\x80")
        with pytest.raises(ValueError):
            list(pickletools.genops(data))
    manifest = json.loads(files[0].read_bytes())
    covered = bytearray(files[1].stat().st_size)
    for name, tensor in train(make(), 2).tensors().items():
        entry = manifest["tensors"][name]
        (chunk,) = entry["chunks"]
        size = tensor.numel() * tensor.element_size()
        assert (entry["shape"], chunk["offset"] % 64) == (list(tensor.shape), 0)
        assert data[chunk["offset"] : chunk["offset"] + size] == bytes(bytes_of(tensor)), name
        covered[chunk["offset"] : chunk["offset"] + size] = bytes([1]) * size
    rest = bytes(byte for byte, known in zip(data, covered, strict=True) if not known)
    assert not any(rest), "tensors, and zeros between them"
