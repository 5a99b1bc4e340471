"""Nodes of a run: which begin anew and when, what agents of other machines must agree on, what a
lost one leaves, and what happens between two arms.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.running import LIMIT_S, until
from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.events.log import EventWriter, Kind, read_actor
from trainchaos.chaos.scenario.model import Cell, LauncherSpec, RecoverySpec, Scenario, WorkloadSpec
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import Stopped
from trainchaos.harness.launch.nodes import cluster
from trainchaos.harness.launch.nodes.cluster import (
    REFUSALS,
    NodesSession,
    Renewal,
    Tending,
    nodes_session,
    places,
)
from trainchaos.harness.launch.nodes.loopback import LoopbackPlatform
from trainchaos.harness.launch.nodes.platform import Platform, PlatformNeeds
from trainchaos.harness.undo.base import Undo
from trainchaos.harness.undo.ledger import Ledger, read_open
from trainchaos.recovery.nodes.coordinator.loss import TakenAway
from trainchaos.recovery.nodes.coordinator.node_state import ClockMeasured, NodeInfo, NodeJoined
from trainchaos.recovery.nodes.coordinator.salvage import gather
from trainchaos.recovery.nodes.coordinator.software import refuse_other, versions
from trainchaos.recovery.policy.jobconfig import Exchange
from trainchaos.recovery.process.local import memory_beside
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.event_ring import RingWriter


class FakePlatform(Platform):
    """Says what the test says of its nodes."""

    host = "127.0.0.1"

    def __init__(self, *, replaceable: bool = True) -> None:
        self.why: dict[int, str] = {}
        self._replaceable = replaceable

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Nobody dials."""

    def replaceable(self, node: int) -> bool:
        return self._replaceable

    def gone(self, node: int) -> str | None:
        return self.why.get(node)

    def close(self) -> Sequence[str]:
        return []


@pytest.mark.parametrize(
    ("after_s", "replaceable", "steps", "begun"),
    [
        pytest.param(
            0.0,
            True,
            [("gone", 1), ("look",), ("lost", 1), ("look",), ("await_begun", 1), ("look",)],
            [1],
            id="it is lost and gone: once",
        ),
        pytest.param(0.0, True, [("lost", 0), ("at_once",)], [], id="it is only unreachable"),
        pytest.param(
            0.0,
            True,
            [("lost", 0), ("back", 0), ("gone", 0), ("at_once",)],
            [],
            id="it came back",
        ),
        pytest.param(
            0.0, False, [("gone", 0), ("lost", 0), ("at_once",)], [], id="there is no other machine"
        ),
        pytest.param(
            600.0, True, [("gone", 0), ("lost", 0), ("look",)], [], id="the others recover first"
        ),
        pytest.param(
            600.0, True, [("gone", 0), ("lost", 0), ("at_once",)], [0], id="an arm waits for it"
        ),
    ],
)
def test_which_nodes_begin_anew(
    after_s: float,
    replaceable: bool,
    steps: list[tuple[Any, ...]],
    begun: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "AGAIN_AFTER_S", after_s)
    platform, anew = FakePlatform(replaceable=replaceable), list[int]()
    made = Renewal(platform, anew.append, nodes=2)
    others: dict[str, Callable[..., Any]] = {
        "gone": lambda node: platform.why.update({node: "it burned"}),
        "at_once": lambda: made.look(at_once=True),
        "await_begun": lambda node: made.await_begun(node, limit_s=LIMIT_S),
    }
    try:
        for node in range(2):
            made.start(node)
            made.await_begun(node, limit_s=LIMIT_S)
        anew.clear()
        for act, *nodes in steps:
            (others.get(act) or getattr(made, act))(*nodes)
        for node in range(2):
            made.await_begun(node, limit_s=LIMIT_S)
    finally:
        made.close()
    assert anew == begun


def test_what_keeps_a_node_from_beginning_is_told_to_whoever_waits_for_it() -> None:
    hold = threading.Event()

    def begin(node: int) -> None:
        if node == 0:
            raise InfrastructureError("no more containers")
        hold.wait(LIMIT_S)

    made = Renewal(FakePlatform(), begin, nodes=2)
    for node in range(2):
        made.start(node)
    with pytest.raises(InfrastructureError, match="no more containers"):
        made.await_begun(0, limit_s=LIMIT_S)
    with pytest.raises(InfrastructureError, match="node 1 did not begin within 0 s"):
        made.await_begun(1, limit_s=0.01)
    hold.set()
    made.close()


