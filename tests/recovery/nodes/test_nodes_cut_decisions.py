"""The control link of a node is cut for two seconds in the middle of a decision, between network
namespaces: what was on its way arrives later, and the same processes go on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.recovery.nodes.test_nodes_cut import CutJob
from tests.support.clusters import netns
from tests.support.clusters.longrun import fork_server
from tests.support.clusters.netns import CONTROL, Sites
from tests.support.gated_job import JOINING, LOADING
from tests.support.running import ROOT, kill, readable, until
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.process import processes

pytestmark = pytest.mark.real
CUT_S = 2.0
FAR = 1
"""The node whose control link is cut."""
PIDFD_GETFD = 438
APART_S = 1.1  # failures of one place within a second count once


class GatedJob(CutJob):
    """Its ranks wait where they are told to."""

    script = ROOT / "tests" / "support" / "gated_job.py"

    def shut(self, gate: str) -> None:
        """Whoever comes there waits."""
        (self.folder / f"{gate}.shut").touch()

    def open(self, gate: str) -> None:
        """All go on."""
        (self.folder / f"{gate}.shut").unlink()

    def let(self, gate: str, pids: Sequence[int]) -> None:
        """These go on."""
        for pid in pids:
            (self.folder / f"{gate}.go.{pid}").touch()

    def wait_at(self, gate: str, pids: Sequence[int], what: str = "held") -> None:
        """Until all of these are held there, or have passed."""
        self.wait_for(lambda: all((self.folder / f"{gate}.{what}.{pid}").exists() for pid in pids))

    def wait_for_count(self, kind: Kind, count: int) -> None:
        """Until the supervisor has written so many of that kind."""
        self.wait_for(lambda: len(self.all_of(kind)) >= count)

    def pids(self, node: int, *, first: int = 0) -> list[int]:
        """Of processes started there; ``first``: leave so many out that were started before,
        wherever.
        """
        spawned = self.all_of(Kind.PROCESS_SPAWNED)[first:]
        return [entry["pid"] for entry in spawned if entry["node"] == node]

    def cut(self) -> None:
        """The far node is not heard of, nor does it hear."""
        self.sites.cut(CONTROL)
        self._heal_s = time.monotonic() + CUT_S

    def heal_after_cut(self, missing: Kind, count: int) -> None:
        """After two seconds without the far node, in which the supervisor could not write that so
        many times.
        """
        self.lasts(self._heal_s - time.monotonic())
        assert len(self.all_of(missing)) < count, "the cut came too late to show anything"
        self.sites.heal(CONTROL)

    def ends_well(self, *, lost: Sequence[str], generations: Sequence[Sequence[str]]) -> None:
        """It completes: with these members, and nobody failed or was killed but those that the test
        killed.
        """
        assert self.end() == 0, self.said
        assert [entry["process"] for entry in self.all_of(Kind.FAILURE_DETECTED)] == list(lost), (
            self.said
        )
        assert [entry["members"] for entry in self.all_of(Kind.GENERATION_READY)] == [
            *map(list, generations)
        ]
        assert len(self.all_of(Kind.GENERATION_STARTED)) == len(generations), "none was given up"
        assert self.all_of(Kind.NODE_LOST) == []
        early = [e["process"] for e in self.all_of(Kind.PROCESS_EXITED) if not e["expected"]]
        assert sorted(early) == sorted(lost), self.said
        pids = [entry["pid"] for entry in self.all_of(Kind.PROCESS_SPAWNED)]
        until(lambda: all(processes.state(pid) in "XZ" for pid in pids))


Begin = Callable[..., GatedJob]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a job that trains; it is ended after the test. Without network namespaces skipped, or
    failed.
    """
    netns.require()
    sites = Sites("decide")
    made: list[GatedJob] = []

    def start(*options: str, steps: int = 600) -> GatedJob:
        made.append(GatedJob(tmp_path, sites, *options, epochs=steps))
        made[0].wait_for(lambda: made[0].trained(30))
        return made[0]

    yield start
    for job in made:
        job.close()
    sites.close()


@pytest.mark.long
def test_who_cannot_be_told_to_join_joins_when_the_link_is_back(begin: Begin) -> None:
    """All processes are new, those of the far node are ready first, and the last of the near ones
    during the cut.
    """
    job = begin("--strategy", "checkpoint-restart", "--every", "20")
    job.shut(JOINING)
    kill(job.pid_of("w1"))
    job.wait_for_count(Kind.PROCESS_SPAWNED, 8)
    near, far = job.pids(0, first=4), job.pids(FAR, first=4)
    assert near and far
    job.wait_at(JOINING, [*near, *far])
    job.let(JOINING, far)
    job.wait_for_count(Kind.PROCESS_READY, 4 + len(far))
    job.cut()
    job.open(JOINING)
    job.wait_for_count(Kind.GENERATION_STARTED, 2)
    job.heal_after_cut(Kind.GENERATION_READY, 2)
    job.ends_well(lost=["w1"], generations=[["w0", "w1", "w2", "w3"], ["w4", "w5", "w6", "w7"]])


