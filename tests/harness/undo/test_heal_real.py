"""Twenty real harnesses killed at a random moment each: after a heal, nothing of them is left on
the machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import chaos_run, until
from trainchaos.chaos.cli import invoke
from trainchaos.harness.host import processes, shared_memory
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.run import heal
from trainchaos.harness.undo import live
from trainchaos.harness.undo.base import mounts
from trainchaos.harness.undo.ledger import read_open
from trainchaos.harness.undo.records import MARKER

pytestmark = [pytest.mark.real, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
KILLS, SOME = 20, 1
SCENARIOS = (
    "control/store-kill",
    "gpu/gpu-hang",
    "link/short-partition",
    "node/node-kill",
    "process/oom-kill",
    "process/preemption-notice",
    "storage/read-only",
    "storage/torn-checkpoint",
)
SOAK = pytest.mark.long
LOOK_S = 0.005
DEADLINE_S = 120.0
SCENARIO = """
version: 1
name: killed
seed: 5
workload: {kind: mlp, ranks: 3, steps: 60, global_batch: 12, checkpoint: {every: 5}}
recovery: hot-spare
baseline: none
faults:
  - {id: slow, kind: link-delay, params: {delay_ms: 5},
      target: {rank: 1}, at: {step: 6}, duration: 2s}
  - {id: stop, kind: process-stop, target: {rank: 0}, at: {step: 19, phase: forward}, duration: 1s}
  - {id: kill, kind: process-kill, target: {rank: 2}, at: {step: 30, phase: backward}}
"""
# on a mount of its own, which only root makes
FULL = "  - {id: full, kind: disk-full, at: {step: 4}, duration: 1s}\n"
LATEST = 450  # of about 500 lines that such a run writes


class Doomed:
    """A ``chaos run`` in a process of its own, watched until it is killed."""

    def __init__(self, folder: Path, scenario: str, name: str = "killed") -> None:
        self.runs = folder / "runs"
        self._name = name
        path = folder / f"{name}.yaml"
        path.write_text(scenario.replace("name: killed", f"name: {name}"))
        self.since_ns = time.time_ns()
        self.process = subprocess.Popen(
            chaos_run(path, self.runs, "--seed", "5", "-q"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.listeners: dict[str, int] = {}  # of it, when it was killed: inode -> port

    def lines(self) -> int:
        """How far it is: lines written by anybody."""
        logs = [
            *self.runs.glob(f"{self._name}/*-5/ledger.jsonl"),
            *self.runs.glob(f"{self._name}/*-5/events/*/*.jsonl"),
        ]
        return sum(path.read_bytes().count(b"\n") for path in logs)

    def wait_for(self, lines: int) -> None:
        """Wait until so many lines are written, or it is over."""
        deadline = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while self.lines() < lines and self.process.poll() is None:
            assert time.monotonic() < deadline, f"only {self.lines()} lines"
            pause.wait(LOOK_S)

    def kill_after(self, lines: int) -> bool:
        """Kill it once so many lines are written; False: it was over before."""
        self.wait_for(lines)
        self.listeners = listening(self.process.pid, *(pid for pid, _ in self.marked()))
        self.process.kill()
        return self.process.wait(timeout=DEADLINE_S) < 0

    @property
    def run(self) -> RunDirectory | None:
        """Its directory, if it came to that."""
        found = [path for path in self.runs.glob(f"{self._name}/*-5") if not path.is_symlink()]
        return RunDirectory(found[0]) if found else None

    def records(self) -> list[dict[str, Any]]:
        """What its ledger says it was about to do."""
        text = self.run.ledger.read_text() if self.run and self.run.ledger.exists() else ""
        return [json.loads(line)["undo"] for line in text.splitlines() if '"will"' in line]

    def marked(self) -> list[tuple[int, int]]:
        """Its processes, by the marker they carry."""
        markers = [record["marker"] for record in self.records() if record["do"] == "kill-marked"]
        return [
            row
            for row in processes.since(0)
            for m in markers
            if processes.environment_has(row[0], f"{MARKER}={m}")
        ]

    def ports(self) -> list[str]:
        """Those of its ports that are still open."""
        there = listeners()  # by inode: a port that is free again may be another run's by now
        return [f"port {port}" for inode, port in self.listeners.items() if inode in there]

    def left(self) -> list[str]:
        """Everything of it that is still there, once those who are exiting have exited: a process
        gives its memory up, by which it is known, before its sockets.
        """
        with suppress(AssertionError):
            until(lambda: not self.ports())
        found = [f"process {pid}" for pid, _ in self.marked()]
        for record in self.records():
            if record["do"] == "kill-session":
                found += [
                    f"process {pid} of {record['name']}"
                    for pid in processes.in_sessions({record["sid"]})
                ]
            if record["do"] in ("remove-tree", "remove-cgroup") and Path(record["path"]).exists():
                found.append(record["path"])
        found += self.ports()
        found += [str(path) for path in shared_memory.abandoned(self.since_ns, time.time_ns())]
        found += [place for place, _ in mounts() if place.startswith(str(self.runs.resolve()))]
        if self.run is not None:
            found += [live.FILE] if (self.run.root / live.FILE).exists() else []
            found += [f"record {entry}" for entry in read_open(self.run.ledger)]
        return found


def listeners() -> dict[str, int]:
    """TCP ports on which somebody of this machine listens, by the inodes of their sockets."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {row[9]: int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}