# ---- what a lost node leaves


def write_some(folder: Path, *, named: bool) -> tuple[Path, int]:
    """A rank's event log of five events, the last of which are only in the memory it shared; and
    that memory.
    """
    fd = progress_counters.create(memory_beside(folder / "w0.jsonl") if named else None)
    ring = progress_counters.ring_of(fd)
    writer = RingWriter(folder, "w0", time.monotonic_ns, ring)
    for step in range(3):
        writer.write(Kind.ERROR_RAISED, type="X", message=str(step))
    writer.flush()
    writer._end_thread()  # from here on nothing moves lines to the file, as after a SIGKILL
    for step in range(3, 5):
        writer.write(Kind.ERROR_RAISED, type="X", message=str(step))
    EventWriter.abandon(writer)
    ring.close()
    return folder / "w0.jsonl", fd


@pytest.mark.parametrize("forwarded", [0, 1, 2])
@pytest.mark.parametrize("named", [True, False])
def test_a_log_is_completed_from_the_nodes_file_and_the_memory_behind_it(
    tmp_path: Path, forwarded: int, named: bool
) -> None:
    (tmp_path / "node").mkdir()
    log, fd = write_some(tmp_path / "node", named=named)
    os.close(fd)
    kept = tmp_path / "w0.jsonl"
    kept.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:forwarded]))
    for _ in range(2):
        gather(log, kept)
    found = read_actor(kept)
    assert not found.problems
    assert [event.seq for event in found.events] == list(range(5 if named else 3))


def test_a_node_that_left_nothing_changes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "w0.jsonl"
    gather(tmp_path / "nowhere" / "w0.jsonl", kept)
    assert not kept.exists()


# ---- the platform of this machine


@pytest.fixture
def wanted(tmp_path: Path) -> PlatformNeeds:
    (tmp_path / "run").mkdir()
    run = RunDirectory(tmp_path / "run")
    return PlatformNeeds(
        run=run, cells=[], nodes=2, needs=frozenset(), will=Ledger(run.ledger).will
    )


@pytest.fixture
def platform(wanted: PlatformNeeds) -> Iterator[LoopbackPlatform]:
    made = LoopbackPlatform(wanted)
    yield made
    assert made.close() == []


SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def test_addresses_of_nodes_are_their_own_and_above_the_hosts(platform: LoopbackPlatform) -> None:
    addresses = [platform.address(node) for node in (0, 1, 249, 250, 251, 62_499)]
    packed = [tuple(map(int, address.split("."))) for address in addresses]
    assert packed == sorted(packed) and len(set(packed)) == len(packed)
    assert packed[0] > (127, 0, 0, 1) and all(
        0 <= part < 255 for address in packed for part in address
    )


def test_a_node_is_killed_paused_and_begun_anew_and_covered_by_the_ledger(
    platform: LoopbackPlatform, wanted: PlatformNeeds
) -> None:
    assert platform.gone(0) is None
    platform.start(0, SLEEPS, {})
    (entry,) = read_open(wanted.run.ledger)
    assert isinstance(entry.undo, Undo) and not entry.undo.idle()
    assert platform.gone(0) is None and platform.machines.seen(0) == {"state": "running"}
    for _ in range(2):
        platform.machines.pause(0)
    until(lambda: platform.machines.seen(0) == {"state": "paused"})
    for _ in range(2):
        platform.machines.resume(0)
    until(lambda: platform.machines.seen(0) == {"state": "running"})
    assert platform.machines.kill(0)["signal"] == "SIGKILL"
    assert until(lambda: platform.gone(0)) == "its agent has ended"
    assert isinstance(platform.gone(0), TakenAway)
    assert platform.machines.seen(0) == {"state": "exited", "exit_code": None, "signal": 9}
    platform.start(0, SLEEPS, {})
    assert platform.gone(0) is None and entry.undo.idle()


def test_what_an_agent_said_last_is_why_its_node_is_gone(platform: LoopbackPlatform) -> None:
    platform.start(1, [sys.executable, "-S", "-c", "raise SystemExit('no torch on this node')"], {})
    until(lambda: platform.machines.seen(1)["state"] == "exited")
    assert platform.gone(1) == "its agent ended with exit code 1: no torch on this node"
    assert not isinstance(platform.gone(1), TakenAway), "it is an error of its own"


