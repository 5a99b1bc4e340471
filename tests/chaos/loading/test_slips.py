"""Slips that leave a scenario readable, and yet not what was meant: one error or warning each, at
its place.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.fake_catalogue import CATALOGUE
from tests.support.fault_fakes import kind_of
from trainchaos.chaos import plugins
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.planning.planview import when_text
from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.plan import plan
from trainchaos.chaos.schedule.targeting import Scope

KILL = "{id: kill, kind: process-kill, at: {step: 57}}"
SCENARIO = """\
version: 1
name: example
workload: {kind: gpt, ranks: 4, steps: 100, global_batch: 16, checkpoint: {every: 20}}
recovery: hot-spare
faults:
  - FAULT
"""


def said(
    tmp_path: Path, fault: str = KILL, more: str = "", saves: str = "", **env: str
) -> list[str]:
    """``line:column: message`` of every error, else of every warning. ``saves``: in place of how
    the example does.
    """
    path, usual = tmp_path / "s.yaml", "checkpoint: {every: 20}"
    path.write_text(SCENARIO.replace("FAULT", fault).replace(usual, saves or usual) + more)
    try:
        # of how plugins behave, the fakes know little
        known = (
            replace(CATALOGUE, faults=plugins.load(plugins.FAULTS, Fault)) if saves else CATALOGUE
        )
        text = "\n".join(load(path, known, env=env).warnings)
    except ScenarioError as error:
        text = str(error)
    prefix = f"{path}:"
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def test_no_slip_nothing_said(tmp_path: Path) -> None:
    assert said(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ('"${vars.nope}"', "6:55: unknown vars name 'nope'; there are none"),
        ('"${env:NOPE}"', "6:48: environment variable NOPE is not set"),
        ("9" * 30, "6:47: the number is too large"),
    ],
)
def test_a_step_that_cannot_be_read_is_not_called_missing(
    tmp_path: Path, value: str, error: str
) -> None:
    (line,) = said(tmp_path, KILL.replace("57", value))
    assert line.startswith(error)


def test_neither_is_one_that_comes_from_elsewhere(tmp_path: Path) -> None:
    fault = KILL.replace("57", '"${vars.step}"')
    (line,) = said(tmp_path, fault, "vars: {step: '${env:NOPE}'}\n")
    assert line.startswith("7:15: environment variable NOPE")
    (line,) = said(tmp_path, fault, f"vars: {{step: {'9' * 30}}}\n")
    assert line.startswith("7:14: the number is too large")


def test_what_else_is_wrong_there_is_still_said(tmp_path: Path) -> None:
    found = said(tmp_path, '{id: kill, knd: x, at: {step: "${vars.nope}", phse: data}}')
    assert [line.split(": ", 1)[1] for line in found] == [
        "'kind' is missing in faults.0",
        "unknown key 'knd'; did you mean 'kind'?",
        "unknown vars name 'nope'; there are none",
        "unknown key 'phse'; did you mean 'phase'?",
    ]


def test_a_key_one_level_too_deep_is_told_its_place(tmp_path: Path) -> None:
    fault = KILL.replace("step: 57", "step: 57, retrigger: every_attempt")
    assert said(tmp_path, fault) == [
        "6:51: unknown key 'retrigger' in at: it belongs beside at, not in it"
    ]


@pytest.mark.parametrize(("first", "second"), [("count", "percent"), ("percent", "count")])
def test_of_two_forms_the_one_given_first_is_meant(tmp_path: Path, first: str, second: str) -> None:
    """Whatever their order in the alphabet, and nobody is asked whether he meant what he wrote."""
    fault = KILL.replace("at:", f"target: {{select: {{{first}: 2, {second}: 2}}}}, at:")
    (line,) = said(tmp_path, fault)
    assert line.endswith(f": {second!r} does not go with the keys beside it")


# --- who is spared


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("{exclude: {ranks: [0, 99]}}", "there is no rank 99: with 4 ranks they go from 0 to 3"),
        ("{exclude: {nodes: [1]}}", "there is no node 1: node 0 is the only one"),
    ],
)
def test_excluded_places_exist(tmp_path: Path, target: str, error: str) -> None:
    (line,) = said(tmp_path, KILL.replace("at:", f"target: {target}, at:"))
    assert line.split(": ", 1)[1] == error
    assert line.startswith("6:66:" if "99" in error else "6:63:")


def test_protected_ranks_exist(tmp_path: Path) -> None:
    assert said(tmp_path, more="blast_radius: {protected_ranks: [1, 4]}\n") == [
        "7:37: there is no rank 4: with 4 ranks they go from 0 to 3"
    ]


def test_protected_nodes_exist(tmp_path: Path) -> None:
    assert said(
        tmp_path,
        more="blast_radius: {protected_nodes: [0, 2]}\nlauncher: {kind: local, nodes: 2}\n",
    ) == ["7:37: there is no node 2: with 2 nodes they go from 0 to 1"]


def test_more_healthy_replicas_than_there_are_is_one_error_at_the_limit(tmp_path: Path) -> None:
    assert said(tmp_path, more="blast_radius: {min_healthy_replicas: 9}\n") == [
        "7:38: there are only 4 replicas, so 9 cannot be healthy"
    ]
    (line,) = said(tmp_path, more="blast_radius: {min_healthy_replicas: 4}\n")
    assert line.startswith("6:") and "keeps 4 replicas healthy" in line


# --- what will come to nothing


def test_a_fault_of_the_saves_is_for_the_rank_that_saves(tmp_path: Path) -> None:
    fault = "{id: eio, kind: io-error, target: TARGET, at: {step: 40}, duration: {steps: 30}}"
    why = "io-error acts on saves, and rank 0 alone saves: target {rank: 0}"
    for right in ("{rank: 0}", "{replica: 0}", "{select: all}", "{exclude: {ranks: [1, 2, 3]}}"):
        assert said(tmp_path, fault.replace("TARGET", right)) == [], right
    assert said(tmp_path, fault.replace("TARGET", "{rank: 2}")) == [f"6:46: {why}"]
    assert said(tmp_path, fault.replace("TARGET", "{select: one}")) == [f"6:31: {why}"]
    assert said(tmp_path, fault.replace("TARGET", "{select: all, exclude: {ranks: [0]}}")) == [
        f"6:31: {why}"
    ]


def test_with_a_sharded_checkpoint_every_rank_that_writes_a_part_is_a_target(
    tmp_path: Path,
) -> None:
    fault = "{id: eio, kind: io-error, target: TARGET, at: {step: 40}, duration: {steps: 30}}"
    sharded = {"saves": "checkpoint: {every: 20, sharded: true}"}
    for right in (
        "{rank: 2}",
        "{select: one}",
        "{select: {count: 2}}",
        "{select: all, exclude: {ranks: [0]}}",
    ):
        assert said(tmp_path, fault.replace("TARGET", right), **sharded) == [], right
    torn = (
        "{id: t, kind: checkpoint-corrupt, params: PARAMS, target: {checkpoint: latest, rank: 2},"
        " at: {step: 25}}"
    )
    rename, renamed = "{mode: torn}", "{mode: torn, stage: renamed}"
    assert said(tmp_path, torn.replace("PARAMS", rename), **sharded) == []
    assert said(tmp_path, torn.replace("PARAMS", renamed), **sharded) == [
        "6:67: rank 2 writes a part, which rank 0 gives its name: use stage rename, or rank: 0"
    ]
    (alone,) = said(
        tmp_path, torn.replace("PARAMS", rename), saves="checkpoint: {every: 20, keep: 4}"
    )
    assert alone.endswith(
        "checkpoint-corrupt acts on saves, and rank 0 alone saves: target {rank: 0}"
    )
    (no_rank,) = said(tmp_path, torn.replace("PARAMS", "{mode: bitflip}"), **sharded)
    assert no_rank.endswith("checkpoint-corrupt acts on checkpoints, so its target has no rank")


def test_of_a_sharded_model_the_first_replica_saves(tmp_path: Path) -> None:
    fault = "{id: eio, kind: io-error, target: TARGET, at: {step: 40}, duration: {steps: 30}}"
    shape = {"saves": "checkpoint: {every: 20}, parallelism: {hsdp: {replicas: 2, shards: 2}}"}
    assert said(tmp_path, fault.replace("TARGET", "{rank: 1}"), **shape) == []
    (line,) = said(tmp_path, fault.replace("TARGET", "{rank: 2}"), **shape)
    assert line.endswith("io-error acts on saves, and ranks 0 to 1 alone save: target one of them")


def test_trouble_with_saving_while_nobody_saves_is_a_warning(tmp_path: Path) -> None:
    fault = "{id: eio, kind: io-error, target: {rank: 0}, at: {step: 22}, duration: {steps: 5}}"
    assert said(tmp_path, fault) == [
        "6:66: warning: no rank saves in steps 22 to 26, so io-error changes nothing: "
        "a checkpoint is made every 20 steps"
    ]
    for met in ("at: {step: 40}", "at: {step: 38}", "at: {steps: [22, 58]}"):
        assert said(tmp_path, fault.replace("at: {step: 22}", met)) == [], met
    assert said(tmp_path, fault.replace("{steps: 5}", "5s")) == []


@pytest.mark.parametrize(
    ("at", "warning"),
    [
        ("mtbf: 99999999h", "fault 'kill' is never due: 100 steps hardly take so long"),
        (
            "time: 3h",
            "fault 'kill' is first due 10800 s after the first step: 100 steps hardly take so long",
        ),
        ("step: 57, probability: 0", "fault 'kill' never fires: its probability is 0"),
    ],
)
def test_a_fault_that_is_never_due_is_a_warning(tmp_path: Path, at: str, warning: str) -> None:
    (line,) = said(tmp_path, KILL.replace("step: 57", at))
    assert line.split("warning: ")[1] == warning
    assert said(tmp_path, KILL.replace("step: 57", "mtbf: 1s")) == []


def test_nodes_with_nobody_on_them_are_a_warning(tmp_path: Path) -> None:
    assert said(tmp_path, more="launcher: {kind: local, nodes: 9}\n") == [
        "7:32: warning: node 5 is empty: 4 ranks and spares (1) take 5 of 9 nodes"
    ]
    assert said(tmp_path, more="launcher: {kind: local, nodes: 5}\n") == []  # a spare is there


@pytest.mark.parametrize(
    ("check", "most"),
    [
        ("committed_steps >= 500 within 1s", "56 committed_steps"),
        ("committed_steps > 56", "56 committed_steps"),
        ("healthy_replicas >= 5", "4 healthy_replicas"),
        ("healthy_replicas == 5", "4 healthy_replicas"),
        ("committed_steps >= 56", ""),
        ("healthy_replicas == 3", ""),
        ("healthy_replicas < 9", ""),
    ],
)
def test_a_steady_state_out_of_reach_is_a_warning(tmp_path: Path, check: str, most: str) -> None:
    wanted = (
        f"7:16: warning: there are never more than {most} before the first fault: it would be"
        " inconclusive"
    )
    assert said(tmp_path, more=f"steady_state: ['{check}']\n") == ([wanted] if most else [])


def test_the_plan_of_a_fault_that_never_comes_says_never() -> None:
    fault = FaultSpec.model_validate(
        {"id": "f", "kind": "k", "at": {"mtbf": 1e12}, "duration": 2.0}
    )
    (planned,) = plan([fault], {"k": kind_of()}, Scope(topology=Topology(ranks=2)), 1)
    assert when_text(planned) == "never"
