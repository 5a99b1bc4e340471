"""Books of keepers, and of who supervises them, stay as long as they are, however many there were
and whoever saved.
"""

from __future__ import annotations

import pytest

from tests.harness.arm.test_roster import FakeKeeperHost, keepers_of, lose, starts
from tests.recovery.checkpoint.memory.test_memory import key, put, store_of
from tests.recovery.nodes.test_nodes_books import entries
from trainchaos.recovery.checkpoint.memory import keeper_store, keepers
from trainchaos.recovery.checkpoint.memory.protocol import Refusal
from trainchaos.recovery.policy import doubts
from trainchaos.recovery.process.host import Exited


def test_a_supervisor_of_keepers_knows_no_more_after_a_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keepers, "KEPT_GONE", 8)
    host = FakeKeeperHost()
    made = keepers_of(host)
    starts(made)
    sizes, last = [], "k0"
    for number in range(1000):
        lose(host, last)
        assert [news.process for news in made.look() if isinstance(news, Exited)] == [last]
        assert made.pid_of(last) and made.owns(last), "who hears of its end asks for its pid"
        last = made.keeper_of(0)
        host.started.clear()
        host.told.clear()
        if number >= 50:
            sizes.append(entries(made))
    assert max(sizes[50:]) <= max(sizes[:50])
    assert not made.owns("k0") and made.owns("k1"), "one that lives is known however old it is"
    lose(host, last)
    lose(host, "k1")
    gone = [news.process for news in made.look() if isinstance(news, Exited)]
    assert gone == [last, "k1"] and all(made.pid_of(name) for name in gone)


@pytest.mark.slow
def test_a_keeper_knows_no_more_after_a_thousand_generations_each_of_another_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody of whom asks for its buffers any more; and after as many states that may have been
    corrupted, of which it trusts none when it forgets which they were.
    """
    monkeypatch.setattr(keeper_store, "MOST_SEATS", 20)
    store, sizes = store_of(), []
    for generation in range(1, 1001):
        for step in (3 * generation, 3 * generation + 1):
            put(store, step, seat=f"w{generation}", generation=generation, size=4096)
        store.forget(3 * generation, generation + 1)
        store.heard(1, (key(3 * generation, generation=generation),))
        if generation >= 100:
            sizes.append(entries(store))
    assert max(sizes[100:]) <= max(sizes[:100])
    assert store.take_released("w1000") == (0,), "whoever saved last is told"
    assert len(store._doubts) <= doubts.MOST
    with pytest.raises(Refusal, match="may hold a corrupted state"):
        put(store, 3 * 500 + 1, generation=500)


def test_buffers_of_one_seat_are_told_together_and_the_oldest_seats_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_store, "MOST_SEATS", 2)
    store = store_of()
    for step, seat in enumerate(("old", "new", "old", "newest", "x", "y"), start=1):
        put(store, step, seat=seat)
    assert store.take_released("new") == () and store.take_released("newest") == (0,)
    assert store.take_released("old") == (0, 0)
