"""The checkpoint engine: shards of any number, deltas, and what a restore refuses before it touches
anything.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainchaos.recovery.checkpoint import restore as restoring
from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.chunks import (
    SPLIT_BYTES,
    Chunk,
    chunks_of,
    described,
    share,
)
from trainchaos.recovery.checkpoint.files import checkpoints, pieces, retention
from trainchaos.recovery.checkpoint.files.checkpoints import (
    Checkpoint,
    CorruptCheckpoint,
    stream_of,
)
from trainchaos.recovery.checkpoint.restore import (
    CheckpointMismatch,
    ChunkRestore,
    HalfLoaded,
    refuse,
)
from trainchaos.recovery.checkpoint.saves import Content, SaveOrder, write
from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.state import TrainState

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


def order(
    directory: Path,
    step: int,
    chunks: Sequence[Chunk],
    mine: Sequence[Chunk] | None = None,
    **more: Any,
) -> tuple[SaveOrder, Content]:
    """``chunks``: of all writers; ``mine``: of this one."""
    given = chunks if mine is None else mine
    content = Content(step=step, scalars={}, tensors=described(chunks), chunks=given)
    return SaveOrder(directory=directory, generation=1, **more), content


def save(directory: Path, step: int, parts: Sequence[Sequence[Chunk]]) -> Checkpoint:
    """Each part by a writer of its own, at the same time."""
    everything = [chunk for part in parts for chunk in part]
    orders = [
        order(directory, step, everything, part, writer=n, writers=len(parts))
        for n, part in enumerate(parts)
    ]
    with ThreadPoolExecutor(len(parts)) as pool:
        results = list(pool.map(lambda given: write(*given), orders))
    assert results[1:] == [None] * (len(parts) - 1)
    assert results[0] is not None
    return results[0][0]


def reading_of(checkpoint: Checkpoint, wanted: Sequence[Chunk]) -> ChunkRestore:
    manifest = checkpoints.manifest_of(checkpoint)
    sources = partial(checkpoints.source_of, checkpoint)
    return ChunkRestore(checkpoint.name, manifest, sources, wanted)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def boxes(
    shape: Sequence[int], cuts: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(at, size) of the boxes that some cuts in each dimension make."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for length, places in zip(shape, cuts, strict=True):
        edges = sorted({0, length, *(place % (length + 1) for place in places)})
        spans = list(itertools.pairwise(edges)) or [(0, 0)]
        found = [((*at, a), (*size, b - a)) for at, size in found for a, b in spans]
    return found


def in_boxes(name: str, whole: Tensor, cuts: Sequence[Sequence[int]]) -> list[Chunk]:
    """Chunks that make up a tensor, each a copy of its own."""
    found = []
    for at, size in boxes(whole.shape, cuts):
        data = whole[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))].clone()
        found.append(Chunk(name=name, shape=tuple(whole.shape), at=at, size=size, data=data))
    return found


SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=3)


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 3 // 2, deadline=None)
@given(data=st.data())
def test_what_any_ranks_wrote_any_ranks_read(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("checkpoints")
    wholes = {
        f"t{n}": random_tensor(data.draw(SHAPES), data.draw(st.sampled_from(DTYPES)), n)
        for n in range(data.draw(st.integers(1, 4)))
    }

    def cut(whole: Tensor) -> list[list[int]]:
        return [data.draw(st.lists(st.integers(0, 7), max_size=2)) for _ in whole.shape]

    written = [
        chunk for name, whole in wholes.items() for chunk in in_boxes(name, whole, cut(whole))
    ]
    writers = data.draw(st.integers(1, 3))
    checkpoint = save(directory, 5, [written[n::writers] for n in range(writers)])
    checkpoints.verify(checkpoint)
    wanted = [
        chunk
        for name, whole in wholes.items()
        for chunk in in_boxes(name, torch.zeros_like(whole), cut(whole))
    ]
    reading = reading_of(checkpoint, wanted)
    reading.verify()
    reading.load()
    for chunk in wanted:
        box = tuple(slice(a, a + n) for a, n in zip(chunk.at, chunk.size, strict=True))
        assert torch.equal(chunk.data, wholes[chunk.name][box])


def test_a_large_state_of_many_pieces_comes_back_into_memory_that_is_not_in_order(
    tmp_path: Path,
) -> None:
    whole = random_tensor((700, 1100), torch.float32, 1)
    checkpoint = save(tmp_path, 5, [in_boxes("w", whole, [[], []])])
    assert len(stream_of(checkpoints.manifest_of(checkpoint), "rank-0000.bin")) > 40
    wanted = torch.zeros(1100, 700).t()
    reading = reading_of(
        checkpoint, [Chunk(name="w", shape=(700, 1100), at=(0, 0), size=(700, 1100), data=wanted)]
    )
    reading.load()
    assert torch.equal(wanted, whole)


@pytest.fixture
def fake_world() -> Iterator[Callable[[int, int], DeviceMesh]]:
    """A mesh of so many ranks as one of them sees it, with nobody behind it."""

    def world(rank: int, size: int) -> DeviceMesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return DeviceMesh("cpu", torch.arange(size))

    yield world
    if dist.is_initialized():
        dist.destroy_process_group()


def held(whole: Tensor, mesh: DeviceMesh, rank: int, size: int, dim: int) -> DTensor:
    """As FSDP2 holds it: uneven shards, the last ones may be empty."""
    parts = [*whole.chunk(size, dim), *[whole.narrow(dim, 0, 0)] * size]
    return DTensor.from_local(
        parts[rank].clone(),
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@pytest.mark.parametrize(
    ("dim", "before", "after"), [(0, 4, 2), (0, 2, 4), (0, 4, 1), (1, 3, 2), (0, 1, 4)]
)
def test_shards_of_one_world_size_are_restored_in_another(
    tmp_path: Path, fake_world: Callable[[int, int], DeviceMesh], dim: int, before: int, after: int
) -> None:
    wholes = {
        "model.w": random_tensor((10, 6), torch.float32, 1),
        "optimizer.w.exp_avg": random_tensor((5, 3), torch.float32, 2),
    }
    step = torch.tensor(7.0)
    parts = []
    for rank in range(before):
        mesh = fake_world(rank, before)
        tensors: dict[str, Tensor] = {
            name: held(whole, mesh, rank, before, dim) for name, whole in wholes.items()
        }
        everything = chunks_of(tensors | {"optimizer.w.step": step})
        parts.append(share(everything, rank, before))
    checkpoint = save(tmp_path, 5, parts)
    for rank in range(after):
        mesh = fake_world(rank, after)
        empty = {
            name: held(torch.zeros_like(whole), mesh, rank, after, dim)
            for name, whole in wholes.items()
        }
        other = torch.tensor(0.0)
        reading = reading_of(checkpoint, chunks_of(empty | {"optimizer.w.step": other}))
        reading.verify()
        reading.load()
        assert other == step
        for name, tensor in empty.items():
            expected = held(wholes[name], mesh, rank, after, dim)
            assert torch.equal(tensor.to_local(), expected.to_local()), (name, rank)


def test_a_replicated_dtensor_is_written_once(fake_world: Callable[[int, int], DeviceMesh]) -> None:
    mesh = fake_world(1, 2)
    tensor = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
    assert share(chunks_of({"a": tensor}), 1, 2) == []
    assert len(share(chunks_of({"a": tensor}), 0, 2)) == 1


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_ranks_that_hold_the_same_share_the_writing_evenly(tmp_path: Path, writers: int) -> None:
    wholes = {
        "large": random_tensor((1000, 1000), torch.float32, 1),
        "few": random_tensor((2, SPLIT_BYTES), torch.uint8, 2),
        "small": random_tensor((9,), torch.float32, 3),
    }
    parts = [share(chunks_of(wholes), n, writers) for n in range(writers)]
    sizes = [sum(chunk.bytes for chunk in part if chunk.name == "large") for part in parts]
    assert max(sizes) - min(sizes) <= 4000
    checkpoint = save(tmp_path, 5, parts)
    empty = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    reading_of(checkpoint, chunks_of(empty)).load()
    assert all(torch.equal(empty[name], wholes[name]) for name in wholes)


# ---- several writers


def two(value: float = 1.0) -> list[list[Chunk]]:
    """The two halves of a tensor."""
    chunks = in_boxes("w", torch.full((4, 3), value), [[2], []])
    return [[chunks[0]], [chunks[1]]]


def nothing_committed(directory: Path) -> bool:
    return not checkpoints.newest_first(directory) and not list(directory.glob(".staging*/*.bin"))


def test_a_writer_that_gives_up_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    parts = two()
    spoilt = two(float("nan"))[1]
    everything = [*parts[0], *parts[1]]
    with pytest.raises(RuntimeError, match=r"not finite \(w\)"):
        write(*order(tmp_path, 5, everything, spoilt, writer=1, writers=2))
    with pytest.raises(RuntimeError, match=r"writer 1 gave up: the state is not finite \(w\)"):
        write(*order(tmp_path, 5, everything, parts[0], writers=2))
    assert nothing_committed(tmp_path)


def test_waiting_for_parts_ends_with_the_generation(tmp_path: Path) -> None:
    class Lost(Exception):
        pass

    def lost() -> None:
        raise Lost

    parts = two()
    with pytest.raises(Lost):
        write(*order(tmp_path, 5, [*parts[0], *parts[1]], parts[0], writers=2, check=lost))
    assert nothing_committed(tmp_path)


def test_parts_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    chunks = in_boxes("w", torch.ones(6, 3), [[2, 4], []])
    with pytest.raises(RuntimeError, match="the parts hold 12 of 18 values of w"):
        save(tmp_path, 5, [chunks[:1], chunks[2:]])
    assert nothing_committed(tmp_path)


def test_a_record_that_is_torn_is_refused(tmp_path: Path) -> None:
    parts = two()
    everything = [*parts[0], *parts[1]]
    write(*order(tmp_path, 5, everything, parts[1], writer=1, writers=2))
    (record,) = tmp_path.glob(".staging*/part-0001.json")
    record.write_text(record.read_text().replace('size\\": [2, 3]', 'size\\": [3, 2]'))
    with pytest.raises(RuntimeError, match="does not match its own checksum"):
        write(*order(tmp_path, 5, everything, parts[0], writers=2))
    assert nothing_committed(tmp_path)


# ---- delta


def state_of(count: int = 40) -> dict[str, Tensor]:
    """Tensors of 64 KiB, the first few of which never change."""
    return {f"t{n:02d}": random_tensor((16384,), torch.float32, n) for n in range(count)}


def train(tensors: dict[str, Tensor], step: int, frozen: int = 30) -> None:
    for name, tensor in tensors.items():
        if int(name[1:]) >= frozen:
            tensor.add_(step)


def on_disk(checkpoint: Checkpoint) -> int:
    return sum(path.stat().st_size for path in checkpoint.path.glob("*.bin"))


def restored(checkpoint: Checkpoint) -> dict[str, Tensor]:
    empty = {name: torch.zeros_like(tensor) for name, tensor in state_of().items()}
    reading = reading_of(checkpoint, chunks_of(empty))
    reading.verify()
    reading.load()
    return empty


def series(
    directory: Path, steps: Sequence[int], every: int
) -> dict[int, tuple[Checkpoint, dict[str, Tensor]]]:
    """Delta checkpoints of a training, each with the state it was made of."""
    tensors, found = state_of(), {}
    for step in steps:
        train(tensors, step)
        chunks = chunks_of(tensors)
        result = write(*order(directory, step, chunks, delta=every))
        assert result is not None
        found[step] = (result[0], {name: tensor.clone() for name, tensor in tensors.items()})
    return found


def test_a_delta_holds_what_changed_and_restores_exactly(tmp_path: Path) -> None:
    made = series(tmp_path, (1, 2, 3, 4), every=3)
    sizes = {step: on_disk(checkpoint) for step, (checkpoint, _) in made.items()}
    assert sizes[1] == sizes[4] == 40 * 65536, "full"
    assert sizes[2] == sizes[3] == 10 * 65536, "what changed"
    for checkpoint, tensors in made.values():
        checkpoints.verify(checkpoint)
        assert all(
            torch.equal(tensors[name], tensor) for name, tensor in restored(checkpoint).items()
        )


def test_nothing_that_a_kept_delta_refers_to_is_deleted(tmp_path: Path) -> None:
    made = series(tmp_path, (1, 2, 3, 4, 5), every=4)
    assert [c.step for c in retention.prune(tmp_path, 1).gone] == [4, 3, 2, 1], "5 is full"
    made = series(tmp_path, (6, 7), every=4)
    assert [c.step for c in retention.prune(tmp_path, 1).gone] == [6], "7 leads straight to 5"
    assert {c.step for c in checkpoints.newest_first(tmp_path)} == {7, 5}
    checkpoints.verify(made[7][0])


def test_damage_to_what_it_refers_to_is_damage_to_the_delta(tmp_path: Path) -> None:
    made = series(tmp_path, (1, 2), every=9)
    base = made[1][0].path / "rank-0000.bin"
    data = bytearray(base.read_bytes())
    data[100] ^= 1
    base.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"step-00000001/rank-0000.bin has checksum"):
        checkpoints.verify(made[2][0])
    base.unlink()
    with pytest.raises(CorruptCheckpoint, match=r"step-00000001/rank-0000.bin is missing"):
        checkpoints.verify(made[2][0])


def test_nothing_is_built_on_a_checkpoint_that_was_refused(tmp_path: Path) -> None:
    tensors, made = state_of(), {}
    for step, damaged in ((1, False), (2, True), (3, False)):
        if step < 3:
            train(tensors, step)
        chunks = chunks_of(tensors)
        result = write(*order(tmp_path, step, chunks, delta=9))
        assert result is not None
        made[step] = result[0]
        if damaged:
            data = bytearray((made[2].path / "rank-0000.bin").read_bytes())
            data[100] ^= 1
            (made[2].path / "rank-0000.bin").write_bytes(data)
            with pytest.raises(CorruptCheckpoint) as error:
                checkpoints.verify(made[2])
            checkpoints.note_refused(made[2], str(error.value))
    checkpoints.verify(made[3])
    assert on_disk(made[3]) == on_disk(made[2]), "still a delta: on the one before"


def test_a_reference_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    made = series(tmp_path, (1, 2), every=9)
    path = made[2][0].path / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["files"]["rank-0000.bin"]["pieces"][0][0] = "../../etc"
    path.write_bytes(checkpoints.sealed(manifest))
    with pytest.raises(CorruptCheckpoint, match=r"refers to '\.\./\.\./etc'"):
        checkpoints.verify(made[2][0])


# ---- what a restore refuses


def job(
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    *,
    momentum: float = 0.9,
    seed: int = 7,
    job: int = 7,
) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1)).to(dtype)
    return TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), None, seed=job
    )


OTHERS = {
    "another shape": (
        lambda: job(5),
        r"model.0.weight is float32 \[4, 3\] there, float32 \[5, 3\] here",
    ),
    "another type": (
        lambda: job(dtype=torch.float64),
        r"model.0.weight is float32 \[4, 3\] there, float64 \[4, 3\] here",
    ),
    "another seed": (lambda: job(job=8), "seed is 7 there, 8 here"),
    "another optimizer": (
        lambda: job(momentum=0.0),
        r"optimizer.0.weight.momentum_buffer is only in the checkpoint",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_something_else_is_refused_by_name_and_nothing_changes(
    tmp_path: Path, other: str
) -> None:
    saved = job()
    for parameter in saved.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.apply(0.0)
    saved.step = 5
    saves.save(saved, tmp_path, generation=1)
    make, words = OTHERS[other]
    here = make()
    before = {name: bytes(bytes_of(tensor)) for name, tensor in here.tensors().items()}
    with pytest.raises(CheckpointMismatch, match=words) as caught:
        restoring.restore_newest(here, tmp_path, lambda *_: None)
    assert "number of ranks may differ" in caught.value.hint
    assert before == {name: bytes(bytes_of(tensor)) for name, tensor in here.tensors().items()}
    assert here.step == 0


def test_only_the_first_differences_are_named() -> None:
    with pytest.raises(CheckpointMismatch, match=r"c is 1 there, 2 here \(and 2 more\)"):
        refuse("one", dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2))


def test_a_bad_last_byte_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    saved = job(300)
    saved.step = 5
    checkpoint, _ = saves.save(saved, tmp_path, generation=1)
    path = checkpoint.path / "rank-0000.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    here = job(300, seed=8)
    before = {name: bytes(bytes_of(tensor)) for name, tensor in here.tensors().items()}
    refused: list[str] = []
    assert restoring.restore_newest(here, tmp_path, lambda c, why: refused.append(why)) is None
    assert len(refused) == 1
    assert before == {name: bytes(bytes_of(tensor)) for name, tensor in here.tensors().items()}


def test_data_that_changes_between_the_two_looks_ends_the_process(tmp_path: Path) -> None:
    saved = job()
    checkpoint, _ = saves.save(saved, tmp_path, generation=1)
    reading = restoring.prepared(job(seed=8), checkpoint)
    reading.verify()
    path = checkpoint.path / "rank-0000.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(HalfLoaded, match="changed while it was read"):
        reading.load()


def test_a_tensor_the_manifest_has_only_half_of_is_refused(tmp_path: Path) -> None:
    (chunk,) = in_boxes("w", torch.ones(4, 3), [[], []])
    checkpoint = save(tmp_path, 5, [[chunk]])
    path = checkpoint.path / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["tensors"]["w"]["chunks"][0]["size"] = [2, 3]
    path.write_bytes(checkpoints.sealed(manifest))
    with pytest.raises(CorruptCheckpoint, match="has 6 of 12 values of w"):
        reading_of(checkpoint, [chunk])


# ---- pieces


def test_pieces_are_read_by_several_threads_and_the_first_error_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "workers", lambda: 2)
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 4096)
    stream = pieces.of_file(path)
    seen: set[int] = set()
    names: set[str] = set()
    gate = threading.Barrier(2, timeout=120)

    def use(number: int, data: memoryview) -> None:
        seen.add(number)
        names.add(threading.current_thread().name)
        if number in (0, len(stream) // 2):
            gate.wait()  # only two threads at once come past here
        assert pieces.checksum(data) == stream[number].sum

    pieces.check(stream, "data", lambda where: path, use)
    assert seen == set(range(len(stream)))
    assert len(names) == 2
    broken = [piece._replace(sum="0" * 32) for piece in stream]
    with pytest.raises(CorruptCheckpoint, match="in bytes"):
        pieces.check(broken, "data", lambda where: path, use)


@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(total=st.integers(0, 2**36))
def test_pieces_are_aligned_within_bounds_and_at_least_two(total: int) -> None:
    size = pieces.piece_bytes(total)
    assert size % pieces.ALIGN == 0
    assert pieces.ALIGN <= size <= pieces.LARGEST
    assert total < 2 * pieces.ALIGN or -(-total // size) >= 2
