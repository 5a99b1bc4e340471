"""Scenario files: what is read from them, and every way they can be wrong, with the exact place."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.fake_catalogue import CATALOGUE
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading import checks
from trainchaos.chaos.loading.interpolate import ReferenceScope, interpolate
from trainchaos.chaos.loading.load import LoadedScenario, load
from trainchaos.chaos.loading.matrix import expand, value_name
from trainchaos.chaos.loading.overrides import of_option
from trainchaos.chaos.scenario.model import CheckpointTargetSpec, StepsDuration

MESSAGES = Path(__file__).with_name("messages.txt")
GOOD = """\
version: 1
name: example
seed: 17
workload: {kind: gpt, size: nano, ranks: 4, steps: 100, global_batch: 16, checkpoint: {every: 20}}
recovery: ${matrix.recovery}
faults:
  - {id: kill, kind: process-kill, target: {role: worker}, at: {step: 57, phase: backward}}
sla:
  recovery_time: ["median < 2s", "max < 5s"]
  goodput: ["median >= 0.5"]
invariants: default
stop_conditions: [{when: "no_committed_step_for > 60s"}]
matrix: {recovery: [checkpoint-restart, drop-replica, hot-spare]}
repeat: 3
"""
SINGLE = GOOD.replace("${matrix.recovery}", "hot-spare").replace(
    "matrix: {recovery: [checkpoint-restart, drop-replica, hot-spare]}\n", ""
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str) -> Path:
        path = tmp_path / "s.yaml"
        path.write_text(text)
        return path

    return write_file


def read(path: Path, *overrides: str, **env: str) -> LoadedScenario:
    return load(path, CATALOGUE, overrides=overrides, env=env)


def failure(path: Path, *overrides: str, **env: str) -> str:
    """The whole error text, without the directory."""
    with pytest.raises(ScenarioError) as raised:
        read(path, *overrides, **env)
    assert raised.value.exit_code == 2
    return str(raised.value).replace(f"{path.parent}/", "")


def heads(text: str) -> list[str]:
    """The first line of each error."""
    return [line for line in text.splitlines() if line.startswith(("s.yaml:", "--set:"))]


# --- what is read


def test_cells_in_the_order_of_the_matrix(write: Any) -> None:
    loaded = read(write(GOOD))
    assert [cell.id for cell in loaded.cells] == [
        "recovery=checkpoint-restart",
        "recovery=drop-replica",
        "recovery=hot-spare",
    ]
    assert [cell.scenario.recovery.strategy for cell in loaded.cells] == [
        "checkpoint-restart",
        "drop-replica",
        "hot-spare",
    ]
    assert loaded.cells[0].params == {"recovery": "checkpoint-restart"}
    assert loaded.cells[0].scenario.workload.params == {"size": "nano"}
    assert loaded.name == "example" and loaded.warnings == ()
    assert loaded.sla_lines == {"recovery_time": [9, 9], "goodput": [10]}


def test_line_of_every_clause(write: Any) -> None:
    text = SINGLE.replace(
        '["median < 2s", "max < 5s"]',
        '\n    - "median < 2s"\n    - {check: "max < 5s", severity: warn}',
    )
    assert read(write(text)).sla_lines["recovery_time"] == [10, 11]


def test_a_mapping_from_the_matrix_stays_one(write: Any) -> None:
    text = GOOD.replace("drop-replica, hot-spare", "{strategy: hot-spare, spares: 2}")
    second = read(write(text)).cells[1]
    assert second.id == "recovery=hot-spare+spares=2"
    assert second.scenario.recovery.params == {"spares": 2}


def test_durations_in_words(write: Any) -> None:
    more = """\
  - {id: slow, kind: straggler, at: {time: 500ms}, duration: 2s, params: {factor: 2, grace_s: 1m}}
  - {id: slow2, kind: straggler, at: {step: 3}, duration: {steps: 20}}
  - {id: rot, kind: checkpoint-corrupt, at: {time: 3}, target: {checkpoint: {step: 20}}}
