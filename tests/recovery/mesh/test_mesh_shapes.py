"""Meshes that a workload's model cannot be cut up for are refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.recovery.cli.options import mesh_of
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.rank.recipe import ModelRecipe
from trainchaos.recovery.state.cell import Cell

SCENARIO = """
version: 1
name: mesh
workload: {{kind: {kind}, ranks: {ranks}, steps: 4, global_batch: {batch}, parallelism: {shape}}}
recovery: {strategy}
"""


@pytest.mark.parametrize(
    ("kind", "ranks", "shape", "strategy", "complaint"),
    [
        ("gpt", 3, "{tensor: 3}", "hot-spare", "the 4 heads of gpt nano do not divide by tensor 3"),
        ("gpt", 4, "{pipeline: 4}", "hot-spare", "has 3 layers, and pipeline 4 would have stages"),
        (
            "mlp",
            2,
            "{tensor: 2}",
            "hot-spare",
            "mlp has no tensor, context or pipeline parallelism",
        ),
        ("mlp", 2, "{context: 2}", "hot-spare", "mlp has no tensor, context or pipeline"),
        ("gpt", 3, "{context: 3}", "hot-spare", "64 positions of a sequence of gpt nano do not"),
        ("gpt", 4, "{context: 8}", "hot-spare", "context 8 x tensor 1 is 8 ranks, not 4"),
        (
            "gpt",
            4,
            "{replicate: 2, tensor: 2}",
            "{strategy: hot-spare, sync: live}",
            "a live spare follows one of the 2 parts of the model, and 1 of them leave parts that"
            " none follows: use spares: 2 or more, or sync: none",
        ),
        (
            "gpt",
            2,
            "{tensor: 2}",
            "{strategy: hot-spare, sync: live, spares: 2}",
            "the 2 ranks hold one copy of the model, and a live spare is compared with another",
        ),
        (
            "gpt",
            4,
            "{replicate: 2, shard: 2}",
            "{strategy: hot-spare, rehearse: true}",
            "spread over 2 ranks: use parallelism: ddp, or rehearse: false",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    tmp_path: Path, kind: str, ranks: int, shape: str, strategy: str, complaint: str
) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(
        SCENARIO.format(kind=kind, ranks=ranks, batch=12, shape=shape, strategy=strategy)
    )
    with pytest.raises(ScenarioError) as refused:
        load(path, build_catalogue(), overrides=(), env={})
    assert complaint in str(refused.value)


def test_a_batch_is_divided_over_those_that_compute_other_samples(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    text = SCENARIO.format(
        kind="gpt", ranks=8, batch=2, shape="{replicate: 2, tensor: 4}", strategy="hot-spare"
    )
    path.write_text(text)
    load(path, build_catalogue(), overrides=(), env={})
    path.write_text(text.replace("global_batch: 2", "global_batch: 3"))
    with pytest.raises(ScenarioError, match="3 does not divide over 2 shares of ranks"):
        load(path, build_catalogue(), overrides=(), env={})


def test_a_script_has_to_say_how_its_model_is_cut_up() -> None:
    from torch import nn

    recipe = ModelRecipe(nn.Linear(2, 2), lambda parameters: None, None, None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="a replica is pipeline 2 x tensor 2, and only the script"):
        recipe.check(shards=4, mesh=Mesh(pipeline=2, tensor=2))


def test_the_option_names_what_it_takes() -> None:
    assert mesh_of("tensor=2,pipeline=3") == Mesh(tensor=2, pipeline=3)
    assert mesh_of("tensor=2, pipeline=3") == Mesh(tensor=2, pipeline=3)
    assert mesh_of("context=2") == Mesh(context=2)
    with pytest.raises(Exception, match="there are shard, pipeline, context and tensor"):
        mesh_of("tensors=2")
    with pytest.raises(Exception, match="gives a dimension twice"):
        mesh_of("tensor=2,tensor=4")


def test_the_first_of_a_context_speaks_for_all_that_hold_the_same() -> None:
    mesh = Mesh(shard=1, pipeline=2, context=2)
    cells = [Cell(mesh=mesh, number=number) for number in range(mesh.cells)]
    spoken = [cell.speaks("model.norm.weight", torch.zeros(1)) for cell in cells]
    assert spoken == [True, False, True, False]
    cells = [replace(cell, tied=("norm.weight",), firsts=()) for cell in cells[2:]]
    assert not any(cell.speaks("model.norm.weight", torch.zeros(1)) for cell in cells)


def test_one_stage_writes_what_every_stage_has_registered() -> None:
    mesh = Mesh(pipeline=2, tensor=2)
    cells = [Cell(mesh=mesh, number=number) for number in range(mesh.cells)]
    assert [cell.speaks("user.average.weight", torch.zeros(1)) for cell in cells] == [
        True,
        False,
        False,
        False,
    ]
