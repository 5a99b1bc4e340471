"""A fleet by a clock of the test's own, with agents that do exactly what they are told: whom it
misses, and when.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.clusters.nodes import heard
from tests.support.running import LIMIT_S
from trainchaos.chaos.cli import cli
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.nodes.coordinator.fleet import Fleet, FleetReport, NodeGone
from trainchaos.recovery.nodes.coordinator.loss import FleetLimits, TakenAway
from trainchaos.recovery.nodes.coordinator.node_events import event_of
from trainchaos.recovery.nodes.coordinator.node_state import (
    ClockMeasured,
    NodeJoined,
    NodeLost,
    NodeState,
    NodeWarned,
    NotKept,
)
from trainchaos.recovery.nodes.link import handshake
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.nodes.link.link import Link
from trainchaos.recovery.nodes.link.protocol import (
    Beat,
    Ended,
    Fence,
    Hello,
    Lines,
    Ping,
    Pong,
    Pressed,
    Sinking,
    Start,
    Started,
    Tell,
    Warned,
    Welcome,
)
from trainchaos.recovery.process.host import Dying, Exited, MessageReceived
from trainchaos.recovery.process.pressure import PressureReading
from trainchaos.recovery.transport.wire import Abort, Message, Parked, Ready, Stop

TOKEN = b"t" * 32
SECOND = 1_000_000_000
MARK = (1, 7, "collective", 2, 1000 * SECOND, 6, 41, 0)


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now_ns = 10_000 * SECOND

    def __call__(self) -> int:
        return self.now_ns


class Puppet:
    """An agent in the test's hands."""

    def __init__(
        self, fleet: Fleet, node: int, incarnation: str, boot: str = "elsewhere", **hello: Any
    ) -> None:
        self.fleet = fleet
        self.heard: list[Any] = []
        self.number = self.got = 0
        self.link = dialled(fleet)
        self.link.put(
            Hello(
                node=node,
                incarnation=incarnation,
                epoch=0,
                host="h",
                boot=boot,
                address=f"127.0.1.{node}",
                **hello,
            )
        )
        self.link.flush()

    def say(self, *frames: Message, reliable: bool = True) -> None:
        for frame in frames:
            self.number += reliable
            self.link.put(frame, number=self.number if reliable else 0, got=self.got)
        self.link.flush()

    def listen(self) -> list[Any]:
        try:
            parcels = self.link.take()
            self.got = max([self.got, *(parcel.number for parcel in parcels)])
            self.heard += [parcel.frame for parcel in parcels]
        except OSError:
            pass
        return self.heard


def dialled(fleet: Fleet) -> Link:
    sock = socket.create_connection(fleet.address, timeout=LIMIT_S)
    return Link(sock, handshake.enter(sock, TOKEN, limit_s=LIMIT_S), agent=True)


