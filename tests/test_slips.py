"""Slips that leave a scenario readable, and yet not what was meant: one error or warning each, at its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_catalogue import CATALOGUE

from chaos.errors import ScenarioError
from chaos.loading.load import load

KILL = "{id: kill, kind: process-kill, at: {step: 57}}"
SCENARIO = """\
version: 1
name: example
workload: {kind: gpt, ranks: 4, steps: 100, global_batch: 16, checkpoint: {every: 20}}
recovery: hot-spare
faults:
  - FAULT
"""


def said(tmp_path: Path, fault: str = KILL, more: str = "", **env: str) -> list[str]:
    """``line:column: message`` of every error, else of every warning."""
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.replace("FAULT", fault) + more)
    try:
        text = "\n".join(load(path, CATALOGUE, env=env).warnings)
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
def test_a_step_that_cannot_be_read_is_not_called_missing(tmp_path: Path, value: str, error: str) -> None:
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
        "'kind' is missing in faults.0", "unknown key 'knd'; did you mean 'kind'?",
        "unknown vars name 'nope'; there are none", "unknown key 'phse'; did you mean 'phase'?",
    ]  # fmt: skip


def test_a_key_one_level_too_deep_is_told_its_place(tmp_path: Path) -> None:
    fault = KILL.replace("step: 57", "step: 57, retrigger: every_attempt")
    assert said(tmp_path, fault) == ["6:51: unknown key 'retrigger' in at: it belongs beside at, not in it"]


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


def test_more_healthy_replicas_than_there_are_is_one_error_at_the_limit(tmp_path: Path) -> None:
    assert said(tmp_path, more="blast_radius: {min_healthy_replicas: 9}\n") == [
        "7:38: there are only 4 replicas, so 9 cannot be healthy"
    ]
    (line,) = said(tmp_path, more="blast_radius: {min_healthy_replicas: 4}\n")
    assert line.startswith("6:") and "keeps 4 replicas healthy" in line
