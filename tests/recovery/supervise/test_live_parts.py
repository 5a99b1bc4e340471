"""Live spares of a model that several ranks hold together: who follows which part, who feeds whom,
and what a supervisor that takes over makes of it.
"""

from __future__ import annotations

import pytest

from tests.recovery.supervise.test_controller import Rig
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import Health, StateFrom
from trainchaos.recovery.spares.standing import SETTLE_SILENCE_S
from trainchaos.recovery.supervise.adoption import JobRecord, past
from trainchaos.recovery.supervise.controller import Controller, Stage
from trainchaos.recovery.transport.wire import (
    CheckpointNote,
    Feed,
    Follow,
    Following,
    Inquiry,
    Join,
    Joined,
    Ready,
    Settle,
    Settled,
    Status,
)

LIVE = HotSpare(sync="live", spares=2)


def told(rig: Rig) -> list[tuple[str, int]]:
    """Who was told to follow which part, in order."""
    return [(name, one.shard) for name, one in rig.hands.sent if isinstance(one, Follow)]


def fed(rig: Rig) -> list[tuple[str, str]]:
    """Who was told to feed whom, in order."""
    return [(name, one.spare) for name, one in rig.hands.sent if isinstance(one, Feed)]


def follow(rig: Rig, *spares: str) -> None:
    """They hold the part that they were told to follow."""
    parts = dict(told(rig))
    for name in spares:
        rig.control.on_message(name, Following(shard=parts[name], live=f"{name} 1 00"))


def trained(*, follows: bool = True, shards: int = 2, spares: int = 2) -> Rig:
    """A job of four ranks that has made ten steps."""
    rig = Rig(HotSpare(sync="live", spares=spares), shards=shards)
    rig.ready(*rig.names())
    if follows:
        follow(rig, *rig.names("spare"))
    rig.join(*rig.members, step=0)
    rig.go_on(10, first=1)
    return rig


def lose(rig: Rig, name: str, *, step: int) -> None:
    """A member is killed, and all others park."""
    others = [one for one in rig.members if one != name]
    rig.die(name)
    rig.park(*others, step=step)


def test_each_part_is_followed_before_the_job_begins_and_fed_by_its_last_holder() -> None:
    rig = Rig(LIVE, shards=2)
    rig.ready("w0", "w1", "s5")
    assert told(rig) == [("s5", 0)], "members are not told, a spare need not wait for others"
    rig.ready("s4", "w2", "w3")
    assert told(rig) == [("s5", 0), ("s4", 1)]
    assert rig.members == ("w0", "w1", "w2", "w3"), "the job does not wait for their answers"
    follow(rig, "s4")
    assert not fed(rig)
    rig.join(*rig.members, step=0)
    assert fed(rig) == [("w3", "s4")], "who holds no part yet is not fed"
    follow(rig, "s5")
    assert ("w2", "s5") in fed(rig)
    placed = [(data["process"], data["shard"]) for data in rig.events(Kind.SPARE_PLACED)]
    assert placed == [("s5", 0), ("s4", 1)], "each keeps its part for life"


def test_more_spares_than_parts_are_fed_by_different_ranks() -> None:
    rig = trained(spares=5)
    assert told(rig) == [("s4", 0), ("s5", 1), ("s6", 0), ("s7", 1), ("s8", 0)]
    feeders = {spare: name for name, spare in fed(rig)}
    assert feeders == {"s4": "w2", "s5": "w3", "s6": "w0", "s7": "w1", "s8": "w2"}


