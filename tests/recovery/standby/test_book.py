"""The supervisor asks for each group once, and uses one only if all of its members stand by."""

from __future__ import annotations

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.standby.book import StandbyBook
from trainchaos.recovery.transport.wire import Message, StandBy, StoodBy

LOST_0, LOST_1 = ("s0", "w1"), ("w0", "s0")
BOTH = {0: LOST_0, 1: LOST_1}


class Sent:
    """Collects what is sent."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, str, int, int]] = []
        self.formed: list[tuple[int, list[str]]] = []

    def __call__(self, process: str, message: Message) -> None:
        """As ``Hands.send``."""
        assert isinstance(message, StandBy)
        assert (message.generation, message.world, message.store_port) == (3, 2, 77)
        self.orders.append((process, message.group, message.lost, message.rank))

    def record(self, kind: Kind, *, lost: int, members: list[str]) -> None:
        """As ``Hands.record``."""
        assert kind is Kind.STANDBY_FORMED
        self.formed.append((lost, members))


def book() -> tuple[StandbyBook, Sent]:
    """One of generation 3, asked for both groups."""
    sent = Sent()
    made = StandbyBook(sent, sent.record)
    made.ask(3, BOTH, 77)
    return made, sent


def stood_by(group: str, generation: int = 3) -> StoodBy:
    return StoodBy(generation=generation, group=group)


def test_every_member_is_asked_once_and_all_in_the_same_order() -> None:
    made, sent = book()
    asked = [("s0", "s0.w1", 0, 0), ("w1", "s0.w1", 0, 1), ("w0", "w0.s0", 1, 0)]
    assert sent.orders == [*asked, ("s0", "w0.s0", 1, 1)]
    made.ask(3, BOTH, 77)
    assert len(sent.orders) == 4


def test_a_group_is_used_once_all_of_its_members_stand_by() -> None:
    for process in LOST_0:
        made, _ = book()
        made.formed(process, stood_by("s0.w1"))
        assert made.use(LOST_0) == ""
    made, sent = book()
    for process in ("s0", "s0", "w0"):  # the last is no member
        made.formed(process, stood_by("s0.w1"))
    assert sent.formed == []
    for process in ("w1", "w1"):
        made.formed(process, stood_by("s0.w1"))
    assert sent.formed == [(0, ["s0", "w1"])]
    assert made.use(LOST_0) == "s0.w1"
    assert made.use(LOST_0) == "", "it is in use"


def test_what_was_formed_for_another_generation_or_loss_does_not_count() -> None:
    made, sent = book()
    for process in ("s0", "w1"):
        made.formed(process, stood_by("s0.w1", generation=2))
    assert made.use(LOST_0) == ""
    made.ask(3, BOTH, 77)
    for process in LOST_0:
        made.formed(process, stood_by("s0.w1"))
    made.ask(3, {0: ("s1", "w1")}, 77)
    assert sent.orders[-2:] == [("s1", "s1.w1", 0, 0), ("w1", "s1.w1", 0, 1)]
    assert made.use(("s1", "w1")) == ""


def test_the_order_of_the_members_counts() -> None:
    made, _ = book()
    for process in LOST_0:
        made.formed(process, stood_by("s0.w1"))
    assert made.use(("w1", "s0")) == ""
