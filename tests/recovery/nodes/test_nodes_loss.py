"""When a node that is not heard of is lost: the table of docs/clusters.md, line by line, with times
as arguments.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainchaos.recovery.nodes.coordinator.datapath import DataPath
from trainchaos.recovery.nodes.coordinator.loss import (
    LEASE_GRACE_S,
    Absence,
    Data,
    FleetLimits,
    How,
    judge,
)
from trainchaos.recovery.nodes.coordinator.node_state import RemoteProcess
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Parked

LIMITS = FleetLimits()
SECOND = 1_000_000_000
SILENT = Absence(
    how="",
    ended_s=0.0,
    silent_s=60.0,
    data="unknown",
    trains=True,
    wanted_s=0.0,
    ours=False,
    alone=False,
    lease_s=120.0,
)


def ended(how: How, after_s: float, *, data: Data = "unknown", trains: bool = True) -> Absence:
    return replace(SILENT, how=how, ended_s=after_s, silent_s=after_s, data=data, trains=trains)


@pytest.mark.parametrize("seconds", [2.0, 4.5, 10.0, 60.0, 119.0])
def test_silence_alone_is_no_loss(seconds: float) -> None:
    assert judge(replace(SILENT, silent_s=seconds), LIMITS)[0] == "wait"


def test_a_node_that_the_job_waits_for_has_so_long_to_come_back() -> None:
    assert judge(replace(SILENT, wanted_s=LIMITS.node_s), LIMITS)[0] == "wait"
    verdict, why = judge(replace(SILENT, wanted_s=LIMITS.node_s + 0.01), LIMITS)
    assert verdict == "lost" and why == "the job needs it, and it was not heard of for 15 s"
    assert judge(replace(SILENT, wanted_s=3.0), FleetLimits(node_s=2.5))[0] == "lost"


def test_a_coordinator_that_hears_nobody_gives_nobody_up() -> None:
    assert judge(replace(SILENT, wanted_s=100.0, alone=True), LIMITS)[0] == "wait"


@pytest.mark.parametrize("how", ["", "reset", "closed"])
def test_a_node_that_has_ended_everything_by_its_lease_is_lost(how: How) -> None:
    over = replace(SILENT, how=how, ended_s=1.0, data="lives" if how else "unknown", alone=True)
    assert judge(replace(over, silent_s=120.0 + LEASE_GRACE_S), LIMITS)[0] == "wait"
    assert judge(replace(over, silent_s=120.1 + LEASE_GRACE_S), LIMITS)[0] == "lost"


@pytest.mark.parametrize("how", ["reset", "closed"])
@pytest.mark.parametrize("trains", [True, False])
def test_whose_peers_failed_is_dead_at_once(how: How, trains: bool) -> None:
    after = [ended(how, s, data="failed", trains=trains) for s in (0.04, 0.06, 0.24, 0.26)]
    assert [judge(a, LIMITS)[0] for a in after] == ["wait", "dying", "dying", "lost"]


def test_an_agent_whose_process_ended_is_a_lost_node() -> None:
    assert [judge(ended("closed", s), LIMITS)[0] for s in (0.06, 0.24, 0.26)] == [
        "wait",
        "wait",
        "lost",
    ]


def test_nor_is_it_while_its_ranks_are_seen_to_train() -> None:
    assert judge(ended("closed", 60.0, data="lives"), LIMITS)[0] == "wait"


@pytest.mark.parametrize("data", ["unknown", "lives"])
def test_a_connection_that_was_reset_proves_nothing_of_its_ranks(data: Data) -> None:
    assert judge(ended("reset", 60.0, data=data), LIMITS)[0] == "wait"


def test_a_node_without_ranks_is_lost_when_it_stays_away() -> None:
    idle = [ended("reset", s, trains=False) for s in (4.9, 5.1)]
    assert [judge(a, LIMITS)[0] for a in idle] == ["wait", "lost"]


def test_who_hung_up_on_a_coordinator_that_stood_still_has_longer() -> None:
    hung_up = [replace(ended("closed", s, trains=False), ours=True) for s in (4.9, 5.1)]
    assert [judge(a, LIMITS)[0] for a in hung_up] == ["wait", "lost"]


# ---- what ranks of other nodes show

PARKED = Parked(generation=1, step=7, valid=True, why="failed")


def rank(name: str, node: int, committed: int, generation: int = 1) -> RemoteProcess:
    mark = Mark(
        generation=generation,
        step=committed + 1,
        phase="collective",
        collective=1,
        time_ns=1,
        committed=committed,
        last_seq=1,
    )
    return RemoteProcess(name=name, node=node, pid=1, mark=mark)


@pytest.mark.parametrize(
    ("after_s", "found"), [(-0.5, "failed"), (0.9, "failed"), (1.1, "unknown")]
)
def test_a_failure_explains_the_end_of_a_connection_of_that_moment(
    after_s: float, found: Data
) -> None:
    path, ended_ns = DataPath(), 100 * SECOND
    path.heard(0, PARKED, ended_ns + int(after_s * SECOND))
    assert path.since(1, ended_ns, 7, []) == found
    assert path.since(0, ended_ns, 7, []) == "unknown", "one's own is no proof"


def test_ranks_of_others_that_get_on_prove_that_a_nodes_ranks_live() -> None:
    path = DataPath()
    path.heard(0, Parked(generation=1, step=7, valid=True, why="pause"), 100 * SECOND)
    for committed, found in ((7, "unknown"), (8, "unknown"), (9, "lives")):
        people = [rank("w0", 0, committed), rank("w1", 1, 6)]
        assert path.since(1, 100 * SECOND, 7, people) == found
    idle = [rank("w0", 0, 20), rank("s1", 1, 0, generation=0)]
    assert path.since(1, 100 * SECOND, 7, idle) == "unknown", "nobody needs a spare for a step"
    assert not path.trains(1, idle) and path.trains(0, idle)


def test_steps_of_an_older_generation_prove_nothing() -> None:
    people = [rank("w0", 0, 50, generation=2), rank("w1", 1, 6, generation=1)]
    assert DataPath().since(1, 100 * SECOND, 7, people) == "unknown"
    assert DataPath.pace(1, [rank("w0", 0, 9), rank("w2", 0, 5), rank("w1", 1, 12)]) == 9
