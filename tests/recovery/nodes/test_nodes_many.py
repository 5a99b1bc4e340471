"""Many nodes: what a coordinator does in a turn, and to start a process, grows with what there is
to do, not with the nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.nodes.test_nodes_fleet import TOKEN, Clock, Puppet
from tests.support.running import LIMIT_S
from trainchaos.chaos.errors import NoPlaceLeft
from trainchaos.chaos.events.log import ORCHESTRATOR, EventWriter, Kind
from trainchaos.recovery.cli import roster
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.cli.hosts import RETURN_LIMIT_S, _Arrivals
from trainchaos.recovery.cli.roster import FEW_ASKED, LeastTaken, ScriptRoster
from trainchaos.recovery.cli.takeover_log import UNWRITTEN, TakeoverLog, read_takeover_log
from trainchaos.recovery.detection.silence import MAX_LOOK_S, REST, PacedLook, PollTime, max_look_s
from trainchaos.recovery.nodes.coordinator.connections import Connections
from trainchaos.recovery.nodes.coordinator.fleet import SERVED_NS, Fleet
from trainchaos.recovery.nodes.link.beat_rate import FIRST_EVERY_NS, FIRST_PINGS, next_ping_ns
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.nodes.link.protocol import Beat, Start

NODES = 12


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """A coordinator whose clock stands still."""
    made = Fleet(token=TOKEN, host="127.0.0.1", clock_ns=Clock())
    yield made
    made.away()


def test_a_turn_serves_only_nodes_for_which_there_is_something_to_do(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppets = [Puppet(fleet, node, f"agent-{node}") for node in range(NODES)]
    fleet.await_nodes(range(NODES), limit_s=LIMIT_S, gone=lambda _: None)
    for _ in range(4):
        fleet.wait(0.0)
    done: Counter[str] = Counter()
    for name in ("flush", "_look_after", "_read"):
        whole = getattr(Connections, name)

        def counted(self: Any, *words: Any, name: str = name, whole: Any = whole) -> Any:
            done[name] += 1
            return whole(self, *words)

        monkeypatch.setattr(Connections, name, counted)
    fleet.wait(0.0)
    assert not done, "nothing came, nothing is due"
    puppets[3].say(Beat(time_ns=1, marks={}, states={}), reliable=False)
    until_s = time.monotonic() + LIMIT_S
    while not done["_read"] and time.monotonic() < until_s:
        fleet.wait(0.01)
    assert done == {"_read": 1}
    puppets[5].link.reset()
    while done["_read"] < 2 and time.monotonic() < until_s:
        fleet.wait(0.01)
    assert 0 < done["_look_after"] <= 3, "a node that is missing is looked after, and no other"


def test_pings_are_spread_over_the_second_and_stay_so_when_all_come_late() -> None:
    nodes, now_ns = 2048, 10**15
    for late_ns in (0, 1_900_000_000, 300_000_000):
        now_ns += late_ns
        due = [next_ping_ns(node, FIRST_PINGS, now_ns) - now_ns for node in range(nodes)]
        assert all(0 < each <= 1_000_000_000 for each in due), "an agent waits no longer"
        windows = Counter(each // 10_000_000 for each in due)
        assert max(windows.values()) <= 1.5 * nodes / 100, "in 10 ms not many more than a hundredth"
    one = next_ping_ns(7, FIRST_PINGS, now_ns)
    assert next_ping_ns(7, FIRST_PINGS, one) == one + 1_000_000_000
    assert next_ping_ns(7, FIRST_PINGS, one + 40_000_000) == one + 1_000_000_000
    assert next_ping_ns(7, 1, now_ns) == now_ns + FIRST_EVERY_NS


def test_spots_are_taken_in_the_order_that_each_start_alone_would_find() -> None:
    def avoids(spot: tuple[int, str]) -> bool:
        return spot[0] == 2

    for device in ("cpu", "cuda:0"):
        there, taken = [(node, device) for node in range(5) for _ in range(3)], [(1, device)]
        order = LeastTaken(there, taken, avoids)
        for _ in range(40):
            best = order.best()
            assert best == LeastTaken(there, taken, avoids).best()
            order.took(best)
            taken.append(best)


class Room:
    """Notes nothing."""

    def begins(self, name: str) -> None:
        """It does."""


class Agents:
    """A host that starts processes by agents; those of the nodes in ``dead`` take none."""

    def __init__(self, nodes: int, each: int, dead: frozenset[int] = frozenset()) -> None:
        self._nodes, self._each, self._dead = range(nodes), each, dead
        self.looks = self.open = self.most_open = self.reserved = self._now_ns = 0
        self.look_ns = 1_000_000
        self.names: list[str] = []

    def now_ns(self) -> int:
        self._now_ns += self.look_ns
        return self._now_ns

    def usable(self) -> range:
        self.looks += 1
        return self._nodes

    def places_on(self, node: int) -> list[str]:
        return ["cpu"] * self._each

    def ask(self, name: str, role: str, mode: str, device: str, node: int) -> None:
        if node in self._dead and node % 2:
            raise ConnectionError(f"node {node}: it was not asked")
        self.names.append(name)
        assert len(self.names) < 1000, "the same nodes are asked again and again"
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if int(name[1:]) >= self.reserved:
            assert self.open <= FEW_ASKED < UNWRITTEN, "a supervisor that takes over skips so many"

    def started(self, name: str, node: int) -> int:
        self.open -= 1
        if node in self._dead:
            raise ConnectionError(f"node {node}: it did not answer")
        return 1 + self.names.index(name)

    def may_return(self) -> bool:
        return False

    def write(self, kind: Kind, *, below: int) -> None:
        assert kind is Kind.NAMES_RESERVED
        self.reserved = below


def roster_of(host: Agents) -> ScriptRoster:
    nobody = AvoidedPlaces(())
    return ScriptRoster(host, Room(), None, nobody, host.write, lambda: False)  # type: ignore[arg-type]


def started(host: Agents, count: int) -> list[tuple[str, int]]:
    jobs = roster_of(host)
    jobs.expect("worker", "warm", count)
    made = [jobs.start("worker", "warm") for _ in range(count)]
    return [(one.name, one.node) for one in made]


def test_many_processes_are_asked_for_ahead_and_placed_by_one_order() -> None:
    host = Agents(64, 8)
    made = started(host, 512)
    assert [name for name, _ in made] == [f"w{n}" for n in range(512)]
    assert Counter(node for _, node in made) == dict.fromkeys(range(64), 8)
    assert (host.most_open, host.open, host.reserved) == (512, 0, 512)
    assert host.looks < 64


def test_not_more_are_asked_for_at_a_time_than_a_coordinator_can_bear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "MOST_ASKED", 100)
    host = Agents(64, 8)
    assert len(started(host, 512)) == 512
    assert host.most_open == 100


def test_names_that_the_log_does_not_reserve_are_asked_for_in_small_numbers() -> None:
    host = Agents(64, 8, dead=frozenset(range(0, 40, 2)))
    assert len(started(host, 300)) == 300
    assert host.most_open == 300 and len(host.names) > 300


def test_who_takes_over_uses_no_name_that_may_be_in_use(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, ORCHESTRATOR, time.monotonic_ns)
    writer.write(Kind.ACTOR_STARTED, pid=1, host="here", wall_ns=1, boot=boot_id())
    spawned = {"pid": 7, "role": "worker", "mode": "warm", "node": 0, "device": "cpu"}
    writer.write(Kind.PROCESS_SPAWNED, process="w3", **spawned)
    log = read_takeover_log(tmp_path)
    assert isinstance(log, TakeoverLog) and log.names > 3 + FEW_ASKED
    writer.write(Kind.NAMES_RESERVED, below=5000)
    writer.write(Kind.PROCESS_SPAWNED, process="w4", **spawned)
    log = read_takeover_log(tmp_path)
    assert isinstance(log, TakeoverLog) and log.names > 5000 + FEW_ASKED
    writer.close()


def test_nodes_are_served_while_many_processes_are_asked_for() -> None:
    clock = Clock()
    fleet = Fleet(token=TOKEN, host="127.0.0.1", clock_ns=clock)
    puppet = Puppet(fleet, 0, "agent")
    fleet.await_nodes([0], limit_s=LIMIT_S, gone=lambda _: None)
    for number in range(3):
        fleet.ask_for(f"w{number}", 0, {}, mode="warm", log="")
        clock.now_ns += 2 * SERVED_NS
    asked = [frame.process for frame in puppet.listen() if isinstance(frame, Start)]
    assert asked[:2] == ["w0", "w1"]
    fleet.away()


def test_turns_that_take_long_leave_as_much_time_for_the_processes_to_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 8,192 nodes one takes a second: 65,536 processes would be asked for in as many seconds."""
    clock = Clock()
    fleet = Fleet(token=TOKEN, host="127.0.0.1", clock_ns=clock)
    puppet = Puppet(fleet, 0, "agent")
    fleet.await_nodes([0], limit_s=LIMIT_S, gone=lambda _: None)
    turns = []

    def turn(connections: Connections, timeout_s: float) -> None:
        turns.append(clock.now_ns)
        clock.now_ns += 10 * SERVED_NS
        connections.turned_ns = connections.states[0].silent_ns = clock.now_ns

    monkeypatch.setattr(Connections, "turn", turn)
    for number in range(400):
        fleet.ask_for(f"w{number}", 0, {}, mode="warm", log="")
        clock.now_ns += SERVED_NS // 10
    assert 3 <= len(turns) <= 5, "one in twice its time"
    monkeypatch.undo()
    puppet.link.close()
    fleet.away()


