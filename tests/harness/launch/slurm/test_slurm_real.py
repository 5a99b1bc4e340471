"""Nodes of a real Slurm on this machine: steps that begin, end, are killed, lost, drained and
cancelled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.clusters.slurm_cluster import SlurmCluster, cluster, lacking, skip_or_fail
from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.processes import is_same, start_time
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.host.slurm_commands import Commands, ControllerSilent
from trainchaos.harness.launch.nodes.platform import PlatformNeeds
from trainchaos.harness.launch.slurm.allocation import allocation, without_tainted
from trainchaos.harness.launch.slurm.platform import SlurmPlatform
from trainchaos.harness.run import heal
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.health.taints import Taint, made

pytestmark = [pytest.mark.real, pytest.mark.slurm]

STUB = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1] + ".term", "w").close())
facts = {"pid": os.getpid(), "node": os.environ["SLURMD_NODENAME"],
         "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
         "cores": len(os.sched_getaffinity(0)), "given": os.environ.get("GIVEN")}
open(sys.argv[1] + ".part", "w").write(json.dumps(facts))
os.rename(sys.argv[1] + ".part", sys.argv[1])
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    signal.sigtimedwait([signal.SIGUSR1], 1.0)
"""
"""In place of an agent: says where it is, then waits."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    reason = lacking()
    if reason:
        skip_or_fail(reason)
    with cluster(4) as found:
        yield found


class Run:
    """A platform over a job's nodes, as ``chaos run`` in an ``salloc`` would have it."""

    def __init__(
        self,
        slurm: SlurmCluster,
        root: Path,
        job: str,
        *,
        nodes: int,
        drain: bool = False,
        taints: Sequence[Taint] = (),
    ) -> None:
        self.slurm = slurm
        self.job = job
        self.run = RunDirectory(root)
        self.ledger = Ledger(self.run.ledger)
        commands = Commands()
        found = allocation(os.environ, commands)
        assert found is not None
        wanted = PlatformNeeds(
            run=self.run, cells=(), nodes=nodes, needs=frozenset(), will=self.ledger.will
        )
        left, bad = without_tainted(found, taints)
        self.platform = SlurmPlatform(wanted, left, commands, host="", drain=drain, tainted=bad)

    def start(self, node: int) -> dict[str, object]:
        """Begin a node; what its stub says."""
        facts = self.run.root / f"facts-{node}-{time.monotonic_ns()}"
        self.platform.start(node, [sys.executable, "-c", STUB, str(facts)], {"GIVEN": "yes"})
        self.slurm.until(facts.exists, f"node {node} to begin")
        said: dict[str, object] = json.loads(facts.read_text())
        return {**said, "facts": str(facts), "started": start_time(int(str(said["pid"])))}

    def until_gone(self, node: int, limit_s: float = 120.0) -> str:
        """Wait until the platform says that a node is gone; why."""
        self.slurm.until(
            lambda: self.platform.gone(node) is not None, f"node {node} to be gone", limit_s
        )
        return self.platform.gone(node) or ""


Begin = Callable[..., Run]