def test_a_lost_rank_is_taken_by_its_spare_and_the_next_one_follows_the_same_part() -> None:
    rig = trained()
    lose(rig, "w1", step=10)
    assert rig.members == ("w0", "s5", "w2", "w3")
    joins = rig.joins()
    assert {join.state.live for join in joins.values()} == {10}, (
        "all compare what they hold, or none"
    )
    assert rig.copies() == {1: 3} and joins["w0"].state.source == joins["w2"].state.source == -1
    assert not any(join.state.direct for join in joins.values())
    rig.join(*rig.members, step=10)
    rig.go_on(11, first=11)
    rig.ready("s6")
    assert told(rig)[-1] == ("s6", 1)
    sent = len(fed(rig))
    follow(rig, "s6")
    assert ("w3", "s6") in fed(rig)[sent:]
    lose(rig, "w2", step=11)
    assert rig.members == ("w0", "s5", "s4", "w3") and rig.copies() == {2: 0}


def alone(step: int | None, *, saved: int = -1) -> Rig:
    """A job of one rank whose spare follows it: the rank is lost, and the spare says that it holds
    the state of ``step``, or nothing (None).
    """
    rig = Rig(HotSpare(sync="live"), world=1)
    rig.control.on_message("w0", Ready())
    rig.control.on_message("s1", Ready(live="s1 1 00"))
    rig.join("w0", step=0)
    rig.go_on(17, first=1)
    if saved >= 0:
        note = CheckpointNote(state="committed", checkpoint="step", step=saved)
        rig.control.on_message("w0", note)
    rig.die("w0")
    assert rig.got(Settle) == ["s1"] and rig.stage is Stage.STOPPING
    if step is not None:
        rig.control.on_message("s1", Settled(step=step))
    return rig


@pytest.mark.parametrize("saved", [-1, 10, 17])
def test_where_no_rank_is_left_a_spare_is_asked_and_brings_the_state(saved: int) -> None:
    rig = alone(17, saved=saved)
    assert rig.members == ("s1",)
    assert [data["state"] for data in rig.events(Kind.GENERATION_STARTED)] == ["initial", "spare"]
    assert not rig.joins()["s1"].state.receives and not rig.joins()["s1"].state.restore
    assert rig.events(Kind.SURVIVORS_PARKED)[0]["spares"] == {"s1": 17}


@pytest.mark.parametrize(("step", "saved"), [(-1, 10), (9, 10)])
def test_a_spare_that_holds_nothing_or_less_than_a_checkpoint_restores(
    step: int, saved: int
) -> None:
    rig = alone(step, saved=saved)
    assert rig.events(Kind.GENERATION_STARTED)[-1]["state"] == "checkpoint"


def test_a_spare_that_does_not_answer_is_waited_for_within_a_bound() -> None:
    rig = alone(None, saved=10)
    rig.wait(SETTLE_SILENCE_S)
    assert rig.stage is Stage.STOPPING
    rig.wait(rig.control.timing.park_timeout_s + 0.1)
    assert rig.events(Kind.GENERATION_STARTED)[-1]["state"] == "checkpoint"


def test_who_did_not_answer_once_holds_up_no_later_recovery() -> None:
    rig = trained()
    for name in rig.names("spare"):
        rig.control.job.table[name].settles = True
    lose(rig, "w1", step=10)
    assert rig.stage is Stage.FORMING, "the others hold the state: nobody is asked"


def test_a_spare_that_dies_before_it_answers_is_not_waited_for() -> None:
    rig = alone(None, saved=10)
    rig.die("s1")
    assert rig.stage is Stage.WAITING, "for the process that is started"


def test_who_has_not_followed_gets_a_copy_and_no_generation_waits_for_it() -> None:
    rig = trained(follows=False)
    lose(rig, "w3", step=10)
    assert rig.members == ("w0", "w1", "w2", "s5"), (
        "it was told its part, and holds it when it joins"
    )
    assert {join.state.live for join in rig.joins().values()} == {-1}
    sent = len(rig.hands.sent)
    rig.control.on_message("s5", Following(shard=1, live="late 1 00"))
    assert rig.hands.sent[sent:] == [] and rig.control.job.table["s5"].live == ""
    rig.join(*rig.members, step=10)
    assert "s5" not in [spare for _, spare in fed(rig)], "a member is not fed"