def test_nodes_that_do_not_answer_get_no_process_and_use_up_names() -> None:
    host = Agents(8, 4, dead=frozenset({2, 5}))
    made = started(host, 24)
    assert Counter(node for _, node in made) == dict.fromkeys({0, 1, 3, 4, 6, 7}, 4)
    assert len({name for name, _ in made}) == 24
    with pytest.raises(NoPlaceLeft, match=r"it did not answer|it was not asked"):
        started(Agents(3, 2, dead=frozenset({0, 1, 2})), 1)


def test_a_node_that_failed_is_not_tried_again_when_places_are_ordered_anew() -> None:
    host = Agents(3, 2, dead=frozenset({0}))
    host.look_ns = 0
    jobs = roster_of(host)
    made = jobs.start("worker", "warm")
    assert (made.node, made.name) == (1, "w1")
    assert host.looks > 1, "a clock that stands still has it order them for each try"


def test_one_process_is_asked_for_alone() -> None:
    host = Agents(4, 4)
    jobs = roster_of(host)
    for _ in range(3):
        jobs.start("worker", "warm")
    assert (host.most_open, host.open) == (1, 0)


def test_agents_are_awaited_while_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, there = [0.0], list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    arrivals = _Arrivals(lambda: there)
    for number in range(5):
        now_s[0] += 0.9 * RETURN_LIMIT_S
        there.append(number)
        assert not arrivals.over(), "one has come since"
    now_s[0] += 1.1 * RETURN_LIMIT_S
    assert arrivals.over()


