"""Checkpoints on the disk and in memory side by side: which is restored, and what is said
of each.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.checkpoint.memory.test_memory_state import keeper_named
from tests.recovery.checkpoint.test_checkpointer import ALONE, Rank
from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.memory.keeper import Keeper
from trainchaos.recovery.checkpoint.memory_checkpointer import MemoryCheckpointer
from trainchaos.recovery.checkpoint.restore import CheckpointMismatch
from trainchaos.recovery.policy.layout import Layout

NAME = "places-" + secrets.token_hex(8)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    kept = keeper_named(NAME)
    yield kept
    kept.close()


def rank(directory: Path | None, *, every: int = 0, memory: int = 1, **more: Any) -> Rank:
    """It saves every so many steps on disk (0: never) and in memory."""
    told = {"socket": NAME, "job": "job", "every": memory}
    return Rank(directory, checkpoint_every=every, memory=told, **more)  # type: ignore[arg-type]


def memory_of(one: Rank) -> MemoryCheckpointer:
    assert one.saver._memory is not None
    return one.saver._memory


def settle(one: Rank) -> None:
    assert memory_of(one).settle(LIMIT_S)


def restored(one: Rank) -> str | None:
    """By a fresh process that looks at the same disk and keeper."""
    return one.saver.restore(None, ALONE)  # type: ignore[arg-type]


def damage(keeper: Keeper, step: int) -> None:
    """Change a byte of what is kept of a step."""
    kept = {entry.header.key.step: entry for entry in keeper._store._entries.values()}
    os.pwrite(kept[step].fd, b"\xff\xfe", 1000)


@pytest.mark.parametrize(
    ("disk", "memory", "steps", "expected"),
    [
        (10, 3, 14, "memory-step-00000012"),
        (5, 4, 15, "step-00000015"),
        (6, 3, 12, "memory-step-00000012"),
    ],
    ids=["memory is newer", "the disk is newer", "both alike"],
)
def test_the_newer_of_memory_and_disk_is_restored(
    keeper: Keeper, tmp_path: Path, disk: int, memory: int, steps: int, expected: str
) -> None:
    one = rank(tmp_path, every=disk, memory=memory)
    one.run(steps)
    settle(one)
    fresh = rank(tmp_path)
    assert restored(fresh) == expected
    assert fresh.state.step == int(expected.rsplit("-", 1)[1])
    assert float(fresh.state.model.weight[0, 0].detach()) == pytest.approx(
        float(rank(tmp_path).state.model.weight[0, 0].detach()) + sum(range(fresh.state.step + 1))
    )
    one.saver.close()


def test_damaged_ones_are_refused_by_name_and_the_next_older_is_taken_wherever_it_is(
    keeper: Keeper, tmp_path: Path
) -> None:
    one = rank(tmp_path, every=5)
    one.run(9)  # on disk 5; in memory 8 and 9
    settle(one)
    damage(keeper, 9)
    fresh = rank(tmp_path)
    assert restored(fresh) == "memory-step-00000008"
    assert [(k, d["checkpoint"]) for k, d in fresh.events if k is Kind.CHECKPOINT_REFUSED] == [
        (Kind.CHECKPOINT_REFUSED, "memory-step-00000009")
    ]
    damage(keeper, 8)
    again = rank(tmp_path)
    assert restored(again) == "step-00000005" and again.state.step == 5
    one.saver.close()


def test_a_bad_one_on_disk_that_is_newer_is_said_once_and_memory_taken(
    keeper: Keeper, tmp_path: Path
) -> None:
    one = rank(tmp_path, every=4, memory=3)
    one.run(8)  # on disk 4 and 8; in memory 3 and 6
    settle(one)
    (tmp_path / "step-00000008" / "rank-0000.bin").write_bytes(b"torn")
    damage(keeper, 6)
    fresh = rank(tmp_path)
    assert restored(fresh) == "step-00000004"
    refused = [d["checkpoint"] for k, d in fresh.events if k is Kind.CHECKPOINT_REFUSED]
    assert refused == ["step-00000008", "memory-step-00000006"]
    one.saver.close()


def test_without_a_disk_memory_alone_serves(keeper: Keeper) -> None:
    one = rank(None)
    one.run(3)
    settle(one)
    assert restored(rank(None)) == "memory-step-00000003"
    one.saver.close()


def test_without_a_keeper_the_disk_serves_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainchaos.recovery.checkpoint.memory_checkpointer.CONNECT_S", 0.0)
    one = rank(tmp_path, every=2)
    one.run(4)
    settle(one)
    one.step()
    failed = [d["error"] for k, d in one.events if k is Kind.CHECKPOINT_FAILED]
    assert len(failed) == 4 and "the keeper of this node" in failed[0]
    assert len([note for note in one.notes if note.state == "failed"]) == 1, (
        "people hear of it once"
    )
    fresh = rank(tmp_path)
    assert restored(fresh) == "step-00000004"
    assert [d["checkpoint"] for k, d in fresh.events if k is Kind.CHECKPOINT_REFUSED] == ["memory"]
    one.saver.close()


def test_what_is_said_of_a_save_in_memory_names_place_and_cost(keeper: Keeper) -> None:
    one = rank(None, memory=2)
    one.run(2)
    settle(one)
    one.step()
    begun, kept = one.events
    assert begun == (
        Kind.CHECKPOINT_SAVING,
        {
            "step": 2,
            "checkpoint": "memory-step-00000002",
            "place": "memory",
            "shard": 0,
            "shards": 1,
        },
    )
    assert kept[0] is Kind.CHECKPOINT_COMMITTED and kept[1]["copies"] == [] and kept[1]["bytes"] > 0
    assert 0 < kept[1]["blocked_s"] <= kept[1]["seconds"]
    one.saver.close()


def test_what_is_distrusted_is_not_restored_from_memory(keeper: Keeper) -> None:
    one = rank(None)
    one.run(5)
    settle(one)
    fresh = rank(None)
    fresh.saver.distrust([(2, 4)], deletes=True)
    assert restored(fresh) == "memory-step-00000004"
    assert [d["checkpoint"] for k, d in fresh.events if k is Kind.CHECKPOINT_DELETED] == [
        "memory-step-00000005"
    ]
    one.saver.close()


class Votes:
    """Stands for the group of a sharded job as rank 0 sees it. ``others``: what they vote."""

    def __init__(self, others: list[int]) -> None:
        self.rank, self.world, self.others, self.asked = 0, 2, others, 0

    def given(self, group: Votes, vote: int, device: str) -> list[int]:
        self.asked += 1
        return [vote, *self.others]

    def broadcast(self, words: Any, source: int) -> None:
        assert source == self.rank

    def read(self, words: Any) -> list[int]:
        return [int(word) for word in words]


@pytest.mark.parametrize(
    "others", [[0], [1], [2]], ids=["good", "damaged there", "does not fit there"]
)
def test_all_ranks_of_a_sharded_model_load_the_same_or_none(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, others: list[int]
) -> None:
    one = rank(None)
    pair = Layout(world=2, shards=2)
    for shard in (0, 1):
        memory_of(one).after_commit(3, rank=shard, layout=pair, generation=1, asked=True)
        settle(one)
    fresh, group = rank(None), Votes(others)
    monkeypatch.setattr("trainchaos.recovery.checkpoint.restore.votes", group.given)
    before = fresh.state.digests()
    if others == [2]:
        with pytest.raises(CheckpointMismatch, match="does not fit rank 1"):
            fresh.saver.restore(group, pair)  # type: ignore[arg-type]
    else:
        good = "memory-step-00000003" if others == [0] else None
        assert fresh.saver.restore(group, pair) == good  # type: ignore[arg-type]
    assert group.asked == (2 if others == [0] else 1), "a vote more would wait for nobody"
    assert fresh.state.digests() == before or others == [0]
    one.saver.close()
