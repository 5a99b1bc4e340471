"""How often agents report follows the number of nodes; whoever judges by reports allows for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.recovery.nodes.test_nodes_fleet import MARK, TOKEN, Clock, Puppet, Stage
from trainchaos.recovery.cli.options import parser, timing_of
from trainchaos.recovery.detection.hangs import HangDetector, HangLimits
from trainchaos.recovery.nodes.agent.agent_processes import Beats
from trainchaos.recovery.nodes.coordinator.fleet import Fleet
from trainchaos.recovery.nodes.coordinator.loss import FleetLimits
from trainchaos.recovery.nodes.link.beat_rate import (
    FIRST_PINGS,
    LEAST_S,
    MOST_A_SECOND,
    MOST_PINGS_A_SECOND,
    QUIET,
    beat_s,
    late_s,
    next_ping_ns,
)
from trainchaos.recovery.nodes.link.protocol import Beat, Start, Welcome
from trainchaos.recovery.transport.progress_counters import Mark

NODES = 8192
EVERY_S = beat_s(NODES)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A fleet of so many nodes, as far as its agents are told."""
    made = Stage(tmp_path)
    made.fleet.away()
    limits = FleetLimits.of(NODES, node_s=15.0)
    made.fleet = Fleet(token=TOKEN, host="127.0.0.1", clock_ns=made.clock, limits=limits)
    made.fleet.await_nodes([], limit_s=1.0, gone=lambda _: None)
    made.fleet.begin("arm", tmp_path)
    yield made
    made.fleet.away()


class Node:
    """Stands in for an agent's processes: a rank that moves or not."""

    def __init__(self) -> None:
        self.step = 0

    def marks(self) -> dict[str, Any]:
        """Of its only rank."""
        return {"w0": (1, self.step, *MARK[2:])}

    def states(self) -> dict[str, str]:
        """It runs."""
        return {"w0": "R"}

    def pulses(self) -> dict[str, tuple[float, bool]]:
        """It is not silent."""
        return {}


def reports(every_s: float, *, moves: bool, for_s: float = 10.0) -> int:
    """How many an agent sends that looks every 10 ms."""
    node, beats, sent = Node(), Beats(every_s), 0
    for look in range(round(for_s / 0.01)):
        node.step += moves
        sent += beats.due(cast(Any, node), 1000.0 + look * 0.01, at_once=False) is not None
    return sent


@pytest.mark.parametrize("nodes", [1, 8, 64, 500])
def test_with_few_nodes_nothing_is_late(nodes: int) -> None:
    assert beat_s(nodes) == LEAST_S and late_s(beat_s(nodes)) == 0.0
    assert timing_of(parser("").parse_args(["--nodes", str(nodes), "train.py"])) == timing_of(
        parser("").parse_args(["train.py"])
    )


@pytest.mark.parametrize("nodes", [1, 2048, MOST_PINGS_A_SECOND, 8192, 100_000])
def test_pings_of_all_nodes_together_are_bounded_and_silence_is_longer(nodes: int) -> None:
    limits = FleetLimits.of(nodes, node_s=15.0)
    assert nodes / limits.ping_s <= MOST_PINGS_A_SECOND + 1e-6
    few = FleetLimits()
    if nodes <= MOST_PINGS_A_SECOND:
        assert (limits.ping_s, limits.silence_s) == (few.ping_s, few.silence_s)
    assert limits.silence_s / limits.ping_s == few.silence_s / few.ping_s
    now_ns, every_ns = 10**15, int(limits.ping_s * 1e9)
    due = [next_ping_ns(node, FIRST_PINGS, now_ns, every_ns) - now_ns for node in range(4096)]
    assert min(due) > 0 and 0.9 * every_ns < max(due) <= every_ns


@pytest.mark.parametrize("nodes", [512, 2048, 8192, 100_000])
def test_reports_of_all_nodes_together_are_bounded(nodes: int) -> None:
    assert nodes / beat_s(nodes) <= MOST_A_SECOND + 1e-6


def test_an_agent_reports_as_often_as_it_was_told() -> None:
    assert 190 <= reports(LEAST_S, moves=True) <= 201
    assert 95 <= reports(LEAST_S, moves=False) <= 101
    assert 11 <= reports(EVERY_S, moves=True) <= 13
    assert 6 <= reports(EVERY_S, moves=False) <= 7


