"""``chaos gate``, ``chaos baseline`` and ``chaos run --gate`` on simulated runs: words, files, exit
codes.
"""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands.unreported import unreported
from trainchaos import reports
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.commands.gate import conclude
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results
from trainchaos.reports import html

SCENARIO = """\
version: 1
name: gated
seed: 17
launcher: sim
workload: {kind: gpt, size: nano, ranks: 2, steps: 28, global_batch: 8, checkpoint: {every: 10}}
recovery: drop-replica
faults:
  - {id: kill, kind: process-kill, target: {rank: 1}, at: {step: 13}}
sla:
  recovery_time: ["median < LIMIT"]
repeat: 5
"""
Say = Callable[..., tuple[int, str, str]]
Edited = Callable[[Callable[[Any], None]], Path]


@pytest.fixture
def chaos(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs a command line outside of any workflow: exit code, standard output, standard error."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)

    def invoked(*argv: object) -> tuple[int, str, str]:
        code = invoke([str(arg) for arg in argv])
        return code, *capsys.readouterr()

    return invoked


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a simulated run of five repeats."""
    folder = tmp_path_factory.mktemp("gated")
    scenario = folder / "gated.yaml"
    scenario.write_text(SCENARIO.replace("LIMIT", "60s"))
    assert unreported(["run", str(scenario), "--runs", str(folder / "runs"), "-q"]) == 0
    return (folder / "runs" / "gated" / "latest").resolve()


@pytest.fixture
def kept(chaos: Say, played: Path, tmp_path: Path) -> Path:
    """The baseline that the run makes."""
    code, out, err = chaos("baseline", "save", played, "-o", tmp_path / "b.json")
    assert (code, err) == (0, "") and "1 cell" in out and "simulated" in out
    return tmp_path / "b.json"


@pytest.fixture
def edited(kept: Path, tmp_path: Path) -> Edited:
    """Writes the baseline anew with a change."""
    return lambda change: changed(kept, tmp_path / "edited.json", change)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are written by the gate alone."""
    monkeypatch.setattr(reports, "render_all", lambda run, results, but=(): [])


@pytest.fixture
def unpaged(once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the page, which takes longer than all else."""
    monkeypatch.setattr(html, "render", lambda run, results, gate=None: run.root / "report.html")


def changed(path: Path, target: Path, change: Callable[[Any], None]) -> Path:
    data = json.loads(path.read_text())
    change(data)
    data.pop("digest", None)  # a baseline with one may not be changed
    target.write_text(json.dumps(data))
    return target


def recoveries(change: Callable[[list[float]], list[float]]) -> Callable[[Any], None]:
    """A change of a baseline's recovery times."""

    def apply(data: Any) -> None:
        metric = data["cells"]["default"]["metrics"]["recovery_time"]
        metric["values"] = change(metric["values"])

    return apply


@pytest.mark.usefixtures("unpaged")
@pytest.mark.slow
def test_a_run_against_itself_passes_and_leaves_its_files(
    chaos: Say, played: Path, kept: Path
) -> None:
    code, out, _ = chaos("gate", played, "--baseline", kept)
    assert code == 0 and out.startswith("gate PASS, simulated   ")
    assert f"against {played.name}" in out
    decided = json.loads((played / "gate.json").read_text())
    assert decided["verdict"] == "pass" and decided["baseline"] == played.name
    names = ET.parse(played / "gate.xml").getroot().iter("testcase")
    cases = [(case.get("classname"), case.get("name")) for case in names]
    words = "recovery_time no worse than the baseline by more than 20 % and 10 ms"
    assert len(cases) == len(set(cases)) and ("gated.default.sla", words) in cases
    assert (played / "gate.md").read_text().startswith("## ✓ PASS, simulated gated")
    assert chaos("gate", played, "--baseline", played, "-q")[0] == 0, "a baseline may be a run"
    code, out, _ = chaos("gate", played, "--format", "json")
    assert code == 0 and json.loads(out) == json.loads((played / "gate.json").read_text())
    code, out, _ = chaos("baseline", "show", kept)
    assert code == 0
    for words in ("recovery_time", "n=5", "seed 17", "verdict pass, simulated"):
        assert words in out
    shown = json.loads(chaos("baseline", "show", kept, "--format", "json")[1])
    assert shown["scenario"] == "gated"


@pytest.mark.long
def test_every_output_of_a_simulation_says_that_it_is_one(chaos: Say, played: Path) -> None:
    """No figure of it may be cited as measured, and nothing as witnessed by a kernel."""
    for words in (["analyze"], ["analyze", "-q"], ["gate"], ["gate", "-q"]):
        _, out, _ = chaos(words[0], played, *words[1:])
        assert ", simulated" in out.split("\n", 1)[0], words
    assert chaos("report", played, "-q")[0] == 0
    for name, said in {
        "summary.md": "## ✓ PASS, simulated",
        "gate.md": "## ✓ PASS, simulated",
        "report.html": "<title>PASS, simulated: ",
        "junit.xml": 'name="gated (simulated)"',
        "gate.xml": 'name="gated (simulated)"',
        "gate.json": '"simulated": true',
        "trace.json": '"otherData":{"simulated":"true"}',
        "results.json": '"simulated": true',
    }.items():
        assert said in (played / name).read_text(), name
    results = Results.model_validate_json((played / "results.json").read_text())
    assert {fault.witness for fault in results.faults} == {"simulated kernel: wait status"}
    lines = (played / "metrics.prom").read_text().splitlines()
    samples = [line for line in lines if line[0] != "#"]
    assert samples and all('simulated="true"' in line for line in samples)


@pytest.mark.long
def test_slower_than_the_baseline_is_red(
    chaos: Say, played: Path, edited: Edited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = edited(recoveries(lambda values: [value / 2 for value in values]))
    code, out, _ = chaos("gate", played, "--baseline", fast)
    assert code == 1 and "gate FAIL, simulated (exit 1)" in out
    assert "recovery_time  no worse than the baseline" in out
    assert chaos("gate", played, "--baseline", fast, "--metric", "goodput")[0] == 0
    assert chaos("gate", played, "--baseline", fast, "--tolerance", "recovery_time=99%")[0] != 1
    # in a workflow it annotates, and adds a summary
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code, out, err = chaos("gate", played, "--baseline", fast)
    assert code == 1 and "::" not in out and err.startswith("::error file=")
    assert summary.read_text().startswith("## ✗ FAIL, simulated gated")
    assert chaos("gate", played, "--no-github")[2] == ""


@pytest.mark.long
def test_what_cannot_be_compared_is_refused(
    chaos: Say, played: Path, kept: Path, edited: Edited, tmp_path: Path
) -> None:
    other = edited(lambda data: data["machine"].update(cores=999))
    code, _, err = chaos("gate", played, "--baseline", other)
    assert code == 2 and "another machine: cores: 999 then" in err and "--other-machine" in err
    code, out, _ = chaos("gate", played, "--baseline", other, "--other-machine")
    assert code == 0 and "warning: the baseline is of another machine" in out
    longer = edited(lambda data: data["cells"]["default"]["test"]["workload"].update(steps=29))
    code, _, err = chaos("gate", played, "--baseline", longer)
    assert code == 2 and "workload.steps: 29 then, 28 now" in err
    assert "chaos baseline save RUN" in err
    assert chaos("gate", tmp_path)[0] == 2
    assert chaos("gate", played, "--baseline", tmp_path / "none.json")[0] == 2
    code, _, err = chaos("gate", played, "--baseline", kept, "--metric", "recover_time")
    assert code == 2 and "did you mean 'recovery_time'?" in err
    assert chaos("gate", played, "--baseline", kept, "--tolerance", "much")[0] == 2


@pytest.mark.long
def test_what_is_allowed_is_no_error_of_junit_either(
    chaos: Say, played: Path, edited: Edited
) -> None:
    """A CI that reads gate.xml must not be red where the exit code is 0."""
    one = edited(recoveries(lambda values: values[:1]))
    for options, code, errors, skipped in [
        ([], 3, "1", "0"),
        (["--allow-inconclusive"], 0, "0", "1"),
    ]:
        ended, out, err = chaos("gate", played, "--baseline", one, *options)
        assert ended == code and "(exit 3)" in out
        assert "here and in the baseline would settle it in 4 of 5 cases" in out
        assert ("exits with 0 nevertheless" in err) == bool(options)
        suite = ET.parse(played / "gate.xml").getroot().find("testsuite")
        assert suite is not None and suite.get("failures") == "0"
        assert (suite.get("errors"), suite.get("skipped")) == (errors, skipped)


@pytest.mark.usefixtures("unpaged")
@pytest.mark.slow
def test_where_standard_output_is_json_the_gate_speaks_elsewhere(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = {"gate": True, "baseline": None, "tolerances": (), "metrics": (), "github": False}
    choices |= {"allow_inconclusive": False, "other_machine": False}
    results = Results.model_validate_json((played / "results.json").read_text())
    directory = RunDirectory(played)
    assert conclude(results, directory, choices, form="json", quiet=False) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("gate PASS")
    broken = results.model_copy(update={"verdict": "broken", "exit_code": 4, "reason": "no disk"})
    assert conclude(broken, directory, choices, form="text", quiet=True) == 4
    assert conclude(broken, directory, choices | {"gate": False}, form="text", quiet=True) == 4
    assert capsys.readouterr().out == "gate BROKEN, simulated (exit 4)   no disk\n"


@pytest.mark.usefixtures("unpaged")
@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code"), [("60s", 0), ("1ms", 1)])
@pytest.mark.sample(1)
def test_run_ends_with_the_gate(chaos: Say, tmp_path: Path, limit: str, code: int) -> None:
    (tmp_path / "gated.yaml").write_text(SCENARIO.replace("LIMIT", limit))
    ended, out, _ = chaos("run", tmp_path / "gated.yaml", "--runs", tmp_path, "-q", "--gate")
    assert ended == code and f"gate {'FAIL' if code else 'PASS'}" in out
    assert (tmp_path / "gated" / "latest" / "gate.xml").is_file()


@pytest.mark.usefixtures("once")
@pytest.mark.slow
def test_where_gate_and_values_differ_there_is_one_verdict(chaos: Say, tmp_path: Path) -> None:
    """Two arms exceed a limit for the median, which is too few to show anything."""
    scenario = tmp_path / "gated.yaml"
    scenario.write_text(SCENARIO.replace("LIMIT", "1ms").replace("repeat: 5", "repeat: 2"))
    code, out, _ = chaos("run", scenario, "--runs", tmp_path, "--gate")
    verdicts = re.findall(r"^(?:verdict|measured|gate ).*?(?=   )", out, re.M)
    measured, decided = "measured FAIL, simulated (exit 1)", "gate INCONCLUSIVE, simulated (exit 3)"
    assert (code, verdicts) == (3, [measured, decided])
    page = (tmp_path / "gated" / "latest" / "report.html").read_text()
    first = next(line for line in page.splitlines() if 'class="verdict ' in line)
    assert "? gate INCONCLUSIVE, simulated <small>exit 3</small>" in first
    assert "<title>INCONCLUSIVE, simulated: " in page
    assert "as measured: FAIL, simulated</p>" in page


@pytest.mark.slow
def test_wrong_options_of_a_gate_start_nothing(chaos: Say, edited: Edited, tmp_path: Path) -> None:
    (tmp_path / "gated.yaml").write_text(SCENARIO.replace("LIMIT", "60s"))
    other = edited(lambda data: data["machine"].update(cores=999))
    command = ("run", tmp_path / "gated.yaml", "--runs", tmp_path / "runs")
    code, _, err = chaos(*command, "--gate", "--baseline", other)
    assert code == 2 and "another machine: cores: 999 then" in err
    for wrong in (
        ("--baseline", "x.json"),
        ("--gate", "--baseline", tmp_path / "none.json"),
        ("--gate", "--tolerance", "x"),
    ):
        assert chaos(*command, *wrong)[0] == 2
    assert not (tmp_path / "runs").exists()


# --- repeats added after somebody has looked

SPENT = "the level is spent by earlier looks"


def looked_at(played: Path, target: Path, recorded: object, judged: list[int] | None) -> Path:
    """A copy of the run, at whose first arms somebody has looked. ``recorded``: looks of the gate;
    ``judged``: the repeats that the results of then know of, as a run's end is a look too.
    """
    shutil.copytree(played, target)
    for name in ("looks.json", "gate.json"):
        (target / name).unlink(missing_ok=True)
    if recorded:
        (target / "looks.json").write_text(json.dumps(recorded))

    def shorten(data: Any) -> None:
        data["arms"] = [arm for arm in data["arms"] if judged and arm["repeat"] in judged]

    if judged:
        changed(target / "results.json", target / "results.json", shorten)
    return target


def look(planned: int, repeats: list[int]) -> dict[str, object]:
    return {"planned": planned, "looks": [{"arms": {"default": repeats}}]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("recorded", "judged", "words"),
    [
        (look(1, [0, 1, 2]), None, [SPENT, "extended from 3 to 5 arms: look 2 of 1 planned"]),
        (None, [0, 1, 2], [SPENT, "extended from 3 to 5 arms: look 2 of 1 planned"]),
        # five arms bound a median with 3.1 %
        (
            look(2, [0, 1, 2]),
            None,
            ["look 2 of 2 planned, 2.5 % each", "not a bound: 5 arms of at least 6"],
        ),
        (look(2, [0, 1]), [0, 1, 2], ["extended from 2 to 5 arms: look 3 of 2 planned"]),
    ],
    ids=["gate", "results", "planned", "between"],
)
def test_repeats_added_after_a_look_share_its_level(
    chaos: Say, played: Path, tmp_path: Path, recorded: object, judged: list[int], words: list[str]
) -> None:
    """Five repeats pass on their own; the same five after a look at three do not."""
    extended = looked_at(played, tmp_path / "extended", recorded, judged)
    if judged:  # the stored results are all that tells of this look
        assert chaos("analyze", extended, "-q")[0] in (0, 1, 3)
        arms = json.loads((extended / "results.json").read_text())["arms"]
        assert len(arms) == 12, "five pairs, and one with elastic sums"
    for _ in range(2):  # looking again changes nothing
        code, out, _ = chaos("gate", extended)
        assert code == 3 and all(each in out for each in words), out
    decided = json.loads((extended / "gate.json").read_text())
    assert decided["extended"] and (decided["level"] > 0) == ("2.5 % each" in out)
    assert "extended from" in (extended / "gate.md").read_text()
    code, _, err = chaos("gate", extended, "--looks", 3)
    assert code == 2 and "cannot be changed afterwards" in err
    (extended / "looks.json").write_text("{}")
    assert chaos("gate", extended)[0] == 2


@pytest.mark.long
def test_a_run_that_nobody_extended_has_its_whole_level(
    chaos: Say, played: Path, tmp_path: Path
) -> None:
    """And judging it again is no look of its own."""
    everything = [0, 1, 2, 3, 4]
    seen = looked_at(played, tmp_path / "seen", look(1, everything), None)
    assert chaos("gate", seen, "-q")[0] == 0
    whole = looked_at(played, tmp_path / "whole", None, everything)
    chaos("analyze", whole, "-q")
    assert not (whole / "looks.json").exists()
    assert chaos("gate", whole, "--looks", 2)[0] in (0, 3), "the plan is still to be made"
