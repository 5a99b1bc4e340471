"""``chaos heal``, ``chaos ps`` and what they say."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands.unreported import no_reports
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.log import ORCHESTRATOR, EventWriter, Kind
from trainchaos.harness.host import processes
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.undo import live
from trainchaos.harness.undo.ledger import Ledger, read_open
from trainchaos.harness.undo.records import MARKER, KillMarked, KillProcess, KillSession, RemoveTree

__all__ = ["no_reports"]
Chaos = Callable[..., tuple[int, str, str]]
MARK = secrets.token_hex(8)
SCENARIO = """
version: 1
name: sim
workload: {kind: mlp, ranks: 2, steps: 12, global_batch: 8}
recovery: drop-replica
baseline: none
launcher: sim
faults: [{id: kill, kind: process-kill, at: {step: 4}}]
"""


@pytest.fixture
def chaos(capsys: pytest.CaptureFixture[str]) -> Chaos:
    """Runs a command line: exit code, standard output, standard error."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = invoke([str(arg) for arg in argv])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def dead(tmp_path: Path) -> RunDirectory:
    """A run whose harness is gone and that has left a directory."""
    run = RunDirectory(tmp_path / "runs" / "lost" / "2026-01-01T00-00-00-1")
    (run.root / "made").mkdir(parents=True)
    hold(run)
    Ledger(run.ledger).will(KillMarked(marker=MARK, since=0))
    Ledger(run.ledger).will(RemoveTree(path=run.root / "made", inside=run.root), arm="a")
    return run


def hold(run: RunDirectory, **changes: Any) -> None:
    """Its file says that it was held by a process that is gone, or what ``changes`` say."""
    gone = live.HarnessProcess.me(MARK).model_copy(
        update={"pid": 2**22 - 1, "start_time": 1} | changes
    )
    (run.root / live.FILE).write_text(gone.model_dump_json())


def test_heal_says_what_it_did_and_then_that_there_is_nothing(
    chaos: Chaos, dead: RunDirectory
) -> None:
    runs = dead.root.parents[1]
    code, out, _ = chaos("heal", "--runs", runs)
    assert code == 0 and not (dead.root / "made").exists()
    assert (
        out
        == f"{dead.root}: its harness (process 4194303) is gone\n  removed {dead.root / 'made'}\n"
    )
    assert chaos("heal", "--runs", runs)[:2] == (0, "nothing to heal\n")
    assert chaos("heal", "--all", "--runs", runs)[:2] == (0, "nothing to heal\n")
    assert chaos("heal", dead.root)[:2] == (0, "nothing to heal\n")


def test_heal_as_json_and_quietly(chaos: Chaos, dead: RunDirectory) -> None:
    code, out, _ = chaos("heal", dead.root, "--format", "json")
    (one,) = json.loads(out)
    assert code == 0 and one["state"] == "healed" and one["run"] == str(dead.root)
    assert {outcome["did"] for outcome in one["outcomes"]} == {True, False}
    assert json.loads(chaos("heal", "--runs", dead.root.parents[1], "--format", "json")[1]) == []
    assert chaos("heal", dead.root, "-q") == (0, "", "")


def test_what_cannot_be_undone_is_said_and_is_unsafe_until_it_can(
    chaos: Chaos, dead: RunDirectory
) -> None:
    outside = dead.root.parents[1] / "outside"
    outside.mkdir()
    record = Ledger(dead.ledger).will(RemoveTree(path=outside, inside=dead.root))
    code, out, _ = chaos("heal", dead.root, "-q")
    assert code == 5 and f"{outside} is not inside {dead.root}: left alone" in out
    assert chaos("heal", "--runs", dead.root.parents[1])[0] == 5, "it is tried again"
    assert [entry.problem for entry in read_open(dead.ledger)] != [""]
    Ledger(dead.ledger).undone(record, "by hand")
    assert chaos("heal", dead.root)[0] == 0
    assert not (dead.root / live.FILE).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_reports")
def test_a_run_that_left_something_is_unsafe_in_its_verdict_too(
    chaos: Chaos, tmp_path: Path
) -> None:
    scenario, runs = tmp_path / "sim.yaml", tmp_path / "runs"
    scenario.write_text(SCENARIO)
    assert chaos("run", scenario, "--runs", runs, "-q")[0] == 0
    ledger = Ledger(runs / "sim" / "latest" / "ledger.jsonl")
    record = ledger.will(RemoveTree(path=tmp_path, inside=tmp_path))
    ledger.failed(record, "it is in use")
    code, out, _ = chaos("analyze", runs / "sim" / "latest", "-q")
    assert code == 5 and "it is in use" in out
    ledger.undone(record, "gone")
    assert chaos("analyze", runs / "sim" / "latest", "-q")[0] == 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            {"pid": os.getpid(), "start_time": processes.start_time(os.getpid())},
            "is alive: not touched",
        ),
        ({"host": "elsewhere"}, "it ran on elsewhere: heal it there"),
        ({"pid_namespace": "pid:[1]"}, "heal it there"),
    ],
)
def test_a_run_that_is_not_ours_to_heal_is_not_touched(
    chaos: Chaos, dead: RunDirectory, changes: dict[str, Any], word: str
) -> None:
    hold(dead, **changes)
    code, out, _ = chaos("heal", dead.root)
    assert code == 0 and word in out
    assert (dead.root / "made").exists() and len(read_open(dead.ledger)) == 2