sla:"""
    faults = read(write(SINGLE.replace("sla:", more, 1))).cells[0].scenario.faults
    assert (faults[1].at.time, faults[1].duration) == (0.5, 2.0)
    assert faults[1].params == {"factor": 2, "grace_s": 60.0}
    assert faults[2].duration == StepsDuration(steps=20)
    assert faults[3].target.checkpoint == CheckpointTargetSpec(step=20)


def test_vars_and_environment(write: Any) -> None:
    text = SINGLE.replace("ranks: 4", "ranks: '${env:RANKS:-4}'").replace(
        "steps: 100", "steps: '${vars.steps}'"
    )
    path = write(
        text.replace("step: 57", "step: 7")
        + "vars: {steps: '${env:STEPS}'}\ndescription: 'up to ${vars.steps} steps'\n"
    )
    scenario = read(path, STEPS="50").cells[0].scenario
    assert (scenario.workload.ranks, scenario.workload.steps) == (4, 50)
    assert scenario.description == "up to 50 steps"
    assert read(path, STEPS="50", RANKS="8").cells[0].scenario.workload.ranks == 8


def test_yaml_1_2_words_stay_words(write: Any) -> None:
    scenario = read(write(SINGLE + "tags: [on, yes, 1e3x, 2020-01-01]\n")).cells[0].scenario
    assert scenario.tags == ["on", "yes", "1e3x", "2020-01-01"]


def test_overrides(write: Any) -> None:
    path = write(GOOD)
    loaded = read(
        path,
        "workload.steps=60",
        "faults.kill.at.step=5",
        "faults.0.at.phase=data",
        "matrix.recovery=[hot-spare]",
        'sla.recovery_time=["max < 1ms"]',
        "workload.checkpoint.keep=2",
        "vars.new=1",
    )
    (cell,) = loaded.cells
    scenario = cell.scenario
    assert (scenario.workload.steps, scenario.workload.checkpoint.keep) == (60, 2)
    assert (scenario.faults[0].at.step, scenario.faults[0].at.phase) == (5, "data")
    assert scenario.sla["recovery_time"][0].check == "max < 1ms"
    assert loaded.sla_lines["recovery_time"] == [9]


# --- matrix


def test_product_include_exclude() -> None:
    matrix = {
        "a": [1, 2],
        "b": ["x", "y"],
        "exclude": [{"a": 1, "b": "y"}],
        "include": [{"a": 9, "b": "z", "c": True}],
    }
    combinations, problems = expand(matrix)
    assert not problems
    assert [c.id for c in combinations] == ["a=1,b=x", "a=2,b=x", "a=2,b=y", "a=9,b=z,c=true"]
    assert combinations[3].values["c"] == (True, ("matrix", "include", 0, "c"))


def test_value_names_are_safe_in_paths() -> None:
    assert (
        value_name({"strategy": "hot-spare", "spares": 2, "a": [1, 2]})
        == "hot-spare+a=1-2+spares=2"
    )
    assert value_name(0.5) == "0.5" and value_name(None) == "none" and value_name(False) == "false"
    for odd in ("a/b", "..", "", "a b", "é", "x" * 500):
        assert len(value_name(odd)) < 140 and set(value_name(odd)).isdisjoint("/ é")
    assert value_name("a/b") != value_name("a b")


def test_an_error_in_a_matrix_value_is_shown_there(write: Any) -> None:
    text = GOOD.replace("hot-spare]", "hot-spar, {strategy: hot-spare, spare: 2}]")
    assert heads(failure(write(text))) == [
        "s.yaml:13:55: unknown strategy 'hot-spar'; did you mean 'hot-spare'?",
        "s.yaml:13:87: unknown key 'spare'; did you mean 'spares'?",
    ]


def test_the_name_may_not_depend_on_the_cell(write: Any) -> None:
    text = GOOD.replace("name: example", "name: x-${matrix.recovery}")
    assert heads(failure(write(text))) == [
        "s.yaml:2:7: name must be the same in every cell of the matrix"
    ]


# --- one error each, at its place


def cases() -> Iterator[tuple[str, list[str]]]:
    """Of ``messages.txt``: SINGLE with each block's changes and further lines, and the errors."""
    text, errors = SINGLE, list[str]()
    for line in [*MESSAGES.read_text().splitlines(), ""]:
        if line.startswith("    "):
            errors.append(line.strip())
            continue
        if errors:
            yield text, [f"s.yaml:{error}" for error in errors if error != "none"]
            text, errors = SINGLE, []
        old, arrow, new = line.replace("\\n", "\n").partition(" -> ")
        assert not arrow or old in text, line
        text = text.replace(old, new, 1) if arrow else f"{text}{line[2:]}\n"
    too_large = f"s.yaml:4:52: the number is too large (the limit is {2**63 - 1})"
    yield SINGLE.replace("steps: 100", "steps: " + "9" * 5000), [too_large]


