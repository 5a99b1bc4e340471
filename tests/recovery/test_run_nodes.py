"""``recovery.run --nodes``: ranks on nodes with agents, a coordinator that is killed for real, and
the next one.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.clusters.cluster import HOST, Cluster
from tests.support.running import EPOCHS, RECOVERABLE, STEPS, Running, kill, readable, until
from trainchaos.chaos.errors import InfrastructureError, LogError
from trainchaos.chaos.events.log import ORCHESTRATOR, EventWriter, Kind, read_actor
from trainchaos.recovery.cli.roster import LeastTaken
from trainchaos.recovery.cli.takeover_log import lock, read_takeover_log
from trainchaos.recovery.health.signs import HealthReport, ReportFile
from trainchaos.recovery.health.taints import TaintList
from trainchaos.recovery.nodes.link.clock import boot_id


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Digest of the job on one machine that nobody disturbs."""
    job = Running(tmp_path_factory.mktemp("unharmed"), "--ranks", "4", RECOVERABLE, EPOCHS)
    assert job.end() == 0, job.said
    return job.digest()


def generations(job: Running) -> list[int]:
    return [e.generation for e in job.of(ORCHESTRATOR, Kind.GENERATION_READY)]


def lost_coordinator(cluster: Cluster, *options: str) -> Running:
    """One that was killed in the middle of training."""
    job = cluster.job(*options)
    job.wait_for(lambda: job.trained(30))
    kill(job.process.pid)
    assert job.end() == -signal.SIGKILL
    return job


def assert_all_four_train(job: Running) -> None:
    """At the end, with one state; not that of an undisturbed job, since both spares were on the
    lost node and the group was smaller for a while.
    """
    assert len(job.of(ORCHESTRATOR, Kind.GENERATION_READY)[-1].data["members"]) == 4
    job.digest()


def agents_end_well(cluster: Cluster) -> None:
    for agent in cluster.agents:
        said = agent.communicate(timeout=60)[1]
        assert agent.returncode == 0 and "the run is over" in said, said


@pytest.mark.real
def test_ranks_train_on_while_their_coordinator_is_dead_and_another_adopts_them(
    cluster: Cluster, unharmed: dict[str, object]
) -> None:
    lost_coordinator(cluster)
    dead_at = cluster.committed()
    until(lambda: cluster.committed() > dead_at + 20)
    second = cluster.job()
    assert second.end() == 0, second.said
    assert (
        "took over 4 ranks" in second.said and f"completed: {STEPS} steps committed" in second.said
    )
    assert generations(second) == [1], "nobody had to stop for it"
    assert second.digest() == unharmed
    log = read_actor(second.events / f"{ORCHESTRATOR}.jsonl")
    assert not log.problems and log.ended
    agents_end_well(cluster)
    third = cluster.job()
    assert third.end() == 0 and "is over: completed" in third.said


@pytest.mark.real
@pytest.mark.long
def test_what_fails_while_nobody_supervises_is_recovered_by_the_next_one(
    cluster: Cluster, unharmed: dict[str, object]
) -> None:
    first = lost_coordinator(cluster)
    kill(first.pid_of("w1"))
    second = cluster.job()
    assert second.end() == 0, second.said
    assert "failure: rank 1 (w1), exit: " in second.said and "s4 takes over from w1" in second.said
    assert generations(second) == [1, 2]
    assert second.digest() == unharmed
    agents_end_well(cluster)


@pytest.mark.real
@pytest.mark.long
def test_coordinators_that_are_killed_at_any_moment_harm_nobody(
    cluster: Cluster, tmp_path: Path
) -> None:
    epochs, steps, moments = "60", 6 * STEPS, random.Random(11)
    (tmp_path / "unharmed").mkdir()
    unharmed = Running(tmp_path / "unharmed", "--ranks", "4", RECOVERABLE, epochs)
    assert unharmed.end() == 0, unharmed.said
    for _ in range(6):
        job = cluster.job(epochs=epochs)
        with suppress(subprocess.TimeoutExpired):  # starting, adopting, forming, training
            job.process.wait(timeout=moments.uniform(0.2, 6.0))
        assert job.process.poll() is None, job.end() or job.said
        kill(job.process.pid)
        job.end()
    last = cluster.job(epochs=epochs)
    assert last.end() == 0, last.said
    assert last.digest(steps) == unharmed.digest(steps)
    agents_end_well(cluster)