def test_a_lock_from_another_container_says_that_it_is_alive(
    chaos: Chaos, dead: RunDirectory
) -> None:
    hold(dead, pid_namespace="pid:[1]")
    with (dead.root / live.FILE).open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "alive in another container: not touched" in chaos("heal", dead.root)[1]
    assert (dead.root / "made").exists()


def test_two_healers_do_not_get_in_each_others_way(chaos: Chaos, dead: RunDirectory) -> None:
    with live.healing(dead) as mine:
        assert mine and "somebody else is healing it" in chaos("heal", dead.root)[1]
    assert chaos("heal", dead.root)[0] == 0 and not (dead.root / "made").exists()


@pytest.mark.parametrize("torn", ["", "{", '{"pid": 7}'])
def test_a_file_that_says_nothing_is_no_harness(
    chaos: Chaos, dead: RunDirectory, torn: str
) -> None:
    (dead.root / live.FILE).write_text(torn)
    assert chaos("ps", "--runs", dead.root.parents[1])[0] == 0
    assert chaos("heal", dead.root)[0] == 0
    assert not (dead.root / "made").exists() and not (dead.root / live.FILE).exists()


@pytest.mark.parametrize("command", ["heal", "analyze", "report"])
def test_what_is_no_run_is_a_usage_error(chaos: Chaos, tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        code, _, err = chaos(command, path)
        assert code == 2 and f"{path} is not a run directory" in err and "ls -d runs/*/*" in err
        assert ("does not exist" in err) is (path != tmp_path)


def test_a_run_and_all_runs_at_once_is_a_usage_error(chaos: Chaos, dead: RunDirectory) -> None:
    assert chaos("heal", dead.root, "--all")[0] == 2


# ---- ps


@pytest.fixture
def marked() -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries the marker."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, MARKER: MARK})
    yield process
    process.kill()
    process.wait(timeout=120)


def test_ps_lists_the_processes_of_a_live_run(
    chaos: Chaos, dead: RunDirectory, marked: subprocess.Popen[bytes]
) -> None:
    me = os.getpid()
    hold(dead, pid=me, start_time=processes.start_time(me))
    holder = live.read_holder(dead)
    assert holder is not None and holder.alive
    code, out, _ = chaos("ps", "--runs", dead.root.parents[1])
    lines = out.splitlines()
    assert code == 0 and f"harness {me}" in lines[0] and lines[0].startswith("lost  live for")
    assert any(line.split()[0] == str(marked.pid) and "sleep 600" in line for line in lines), out
    (one,) = json.loads(chaos("ps", "--runs", dead.root.parents[1], "--format", "json")[1])
    assert one["state"] == "live" and [row["pid"] for row in one["processes"]] == [marked.pid]
    assert one["to_undo"] == []


@pytest.mark.parametrize(
    ("other", "text"), [(1, "w0 on node 1"), (0, "w0")], ids=["nodes", "one node"]
)
def test_ps_says_on_which_node(
    chaos: Chaos, dead: RunDirectory, marked: subprocess.Popen[bytes], other: int, text: str
) -> None:
    dead.make_arm("arm")
    log = EventWriter(dead.events("arm"), ORCHESTRATOR, lambda: 1)
    about = {"role": "worker", "mode": "warm"}
    log.write(Kind.PROCESS_SPAWNED, process="w1", pid=1, node=0, **about)
    log.write(Kind.PROCESS_SPAWNED, process="w0", pid=marked.pid, node=other, **about)
    log.close()
    line = chaos("ps", "--runs", dead.root.parents[1])[1].splitlines()[3]
    assert line.split()[-len(text.split()) :] == text.split()


def test_ps_names_python_processes_by_their_module(chaos: Chaos, dead: RunDirectory) -> None:
    command = [sys.executable, "-S", "-m", "code"]
    silent = subprocess.DEVNULL
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=silent,
        stderr=silent,
        env={**os.environ, MARKER: MARK},
    )
    try:
        (one,) = json.loads(chaos("ps", "--runs", dead.root.parents[1], "--format", "json")[1])
        assert [row["name"] for row in one["processes"]] == ["code"]
        assert chaos("heal", dead.root)[0] == 0
        assert process.wait(timeout=120) == -9
    finally:
        process.kill()
        process.communicate(timeout=120)


def test_ps_says_what_a_dead_run_has_left_and_how_to_heal_it(
    chaos: Chaos, dead: RunDirectory
) -> None:
    code, out, _ = chaos("ps", "--runs", dead.root.parents[1])
    assert code == 0 and "lost  dead (its harness was 4194303)" in out
    assert f"to undo: remove {dead.root / 'made'}" in out and f"chaos heal {dead.root}" in out
    chaos("heal", dead.root)
    runs = dead.root.parents[1]
    assert (
        chaos("ps", "--runs", runs)[1]
        == f"no run is live below {runs}, and nothing is left of any\n"
    )
    assert json.loads(chaos("ps", "--runs", runs, "--format", "json")[1]) == []


def test_ps_does_not_list_what_is_gone_already(
    chaos: Chaos, dead: RunDirectory, marked: subprocess.Popen[bytes]
) -> None:
    ledger = Ledger(dead.ledger)
    gone = subprocess.Popen(["sleep", "600"], start_new_session=True)
    for record in (
        KillProcess.of(gone.pid, "w0"),
        KillSession.of(gone.pid, "w0"),
        KillProcess.of(marked.pid, "w1"),
    ):
        ledger.will(record)
    gone.kill()
    gone.wait(timeout=120)
    out = chaos("ps", "--runs", dead.root.parents[1])[1]
    assert f"kill process {marked.pid} (w1)" in out and "(w0)" not in out