@pytest.mark.parametrize(("text", "errors"), list(cases()))
def test_bad_input(write: Any, text: str, errors: list[str]) -> None:
    if errors:
        assert heads(failure(write(text))) == errors
    else:
        assert read(write(text))


def test_samples_count_repeats_and_incidents(write: Any) -> None:
    many = SINGLE.replace("step: 57", "steps: [10, 20, 30]").replace("max < 5s", "p90 < 5s")
    assert read(write(many.replace("repeat: 3", "repeat: 10")))
    assert "gives 27:" in failure(write(many.replace("repeat: 3", "repeat: 9")))
    # a harmless fault leaves nothing to recover from
    slow = "  - {id: slow, kind: straggler, duration: 1s, at: {steps: [1, 2, 3]}}\nsla:"
    assert "gives 27:" in failure(
        write(many.replace("repeat: 3", "repeat: 9").replace("sla:", slow))
    )
    # goodput has one value per repeat, however many faults strike
    assert "gives 10:" in failure(
        write(many.replace("repeat: 3", "repeat: 10").replace("median >= 0.5", "p90 >= 0.5"))
    )


# --- the whole message


def test_all_errors_at_once_with_line_and_caret(write: Any) -> None:
    text = GOOD.replace("steps: 100", "stpes: 100").replace("process-kill", "process-kil")
    text = text.replace("recovery_time", "recovery_tme") + "repeat: 4\n"
    workload, fault = text.splitlines()[3], text.splitlines()[6].strip()
    assert failure(write(text)) == textwrap.dedent(f"""\
        s.yaml:4:45: unknown key 'stpes'; did you mean 'steps'?
          {workload}
                                                      ^^^^^
        s.yaml:7:22: unknown fault kind 'process-kil'; did you mean 'process-kill'?
            {fault}
                               ^^^^^^^^^^^
        s.yaml:9:3: unknown metric 'recovery_tme'; did you mean 'recovery_time'?
            recovery_tme: ["median < 2s", "max < 5s"]
            ^^^^^^^^^^^^
        s.yaml:15:1: key 'repeat' is given twice; the first is on line 14
          repeat: 4
          ^^^^^^
        4 errors; nothing was started""")