@pytest.mark.real
@pytest.mark.long
def test_a_node_that_is_lost_while_nobody_supervises_is_given_up(cluster: Cluster) -> None:
    lost_coordinator(cluster, "--spares", "2")
    kill(cluster.agents[1].pid)
    second = cluster.job("--spares", "2")
    assert second.end() == 0, second.said
    assert "node 1 is lost: its agent was not back" in second.said
    assert_all_four_train(second)


@pytest.mark.real
@pytest.mark.long
def test_a_lost_node_is_made_good_on_the_other(cluster: Cluster) -> None:
    job = cluster.job("--spares", "2")
    job.wait_for(lambda: job.trained(30))
    kill(cluster.agents[1].pid)
    assert job.end() == 0, job.said
    assert "node 1 is lost" in job.said
    spawned = job.of(ORCHESTRATOR, Kind.PROCESS_SPAWNED)
    assert {e.data["node"] for e in spawned[:6]} == {0, 1}
    assert {e.data["node"] for e in spawned[6:]} == {0}
    assert_all_four_train(job)


@pytest.mark.real
@pytest.mark.long
def test_a_node_that_is_about_to_fail_is_left_without_a_failure(
    cluster: Cluster, unharmed: dict[str, object]
) -> None:
    job = cluster.job("--spares", "2")
    job.wait_for(lambda: job.trained(30))
    # a claim of another node's rank and number is one of its own node
    accused = HealthReport(what="xid", code=79, node=0, rank=0, source="nvml")
    ReportFile(cluster.reports(1)).append(accused)
    assert job.end() == 0, job.said
    (reported,) = job.of(ORCHESTRATOR, Kind.HEALTH_REPORTED)
    assert (reported.data["node"], reported.data["rank"]) == (1, None)
    assert "health: xid 79 of node 1" in job.said and "recovery: failure" not in job.said
    spawned = job.of(ORCHESTRATOR, Kind.PROCESS_SPAWNED)
    node_of = {e.data["process"]: e.data["node"] for e in spawned}
    ready = job.of(ORCHESTRATOR, Kind.GENERATION_READY)
    assert {node_of[name] for name in ready[0].data["members"]} == {0, 1}
    assert {node_of[name] for name in ready[-1].data["members"]} == {0}
    assert job.digest() == unharmed


@pytest.mark.real
@pytest.mark.long
def test_a_node_that_is_about_to_fail_is_checked_by_its_agent_and_tainted(
    cluster: Cluster, tmp_path: Path
) -> None:
    taints = tmp_path / "taints.yaml"
    taints.write_text("version: 1\ntaints: []\n")
    care = ("--taints", str(taints), "--taint-alarms", "--preflight-rejoins")
    job = cluster.job("--spares", "2", *care, epochs="60")
    job.wait_for(lambda: job.trained(30))
    ReportFile(cluster.reports(1)).append(HealthReport(what="xid", code=79, source="nvml"))
    assert job.end() == 0, job.said
    (checked,) = job.of(ORCHESTRATOR, Kind.PLACE_CHECKED)
    assert (checked.data["node"], checked.data["device"]) == (1, "cpu")
    assert checked.data["fit"] is True, checked.data
    (taint,) = TaintList(taints).read()
    assert (taint.node, taint.by) == ("1", "alarm"), "two nodes of one host go by their numbers"
    assert [e.data["place"] for e in job.of(ORCHESTRATOR, Kind.PLACE_TAINTED)] == ["1"]


