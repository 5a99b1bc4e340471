"""Slips that leave a scenario readable, and yet not what was meant: one error or warning each, at
its place (``slips.txt``).
"""

from __future__ import annotations

from collections.abc import Iterator
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
SAVES = "checkpoint: {every: 20}"
SCENARIO = f"""\
version: 1
name: example
workload: {{kind: gpt, ranks: 4, steps: 100, global_batch: 16, {SAVES}}}
recovery: hot-spare
faults:
  - {KILL}
"""
KNOWN = replace(CATALOGUE, faults=plugins.load(plugins.FAULTS, Fault))


def cases() -> Iterator[tuple[str, list[str]]]:
    """Each scenario with a slip, and what is said of it."""
    text, said = SCENARIO, list[str]()
    for line in [*Path(__file__).with_name("slips.txt").read_text().splitlines(), "fault: "]:
        key, _, value = line.partition(": ")
        if line.startswith("    "):
            said.append(line.strip())
        elif key in ("fault", "more", "saves"):
            if said:
                yield text, [one for one in said if one != "none"]
                text, said = SCENARIO, []
            old = {"fault": KILL, "saves": SAVES}.get(key)
            text = text.replace(old, value) if old else f"{text}{value}\n"


@pytest.mark.parametrize(("text", "expected"), list(cases()))
def test_a_slip_is_said_at_its_place(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    try:
        said = "\n".join(load(path, KNOWN, env={}).warnings)
    except ScenarioError as error:
        said = str(error)
    prefix = f"{path}:"
    heads = [line.removeprefix(prefix) for line in said.splitlines() if line.startswith(prefix)]
    assert heads == expected


def test_the_plan_of_a_fault_that_never_comes_says_never() -> None:
    fault = FaultSpec.model_validate(
        {"id": "f", "kind": "k", "at": {"mtbf": 1e12}, "duration": 2.0}
    )
    (planned,) = plan([fault], {"k": kind_of()}, Scope(topology=Topology(ranks=2)), 1)
    assert when_text(planned) == "never"
