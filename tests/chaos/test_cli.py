"""The command line: what is printed where, and with which exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from tests.support.fakes.fake_catalogue import CATALOGUE
from trainchaos.chaos import cli
from trainchaos.chaos.commands.shared import options
from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.scenario.schema import scenario_schema

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = """\
version: 1
name: example
seed: 17
workload: {kind: gpt, size: nano, steps: 100}
recovery: ${matrix.recovery}
faults:
  - {id: kill, kind: process-kill, at: {step: 57, phase: any}}
  - {id: slow, kind: straggler, at: {time: 2s}, duration: {steps: 20}, params: {factor: 2}}
  - {id: rot, kind: checkpoint-corrupt, at: {event: checkpoint_committed, nth: 2},
      target: {checkpoint: latest}}
sla:
  recovery_time: ["median < 2s", {check: "max < 5s", severity: warn}]
matrix: {recovery: [drop-replica, {strategy: hot-spare, spares: 2}]}
repeat: 2
"""
Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs a command line with the fake catalogue: exit code, standard output, standard error."""
    for module in (cli, options):
        monkeypatch.setattr(module, "build_catalogue", lambda: CATALOGUE)

    def invoke(*argv: object) -> tuple[int, str, str]:
        code = cli.invoke([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "example.yaml"
    path.write_text(SCENARIO)
    return path


# --- validate


def test_validate_says_so(chaos: Invoke, scenario: Path) -> None:
    assert chaos("validate", scenario) == (0, f"{scenario}: valid, 2 cells\n", "")
    assert chaos("validate", "-q", scenario) == (0, "", "")


def test_validate_shows_errors_of_all_files(chaos: Invoke, scenario: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(SCENARIO.replace("seed:", "sede:"))
    code, out, err = chaos("validate", bad, tmp_path / "none.yaml", scenario)
    assert code == 2 and out == f"{scenario}: valid, 2 cells\n"
    assert f"{bad}:3:1: unknown key 'sede'; did you mean 'seed'?\n  sede: 17\n  ^^^^\n" in err
    assert "none.yaml: cannot be read: No such file or directory" in err


def test_validate_warns_on_standard_error(chaos: Invoke, scenario: Path) -> None:
    code, out, err = chaos("validate", scenario, "--set", "faults.kill.at.step=500")
    assert code == 0 and "valid" in out
    assert (
        "--set:1:21: warning: fault 'kill' is due at step 500, but the run ends at step 100" in err
    )


# --- plan


def test_plan_shows_what_would_happen(chaos: Invoke, scenario: Path, tmp_path: Path) -> None:
    code, out, err = chaos("plan", scenario)
    assert (code, err) == (0, "")
    head = out.splitlines()[0]
    assert head.startswith(
        "example · gpt nano, 4 ranks + 2 spares, 100 steps · 2 cells x 2 repeats x (faulted,"
        " control) = 8 arms"
    )
    assert head.endswith("(an estimate)")
    assert "steps: 100" in out and "strategy: hot-spare" in out
    rows = [line.split() for line in out[out.index("schedule") :].splitlines()[2:]]
    assert len(rows) == 12
    assert "2 s after the first step starts, for 20 steps" in out
    assert "latest checkpoint  checkpoint_committed number 2" in out
    assert sorted(tmp_path.iterdir()) == [scenario], "plan touches nothing"


def test_how_long_a_command_takes_is_not_guessed(chaos: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nname: mine\n"
        "workload: {command: [python, train.py], ranks: 1, steps: 50, progress: beacon}\n"
        "faults: [{id: kill, kind: process-kill, target: {rank: 0}, at: {step: 20}}]\n"
    )
    code, out, _ = chaos("plan", path)
    head = out.splitlines()[0]
    assert code == 0 and head.endswith("= 2 arms · each takes as long as the command")
    assert json.loads(chaos("plan", path, "--format", "json")[1])["estimate_s"] is None


@pytest.mark.parametrize("verb", ["run", "plan", "validate"])
def test_a_program_in_place_of_a_scenario_is_told_where_it_belongs(
    chaos: Invoke, verb: str
) -> None:
    code, _, err = chaos(verb, "--", "python3", "train.py", "--steps", "10")
    assert code == 2 and "python3 is a program, and no scenario" in err
    assert "chaos init -- python3 ..." in err


def test_plan_as_json_is_the_same_for_the_same_seed(chaos: Invoke, scenario: Path) -> None:
    first = json.loads(chaos("plan", scenario, "--format", "json")[1])
    again = json.loads(chaos("plan", scenario, "--format", "json", "--seed", 17)[1])
    assert first == again and first["arms"] == 8 and first["seed"] == 17
    kill = first["cells"][0]["repeats"][0]["faults"][0]
    assert kill["points"][0][0] == 57 and len(kill["ranks"]) == 1
    # strategies meet the same faults, repeats meet different ones
    worker_faults = [[r["faults"][0] for r in cell["repeats"]] for cell in first["cells"]]
    assert worker_faults[0] == worker_faults[1] and worker_faults[0][0] != worker_faults[0][1]
    seeds = {
        json.dumps(json.loads(chaos("plan", scenario, "--format", "json", "--seed", n)[1])["cells"])
        for n in range(5)
    }
    assert len(seeds) == 5


def test_plan_of_one_cell(chaos: Invoke, scenario: Path) -> None:
    planned = json.loads(
        chaos(
            "plan", scenario, "--format", "json", "--cell", "recovery=drop-replica", "--repeat", 1
        )[1]
    )
    assert [cell["id"] for cell in planned["cells"]] == ["recovery=drop-replica"] and planned[
        "arms"
    ] == 2
    code, _, err = chaos("plan", scenario, "--cell", "recovery=drop-replca")
    assert code == 2 and "did you mean 'recovery=drop-replica'?" in err


# --- list, schema


def test_list(chaos: Invoke) -> None:
    code, out, _ = chaos("list", "faults")
    assert code == 0
    assert out.splitlines() == [
        "name                acts on     local                    sim        what it is",
        "process-kill        process     real                     simulated  Kills",
        "straggler           rank        emulated (real on CUDA)  simulated  Slows a rank down",
        "checkpoint-corrupt  checkpoint  real                     simulated  Damages a checkpoint",
        "disk-full           storage     -                        simulated  Fills the disk",
        (
            "io-error            rank        emulated (real on CUDA)  simulated  Fails the saves of"
            " a rank"
        ),
        "node-kill           node        real                     simulated  Loses a node",
        "partition           link        real                     simulated  Cuts links",
    ]
    _, out, _ = chaos("list", "faults", "-v")
    assert "    factor: number, default 3" in out
    assert "    mode: bitflip | truncate, default bitflip" in out


def test_list_shows_the_evidence_of_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["list", "faults", "-v"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    text = " ".join(line.strip() for line in lines)
    assert cli.invoke(["list", "faults", "--format", "json"]) == 0
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert len(faults) > 40
    for fault in faults:
        assert "Landed: " in fault["about"], fault["name"]
        assert " ".join(fault["about"].split()) in text
    root = [fault["name"] for fault in faults if "Needs root" in fault["about"]]
    assert root == ["disk-full", "node-slow", "oom-kill", "read-only"], "doctor promises it"


def test_strategies_are_listed_under_their_key_too(chaos: Invoke) -> None:
    assert chaos("list", "recovery") == chaos("list", "strategies")
    assert chaos("list", "recovery")[0] == 0


@pytest.mark.slow
def test_list_scenarios_shows_what_is_built_in_and_what_is_here(
    chaos: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "mine.yaml").write_text("description: my own\n")
    names = [line.split()[0] for line in chaos("list", "scenarios")[1].splitlines()]
    assert "builtin:kill-one-rank" in names
    assert [one for one in names if not one.startswith("builtin:")] == ["scenarios/mine.yaml"]


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = scenario_schema(CATALOGUE)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _tree(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("steps: 100", "stpes: 100"),
        ("steps: 100", "steps: many"),
        ("kind: gpt", "kind: gtp"),
        ("size: nano", "params: {size: nanoo}"),
        ("process-kill", "process-kil"),
        ("factor: 2", "factor: 0"),
        ("factor: 2", "factr: 2"),
        ("time: 2s", "time: soon"),
        ("phase: any", "phase: never"),
        ("recovery_time", "recovery_tme"),
        ("median < 2s", "mdian < 2s"),
        ("repeat: 2", "repeat: 0"),
        ("${matrix.recovery}", "hot-spar"),
        ("${matrix.recovery}", "{strategy: hot-spare, spare: 2}"),
        ("repeat: 2", "invariants: [livenes]"),
        ("repeat: 2", "launcher: locl"),
        ("version: 1", "version: 2"),
        ("name: example\n", ""),
        ("time: 2s", "mtbf: often"),
        ("time: 2s", "weibull: {mean: 3s}"),
        ("time: 2s", "from: 0, until: 9"),
        ("phase: any}", "phase: any}, target: {select: few}"),
        ("phase: any}", "phase: any}, target: {exclude: {rank: [1]}}"),
        ("repeat: 2", "steady_state: [goodput > 1]"),
        ("repeat: 2", "blast_radius: {privileges: some}"),
    ],
)
def test_the_schema_rejects(validator: Any, old: str, new: str) -> None:
    assert old in SCENARIO
    assert list(validator.iter_errors(_tree(SCENARIO.replace(old, new, 1))))


def test_the_schema_admits_references_and_short_forms(validator: Any) -> None:
    text = SCENARIO.replace(
        "repeat: 2", "repeat: '${env:N:-2}'\nlauncher: sim\ninvariants: [liveness]\nvars: {a: 1}"
    )
    for recovery in (
        "hot-spare",
        "{strategy: hot-spare, spares: 3}",
        "{strategy: hot-spare, params: {spares: '${vars.a}'}}",
    ):
        assert (
            list(validator.iter_errors(_tree(text.replace("${matrix.recovery}", recovery)))) == []
        )


# --- exit codes and errors


def test_usage_errors_exit_with_2(chaos: Invoke) -> None:
    assert chaos("plan")[0] == 2
    assert chaos("nonsense")[0] == 2
    assert chaos("run", "x.yaml", "--seed", "-1")[0] == 2
    assert "cannot be read" in chaos("run", "x.yaml")[2]
    assert chaos("run", "x.yaml")[0] == 2


def test_an_unknown_command_names_those_there_are(chaos: Invoke) -> None:
    assert "no command 'validte'; did you mean 'validate'?" in chaos("validte")[2]
    code, _, err = chaos("frobnicate")
    assert code == 2 and "no command 'frobnicate'; use one of: agent, analyze, " in err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (
            InfrastructureError("no port is free", hint="stop something"),
            4,
            "no port is free\n  stop something\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (RuntimeError("a bug"), 4, "this is a defect of chaos itself"),
    ],
)
def test_what_goes_wrong_has_its_exit_code(
    chaos: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    scenario: Path,
    raised: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("trainchaos.chaos.loading.load.load", fail)
    got, _, err = chaos("plan", scenario)
    assert got == code and said in err


# --- what must stay light


def _imported(*lines: str) -> list[tuple[str, int, set[str]]]:
    """These command lines, one after the other in a fresh interpreter: the exit code of each, and
    what was imported by the end of it.
    """
    script = (
        "import sys, json\nfrom trainchaos.chaos.cli import invoke\n"
        "for line in sys.argv[1:]:\n    code ="
        " invoke(line.split())\n    print('\\n' + json.dumps([line, code,"
        " sorted({name.split('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *lines],
        cwd=ROOT / "reports",  # where no scenarios are to be listed
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ours = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(tuple(f'["{one}", ' for one in lines))
    ]
    return [(line, code, set(modules)) for line, code, modules in map(json.loads, ours)]


@pytest.mark.slow
def test_light_commands_import_nothing_heavy() -> None:
    kill = "../scenarios/kill-one-rank.yaml"
    found = _imported("--help", f"validate {kill}", f"plan {kill}", "list", "schema")
    assert len(found) == 5
    for line, code, modules in found:
        assert code == 0, line
        assert modules.isdisjoint({"torch", "numpy", "pandas", "matplotlib"}), line


def test_help_as_a_process_imports_next_to_nothing() -> None:
    script = (
        "import sys, json; from trainchaos.chaos.cli import main\nsys.argv[1:] = ['--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    print('\\n' + json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert modules.isdisjoint({"pydantic", "ruamel", "rich", "harness", "reports"})
    assert "trainchaos.recovery.process.output" in modules


# --- the scenarios that come with the project


def test_an_interrupt_ends_it_also_where_a_shell_has_it_ignored() -> None:
    code = (
        "import sys\n"
        "from trainchaos.chaos.commands.shared.program import run_as_process\n"
        "def invoke(argv):\n"
        "    try:\n"
        "        print('up', flush=True)  # who reads it may send the signal before this returns\n"
        "        sys.stdin.read()\n"
        "    except KeyboardInterrupt: return 130\n"
        "    return 0\n"
        "sys.exit(run_as_process(invoke, []))\n"
    )
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    with subprocess.Popen(background, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=120) == 130
        finally:
            process.kill()
