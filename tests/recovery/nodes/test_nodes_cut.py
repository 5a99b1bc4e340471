"""A link between coordinator and node that is cut for real, between network namespaces, on the
limits as they are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import netns
from tests.support.clusters.cluster import agent_command, token_in
from tests.support.clusters.netns import CONTROL, DATA, Sites
from tests.support.clusters.nodes import Yard
from tests.support.running import RECOVERABLE, ROOT, Running, kill, until
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind
from trainchaos.recovery.nodes.coordinator.node_state import NodeLost
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.host import Dying, Exited, MessageReceived

pytestmark = pytest.mark.real
PORT = 29555


@pytest.fixture
def sites() -> Iterator[Sites]:
    """Two of them; skipped, or failed, with the reason where there are no network namespaces."""
    netns.require()
    made = Sites("cut")
    yield made
    made.close()


class Away:
    """Node 0 is at the other site."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self.host = sites.address(0, CONTROL)

    def address(self, node: int) -> str:
        return self._sites.address(1, DATA)

    def at(self, node: int, command: list[str]) -> list[str]:
        return self._sites.at(1, command)


def passes(yard: Yard, seconds: float) -> list[Any]:
    """What the fleet reports in so many seconds."""
    until_s = time.monotonic() + seconds
    return yard.until(lambda _: time.monotonic() > until_s)


@pytest.mark.long
def test_a_node_behind_a_cut_of_four_seconds_is_as_it_was(tmp_path: Path, sites: Sites) -> None:
    with sites.inside(0):
        yard = Yard(tmp_path, place=Away(sites))
        try:
            yard.start(0)
            # nobody vouches for it
            yard.fleet.await_nodes([0], limit_s=1.0, gone=lambda node: None)
            yard.fleet.begin("arm", yard.folder)
            pid = yard.spawn("w0", 0)
            yard.until_kind(MessageReceived)
            sites.cut(CONTROL)
            yard.order("w0", "say", 100)
            reports = passes(yard, 4.5)
            assert yard.fleet.os_state("w0") == "?" and not any(
                isinstance(r, MessageReceived) for r in reports
            )
            sites.heal(CONTROL)
            reports += yard.until_kind(MessageReceived, 100)
            numbers = [
                r.message.payload["number"] for r in reports if isinstance(r, MessageReceived)
            ]
            assert numbers == list(range(100)), "each once and in order"
            assert not any(isinstance(r, NodeLost | Exited | Dying) for r in reports)
            assert processes.state(pid) in "RSD"
            yard.until(lambda _: yard.fleet.os_state("w0") in "RSD")
        finally:
            sites.heal(CONTROL)
            assert yard.close() == {}


class CutJob(Running):
    """A job on two nodes at two sites, four ranks, and its agents. ``epochs``: for its script."""

    script = RECOVERABLE

    def __init__(self, folder: Path, sites: Sites, *options: str, epochs: int) -> None:
        self.folder, self.sites = folder, sites
        self.token = token_in(folder)
        self.at = f"{sites.address(0, CONTROL)}:{PORT}"
        self.agents = [self._agent(node) for node in range(2)]
        self.command = sites.at(0, [sys.executable, "-m", "trainchaos.recovery.run"])
        super().__init__(
            folder,
            "--nodes",
            "2",
            "--listen",
            self.at,
            "--token-file",
            self.token,
            "--ranks",
            "4",
            *options,
            self.script,
            str(epochs),
        )

    def _agent(self, node: int) -> subprocess.Popen[str]:
        address = ("--address", self.sites.address(node, DATA))
        command = agent_command(self.at, node, self.token, self.folder / f"n{node}", *address)
        return subprocess.Popen(
            self.sites.at(node, command),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"agent{node}.log").open("w"),
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def committed(self, process: str, node: int) -> int:
        """By its own log, whether it is heard of or not."""
        steps = EventLogTail(self.folder / f"n{node}" / f"{process}.jsonl").read()
        return max((e.step or 0 for e in steps if e.kind is Kind.STEP_COMMITTED), default=0)

    def lasts(self, seconds: float) -> None:
        """So long it goes on."""
        until_s = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() > until_s)

    def all_of(self, kind: Kind) -> list[dict[str, Any]]:
        """Data of the supervisor's events."""
        return [dict(event.data) for event in self.of(ORCHESTRATOR, kind)]

    def close(self) -> None:
        """End everything."""
        for process in [self.process, *self.agents]:
            process.kill()
            process.communicate(timeout=60)


