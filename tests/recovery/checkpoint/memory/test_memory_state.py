"""A rank's state in memory: saved by a copy, kept by a keeper on a thread of this process, restored
bit by bit.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint import memory_checkpointer, restore
from trainchaos.recovery.checkpoint.chunks import Chunk, chunks_of
from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint
from trainchaos.recovery.checkpoint.files.saving import RankHooks
from trainchaos.recovery.checkpoint.memory.keeper import Keeper, KeeperConfig
from trainchaos.recovery.checkpoint.memory_checkpointer import MAX_BUFFERS, MemoryCheckpointer
from trainchaos.recovery.checkpoint.restore import Candidate, CheckpointMismatch, restore_first
from trainchaos.recovery.policy.interval import SaveSchedule
from trainchaos.recovery.policy.jobconfig import InMemory
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import quiet

ALONE = Layout(world=1)
NAME = "state-" + secrets.token_hex(8)


def keeper_named(name: str = NAME, limit: int = 1 << 30) -> Keeper:
    config = KeeperConfig(
        parent=os.getpid(), node=0, job="job", name=name, token="ab" * 32, limit_bytes=limit
    )
    return Keeper(config)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    kept = keeper_named()
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


class Rank:
    """One rank's checkpoints in memory, and what it says of them."""

    def __init__(
        self,
        state: TrainState,
        seat: str = "w0",
        *,
        name: str = NAME,
        check: Callable[[], None] = quiet,
        progress: Callable[[], None] = quiet,
    ) -> None:
        self.state = state
        self.said: list[dict[str, Any]] = []
        self.notes: list[Any] = []
        self.memory = MemoryCheckpointer(
            InMemory(socket=name, job="job", every=1),
            state,
            RankHooks(write=self._write, send=self.notes.append, check=check, progress=progress),
            timetable=SaveSchedule(1, mtbf_s=None, now_s=0.0),
            seat=seat,
        )

    def _write(self, kind: Kind, /, **data: Any) -> None:
        self.said.append({"kind": kind, "error": "", **data})

    def begin(self, layout: Layout = ALONE, rank: int = 0, *, asked: bool = True) -> None:
        self.memory.after_commit(
            self.state.step, rank=rank, layout=layout, generation=1, asked=asked
        )

    def save(self, layout: Layout = ALONE, rank: int = 0) -> dict[str, Any]:
        """What it says of how a save ended."""
        self.begin(layout, rank)
        assert self.memory.settle(LIMIT_S)
        self.begin(asked=False)
        return self.said[-1]

    def restore(self, layout: Layout = ALONE, rank: int = 0) -> Candidate | None:
        return restore_first(
            self.state,
            self.memory.candidates(),
            lambda candidate: self.memory.reading(candidate, layout, rank),
            self.memory.refused,
        )

    @property
    def steps(self) -> list[int]:
        return [candidate.step for candidate in self.memory.candidates()]

    def damage(self, at: int) -> None:
        """Change a byte of the newest one."""
        self.memory._buffers[max(self.memory._buffers)].file.data[at] ^= 1


def test_what_is_restored_is_what_was_saved_bit_by_bit(keeper: Keeper) -> None:
    state = trained(3)
    first = Rank(state)
    saved = first.save()
    assert (saved["step"], saved["error"], saved["copies"]) == (3, "", [])
    before = state.digests()
    train(state)  # goes on at once; what was saved does not follow
    first.memory.close()
    fresh = trained(0, seed=1)
    again = Rank(fresh, "w9")
    found = again.restore()
    assert found and found.name == "memory-step-00000003"
    assert fresh.digests() == before and fresh.step == 3 and fresh.scheduler_step() == 3
    again.memory.close()


def test_saves_go_round_in_few_buffers_and_the_newest_wins(keeper: Keeper) -> None:
    state = trained(1)
    rank = Rank(state)
    for _ in range(12):
        train(state)
        assert not rank.save()["error"]
    memory = rank.memory
    assert len(memory._buffers) + len(memory._free) <= MAX_BUFFERS
    assert memory._count <= MAX_BUFFERS, "buffers are used again"
    assert rank.steps == [13, 12]
    memory.close()


