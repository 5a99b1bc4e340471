"""Agents as processes, with tiny ranks: what a coordinator sees of them, and what becomes of them
without it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.nodes.test_nodes_handshake import admit
from tests.support.clusters.cluster import agent_command
from tests.support.clusters.nodes import ROOT, AgentProcess, Yard
from tests.support.running import LIMIT_S, readable
from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.cli.takeover_log import lock
from trainchaos.recovery.nodes import serve
from trainchaos.recovery.nodes.coordinator.fleet import Fleet, NodeGone
from trainchaos.recovery.nodes.coordinator.loss import FleetLimits
from trainchaos.recovery.nodes.coordinator.node_state import (
    NodeJoined,
    NodeLost,
    NodeWarned,
)
from trainchaos.recovery.nodes.link import handshake
from trainchaos.recovery.nodes.link.link import Link, Parcel, Post
from trainchaos.recovery.nodes.link.protocol import (
    Ended,
    Fence,
    Hello,
    Refused,
    Welcome,
)
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.host import Dying, Exited, MessageReceived
from trainchaos.recovery.transport.wire import Extra, Notice, Ready, Stop

pytestmark = pytest.mark.real
FAST = FleetLimits(silence_s=1.5, pass_s=1.5, answer_s=1.5, node_s=3.0)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """A fleet with the agents that a test starts."""
    yard = Yard(tmp_path)
    yield yard
    yard.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Two nodes that stay, also while other tests have the worker for minutes."""
    yard = Yard(tmp_path_factory.mktemp("shared"))
    try:
        yard.start(0, 1, lease_s=3600.0)
        yield yard
    finally:
        try:
            assert yard.fleet.close() == {}
            assert [agent.wait() for agent in yard.agents.values()] == [0, 0]
        finally:
            for agent in yard.agents.values():
                agent.close()


@pytest.fixture
def arm(shared: Yard) -> Yard:
    """The same, with an arm begun."""
    shared.run = shared.folder / f"run{time.monotonic_ns()}"
    assert shared.fleet.begin("arm", shared.folder) == {}
    return shared


def eventually(true: Callable[[], bool], what: str = "") -> None:
    until_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until_s, what
        threading.Event().wait(0.01)


def ready(yard: Yard, *names: str) -> None:
    """These said that they are ready."""
    left = set(names)
    for report in yard.until_kind(MessageReceived, len(names)):
        if isinstance(report, MessageReceived) and isinstance(report.message, Ready):
            left.discard(report.process)
    assert not left


def events_of(yard: Yard, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in yard.file(f"events/{name}.jsonl").read_text().splitlines()]


def gone(pids: list[int]) -> None:
    eventually(lambda: all(processes.state(pid) in "XZ" for pid in pids), f"{pids} live on")


# ---- what a coordinator sees


@pytest.mark.parametrize("mode", ["warm", "cold"])
def test_a_process_of_a_node_is_started_heard_and_ends(arm: Yard, mode: str) -> None:
    pid = arm.spawn("w0", 1, mode)
    assert arm.fleet.alive("w0") and processes.state(pid) in "RSD"
    ready(arm, "w0")
    arm.order("w0", "step", 7)
    arm.until_kind(MessageReceived)
    mark = arm.fleet.mark("w0")
    assert (mark.step, mark.committed, mark.phase) == (7, 7, "collective"), (
        "never behind what it says"
    )
    assert abs(mark.time_ns - time.monotonic_ns()) < 60e9
    assert arm.fleet.send("w0", Stop())
    end = arm.until_kind(Exited)[-1]
    assert isinstance(end, Exited) and (end.exit_code, end.signal) == (0, None)
    assert not arm.fleet.alive("w0") and arm.fleet.os_state("w0") == "X"
    assert not arm.fleet.send("w0", Stop())
    arm.fleet.signal("w0", signal.SIGKILL)  # no error, and nobody else is hit
    assert [e["kind"] for e in events_of(arm, "w0")] == ["actor_started", "actor_ended"]


