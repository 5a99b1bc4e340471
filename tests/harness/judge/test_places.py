"""What spares were told to follow is believed only where it could be so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.harness.judge.checkers.test_parts_followed import PLACES, shrunk
from tests.support import arms
from tests.support.logs import MS, Script
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind, make_log
from trainchaos.harness.judge.checkers.job.world import membership
from trainchaos.harness.judge.lifecycle.places import followed, places
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.lineage import history_of


def begun(spares: int = 2, **told: int) -> Script:
    """A job of two replicas of two parts, whose spares are told what to follow."""
    script = Script("hot-spare", spares=spares)
    tell(script, **told)
    return script


def tell(script: Script, **told: int) -> None:
    for name, shard in told.items():
        script.orchestrator(Kind.SPARE_PLACED, process=name, shard=shard)


def go_on(script: Script, *members: str) -> None:
    script.form(members, state="peer", cause="failure", resume=0)


def lose(script: Script, name: str, cause: str = "exit", *, ended: bool = True) -> None:
    rank = script.members.index(name) if name in script.members else None
    script.orchestrator(
        Kind.FAILURE_DETECTED,
        step=1,
        failure=len(script.find(Kind.FAILURE_DETECTED)) + 1,
        cause=cause,
        process=name,
        rank=rank,
        detail="signal 9",
    )
    if ended:
        script.exit(name, signal=9, expected=False)


def adopted(script: Script) -> None:
    script.orchestrator(Kind.COORDINATOR_ADOPTED, events=1, dropped=0)


def read(script: Script, shards: int = 2) -> History:
    for line in script.find(Kind.GENERATION_STARTED):
        line.data["shards"] = shards
    return history_of(script.log())


def said(script: Script) -> list[str]:
    return list(places(read(script), live=True))


def test_spares_that_are_spread_over_the_parts_are_believed() -> None:
    script = begun(4, s0=1, s1=0, s2=0, s3=1)
    lose(script, "w3")
    go_on(script, "w0", "w1", "w2", "s0")
    script.spawn("s4", role="spare")
    tell(script, s4=1)
    assert said(script) == []


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"s0": 0, "s1": 0}, "s1 was told to follow part 0, which 1 that wait follow"),
        ({"s0": 2, "s1": 1}, "s0 was told to follow part 2, the model has 2"),
        ({"s0": -1, "s1": 1}, "s0 was told to follow part -1, the model has 2"),
        ({"s9": 0}, "s9 was told to follow part 0, and had not been started"),
        ({"w2": 0}, "w2 was told to follow part 0, and had a rank"),
    ],
    ids=["alike", "above", "below", "nobody", "a-member"],
)
def test_what_cannot_be_is_said(told: dict[str, int], words: str) -> None:
    problems = said(begun(**told))
    assert len(problems) == 1 and problems[0].startswith(words)


@pytest.mark.parametrize("told", [{"s0": 0, "s1": 0}, {"s0": 7, "s1": 7}], ids=["one", "none"])
@pytest.mark.parametrize("live", [True, False], ids=["live", "not-live"])
def test_a_needless_shrink_is_not_excused_by_spares_that_follow_nothing_of_use(
    told: dict[str, int], live: bool
) -> None:
    script = begun(**told)
    lose(script, "w3")
    go_on(script, "w0", "w1")
    recovery: Any = {"strategy": "hot-spare", "spares": 2, "sync": "live" if live else "none"}
    read(script)
    finding = membership(arms.evidence_of(script, [], recovery=recovery))
    assert finding.verdict == "fail" and "was told to follow" in finding.witness
    assert ("without sync: live" in finding.witness) == (not live)


def test_only_the_supervisor_tells_spares_what_to_follow() -> None:
    script = begun(s0=0, s1=1)
    script.write("w0", Kind.SPARE_PLACED, process="s1", shard=0)
    assert said(script) == [
        "w0 wrote what a spare was told to follow, which only the supervisor can"
    ]


def test_a_model_of_one_part_has_no_spare_that_follows_one() -> None:
    script = begun(s0=0)
    assert "a model that has but one" in next(places(read(script, shards=1), live=True))


def test_what_was_told_later_does_not_excuse_what_came_before() -> None:
    history = shrunk(PLACES, ["w1", "w3"])
    placed = list(history.log.of(Kind.SPARE_PLACED))
    generation = history.generations[-1]
    assert followed(history, generation.started_ns) == PLACES
    assert followed(history, placed[1].time_ns) == {"s0": 0}
    assert followed(history, placed[0].time_ns) == {}


def test_a_part_is_for_life_and_a_rank_holds_it() -> None:
    script = begun(s0=0, s1=1)
    tell(script, s1=1)
    assert said(script) == [], "it may be told anew"
    tell(script, s1=0)
    assert said(script) == ["s1 was told to follow part 0, after part 1"]
    script = begun(s0=0, s1=1)
    lose(script, "w0")
    go_on(script, "s1", "w1", "w2", "w3")
    assert said(script) == [
        "s1 was told to follow part 1, and holds part 0 as rank 0 of generation 2"
    ]


def test_whoever_takes_over_may_tell_another_part_where_the_first_was_never_heard() -> None:
    script = begun(s0=0, s1=1)
    adopted(script)
    tell(script, s1=0)
    assert said(script) == []
    tell(script, s1=1)
    assert said(script) == ["s1 was told to follow part 1, after part 0"], "once for each takeover"
    script = begun(s0=0, s1=1)
    script.now += MS
    script.write("s1", Kind.SPARE_SYNCED, step=0, how="equal", bytes=0, seconds=0.0)
    adopted(script)
    tell(script, s1=0)
    assert said(script) == ["s1 was told to follow part 0, after part 1"], "it had followed"


def test_who_had_a_rank_follows_nothing_unless_another_supervisor_does_not_know() -> None:
    for takes_over in (False, True):
        script = begun(s0=0, s1=1)
        lose(script, "w3", "nonfinite", ended=False)
        go_on(script, "w0", "w1", "w2", "s1")
        if takes_over:
            adopted(script)
        tell(script, w3=1)
        words = ["w3 was told to follow part 1, and had had a rank before"]
        assert said(script) == ([] if takes_over else words)


@pytest.mark.parametrize(
    ("cause", "ended", "fair"),
    [("exit", True, False), ("hang", False, False), ("warning", False, True)],
)
def test_spares_that_are_lost_are_not_counted_and_those_in_doubt_may_be(
    cause: str, ended: bool, fair: bool
) -> None:
    script = begun(2, s0=0, s1=1)
    lose(script, "s0", cause, ended=ended)
    script.spawn("s2", role="spare")
    tell(script, s2=1)
    assert (said(script) == []) == fair, "part 0 has lost its spare, and is next"
    script = begun(2, s0=0)
    lose(script, "s0", cause, ended=ended)
    script.spawn("s2", role="spare")
    tell(script, s2=0)
    assert said(script) == []


def test_an_end_that_the_supervisor_has_not_detected_may_count_or_not() -> None:
    for shard, told in ((0, {"s0": 0}), (1, {"s0": 0, "s1": 1})):
        script = begun(2, **told)
        script.exit("s0", signal=9, expected=False)
        script.spawn("s2", role="spare")
        tell(script, s2=shard)
        assert said(script) == []


@pytest.mark.parametrize(
    ("told", "shard", "ended", "fair"),
    [
        ({"s0": 0, "s1": 1}, 1, False, True),
        ({"s0": 0, "s1": 1}, 1, True, False),
        ({"s0": 0}, 0, False, True),
    ],
    ids=["counted", "ended", "not-counted"],
)
def test_one_that_was_asked_to_end_may_count_or_not_until_it_has_ended(
    told: dict[str, int], shard: int, ended: bool, fair: bool
) -> None:
    script = begun(2, **told)
    script.spawn("s2", role="spare")
    asked_ns = script.now
    if ended:
        script.exit("s0", expected=True)
    tell(script, s2=shard)
    if not ended:
        script.exit("s0", expected=True)
    for line in script.find(Kind.PROCESS_EXITED):
        line.data["asked_ns"] = asked_ns
    assert (said(script) == []) == fair


@pytest.mark.parametrize("what", ["benched", "adopted", "node", "none"])
def test_what_a_supervisor_counts_is_not_judged_where_the_log_does_not_say_it(what: str) -> None:
    script = begun(2, s0=0)
    if what == "benched":
        lose(script, "w3")
        go_on(script, "w0", "w1")
        go_on(script, "s0", "w1", "w2", "s1")  # w0 waits outside
    elif what == "adopted":
        adopted(script)
    elif what == "node":
        script.orchestrator(Kind.NODE_LOST, node=1, why="silent")
    script.spawn("s2", role="spare")
    script.spawn("s3", role="spare")
    tell(script, s2=0, **({"s3": 1} if what == "benched" else {}))
    assert (said(script) == []) == (what != "none")


def test_one_that_is_to_take_a_lost_rank_does_not_wait() -> None:
    script = begun(3, s0=0)
    lose(script, "w3")
    tell(script, s1=0)
    assert said(script) != []
    go_on(script, "w0", "w1", "w2", "s0")
    assert [one for one in said(script) if "that wait" in one] == []


def test_nothing_is_said_where_the_supervisors_own_lines_are_missing() -> None:
    script = begun(s0=0, s1=0)
    history = read(script)
    assert list(places(history, live=True))
    actors = {**history.log.actors}
    actors[ORCHESTRATOR] = replace(actors[ORCHESTRATOR], problems=("a gap",))
    assert list(places(history_of(make_log(actors.values())), live=True)) == []
