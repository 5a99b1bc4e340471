"""What each rank has of its own goes into a checkpoint, and back to that rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import Self, results
from trainchaos.recovery.checkpoint import own, saves
from trainchaos.recovery.checkpoint import restore as restoring
from trainchaos.recovery.checkpoint.files.checkpoints import manifest_of, newest_first
from trainchaos.recovery.collectives.transfer import copy_state
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state import digest
from trainchaos.recovery.state.state import TrainState


class Counts:
    def __init__(self) -> None:
        self.n, self.total = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n, self.total = state["n"], state["total"]


def state_of(rank: int) -> TrainState:
    """Parameters are alike; a buffer and what is registered are each rank's own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("constant", torch.arange(10.0))
    model.register_buffer("empty", torch.empty(0))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None, seed=5)
    counts = Counts()
    state.registered.add("counts", counts, None)
    model[1].running_mean.fill_(rank)
    counts.n, state.step = 10 * rank, 7
    counts.total.fill_(rank)
    return state


def shown(state: TrainState) -> tuple[float, int, float]:
    counts: Any = state.registered["counts"]
    return float(state.model[1].running_mean[0]), counts.n, float(counts.total[0])  # type: ignore[index]


def saved_and_restored(me: Self, folder: str) -> Any:
    """What a rank has after a restore, and what was saved of the others."""
    layout = Layout(world=me.world)
    group = me.group()
    group.form()
    state = state_of(me.rank)
    found = own.gathered(state, group.holders, layout, lambda: None)
    sizes = {name: len(one) for name, one in found.items()}
    if me.rank == 0:
        state.own = found
        saves.save(state, Path(folder), generation=1)
        state.own = {}
    again = state_of(9)
    if me.rank == 0:
        again.room_for_own = lambda table: own.fit(table, layout, 0)
        restoring.restore_newest(again, Path(folder), lambda *bad: None)
    copy_state(again, group.holders, source=0, receive=me.rank > 0, progress=lambda: None)
    mine = again.own.get(own.name(layout, me.rank))
    if mine is not None:
        own.unpack(again, mine)
    me.leave()
    return shown(again), sizes


@pytest.mark.real
def test_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    (first, sizes), *others = results(partial(saved_and_restored, folder=str(tmp_path)), 3)
    assert first == (0.0, 0, 0.0)
    assert [one for one, _ in others] == [(1.0, 10, 1.0), (2.0, 20, 2.0)]
    assert sizes.keys() == {"own.1.0-1", "own.2.0-1"} and all(not s for _, s in others)
    assert {*sizes.values()} == {4096}, "the constant is not among it"


def test_a_pack_brings_back_what_it_holds() -> None:
    there, here = state_of(2), state_of(0)
    own.unpack(here, own.packed(there))
    assert shown(here) == shown(there)
    here.besides()["model.constant"].fill_(1)
    own.unpack(here, own.packed(there, own.digests_of(there, there.besides())))
    assert float(here.besides()["model.constant"][5]) == 1, "it was left out"


def test_what_no_step_changes_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(0)
    constant = torch.arange(1 << 16, dtype=torch.float32)
    state.model.register_buffer("large", constant)
    for _ in range(4):
        state.attempt.begin()
        state.attempt.applied()
        state.step += 1
    hashed: list[int] = []

    def bytes_of(tensor: torch.Tensor) -> Any:
        hashed.append(tensor.nbytes)
        return digest.bytes_of(tensor)

    monkeypatch.setattr(own, "bytes_of", bytes_of)
    first = own.digests_of(state, state.besides())
    assert constant.nbytes in hashed
    hashed.clear()
    assert own.digests_of(state, state.besides()) == first
    assert constant.nbytes not in hashed and hashed, "small ones may change at any time"
    with torch.no_grad():
        constant.add_(1)
    assert own.digests_of(state, state.besides())["model.large"] != first["model.large"]


def test_a_pack_of_another_model_is_refused() -> None:
    state = state_of(0)
    data = own.packed(state)
    state.model[1] = nn.BatchNorm1d(5)  # type: ignore[index]
    with pytest.raises(ValueError, match="running_mean is float32"):
        own.unpack(state, data)


def test_a_checkpoint_with_own_parts_is_read_by_a_job_of_other_ranks(tmp_path: Path) -> None:
    state = state_of(0)
    state.own = {own.name(Layout(world=2), 1): own.packed(state_of(1))}
    saves.save(state, tmp_path, generation=1)
    again = state_of(9)
    assert restoring.restore_newest(again, tmp_path, lambda *bad: pytest.fail(str(bad)))
    assert shown(again) == (0.0, 0, 0.0) and not again.own
    assert (
        own.fit(
            manifest_of(newest_first(tmp_path)[0])["tensors"],
            Layout(world=4, shards=2),
            1,
        )
        == {}
    )
