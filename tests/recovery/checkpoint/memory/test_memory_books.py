"""Books of keepers, and of who supervises them, stay as long as they are, however many there were
and whoever saved.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.harness.arm.test_roster import FakeKeeperHost, keepers_of, lose, starts
from tests.recovery.checkpoint.memory.test_memory import JOB, key, part
from tests.recovery.nodes.test_nodes_books import entries
from trainchaos.recovery.checkpoint.memory import keeper_store as module
from trainchaos.recovery.checkpoint.memory import keepers as supervising
from trainchaos.recovery.checkpoint.memory.keeper_store import KeeperStore, Refusal
from trainchaos.recovery.policy import doubts
from trainchaos.recovery.process.host import Exited


def test_a_supervisor_of_keepers_knows_no_more_after_a_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervising, "KEPT_GONE", 8)
    keeper_host = FakeKeeperHost()
    keepers = keepers_of(keeper_host)
    starts(keepers)
    sizes, last = [], "k0"
    for number in range(1000):
        lose(keeper_host, last)
        news = keepers.look()
        assert [one.process for one in news if isinstance(one, Exited)] == [last]
        assert keepers.pid_of(last) and keepers.owns(last), "who hears of its end asks for its pid"
        last = keepers.keeper_of(0)
        keeper_host.started.clear()
        keeper_host.told.clear()
        if number >= 50:
            sizes.append(entries(keepers))
    assert max(sizes[50:]) <= max(sizes[:50])
    assert not keepers.owns("k0") and keepers.owns("k1"), (
        "one that lives is known however old it is"
    )
    keepers.look()
    assert keepers.keeper_of(1) == "k1"


def test_many_that_end_at_once_are_all_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "KEPT_GONE", 0)
    keeper_host = FakeKeeperHost()
    keepers = keepers_of(keeper_host)
    starts(keepers)
    lose(keeper_host, "k0")
    lose(keeper_host, "k1")
    gone = [one.process for one in keepers.look() if isinstance(one, Exited)]
    assert gone == ["k0", "k1"] and all(keepers.pid_of(name) for name in gone)


def keeper_store() -> KeeperStore:
    return KeeperStore(job=JOB, limit_bytes=1 << 20, keep=2, doubles=False)


def save(held: KeeperStore, step: int, *, seat: str, generation: int) -> None:
    header, memory = part(step, generation=generation, size=4096)
    held.add(structs.replace(header, seat=seat), memory.detach(), copy=False)


@pytest.mark.slow
def test_a_keeper_knows_no_more_after_a_thousand_generations_each_of_another_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody of whom asks for its buffers any more; and after as many states that may have been
    corrupted.
    """
    monkeypatch.setattr(module, "MOST_SEATS", 20)
    held, sizes = keeper_store(), []
    for generation in range(1, 1001):
        for step in (3 * generation, 3 * generation + 1):
            save(held, step, seat=f"w{generation}", generation=generation)
        held.forget(3 * generation, generation + 1)
        held.heard(1, (key(3 * generation, generation=generation),))
        if generation >= 100:
            sizes.append(entries(held))
    assert max(sizes[100:]) <= max(sizes[:100])
    assert held.take_released("w1000") == (0,), "whoever saved last is told"
    assert len(held._doubts) <= doubts.MOST


def test_a_keeper_that_forgets_which_doubt_it_was_trusts_none_of_them() -> None:
    held = keeper_store()
    count = 10 * doubts.MOST
    for generation in range(1, count):
        held.forget(10 * generation, generation + 1)
    for generation in range(1, count):
        header, memory = part(10 * generation + 1, generation=generation, size=4096)
        with pytest.raises(Refusal, match="may hold a corrupted state"):
            held.add(header, memory.fd, copy=False)
        memory.close()
    save(held, 10 * count, seat="w0", generation=count)
    assert held.held() == (key(10 * count, generation=count),)


def test_buffers_of_one_seat_are_told_together_and_the_oldest_seats_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_SEATS", 2)
    held = keeper_store()
    for step, seat in enumerate(("old", "new", "old", "newest", "x", "y"), start=1):
        save(held, step, seat=seat, generation=1)
    assert held.take_released("new") == () and held.take_released("newest") == (0,)
    assert held.take_released("old") == (0, 0)