def test_what_no_process_can_stand_for_is_refused(platform: LoopbackPlatform) -> None:
    for act in (
        lambda: platform.machines.isolate(0),
        lambda: platform.machines.limit_memory(0, 1),
        lambda: platform.machines.limit_cores(0, 0.5),
    ):
        with pytest.raises(OSError, match="stands for the node"):
            act()
    with pytest.raises(ProcessLookupError, match="node 7 was never started"):
        platform.machines.kill(7)


def test_a_command_that_is_not_there_is_said(platform: LoopbackPlatform) -> None:
    with pytest.raises(InfrastructureError, match="cannot start the agent of node 0: No such file"):
        platform.start(0, ["/nowhere/python"], {})


# ---- a session


class OwnCommand(LoopbackPlatform):
    """Agents that are this Python code instead."""

    code = ""

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().start(node, [sys.executable, "-S", "-c", self.code, *command[1:]], environment)


@pytest.fixture
def cell() -> Cell:
    """Two nodes."""
    scenario = Scenario(
        version=1,
        name="nodes",
        workload=WorkloadSpec(kind="mlp", ranks=2, steps=4, global_batch=4),
        recovery=RecoverySpec(strategy="drop-replica"),
        launcher=LauncherSpec(kind="agents", nodes=2),
    )
    return Cell(id="default", params={}, scenario=scenario)


def test_two_sessions_of_one_run_have_agents_of_their_own(tmp_path: Path, cell: Cell) -> None:
    """As where cells of a matrix differ in their launcher."""
    run = RunDirectory(tmp_path)
    OwnCommand.code = "input()"
    with nodes_session([cell], run, OwnCommand), nodes_session([cell], run, OwnCommand):
        tokens = {path.read_text() for path in tmp_path.glob("agents*/token")}
        assert len(tokens) == 2
    assert not list(tmp_path.glob("agents*"))


def test_an_agent_that_cannot_run_is_named_with_its_last_words_and_nothing_is_left(
    tmp_path: Path, cell: Cell
) -> None:
    run = RunDirectory(tmp_path)
    run.make_arm("arm")
    OwnCommand.code = "import sys; sys.exit('no torch here') if '--node=1' in sys.argv else input()"
    setup: Any = SimpleNamespace(cell=cell, id="arm", run=run)
    with nodes_session([cell], run, OwnCommand) as session:
        token = tmp_path / "agents" / "token"
        assert token.stat().st_mode & 0o777 == 0o600 and len(bytes.fromhex(token.read_text())) == 32
        until(lambda: session.platform.gone(1))
        with pytest.raises(
            InfrastructureError, match="node 1: its agent ended with exit code 1: no torch here"
        ):
            session.cluster(setup)
    assert not (tmp_path / "agents").exists()
    assert all(entry.undo is not None and entry.undo.idle() for entry in read_open(run.ledger))


def test_a_node_with_another_torch_is_refused() -> None:
    info = replace(info_of(0), versions={"torch": "1.0", "python": sys.version.split()[0]})
    with pytest.raises(InfrastructureError, match=r"node 0 has torch 1\.0 and not"):
        refuse_other(info)
    refuse_other(replace(info, versions=versions()))


def session_of_one(folder: Path) -> NodesSession:
    """Of one node, which never comes."""
    run = RunDirectory(folder)
    wanted = PlatformNeeds(
        run=run, cells=[], nodes=1, needs=frozenset(), will=Ledger(run.ledger).will
    )
    return NodesSession(FakePlatform(), wanted, folder / "agents")


def test_a_run_that_is_told_to_end_waits_for_no_node(tmp_path: Path) -> None:
    made = session_of_one(tmp_path)
    setup: Any = SimpleNamespace(
        cell=SimpleNamespace(scenario=SimpleNamespace(topology=SimpleNamespace(nodes=1)))
    )
    try:
        with pytest.raises(Stopped):
            made.cluster(setup, lambda: True)
    finally:
        made.close()