def test_a_long_look_leaves_time_for_messages_and_a_short_one_is_not_put_off() -> None:
    now_s, looks = [100.0], [0]
    paced = PacedLook(lambda: now_s[0])

    def look(took_s: float) -> None:
        looks[0] += 1
        now_s[0] += took_s

    paced.take(lambda: look(0.02))
    assert looks == [1] and paced.in_s(0.02) == pytest.approx(0.02 * REST)
    now_s[0] += 0.03
    paced.take(lambda: look(0.02))
    assert looks == [1], "the last look is too recent"
    now_s[0] += 0.06
    paced.take(lambda: look(9.0))
    assert looks == [2] and paced.in_s(0.02) == pytest.approx(MAX_LOOK_S)
    now_s[0] += MAX_LOOK_S
    paced.take(lambda: look(0.0))
    assert looks == [3] and paced.in_s(0.02) == pytest.approx(0.02)


def test_a_look_at_many_thousand_ranks_leaves_as_much_time_and_loses_no_silence() -> None:
    """On a slow processor it took 0.08 s for 16,384 ranks, of each 0.18: and of that 0.1 counted as
    silence, so that a hang was found in nearly twice the time.
    """
    now_s, ranks, took_s = [100.0], 16_384, 0.08
    paced = PacedLook(lambda: now_s[0])

    def look() -> None:
        now_s[0] += took_s

    paced.take(look, ranks)
    rest_s = paced.in_s(0.0)
    assert rest_s == pytest.approx(REST * took_s)
    every_s = rest_s + took_s
    assert PollTime.after(100.0, 100.0 + every_s, ranks).passed_s == pytest.approx(every_s)
    assert PollTime.after(100.0, 130.0, ranks).passed_s == max_look_s(ranks) < 0.5
    assert max_look_s(8) == max_look_s(2048) == MAX_LOOK_S


def test_nodes_that_are_awaited_are_not_looked_for_at_each_that_comes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for them takes a fifth of the time at most."""
    now_s, looks, turns = [0.0], [0], [0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def there(self: Connections, node: int) -> bool:
        looks[0] += 1
        now_s[0] += 0.001
        return turns[0] > 200

    def turn(self: Connections, timeout_s: float) -> None:
        turns[0] += 1
        now_s[0] += 0.001

    monkeypatch.setattr(Connections, "_is_there", there)
    monkeypatch.setattr(Connections, "turn", turn)
    fleet.await_nodes(range(10), limit_s=LIMIT_S, gone=lambda _: None)
    assert turns[0] > 200 and looks[0] <= 10 * (2 + turns[0] // 40)
