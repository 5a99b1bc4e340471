"""A run is judged only if its files are as the run wrote them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.decided import decided
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.event import Event
from trainchaos.harness.host import seal
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results

SCENARIO = """
version: 1
name: sealed
seed: 5
workload: {kind: gpt, ranks: 2, steps: 20}
recovery: {strategy: hot-spare}
faults: [{id: k, kind: process-kill, target: {rank: 1}, at: {step: 8}}]
launcher: {kind: sim}
"""

REAL = """
version: 1
name: sealed
seed: 5
workload: {{kind: mlp, ranks: 2, steps: 12}}
recovery: {{strategy: checkpoint-restart}}
faults: [{{id: k, kind: process-kill, target: {{rank: 1}}, at: {{step: 6}}}}]
launcher: {{kind: {launcher}}}
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run."""
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "s.yaml").write_text(SCENARIO)
    assert invoke(["run", str(folder / "s.yaml"), "--runs", str(folder / "runs"), "--quiet"]) == 0
    return (folder / "runs/sealed/latest").resolve()


@pytest.fixture
def run(played: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(played, tmp_path / played.name))


def judged(run: Path, *options: str) -> tuple[int, Results]:
    code = invoke(["analyze", str(run), "--quiet", *options])
    return code, Results.model_validate_json((run / "results.json").read_text())


def a_log(run: Path) -> Path:
    return sorted(run.glob("events/*faulted/orchestrator.jsonl"))[0]


def edit(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[:-2] + ("1" if text[-2] != "1" else "2") + text[-1])


def double(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], *lines[2:]]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a value": (lambda run: edit(a_log(run)), "orchestrator.jsonl was changed"),
    "a line twice": (lambda run: double(a_log(run)), "orchestrator.jsonl was changed"),
    "half a log": (lambda run: cut(a_log(run)), "orchestrator.jsonl was changed"),
    "a log gone": (lambda run: a_log(run).unlink(), "orchestrator.jsonl is missing"),
    "a log more": (
        lambda run: a_log(run).with_name("w9.jsonl").write_text("") and None,
        "w9.jsonl was added",
    ),
    "an arm more": (
        lambda run: shutil.copytree(a_log(run).parent, run / "events/recovery.r9.faulted") and None,
        "was added",
    ),
    "an arm that is not planned": (
        lambda run: (run / "events/recovery.r9.faulted").mkdir(),
        "does not plan the arm events/recovery.r9.faulted",
    ),
    "the scenario": (
        lambda run: (
            (run / "scenario.resolved.yaml").write_text(
                (run / "scenario.resolved.yaml").read_text() + "\n"
            )
            and None
        ),
        "scenario.resolved.yaml was changed",
    ),
    "the machine": (lambda run: (run / "system.json").unlink(), "system.json is missing"),
    "the ledger": (lambda run: cut(run / "ledger.jsonl"), "ledger.jsonl was changed"),
    "the seal": (
        lambda run: (
            (run / "seal.json").write_text(
                (run / "seal.json").read_text().replace('"complete": true', '"complete": false')
            )
            and None
        ),
        "seal.json was changed",
    ),
    "half a seal": (lambda run: cut(run / "seal.json"), "seal.json is damaged"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_record_is_not_judged(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = CHANGES[name]
    change(run)
    code, results = judged(run)
    assert (code, results.verdict) == (3, "inconclusive")
    assert results.reason.startswith("the record is not whole: ") and said in results.reason
    assert invoke(["gate", str(run), "--quiet", "--allow-inconclusive"]) == 3
    capsys.readouterr()
    for argv in (["compare", run, run, "--runs", run / "both"], ["baseline", "save", run]):
        assert invoke([*map(str, argv)]) == 2
        assert f"the record is not whole: {results.reason.split(': ')[1].split(';')[0]}" in (
            capsys.readouterr().err
        )
    reports = [run / name for name in ("report.html", "summary.md", "junit.xml")]
    assert all(said.split()[0] in path.read_text() for path in reports)
    _, results = judged(run, "--unsealed")
    assert results.title.endswith(", simulated, unsealed")
    assert all(", unsealed" in path.read_text() for path in reports[:2])


def test_a_record_that_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["analyze", str(run)]) == 0
    root = json.loads((run / "seal.json").read_text())["root"]
    assert f"seal    sha256:{root}" in capsys.readouterr().out
    assert judged(run, "--root", f"sha256:{root}")[0] == judged(run, "--root", root)[0] == 0
    code, results = judged(run, "--root", "0" * 64)
    assert code == 3 and f"its root digest is sha256:{root}" in results.reason


def test_what_a_later_heal_adds_to_the_ledger_breaks_no_seal(run: Path) -> None:
    with (run / "ledger.jsonl").open("a") as stream:
        stream.write("\n")
    assert seal.check(RunDirectory(run)).state == "whole"


def test_a_run_without_a_seal_is_judged_and_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "seal.json").unlink()
    assert invoke(["analyze", str(run)]) == 0
    assert "seal    none: " in capsys.readouterr().out
    assert judged(run, "--root", "0" * 64)[0] == 3


def test_a_seal_names_no_file_outside(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (run / "events/link.jsonl").symlink_to(tmp_path / "secret")
    found = seal.check(RunDirectory(run))
    assert found.state == "broken" and "events/link.jsonl was added" in found.reason


def test_a_run_that_was_interrupted_is_sealed_as_far_as_it_got(run: Path) -> None:
    whole = seal.Seal.model_validate_json((run / "seal.json").read_text())
    sealer = seal.Sealer(RunDirectory(run))
    sealer.arm(a_log(run).parent.name)
    found = seal.check(RunDirectory(run))
    assert found.state == "partial" and found.root != whole.root
    edit(a_log(run))
    assert seal.check(RunDirectory(run)).state == "broken"


def first_line(log: Path) -> Event:
    return Event.from_line(log.read_text().partition("\n")[0])


@pytest.mark.real
@pytest.mark.parametrize("launcher", ["local", "agents"])
def test_each_log_begins_with_the_id_of_its_run(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "s.yaml").write_text(REAL.format(launcher=launcher))
    assert decided(tmp_path / "s.yaml", tmp_path / "runs") == 0
    run = (tmp_path / "runs/sealed/latest").resolve()
    logs = list(run.glob("events/*/*.jsonl"))
    sealed = json.loads((run / "seal.json").read_text())["run"]
    found = {log.stem: first_line(log).data["run"] for log in logs}
    assert set(found) >= {"orchestrator", "w0", "w1", "w2"} and set(found.values()) == {sealed}
    assert seal.check(RunDirectory(run)).state == "whole"
    seal.Sealer(RunDirectory(run)).close()
    assert len(seal.check(RunDirectory(run)).problems) == len(logs), "sealed as another run"


def test_a_log_of_another_run_is_named(run: Path) -> None:
    log = a_log(run)
    name = log.relative_to(run).as_posix()
    assert "run" not in first_line(log).data, "the logs of a simulation are the same for a seed"
    sealer = seal.Sealer(RunDirectory(run))
    for other, problems in ((sealer.token, []), ("0" * 32, [f"{name} is of another run"])):
        first, rest = log.read_text().split("\n", 1)
        begun = json.loads(first)
        begun["data"]["run"] = other
        log.write_text(f"{json.dumps(begun)}\n{rest}")
        sealer.close()
        assert seal.check(RunDirectory(run)).problems == problems
    (run / "seal.json").unlink()
    assert seal.check(RunDirectory(run)).problems == ["seal.json is missing, and its logs name one"]


def test_a_run_is_sealed_from_its_first_moment(tmp_path: Path) -> None:
    """Else one that was killed in its first arm would be one whose seal somebody removed."""
    run = RunDirectory(tmp_path)
    seal.Sealer(run)
    assert seal.check(run).state == "partial"


@pytest.mark.parametrize("sealed", ["not", "anew"])
def test_an_arm_that_is_not_planned_leaves_the_verdict_open(run: Path, sealed: str) -> None:
    shutil.copytree(a_log(run).parent, run / "events/default.r1.faulted")
    (run / "seal.json").unlink()
    if sealed == "anew":
        seal.Sealer(RunDirectory(run)).close()
    code, results = judged(run)
    assert (code, results.verdict) == (3, "inconclusive")
    assert results.seal.problems == ["the scenario does not plan the arm events/default.r1.faulted"]
    assert results.seal.problems[0] in results.reason
    assert judged(run, "--unsealed")[0] == 0
    assert invoke(["baseline", "save", str(run), "-o", str(run / "b.json")]) == 2


def test_an_edited_baseline_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    show, gate = ["baseline", "show", str(path)], ["gate", str(run), "--baseline", str(path)]
    assert invoke(["baseline", "save", str(run), "-o", str(path)]) == 0
    saved = json.loads(path.read_text())
    assert saved["root"] == json.loads((run / "seal.json").read_text())["root"]
    path.write_text(json.dumps(dict(reversed(saved.items()))))
    assert invoke(show) == 0 and f"sealed as sha256:{saved['root']}" in capsys.readouterr().out
    assert invoke([*gate, "--allow-inconclusive"]) == 0
    assert "not sealed" not in capsys.readouterr().out
    for name in set(saved) - {"kind", "schema_version"}:
        path.write_text(json.dumps(saved | {name: "another"}))
        for command in (show, gate):
            assert invoke(command) == 2, name
            assert f"{path} was changed after it was saved" in capsys.readouterr().err


def test_a_baseline_without_a_digest_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    assert invoke(["baseline", "save", str(run), "-o", str(path)]) == 0
    older = json.loads(path.read_text())
    del older["root"], older["digest"]
    path.write_text(json.dumps(older))
    assert invoke(["baseline", "show", str(path)]) == 0
    assert "digest    not sealed: it has no digest" in capsys.readouterr().out
    assert invoke(["gate", str(run), "--baseline", str(path), "--allow-inconclusive"]) == 0
    assert "warning: the baseline is not sealed" in capsys.readouterr().out
