"""Jobs that ``chaos fuzz --real`` plays: what is asked of one that has ended, and of the machine
that it was on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.running import readable
from tests.support.search.fuzzed import KILL, LIMIT_S, tree_of
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.harness.fuzz.play import child, leftovers, real
from trainchaos.harness.fuzz.play.child import child_program, ends, tail_of
from trainchaos.harness.fuzz.play.leftovers import MARK, MachineBefore, clean, left_by, marked
from trainchaos.harness.fuzz.play.oracle import find_in
from trainchaos.harness.fuzz.play.play import PlayResult
from trainchaos.harness.fuzz.play.real import RealPlayer, RunExit, findings_of, played_of
from trainchaos.harness.host import shared_memory
from trainchaos.harness.host.processes import start_time
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import ArmResult, Finding, Results
from trainchaos.harness.launch import cgroups
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import RemoveCgroup

CATALOGUE = build_catalogue()
ROOT = Path(__file__).resolve().parents[3]
FOUND = ROOT / "scenarios" / "regressions"
TRACE = f"""it ran
Traceback (most recent call last):
  File "/a/chaos/cli.py", line 7, in invoke
    run()
  File "{ROOT}/harness/run/runner.py", line 70, in _play
    raise KeyError(1)
KeyError: 1
this is a defect of chaos itself"""


@pytest.mark.real
def test_what_this_machine_cannot_play_is_refused_and_no_find() -> None:
    tree = tree_of("agents", faults=[{"id": "f0", "kind": "oom-kill", "at": {"step": 10}}])
    played = RealPlayer(catalogue=CATALOGUE).play(tree)
    assert "needs memory" in played.refused and find_in(tree, played) is None


# ---- what a run that has ended shows


def results_of(verdict: str, **arms: Finding) -> Results:
    made = [
        ArmResult.model_construct(arm=name, outcome="completed", invariants={"liveness": finding})
        for name, finding in arms.items()
    ]
    return Results.model_construct(arms=made, verdict=verdict, reason="goodput is 0.1")


PASS = Finding(verdict="pass", witness="")
GOOD = results_of("pass", control=PASS, faulted=PASS)


AGENT = "crash: KeyError in harness/run/runner.py _play"


@pytest.mark.parametrize(
    ("ended", "without", "passed"),
    [  # what it shows if it left no results, and with results in which all passes
        (RunExit(code=2, said="no such kind"), None, None),
        (RunExit(code=7, said="skipped"), None, None),
        (
            RunExit(code=2, said="no such kind", left=("process 7 chaos",)),
            "crash: exit code 2: no such kind",
            "crash: exit code 2: goodput is #",
        ),
        (RunExit(code=0, said="pass"), "crash: exit code 0: pass", None),
        (
            RunExit(code=4, said="cannot write /tmp/x/7: no"),
            "crash: exit code 4: cannot write PATH no",
            "crash: exit code 4: goodput is #",
        ),
        (
            RunExit(code=-11, said=""),
            "crash: exit code -11: ",
            "crash: exit code -11: goodput is #",
        ),
        (RunExit(code=4, said=TRACE), AGENT, AGENT),
        (RunExit(code=1, said=TRACE), AGENT, AGENT),
        (RunExit(code=143, said="", overdue=True), "crash: no end", "crash: no end"),
        (RunExit(code=0, said="", left=("mount of /x",)), "crash: exit code 0: ", "left behind"),
        (RunExit(code=5, said=""), "crash: exit code 5: ", "left behind"),
    ],
)
def test_how_it_ended_counts(
    ended: RunExit, without: str | None, passed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for results, key in ((None, without), (GOOD, passed)):
        monkeypatch.setattr(real, "_results", lambda run, results=results: results)
        found = find_in(tree_of("local"), played_of(ended, None, {}))
        assert (found.key if found else None) == key


def test_a_verdict_that_no_checker_explains_and_an_arm_that_is_missing_are_findings() -> None:
    assert findings_of(GOOD) == {
        "control: liveness": PASS,
        "faulted: liveness": PASS,
    }
    unsaid = findings_of(results_of("fail", control=PASS, faulted=PASS))["run: verdict"]
    assert (unsaid.verdict, unsaid.witness) == ("fail", "goodput is 0.1")
    assert (
        findings_of(results_of("inconclusive", control=PASS))["run: arms"].witness
        == "there is no faulted arm"
    )


def test_a_traceback_of_an_agent_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "_results", lambda run: GOOD)
    run = RunDirectory(tmp_path)
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "n1.log").write_text(TRACE)
    found = find_in(tree_of("agents"), played_of(RunExit(code=0, said=""), run, {}))
    assert found is not None and found.key == "crash: KeyError in harness/run/runner.py _play"


@pytest.mark.parametrize(
    ("witness", "launcher", "verdict", "excused"),
    [
        ("the machine was too busy: its ranks stood; step 30 of 30", "local", "inconclusive", True),
        ("the machine was too busy: its ranks stood; step 30 of 30", "sim", "inconclusive", False),
        ("the machine was too busy: its ranks stood; step 30 of 30", "local", "fail", False),
        (
            "step 30 of 30; at 0.3; but in 0.20 s in all, too short to tell: raise workload.steps",
            "local",
            "inconclusive",
            True,
        ),
        ("nobody knows: the machine was too busy: it", "local", "inconclusive", False),
    ],
)
def test_a_busy_machine_excuses_a_real_run_alone(
    witness: str, launcher: str, verdict: Any, excused: bool
) -> None:
    played = PlayResult(findings={"faulted: liveness": Finding(verdict=verdict, witness=witness)})
    assert (find_in(tree_of(launcher), played) is None) == excused


# ---- processes


def test_what_a_run_left_is_seen_and_ended(tmp_path: Path) -> None:
    before = MachineBefore(token="a-token", since=start_time(os.getpid()))
    env = {**os.environ, MARK: "a-token"}
    with subprocess.Popen(["sleep", str(LIMIT_S)], env=env, start_new_session=True) as stays:
        assert left_by(before, None, tmp_path, set()) == (f"process {stays.pid} sleep {LIMIT_S}",)
        clean(before, None)
        assert stays.wait(LIMIT_S) == -signal.SIGKILL and not marked(before)


class Machine:
    """Places of a machine that are looked at, below a directory; ``run``: of a run of
    process 77.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.queues = root, ["qdisc noqueue 0: dev lo root refcnt 2"]
        self.place = root / "place"
        self.run = RunDirectory(self.place / "runs" / "fuzz" / "2026-01-01-5")
        for path in (
            self.run.root,
            *(root / name for name in ("netns", "net", "net/lo", "cpu", "shm")),
        ):
            path.mkdir(parents=True, exist_ok=True)
        self.mounts = [("/", "/dev/x")]
        for name, value in (("NAMESPACES", "netns"), ("DEVICES", "net")):
            monkeypatch.setattr(leftovers, name, root / value)
        monkeypatch.setattr(leftovers, "SETTLE_S", 0.0)
        monkeypatch.setattr(leftovers, "_queues", lambda: frozenset(self.queues))
        monkeypatch.setattr(leftovers, "mounts", lambda: self.mounts)
        monkeypatch.setattr(cgroups, "ROOT", root)
        monkeypatch.setattr(shared_memory, "SHM", root / "shm")

    def mount(self) -> None:
        self.mounts.append((f"{self.run.root}/checkpoints", "none"))

    def ledger(self) -> None:
        Ledger(self.run.ledger).will(RemoveCgroup(path=self.root / "cpu" / "chaos-x"))


