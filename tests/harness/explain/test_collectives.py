"""What the flight records of ranks say together: who waits in what, and who has not begun it."""

from __future__ import annotations

from typing import Any

import pytest

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, make_log
from trainchaos.harness.explain.collectives import (
    MOST_SAID,
    Entry,
    FlightRecord,
    records_between,
    standing,
)

G = "generation-1"


def done(seq: int, op: str = "all_reduce", sizes: str = "8 Float", group: str = G) -> Entry:
    return Entry(group=group, seq=seq, op=op, sizes=sizes, done=True)


def open_(seq: int, op: str = "all_reduce", sizes: str = "8 Float", group: str = G) -> Entry:
    return Entry(group=group, seq=seq, op=op, sizes=sizes, done=False)


def of(rank: int, *entries: Entry, why: str = "", role: str = "peer") -> FlightRecord:
    return FlightRecord(process=f"w{rank}", role=role, rank=rank, entries=entries, why=why)


def test_who_has_not_begun_what_another_waits_in() -> None:
    hung = of(2, done(40), role="hung")
    peer = of(0, done(40), open_(41), open_(42), open_(43))
    assert standing([hung, peer]) == [
        "rank 2 (w2) has not begun all_reduce 41 (8 Float) of generation-1; its last there is"
        " all_reduce 40, done; rank 0 (w0) waits in all_reduce 41"
    ]


def test_ranks_in_different_collectives_do_not_match() -> None:
    found = standing([of(2, open_(41, "broadcast")), of(0, open_(41))])
    assert found == [
        "rank 2 (w2) is in broadcast 41 (8 Float); rank 0 (w0) is in all_reduce 41 (8 Float): they"
        " do not match, in generation-1"
    ]
    (found,) = standing([of(2, open_(41, sizes="9 Float")), of(0, open_(41))])
    assert "9 Float" in found and "do not match" in found
    (found,) = standing([of(2, open_(4, "gather", "9 Float")), of(0, open_(4, "gather"))])
    assert "do not match" not in found, "sizes of a gather may differ"
    (found,) = standing([of(2, done(41, "broadcast"), open_(42)), of(0, open_(41))])
    assert "do not match" in found, "one is through with another collective of that number"


def test_what_ras_says_stands_beside_a_record_and_is_no_record() -> None:
    said = of(2, why="rank 2 lags", role="ras")
    found = standing([of(2, done(40), role="hung"), of(0, done(40), open_(41)), said])
    assert found[0].startswith("rank 2 (w2) has not begun all_reduce 41")
    assert found[1:] == ["w2, by NCCL's RAS: rank 2 lags"]
    assert standing([said]) == ["w2, by NCCL's RAS: rank 2 lags"]


def test_all_may_wait_in_one() -> None:
    assert standing([of(1, open_(5)), of(0, open_(5))]) == [
        "rank 1 (w1), rank 0 (w0) wait in all_reduce 5 (8 Float) of generation-1; none of them is"
        " behind"
    ]


def test_one_may_be_through_what_another_waits_in() -> None:
    (found,) = standing([of(1, done(5)), of(0, open_(5))])
    assert found.endswith("rank 1 (w1) is through it")


def test_a_rank_without_a_record_is_named() -> None:
    found = standing([of(2, why="it did not answer", role="hung"), of(0, done(4), open_(5))])
    assert found == [
        "rank 0 (w0) waits in all_reduce 5 (8 Float) of generation-1; no other has a record of it",
        "rank 2 (w2) gave no record: it did not answer",
    ]
    unknown = FlightRecord(process="w3", role="hung", rank=None, entries=(), why="off")
    assert standing([unknown]) == ["w3 gave no record: off"]
    assert standing([]) == []


def test_nothing_under_way_is_said() -> None:
    found = standing([of(2, done(40)), of(0, done(40))])
    assert found == ["no collective was under way in any rank that was asked"]


def test_groups_are_told_apart_and_what_tells_most_comes_first() -> None:
    shard = f"{G}/shard-0"
    hung = of(2, open_(3, group=shard), done(40))
    peer = of(0, open_(3, group=shard), done(40), open_(41))
    first, second = standing([hung, peer])
    assert first.startswith("rank 2 (w2) has not begun all_reduce 41")
    assert second.endswith("of generation-1/shard-0; none of them is behind")
    many = [of(n, *(open_(1, group=f"g{k}") for k in range(20))) for n in range(2)]
    assert len(standing(many)) == MOST_SAID


def log_of(**data: Any) -> Any:
    event = Event(
        actor=ORCHESTRATOR,
        seq=0,
        time_ns=5,
        kind=Kind.COLLECTIVES_DUMPED,
        step=None,
        generation=0,
        data={"process": "w2", "role": "hung", "rank": 2, "entries": [], "why": "", **data},
    )
    actor = ActorLog(actor=ORCHESTRATOR, events=(event,), problems=(), ended=True, unread=0)
    return make_log([actor])


def test_a_record_is_read_from_the_log() -> None:
    entry = {"group": G, "seq": 41, "op": "all_reduce", "sizes": "8 Float", "state": "started"}
    (found,) = records_between(log_of(entries=[entry, {**entry, "seq": 40, "state": "done"}]), 0, 9)
    assert found == of(2, open_(41), done(40), role="hung")
    assert records_between(log_of(), 6, 9) == ()


@pytest.mark.parametrize("entries", [None, "text", 7, {"a": 1}, [None, 3, {}, {"seq": "x"}]])
def test_garbage_is_read_as_nothing(entries: Any) -> None:
    (found,) = records_between(log_of(entries=entries, rank="one", why=None), 0, 9)
    assert found.entries == () and found.rank is None
    assert len(standing([found])) == 1


def test_what_is_read_is_bounded() -> None:
    long = {"group": "g" * 9999, "seq": 1, "op": "o" * 9999, "sizes": "", "state": "started"}
    (found,) = records_between(log_of(entries=[long] * 9999, why="w" * 9999), 0, 9)
    assert len(found.entries) == 64
    assert len(standing([found])[0]) < 400
