"""A hundred harnesses killed at a random write each, in simulation: what they made is gone after a
heal.

The run is the real one (``chaos run --launcher sim``) in a forked process that ends without a word
at its n-th write, in half of the cases with only half of the bytes written. Directories stand for
what a real run makes: one for each process and one for each process that is stopped.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.portions import first_in_test
from trainchaos import reports
from trainchaos.chaos.cli import invoke
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.inject.sites import OccurrenceTarget
from trainchaos.harness.inject.sites.process import ProcessHandle, ProcessSite
from trainchaos.harness.run import heal
from trainchaos.harness.sim.cluster import SimCluster
from trainchaos.harness.undo import live
from trainchaos.harness.undo.ledger import Ledger, read_open
from trainchaos.harness.undo.records import RemoveTree
from trainchaos.recovery.process.host import Exited

KILLS = 100
BATCHES = 25
KILLED = 99
MARGIN = 10  # a run that finds an older one in its place may make a few writes less
SCENARIO = """
version: 1
name: sim
seed: 5
workload: {kind: mlp, ranks: 3, steps: 14, global_batch: 12, checkpoint: {every: 4}}
recovery: hot-spare
launcher: sim
faults:
  - {id: kill, kind: process-kill, target: {rank: 2}, at: {step: 5, phase: backward}}
  - {id: stop, kind: process-stop, target: {rank: 0}, at: {step: 9, phase: forward}, duration: 2s}
"""


class Killed(Exception):
    """Never raised: the process ends instead."""


class Trap:
    """Ends the process at its n-th write or file operation; ``torn``: in the middle of it."""

    def __init__(self, number: int, *, torn: bool) -> None:
        self.left = number
        self._torn = torn
        self._write = os.write
        os.write = self._on_write
        for owner, name in (
            (os, "replace"),
            (os, "mkdir"),
            (shutil, "rmtree"),
            (os, "unlink"),
            (os, "fsync"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _on_write(self, fd: int, data: bytes) -> int:
        self.left -= 1
        if not self.left:
            if self._torn:
                self._write(fd, data[: len(data) // 2])
            os._exit(KILLED)
        return self._write(fd, data)

    def _counted(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            self.left -= 1
            if not self.left:
                os._exit(KILLED)
            return act(*arguments, **more)

        return counted


@pytest.fixture(autouse=True)
def a_world_beside_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world stands for the machine, of which records name anything; in place of processes and
    mounts it has directories, which a run has only in its own.
    """
    monkeypatch.setattr(RemoveTree, "stray", lambda record, run: "")


def make_world(world: Path) -> None:
    """Have simulated processes and stops leave something on disk, written down before it
    is made.
    """
    spawn, wait, signal_process, aim_at = (
        SimCluster.spawn,
        SimCluster.wait,
        ProcessHandle.signal,
        ProcessSite._aim,
    )

    def spawning(cluster: SimCluster, name: str, *how: str) -> int:
        place = world / f"process-{name}-{os.getpid()}"
        cluster.records = getattr(cluster, "records", {})  # type: ignore[attr-defined]
        ledger = Ledger(Path(cluster._config.events).parents[1] / "ledger.jsonl")
        cluster.records[name] = (ledger, ledger.will(RemoveTree(path=place, inside=world)), place)  # type: ignore[attr-defined]
        place.mkdir()
        return spawn(cluster, name, *how)

    def waiting(cluster: SimCluster, timeout_s: float) -> list[Any]:
        reports = wait(cluster, timeout_s)
        for report in reports:
            if isinstance(report, Exited):
                ledger, record, place = cluster.records[report.process]  # type: ignore[attr-defined]
                place.rmdir()
                ledger.undone(record, "ended")
        return reports

    def signalling(handle: ProcessHandle, signum: int) -> None:
        place = world / f"stopped-{handle.process}-{os.getpid()}"
        if signum == signal.SIGSTOP:
            place.mkdir()
        elif signum == signal.SIGCONT:
            shutil.rmtree(place, ignore_errors=True)
        signal_process(handle, signum)

    def aiming(site: ProcessSite, *arguments: Any) -> OccurrenceTarget:
        aim = aim_at(site, *arguments)
        place = world / f"stopped-{aim.processes[0]}-{os.getpid()}"
        return OccurrenceTarget(**{**vars(aim), "undo": (RemoveTree(path=place, inside=world),)})

    SimCluster.spawn, SimCluster.wait = spawning, waiting  # type: ignore[method-assign]
    ProcessHandle.signal, ProcessSite._aim = signalling, aiming  # type: ignore[method-assign]