def test_an_error_of_an_override_points_into_it(write: Any) -> None:
    assert failure(write(GOOD), "workload.stpes=5", "repeat=[1, 2x]") == textwrap.dedent("""\
        --set:1:1: unknown key 'stpes'; did you mean 'steps'?
          workload.stpes=5
          ^^^^^^^^^^^^^^
        --set:1:8: repeat needs a whole number, not a list
          repeat=[1, 2x]
                 ^
        2 errors; nothing was started""")


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("foo.bar=1", "--set:1:1: unknown key 'foo'"),
        ("workload.foo.bar=1", "--set:1:10: unknown key 'foo'"),
        ("steps", "--set:1:1: write a.b=value, such as workload.steps=50"),
        ("=3", "--set:1:1: write a.b=value, such as workload.steps=50"),
        ("a..b=3", "--set:1:1: write a.b=value, such as workload.steps=50"),
        ("faults.kil.at.step=3", "--set:1:8: no item 'kil' in this list; it has 1 items (kill)"),
        ("faults.7.at.step=3", "--set:1:8: no item '7' in this list; it has 1 items (kill)"),
        ("repeat.x=3", "--set:1:8: cannot set 'x' inside the value 3"),
        ("repeat=[", "--set:1:2: not valid YAML"),
        ("repeat=&a 3", "--set:1:8: anchors and aliases are not read"),
        ("workload.steps=zero", "--set:1:16: steps needs a whole number, not 'zero'"),
    ],
)
def test_bad_overrides(write: Any, override: str, error: str) -> None:
    (head,) = heads(failure(write(GOOD), override))
    assert head.startswith(error)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", "s.yaml:1:1: the file is empty; a scenario is a mapping (key: value)"),
        (b"# nothing\n", "s.yaml:1:1: the file is empty"),
        (b"- a\n- b\n", "s.yaml:1:1: the file holds a list"),
        (b"hello", "s.yaml:1:1: the file holds a single value"),
        (b"a: 1\nb: \xff\n", "s.yaml:2:4: not UTF-8 text (byte 0xff)"),
        (b"a: 1\nb: [1\n", "s.yaml:3:1: not valid YAML: while parsing a flow sequence"),
        (b"a: b: c\n", "s.yaml:1:5: not valid YAML: mapping values are not allowed here"),
        (b"a: 1\n\tb: 1\n", "s.yaml:2:1: not valid YAML"),
        (
            b"a: \x01\n",
            "s.yaml:1:4: not valid YAML: character #x1: special characters are not allowed",
        ),
        (b"--- {a: 1}\n--- {b: 1}\n", "s.yaml:2:1: not valid YAML: expected a single document"),
        (b"a: *b\n", "s.yaml:1:4: not valid YAML: found undefined alias 'b'"),
        (b"&a [*a]\n", "s.yaml:1:1: anchors and aliases are not read"),
        (b"[" * 5000, "s.yaml:1:1: nested too deeply"),
        (b"a: " + b"[" * 30 + b"]" * 30, "s.yaml:1:24: nested deeper than 20 levels"),
        (b"? [a]\n: 1\n", "s.yaml:1:3: a key must be plain text"),
        (b"%YAML 1.1\n---\na: 1:3x\nb: 1:30\n", "s.yaml:4:4: 1:30 is not a number"),
        (b'a: "\\ud800"\n', "s.yaml:1:4: text holds half of a surrogate pair"),
        (b"a: 1\n" * 300_000, "s.yaml: is larger than 1000 kB; is it a scenario?"),
    ],
)
def test_files_that_are_no_scenario(tmp_path: Path, raw: bytes, error: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(raw)
    text = failure(path)
    assert any(line.startswith(error) for line in text.splitlines()), text[:2000]


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        ScenarioError, match=r"missing\.yaml: cannot be read: No such file or directory"
    ):
        read(tmp_path / "missing.yaml")
    with pytest.raises(ScenarioError, match="cannot be read: Is a directory"):
        read(tmp_path)
    with pytest.raises(ScenarioError, match="/dev/null: is not a regular file"):
        read(Path("/dev/null"))
    with pytest.raises(ScenarioError, match="cannot be read"):
        read(Path("a\0b"))


# --- warnings


def test_a_fault_past_the_end_is_a_warning(write: Any) -> None:
    path = write(GOOD.replace("step: 57", "step: 400"))
    (warning,) = read(path).warnings
    assert (
        warning.splitlines()[0]
        == f"{path}:7:71: warning: fault 'kill' is due at step 400, but the run ends at step 100:"
        " it would be inconclusive; lower at.step or raise workload.steps"
    )


def test_other_warnings(write: Any) -> None:
    text = GOOD.replace("${matrix.recovery}", "hot-spare").replace("{recovery: [", "{way: [")
    text = text.replace("process-kill", "checkpoint-corrupt")
    text = text.replace("role: worker", "checkpoint: {step: 30}")
    warnings = [w.splitlines()[0].split(": warning: ")[1] for w in read(write(text)).warnings]
    assert warnings == [
        "no checkpoint is made at step 30: one is made every 20 steps",
        "nothing uses ${matrix.way}: its cells differ in name only",
    ]
    (empty,) = read(
        write(SINGLE.replace(SINGLE.splitlines()[6] + "\n", "").replace("faults:", "faults: []"))
    ).warnings
    assert "no faults: the run can only be inconclusive" in empty


