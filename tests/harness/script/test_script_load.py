"""Scenarios of commands as they are read: what may be left out, and what cannot be asked of a
command.
"""

from __future__ import annotations

import copy
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.planning.planview import as_text, plan_run
from trainchaos.chaos.scenario.model import InvariantExclusion
from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.chaos.scenario.schema import scenario_schema

GOOD = """\
version: 1
name: mine
seed: 17
workload:
  command: [torchrun, --nproc-per-node, "4", train.py]
  ranks: 4
  steps: 100
  env: {DATA: /data}
  progress: {regex: 'step (?P<step>[0-9]+)'}
  progress_deadline: 2 min
  start_deadline: 5 min
  restarts: 2
faults:
  - {id: kill, kind: process-kill, target: {rank: 3}, at: {step: 57}}
invariants: {leave_out: [sample-accounting]}
"""
CATALOGUE = build_catalogue()
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("torchrun_*/*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return path


def failure(path: Path) -> list[str]:
    """The first line of each error."""
    with pytest.raises(ScenarioError) as raised:
        load(path, CATALOGUE)
    return [
        line
        for line in str(raised.value).replace(f"{path.parent}/", "").split("\n")
        if line.startswith("s.yaml:")
    ]


def test_a_command_recovers_by_itself_and_counts_steps(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, GOOD), CATALOGUE).cells[0].scenario
    work = scenario.workload
    assert scenario.recovery.strategy == "own"
    assert (work.kind, work.title, work.global_batch, work.progress_deadline) == (
        "command",
        "train.py",
        1,
        120.0,
    )
    assert work.patience(begun=False) == (300.0, "start_deadline")
    assert work.patience(begun=True) == (120.0, "progress_deadline")
    assert work.model_copy(update={"start_deadline": None}).patience(begun=False)[0] == 120.0
    assert work.progress == RegexProgress(regex="step (?P<step>[0-9]+)")
    assert scenario.invariants == InvariantExclusion(leave_out=["sample-accounting"])
    (cell,) = load(
        write(tmp_path, GOOD.replace("invariants: {leave_out: [sample-accounting]}", "")), CATALOGUE
    ).cells
    assert cell.scenario.invariants == "observable"


@pytest.mark.slow
def test_replica_groups_have_a_variable(tmp_path: Path) -> None:
    text = GOOD.replace("  ranks: 4", "  ranks: 4\n  group: REPLICA_GROUP_ID")
    assert (
        load(write(tmp_path, text), CATALOGUE).cells[0].scenario.workload.group
        == "REPLICA_GROUP_ID"
    )
    validator().validate(YAML(typ="safe").load(text))


def test_a_directory_starts_from_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/b.yaml").write_text(GOOD)
    inherited = load(write(tmp_path, "extends: base/b.yaml\nname: other\n"), CATALOGUE)
    assert inherited.cells[0].scenario.workload.directory == str(tmp_path / "base")
    own = load(write(tmp_path, "extends: base/b.yaml\nworkload: {directory: x}\n"), CATALOGUE)
    assert own.cells[0].scenario.workload.directory == str(tmp_path / "x")


def test_lines_of_the_workload_are_kept(tmp_path: Path) -> None:
    lines = load(write(tmp_path, GOOD), CATALOGUE).lines
    assert (lines["workload.command"], lines["workload.progress"]) == (5, 9)


def test_the_plan_names_the_script(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, GOOD), CATALOGUE)
    text = as_text(plan_run(loaded, CATALOGUE, seed=None, cells=loaded.cells))
    assert "train.py, 4 ranks, 100 steps" in text and "rank 3" in text


