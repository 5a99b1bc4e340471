"""Samples are tried one by one as training computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.rank.examine import samples_to_blame


class Alike:
    """A reducer of ranks that compute each sample together."""

    def rehearse(self) -> None: ...

    def all_finite(self) -> bool:
        return True

    def agree(self, yes: bool) -> bool:
        return yes


def loss_of(samples: list[int]) -> Tensor:
    value = torch.tensor(float("nan") if samples == [8] else 1.0, requires_grad=True)
    return value * 1.0


@pytest.mark.parametrize(
    ("mesh", "rank", "seeded"),
    [
        (Mesh(tensor=2), 3, 2),
        (Mesh(context=2, tensor=2), 3, 2),
        (Mesh(context=2), 3, 3),
        (Mesh(pipeline=2), 3, 3),
    ],
    ids=str,
)
def test_random_numbers_are_those_of_the_step(mesh: Mesh, rank: int, seeded: int) -> None:
    """Ranks that compute a layer together draw alike."""
    seeds: list[tuple[int, int]] = []
    step = SimpleNamespace(number=5, samples=[7, 8], count=2)
    job = SimpleNamespace(
        config=SimpleNamespace(nonfinite="retry"),
        examine=5,
        loss_of=loss_of,
        layout=Layout(world=4, shards=mesh.cells),
        arranged=mesh,
        reducer=Alike(),
        rank=rank,
        world=4,
        marks=SimpleNamespace(touch=lambda: None),
        state=SimpleNamespace(
            seed_step=lambda rank, number: seeds.append((rank, number)),
            attempt=SimpleNamespace(undo=lambda: None, begin=lambda: None),
            model=nn.Linear(1, 1),
        ),
        spoil=None,
        micro_batches=lambda number, rank: [step],
        due=lambda number: [1, 2, 7, 8],
    )
    assert samples_to_blame(cast(Any, job), cast(Any, step), (rank,)) == [8]
    assert set(seeds) == {(seeded, 5)}
