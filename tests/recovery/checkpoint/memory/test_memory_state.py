"""A rank's state in memory: saved by a copy, kept by a keeper on a thread of this process, restored
bit by bit.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainchaos.recovery.checkpoint import memory_state as memories
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint
from trainchaos.recovery.checkpoint.memory.client import KeeperClient, KeeperError
from trainchaos.recovery.checkpoint.memory.keeper import Keeper, KeeperConfig
from trainchaos.recovery.checkpoint.memory_reading import Candidate
from trainchaos.recovery.checkpoint.memory_state import MAX_BUFFERS, MemorySave, MemoryState
from trainchaos.recovery.checkpoint.saves.chunks import Chunk, chunks_of
from trainchaos.recovery.checkpoint.saves.reading import CheckpointMismatch
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.state import TrainState

ALONE = Layout(world=1)
NAME = "state-" + secrets.token_hex(8)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    yield from _keeper(1 << 30)


def _keeper(limit: int) -> Iterator[Keeper]:
    config = KeeperConfig(
        parent=os.getpid(), node=0, job="job", name=NAME, token="ab" * 32, limit_bytes=limit
    )
    kept = Keeper(config)
    yield kept
    kept.close()


def trained(steps: int, *, width: int = 8, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
    state = TrainState(model, optimizer, scheduler, seed=7)
    for _ in range(steps):
        train(state, width)
    return state


def train(state: TrainState, width: int = 8) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(4, width)).square().mean().backward()
    state.apply(0.0)
    state.step += 1


def memory_of(state: TrainState, seat: str = "w0", **more: Any) -> MemoryState:
    given: dict[str, Any] = {"job": "job", "check": lambda: None, "progress": lambda: None, **more}
    return MemoryState(state, KeeperClient(NAME), seat=seat, **given)


def save(
    memory: MemoryState, *, layout: Layout = ALONE, rank: int = 0, generation: int = 1
) -> MemorySave:
    memory.save(generation=generation, layout=layout, rank=rank)
    assert memory.settle(10)
    return list(memory.results())[-1]


def restore(
    memory: MemoryState, state: TrainState, *, layout: Layout = ALONE, rank: int = 0
) -> Candidate:
    candidate = memory.candidates()[0]
    with memory.reading(candidate, layout, rank) as reading:
        reading.verify()
        reading.load()
        state.load_scalars(reading.scalars, reading.slots)
    return candidate


def test_what_is_restored_is_what_was_saved_bit_by_bit(keeper: Keeper) -> None:
    state = trained(3)
    first = memory_of(state)
    saved = save(first)
    assert (saved.step, saved.error, saved.copies) == (3, "", ())
    before = state.digests()
    train(state)  # goes on at once; what was saved does not follow
    first.close()
    fresh = trained(0, seed=1)
    again = memory_of(fresh, "w9")
    assert restore(again, fresh).name == "memory-step-00000003"
    assert fresh.digests() == before and fresh.step == 3 and fresh.scheduler_step() == 3
    again.close()


def test_saves_go_round_in_few_buffers_and_the_newest_wins(keeper: Keeper) -> None:
    state = trained(1)
    memory = memory_of(state)
    for _ in range(12):
        train(state)
        assert not save(memory).error
    assert len(memory._buffers) + len(memory._free) <= MAX_BUFFERS
    assert memory._count <= MAX_BUFFERS, "buffers are used again"
    assert [candidate.step for candidate in memory.candidates()] == [13, 12]
    memory.close()


def test_a_state_that_is_not_finite_is_never_offered(keeper: Keeper) -> None:
    state = trained(2)
    memory = memory_of(state)
    assert not save(memory).error
    train(state)
    with torch.no_grad():
        state.model[0].weight[0, 0] = float("nan")
    assert save(memory).error == "the state is not finite (model.0.weight), so it is not saved"
    assert [candidate.step for candidate in memory.candidates()] == [2]
    memory.close()


def test_damage_in_memory_is_found_before_anything_live_is_touched(keeper: Keeper) -> None:
    state = trained(2)
    memory = memory_of(state)
    save(memory)
    buffer = next(iter(memory._buffers.values()))
    buffer.file.data[100] ^= 1
    fresh = trained(0, seed=1)
    before = fresh.digests()
    with pytest.raises(
        CorruptCheckpoint,
        match=r"step 2 of generation 1 in memory is damaged: bytes 0 to \d+ do not",
    ):
        restore(memory_of(fresh), fresh)
    assert fresh.digests() == before
    memory.close()


@pytest.mark.slow
def test_damage_is_found_by_several_threads_too(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainchaos.recovery.checkpoint.memory_reading.AT_ONCE", 0)
    monkeypatch.setattr(memories.pieces, "workers", lambda: 3)
    state = trained(2, width=200_000)  # several pieces
    memory = memory_of(state)
    save(memory)
    fresh = trained(0, width=200_000, seed=1)
    restore(memory_of(fresh), fresh)
    assert fresh.digests() == state.digests()
    buffer = next(iter(memory._buffers.values()))
    buffer.file.data[(8 << 20) + 5] ^= 1
    with pytest.raises(CorruptCheckpoint, match=f"bytes {8 << 20} to {12 << 20} do not"):
        restore(memory_of(fresh), fresh)
    memory.close()


def test_another_model_and_another_seed_are_named(keeper: Keeper) -> None:
    state = trained(2)
    save(memory_of(state))
    wider = trained(0, width=9)
    with pytest.raises(
        CheckpointMismatch,
        match=r"model.0.weight is float32 \[16, 8\] there, float32 \[16, 9\] here",
    ):
        restore(memory_of(wider), wider)
    other = trained(0)
    other.seed = 8
    with pytest.raises(CheckpointMismatch, match="seed 7, this one has seed 8"):
        restore(memory_of(other), other)


def test_a_full_store_is_said_and_training_keeps_what_there_was() -> None:
    one = sum(chunk.bytes for chunk in chunks_of(trained(1, width=800).tensors()))
    for _ in _keeper(int(one * 1.5)):
        state = trained(2, width=800)
        memory = memory_of(state)
        assert not save(memory).error
        train(state, 800)
        text = save(memory).error
        assert "is full" in text and "raise the limit to" in text
        assert [candidate.step for candidate in memory.candidates()] == [2]
        fresh = trained(0, width=800, seed=1)
        restore(memory_of(fresh), fresh)
        assert fresh.step == 2
        memory.close()


def test_a_keeper_that_is_gone_costs_the_save_only(keeper: Keeper) -> None:
    state = trained(1)
    memory = memory_of(state)
    keeper.close()
    assert "the keeper of this node" in save(memory).error
    memory.close()


def test_waiting_for_a_save_ends_when_the_generation_is_over(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Over(Exception):
        pass

    def over() -> None:
        raise Over

    state = trained(1)
    memory = memory_of(state, check=over)
    monkeypatch.setattr(memories, "sums_of", _stuck)
    memory.save(generation=1, layout=ALONE, rank=0)
    with pytest.raises(Over):
        memory.save(generation=1, layout=ALONE, rank=0)
    _LET_GO.set()


def test_a_mask_of_infinities_in_a_buffer_is_kept_and_a_parameter_that_is_not_finite_is_refused(
    keeper: Keeper,
) -> None:
    state = masked(trained(2))
    assert not save(memory_of(state)).error
    other = masked(trained(0, seed=1))
    restore(memory_of(other), other)
    assert other.digests() == state.digests()
    with torch.no_grad():
        state.model[0].weight[0, 0] = float("nan")
    state.step += 1
    assert "not finite (model.0.weight)" in save(memory_of(state)).error


def masked(state: TrainState) -> TrainState:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    state.model.register_buffer("mask", mask)
    return state


_LET_GO = __import__("threading").Event()


def _stuck(data: memoryview) -> tuple[str, ...]:
    _LET_GO.wait(120)
    raise RuntimeError("let go")


def as_shard(state: TrainState, shard: int, shards: int) -> list[Chunk]:
    """What a rank of a sharded job holds: its rows of every tensor, and all of what has none."""
    chunks = []
    for name, tensor in state.tensors().items():
        shape = tuple(tensor.shape)
        if not shape:
            chunks.append(Chunk(name=name, shape=(), at=(), size=(), data=tensor, replicated=True))
            continue
        first, last = (shape[0] * n // shards for n in (shard, shard + 1))
        at, size = (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
        chunks.append(Chunk(name=name, shape=shape, at=at, size=size, data=tensor[first:last]))
    return chunks


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [(4, 4), (4, 2), (2, 4), (3, 1), (1, 3), (5, 2)]
)
def test_shards_saved_by_some_ranks_are_loaded_by_any_number(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, saved_by: int, loaded_by: int
) -> None:
    state = trained(3)
    holder: dict[int, tuple[int, int]] = {}

    def held(tensors: dict[str, Tensor], learned: object = None) -> list[Chunk]:
        rank, ranks = holder[0]
        return as_shard(_Of(tensors), rank, ranks)  # type: ignore[arg-type]

    monkeypatch.setattr(memories, "chunks_of", held)
    for rank in range(saved_by):
        holder[0] = (rank, saved_by)
        assert not save(
            memory_of(state, f"w{rank}"), layout=Layout(world=saved_by, shards=saved_by), rank=rank
        ).error
    fresh = trained(0, seed=1)
    for rank in range(loaded_by):
        holder[0] = (rank, loaded_by)
        restore(
            memory_of(fresh), fresh, layout=Layout(world=loaded_by, shards=loaded_by), rank=rank
        )
    assert fresh.digests() == state.digests()


class _Of:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors


def test_a_shard_that_is_nowhere_makes_no_checkpoint(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained(3)
    monkeypatch.setattr(memories, "chunks_of", lambda tensors, *_: as_shard(_Of(tensors), 0, 2))  # type: ignore[arg-type]
    memory = memory_of(state)
    assert not save(memory, layout=Layout(world=2, shards=2)).error
    assert memory.candidates() == []
    with pytest.raises(KeeperError, match="nobody has step 3 of generation 1, shard 1 of 2"):
        memory._client.fetch(memories.Key(generation=1, step=3, shard=1, shards=2), connect_s=0)
    memory.close()