LEFT: dict[str, tuple[Callable[[Machine], object], str]] = {
    "group": (
        lambda m: (m.root / "cpu" / "chaos-2026-01-01-5-a.faulted-77-w0").mkdir(),
        "control group ",
    ),
    "mount": (Machine.mount, "mount of "),
    "memory": (lambda m: (m.root / "shm" / "torch_77_1").touch(), "shared memory torch_77_1"),
    "namespace": (lambda m: (m.root / "netns" / "n0").touch(), "network namespace n0"),
    "queue": (
        lambda m: m.queues.append("qdisc netem 1: dev lo root"),
        "queue: qdisc netem 1: dev lo root",
    ),
    "ledger": (Machine.ledger, "open in the ledger: remove the control group "),
    "live": (lambda m: (m.run.root / "live.json").touch(), "the run is not over"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_the_machine_shows_to_be_left_is_told(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    before = MachineBefore(token="a-token", since=start_time(os.getpid()))
    assert left_by(before, machine.run, machine.place, {77}) == ()
    leave, said = LEFT[what]
    leave(machine)
    (found,) = left_by(before, machine.run, machine.place, {77})
    assert found.startswith(said)


def test_what_others_do_meanwhile_is_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    before = MachineBefore(token="a-token", since=start_time(os.getpid()))
    (tmp_path / "cpu" / "chaos-2026-01-01-5-a.faulted-78-w0").mkdir()
    (tmp_path / "shm" / "torch_78_1").touch()
    (tmp_path / "net" / "veth0").mkdir()
    machine.queues.append("qdisc netem 1: dev veth0 root")
    assert left_by(before, machine.run, machine.place, {77}) == ()


def test_a_child_that_does_not_end_is_killed_with_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "END_LIMIT_S", 0.2)
    script = "trap '' TERM; sleep 60 & echo $!; wait"
    output = tmp_path / "output"
    with child_program(["sh", "-c", script], env=os.environ, output=output) as one:
        until_s = time.monotonic() + LIMIT_S
        while not tail_of(output) and time.monotonic() < until_s:
            ends(one, 0.01)
        held = os.pidfd_open(int(tail_of(output)))
    assert one.returncode == -signal.SIGKILL
    assert readable(held), "it has not ended"
    os.close(held)


# ---- for real


@pytest.mark.real
@pytest.mark.long
def test_a_kill_is_played_for_real_and_is_no_find(tmp_path: Path) -> None:
    tree = tree_of("local")
    played = RealPlayer(catalogue=CATALOGUE, root=tmp_path).play(tree)
    assert find_in(tree, played) is None, find_in(tree, played)
    assert (played.refused, dict(played.outcomes)) == (
        "",
        {"control": "completed", "faulted": "completed"},
    )
    assert ("hit", "training", "process-kill", "backward") in played.reached
    assert not list(tmp_path.iterdir())


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize(
    "path", [*FOUND.glob("local-*.yaml"), *FOUND.glob("agents-*.yaml")], ids=lambda path: path.stem
)
def test_what_was_found_for_real_is_mended(path: Path) -> None:
    tree = YAML(typ="safe", pure=True).load(path)
    played = RealPlayer(catalogue=CATALOGUE).play(tree)
    found = find_in(tree, played)
    assert (played.refused, found and found.text) == ("", None)


@pytest.mark.real
@pytest.mark.long
def test_what_is_expected_and_does_not_come_is_a_find() -> None:
    tree = tree_of("local", faults=[{**KILL, "expect": {"outcome": "masked"}}])
    found = find_in(tree, RealPlayer(catalogue=CATALOGUE).play(tree))
    assert found is not None and found.key.startswith("faulted: expectation fail: ")


@pytest.mark.real
@pytest.mark.long
def test_a_run_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    before = MachineBefore(token="none", since=start_time(os.getpid()))
    played = RealPlayer(catalogue=CATALOGUE, root=tmp_path, longest_s=2.0).play(tree_of("local"))
    assert (played.place, played.left) == ("no end", ())
    assert left_by(before, None, tmp_path, set()) == () and not list(tmp_path.iterdir())


@pytest.mark.real
@pytest.mark.long
def test_nodes_with_agents_are_played_too() -> None:
    tree = {**tree_of("agents"), "launcher": {"kind": "agents", "nodes": 2}}
    played = RealPlayer(catalogue=CATALOGUE).play(tree)
    assert find_in(tree, played) is None, find_in(tree, played)
    assert played.outcomes["faulted"] == "completed"


def playing(search: int) -> bool:
    """Whether a job of that search is under way."""
    for worker in Path(f"/proc/{search}/task/{search}/children").read_text().split():
        if Path(f"/proc/{worker}/task/{worker}/children").read_text().split():
            return True
    return False


@pytest.mark.real
@pytest.mark.long
def test_ctrl_c_ends_the_job_that_is_under_way(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    search = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainchaos",
            "fuzz",
            "--real",
            "--budget",
            "5m",
            "--jobs",
            "64",
            "--into",
            f"{tmp_path}/x",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    before = MachineBefore(token="none", since=start_time(search.pid))
    try:
        until_s = time.monotonic() + LIMIT_S
        while not playing(search.pid) and time.monotonic() < until_s:
            assert search.poll() is None
        search.send_signal(signal.SIGINT)
        said, _ = search.communicate(timeout=LIMIT_S)
    finally:
        search.kill()
        search.wait(LIMIT_S)
    assert (search.returncode, "until it was interrupted" in said) == (130, True), said
    assert "at a time, as each takes 4 cores" in said
    assert not [path for path in tmp_path.iterdir() if path.name != "x"]
    assert left_by(before, None, tmp_path, set()) == ()
    theirs = [environment(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    assert not any(f"{MARK}=".encode() in one and bytes(tmp_path) in one for one in theirs)


def environment(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
