"""The supervisor asks for each group once, and uses one only if all of its members stand by."""

from __future__ import annotations

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.standby.book import StandbyBook
from trainchaos.recovery.transport.wire import Message, StandBy, StoodBy

LOST_0, LOST_1 = ("s0", "w1"), ("w0", "s0")
BOTH = {0: LOST_0, 1: LOST_1}


class Book(StandbyBook):
    """One that was asked for both groups in generation 3, and what it sent and logged."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, int, int]] = []
        self.names: dict[tuple[str, int], str] = {}
        self.events: list[tuple[int, list[str]]] = []
        super().__init__(self.note, self.record)
        self.ask(3, BOTH, 77)

    def note(self, process: str, message: Message) -> None:
        """As ``Hands.send``."""
        assert isinstance(message, StandBy)
        assert (message.generation, message.world, message.store_port) == (3, 2, 77)
        self.orders.append((process, message.lost, message.rank))
        self.names[process, message.lost] = message.group

    def record(self, kind: Kind, *, lost: int, members: list[str]) -> None:
        """As ``Hands.record``."""
        assert kind is Kind.STANDBY_FORMED
        self.events.append((lost, members))

    def hear(self, process: str, lost: int) -> None:
        """The process has formed the group that it was told to form last for this loss."""
        name = self.names.get((process, lost), self.names["s0", lost])
        self.formed(process, StoodBy(generation=3, group=name))


def test_every_member_is_asked_once_and_all_in_the_same_order() -> None:
    book = Book()
    assert book.orders == [("s0", 0, 0), ("w1", 0, 1), ("w0", 1, 0), ("s0", 1, 1)]
    assert book.names["s0", 0] == book.names["w1", 0] != book.names["s0", 1]
    book.ask(3, BOTH, 77)
    assert len(book.orders) == 4


def test_a_group_is_used_once_all_of_its_members_stand_by() -> None:
    for process in LOST_0:
        book = Book()
        book.hear(process, 0)
        assert book.use(LOST_0) == ""
    book = Book()
    for process in ("s0", "s0", "w0"):  # the last is no member
        book.hear(process, 0)
    assert book.events == []
    for process in ("w1", "w1"):
        book.hear(process, 0)
    assert book.events == [(0, ["s0", "w1"])]
    assert book.use(LOST_0) == book.names["s0", 0]
    assert book.use(LOST_0) == "", "it is in use"


def test_the_order_of_the_members_counts() -> None:
    book = Book()
    for process in LOST_0:
        book.hear(process, 0)
    assert book.use(("w1", "s0")) == ""


def test_a_group_that_another_has_replaced_is_not_used() -> None:
    book = Book()
    for process in LOST_0:
        book.hear(process, 0)
    book.ask(3, {**BOTH, 0: ("s1", "w1")}, 77)
    assert book.orders[-2:] == [("s1", 0, 0), ("w1", 0, 1)]
    assert book.use(LOST_0) == "", "its members leave it"


def test_no_name_comes_twice() -> None:
    """What stands in the store under a name is of one group only."""
    books = [Book(), Book()]
    for book in books:
        book.ask(3, {0: ("s1", "w1")}, 77)
        book.ask(3, {0: LOST_0}, 77)
    names = [name for book in books for name in book.names.values()]
    again = [book.names["s0", 0] for book in books]
    assert len(set(names)) == 6 and len(set(again)) == 2