def test_cells_named_after_what_they_do_not_set_are_an_error(write: Any) -> None:
    """A report would compare strategies that no cell has."""
    with pytest.raises(ScenarioError) as caught:
        read(write(GOOD.replace("${matrix.recovery}", "hot-spare")))
    assert (
        "nothing uses ${matrix.recovery}: its cells differ in name only; write recovery:"
        " ${matrix.recovery}" in str(caught.value)
    )


# --- properties

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text().filter(lambda text: "${" not in text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(_VALUES)
def test_interpolation_leaves_all_else_alone(tree: Any) -> None:
    resolved = interpolate(tree, ReferenceScope(matrix={}, vars={}, env={}))
    assert resolved.tree == tree and not resolved.problems


@given(_VALUES)
def test_a_whole_reference_keeps_value_and_type(value: Any) -> None:
    names = ReferenceScope(matrix={"x": (value, ("matrix", "x", 0))}, vars={}, env={})
    resolved = interpolate({"a": ["${matrix.x}"]}, names)
    assert resolved.tree == {"a": [value]} and type(resolved.tree["a"][0]) is type(value)
    assert resolved.origin(("a", 0, "deep")) == ("matrix", "x", 0, "deep")


def test_a_fault_too_late_to_show_liveness_is_a_warning(write: Any) -> None:
    assert read(write(SINGLE.replace("step: 57", "step: 95"))).warnings == ()
    (warning,) = read(write(SINGLE.replace("step: 57", "step: 96"))).warnings
    assert "fault 'kill' leaves 4 steps before the end at step 100, and liveness needs 5" in warning
    assert "7:71: warning: " in warning
    lasting = SINGLE.replace("kind: process-kill", "kind: straggler, duration: {steps: 40}")
    (warning,) = read(write(lasting.replace("step: 57", "from: 40, until: 60"))).warnings
    assert "leaves 0 steps" in warning and "raise workload.steps to 105" in warning
    only = SINGLE.replace("step: 57", "step: 99").replace(
        "invariants: default", "invariants: [membership]"
    )
    assert read(write(only)).warnings == ()


def test_what_no_list_selects_is_called_as_the_judge_calls_it() -> None:
    from trainchaos.harness.judge import checkers
    from trainchaos.harness.judge.checkers.job.observed import PROGRESS

    names = {
        PROGRESS,
        checkers.FINISHED,
        checkers.EXPECTATION,
        checkers.ALARMS,
        checkers.PREFLIGHT,
        checkers.STEADY_STATE,
    }
    assert names == set(checks.ALWAYS_JUDGED) and not names & set(checkers.NAMES)


def test_times_are_not_replayed(write: Any) -> None:
    text = SINGLE.replace("kind: process-kill", "kind: process-kill, retrigger: every_attempt")
    (warning,) = read(write(text.replace("step: 57, phase: backward", "mtbf: 30s"))).warnings
    assert "are not replayed" in warning


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([of_option("--repeat", "repeat", 0)], "--repeat:1:10: repeat must be at least 1, not 0"),
        (
            [of_option("--launcher", "launcher", "locl")],
            "--launcher:1:12: unknown launcher 'locl'; did you mean 'local'?",
        ),
    ],
)
def test_an_error_of_an_option_names_it(write: Any, options: list[Any], error: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        load(
            write(SINGLE.replace("max < 5s", "p90 < 5s").replace("repeat: 3", "repeat: 30")),
            CATALOGUE,
            overrides=options,
        )
    assert [line for line in str(raised.value).splitlines() if ": " in line and line[0] != " "] == [
        error
    ]


def test_a_launcher_named_anew_keeps_its_nodes(write: Any) -> None:
    text = SINGLE + "launcher: {kind: local, nodes: 2, nodes_per_rack: 2, params: {}}\n"
    text = text.replace("role: worker", "node: 1")
    launcher = (
        load(write(text), CATALOGUE, overrides=[of_option("--launcher", "launcher", "sim")])
        .cells[0]
        .scenario.launcher
    )
    assert (launcher.kind, launcher.nodes, launcher.nodes_per_rack) == ("sim", 2, 2)