BAD = [
    (
        "  ranks: 4\n",
        "",
        "s.yaml:5:3: 'ranks' is missing in workload: a command does not tell how many ranks",
    ),
    (
        "  steps: 100\n",
        "",
        "s.yaml:5:3: 'steps' is missing in workload: a command does not tell how many steps",
    ),
    (
        "  ranks: 4",
        "  kind: gpt\n  ranks: 4",
        "give a kind (a built-in workload) or a command, not both",
    ),
    ("  ranks: 4", "  size: nano\n  ranks: 4", "size is for built-in workloads"),
    ("  ranks: 4", "  ranks: 4\n  checkpoint: {every: 5}", "a command decides every itself"),
    (
        "  ranks: 4",
        "  ranks: 4\n  checkpoint: {directory: /home/me/ckpt}",
        "lie in $CHAOS_SCRATCH, the run's own: $CHAOS_SCRATCH/home/me/ckpt",
    ),
    (
        "step (?P<step>[0-9]+)",
        "step ([0-9]+)",
        "s.yaml:9:21: the expression needs a group named step",
    ),
    (
        "[0-9]+)'}",
        "[0-9]+)', epochs_from: 1, steps_from: 0, epoch_steps: 5}",
        "epochs_from goes with a group epoch\nepoch_steps goes with a group epoch in",
    ),
    (
        "[0-9]+)'}",
        "[0-9]+)', steps_from: 0}",
        "steps_from goes with a group of, or epoch_steps beside a group epoch",
    ),
    ("step (?P<step>[0-9]+)", "step (?P<step>[0-9+", "s.yaml:9:21: not a regular expression"),
    (
        "{regex: 'step (?P<step>[0-9]+)'}",
        "stdout",
        "progress needs beacon, {regex: '...'} or {preset: name}, not 'stdout'",
    ),
    ("2 min", "-3", "s.yaml:10:22: a duration cannot be -3"),
    (
        "seed: 17",
        "recovery: hot-spare",
        "s.yaml:3:1: a command recovers by itself: leave recovery out",
    ),
    (
        "seed: 17",
        "launcher: sim",
        "s.yaml:3:11: a command runs on this machine, as it is: a simulation cannot run it",
    ),
    (
        "process-kill",
        "exception",
        "s.yaml:14:22: exception cannot be done to a command from outside; what can: ",
    ),
    (
        "at: {step: 57}",
        "at: {step: 57, phase: backward}",
        "the phases of a command's steps are unknown from outside",
    ),
    (
        "at: {step: 57}",
        "at: {event: checkpoint_committed}",
        "checkpoint_committed of a command cannot be seen from outside",
    ),
    (
        "kind: process-kill",
        "kind: process-stop, duration: {steps: 3}",
        "a duration in steps needs an agent in the rank",
    ),
    (
        "process-kill, target: {rank: 3}",
        "checkpoint-corrupt, target: {checkpoint: latest}",
        "s.yaml:14:22: checkpoint-corrupt needs to know where the checkpoints are: workload.chec",
    ),
    (
        "at: {step: 57}",
        "at: {step: 57}, expect: {detected_by: nonfinite}",
        "from outside a failure is seen as exit or hang",
    ),
    (
        "{leave_out: [sample-accounting]}",
        "{leave_out: [sample-acounting]}",
        "unknown checker 'sample-acounting'; did you mean 'sample-accounting'?",
    ),
    (
        '[torchrun, --nproc-per-node, "4", train.py]',
        "torchrun train.py",
        "s.yaml:5:12: command needs a list",
    ),
    ("{DATA: /data}", '{"A=B": x}', "the name of a variable is not empty and holds no '='"),
    (
        "[torchrun,",
        '["torch\\0run",',
        "s.yaml:5:13: a program has a name, and a word of a command holds no zero byte",
    ),
    ("{DATA: /data}", "{DATA: 5}", "needs text, not 5"),
    ("  ranks: 4", "  ranks: 4\n  group: A=B", "s.yaml:7:10: "),
]


@pytest.mark.parametrize(("old", "new", "errors"), BAD)
def test_bad_input(tmp_path: Path, old: str, new: str, errors: str) -> None:
    assert old in GOOD
    found = failure(write(tmp_path, GOOD.replace(old, new, 1)))
    assert len(found) == len(errors.split("\n")), found
    assert all(part in line for line, part in zip(found, errors.split("\n"), strict=True)), found


def test_a_progress_that_was_written_from_its_model_loads(tmp_path: Path) -> None:
    progress = RegexProgress(regex="step (?P<step>[0-9]+)")
    text = GOOD.replace("{regex: 'step (?P<step>[0-9]+)'}", progress.model_dump_json())
    assert text != GOOD
    assert load(write(tmp_path, text), CATALOGUE).cells[0].scenario.workload.progress == progress


@pytest.mark.parametrize(
    "key",
    [
        "directory: .",
        "env: {}",
        "progress: beacon",
        "restarts: 1",
        "group: G",
        "checkpoint: {directory: x}",
    ],
)
def test_what_a_built_in_workload_does_not_take(tmp_path: Path, key: str) -> None:
    text = f"version: 1\nname: x\nworkload: {{kind: mlp, {key}}}\nrecovery: hot-spare\n"
    (line,) = failure(write(tmp_path, text))
    assert "command" in line


def test_neither_kind_nor_command(tmp_path: Path) -> None:
    (line,) = failure(
        write(tmp_path, "version: 1\nname: x\nworkload: {ranks: 4}\nrecovery: hot-spare\n")
    )
    assert "'kind' is missing: name a built-in workload, or give a command" in line


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_examples_are_valid(path: Path) -> None:
    assert len(load(path, CATALOGUE, env=os.environ).cells) == 1


TREE = YAML(typ="safe").load(GOOD)


@cache
def validator() -> Any:
    return jsonschema.Draft202012Validator(scenario_schema(CATALOGUE))


@pytest.mark.slow
def test_the_schema_admits_commands() -> None:
    validator().validate(YAML(typ="safe").load(GOOD))
    both = GOOD.replace("  ranks: 4", "  kind: gpt\n  ranks: 4")
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(YAML(typ="safe").load(both))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**9),
    st.text(max_size=8),
    st.lists(st.text(max_size=4), max_size=3),
    st.dictionaries(
        st.sampled_from(["regex", "directory", "every", "kind", "step", "leave_out"]),
        st.text(max_size=8),
    ),
)


@pytest.mark.slow
@settings(deadline=None)  # what is timed is the machine
@given(
    key=st.sampled_from(
        [
            "command",
            "ranks",
            "steps",
            "env",
            "progress",
            "progress_deadline",
            "restarts",
            "checkpoint",
            "directory",
            "kind",
            "size",
            "params",
            "global_batch",
        ]
    ),
    value=ODD,
    also=st.sampled_from(["launcher", "recovery", "invariants", "faults", "sla"]),
    other=ODD,
)
def test_no_value_gives_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object, also: str, other: object
) -> None:
    tree = copy.deepcopy(TREE)
    tree["workload"][key] = value
    tree[also] = other
    path = tmp_path_factory.mktemp("odd") / "s.yaml"
    path.write_text(json.dumps(tree))
    try:
        found = load(path, CATALOGUE)
    except ScenarioError as error:
        assert str(error), "refused, with words"
    else:
        assert found.cells
