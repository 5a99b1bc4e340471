"""What continuous integration reads, read back by readers of our own: JUnit, workflow commands,
summaries, OpenMetrics, the templates, spans.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.chaos.test_schemas import SCENARIO
from tests.support.pages.sample_results import HOSTILE, build
from trainchaos.chaos.cli import invoke
from trainchaos.harness.gating.gate import gate, gated
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.host.seal import Seal
from trainchaos.harness.judge.results import Finding, Results
from trainchaos.reports import junit, openmetrics
from trainchaos.reports.outlets import github, opentelemetry

ROOT = Path(__file__).resolve().parents[2]
Finished = tuple[RunDirectory, Results]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of three strategies with hostile text in it: one clause fails, one is inconclusive."""
    return build(tmp_path_factory.mktemp("runs") / "run")


# --- JUnit, by the rules of Jenkins' junit-10.xsd

ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors", "skipped"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "file"},
    "properties": set(),
    "property": {"name", "value"},
    "testcase": {"name", "classname", "time", "file", "line"},
    "failure": {"message", "type"},
    "error": {"message", "type"},
    "skipped": {"message", "type"},
    "system-out": set(),
}
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "testcase": {"failure", "error", "skipped", "system-out"},
}


def check_junit(element: ET.Element) -> None:
    assert set(element.attrib) <= ATTRIBUTES[element.tag], element.tag
    for at, child in enumerate(element):
        assert child.tag in CHILDREN.get(element.tag, set()), f"{child.tag} in {element.tag}"
        assert child.tag != "properties" or at == 0, "properties come first"
        check_junit(child)
    for number in {"tests", "failures", "errors", "skipped", "line"} & set(element.attrib):
        assert element.attrib[number].isdecimal()
    if element.tag == "testcase":
        assert element.get("name") and element.get("classname")


@pytest.mark.parametrize("by_gate", [False, True])
def test_junit_is_as_its_schema_has_it(finished: Finished, tmp_path: Path, by_gate: bool) -> None:
    run, results = finished
    shown = gated(results, gate(results)) if by_gate else results
    shown = shown.model_copy(update={"slas": shown.slas * (2 if by_gate else 1)})
    root = ET.parse(junit.write(run, shown, tmp_path / "x.xml")).getroot()
    check_junit(root)
    cases = list(root.iter("testcase"))
    suite, named = root[0], {(case.get("classname"), case.get("name")) for case in cases}
    assert len(named) == len(cases) == int(suite.get("tests", "0")), "equal clauses are kept apart"
    invariants = sum(len(cell.invariants) for cell in results.cells)
    assert len(cases) == len(shown.slas) + invariants + len(results.faults) + len(results.skipped)
    assert suite[0].tag == "properties"
    for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        found = suite.findall(f"testcase/{tag}")
        assert len(found) == int(suite.get(count, "0")) > 0
        assert all(one.get("message") for one in found)
    if not by_gate:
        failed = suite.find("testcase[@name='recovery_time max < 5s']/failure")
        assert failed is not None and "never" in (failed.get("message") or "")
        warned = suite.find("testcase[@name='time_to_full_rate median < 3s']")
        assert warned is not None and warned.find("error") is None


# --- annotations, as the runner of GitHub Actions reads a line


def read_command(line: str) -> tuple[str, dict[str, str], str]:
    """``::name key=value,key=value::data``; the first ``::`` after the start ends the
    properties.
    """
    assert line.startswith("::")
    end = line.index("::", 2)
    head, data = line[2:end], line[end + 2 :]
    name, _, rest = head.partition(" ")
    pairs = dict(part.split("=", 1) for part in rest.split(",") if part)
    for wrong, right in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        pairs = {key: value.replace(wrong, right) for key, value in pairs.items()}
        data = data.replace(wrong, right) if wrong not in ("%3A", "%2C") else data
    return name, pairs, data


EVIL = "50%25 of it\r\n::set-output name=x::y\n::error::no, really: 100%,a=b"


def test_annotations_are_on_the_lines_of_the_clauses(finished: Finished) -> None:
    _, results = finished
    said = [read_command(str(one)) for one in github.remarks(results, {})]
    failed = next(s for s in results.slas if s.verdict == "fail" and s.severity == "fail")
    name, place, data = next(one for one in said if one[1].get("line"))
    assert (name, place["file"], place["line"]) == ("error", results.source, str(failed.line))
    assert failed.clause in place["title"] and data.startswith(f"{failed.cell}: ")
    assert {name for name, _, _ in said} == {"error", "warning"}
    assert [name for name, _, _ in said] == sorted(name for name, _, _ in said)