def test_who_is_turned_away_is_in_a_file_of_the_run(tmp_path: Path) -> None:
    made = session_of_one(tmp_path)
    try:
        with socket.create_connection(made.fleet.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until(lambda: (tmp_path / REFUSALS).exists())
    finally:
        made.close()
    assert "127.0.0.1" in (tmp_path / REFUSALS).read_text()


# ---- devices


def info_of(node: int, *devices: str) -> NodeInfo:
    """A node that is there."""
    return NodeInfo(
        node=node,
        host="h",
        boot="b",
        address="127.0.0.1",
        devices=devices,
        scratch="",
        incarnation="i",
        versions={},
        connected=True,
        silent_s=0.0,
        lost="",
        offset_ns=None,
        bound_ns=None,
    )


def dealt(device: str, *nodes: tuple[str, ...]) -> tuple[dict[int, list[str]], Exchange]:
    """Devices by node of a job of 4 ranks and 1 spare."""
    scenario = Scenario(
        version=1,
        name="nodes",
        workload=WorkloadSpec(kind="mlp", ranks=4, steps=4, global_batch=4, device=device),
        recovery=RecoverySpec(strategy="hot-spare"),
        launcher=LauncherSpec(kind="agents", nodes=len(nodes)),
    )
    setup: Any = SimpleNamespace(cell=Cell(id="default", params={}, scenario=scenario))
    return places(setup, {node: info_of(node, *devices) for node, devices in enumerate(nodes)})


def test_each_process_has_a_gpu_of_its_node_or_they_share_and_talk_through_gloo() -> None:
    two = ("cuda:0", "cuda:1")
    assert dealt("cuda", two, two, ("cuda:0",)) == (
        {0: ["cuda:0@n0", "cuda:1@n0"], 1: ["cuda:0@n1", "cuda:1@n1"], 2: ["cuda:0@n2"]},
        Exchange("nccl"),
    )
    assert dealt("cuda", two, ("cuda:0",), two)[1] == Exchange("gloo")
    slots = {0: ["cpu:0@n0", "cpu:1@n0"], 1: ["cpu:0@n1", "cpu:1@n1"], 2: ["cpu:0@n2"]}
    assert dealt("cpu", two, (), ()) == (slots, Exchange("gloo"))
    with pytest.raises(InfrastructureError, match=r"node 1 \(h\) has no CUDA device"):
        dealt("cuda", two, (), two)


# ---- between arms


@pytest.mark.long
@pytest.mark.real
def test_a_node_that_an_arm_left_standing_still_goes_on_for_the_next(
    platform: LoopbackPlatform,
) -> None:
    session: Any = SimpleNamespace(platform=platform, _played=False)
    platform.start(0, SLEEPS, {})
    platform.machines.pause(0)
    until(lambda: platform.machines.seen(0) == {"state": "paused"})
    # before the first arm nobody did anything, and nobody is asked
    NodesSession._resume(session, range(2))
    assert platform.machines.seen(0) == {"state": "paused"}
    NodesSession._resume(session, range(2))  # node 1 was never started
    until(lambda: platform.machines.seen(0) == {"state": "running"})


def test_turns_are_made_between_arms_only_and_all_is_handed_over() -> None:
    turned = threading.Semaphore(0)
    made: list[int] = []

    def turn(timeout_s: float) -> list[int]:
        made.append(len(made))
        turned.release()
        return made[-1:]

    tending = Tending(turn)
    assert tending.end() == []
    tending.begin()
    tending.begin()  # it goes on
    for _ in range(3):
        assert turned.acquire(timeout=LIMIT_S)
    found = tending.end()
    assert found == made and len(found) >= 3
    assert not any(thread.name == "tend-nodes" for thread in threading.enumerate())
    assert tending.end() == [], "it was handed over"


def test_an_error_is_that_of_the_next_arm_and_the_one_after_has_none() -> None:
    failed = threading.Event()

    def turn(timeout_s: float) -> list[int]:
        failed.set()
        raise InfrastructureError("no more descriptors")

    tending = Tending(turn)
    tending.begin()
    assert failed.wait(LIMIT_S)
    with pytest.raises(InfrastructureError, match="no more descriptors"):
        tending.end()
    assert tending.end() == []


@pytest.mark.long
@pytest.mark.real
def test_agents_are_admitted_and_asked_while_other_cells_are_played(
    tmp_path: Path, cell: Cell
) -> None:
    """They would take the coordinator for lost, and end, after their lease."""
    with nodes_session([cell], RunDirectory(tmp_path), LoopbackPlatform) as session:
        happened = session._tending._happened
        until(lambda: {one.node for one in [*happened] if isinstance(one, NodeJoined)} == {0, 1})
        until(lambda: {one.node for one in [*happened] if isinstance(one, ClockMeasured)} == {0, 1})