def test_a_parameter_that_is_not_finite_is_never_offered_and_a_mask_of_infinities_is_kept(
    keeper: Keeper,
) -> None:
    state, other = trained(2), trained(0, seed=1)
    for one in (state, other):
        one.model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    rank = Rank(state)
    assert not rank.save()["error"]
    assert Rank(other).restore() and other.digests() == state.digests()
    train(state)
    with torch.no_grad():
        state.model[0].weight[0, 0] = float("nan")
    assert rank.save()["error"] == "the state is not finite (model.0.weight), so it is not saved"
    assert rank.steps == [2]
    rank.memory.close()


@pytest.mark.parametrize(("threads", "width"), [(1, 8), (3, 20_000)])
def test_damage_in_memory_is_found_before_anything_live_is_touched(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, threads: int, width: int
) -> None:
    monkeypatch.setattr(pieces, "workers", lambda: threads)
    rank = Rank(trained(2, width=width))
    rank.save()
    rank.damage(100 * width)
    fresh = trained(0, width=width, seed=1)
    before = fresh.digests()
    again = Rank(fresh)
    assert again.restore() is None
    assert "step 2 of generation 1 in memory has checksum" in again.said[-1]["reason"]
    assert fresh.digests() == before
    rank.memory.close()


def test_another_model_and_another_seed_are_named(keeper: Keeper) -> None:
    Rank(trained(2)).save()
    other = trained(0)
    other.seed = 8
    for state, words in (
        (trained(0, width=9), r"model.0.weight is float32 \[16, 8\] there, float32 \[16, 9\] here"),
        (other, "seed is 7 there, 8 here"),
    ):
        with pytest.raises(CheckpointMismatch, match=words):
            Rank(state).restore()


def test_a_full_store_is_said_and_training_keeps_what_there_was() -> None:
    one = sum(chunk.bytes for chunk in chunks_of(trained(1, width=800).tensors()))
    kept = keeper_named(limit=int(one * 1.5))
    state = trained(2, width=800)
    rank = Rank(state)
    assert not rank.save()["error"]
    train(state, 800)
    text = rank.save()["error"]
    assert text.startswith("the memory for checkpoints is full") and "raise the limit to" in text
    fresh = trained(0, width=800, seed=1)
    assert Rank(fresh).restore() and fresh.step == 2
    rank.memory.close()
    kept.close()


def test_a_keeper_that_is_gone_costs_the_save_only(keeper: Keeper) -> None:
    rank = Rank(trained(1))
    keeper.close()
    assert "the keeper of this node" in rank.save()["error"]
    rank.memory.close()


def test_waiting_for_a_save_ends_when_the_generation_is_over(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Over(Exception):
        pass

    def over() -> None:
        raise Over

    go = threading.Event()
    monkeypatch.setattr(memory_checkpointer, "first_not_finite", lambda _: go.wait(LIMIT_S) and "x")
    rank = Rank(trained(1), check=over)
    rank.begin()
    with pytest.raises(Over):
        rank.begin()
    go.set()


def as_shard(tensors: dict[str, Tensor], shard: int, shards: int) -> list[Chunk]:
    """What a rank of a sharded job holds: its rows of every tensor, and all of what has none."""
    chunks = []
    for name, tensor in tensors.items():
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
def test_shards_saved_by_some_ranks_are_loaded_by_any_number_and_by_none_while_one_lacks(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, saved_by: int, loaded_by: int
) -> None:
    state, holder = trained(3), [(0, 1)]

    def held(tensors: dict[str, Tensor], learned: object = None) -> list[Chunk]:
        return as_shard(tensors, *holder[0])

    for module in (memory_checkpointer, restore):
        monkeypatch.setattr(module, "chunks_of", held)
    for rank in range(saved_by):
        assert Rank(state).steps == [], "some shard is nowhere"
        holder[0] = (rank, saved_by)
        saver = Rank(state, f"w{rank}")
        assert not saver.save(Layout(world=saved_by, shards=saved_by), rank)["error"]
    fresh = trained(0, seed=1)
    for rank in range(loaded_by):
        holder[0] = (rank, loaded_by)
        assert Rank(fresh).restore(Layout(world=loaded_by, shards=loaded_by), rank)
    assert fresh.digests() == state.digests()


def test_a_shard_that_is_nowhere_is_named(keeper: Keeper) -> None:
    rank = Rank(trained(1))
    with (
        pytest.raises(CorruptCheckpoint, match="nobody has step 3 of generation 1, shard 1 of 2"),
        rank.memory.reading(
            Candidate(step=3, generation=1, shards=2), Layout(world=2, shards=2), 1
        ),
    ):
        pass