class Stage:
    """A fleet and its clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.refused: list[str] = []
        self.gone: dict[int, str] = {}
        self.asked = 0
        self.fleet = Fleet(
            token=TOKEN, host="127.0.0.1", clock_ns=self.clock, refused=self.refused.append
        )
        self.fleet.await_nodes([], limit_s=1.0, gone=self._gone)
        self.fleet.begin("arm", folder)

    def _gone(self, node: int) -> str | None:
        self.asked += 1
        return self.gone.get(node)

    def until(self, enough: Callable[[list[FleetReport]], bool]) -> list[FleetReport]:
        """Turn at one moment of the test's clock until something is there; without measurements of
        clocks, which may come between any two others.
        """
        found: list[FleetReport] = []
        deadline_s = time.monotonic() + LIMIT_S
        while not enough(found):
            assert time.monotonic() < deadline_s, found
            found += [r for r in self.fleet.wait(0.01) if not isinstance(r, ClockMeasured)]
        return found

    def until_kind(self, kind: type) -> list[FleetReport]:
        return self.until(lambda found: any(isinstance(r, kind) for r in found))

    def join(self, node: int = 0, incarnation: str = "a", **hello: Any) -> Puppet:
        puppet = Puppet(self.fleet, node, incarnation, **hello)
        self.until_kind(NodeJoined)
        assert isinstance(self.answer(puppet), Welcome)
        return puppet

    def answer(self, puppet: Puppet) -> Any:
        """The first that it hears."""
        self.until(lambda _: bool(puppet.listen()))
        return puppet.heard[0]

    def spawn(self, puppet: Puppet, name: str = "w0", node: int = 0) -> None:
        """A process that it says to have."""
        puppet.say(Started(process=name, pid=4711))
        assert (
            self.fleet.spawn(name, node, {"name": name}, mode="warm", log=f"{name}.jsonl") == 4711
        )

    def passes(self, seconds: float) -> list[FleetReport]:
        """Time, and a turn."""
        self.clock.now_ns += int(seconds * SECOND)
        return [r for r in self.fleet.wait(0.0) if not isinstance(r, ClockMeasured)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.fleet.away()


def test_a_process_is_what_its_agent_says(stage: Stage, tmp_path: Path) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    stage.until(lambda _: any(isinstance(f, Start) for f in puppet.listen()))
    puppet.say(Beat(time_ns=1, marks={"w0": MARK}, states={"w0": "T"}), reliable=False)
    puppet.say(heard("w0", Ready()), Sinking(process="w0"), Sinking(process="w0"))
    puppet.say(Lines(file="w0.jsonl", offset=0, text="one\n"))
    puppet.say(Ended(process="w0", exit_code=3, signal=None, time_ns=5, mark=MARK))
    reports = stage.until_kind(Exited)
    assert [type(r) for r in reports] == [MessageReceived, Dying, Exited]
    mark = stage.fleet.mark("w0")
    assert (mark.generation, mark.step, mark.phase, mark.committed, mark.last_seq) == (
        1,
        7,
        "collective",
        6,
        41,
    )
    assert (tmp_path / "w0.jsonl").read_text() == "one\n"
    assert not stage.fleet.send("w0", Stop())


def test_times_of_another_machine_are_brought_to_our_clock(stage: Stage) -> None:
    puppet, ahead_ns = stage.join(), 3600 * SECOND
    stage.spawn(puppet)
    for _ in range(20):
        stage.passes(0.05)
        stage.until(lambda _: isinstance(puppet.listen()[-1], Ping))
        ping = puppet.heard[-1]
        at_ns = ping.sent_ns + ahead_ns
        puppet.say(Pong(sent_ns=ping.sent_ns, received_ns=at_ns, answered_ns=at_ns), reliable=False)
        puppet.heard.clear()
        puppet.say(
            Beat(time_ns=at_ns, marks={"w0": (*MARK[:4], at_ns, *MARK[5:])}, states={}),
            reliable=False,
        )
        stage.until(lambda _, at_ns=at_ns: bool(stage.fleet.mark("w0").time_ns))  # type: ignore[misc]
        if stage.clock.now_ns > 10_001 * SECOND:
            break
        puppet.heard.append(ping)
    info = stage.fleet.nodes()[0]
    assert info.offset_ns is not None and info.bound_ns is not None
    assert abs(info.offset_ns - ahead_ns) <= info.bound_ns < SECOND
    puppet.say(
        Ended(
            process="w0", exit_code=0, signal=None, time_ns=stage.clock.now_ns + ahead_ns, mark=MARK
        )
    )
    (end,) = [r for r in stage.until_kind(Exited) if isinstance(r, Exited)]
    assert abs(end.time_ns - stage.clock.now_ns) <= info.bound_ns


def pressed(at_ns: int) -> Pressed:
    reading = PressureReading(cpus=2, some_s=0.5, steal_s=None, ranks={"w0": (3.0, 1.0)})
    return Pressed(time_ns=at_ns, reading=reading)


def test_what_an_agent_reads_of_its_processors_is_known_at_its_time(stage: Stage) -> None:
    puppet = stage.join(boot=boot_id())
    puppet.say(pressed(stage.clock.now_ns - 7), reliable=False)
    stage.until(lambda _: bool(stage.fleet.pressures()))
    read_ns, reading = stage.fleet.pressures()[0]
    assert read_ns == stage.clock.now_ns - 7
    assert reading == PressureReading(cpus=2, some_s=0.5, steal_s=None, ranks={"w0": (3.0, 1.0)})


def test_nothing_is_known_of_a_machine_whose_clock_is_not(stage: Stage) -> None:
    puppet = stage.join()
    puppet.say(pressed(1), reliable=False)
    puppet.say(Warned())
    stage.until(lambda reports: any(isinstance(r, NodeWarned) for r in reports))
    assert stage.fleet.pressures() == {}


def beating(puppet: Puppet, **states: str) -> None:
    puppet.say(Beat(time_ns=1, marks=dict.fromkeys(states, MARK), states=states), reliable=False)


def heard_of(stage: Stage, puppet: Puppet, seconds: float, node: int = 1) -> list[FleetReport]:
    """Time passes, in which one node is heard of."""
    found = []
    for _ in range(round(seconds / 0.5)):
        beating(puppet)
        stage.until(lambda _: not stage.fleet.nodes()[node].silent_s)
        found += stage.passes(0.5)
    return found


def test_silence_is_not_loss_until_the_lease_is_over(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    stage.passes(0.0)
    for _ in range(2):
        assert stage.passes(0.7) == []
    assert stage.asked == 0
    assert stage.passes(0.2) == [] and stage.asked == 1, "now the platform is asked"
    for _ in range(129):
        assert stage.passes(0.99) == []
    assert stage.fleet.alive("w0")
    reports = [report for _ in range(3) for report in stage.passes(0.9)]
    assert [type(r) for r in reports] == [NodeLost, Exited]
    assert "longer than the lease of its agent" in str(reports[0])


def test_a_silent_node_that_a_decision_waits_for_is_given_up_and_fenced(stage: Stage) -> None:
    silent, other = stage.join(0), stage.join(1, "z")
    stage.spawn(silent)
    stage.until(lambda _: any(isinstance(f, Start) for f in silent.listen()))
    beating(silent)
    assert heard_of(stage, other, 40.0) == [], "nobody needs it"
    assert stage.fleet.send("w0", Abort(generation=1))
    assert heard_of(stage, other, 14.5) == []
    reports = heard_of(stage, other, 1.0)
    assert [type(r) for r in reports] == [NodeLost, Exited]
    assert "the job needs it, and it was not heard of for 15 s" in str(reports[0])
    stage.until(lambda _: any(isinstance(f, Fence) for f in silent.listen()))
    again = Puppet(stage.fleet, 0, "a", processes={"w0": 4711})
    assert isinstance(stage.answer(again), Fence), "whatever it had not read"


def test_a_coordinator_that_hears_nobody_gives_nobody_up(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    assert stage.fleet.send("w0", Abort(generation=1))
    stage.passes(0.0)
    assert [report for _ in range(100) for report in stage.passes(0.9)] == []


def test_what_was_known_of_a_silent_node_says_nothing_about_now(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    beating(puppet, w0="S")
    stage.until(lambda _: stage.fleet.os_state("w0") == "S")
    stage.passes(0.2)
    assert stage.fleet.os_state("w0") == "S"
    stage.passes(0.1)
    assert stage.fleet.os_state("w0") == "?"
    beating(puppet)
    stage.until(lambda _: stage.fleet.os_state("w0") == "S")
    puppet.link.reset()
    stage.until(lambda _: stage.fleet.os_state("w0") == "?")


def test_nothing_is_asked_of_a_silent_node_and_another_can_be_soon(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.fleet.begin("arm", None)
    puppet = stage.join()
    stage.passes(0.0)
    stage.passes(0.9)
    stage.passes(0.9)
    stage.clock.now_ns += SECOND
    waited, until = [], stage.fleet.until

    def noted(state: NodeState, done: Callable[[], bool], limit_s: float, what: str) -> None:
        waited.append(limit_s)
        until(state, done, limit_s, what)

    monkeypatch.setattr(stage.fleet, "until", noted)
    with pytest.raises(NodeGone, match=r"has not answered for 2\.\d s: w0 is not asked for"):
        stage.fleet.spawn("w0", 0, {}, mode="warm", log="")
    assert waited == [FleetLimits().pass_s]
    assert not any(isinstance(f, Start) for f in puppet.listen())


def test_a_node_that_was_started_anew_takes_the_place_of_its_silent_self(stage: Stage) -> None:
    stage.spawn(stage.join())
    stage.passes(0.0)
    stage.passes(0.9)
    stage.passes(0.9)
    Puppet(stage.fleet, 0, "b")
    reports = stage.until_kind(NodeJoined)
    assert [type(r) for r in reports] == [NodeLost, Exited, NodeJoined]


def test_a_connection_that_the_kernel_gives_up_is_only_missed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.spawn(stage.join())
    link = stage.fleet.states[0].link
    assert link is not None

    def take() -> list[Any]:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(link, "take", take)
    stage.fleet._read(stage.fleet.states[0])
    assert not stage.fleet.nodes()[0].connected and stage.passes(1.0) == []


def test_silence_is_loss_when_the_platform_says_so(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    stage.gone[0] = "its container was killed"
    assert stage.passes(0.8) == []
    reports = stage.passes(0.8)
    assert reports[0] == NodeLost(node=0, why="its container was killed")
    assert event_of(reports[0]) == (
        Kind.NODE_LOST,
        {"node": 0, "why": "its container was killed"},
    )


def test_an_end_that_came_from_outside_is_written_down_as_one(stage: Stage) -> None:
    stage.join()
    stage.gone[0] = TakenAway("its machine is down")
    reports = stage.passes(1.6)
    assert reports[0] == NodeLost(node=0, why="its machine is down", taken_away=True)
    assert event_of(reports[0]) == (
        Kind.NODE_LOST,
        {"node": 0, "why": "its machine is down", "taken_away": True},
    )


def test_a_coordinator_that_slept_holds_it_against_nobody(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    stage.passes(0.0)
    assert stage.passes(100.0) == []
    assert stage.passes(0.5) == [] and stage.fleet.alive("w0")


def hung_up_on(stage: Stage) -> None:
    """An agent that hears nothing of a coordinator that sleeps for 4 s."""
    puppet = stage.join()
    stage.spawn(puppet)
    stage.passes(0.0)
    stage.clock.now_ns += 4 * SECOND
    puppet.link.close()
    stage.until(lambda _: not stage.fleet.nodes()[0].connected)


def test_one_that_hung_up_on_a_coordinator_that_slept_may_come_back(stage: Stage) -> None:
    hung_up_on(stage)
    for _ in range(4):
        assert stage.passes(0.9) == [], "it is busy dialling"
    again = Puppet(stage.fleet, 0, "a", processes={"w0": 4711})
    assert isinstance(stage.answer(again), Welcome)
    assert stage.passes(0.5) == [] and stage.fleet.alive("w0")


def test_an_agent_that_ended_is_a_lost_node(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    puppet.link.close()
    stage.until(lambda _: not stage.fleet.nodes()[0].connected)
    assert stage.passes(0.04) == stage.passes(0.10) == stage.passes(0.10) == []
    reports = stage.passes(0.02)
    assert [type(r) for r in reports] == [NodeLost, Exited]


def failing(stage: Stage) -> Puppet:
    """One of two nodes hangs up, and a rank of the other says that its connections broke."""
    puppet, other = stage.join(), stage.join(1, "z")
    stage.spawn(puppet)
    stage.spawn(other, "w1", 1)
    puppet.link.reset()
    stage.until(lambda _: not stage.fleet.nodes()[0].connected)
    other.say(heard("w1", Parked(generation=1, step=7, valid=True, why="failed")))
    stage.until_kind(MessageReceived)
    return puppet


def test_a_connection_that_ends_as_peers_fail_is_a_hint_then_a_loss(stage: Stage) -> None:
    failing(stage)
    assert stage.passes(0.04) == []
    assert stage.passes(0.02) == [Dying(process="w0")]
    assert stage.passes(0.10) == []
    reports = stage.passes(0.10)
    assert [type(r) for r in reports] == [NodeLost, Exited]


@pytest.mark.parametrize("close", ["reset", "close"])
def test_a_node_whose_ranks_are_seen_to_train_is_not_lost_by_its_connection(
    stage: Stage, close: str
) -> None:
    puppet, other = stage.join(), stage.join(1, "z")
    stage.spawn(puppet)
    stage.spawn(other, "w1", 1)
    for one, name in ((puppet, "w0"), (other, "w1")):
        stage.until(lambda _, one=one: any(isinstance(f, Start) for f in one.listen()))  # type: ignore[misc]
        beating(one, **{name: "S"})
    stage.until(lambda _: stage.fleet.mark("w0").step == stage.fleet.mark("w1").step == MARK[1])
    getattr(puppet.link, close)()
    stage.until(lambda _: not stage.fleet.nodes()[0].connected)
    later = (*MARK[:5], MARK[5] + 2, *MARK[6:])
    other.say(Beat(time_ns=1, marks={"w1": later}, states={}), reliable=False)
    stage.until(lambda _: stage.fleet.mark("w1").committed == later[5])
    assert heard_of(stage, other, 60.0) == [] and stage.fleet.alive("w0")
    again = Puppet(stage.fleet, 0, "a", processes={"w0": 4711})
    assert isinstance(stage.answer(again), Welcome)


def test_an_agent_that_comes_back_at_once_is_the_same(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    puppet.link.close()
    stage.until(lambda _: not stage.fleet.nodes()[0].connected)
    again = Puppet(stage.fleet, 0, "a", processes={"w0": 4711})
    assert isinstance(stage.answer(again), Welcome)
    again.number = puppet.number
    assert stage.passes(0.5) == [] and stage.fleet.alive("w0")
    again.say(heard("w0", Ready()))
    stage.until_kind(MessageReceived)


def test_one_that_comes_back_after_it_was_counted_dead_is_fenced(stage: Stage) -> None:
    failing(stage)
    assert stage.passes(0.06) == [Dying(process="w0")]
    again = Puppet(stage.fleet, 0, "a", processes={"w0": 4711})
    reports = stage.until_kind(Exited)
    assert [type(r) for r in reports] == [NodeLost, Exited]
    assert isinstance(stage.answer(again), Fence)
    stage.join(0, "b")
    assert stage.fleet.nodes()[0].lost == ""


def test_another_agent_in_the_place_of_one_that_is_missed_means_that_it_is_lost(
    stage: Stage,
) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    puppet.link.close()
    stage.until(lambda _: not stage.fleet.nodes()[0].connected)
    Puppet(stage.fleet, 0, "b")
    reports = stage.until_kind(NodeJoined)
    assert [type(r) for r in reports] == [NodeLost, Exited, NodeJoined]


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (Lines(file="../w0", offset=0, text="x"), "a file outside of the run's directory"),
        (Lines(file="/w0", offset=0, text="x"), "a file outside of the run's directory"),
        (Lines(file="w0", offset=0, text="€"), "bytes of 'w0' that are none"),
        (
            Beat(time_ns=1, marks={"w0": (*MARK[:2], "none", *MARK[3:])}, states={}),
            "a mark of an unknown phase",
        ),
    ],
)
def test_an_agent_that_talks_nonsense_is_cut_off_and_logged(
    stage: Stage, frame: Message, why: str
) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    puppet.say(frame)
    stage.until(lambda _: bool(stage.refused))
    assert stage.refused[0].startswith("node 0 at 127.0.1.0: ") and why in stage.refused[0]
    assert not stage.fleet.nodes()[0].connected


def test_what_one_node_says_of_anothers_process_is_not_heard(stage: Stage, tmp_path: Path) -> None:
    one, other = stage.join(0), stage.join(1, "z")
    stage.spawn(one)
    other.say(
        Ended(process="w0", exit_code=0, signal=None, time_ns=1, mark=MARK), Sinking(process="w0")
    )
    other.say(Lines(file="w0.jsonl", offset=0, text="lie\n"), heard("w0", Ready()))
    other.say(Beat(time_ns=1, marks={"w0": MARK}, states={}), reliable=False)
    stage.spawn(other, "w1", 1)  # by then all that was heard
    assert stage.passes(0.0) == [] and stage.fleet.alive("w0") and stage.fleet.mark("w0").step == 0
    assert not (tmp_path / "w0.jsonl").exists()


def test_a_disk_here_that_takes_nothing_ends_no_job_and_is_told_once(
    stage: Stage, tmp_path: Path
) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    (tmp_path / "w0.jsonl").mkdir()
    puppet.say(
        Lines(file="w0.jsonl", offset=0, text="xyz"), Lines(file="w0.jsonl", offset=3, text="more")
    )
    told = [report for report in stage.until_kind(NotKept) if isinstance(report, NotKept)]
    (tmp_path / "w0.jsonl").rmdir()
    puppet.say(
        Lines(file="w0.jsonl", offset=0, text="late"), Lines(file="w0.log", offset=0, text="said")
    )
    told += [
        n for n in stage.until(lambda _: (tmp_path / "w0.log").exists()) if isinstance(n, NotKept)
    ]
    assert [(report.file, report.bytes) for report in told] == [
        ("w0.jsonl", 3)
    ] and "Is a directory" in told[0].why
    assert event_of(told[0]) == (
        Kind.FILES_DROPPED,
        {
            "files": ["w0.jsonl"],
            "bytes": 3,
            "why": "they could not be written here: Is a directory",
        },
    )
    assert not (tmp_path / "w0.jsonl").exists(), (
        "a file stays a beginning of what its process wrote"
    )


def test_a_message_to_a_node_that_is_missed_arrives_when_it_is_back(stage: Stage) -> None:
    puppet = stage.join()
    stage.spawn(puppet)
    puppet.link.close()
    stage.until(lambda _: not stage.fleet.nodes()[0].connected)
    assert stage.fleet.send("w0", Stop())
    again = Puppet(stage.fleet, 0, "a")
    stage.until(lambda _: any(isinstance(f, Tell) for f in again.listen()))
    assert sum(isinstance(f, Tell) for f in again.heard) == 1


def test_who_dials_in_while_the_coordinator_is_away_finds_nobody(stage: Stage) -> None:
    stage.join()
    stage.fleet.away()
    with pytest.raises(OSError):
        dialled(stage.fleet)
    stage.fleet.back()
    assert stage.passes(1.0) == [], "it has longer to come back to another coordinator"
    again = Puppet(stage.fleet, 0, "a")
    answer = stage.answer(again)
    assert isinstance(answer, Welcome) and answer.epoch == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--coordinator", "nowhere"], "not HOST:PORT: 'nowhere'"),
        (["--coordinator", "h:1"], "cannot read the token in token: No such file"),
        (["--coordinator", "h:1", "--node", "-1"], "is not in the range"),
    ],
)
def test_chaos_agent_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(
        cli,
        ["agent", "--node", "0", "--token-file", "token", "--scratch", "s", *options],
        standalone_mode=True,
    )
    assert found.exit_code != 0
    assert why in f"{found.output}{found.exception}"


def test_a_parcel_out_of_turn_cuts_the_connection(stage: Stage) -> None:
    puppet = stage.join()
    puppet.number = 5
    puppet.say(Sinking(process="w0"))
    stage.until(lambda _: bool(stage.refused))
    assert "message 6 came where 1 was due" in stage.refused[0]
