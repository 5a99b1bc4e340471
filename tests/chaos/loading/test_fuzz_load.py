"""No input ends in a traceback: arbitrary text, arbitrary trees, and valid scenarios with a value
changed.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tests.support.fakes.fake_catalogue import CATALOGUE
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.planning.planview import as_json, as_text, plan_run
from trainchaos.chaos.scenario.schema import scenario_schema
from trainchaos.chaos.schedule.arrivals import read_trace
from trainchaos.harness.fuzz.loader.spoil import WORDS as SPOILT

ROOT = Path(__file__).resolve().parents[3]
VALID: dict[str, Any] = {
    "version": 1,
    "name": "fuzz",
    "description": "d",
    "tags": ["a"],
    "seed": 3,
    "vars": {"n": 4},
    "workload": {
        "kind": "gpt",
        "size": "nano",
        "ranks": "${vars.n}",
        "steps": 60,
        "global_batch": 16,
        "checkpoint": {"every": 10, "keep": 2},
    },
    "launcher": {"kind": "sim", "nodes": 2, "nodes_per_rack": 2, "params": {}},
    "recovery": "${matrix.recovery}",
    "faults": [
        {
            "id": "a",
            "kind": "process-kill",
            "target": {"role": "worker", "select": "majority"},
            "at": {"step": 5, "phase": "backward", "probability": 0.5},
            "verify": {"signal": 9},
        },
        {
            "id": "b",
            "kind": "straggler",
            "params": {"factor": 2, "grace_s": "1s"},
            "duration": "2s",
            "target": {"select": {"count": 1}, "exclude": {"ranks": [0], "nodes": [1]}},
            "at": {"mtbf": "30s", "max": 3},
        },
        {
            "id": "c",
            "kind": "checkpoint-corrupt",
            "target": {"checkpoint": {"step": 20}},
            "at": {"event": "checkpoint_committed", "nth": 2},
            "retrigger": {"max": 2},
        },
        {
            "id": "d",
            "kind": "node-kill",
            "target": {"rack": 0, "select": {"percent": 50}},
            "at": {"weibull": {"mean": "3s", "shape": 0.7}},
        },
        {
            "id": "e",
            "kind": "partition",
            "target": {"link": {"src": 0, "dst": 1}},
            "duration": {"steps": 3},
            "at": {"from": 3, "until": 9, "every": 2},
            "expect": {"outcome": "masked", "blame": "none"},
        },
        {"id": "f", "kind": "disk-full", "at": {"trace": {"file": "t", "times": [1, 2.5]}}},
    ],
    "sla": {"recovery_time": ["median < 2s", {"check": "max < 5s", "severity": "warn"}]},
    "invariants": ["liveness"],
    "requires": {"cores": 1, "root": False},
    "stop_conditions": [{"when": "failures > 3"}],
    "steady_state": ["committed_steps >= 5 within 60s"],
    "blast_radius": {"max_concurrent_faults": 2, "min_healthy_replicas": 1, "protected_ranks": [3]},
    "matrix": {"recovery": [{"strategy": "hot-spare"}], "include": [], "exclude": []},
    "repeat": 1,
    "baseline": "paired",
}
WORDS = (*SPOILT, "${matrix.recovery}", "a" * 300)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([10**9, 2**63, 10**40, -(2**70)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
KEYS = st.one_of(
    st.sampled_from(sorted({*VALID, "extends", "at", "kind", "trace", "select", "from"})),
    st.text(max_size=4),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
FUZZ = settings(
    max_examples=min(50, settings().max_examples),
    deadline=None,
    database=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str | bytes], bool]]:
    """Load a text as a scenario, and plan it: whether it loaded. Anything but a ScenarioError is
    let through.
    """
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / "s.yaml"
    (folder / "t.csv").write_text("time\n1\n")

    def read(text: str | bytes) -> bool:
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        try:
            loaded = load(path, CATALOGUE, env={})
        except ScenarioError as error:
            assert str(error)
            return False
        plan = plan_run(loaded, CATALOGUE, seed=None, cells=loaded.cells)
        assert as_text(plan) and json.dumps(as_json(plan))
        for cell in loaded.cells:
            dumped = json.loads(cell.scenario.model_dump_json())
            assert type(cell.scenario).model_validate(dumped) == cell.scenario
        return True

    yield read


def yaml_of(tree: Any) -> str:
    yaml = YAML(typ="safe", pure=True)
    stream = io.StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()


def places(tree: Any, loc: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place below the root."""
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, child in inside:
        yield (*loc, key)
        yield from places(child, (*loc, key))