@pytest.fixture
def begin(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Makes a run in a job of its own; ends both."""
    begun: list[Run] = []

    def begin(
        *, nodes: int, hosts: int | None = None, drain: bool = False, tainted: int | None = None
    ) -> Run:
        hosts = hosts or nodes
        slurm.until(lambda: set(slurm.states().values()) == {"IDLE"}, "all nodes to be idle")
        job = slurm.submit("exec sleep 120", "--no-kill", "--gpus-per-node=2", nodes=hosts)
        slurm.until(lambda: slurm.job(job).get("JobState") == "RUNNING", f"job {job} to run")
        monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
        monkeypatch.setenv("PATH", slurm.environment["PATH"])
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_JOB_NODELIST", slurm.job(job)["NodeList"])
        root = tmp_path / f"run-{len(begun)}"
        root.mkdir()
        taints = []
        if tainted is not None:
            host = slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()
            fields = {"node": host[tainted], "reason": "XID 79", "since": datetime.now(UTC)}
            taints = [made({**fields, "by": "person"})]
        begun.append(Run(slurm, root, job, nodes=nodes, drain=drain, taints=taints))
        return begun[-1]

    yield begin
    for each in begun:
        each.platform.close()
        heal.finish(each.run)
        slurm.run("scancel", "--signal=KILL", "--full", each.job, check=False)
        slurm.run("scancel", each.job, check=False)
        slurm.ended(each.job)


def alive(facts: dict[str, object]) -> bool:
    return is_same(int(str(facts["pid"])), int(str(facts["started"])))


def test_nodes_begin_where_the_node_list_says_with_the_jobs_devices(begin: Begin) -> None:
    run = begin(nodes=2, hosts=3)
    facts = [run.start(node) for node in (1, 0)]
    hosts = run.slurm.run("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    assert [each["node"] for each in facts] == [hosts[1], hosts[0]]
    assert {(each["gpus"], each["given"]) for each in facts} == {("0,1", "yes")}
    assert run.platform.host == "127.0.0.1"
    assert run.platform.gone(0) is None
    assert run.platform.close() == ()
    assert not any(map(alive, facts))


def test_a_killed_node_is_gone_at_once_and_begins_anew_on_its_own_host(begin: Begin) -> None:
    run = begin(nodes=2, hosts=3)
    other, first = run.start(1), run.start(0)
    done = run.platform.machines.kill(0)
    assert done["step"].startswith(f"{run.job}.")
    assert "ended by SIGKILL" in run.until_gone(0)
    assert run.platform.machines.seen(0)["exit_code"] == 128 + signal.SIGKILL
    assert not alive(first)
    assert alive(other)
    with pytest.raises(ProcessLookupError):
        run.platform.machines.kill(0)
    assert run.platform.replaceable(0)
    assert run.start(0)["node"] == first["node"]


@pytest.mark.parametrize("drain", [False, True])
def test_a_tainted_host_of_the_allocation_is_not_used_and_drained_only_if_allowed(
    begin: Begin, slurm: SlurmCluster, capsys: pytest.CaptureFixture[str], drain: bool
) -> None:
    run = begin(nodes=2, hosts=3, drain=drain, tainted=0)
    hosts = slurm.run("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    said = capsys.readouterr().err
    assert f"not used, as it is tainted: {hosts[0]} (XID 79)" in said
    try:
        assert ("DRAIN" in slurm.states()[hosts[0]]) == drain
        assert (f"{hosts[0]} is drained: tainted: XID 79" in said) == drain
        assert [run.start(node)["node"] for node in (0, 1)] == hosts[1:]
    finally:
        if drain:
            slurm.run("scontrol", "update", f"nodename={hosts[0]}", "state=resume")


@contextmanager
def without(slurm: SlurmCluster, node: str) -> Iterator[None]:
    """A node is lost, daemon and all."""
    slurm.lose(node)
    try:
        yield
    finally:
        # A machine takes longer to start than Slurm to notice; a daemon alone would come back to
        # steps it cannot know.
        slurm.until(lambda: slurm.states()[node].startswith("DOWN"), f"Slurm to give {node} up")
        slurm.start_node(node)
        slurm.until(lambda: slurm.states()[node].split("+")[0] != "DOWN", f"{node} to be back")


@pytest.mark.long
def test_a_lost_node_begins_anew_on_a_host_that_waits(begin: Begin, slurm: SlurmCluster) -> None:
    run = begin(nodes=2, hosts=3)
    other, first = run.start(0), run.start(1)
    with without(slurm, str(first["node"])):
        assert not alive(first)
        known = run.platform.gone(1)  # silence alone is no proof; srun may have been told by now
        assert known is None or f"step on {first['node']} ended" in known
        second = run.start(1)
        assert second["node"] not in (first["node"], other["node"])
        assert alive(other)
        slurm.until(
            lambda: slurm.states()[str(first["node"])].startswith("DOWN"),
            "Slurm to give it up",
        )
        assert run.platform.gone(1) is None
        assert run.platform.close() == ()


@pytest.mark.long
def test_slurm_tells_a_lost_node_from_a_silent_one(begin: Begin, slurm: SlurmCluster) -> None:
    run = begin(nodes=2)
    facts = run.start(1)
    with without(slurm, str(facts["node"])):
        why = run.until_gone(1)
        host = facts["node"]
        assert why.startswith(
            (f"Slurm says that {host} is DOWN", f"Slurm has lost {host}", f"{host} runs nothing")
        )
        assert not run.platform.replaceable(1)
        with pytest.raises(InfrastructureError, match="has no host left"):
            run.platform.start(1, ["true"], {})


@pytest.mark.long
def test_a_node_is_drained_only_where_the_user_allows_it(begin: Begin, slurm: SlurmCluster) -> None:
    run = begin(nodes=1)
    assert run.platform.drain(0, "it trains slowly") is None
    assert not any("DRAIN" in state for state in slurm.states().values())


@pytest.mark.long
def test_a_drained_node_works_on_and_slurm_knows_the_reason(
    begin: Begin, slurm: SlurmCluster
) -> None:
    run = begin(nodes=1, drain=True)
    facts = run.start(0)
    host = str(facts["node"])
    try:
        assert f"{host} is drained: it trains slowly" in (
            run.platform.drain(0, "it trains slowly") or ""
        )
        assert "DRAIN" in slurm.states()[host]
        assert "chaos: it trains slowly" in slurm.run("scontrol", "show", "node", host)
        assert run.platform.gone(0) is None
        assert alive(facts)
    finally:
        slurm.run("scontrol", "update", f"nodename={host}", "state=resume")


@pytest.mark.long
def test_a_host_that_is_given_up_is_drained_where_that_is_allowed(
    begin: Begin, slurm: SlurmCluster
) -> None:
    run = begin(nodes=1, hosts=2, drain=True)
    first = str(run.start(0)["node"])
    try:
        # its step still runs: whoever begins it anew has given it up
        assert run.start(0)["node"] != first
        assert "chaos: its agent fell silent during a run" in slurm.run(
            "scontrol", "show", "node", first
        )
    finally:
        slurm.run("scontrol", "update", f"nodename={first}", "state=resume")


@pytest.mark.long
def test_preemption_reaches_the_agents_as_a_signal(begin: Begin, slurm: SlurmCluster) -> None:
    run = begin(nodes=2)
    facts = [run.start(node) for node in (0, 1)]
    slurm.run("scancel", "--signal=TERM", run.job)
    for each in facts:
        slurm.until(Path(f"{each['facts']}.term").exists, "the notice to arrive")
    assert all(map(alive, facts))


@pytest.mark.long
def test_an_allocation_that_ends_takes_all_nodes_and_says_so(
    begin: Begin, slurm: SlurmCluster
) -> None:
    run = begin(nodes=2)
    facts = [run.start(node) for node in (0, 1)]
    slurm.run("scancel", run.job)
    assert "the allocation is over" in run.until_gone(0) or not alive(facts[0])
    slurm.until(lambda: "the allocation is over" in (run.platform.gone(1) or ""), "it to be known")
    assert not run.platform.replaceable(0)
    with pytest.raises(InfrastructureError, match=f"the allocation is over: job {run.job} is C"):
        run.platform.start(0, ["true"], {})


@pytest.mark.long
def test_agents_work_on_while_the_controller_is_away(
    begin: Begin, slurm: SlurmCluster, tmp_path: Path
) -> None:
    run = begin(nodes=2)
    facts = run.start(0)
    slurm.stop_controller()
    try:
        assert run.platform.gone(0) is None
        with pytest.raises(OSError, match="controller does not answer"):
            run.platform.machines.kill(0)
        with pytest.raises(ControllerSilent):
            Run(slurm, tmp_path, run.job, nodes=2)
        assert alive(facts)
    finally:
        slurm.start_controller()
        slurm.until(
            lambda: slurm.job(run.job).get("JobState") == "RUNNING",
            "the controller to be back",
        )


def test_what_a_killed_run_leaves_is_healed_and_no_other_step(
    begin: Begin, slurm: SlurmCluster
) -> None:
    run = begin(nodes=2)
    mine = [run.start(node) for node in (0, 1)]
    other = Run(slurm, run.run.root / "other", run.job, nodes=2)
    other.run.root.mkdir()
    theirs = other.start(0)
    outcomes = heal.finish(run.run)
    assert [outcome.ok for outcome in outcomes] == [True]
    assert "cancelled steps" in outcomes[0].text
    assert not any(map(alive, mine))
    assert alive(theirs)
    assert other.platform.close() == ()
    assert not alive(theirs)
