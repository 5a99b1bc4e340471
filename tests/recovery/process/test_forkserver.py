"""Real rank processes of the local launcher: ours, reaped by pidfd, and gone when the harness is
gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.open_files import open_files
from tests.support.running import readable
from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.scenario.model import (
    Cell,
    CheckpointSpec,
    RecoverySpec,
    Scenario,
    WorkloadSpec,
)
from trainchaos.harness.host import processes
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launchers.local import Local, LocalCluster, LocalSession
from trainchaos.harness.workloads.mlp import Mlp
from trainchaos.recovery.process.host import Exited, MessageReceived, Report
from trainchaos.recovery.transport.wire import Abort, Ready, Stop

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

HARNESS = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.recovery.process.test_forkserver import make_setup, until_ready
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launchers.local import Local

with Local().session([], RunDirectory(Path())) as session:
    cluster = session.cluster(make_setup(Path(sys.argv[1])))
    pids = [cluster.spawn(name, "worker", "warm", "cpu:0") for name in ("w0", "w1")]
    pids.append(cluster.spawn("w2", "worker", "cold", "cpu:0"))
    until_ready(cluster, 3)
    print(session.zygote.process.pid, *pids, flush=True)
    sys.stdin.read()
"""


def make_setup(folder: Path, *, params: dict[str, object] | None = None) -> ArmSetup:
    """An arm of the smallest workload."""
    workload = WorkloadSpec(
        kind="mlp",
        params=params or {"samples": 64},
        ranks=2,
        steps=10,
        global_batch=4,
        checkpoint=CheckpointSpec(every=5),
    )
    recovery = RecoverySpec(strategy="drop-replica")
    scenario = Scenario(version=1, name="zygote", workload=workload, recovery=recovery)
    run = RunDirectory(folder)
    run.make_arm("arm")
    cell = Cell(id="default", params={}, scenario=scenario)
    return ArmSetup(
        id="arm",
        cell=cell,
        repeat=0,
        arm="faulted",
        seed=1,
        run=run,
        data=Mlp(samples=64).prepare(folder),
    )


def wait_for(cluster: LocalCluster, enough: Callable[[list[Report]], bool]) -> list[Report]:
    """Reports until there are enough of them."""
    reports: list[Report] = []
    deadline = time.monotonic() + DEADLINE_S
    while not enough(reports):
        assert time.monotonic() < deadline, reports
        reports.extend(cluster.wait(0.1))
    return reports


def until_ready(cluster: LocalCluster, count: int) -> None:
    """So many processes are built."""
    wait_for(
        cluster,
        lambda r: (
            sum(isinstance(x, MessageReceived) and isinstance(x.message, Ready) for x in r) >= count
        ),
    )


def until_gone(cluster: LocalCluster, *names: str) -> dict[str, Exited]:
    """These processes have ended."""
    found = wait_for(
        cluster, lambda r: {x.process for x in r if isinstance(x, Exited)} >= set(names)
    )
    return {x.process: x for x in found if isinstance(x, Exited)}


@pytest.fixture(scope="module")
def session() -> Iterator[LocalSession]:
    with Local().session([], RunDirectory(Path())) as session:
        assert isinstance(session, LocalSession)
        yield session


@pytest.fixture
def cluster(session: LocalSession, tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = session.cluster(make_setup(tmp_path))
    yield cluster
    left = cluster.close()
    assert (left.processes, left.ports, left.shared_memory) == ([], [], [])


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])


@pytest.mark.parametrize("mode", ["warm", "cold"])
def test_a_rank_is_our_child_ready_and_ends_well_when_asked(
    cluster: LocalCluster, mode: str
) -> None:
    pid = cluster.spawn("w0", "worker", mode, "cpu:0")
    assert parent_of(pid) == os.getpid()
    until_ready(cluster, 1)
    assert os.getsid(pid) == pid, "it does not get our terminal's signals"
    assert cluster.os_state("w0") in "SR"
    assert cluster.send("w0", Stop())
    assert until_gone(cluster, "w0")["w0"].exit_code == 0
    assert cluster.os_state("w0") == "X"
    assert not cluster.send("w0", Stop())
    cluster.signal("w0", signal.SIGKILL)  # no error, and nobody else is hit


# SIGTERM is a notice
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_signal_is_reported_as_the_one_it_was(
    cluster: LocalCluster, signum: signal.Signals
) -> None:
    pid = cluster.spawn("w0", "worker", "warm", "cpu:0")
    until_ready(cluster, 1)
    before = time.monotonic_ns()
    cluster.signal("w0", signum)
    gone = until_gone(cluster, "w0")["w0"]
    assert (gone.exit_code, gone.signal, gone.how) == (None, signum, f"signal {int(signum)}")
    assert before < gone.time_ns <= time.monotonic_ns()
    assert processes.state(pid) == "X", "reaped"
    assert cluster.mark("w0").last_seq >= 0, "its mark outlives it"