def test_an_agent_is_told_at_its_welcome(stage: Stage, tmp_path: Path) -> None:
    welcome = cast(Welcome, stage.join().heard[0])
    assert (welcome.beat_s, welcome.ping_s) == (EVERY_S, NODES / MOST_PINGS_A_SECOND)
    few = Fleet(token=TOKEN, host="127.0.0.1", clock_ns=Clock())
    puppet = Puppet(few, 0, "a")
    while not puppet.listen():
        few.wait(0.01)
    few.away()
    welcome = cast(Welcome, puppet.heard[0])
    assert (welcome.beat_s, welcome.ping_s) == (LEAST_S, 1.0)


def test_what_is_known_of_a_process_is_not_stale_before_the_next_report(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    puppet.say(Beat(time_ns=1, marks={"w0": MARK}, states={"w0": "S"}), reliable=False)
    stage.until(lambda _: stage.fleet.os_state("w0") == "S")
    stage.passes(QUIET * EVERY_S)
    assert stage.fleet.os_state("w0") == "S"
    stage.passes(3.1 * EVERY_S)
    assert stage.fleet.os_state("w0") == "?"


def test_steps_done_before_a_connection_ended_and_reported_later_show_no_life(
    stage: Stage,
) -> None:
    puppet, other = stage.join(), stage.join(1, "z")
    for one, node in ((puppet, 0), (other, 1)):
        name = f"w{node}"
        stage.spawn(one, name, node)
        stage.until(lambda _, one=one: any(isinstance(f, Start) for f in one.listen()))  # type: ignore[misc]
        one.say(Beat(time_ns=1, marks={name: MARK}, states={name: "S"}), reliable=False)
        stage.until(lambda _, name=name: stage.fleet.mark(name).committed == MARK[5])  # type: ignore[misc]
    puppet.link.close()
    stage.until(lambda _: not stage.fleet.nodes()[0].connected)
    late = (*MARK[:5], MARK[5] + 5, *MARK[6:])
    other.say(Beat(time_ns=1, marks={"w1": late}, states={}), reliable=False)
    stage.until(lambda _: stage.fleet.mark("w1").committed == late[5])
    stage.passes(0.2)
    assert stage.fleet.alive("w0")
    stage.passes(0.1)
    assert not stage.fleet.alive("w0"), "its agent ended, and nothing shows that its ranks live"


def first_hang(late_for_s: float, *, limits: HangLimits) -> str | None:
    """Who is taken for hung, if the reports of one of two ranks come so much later than those of
    the other: steps of 50 ms, then one in which the other's is known at once.
    """
    detector, now_s = HangDetector(limits=limits), 1000.0
    detector.resumed(())
    for step in range(20):
        detector.observe(now_s + step * 0.05, step)
    marks = {
        name: Mark(
            generation=1,
            step=20 + (name == "ahead"),
            phase="collective" if name == "ahead" else "forward",
            collective=1,
            time_ns=1,
            committed=20,
            last_seq=1,
        )
        for name in ("ahead", "late")
    }
    for look in range(round(late_for_s / 0.02)):
        hang = detector.look(now_s + 1.0 + look * 0.02, marks, lambda _: "S")
        if hang is not None:
            return hang.process
    return None


def test_a_rank_whose_report_comes_late_does_not_hang_and_one_that_hangs_is_found() -> None:
    told = timing_of(parser("").parse_args(["--nodes", str(NODES), "train.py"])).hang
    usual = HangLimits()
    extra_s = QUIET * (EVERY_S - LEAST_S)
    assert told.late_s == pytest.approx(extra_s)
    assert first_hang(0.5 + extra_s, limits=told) is None
    assert first_hang(0.5 + extra_s, limits=usual) == "late", "what the allowance is for"
    assert first_hang(0.8 + extra_s, limits=told) == "late"
    assert first_hang(0.8, limits=usual) == "late"


def test_a_limit_of_the_users_is_as_long_as_marks_are_late() -> None:
    given = ["--nodes", str(NODES), "--hang-timeout", "2", "train.py"]
    limits = timing_of(parser("").parse_args(given)).hang
    assert first_hang(2.0 + limits.late_s - 0.1, limits=limits) is None
    assert first_hang(2.0 + limits.late_s + 0.2, limits=limits) == "late"
