"""When a node that is not heard of is lost: the table of docs/clusters.md, line by line, with times
as arguments.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from trainchaos.recovery.nodes.coordinator.loss import (
    LEASE_GRACE_S,
    Absence,
    Data,
    FleetLimits,
    How,
    judge,
)
from trainchaos.recovery.nodes.coordinator.node_state import NodeState
from trainchaos.recovery.nodes.coordinator.remote_processes import RemoteProcesses
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.nodes.link.protocol import Beat, Heard, Hello
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


class Ranks:
    """Processes that agents tell of, on a clock of the test's."""

    def __init__(self) -> None:
        self.now_ns = 100 * SECOND
        self.known = RemoteProcesses([], lambda: self.now_ns)
        self.nodes = {node: self.state(node) for node in range(5)}

    def state(self, node: int) -> NodeState:
        common: Any = {"incarnation": "a", "epoch": 0, "host": "h", "address": ""}
        hello = Hello(node=node, boot=boot_id(), **common)
        return NodeState(node=node, hello=hello, left_ns=self.now_ns, pace=7)

    def at(self, name: str, node: int, committed: int, generation: int = 1) -> None:
        if not self.known.living(name):
            self.known.add(name, node, 1)
        mark = Mark(generation, committed + 1, "collective", 1, 1, committed, 1)
        self.known.handle(self.nodes[node], Beat(time_ns=1, marks={name: mark}, states={}))

    def parks(self, name: str, node: int, why: str, after_s: float = 0.0) -> None:
        self.now_ns += int(after_s * SECOND)
        parked = Parked(generation=1, step=7, valid=True, why=why)
        for frame in Heard.of([(name, parked)]):
            self.known.handle(self.nodes[node], frame)

    def data(self, node: int) -> Data:
        return self.known.data(self.nodes[node])


@pytest.mark.parametrize(
    ("after_s", "found"), [(-0.5, "failed"), (0.9, "failed"), (1.1, "unknown")]
)
def test_a_failure_explains_the_end_of_a_connection_of_that_moment(
    after_s: float, found: Data
) -> None:
    ranks = Ranks()
    ranks.at("w0", 0, 6)
    ranks.parks("w0", 0, "failed", after_s)
    assert ranks.data(1) == found
    assert ranks.data(0) == "unknown", "one's own is no proof"


def test_ranks_of_others_that_get_on_prove_that_a_nodes_ranks_live() -> None:
    ranks = Ranks()
    ranks.at("w1", 1, 6)
    ranks.at("w0", 0, 6)
    ranks.parks("w0", 0, "pause")
    for committed, found in ((7, "unknown"), (8, "unknown"), (9, "lives")):
        ranks.at("w0", 0, committed)
        assert ranks.data(1) == found
    idle = Ranks()
    idle.at("w0", 0, 20)
    idle.at("s1", 1, 0, generation=0)
    assert idle.data(1) == "unknown", "nobody needs a spare for a step"
    assert not idle.known.trains(1) and idle.known.trains(0)


def test_steps_of_an_older_generation_prove_nothing() -> None:
    ranks = Ranks()
    ranks.at("w0", 0, 50, generation=2)
    ranks.at("w1", 1, 6, generation=1)
    assert ranks.data(1) == "unknown"


def test_the_two_furthest_nodes_tell_what_all_processes_would() -> None:
    draw, ranks = random.Random(7), Ranks()
    living: dict[str, tuple[int, int, int]] = {}  # generation, committed, node
    for turn in range(600):
        act = draw.random()
        name = f"w{turn}" if act < 0.3 or not living else draw.choice(sorted(living))
        if name not in living:
            living[name] = draw.randrange(3), draw.randrange(4), draw.randrange(5)
        elif act < 0.5:
            del living[name]
            process = ranks.known.living(name)
            assert process is not None
            ranks.known.forget(process)
        else:
            generation, committed, node = living[name]
            living[name] = generation + draw.randrange(2), committed + 1, node
        if name in living:
            ranks.at(name, living[name][2], living[name][1], living[name][0])
        newest = max((generation for generation, _, _ in living.values()), default=0)
        for node in range(5):
            there = {name for name, (_, _, its) in living.items() if its == node}
            assert {process.name for process in ranks.known.of(node)} == there
            ahead = [c for g, c, its in living.values() if its != node and g == newest > 0]
            assert ranks.known.pace(node) == max(ahead, default=0)
            trains = newest > 0 and any(living[name][0] == newest for name in there)
            assert ranks.known.trains(node) == trains