def test_a_step_that_some_have_not_applied_yet_is_followed_too() -> None:
    rig = trained()
    rig.die("w1")
    rig.park("w0", "w2", step=11)
    rig.park("w3", step=10, pending=11)
    assert rig.members == ("w0", "s5", "w2", "w3")
    joins = rig.joins().values()
    assert rig.copies() == {1: 3}, "whose state is of the step before until then"
    assert {join.state.finish for join in joins} == {join.state.live for join in joins} == {11}


def test_who_was_to_take_a_place_does_not_follow_any_more() -> None:
    rig = trained()
    lose(rig, "w1", step=10)
    assert rig.joins()["s5"].state.live == 10
    rig.park("s5", step=0, valid=False, why="failed", error="connection reset")
    rig.park("w0", "w2", "w3", step=10)
    rig.wait(1.0)
    assert rig.members == ("w0", "s5", "w2", "w3") and rig.copies() == {1: 3}
    assert {join.state.live for join in rig.joins().values()} == {-1}


def test_a_state_that_cannot_be_trusted_is_replaced_whatever_was_followed() -> None:
    rig = trained()
    rig.park(*rig.members, step=10, why="nonfinite", blamed=[1])
    assert {join.state.live for join in rig.joins().values()} == {-1}
    rig.join(*rig.members, step=10)
    anew = [one.anew for _, one in rig.hands.sent if isinstance(one, Feed)]
    assert anew[-2:] == [True, True]


def test_while_the_world_is_not_full_spares_take_any_rank() -> None:
    rig = trained()
    rig.die("s4", "s5", "w1", "w2")
    rig.park("w0", "w3", step=10)
    assert (
        rig.stage is Stage.FORMING and len(rig.members) == 2 and not rig.joins()["w0"].state.restore
    )
    rig.join(*rig.members, step=10)
    rig.go_on(11, first=11)
    told_before = told(rig)
    new = [name for name in rig.names() if name not in ("w0", "w1", "w2", "w3", "s4", "s5")]
    rig.ready(*new[:2])
    assert told(rig) == told_before, "both may be needed for the same replica"
    rig.park(*rig.members, step=12, why="pause")
    assert len(rig.members) == 4
    rig.join(*rig.members, step=12)
    rig.go_on(13, first=13)
    rig.ready(*new[2:])
    assert sorted(shard for _, shard in told(rig)[len(told_before) :]) == [0, 1]


def test_a_rank_that_may_fail_moves_as_soon_as_its_part_is_followed() -> None:
    rig = trained(follows=False)
    rig.control.on_warnings({"w1": "bad memory"})
    assert rig.stage is Stage.PAUSING
    rig.park(*rig.members, step=11, why="pause")  # a checkpoint is saved
    rig.join(*rig.members, step=11)
    assert rig.stage is Stage.TRAINING and "w1" in rig.members
    follow(rig, "s4")
    assert rig.stage is Stage.TRAINING, "it follows another part"
    follow(rig, "s5")
    assert rig.stage is Stage.PAUSING
    rig.park(*rig.members, step=12, why="pause")
    assert rig.members == ("w0", "s5", "w2", "w3") and rig.joins()["s5"].state.live == 12


@pytest.mark.parametrize("strategy", [HotSpare(spares=2), LIVE], ids=["none", "live"])
def test_only_spares_that_are_live_and_models_in_parts_have_places(strategy: HotSpare) -> None:
    live = strategy.sync == "live"
    rig = Rig(strategy, shards=1 if live else 2)
    for name in rig.names():
        rig.control.on_message(name, Ready(live=f"{name} 1 00" if live else ""))
    rig.join(*rig.members, step=0)
    assert not told(rig) and not rig.events(Kind.SPARE_PLACED)
    assert fed(rig) == ([("w3", "s4"), ("w2", "s5")] if live else [])


# ---- a supervisor that takes over


