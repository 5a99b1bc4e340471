"""What a rank says to its supervisor, and when: by itself, and said by a real rank and by a
simulated one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.recovery.rank.test_job import Rank
from tests.support.fakes.orders import join
from tests.support.search.simulate import rank_config
from trainchaos.chaos.events.log import Event, Kind, read_actor
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.rank.rank import SimRank
from trainchaos.harness.sim.world.clock import NS_PER_S, Clock
from trainchaos.harness.sim.world.group import Group
from trainchaos.harness.sim.world.process import Process
from trainchaos.recovery.rank.membership import (
    Membership,
    SupervisorOrders,
    stays_connected,
)
from trainchaos.recovery.transport.wire import (
    Abort,
    Agreed,
    CheckpointNote,
    Finished,
    Follow,
    Inquiry,
    Joined,
    LeaveOut,
    Message,
    Parked,
    PauseRequest,
    Ready,
    Status,
    Stop,
)

STEPS = 6


def membership(*messages: object) -> Membership:
    """Of a process that has heard these."""
    member = Membership(SupervisorOrders(), steps=STEPS)
    for message in messages:
        member.heard.take(message)
    return member


# --- what it hears


def test_only_orders_wait_for_the_training_thread() -> None:
    left_out = LeaveOut(after=0, samples=[3], since=[4])
    orders = [join(), Follow(shard=1), left_out, Abort(generation=1), Stop()]
    heard = SupervisorOrders()
    assert [heard.take(order) for order in orders] == orders
    others = [PauseRequest(), Agreed(step=3), Inquiry(number=1), Ready()]
    assert [heard.take(other) for other in others] == [None] * len(others)


def test_aborts_and_agreements_never_go_backwards() -> None:
    heard = membership(
        Abort(generation=5), Abort(generation=3), join(agreed=40), join(2, agreed=-1)
    ).heard
    assert (heard.aborted_generation, heard.agreed) == (5, 40)
    heard.take(Agreed(step=30))
    assert heard.agreed == 30, "the supervisor knows"


def test_a_wish_for_a_pause_holds_until_the_next_generation() -> None:
    member = membership(PauseRequest(save=True), PauseRequest())
    assert member.heard.pause_wanted and member.heard.save_wanted
    member.joins(join())
    assert not member.heard.pause_wanted and not member.heard.save_wanted


def test_what_was_agreed_on_before_all_went_back_behind_it_vouches_for_nothing_saved_since() -> (
    None
):
    member = membership(join(agreed=40))
    member.begins(50)
    assert member.heard.agreed == 40
    member.begins(30)
    assert member.heard.agreed == 30
    member.heard.take(Agreed(step=35))
    assert member.heard.agreed == 35
    unknown = membership(join())
    unknown.begins(30)
    assert unknown.heard.agreed == -1


# --- what it holds


# --- where it is


def inside(step: int = 0) -> Membership:
    """In generation 1, training."""
    member = membership(join())
    member.joins(join())
    member.joined()
    assert member.status(step, 0).place in ("training", "finished")
    return member


def test_it_trains_until_its_generation_is_aborted_or_the_job_is_done() -> None:
    assert not membership().trains(0)
    member = inside()
    assert member.trains(STEPS - 1) and not member.trains(STEPS)
    member.heard.take(Abort(generation=1))
    assert member.lost and not member.trains(0)


def test_it_says_that_it_is_done_only_where_others_may_need_it() -> None:
    member = inside(STEPS)
    assert member.finished(STEPS) == Finished(step=STEPS) and member.finished(STEPS - 1) is None
    member.left()
    assert member.finished(STEPS) is None


def test_an_abort_of_an_earlier_generation_or_after_it_left_is_none() -> None:
    member = inside()
    assert member.must_park(Abort(generation=1)) and member.must_park(Abort(generation=2))
    assert not member.must_park(Abort(generation=0))
    member.left()
    assert not member.must_park(Abort(generation=1))


def test_a_broken_group_is_a_failure_unless_it_was_aborted() -> None:
    member = inside()
    assert member.why_lost() == "failed"
    member.heard.take(Abort(generation=1))
    assert member.why_lost() == "aborted"


def test_whoever_parks_after_the_same_collective_as_all_stays_connected() -> None:
    assert [why for why in ("aborted", "pause", "nonfinite", "failed") if stays_connected(why)] == [
        "pause",
        "nonfinite",
    ]


def test_what_it_says_when_it_parks_is_what_it_holds_by_then() -> None:
    member = inside()
    member.holding.valid, member.holding.pending = True, 4
    member.left()
    said = member.parked("failed", step=3, error="gone", blamed=(1,), samples=(5, 6))
    assert said == Parked(
        generation=1,
        step=3,
        valid=True,
        why="failed",
        error="gone",
        blamed=[1],
        samples=[5, 6],
        pending=4,
    )


def test_it_has_a_place_at_each_moment() -> None:
    member = membership()
    assert member.status(0, 9) == Status(
        place="waiting", generation=0, step=0, valid=False, number=9
    )
    member.heard.take(join())
    assert member.status(0, 0).place == "joining", "though its training thread does not know yet"
    member.joins(join())
    member.holding.valid, member.holding.pending = True, 3
    assert member.status(2, 0) == Status(
        place="joining", generation=1, step=2, valid=True, pending=3
    )
    member.joined()
    assert [member.status(step, 0).place for step in (2, STEPS)] == ["training", "finished"]
    member.left()
    assert member.status(2, 0).place == "waiting" and member.status(2, 0).generation == 1


def test_a_spare_says_which_part_it_was_told_to_follow_and_where_it_is_fed() -> None:
    member = membership()
    assert (member.status(0, 1).shard, member.status(0, 1).live) == (-1, "")
    member.heard.take(Follow(shard=0))
    assert member.status(0, 1).shard == 0, "though its training thread does not know yet"
    assert member.status(3, 1, "here 1 00") == Status(
        place="waiting", generation=0, step=3, valid=False, number=1, live="here 1 00", shard=0
    )


class Watched(Membership):
    """Is asked where it is after each change, as by a thread that listens."""

    seen: list[Status]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if hasattr(self, "seen"):
            self.seen.append(self.status(0, 0))


def test_on_its_way_into_a_generation_it_is_never_taken_for_one_that_waits() -> None:
    """Whoever takes the supervision over would let it alone, and it would wait for a group that
    nobody else joins.
    """
    member = Watched(SupervisorOrders(), steps=STEPS)
    member.heard.take(join())
    member.seen = []
    member.joins(join())
    assert {status.place for status in member.seen} == {"joining"} and len(member.seen) >= 3
    member.seen.clear()
    member.left()
    assert {status.place for status in member.seen} == {"waiting"}


# --- a real rank and a simulated one


class Simulated:
    """A simulated rank in a world of one; the test plays the supervisor. ``asked``: the number of
    an inquiry that comes before it listens.
    """

    def __init__(self, directory: Path, *, steps: int = STEPS, asked: int | None = None) -> None:
        config = rank_config(directory, world=1, steps=steps)
        self.directory = directory
        self.clock = Clock()
        self.process = Process(name="w0", role="worker", pid=1, clock=self.clock, seed="1")
        self.said: list[Any] = []
        self.notes: list[CheckpointNote] = []
        self.rank = SimRank(
            config,
            self.process,
            behaviour=Behaviour(),
            group_of=self._group,
            spare_of={}.__getitem__,
            send=self.said.append,
        )
        self.process.start(self.rank.body("warm"))
        if asked is not None:
            self.tell(Inquiry(number=asked))
            assert self.hear(Status).number == asked
        self.hear(Ready)

    def _group(self, generation: int, size: int) -> Group:
        return Group(generation=generation, size=size, form_ns=0.0, spread_ns=0.0)

    def tell(self, message: Message) -> None:
        """At once."""
        self.process.deliver(message, 0.0)

    def join(self, generation: int, **more: Any) -> None:
        """Order it into the next generation."""
        self.tell(join(generation, **more))

    def hear(self, kind: type[Message]) -> Any:
        """The next message of that type; checkpoint notes in between go to ``notes``."""
        until = self.clock.now_ns + 100 * NS_PER_S
        while not any(isinstance(message, kind) for message in self.said) and self.clock.advance(
            until
        ):
            pass
        while self.said:
            message = self.said.pop(0)
            if isinstance(message, kind):
                return message
            assert isinstance(message, CheckpointNote), message
            self.notes.append(message)
        raise AssertionError(f"it never said {kind.__name__}")

    def events(self, *kinds: Kind) -> list[Event]:
        """Of its log."""
        return [
            e for e in read_actor(self.directory / "events" / "w0.jsonl").events if e.kind in kinds
        ]

    def stop(self) -> None:
        """It ends well."""
        self.tell(Stop())
        while self.process.running and self.clock.advance(self.clock.now_ns + NS_PER_S):
            pass
        assert not self.process.running and not self.said


Either = Rank | Simulated
"""What both have in common is enough for a story."""


def story(rank: Either) -> Iterator[Message]:
    """What it says in the course of two generations."""

    def ask(number: int) -> Status:
        rank.tell(Inquiry(number=number))
        answer = rank.hear(Status)
        assert isinstance(answer, Status)
        return answer

    yield ask(4)
    rank.join(1)
    yield rank.hear(Joined)
    yield rank.hear(Finished)
    yield ask(5)
    rank.tell(PauseRequest())
    rank.tell(Abort(generation=0))
    yield rank.hear(Finished)
    rank.tell(Abort(generation=1))
    yield rank.hear(Parked)
    yield ask(6)
    rank.tell(Abort(generation=1))
    rank.tell(LeaveOut(after=0, samples=[], since=[]))
    rank.join(2)
    yield rank.hear(Joined)
    yield rank.hear(Finished)
    yield ask(7)
    rank.stop()


def test_a_real_rank_and_a_simulated_one_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = Rank(tmp_path / "real")
    try:
        said = list(story(real))
    finally:
        real.channel.close()
    assert said == list(story(Simulated(tmp_path / "simulated")))
    places = [message.place for message in said if isinstance(message, Status)]
    assert places == ["waiting", "finished", "waiting", "finished"]


def test_a_simulated_rank_answers_what_it_was_asked_before_it_listened(tmp_path: Path) -> None:
    """It waited in the socket, and may be answered before the process says that it is ready: of the
    two orders in which a real one may say that, the one that asks more of who hears it.
    """
    Simulated(tmp_path / "rank", asked=3)