def listening(*pids: int) -> dict[str, int]:
    """Those of them on which one of these processes does."""
    ports, found = listeners(), {}
    for pid in pids:
        try:
            links = [os.readlink(link.path) for link in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes = {link[8:-1] for link in links if link.startswith("socket:")}
        found |= {inode: port for inode, port in ports.items() if inode in inodes}
    return found


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Doomed]:
    """One that is gone afterwards, whatever the test did."""
    one = Doomed(tmp_path, SCENARIO + (FULL if os.geteuid() == 0 else ""))
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(timeout=DEADLINE_S)
        heal.heal_all(one.runs)


@pytest.mark.parametrize(
    "seed", [*range(SOME), *(pytest.param(n, marks=SOAK) for n in range(SOME, KILLS))]
)
def test_nothing_is_left_of_a_killed_harness(
    doomed: Doomed, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = random.Random(seed).randint(0, LATEST)
    killed = doomed.kill_after(lines)
    assert invoke(["heal", "--runs", str(doomed.runs)]) == 0
    assert doomed.left() == [], (lines, capsys.readouterr().out)
    capsys.readouterr()
    assert invoke(["heal", "--runs", str(doomed.runs)]) == 0
    assert capsys.readouterr().out == "nothing to heal\n"
    assert killed, f"{lines} lines came too late"


@SOAK
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_left_of_a_scenario_under_way(tmp_path: Path, scenario: str, seed: int) -> None:
    text = (ROOT / "scenarios" / f"{scenario}.yaml").read_text()
    doomed = Doomed(tmp_path, text, name=scenario.split("/")[1])
    try:
        doomed.kill_after(random.Random(f"{scenario}/{seed}").randint(20, LATEST))
        assert invoke(["heal", "--runs", str(doomed.runs)]) == 0
        assert doomed.left() == []
    finally:
        doomed.process.kill()
        doomed.process.wait(timeout=DEADLINE_S)
        heal.heal_all(doomed.runs)


# The first daemon keeps the environment it was given, the second has nothing of its parent.
DAEMONS = """
cd "$CHAOS_SCRATCH"
(setsid sleep 600 & echo $! > kept) ; (setsid env -i sleep 600 & echo $! > cleared)
for step in $(seq 100000); do echo "step $step"; sleep 0.02; done
"""


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.sample(1)
def test_daemons_of_a_command_go_with_its_harness(tmp_path: Path, guarded: bool) -> None:
    """Without its guard, killed in the same moment, what cleared its environment can no longer be
    told from others'.
    """
    daemons = DAEMONS if guarded else DAEMONS.replace("env -i ", "")
    workload = {
        "command": ["bash", "-c", daemons],
        "env": {"RANK": "0"},
        "ranks": 1,
        "steps": 100000,
        "progress": {"regex": "step (?P<step>[0-9]+)"},
    }
    scenario = {
        "version": 1,
        "name": "killed",
        "seed": 5,
        "workload": workload,
        "faults": [],
        "baseline": "none",
    }
    doomed = Doomed(tmp_path, json.dumps(scenario | {"invariants": ["liveness"]}))
    pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S

    def started() -> tuple[list[int], list[int]]:
        """The daemons, and the guards of their sessions, which are recorded once they are known."""
        found = [p.read_text() for p in doomed.runs.rglob("checkpoints/*/[kc]*e*")]
        guards = [r["sid"] for r in doomed.records() if r["do"] == "kill-session"]
        return [int(text) for text in found if text], guards

    try:
        while len((seen := started())[0]) < 2 or not seen[1]:
            assert time.monotonic() < deadline and doomed.process.poll() is None, (
                "the command did not start"
            )
            pause.wait(LOOK_S)
        pids, guards = seen
        held = {pid: processes.start_time(pid) for pid in pids}
        assert all(processes.is_same(pid, started) for pid, started in held.items())
        doomed.process.kill()
        for pid in guards if not guarded else ():
            os.kill(pid, signal.SIGKILL)
        doomed.process.wait(timeout=DEADLINE_S)
        assert invoke(["heal", "--runs", str(doomed.runs)]) == 0
        assert not [pid for pid, started in held.items() if processes.is_same(pid, started)]
        assert doomed.left() == []
    finally:
        doomed.process.kill()
        doomed.process.wait(timeout=DEADLINE_S)
        heal.heal_all(doomed.runs)


@pytest.mark.long
def test_a_heal_leaves_the_run_beside_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs in one directory; one is killed and healed while the other trains, and goes on to
    its end.
    """
    dead, alive = Doomed(tmp_path, SCENARIO), Doomed(tmp_path, SCENARIO, name="beside")
    try:
        alive.wait_for(60)
        assert dead.kill_after(60)
        assert invoke(["heal", "--runs", str(dead.runs)]) == 0
        assert "is alive: not touched" in capsys.readouterr().out
        assert dead.left() == []
        assert alive.process.wait(timeout=DEADLINE_S) in (0, 1, 3)
        assert alive.run is not None and (alive.run.root / "report.html").exists()
        assert alive.left() == []
    finally:
        for one in (dead, alive):
            one.process.kill()
            one.process.wait(timeout=DEADLINE_S)
        heal.heal_all(dead.runs)