@pytest.mark.long
def test_who_cannot_say_that_it_joined_is_waited_for(begin: Begin) -> None:
    """The spare of the far node takes the lost rank's state while nobody hears of it."""
    job = begin("--spares", "2")
    (spare,) = [e["pid"] for e in job.all_of(Kind.PROCESS_SPAWNED) if e["process"] == "s4"]
    assert spare in job.pids(FAR)
    job.shut(LOADING)
    kill(job.pid_of("w1"))
    job.wait_at(LOADING, [spare])
    job.cut()
    job.open(LOADING)
    job.wait_at(LOADING, [spare], "passed")
    job.heal_after_cut(Kind.GENERATION_READY, 2)
    job.ends_well(lost=["w1"], generations=[["w0", "w1", "w2", "w3"], ["w0", "s4", "w2", "w3"]])


@pytest.mark.long
def test_a_cut_as_soon_as_a_generation_begins_harms_nobody(begin: Begin) -> None:
    """Wherever it hits: before the far node hears of the generation, while its ranks look for their
    peers in the store, which is behind the cut too, or as they say that they joined.
    """
    job = begin("--spares", "2", steps=1500)
    lost, members = [], [["w0", "w1", "w2", "w3"]]
    for number in range(2, 6):
        victim = members[-1][1]
        kill(job.pid_of(victim))
        job.wait_for_count(Kind.GENERATION_STARTED, number)
        job.cut()
        job.lasts(CUT_S)
        job.sites.heal(CONTROL)
        job.wait_for_count(Kind.GENERATION_READY, number)
        lost.append(victim)
        members.append(job.all_of(Kind.GENERATION_READY)[-1]["members"])
        assert [m for m in members[-1] if m in members[-2]] == [
            m for m in members[-2] if m != victim
        ]
        job.wait_for_count(Kind.PROCESS_READY, 5 + number)
    job.ends_well(lost=lost, generations=members)


def children(pid: int) -> set[int]:
    """Of a process."""
    return {child for child, fields in processes.everybody() if fields[1] == str(pid)}


def asked_to_fork(pid: int) -> bool:
    """Whether a fork server that is stopped has a request to read."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    number = int(words[words.index(b"trainchaos.recovery.process.forkserver") + 1])
    whole = os.pidfd_open(pid)
    fd = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, whole, number, 0)
    os.close(whole)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    try:
        return readable(fd, 0)
    finally:
        os.close(fd)


@pytest.mark.long
def test_a_process_that_was_started_during_a_cut_is_known_when_the_link_is_back(
    begin: Begin,
) -> None:
    """The agent is told to start it and forks it, and cannot say so."""
    job = begin("--spares", "3", steps=1500)  # the far node has room for one more
    forking = fork_server(job.agents[FAR].pid, but=job.pids(FAR))
    before = children(job.agents[FAR].pid)
    os.kill(forking, signal.SIGSTOP)
    kill(job.pid_of("s6"))
    job.wait_for(lambda: asked_to_fork(forking))
    job.cut()
    os.kill(forking, signal.SIGCONT)
    job.wait_for(lambda: bool(children(job.agents[FAR].pid) - before))
    job.heal_after_cut(Kind.PROCESS_SPAWNED, 8)
    job.wait_for_count(Kind.PROCESS_READY, 8)
    assert [e["process"] for e in job.all_of(Kind.PROCESS_SPAWNED)[7:]] == ["s7"], (
        "not started twice"
    )
    job.ends_well(lost=["s6"], generations=[["w0", "w1", "w2", "w3"]])


@pytest.mark.long
def test_a_node_that_cannot_be_told_to_start_a_process_starts_it_when_the_link_is_back(
    begin: Begin,
) -> None:
    """On the near node processes failed so often that the next one is to be started on the
    far one.
    """
    job = begin("--spares", "4", steps=1500)
    lost = ["w1"]
    for number in range(9, 11):
        kill(job.pid_of(lost[-1]))
        job.wait_for_count(Kind.PROCESS_READY, number)
        newest = job.all_of(Kind.PROCESS_SPAWNED)[-1]
        assert newest["node"] == 0
        lost.append(newest["process"])
        job.lasts(APART_S)
    decided = len(job.all_of(Kind.DECISION))
    job.cut()
    kill(job.pid_of(lost[-1]))
    job.wait_for_count(Kind.DECISION, decided + 1)
    job.heal_after_cut(Kind.PROCESS_SPAWNED, 11)
    job.wait_for_count(Kind.PROCESS_READY, 11)
    assert [e["node"] for e in job.all_of(Kind.PROCESS_SPAWNED)[10:]] == [FAR], "not started twice"
    members = [e["members"] for e in job.all_of(Kind.GENERATION_READY)]
    job.ends_well(lost=lost, generations=[["w0", "w1", "w2", "w3"], members[1]])
    assert {"w0", "w2", "w3"} < set(members[1])