def test_annotations_carry_hostile_text_and_obey_none_of_it(finished: Finished) -> None:
    _, results = finished
    slas = [results.slas[0].model_copy(update={"verdict": "fail", "detail": EVIL, "clause": EVIL})]
    for one in github.remarks(
        results.model_copy(update={"slas": slas, "cells": [], "source": "a,b::c=%.yaml"}), {}
    ):
        line = str(one)
        assert "\n" not in line and "\r" not in line
        name, place, data = read_command(line)
        assert (name, place["file"]) == ("error", "a,b::c=%.yaml")
        assert EVIL in data and EVIL in place["title"]


def test_more_annotations_than_are_shown_say_so(finished: Finished) -> None:
    _, results = finished
    many = [results.slas[0].model_copy(update={"verdict": "fail", "line": n}) for n in range(1, 40)]
    said = github.remarks(results.model_copy(update={"slas": many, "cells": []}), {})
    assert len(said) == 10 and said[-1].title == "30 more"


def test_a_file_is_named_from_the_repository(finished: Finished, tmp_path: Path) -> None:
    _, results = finished
    moved = results.model_copy(update={"source": str(tmp_path / "repo" / "scenarios" / "x.yaml")})
    env = {"GITHUB_WORKSPACE": str(tmp_path / "repo")}
    assert github.remarks(moved, env)[0].file == os.path.join("scenarios", "x.yaml")
    assert (
        github.remarks(moved, {"GITHUB_WORKSPACE": str(tmp_path / "else")})[0].file == moved.source
    )


def test_a_run_that_broke_is_annotated(finished: Finished) -> None:
    _, results = finished
    broken = results.model_copy(
        update={"verdict": "broken", "cells": [], "slas": [], "reason": "no disk"}
    )
    (only,) = github.remarks(broken, {})
    assert (only.level, only.message) == ("error", "no disk")
    assert github.remarks(broken.model_copy(update={"verdict": "pass"}), {}) == []


def test_the_summary_is_added_and_stays_below_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    path.write_text("before\n")
    github.append_summary("## ours", path)
    assert path.read_text() == "before\n## ours\n"
    for _ in range(3):
        github.append_summary("\n".join(["a line of ümlauts"] * 30_000), path)
    assert path.stat().st_size <= 900 * 1024
    assert path.read_text(encoding="utf-8").count("Cut here") == 1