def test_a_node_says_now_and_again_how_short_of_processors_its_ranks_are(arm: Yard) -> None:
    def newest(node: int) -> tuple[int, dict[str, tuple[float, float]]]:
        read_ns, reading = arm.fleet.pressures().get(node, (0, None))
        return read_ns, reading.ranks if reading else {}

    arm.spawn("w0", 1)
    arm.until(lambda _: "w0" in newest(1)[1])
    first_ns, first = newest(1)
    arm.until(lambda _: newest(1)[0] > first_ns)
    assert all(b >= a >= 0 for a, b in zip(first["w0"], newest(1)[1]["w0"], strict=True))
    assert "w0" not in newest(0)[1]


def test_what_a_killed_process_wrote_is_there_before_its_exit(arm: Yard) -> None:
    arm.spawn("w0", 0)
    ready(arm, "w0")
    arm.order("w0", "print", 300)
    arm.order("w0", "log", 3000)
    arm.until_kind(MessageReceived)
    arm.fleet.signal("w0", signal.SIGKILL)
    reports = arm.until_kind(Exited)
    end = reports[-1]
    assert isinstance(end, Exited) and end.how == "signal 9"
    # The hint that it dies comes before or not at all: a process this small may be dead before
    # anybody looks.
    assert [type(r) for r in reports if getattr(r, "process", "") == "w0"] in (
        [Dying, Exited],
        [Exited],
    )
    events = events_of(arm, "w0")
    assert [event["seq"] for event in events] == list(range(3001))
    assert arm.fleet.mark("w0").last_seq == 3000
    output = arm.file("w0.log").read_bytes()
    assert (
        output.endswith(b"\n299\n\xff\xfe\n")
        and output == (arm.scratch(0) / arm.run.name / "w0.log").read_bytes()
    )


def test_messages_come_in_order_and_before_the_exit(arm: Yard) -> None:
    arm.spawn("w0", 0)
    ready(arm, "w0")
    arm.order("w0", "say", 5000)
    arm.order("w0", "exit", 3)
    reports = arm.until_kind(Exited)
    said = [r.message.payload["number"] for r in reports if isinstance(r, MessageReceived)]
    assert said == list(range(5000))
    assert isinstance(reports[-1], Exited) and reports[-1].exit_code == 3


def test_a_stopped_process_shows_as_stopped(arm: Yard) -> None:
    arm.spawn("w0", 0)
    ready(arm, "w0")
    arm.fleet.signal("w0", signal.SIGSTOP)
    arm.until(lambda _: arm.fleet.os_state("w0") == "T")
    assert arm.fleet.alive("w0")
    arm.fleet.signal("w0", signal.SIGKILL)
    ended = arm.until_kind(Exited)[-1]
    assert isinstance(ended, Exited) and ended.signal == signal.SIGKILL
    assert arm.fleet.os_state("w0") == "X"