@pytest.fixture
def jobs(tmp_path: Path, sites: Sites) -> Iterator[list[CutJob]]:
    """Ended after the test."""
    made: list[CutJob] = []
    yield made
    for job in made:
        job.close()


def begun(jobs: list[CutJob], folder: Path, sites: Sites, *options: str, epochs: int) -> CutJob:
    """One that trains."""
    jobs.append(CutJob(folder, sites, *options, epochs=epochs))
    jobs[0].wait_for(lambda: jobs[0].trained(30))
    return jobs[0]


CUTS_S = {
    2.0: pytest.mark.long,
    4.5: pytest.mark.long,
    10.0: pytest.mark.long,
    60.0: pytest.mark.long,
}


@pytest.mark.parametrize("seconds", [pytest.param(s, marks=mark) for s, mark in CUTS_S.items()])
def test_ranks_train_on_through_a_cut_and_nobody_is_killed(
    tmp_path: Path, sites: Sites, jobs: list[CutJob], seconds: float
) -> None:
    job = begun(jobs, tmp_path, sites, epochs=2000)
    sites.cut(CONTROL)
    cut_at = job.committed("w3", 1)
    job.lasts(seconds)
    job.wait_for(lambda: job.committed("w3", 1) > cut_at + 10 * seconds)  # nobody hears of it
    heard_at = max((e.step or 0 for e in job.of("w3", Kind.STEP_COMMITTED)), default=0)
    sites.heal(CONTROL)
    job.wait_for(lambda: any((e.step or 0) > heard_at for e in job.of("w3", Kind.STEP_COMMITTED)))
    job.lasts(2.0)
    assert job.all_of(Kind.FAILURE_DETECTED) == job.all_of(Kind.NODE_LOST) == []
    assert len(job.all_of(Kind.GENERATION_STARTED)) == 1
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130, job.said


@pytest.mark.long
def test_a_failure_during_a_cut_is_answered_when_the_node_is_heard_of_again(
    tmp_path: Path, sites: Sites, jobs: list[CutJob]
) -> None:
    job = begun(jobs, tmp_path, sites, "--spares", "2", epochs=60)
    sites.cut(CONTROL)
    job.lasts(1.0)
    kill(job.pid_of("w1"))
    job.lasts(7.0)
    assert len(job.all_of(Kind.GENERATION_STARTED)) == 1, "nobody decides without half of the ranks"
    sites.heal(CONTROL)
    assert job.end() == 0, job.said
    assert [(e["process"], e["cause"]) for e in job.all_of(Kind.FAILURE_DETECTED)] == [
        ("w1", "exit")
    ]
    assert job.all_of(Kind.NODE_LOST) == []
    members = [e["members"] for e in job.all_of(Kind.GENERATION_READY)]
    assert len(members[1]) == 4 and {"w0", "w2", "w3"} < set(members[1])


@pytest.mark.long
def test_a_node_without_any_link_is_given_up_and_fenced_when_it_is_back(
    tmp_path: Path, sites: Sites, jobs: list[CutJob]
) -> None:
    job = begun(jobs, tmp_path, sites, "--spares", "2", "--node-timeout", "3", epochs=100)
    pids = [e["pid"] for e in job.all_of(Kind.PROCESS_SPAWNED) if e["node"] == 1]
    assert len(pids) == 3
    sites.cut(CONTROL)
    sites.cut(DATA)
    job.wait_for(lambda: bool(job.all_of(Kind.NODE_LOST)))
    (lost,) = job.all_of(Kind.NODE_LOST)
    assert lost == {"node": 1, "why": "the job needs it, and it was not heard of for 3 s"}
    job.wait_for(lambda: len(job.all_of(Kind.GENERATION_READY)) == 2)
    assert all(processes.state(pid) in "RSD" for pid in pids), "nobody can reach them yet"
    sites.heal(CONTROL)
    sites.heal(DATA)
    until(lambda: all(processes.state(pid) in "XZ" for pid in pids))
    job.wait_for(lambda: len([e for e in job.all_of(Kind.NODE_JOINED) if e["node"] == 1]) == 2)
    assert "everything here is killed" in (tmp_path / "agent1.log").read_text()
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