def test_a_rank_that_cannot_be_built_ends_with_its_error_in_log_and_events(
    session: LocalSession, tmp_path: Path
) -> None:
    setup = make_setup(tmp_path)
    setup.data.path.unlink()
    cluster = session.cluster(setup)
    cluster.spawn("w0", "worker", "warm", "cpu:0")
    gone = until_gone(cluster, "w0")["w0"]
    cluster.close()
    assert gone.exit_code == 1
    assert "No such file" in (setup.run.logs("arm") / "w0.log").read_text()
    assert '"error_raised"' in (setup.run.events("arm") / "w0.jsonl").read_text()


def test_closing_ends_the_stopped_the_starting_and_the_ready(
    session: LocalSession, tmp_path: Path
) -> None:
    cluster = session.cluster(make_setup(tmp_path))
    pids = [
        cluster.spawn("w0", "worker", "warm", "cpu:0"),
        cluster.spawn("w1", "spare", "warm", "cpu:1"),
    ]
    until_ready(cluster, 2)
    cluster.signal("w0", signal.SIGSTOP)
    pids.append(cluster.spawn("w2", "worker", "warm", "cpu:0"))
    pids.append(cluster.spawn("w3", "worker", "cold", "cpu:0"))
    left = cluster.close()
    assert (left.processes, left.ports, left.shared_memory) == ([], [], [])
    assert [processes.state(pid) for pid in pids] == ["X"] * 4


def test_a_stopped_rank_that_reads_nothing_does_not_hold_up_its_supervisor(
    cluster: LocalCluster,
) -> None:
    cluster.spawn("w0", "worker", "warm", "cpu:0")
    until_ready(cluster, 1)
    cluster.signal("w0", signal.SIGSTOP)
    wait_until_stopped(cluster, "w0")
    messages = 0
    while cluster.send("w0", Abort(generation=0)):
        messages += 1
        assert messages < 100_000, "its buffer never fills"


def wait_until_stopped(cluster: LocalCluster, name: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while cluster.os_state(name) != "T":
        assert time.monotonic() < deadline
        cluster.wait(0.01)


@pytest.mark.long
def test_many_ranks_come_and_go_without_leaving_descriptors(
    session: LocalSession, tmp_path: Path
) -> None:
    counts = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        cluster = session.cluster(make_setup(tmp_path / str(number)))
        for rank in range(4):
            cluster.spawn(f"w{rank}", "worker", "warm", "cpu:0")
        cluster.close()
        counts.append(open_files())
    assert counts[2] <= counts[0] + 1, counts


def test_a_zygote_that_never_came_up_is_said_in_words(tmp_path: Path) -> None:
    with Local().session([], RunDirectory(Path())) as session:
        assert isinstance(session, LocalSession)
        session.zygote.process.kill()
        with pytest.raises(InfrastructureError, match="did not start"):
            session.cluster(make_setup(tmp_path))


@pytest.mark.long
def test_a_zygote_that_is_gone_is_said_in_words(tmp_path: Path) -> None:
    with Local().session([], RunDirectory(Path())) as session:
        assert isinstance(session, LocalSession)
        cluster = session.cluster(make_setup(tmp_path))
        session.zygote.process.kill()
        session.zygote.process.wait(timeout=DEADLINE_S)
        try:
            with pytest.raises(InfrastructureError, match="is gone"):
                cluster.spawn("w0", "worker", "warm", "cpu:0")
        finally:
            cluster.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "stop",
    [pytest.param(False, id="running"), pytest.param(True, id="stopped", marks=pytest.mark.long)],
)
def test_nothing_outlives_a_harness_that_is_killed(tmp_path: Path, stop: bool) -> None:
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(tmp_path), str(ROOT)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    fds: list[int] = []
    try:
        assert harness.stdout is not None
        assert readable(harness.stdout), "the harness did not start"
        pids = [int(word) for word in harness.stdout.readline().split()]
        assert len(pids) == 4
        fds = [os.pidfd_open(pid) for pid in pids]
        if stop:
            for fd in fds[1:]:
                signal.pidfd_send_signal(fd, signal.SIGSTOP)
        harness.kill()
        assert harness.wait(DEADLINE_S) == -signal.SIGKILL
        assert_all_end(fds)
    finally:
        harness.kill()
        harness.wait(DEADLINE_S)
        for fd in fds:
            os.close(fd)


def assert_all_end(fds: list[int]) -> None:
    """Each process behind these descriptors ends in time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    left, deadline = set(fds), time.monotonic() + 10.0
    while left:
        remaining = deadline - time.monotonic()
        assert remaining > 0, f"{len(left)} processes outlive their harness"
        for fd, _ in poll.poll(remaining * 1000):
            left.discard(fd)
            poll.unregister(fd)