PLACES = sorted(places(VALID), key=repr)


def changed(how: str, loc: tuple[Any, ...], value: Any, tree: Any = VALID) -> Any:
    """A copy of the tree with the value at a place deleted, replaced, doubled, wrapped, or under
    another key.
    """
    out = copy.deepcopy(tree)
    holder, key = out, loc[-1]
    try:
        for part in loc[:-1]:
            holder = holder[part]
        holder[key]
    except (KeyError, IndexError, TypeError):  # an earlier change took it away
        return out
    if not isinstance(holder, dict | list):
        return out
    if how == "delete":
        del holder[key]
    elif how == "replace":
        holder[key] = value
    elif how == "wrap":
        holder[key] = [holder[key]] if value else {"x": holder[key]}
    elif how == "double" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    elif how == "rename" and isinstance(holder, dict):
        holder[str(value)[:20]] = holder.pop(key)
    return out


HOW = st.sampled_from(["delete", "replace", "wrap", "double", "rename"])


def test_the_valid_one_is_valid(check: Any) -> None:
    assert check(yaml_of(VALID))


@FUZZ
@given(st.one_of(st.text(max_size=200), st.binary(max_size=200)))
def test_any_text(check: Any, text: str | bytes) -> None:
    check(text)


@FUZZ
@given(TREES)
def test_any_tree(check: Any, tree: Any) -> None:
    check(json.dumps(tree))


@pytest.mark.slow
@FUZZ
@given(HOW, st.sampled_from(PLACES), TREES)
def test_a_valid_scenario_with_one_change(
    check: Any, how: str, loc: tuple[Any, ...], value: Any
) -> None:
    check(json.dumps(changed(how, loc, value)))


@pytest.mark.slow
@FUZZ
@example([("rename", ("matrix", "recovery"), "\U00010000")])  # JSON writes it as two halves
@given(st.lists(st.tuples(HOW, st.sampled_from(PLACES), SCALARS), min_size=2, max_size=5))
def test_a_valid_scenario_with_several_changes(check: Any, changes: list[Any]) -> None:
    tree = VALID
    for how, loc, value in changes:
        tree = changed(how, loc, value, tree)
    check(json.dumps(tree))


@FUZZ
@given(st.one_of(st.text(max_size=80), st.binary(max_size=80)), st.sampled_from(["csv", "json"]))
def test_any_trace(tmp_path_factory: pytest.TempPathFactory, text: str | bytes, kind: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"trace.{kind}"
    path.write_bytes(
        text if isinstance(text, bytes) else f"time\n{text}".encode("utf-8", "surrogatepass")
    )
    try:
        read = read_trace(path)
    except ScenarioError:
        return
    assert read.problems or read.times or read.steps


@pytest.mark.slow
@settings(FUZZ, max_examples=8 if FUZZ.max_examples < 50 else 50)
@given(st.text(max_size=30), SCALARS)
def test_any_override(
    check: Any, tmp_path_factory: pytest.TempPathFactory, path: str, value: Any
) -> None:
    file = tmp_path_factory.getbasetemp() / "valid.yaml"
    file.write_text(json.dumps(VALID))
    for override in (
        f"{path}={value}",
        f"faults.a.{path}={value}",
        f"workload.steps={value}",
        path,
    ):
        try:
            load(file, CATALOGUE, overrides=[override], env={})
        except ScenarioError as error:
            assert str(error)


def test_the_schema_takes_the_valid_one() -> None:
    import jsonschema

    assert (
        list(jsonschema.Draft202012Validator(scenario_schema(CATALOGUE)).iter_errors(VALID)) == []
    )
