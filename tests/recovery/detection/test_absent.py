"""Who is named for a collective that was left out."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec import structs

from trainchaos.recovery.detection.evidence import Absence, absence
from trainchaos.recovery.transport.wire import CollectiveEntry, Recalled

State = Literal["done", "started", "scheduled"]


def one(group: str, seq: int, state: State = "done") -> CollectiveEntry:
    return CollectiveEntry(
        group=f"generation-1{group}", seq=seq, op="all_reduce", sizes="", state=state
    )


def said(*entries: CollectiveEntry, begun: int | None = 0) -> Recalled:
    return Recalled(number=1, rank=0, entries=[*entries], begun=begun)


def stages() -> dict[str, Recalled]:
    """Two replicas of two stages, of which the second of the first has left a sum of its stage's
    out: as real ranks said it.
    """
    return {
        "w0": said(one("/pipeline-of-0", 24, "scheduled"), one("/shard-0", 22), begun=1),
        "w1": said(one("/pipeline-of-0", 23), one("/shard-1", 22), one("", 22)),
        "w2": said(one("/pipeline-of-2", 24), one("/shard-0", 23, "scheduled"), begun=1),
        "w3": said(one("/pipeline-of-2", 24), one("/shard-1", 23, "scheduled"), begun=1),
    }


def test_who_has_begun_nothing_that_others_wait_in_is_named() -> None:
    found = absence(stages())
    assert found is not None
    assert (found.process, found.waiting) == ("w1", ("w0", "w3"))
    assert found.what == "all_reduce 24 of pipeline-of-0"


def test_of_all_ranks_is_said_in_words() -> None:
    found = absence({"w0": said(one("", 7, "started"), begun=1), "w1": said(one("", 6))})
    assert found is not None and found.what == "all_reduce 7 of all ranks"


@pytest.mark.parametrize("begun", [1, None])
def test_who_waits_for_another_or_does_not_say_is_not_named(begun: int | None) -> None:
    """It may wait for a part of a neighbour, which torch does not record for gloo."""
    assert absence(stages() | {"w1": structs.replace(stages()["w1"], begun=begun)}) is None


def test_who_did_not_answer_is_not_named_and_hides_nobody_else() -> None:
    told = stages()
    assert absence({name: told[name] for name in ("w0", "w2", "w3")}) is None
    found = absence({name: told[name] for name in ("w1", "w3")})
    assert found is not None and found.process == "w1"


def test_of_several_none_is_named() -> None:
    told = stages() | {"w2": said(one("/pipeline-of-2", 23), one("/shard-0", 22), one("", 22))}
    told["w3"] = said(one("/pipeline-of-2", 24, "scheduled"), one("/shard-1", 22), begun=1)
    assert absence(told) is None


def test_who_was_never_in_a_group_is_not_missed_there() -> None:
    assert absence({"w0": said(one("/a", 1, "started"), begun=1), "w1": said(one("/b", 9))}) is None


def test_who_is_through_is_not_missed() -> None:
    told = {"w0": said(one("", 7, "started"), begun=1), "w1": said(one("", 7))}
    assert absence(told) is None, "its part may be on its way"


def test_nobody_waits() -> None:
    assert absence({}) is None
    assert absence({"w0": said(one("", 7)), "w1": said(one("", 6))}) is None


def test_of_what_is_waited_for_in_a_group_the_first_counts() -> None:
    told = {
        "w0": said(one("", 7, "started"), one("", 8, "scheduled"), begun=2),
        "w1": said(one("", 7)),
    }
    assert absence(told) is None, "it may be through the seventh, and not have come to the eighth"
    told["w1"] = said(one("", 6))
    assert absence(told) == Absence(process="w1", awaited=one("", 7, "started"), waiting=("w0",))