# --- OpenMetrics, by its grammar

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{(.*)\} (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def read_metrics(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Name and labels -> value; fails on what the format does not allow."""
    assert text.endswith("\n# EOF\n") and text.split("\n").count("# EOF") == 1
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    family, seen = "", set()
    for line in text.split("\n")[:-2]:
        assert line and line == line.strip()
        if line.startswith("# "):
            word, name, value = line[2:].split(" ", 2)
            assert word in ("TYPE", "UNIT", "HELP")
            if word == "TYPE":
                assert value == "gauge" and name not in seen, "a family stands together"
                family = name
                seen.add(name)
            assert name == family
            assert word != "UNIT" or name.endswith(f"_{value}")
            continue
        match = SAMPLE.fullmatch(line)
        assert match and match[1] == family, line
        labels, at = {}, 0
        while at < len(match[2]):
            label = LABEL.match(match[2], at)
            assert label and label[1] not in labels, line
            labels[label[1]] = re.sub(r'\\[\\"n]', lambda m: UNESCAPED[m[0]], label[2])
            at = label.end()
        key = (family, frozenset(labels.items()))
        assert key not in found, "a sample is there once"
        found[key] = float(match[3])
    return found


def test_metrics_hold_what_the_results_do(finished: Finished, tmp_path: Path) -> None:
    _, results = finished
    text = openmetrics.render(RunDirectory(tmp_path), results).read_text(encoding="utf-8")
    found = read_metrics(text)
    for cell in results.cells:
        labels = {"scenario": results.scenario, "cell": cell.id, "strategy": cell.strategy}
        for name, unit in (
            ("recovery_time", "seconds"),
            ("goodput", "ratio"),
            ("samples_lost", "samples"),
        ):
            for statistic in ("min", "median", "max"):
                key = (
                    f"trainchaos_{name}_{unit}",
                    frozenset((labels | {"statistic": statistic}).items()),
                )
                assert found[key] == getattr(cell.metrics[name], statistic)
    assert math.inf in found.values()
    verdicts = {
        dict(labels)["verdict"]: v
        for (name, labels), v in found.items()
        if name == "trainchaos_run_verdict"
    }
    assert verdicts == {"pass": 0.0, "fail": 1.0, "inconclusive": 0.0}
    assert sum(v for (name, _), v in found.items() if name == "trainchaos_incidents") == len(
        results.faults
    )
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.prom"]


def test_metrics_carry_hostile_text(finished: Finished) -> None:
    _, results = finished
    evil = 'a"b\\n,c="d"} 1\n# EOF\n'
    checked = {HOSTILE: Finding(verdict="pass", witness="")}
    cell = results.cells[0].model_copy(update={"id": evil, "invariants": checked})
    changed = results.model_copy(update={"cells": [cell]})
    found = read_metrics(openmetrics.text_of(openmetrics.families(changed)))
    assert any(("cell", evil) in labels for _, labels in found)


# --- templates


def yaml_of(name: str) -> Any:
    return YAML(typ="safe", pure=True).load((ROOT / name).read_text())


def fake_chaos(folder: Path, code: int) -> dict[str, str]:
    """An environment in which ``chaos`` writes its arguments down, one a line, and ends with
    ``code``.
    """
    program = folder / "bin" / "chaos"
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > "{folder}/said"\n'
        'while [ "$1" != --runs ]; do shift; done\nmkdir -p "$2/x/2026"\n'
        f'ln -sfn 2026 "$2/x/latest"\nexit {code}\n'
    )
    program.chmod(0o755)
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(folder),
        "GITHUB_OUTPUT": str(folder / "output"),
    }


def heard(folder: Path) -> list[str]:
    """The arguments that ``chaos`` got."""
    return (folder / "said").read_text().split("\n")[:-1]


def test_the_action_has_what_github_asks_of_one() -> None:
    action = yaml_of("action.yml")
    assert action["name"] and action["description"] and action["runs"]["using"] == "composite"
    for one in action["inputs"].values():
        assert set(one) <= {"description", "required", "default"} and one["description"]
    assert {"scenario", "gate", "baseline"} <= set(action["inputs"])
    steps = action["runs"]["steps"]
    ids = {step.get("id") for step in steps}
    for step in steps:
        assert ("run" in step) != ("uses" in step)
        assert "run" not in step or step["shell"] == "bash"
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
        assert "${{" not in step.get("run", ""), "an input in a script is a command"
    text = (ROOT / "action.yml").read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    for output in action["outputs"].values():
        (step, _) = re.findall(r"steps\.(\w+)\.outputs\.([\w-]+)", output["value"])[0]
        assert step in ids
    uses = [step["uses"].split("@")[0] for step in steps if "uses" in step]
    assert {"actions/cache", "actions/upload-artifact"} <= set(uses)


@pytest.fixture
def act(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Plays the action's step with these inputs, all others empty; returns its outputs."""
    step = next(s for s in yaml_of("action.yml")["runs"]["steps"] if s.get("id") == "run")

    def played(code: int = 0, **inputs: str) -> dict[str, str]:
        env = fake_chaos(tmp_path, code) | dict.fromkeys(step["env"], "") | inputs
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, timeout=120, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        output = tmp_path / "output"
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        output.unlink()
        return outputs

    return played


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_action_runs_what_it_is_told(
    act: Callable[..., dict[str, str]], tmp_path: Path, code: int
) -> None:
    outputs = act(
        code,
        SCENARIO="-a $(touch owned); b.yaml",
        GATE="true",
        BASELINE="with space.json",
        REPEAT="9",
        ALLOW_INCONCLUSIVE="true",
        ARGUMENTS="--set\nseed=3; touch owned\n",
        ARTIFACT="chaos-report",
    )
    said = ["run", "--gate", "--baseline=with space.json", "--repeat=9", "--allow-inconclusive"]
    said += ["--set", "seed=3; touch owned", "--runs", outputs["runs"]]
    assert heard(tmp_path) == [*said, "--", "-a $(touch owned); b.yaml"]
    assert not (tmp_path / "owned").exists()
    runs = Path(outputs["runs"])
    assert runs.parent == tmp_path and runs.name.startswith("chaos-runs-")
    assert outputs == {
        "exit-code": str(code),
        "runs": str(runs),
        "run": str(runs / "x" / "2026"),
        "artifact": f"chaos-report--a-touch-owned-b-{runs.name[-8:]}",
    }


def test_a_second_use_of_the_action_in_a_job_has_a_run_and_an_artifact_of_its_own(
    act: Callable[..., dict[str, str]],
) -> None:
    scenarios = ("first.yaml", "folder/second.yaml", "folder/second.yaml")
    found = [act(SCENARIO=scenario, ARTIFACT="report") for scenario in scenarios]
    assert len({outputs["run"] for outputs in found}) == 3
    assert len({outputs["artifact"] for outputs in found}) == 3
    names = [outputs["artifact"].rsplit("-", 1)[0] for outputs in found]
    assert names == ["report-first", "report-second", "report-second"]


def test_the_action_does_without_what_is_left_empty(
    act: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    outputs = act(SCENARIO="x.yaml")
    assert heard(tmp_path) == ["run", "--runs", outputs["runs"], "--", "x.yaml"]
    assert "artifact" not in outputs


def test_the_seal_that_is_signed_is_the_one_that_a_run_writes(tmp_path: Path) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(SCENARIO)
    assert invoke(["run", str(scenario), "--runs", str(tmp_path / "runs"), "-q"]) == 0
    run = (tmp_path / "runs/small/latest").resolve()
    action = yaml_of("action.yml")
    *_, step = action["runs"]["steps"]
    assert step["uses"].startswith("actions/attest@") and step["if"].startswith("always() && ")
    path = step["with"]["subject-path"].replace("${{ steps.run.outputs.run }}", str(run))
    assert Seal.model_validate_json(Path(path).read_text()).complete

    _, told = (ROOT / "docs/ci.md").read_text().split("### A signed seal")
    with_action, without = re.findall(r"```yaml\n(.*?)```", told.split("\n## ")[0], re.DOTALL)
    job = YAML(typ="safe").load(with_action)["jobs"]["recovery"]
    assert job["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    given = job["steps"][-1]["with"]
    assert given["attest"] == "true" and given.keys() <= action["inputs"].keys()
    (alone,) = YAML(typ="safe").load(without)
    assert alone["uses"] == step["uses"]
    (found,) = tmp_path.glob(alone["with"]["subject-path"])
    assert found.resolve() == Path(path)


def test_the_gitlab_template_runs_what_it_is_told(tmp_path: Path) -> None:
    job = yaml_of("templates/trainchaos.gitlab-ci.yml")[".trainchaos"]
    known = {"stage", "image", "variables", "cache", "before_script", "script", "artifacts"}
    known |= {"allow_failure"}
    assert set(job) == known and all(isinstance(line, str) for line in job["script"])
    assert all(isinstance(value, str) for value in job["variables"].values())
    assert job["artifacts"]["when"] == "always" and job["artifacts"]["reports"]["junit"].endswith(
        "/gate.xml"
    )
    variables = job["variables"] | {"CHAOS_SCENARIO": "a b.yaml", "CHAOS_BASELINE": "c d.json"}
    env = fake_chaos(tmp_path, 3) | variables
    done = subprocess.run(
        ["sh", "-ec", "\n".join(job["script"])], env=env, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 3 and 3 in job["allow_failure"]["exit_codes"]
    options = ["--gate", "--baseline=c d.json", "--runs", "chaos-runs"]
    assert heard(tmp_path) == ["run", *options, "--", "a b.yaml"]


# --- spans


def test_spans_lie_within_each_other(finished: Finished) -> None:
    run, results = finished
    arms, left_out = opentelemetry.spans(run, results)
    assert left_out == [] and len(arms) == len([a for a in results.arms if a.arm == "faulted"])
    incidents = [one for arm in arms for one in arm.children]
    assert len(incidents) == len(results.faults)
    for arm in arms:
        for one in arm.children:
            assert arm.start_ns <= one.start_ns <= one.end_ns <= arm.end_ns
            for phase in one.children:
                assert one.start_ns <= phase.start_ns <= phase.end_ns <= one.end_ns + 1
    lost = [one for one in incidents if one.failed]
    assert len(lost) == 1 and lost[0].attributes["trainchaos.never_recovered"] is True
    assert "trainchaos.recovery_seconds" not in lost[0].attributes


def test_spans_are_in_unix_time_whenever_the_machine_was_started(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run")
    before, _ = opentelemetry.spans(run, results)
    for path in run.root.glob("events/*/*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps(e | {"time_ns": e["time_ns"] + 10**15}) + "\n" for e in events)
        )
    assert opentelemetry.spans(run, results)[0] == before


def test_an_arm_without_its_log_is_left_out_by_name(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run", logs=False)
    arms, left_out = opentelemetry.spans(run, results)
    assert arms == [] and len(left_out) == len([a for a in results.arms if a.arm == "faulted"])


def test_spans_are_sent_as_they_are(finished: Finished) -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter"
    ).InMemorySpanExporter()
    run, results = finished
    arms, _ = opentelemetry.spans(run, results)
    taken: list[Any] = []
    memory.export = lambda spans: taken.extend(spans) or _success()
    sent = opentelemetry.export(arms, results, memory)
    assert (
        sent
        == len(taken)
        == sum(1 + len(a.children) + sum(len(i.children) for i in a.children) for a in arms)
    )
    roots = {span.context.span_id: span for span in taken if span.parent is None}
    assert len(roots) == len(arms)
    first = next(span for span in taken if span.name == arms[0].children[0].name)
    assert first.parent.span_id in roots and first.start_time == arms[0].children[0].start_ns


def _success() -> Any:
    from opentelemetry.sdk.trace.export import SpanExportResult

    return SpanExportResult.SUCCESS


def test_without_opentelemetry_it_says_how_to_get_it(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from trainchaos.chaos.errors import MissingCapability

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(MissingCapability, match=r"trainchaos\[otel\]"):
        opentelemetry.export([], finished[1])