@pytest.mark.real
def test_a_second_coordinator_is_refused_while_the_first_lives_and_an_interrupt_ends_the_wait(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text("ab" * 32)
    token.chmod(0o600)
    given = ("--nodes", "2", "--listen", f"{HOST}:0", "--token-file", token, "--adopt", RECOVERABLE)
    with socket.create_server((HOST, 0)) as free:
        given = (*given[:3], f"{HOST}:{free.getsockname()[1]}", *given[4:])
    first = Running(tmp_path, *given)
    stderr = first.process.stderr
    assert stderr is not None and readable(stderr)
    assert "2 agents are to dial" in stderr.readline()
    second = Running(tmp_path, *given)
    assert second.end() == 1
    assert "a supervisor that lives holds" in second.said
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130


# ---- parts


def begun(events: Path, boot: str = "") -> EventWriter:
    events.mkdir()
    writer = EventWriter(events, ORCHESTRATOR, lambda: 5)
    writer.write(Kind.ACTOR_STARTED, pid=1, host="here", wall_ns=1, boot=boot or boot_id())
    return writer


def test_what_a_supervisor_left_is_in_its_log(tmp_path: Path) -> None:
    writer = begun(tmp_path / "events")
    for name, node in (("w0", 0), ("w1", 1)):
        writer.write(
            Kind.PROCESS_SPAWNED,
            process=name,
            pid=40 + node,
            role="worker",
            mode="warm",
            node=node,
            device="cpu",
        )
    writer.write(
        Kind.PROCESS_EXITED,
        process="w0",
        pid=40,
        exit_code=None,
        signal=9,
        expected=False,
        last_seq=3,
    )
    writer.abandon()
    found = read_takeover_log(tmp_path / "events")
    assert not isinstance(found, str)
    assert found.living == {"w1": (1, 41)} and set(found.processes) == {"w0", "w1"}
    assert (found.steps, found.epoch, found.since_ns) == (0, 2, 5)


def test_whoever_takes_over_gives_no_name_a_second_time(tmp_path: Path) -> None:
    """Each try to start a process uses a number up, also one that is not in the log as nobody knows
    what became of it: w2 and w3 could not be started, and may be there.
    """
    writer = begun(tmp_path / "events")
    for name in ("w0", "w1", "s4"):
        writer.write(
            Kind.PROCESS_SPAWNED,
            process=name,
            pid=40,
            role="worker",
            mode="warm",
            node=0,
            device="cpu",
        )
    writer.abandon()
    found = read_takeover_log(tmp_path / "events")
    assert not isinstance(found, str)
    first = found.names
    assert first > 4, "w4 would be the next after four processes, and s4 lives"
    assert first > 5 + 2 * 8, "what was tried last, on node after node, is not in the log at all"


def test_a_job_that_is_over_has_an_outcome(tmp_path: Path) -> None:
    writer = begun(tmp_path / "events")
    writer.write(Kind.RUN_FINISHED, outcome="gave-up", reason="enough", committed_step=3)
    writer.close()
    assert read_takeover_log(tmp_path / "events") == "gave-up"


def test_times_of_another_boot_mean_nothing(tmp_path: Path) -> None:
    begun(tmp_path / "events", boot="another").abandon()
    with pytest.raises(
        InfrastructureError, match="from another machine, or before this one was started anew"
    ):
        read_takeover_log(tmp_path / "events")


def test_a_log_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    begun(tmp_path / "events").abandon()
    path = tmp_path / "events" / f"{ORCHESTRATOR}.jsonl"
    with path.open("a") as stream:
        stream.write('{"kind":"torn')
    writer = EventWriter(
        tmp_path / "events", ORCHESTRATOR, lambda: 6, after=read_actor(path).events
    )
    writer.close()
    log = read_actor(path)
    assert [event.seq for event in log.events] == [0, 1] and log.ended and not log.problems
    with pytest.raises(LogError, match="cannot create"):
        EventWriter(tmp_path / "events", ORCHESTRATOR, lambda: 6)


def test_one_supervisor_holds_a_log(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(InfrastructureError, match="a supervisor that lives holds"):
        lock(tmp_path)
    os.close(held)
    os.close(lock(tmp_path))


def test_processes_fill_one_node_after_the_other() -> None:
    cpus = [(0, "cpu"), (0, "cpu"), (1, "cpu"), (1, "cpu")]
    taken: list[tuple[int, str]] = []
    for _ in range(6):
        taken += [best] if (best := LeastTaken(cpus, taken).best()) else []
    assert [node for node, _ in taken] == [0, 0, 1, 1, 0, 0]
    gpus = [(0, "cuda:0"), (0, "cuda:1"), (1, "cuda:0")]
    assert LeastTaken(gpus, gpus[:1]).best() == gpus[1]
    assert LeastTaken(gpus, gpus[:2]).best() == gpus[2]
    assert LeastTaken([], []).best() is None


def test_keepers_are_no_ranks_to_take_over(tmp_path: Path) -> None:
    writer = begun(tmp_path / "events")
    writer.write(Kind.PROCESS_SPAWNED, process="k0", pid=7, role="keeper", mode="warm", node=0)
    writer.write(
        Kind.PROCESS_EXITED,
        process="k0",
        pid=7,
        exit_code=0,
        signal=None,
        expected=True,
        last_seq=None,
    )
    writer.abandon()
    found = read_takeover_log(tmp_path / "events")
    assert not isinstance(found, str) and not found.processes