def in_child(act: Callable[[], int]) -> int:
    """Exit code of a forked process that does something."""
    child = os.fork()
    if child == 0:
        code = 98
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_until(folder: Path, number: int, *, torn: bool, count_to: Path | None = None) -> int:
    """Run the scenario in a child that is killed at its n-th write."""

    def act() -> int:
        make_world(folder / "world")
        reports.render_all = lambda run, results: []  # when it writes them nothing is left to heal
        trap = Trap(number, torn=torn)
        code = invoke(["run", str(folder / "sim.yaml"), "--runs", str(folder / "runs"), "-q"])
        if count_to:
            count_to.write_text(str(number - trap.left))
        return code

    return in_child(act)


def prepare(folder: Path) -> None:
    """The scenario and an empty world."""
    (folder / "world").mkdir()
    (folder / "sim.yaml").write_text(SCENARIO)


def left(folder: Path) -> list[str]:
    """Everything of any run that is not over."""
    found = [str(path) for path in (folder / "world").iterdir()]
    found += [str(path) for path in (folder / "runs").glob(f"*/*/{live.FILE}")]
    found += [str(path) for path in (folder / "runs").glob("*/*/checkpoints/*")]
    ledgers = (folder / "runs").glob("*/*/ledger.jsonl")
    return found + [str(entry) for path in ledgers for entry in read_open(path)]


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many writes a run that nobody kills makes; it leaves nothing."""
    folder = tmp_path_factory.mktemp("whole")
    prepare(folder)
    assert run_until(folder, 10**9, torn=False, count_to=folder / "count") == 0
    assert left(folder) == []
    return int((folder / "count").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("batch", first_in_test(BATCHES, 1))
def test_nothing_is_left_of_a_killed_harness(memory: Path, writes: int, batch: int) -> None:
    prepare(memory)
    rng = random.Random(batch)
    killed = dirty = 0
    for _ in range(KILLS // BATCHES):
        number, torn = rng.randint(1, writes - MARGIN), rng.random() < 0.5
        code = run_until(memory, number, torn=torn)
        assert code == KILLED, f"write {number} of {writes}: ended with {code}"
        killed += 1
        dirty += bool(left(memory))
        if rng.random() < 0.5:  # the one who heals is killed as well
            in_child(
                lambda: (Trap(rng.randint(1, 12), torn=True), heal.heal_all(memory / "runs"), 0)[-1]
            )
        healed = heal.heal_all(memory / "runs")
        assert heal.exit_code(healed) == 0, (number, torn, healed)
        assert left(memory) == [], (number, torn, healed)
        assert heal.heal_all(memory / "runs") == [], (number, torn)
    assert killed == KILLS // BATCHES and dirty, "no kill left anything: the test tests nothing"


@pytest.mark.slow
def test_the_next_run_heals_the_dead_one(memory: Path, writes: int) -> None:
    prepare(memory)
    assert run_until(memory, writes // 3, torn=False) == KILLED
    assert left(memory)
    assert run_until(memory, 10**9, torn=False) == 0
    assert left(memory) == []


@pytest.mark.slow
def test_two_runs_at_once_do_not_heal_each_other(memory: Path) -> None:
    """A run whose harness is alive is not touched, by a heal or by a run that starts beside it."""
    prepare(memory)
    place = memory / "world" / "made"
    run = RunDirectory(memory / "runs" / "sim" / "first")
    run.root.mkdir(parents=True)
    with heal.guarded(run) as ledger:
        ledger.will(RemoveTree(path=place, inside=place.parent))
        place.mkdir()
        assert [one.state for one in heal.heal_all(memory / "runs")] == ["alive"]
        assert run_until(memory, 10**9, torn=False) == 0
        assert place.exists() and live.read_holder(run) is not None
    assert left(memory) == []