def adopted(rig: Rig, silent: str = "", **statuses: tuple[int, str]) -> Controller:
    """The job under another supervisor. ``statuses``: the part that each spare was told to follow,
    and where it listens; ``silent``: does not answer.
    """
    events = [
        Event(
            actor=ORCHESTRATOR,
            seq=seq,
            time_ns=seq,
            kind=kind,
            generation=int(data.get("generation", rig.control.generation)),
            step=None,
            data=data,
        )
        for seq, (kind, data) in enumerate(rig.hands.events)
        if kind is Kind.SPARE_PLACED
    ]
    known = JobRecord(
        roles={name: role for name, role, _ in rig.hands.spawned},
        ready=set(rig.names()),
        members=rig.members,
        generation=1,
        ready_generation=1,
        resume_step=0,
        shard={name: rank % 2 for rank, name in enumerate(rig.members)} | past(events).shard,
        follow=past(events).follow,
    )
    control = Controller(LIVE, rig.hands, world=4, steps=100, store_port=1, shards=2)
    rig.hands.sent.clear()
    control.adopt(known, StateFrom.INITIAL)
    (number,) = {one.number for _, one in rig.hands.sent if isinstance(one, Inquiry)}
    for name in [name for name in rig.names() if name != silent]:
        place = "training" if name in rig.members else "waiting"
        shard, live = statuses.get(name, (-1, ""))
        status = Status(
            place=place,  # type: ignore[arg-type]
            generation=int(place == "training"),
            step=10,
            valid=place == "training",
            number=number,
            shard=shard,
            live=live,
        )
        control.on_message(name, status)
    rig.control = control
    if silent:
        rig.wait(control.timing.adopt_timeout_s + 0.1)
    assert control.stage is Stage.TRAINING
    return control


def test_whoever_takes_over_goes_on_with_the_spares_in_their_places() -> None:
    rig = trained()
    control = adopted(rig, s4=(0, "s4 1 00"), s5=(1, "s5 1 00"))
    assert fed(rig) == [("w2", "s4"), ("w3", "s5")] and not told(rig)
    assert [control.job.table[name].shard for name in ("s4", "s5")] == [0, 1]
    lose(rig, "w1", step=10)
    assert rig.members == ("w0", "s5", "w2", "w3") and rig.joins()["s5"].state.live == 10


def test_a_spare_that_has_not_answered_is_told_again_and_one_that_was_not_told_is() -> None:
    rig = trained(follows=False)
    control = adopted(rig, s5=(1, ""))
    assert sorted(told(rig)) == [("s4", 0), ("s5", 1)] and not fed(rig)
    control.on_message("s5", Following(shard=1, live="s5 1 00"))
    assert ("w3", "s5") in fed(rig)


def test_of_a_spare_that_does_not_answer_the_log_knows_the_part() -> None:
    rig = trained()
    control = adopted(rig, "s5", s4=(0, "s4 1 00"))
    assert control.job.table["s5"].shard == 1 and not told(rig)
    assert fed(rig) == [("w2", "s4")]


@pytest.mark.parametrize("shards", [1, 2])
def test_what_a_process_said_before_it_had_a_rank_is_nothing_when_it_comes_late(
    shards: int,
) -> None:
    rig = Rig(LIVE, shards=shards)
    rig.ready(*rig.names())
    rig.join(*rig.members, step=0)
    sent = len(rig.hands.sent)
    rig.control.on_message("w1", Ready(live="w1 1 00"))  # after its answer to whoever took over
    assert rig.control.job.table["w1"].live == "" and rig.hands.sent[sent:] == []


def test_what_a_member_says_of_where_it_listened_is_nothing() -> None:
    rig = trained()
    control = adopted(rig, w1=(1, "w1 1 00"), s4=(0, "s4 1 00"), s5=(1, "s5 1 00"))
    assert control.job.table["w1"].live == ""
    rig = trained()
    control = adopted(rig, "w1", s4=(0, "s4 1 00"), s5=(1, "s5 1 00"))
    rig.hands.sent.clear()
    number = control._adoption._inquiry
    for place in ("joining", "waiting"):  # told of a rank, or not
        status = Status(
            place=place,  # type: ignore[arg-type]
            generation=0,
            step=0,
            valid=False,
            number=number,
            live="w1 1 00",
        )
        control.on_message("w1", status)
        assert control.job.table["w1"].live == ""


