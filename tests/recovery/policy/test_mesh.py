"""Where a rank stands in a mesh, and with whom."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from trainchaos.recovery.data.order import micro_batches
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.mesh import DIMS, SAME, Mesh, Place, circles_of

SIZES = [
    Mesh(shard=shard, pipeline=pipeline, context=context, tensor=tensor)
    for shard, pipeline, context, tensor in itertools.product((1, 2, 3), repeat=4)
]


@pytest.mark.parametrize("mesh", SIZES, ids=str)
def test_a_line_holds_the_cells_that_differ_in_one_coordinate(mesh: Mesh) -> None:
    places = [mesh.place(cell) for cell in range(mesh.cells)]
    assert len(set(places)) == mesh.cells
    for cell, dim in itertools.product(range(mesh.cells), DIMS):
        mine = places[cell]._replace(**{dim: 0})
        alike = [n for n, one in enumerate(places) if one._replace(**{dim: 0}) == mine]
        assert [*mesh.line(cell, dim)] == alike
        assert [getattr(places[n], dim) for n in alike] == [*range(mesh.size(dim))]


@pytest.mark.parametrize("mesh", SIZES, ids=str)
def test_ranks_of_one_circle_name_it_alike(mesh: Mesh) -> None:
    layout = Layout(world=2 * mesh.cells, shards=mesh.cells)
    met: dict[str, set[tuple[int, ...]]] = {}
    for rank in range(layout.world):
        circles = circles_of(mesh, layout, rank)
        assert all(rank in ranks for ranks in circles.values())
        for name, ranks in circles.items():
            met.setdefault(name, set()).add(tuple(ranks))
    assert all(len(ranks) == 1 for ranks in met.values())


def test_ranks_that_compute_the_same_samples_are_neighbours_and_one_of_them_counts() -> None:
    mesh, ids = Mesh(pipeline=2, tensor=2), list(range(8))
    shares = [
        micro_batches(ids, rank=rank, world=8, full=8, alike=mesh.alike)[0].samples
        for rank in range(8)
    ]
    assert shares == [ids[:4]] * 4 + [ids[4:]] * 4
    assert [mesh.leads(rank) for rank in range(4)] == [True, False, False, False]
    assert [mesh.says_loss(rank) for rank in range(4)] == [False, False, True, False]
    assert [mesh.draws(rank) for rank in range(4)] == [0, 0, 2, 2]


def test_ranks_of_a_context_compute_the_same_samples_and_each_says_its_loss() -> None:
    mesh, ids = Mesh(pipeline=2, context=2, tensor=2), list(range(8))
    shares = [
        micro_batches(ids, rank=rank, world=16, full=16, alike=mesh.alike)[0].samples
        for rank in range(16)
    ]
    assert shares == [ids[:4]] * 8 + [ids[4:]] * 8
    assert mesh.place(6) == Place(shard=0, pipeline=1, context=1, tensor=0)
    for first in (0, 8):
        ranks = range(first, first + 8)
        assert [rank - first for rank in ranks if mesh.leads(rank)] == [0]
        assert [rank - first for rank in ranks if mesh.says_loss(rank)] == [4, 6]
    assert [mesh.draws(rank) for rank in range(8)] == [0, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("mesh", SIZES, ids=str)
def test_gradients_are_summed_over_replicas_and_contexts(mesh: Mesh) -> None:
    layout = Layout(world=2 * mesh.cells, shards=mesh.cells)
    for rank in range(layout.world):
        circles = circles_of(mesh, layout, rank)
        found = [ranks for name, ranks in circles.items() if name.startswith(SAME)]
        (same,) = found or [circles[f"/shard-{layout.shard_of(rank)}"]]
        assert bool(found) == (mesh.context > 1)
        mine = mesh.place(layout.shard_of(rank))._replace(context=0)
        assert [*same] == [
            other
            for other in range(layout.world)
            if mesh.place(layout.shard_of(other))._replace(context=0) == mine
        ]


def test_one_shard_a_rank_is_what_it_was() -> None:
    mesh = Mesh(shard=3)
    assert mesh.plain
    assert circles_of(mesh, Layout(world=6, shards=3), 4) == {
        "": range(6),
        "/shard-1": range(1, 6, 3),
        "/replica-1": range(3, 6),
        "/pipeline-of-4": range(4, 5),
        "/context-of-4": range(4, 5),
        "/tensor-of-4": range(4, 5),
    }


def test_a_mesh_of_another_size_than_the_replica_is_refused() -> None:
    facts = {"process": "w0", "world": 4, "steps": 1, "global_batch": 4, "samples": 4, "seed": 0}
    saves = {"checkpoint_dir": None, "checkpoint_every": 1, "checkpoint_keep": 1}
    with pytest.raises(ValidationError, match="tensor 2 is not 4 ranks"):
        JobConfig(shards=4, mesh=Mesh(tensor=2), **facts, **saves)  # type: ignore[arg-type]