@pytest.mark.long
def test_a_machine_that_takes_long_to_start_a_process_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a fork takes seconds, longer than either side waits for a word of the
    other.
    """
    arm, beats = Yard(tmp_path, limits=FAST), 0
    try:
        arm.start(0)
        children = {
            pid
            for pid, fields in processes.everybody()
            if fields[1] == str(arm.agents[0].process.pid)
        }
        (server,) = (
            pid
            for pid in children
            if b"trainchaos.recovery.process.forkserver"
            in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(server, signal.SIGSTOP)

        def heard(
            state: Any, beat: Any, before: Callable[[Any, Any], None] = arm.fleet._processes._beat
        ) -> None:
            nonlocal beats
            before(state, beat)
            beats += 1
            if beats == 36:  # of one every 0.1 s
                os.kill(server, signal.SIGCONT)

        monkeypatch.setattr(arm.fleet._processes, "_beat", heard)
        arm.spawn("w0", 0)
        ready(arm, "w0")
        assert beats >= 36 and "ended" not in arm.agents[0].said()
    finally:
        arm.close()


def test_an_arm_that_ends_leaves_nothing_and_its_files_are_complete(arm: Yard) -> None:
    pids = [arm.spawn("w0", 0), arm.spawn("w1", 1)]
    ready(arm, "w0", "w1")
    arm.order("w1", "log", 50)
    arm.until_kind(MessageReceived)
    scratch = arm.scratch(1) / arm.run.name
    assert (scratch / "w1.log").exists()
    assert arm.fleet.begin("next", arm.folder) == {}
    gone(pids)
    assert [event["seq"] for event in events_of(arm, "w1")] == list(range(51))
    arm.until(lambda _: not (scratch / "w1.log").exists())  # once all is known to have come
    assert not any(isinstance(r, MessageReceived | Dying | Exited) for r in arm.fleet.wait(0)), (
        "of what is over nothing is told"
    )


def test_a_process_that_cannot_live_is_an_exit(arm: Yard) -> None:
    arm.fleet.spawn("w0", 0, {**arm.config("w0", 0), "name": None}, mode="warm", log="")
    end = arm.until_kind(Exited)[-1]
    assert isinstance(end, Exited) and end.exit_code == 71


def test_a_node_that_cannot_start_a_process_says_why(arm: Yard) -> None:
    with pytest.raises(
        InfrastructureError, match=r"cannot start w0: a file outside of the scratch"
    ):
        arm.fleet.spawn("w0", 0, arm.config("w0", 0), mode="warm", log="../w0.jsonl")
    with pytest.raises(InfrastructureError, match=r"has 300\d+ bytes, over 262144"):
        arm.fleet.spawn("w1", 0, {**arm.config("w1", 0), "x" * 299_900: 1}, mode="warm", log="")
    with pytest.raises(NodeGone, match="node 7: its agent has never dialled"):
        arm.spawn("w2", 7)


@pytest.mark.long
def test_orphans_of_its_processes_are_reaped_by_the_agent(arm: Yard) -> None:
    arm.spawn("w0", 0)
    ready(arm, "w0")
    arm.order("w0", "orphan")
    (said,) = [r for r in arm.until_kind(MessageReceived) if isinstance(r, MessageReceived)]
    pid = said.message.payload["pid"]
    eventually(lambda: processes.state(pid) == "X")
    assert processes.state(pid) == "X", "not even a zombie is left"


def test_an_idle_node_says_next_to_nothing(arm: Yard) -> None:
    names = [f"w{n}" for n in range(8)]
    for name in names:
        arm.spawn(name, 0)
    ready(arm, *names)
    link = arm.fleet.states[0].link
    assert link is not None
    before, began_s = (link.sent_bytes, link.received_bytes), time.monotonic()
    arm.until(lambda _: time.monotonic() > began_s + 1.0)
    seconds = time.monotonic() - began_s
    assert link.sent_bytes - before[0] < 2000 * seconds, "bytes to it in a second"
    assert link.received_bytes - before[1] < 8000 * seconds, (
        "bytes from it: two beats and what the ranks logged when they began"
    )


# ---- nodes that are lost


def test_a_killed_agent_is_a_lost_node_and_nothing_is_left_of_it(yard: Yard) -> None:
    yard.start(0)
    yard.fleet.begin("arm", yard.folder)
    pids = [yard.spawn("w0", 0), yard.spawn("w1", 0)]
    ready(yard, "w0", "w1")
    yard.agents[0].signal(signal.SIGKILL)
    reports = yard.until_kind(Exited, 2)
    lost = [r for r in reports if isinstance(r, NodeLost)]
    assert len(lost) == 1 and lost[0].why == "its agent ended with -9"
    assert {(r.process, r.signal) for r in reports if isinstance(r, Exited)} == {
        ("w0", 9),
        ("w1", 9),
    }
    gone(pids)
    info = yard.fleet.nodes()[0]
    assert (info.connected, info.lost) == (False, "its agent ended with -9")
    with pytest.raises(NodeGone, match="its agent ended with -9"):
        yard.spawn("w2", 0)
    yard.start(0, tag="again")
    ready_again = yard.spawn("w3", 0)
    assert ready_again and yard.fleet.nodes()[0].incarnation != info.incarnation


def test_a_frozen_agent_is_only_unreachable_until_it_is_given_up_and_fenced(tmp_path: Path) -> None:
    yard = Yard(tmp_path, limits=FAST)
    try:
        yard.start(0, 1)
        yard.fleet.begin("arm", yard.folder)
        pid = yard.spawn("w0", 0)
        ready(yard, "w0")
        yard.agents[0].signal(signal.SIGSTOP)
        frozen_s = time.monotonic()
        with pytest.raises(NodeGone, match="has not answered"):
            yard.spawn("w1", 0)
        assert yard.fleet.alive("w0"), "nobody says that it is gone"
        reports = yard.until_kind(Exited)
        assert time.monotonic() - frozen_s >= FAST.node_s
        assert any(isinstance(r, NodeLost) and "the job needs it" in r.why for r in reports)
        yard.agents[0].signal(signal.SIGCONT)
        joined = yard.until_kind(NodeJoined)
        assert isinstance(joined[-1], NodeJoined) and joined[-1].info.lost == ""
        gone([pid])
        assert "everything here is killed" in yard.agents[0].said()
        yard.spawn("w2", 0)
        ready(yard, "w2")
    finally:
        yard.close()


def test_a_cut_connection_is_made_again_and_nothing_is_lost(tmp_path: Path) -> None:
    yard = Yard(tmp_path, limits=FleetLimits(hint_s=10.0, redial_s=20.0))
    try:
        cut_again_and_again(yard)
    finally:
        yard.close()


def cut_again_and_again(yard: Yard) -> None:
    yard.start(0)
    yard.fleet.begin("arm", yard.folder)
    yard.spawn("w0", 0)
    ready(yard, "w0")
    yard.order("w0", "say", 3000)
    said: list[int] = []
    for _ in range(20):  # in the middle of it
        said += [
            r.message.payload["number"]
            for r in yard.fleet.wait(0.001)
            if isinstance(r, MessageReceived)
        ]
        link = yard.fleet.states[0].link
        if link is not None:
            with suppress(OSError):  # it was cut, and that was not noticed yet
                link._sock.shutdown(socket.SHUT_RDWR)
        yard.await_nodes(0)
    yard.order("w0", "exit", 0)
    reports = yard.until_kind(Exited)
    assert not any(isinstance(r, NodeLost | Dying) and r != Dying(process="w0") for r in reports)
    said += [r.message.payload["number"] for r in reports if isinstance(r, MessageReceived)]
    assert said == list(range(3000))


# ---- a coordinator that is away


def test_away_and_back_nothing_is_lost_or_doubled(yard: Yard) -> None:
    yard.start(0, 1)
    yard.fleet.begin("arm", yard.folder)
    yard.spawn("w0", 0)
    yard.spawn("w1", 1)
    ready(yard, "w0", "w1")
    yard.order("w0", "say", 2000)
    yard.order("w0", "log", 200)
    yard.order("w1", "exit", 5)
    threading.Event().wait(0.05)  # some of it is on its way
    yard.fleet.away()
    assert yard.fleet.wait(0.3) == []
    assert not any(info.connected for info in yard.fleet.nodes().values())
    yard.order("w0", "say", 1)  # by whoever acts meanwhile
    yard.fleet.back()
    reports = yard.until(
        lambda r: (
            any(isinstance(x, Exited) for x in r)
            and sum(isinstance(x, MessageReceived) and x.process == "w0" for x in r) >= 2002
        )
    )
    said = [
        r.message
        for r in reports
        if isinstance(r, MessageReceived) and isinstance(r.message, Extra)
    ]
    numbers = [m.payload["number"] for m in said if m.topic == "said"]
    assert numbers == [*range(2000), 0]
    assert [(r.process, r.exit_code) for r in reports if isinstance(r, Exited)] == [("w1", 5)]
    assert not any(isinstance(r, NodeLost) for r in reports)
    yard.fleet.signal("w0", signal.SIGKILL)
    yard.until_kind(Exited)
    assert [event["seq"] for event in events_of(yard, "w0")] == list(range(201))


def test_a_coordinator_of_an_older_epoch_is_not_obeyed(yard: Yard) -> None:
    yard.start(0)
    yard.fleet.begin("arm", yard.folder)
    pid = yard.spawn("w0", 0)
    ready(yard, "w0")
    yard.fleet.away()
    yard.fleet.back()
    yard.await_nodes(0)
    port = yard.fleet.address[1]
    yard.fleet.away()
    with socket.create_server(("127.0.0.1", port)) as listener:
        link, hello = answer(listener, yard.token)
        assert (hello.epoch, hello.processes) == (2, {"w0": pid})
        link.put(Welcome(epoch=1, coordinator="old"))
        link.flush()
        poll = select.poll()
        poll.register(link.fileno(), select.POLLIN)
        with pytest.raises(ConnectionError):
            while poll.poll(LIMIT_S * 1000):
                link.take()
        link.close()
    eventually(lambda: "its epoch is 1, and one of 2 was obeyed before" in yard.agents[0].said())
    assert processes.state(pid) in "RSD"
    yard.fleet.back()
    yard.await_nodes(0)
    assert yard.fleet.alive("w0")


def await_parcel(link: Link) -> Parcel:
    """The first parcel of a connection. Raises OSError."""
    while readable(link):
        if parcels := link.take():
            return parcels[0]
    raise TimeoutError


def answer(listener: socket.socket, token: bytes) -> tuple[Link, Hello]:
    """Be a coordinator that somebody dials."""
    listener.settimeout(LIMIT_S)
    sock, _ = listener.accept()
    link = Link(sock, admit(sock, token), agent=False)
    hello = await_parcel(link).frame
    assert isinstance(hello, Hello)
    return link, hello


@pytest.mark.long
def test_a_coordinator_that_is_silent_is_dialled_again(yard: Yard) -> None:
    """A network that was cut for a while would keep the old connection dead for longer
    than that.
    """
    yard.start(0)
    yard.fleet.begin("arm", yard.folder)
    pid = yard.spawn("w0", 0)
    ready(yard, "w0")
    before = yard.fleet.states[0].link
    yard.agents[0].log.write_text("")
    # nobody turns here meanwhile
    eventually(lambda: "nothing came for 3 s" in yard.agents[0].said())
    yard.until(lambda _: yard.fleet.states[0].link is not before)
    yard.await_nodes(0)
    yard.order("w0", "say")
    reports = yard.until_kind(MessageReceived)
    assert (
        not any(isinstance(r, NodeLost | Exited) for r in reports) and processes.state(pid) in "RSD"
    )


@pytest.mark.long
def test_an_agent_of_thousands_of_nodes_is_as_patient_as_it_was_told(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    yard.fleet.away()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = yard.agent(0, port=listener.getsockname()[1])
        try:
            link, _ = answer(listener, yard.token)
            link.put(Welcome(epoch=1, coordinator="one", ping_s=1.2))
            link.flush()
            begun_s = time.monotonic()
            eventually(lambda: "nothing came for 3.6 s" in agent.said())
            assert time.monotonic() - begun_s >= 3.6
            link.close()
        finally:
            agent.close()
            yard.close()


def test_an_agent_that_has_obeyed_a_newer_coordinator_is_turned_away(yard: Yard) -> None:
    answer = say_hello(
        yard, Hello(node=0, incarnation="x", epoch=9, host="h", boot="b", address="127.0.0.1")
    )
    assert answer == Refused(why="it has obeyed a coordinator of epoch 9, this is 1")
    assert yard.fleet.nodes() == {}
    assert "has obeyed a coordinator of epoch 9, this is 1" in yard.refused[0]


def say_hello(yard: Yard, hello: Hello) -> Any:
    """Be an agent: the first answer."""
    sock = socket.create_connection(yard.fleet.address, timeout=LIMIT_S)
    found: list[Any] = []

    def talk() -> None:
        link = Link(sock, handshake.enter(sock, yard.token), agent=True)
        link.put(hello)
        link.flush()
        try:
            found.append(await_parcel(link))
        except OSError as error:
            found.append(error)
        link.close()

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    yard.until(lambda _: bool(found))
    thread.join(LIMIT_S)
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0].frame


def test_an_agent_with_processes_of_an_unknown_coordinator_is_fenced(yard: Yard) -> None:
    hello = Hello(
        node=0, incarnation="x", epoch=0, host="h", boot="b", address="a", processes={"w0": 1}
    )
    assert isinstance(say_hello(yard, hello), Fence)
    assert yard.fleet.nodes() == {}


def test_an_agent_ends_when_the_lease_is_over(yard: Yard) -> None:
    yard.start(0, lease_s=0.5)
    yard.fleet.begin("arm", yard.folder)
    pid = yard.spawn("w0", 0)
    ready(yard, "w0")
    yard.fleet.away()
    assert yard.agents[0].wait() == 1
    assert "the coordinator was away for 0.5 s" in yard.agents[0].said()
    assert processes.state(pid) == "X"


# ---- who is not let in


def test_a_wrong_token_is_named_when_a_node_does_not_come(yard: Yard) -> None:
    yard.agents[0] = yard.agent(0, token=b"w" * 32)
    eventually(lambda: bool(yard.refused))
    with pytest.raises(InfrastructureError) as error:
        yard.await_nodes(0, limit_s=0.1)
    assert (
        "node 0: its agent was turned away: 127.0.1.1, which says that it is node 0: the other side"
        " does not know the run's token" in error.value.message
    )
    said = yard.agents[0].said()
    assert "no way to the coordinator" in said and "the token was refused" in said
    assert yard.token.hex() not in said and (b"w" * 32).hex() not in said


def test_a_wrong_token_is_not_laid_to_the_charge_of_another_node(yard: Yard) -> None:
    """Node 2 has not been started yet."""
    yard.agents[1] = yard.agent(1, token=b"w" * 32)
    eventually(lambda: bool(yard.refused))
    with pytest.raises(InfrastructureError) as error:
        yard.await_nodes(2, limit_s=0.1)
    assert (
        "node 2: its agent has not dialled (turned away: 127.0.1.2, which says that it is node 1:"
        in error.value.message
    )


@pytest.mark.long
def test_an_agent_that_is_never_admitted_says_so_once_and_ends(yard: Yard) -> None:
    """For a number that is taken and for a wrong token: it dials on for its lease, as it may be the
    successor of one that is not known to be dead yet.
    """
    yard.start(0)
    second = yard.agent(0, lease_s=4.0, tag="second")
    stranger = yard.agent(1, lease_s=4.0, tag="stranger", token=b"w" * 32)
    try:
        yard.until(
            lambda _: second.process.poll() is not None and stranger.process.poll() is not None
        )
    finally:
        second.close()
        stranger.close()
    assert (second.wait(), stranger.wait()) == (2, 2)
    taken = f"node 0 has an agent already, at 127.0.1.1 ({os.uname().nodename})"
    assert second.said().splitlines() == [
        f"agent of node 0: turned away by the coordinator, and dials again: {taken}",
        f"agent of node 0: ends: not admitted for 4 s: {taken}",
    ]
    said = stranger.said().splitlines()
    assert len(said) == 2 and said[0].endswith(" yet: the token was refused")
    assert said[1] == "agent of node 1: ends: not admitted for 4 s: the token was refused"
    assert len(yard.refused) == 2, yard.refused
    assert yard.fleet.nodes()[0].connected


def test_a_node_that_is_gone_before_it_came_is_named(yard: Yard) -> None:
    yard.agents[0] = AgentProcess(
        [sys.executable, "-c", "raise SystemExit(9)"], yard.folder / "agent.log"
    )
    with pytest.raises(InfrastructureError, match="node 0: its agent ended with 9"):
        yard.await_nodes(0)


def test_a_second_agent_of_a_node_waits_until_the_first_is_lost(yard: Yard) -> None:
    yard.start(0)
    first = yard.fleet.nodes()[0].incarnation
    second = yard.agent(0, tag="second")
    try:
        yard.until(lambda _: bool(yard.refused))
        assert "node 0 has an agent already" in yard.refused[0]
        assert yard.fleet.nodes()[0].incarnation == first and yard.fleet.nodes()[0].connected
        yard.agents[0].signal(signal.SIGKILL)
        reports = yard.until_kind(NodeJoined, 1)
        assert any(isinstance(r, NodeLost) for r in reports)
        assert yard.fleet.nodes()[0].incarnation != first
    finally:
        second.close()


def refused(token: Path, scratch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """An agent that ends before it connects."""
    return subprocess.run(
        agent_command("127.0.0.1:1", 0, token, scratch, *options),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("write", "mode", "why"),
    [
        ("00" * 32, 0o644, "others may read the token"),
        ("zz", 0o600, "not hexadecimal"),
        ("00", 0o600, "has 1 bytes, under 16"),
        (None, 0, "cannot read the token"),
    ],
)
@pytest.mark.sample(2)
def test_a_bad_token_file_is_an_error(
    tmp_path: Path, write: str | None, mode: int, why: str
) -> None:
    file = tmp_path / "token"
    if write is not None:
        file.write_text(write)
        file.chmod(mode)
    options = ("--address", "127.0.0.1", "--entry", "a:b", "--cold", "a")
    found = refused(file, tmp_path, *options)
    assert found.returncode == 2 and why in found.stderr and "Traceback" not in found.stderr


def test_an_agent_takes_no_directory_for_its_own_that_a_job_s_logs_come_to(tmp_path: Path) -> None:
    """It would delete them as soon as they have come."""
    token, events = tmp_path / "token", tmp_path / "events"
    token.write_text("ab" * 32)
    token.chmod(0o600)
    events.mkdir()
    os.close(lock(events))
    (tmp_path / "same").symlink_to(events)
    found = refused(token, tmp_path / "same")
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert (
        "keeps the event logs of a job" in found.stderr and "name another --scratch" in found.stderr
    )


def test_an_agent_that_was_there_before_its_supervisor_does_not_take_its_directory_either(
    yard: Yard,
) -> None:
    yard.start(0)
    yard.fleet.away()
    os.close(lock(yard.scratch(0)))
    yard.fleet.back()
    eventually(lambda: bool(yard.fleet.wait(0.01)) and yard.gone(0) is not None, "it goes on")
    assert yard.agents[0].wait() == 2 and "keeps the event logs of a job" in yard.agents[0].said()


@pytest.mark.parametrize("text", ["x", ":1", "host:", "host:0", "host:99999", "host:1x"])
def test_a_bad_address_is_an_error(text: str) -> None:
    with pytest.raises(Exception, match="not HOST:PORT"):
        serve.address_of(text)


# ---- ends


def test_a_warned_node_tells_its_ranks_and_the_coordinator(yard: Yard) -> None:
    yard.start(0)
    yard.fleet.begin("arm", yard.folder)
    yard.spawn("w0", 0)
    ready(yard, "w0")
    yard.agents[0].signal(signal.SIGTERM)
    reports = yard.until(
        lambda r: (
            any(isinstance(x, NodeWarned) for x in r)
            and any(isinstance(x, MessageReceived) and isinstance(x.message, Notice) for x in r)
        )
    )
    assert not any(isinstance(r, Exited | NodeLost) for r in reports)
    assert yard.order("w0", "say")
    yard.until_kind(MessageReceived)


def test_an_interrupted_agent_takes_everything_with_it(yard: Yard) -> None:
    yard.start(0)
    yard.fleet.begin("arm", yard.folder)
    pid = yard.spawn("w0", 0)
    ready(yard, "w0")
    yard.agents[0].signal(signal.SIGINT)
    assert yard.agents[0].wait() == 0
    assert processes.state(pid) == "X"
    assert any(isinstance(r, NodeLost) for r in yard.until_kind(Exited))


def test_an_address_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(
        InfrastructureError, match=r"cannot listen for the nodes' agents at 192\.0\.2\.1"
    ):
        Fleet(token=b"t" * 32, host="192.0.2.1")


def test_another_coordinator_is_told_what_waits_from_its_own_first_message_on(yard: Yard) -> None:
    yard.start(0)
    yard.fleet.begin("arm", yard.folder)
    pid = yard.spawn("w0", 0)
    ready(yard, "w0")
    yard.order("w0", "exit", 3)
    yard.fleet.flush_all()
    yard.fleet.away()
    eventually(lambda: processes.state(pid) == "X")
    with socket.create_server(yard.fleet.address) as listener:
        link, _ = answer(listener, yard.token)
        link.put(Welcome(epoch=2, coordinator="another"))
        link.flush()
        post, heard = Post(limit=10), []
        until_s = time.monotonic() + LIMIT_S
        while not any(isinstance(frame, Ended) for frame in heard):
            assert time.monotonic() < until_s
            heard += [parcel.frame for parcel in link.take() if post.accept(parcel)]
        link.close()


def test_another_coordinator_inherits_what_it_knows_hears_of_ends_again_and_kills_the_rest(
    yard: Yard,
) -> None:
    yard.start(0)
    yard.fleet.begin("arm", yard.folder)
    pids = [yard.spawn(name, 0) for name in ("w0", "w1", "w2")]
    ready(yard, "w0", "w1", "w2")
    yard.order("w1", "exit", 5)
    yard.until_kind(
        Exited, process="w1"
    )  # and it dies before it writes that down, as before it writes down w2
    yard.fleet.wait(0.0)
    yard.fleet.away()
    host, port = yard.fleet.address
    yard.fleet = Fleet(token=yard.token, host=host, port=port, epoch=2)
    yard.fleet.inherit(yard.folder, {"w0": (0, pids[0]), "w1": (0, pids[1])})
    yard.await_nodes(0)
    (ended,) = [r for r in yard.until_kind(Exited) if isinstance(r, Exited)]
    assert (ended.process, ended.exit_code) == ("w1", 5)
    eventually(lambda: processes.state(pids[2]) == "X")
    assert yard.fleet.alive("w0") and processes.state(pids[0]) in "RSD"
    yard.order("w0", "exit", 3)
    assert [r.process for r in yard.until_kind(Exited) if isinstance(r, Exited)] == ["w0"]


def test_an_inherited_node_that_does_not_come_back_is_forsaken(yard: Yard) -> None:
    yard.fleet.inherit(yard.folder, {"w0": (0, 41), "w1": (1, 42)})
    yard.fleet.forsake(1, "its agent was not back")
    lost, ended = yard.fleet.wait(0.0)
    assert lost == NodeLost(node=1, why="its agent was not back")
    assert isinstance(ended, Exited) and (ended.process, ended.signal) == ("w1", signal.SIGKILL)
    assert (
        not yard.fleet.send("w1", Extra(topic="do", payload={}))
        and yard.fleet.os_state("w1") == "X"
    )
    assert yard.fleet.alive("w0")