def test_a_benched_member_is_no_spare_that_follows() -> None:
    rig = trained()
    rig.die("s4", "s5")
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=10)
    assert rig.members == ("w2", "w3") or rig.members == ("w0", "w3"), rig.members
    (waits,) = [p for p in rig.control.job.table.where(Health.READY) if p.shard is not None]
    assert not waits.follows and waits.live == ""
    rig.control.on_message(waits.name, Following(shard=0, live="x 1 00"))
    assert waits.live == "" and (waits.name, 0) not in told(rig)[2:]
    joined = [name for name, one in rig.hands.sent if isinstance(one, Join)]
    for name in joined[-2:]:
        message = Joined(generation=rig.control.generation, step=10, checkpoint=None)
        rig.control.on_message(name, message)
    assert waits.name not in [spare for _, spare in fed(rig)]


def test_whoever_takes_over_before_the_job_began_tells_no_rank_to_follow() -> None:
    rig = Rig(LIVE, shards=2)
    known = JobRecord(roles={name: role for name, role, _ in rig.hands.spawned}, ready={"w1"})
    control = Controller(LIVE, rig.hands, world=4, steps=100, store_port=1, shards=2)
    rig.hands.sent.clear()
    control.adopt(known, StateFrom.INITIAL)
    rig.control = control
    (number,) = {one.number for _, one in rig.hands.sent if isinstance(one, Inquiry)}
    for name in ("w3", "w1"):  # the answer of the first went to the lost supervisor
        answer = Status(place="waiting", generation=0, step=0, valid=False, number=number)
        control.on_message(name, answer)
    rig.ready("w0", "w2", "s4", "s5")
    assert told(rig) == [("s4", 0), ("s5", 1)]
    assert rig.members == ("w0", "w1", "w2", "w3")


def test_a_part_that_no_waiting_process_holds_comes_first() -> None:
    rig = trained()
    rig.control.job.table["s4"].follows = False  # as one of part 0 that has been a member
    lose(rig, "w1", step=10)
    rig.join(*rig.members, step=10)
    rig.go_on(11, first=11)
    rig.ready("s6")
    assert told(rig)[2:] == [("s6", 1)]


def test_a_spare_that_answers_too_late_for_a_takeover_is_fed_all_the_same() -> None:
    rig = trained(follows=False)
    control = adopted(rig, "s5", s4=(0, "s4 1 00"))
    control.on_message("s5", Following(shard=0, live="s5 1 00"))
    assert "s5" not in [spare for _, spare in fed(rig)], "that is not the part it was told"
    control.on_message("s5", Following(shard=1, live="s5 1 00"))
    assert ("w3", "s5") in fed(rig)


def test_what_a_spare_answers_after_it_was_told_of_a_rank_is_nothing() -> None:
    rig = trained(follows=False)
    control = adopted(rig, "s5", s4=(0, "s4 1 00"))
    number = control._adoption._inquiry
    lose(rig, "w1", step=10)
    assert rig.members == ("w0", "s5", "w2", "w3")
    late = Status(
        place="waiting", generation=0, step=0, valid=False, number=number, shard=1, live="s5 1 00"
    )
    control.on_message("s5", late)
    assert control.job.table["s5"].live == ""


def test_a_spare_whose_place_is_about_to_fail_is_taken_last() -> None:
    rig = trained(spares=4)
    assert told(rig)[::2] == [("s4", 0), ("s6", 0)]
    rig.control.no_better_place(["s4"])
    lose(rig, "w0", step=10)
    assert rig.members == ("s6", "w1", "w2", "w3")
