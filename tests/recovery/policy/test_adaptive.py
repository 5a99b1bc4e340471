"""What ``adaptive`` chooses, that it says why, and that it does not go round in circles."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recovery.policy.test_strategies import check_form, failed_views, one_form, view_of
from tests.recovery.supervise.test_controller import Rig
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy import options
from trainchaos.recovery.policy.costs import Costs, Figure, Tried
from trainchaos.recovery.policy.strategies.adaptive import REFILLS, TRIES, Adaptive
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import (
    Cause,
    ClusterView,
    Decision,
    Failure,
    Form,
    GiveUp,
    Health,
    Kill,
    Pause,
    ProcessView,
    Spawn,
    StateFrom,
)
from trainchaos.recovery.supervise.controller import Stage

ADAPTIVE = Adaptive()


def costs_of(step_s: float, start_s: float, **more: Any) -> Costs:
    """Measured costs of a job of four ranks, 1,000 steps long, 50 of them done."""
    given: dict[str, Any] = {
        "step_s": {4: Figure(step_s, 40)},
        "start_s": Figure(start_s, 4),
        "form_s": Figure(0.01, 1),
        "copy_s": Figure(0.02, 1),
        "restore_s": Figure(0.03, 1),
        "committed": 50,
        "steps": 1000,
    }
    return Costs(**(given | more))


def lost(costs: Costs, *, outside: str = "", strategy: Adaptive = ADAPTIVE, **more: Any) -> Any:
    """The decision after one of four ranks died."""
    return strategy.on_failure(view_of(strategy, "PPPD", outside=outside, costs=costs, **more))


def prices(decision: Decision) -> dict[str, float]:
    """Option -> rank-seconds."""
    return {option.name: option.rank_s for option in decision.options}


def test_short_steps_and_a_slow_start_let_the_others_go_on() -> None:
    decision = lost(costs_of(0.05, 5.0), saved=True, saved_step=40)
    assert decision.chosen == options.DROP
    assert one_form(decision).members == ("w0", "w1", "w2")


def test_long_steps_and_a_quick_start_let_all_wait() -> None:
    decision = lost(costs_of(10.0, 0.3), saved=True, saved_step=40)
    assert decision.chosen == options.WAIT
    assert decision.actions[0] == Spawn(role="worker")
    assert one_form(decision).members == ("w0", "w1", "w2", "new-0")
    assert one_form(decision).state is StateFrom.PEER


def test_a_ready_process_takes_over_at_once() -> None:
    decision = lost(costs_of(0.05, 5.0), outside="R")
    assert decision.chosen == options.SWAP
    assert one_form(decision).members == ("w0", "w1", "w2", "s0")


def test_a_process_on_its_way_is_waited_for_and_no_other_started() -> None:
    decision = lost(costs_of(10.0, 0.3), outside="S")
    assert decision.chosen == options.WAIT
    form = one_form(decision)
    assert form.members == ("w0", "w1", "w2", "s0")
    assert form.refill == ("s0",)
    assert decision.actions == (form,)


def test_what_is_almost_there_costs_only_the_rest_of_its_start() -> None:
    costs = costs_of(10.0, 4.0)
    view = view_of(ADAPTIVE, "PPPD", outside="S", costs=costs)
    late = replace(view, processes=(*view.processes[:-1], view.processes[-1]._replace(age_s=3.0)))
    fresh, aged = (prices(ADAPTIVE.on_failure(each))[options.WAIT] for each in (view, late))
    assert fresh - aged == pytest.approx(4 * 3.0)


def test_where_no_state_is_left_whole_it_goes_back_to_a_checkpoint() -> None:
    view = view_of(ADAPTIVE, "DDDD", costs=costs_of(0.05, 1.0), saved=True, saved_step=40)
    decision = ADAPTIVE.on_failure(view)
    assert decision.chosen == options.HERE
    assert one_form(decision).state is StateFrom.CHECKPOINT


def test_prices_are_those_of_the_formula() -> None:
    costs = costs_of(1.0, 3.0)
    decision = lost(costs, saved=True, saved_step=40)
    found = prices(decision)
    form, copy, restore, start = (4 * each for each in (0.01, 0.02, 0.03, 3.0))
    assert found[options.WAIT] == pytest.approx(start + form + copy)
    assert found[options.HERE] == pytest.approx(start + form + restore + 10 * 1.0 * 4)
    # three ranks take 4/3 s a step; the replacement is started after the first one, is ready after
    # 3 s more, and joins after the fourth: each loses a quarter of the work of four
    assert found[options.DROP] == pytest.approx(form + 4 * 4 / 3 * (4 / 4) + form + copy)
    for option in decision.options:
        assert option.rank_s == pytest.approx(sum(option.parts.values()))
        assert f"{option.name} {option.rank_s:.3g}" in decision.reason
    assert list(found.values()) == sorted(found.values())


def test_a_smaller_world_that_was_seen_is_taken_as_it_was() -> None:
    """With elastic sums three ranks take twice as long as four, which nobody could know before."""
    steps = {4: Figure(1.0, 40), 3: Figure(2.0, 9)}
    assert lost(costs_of(1.0, 3.0)).chosen == options.DROP
    decision = lost(replace(costs_of(1.0, 3.0), step_s=steps))
    assert prices(decision)[options.DROP] == pytest.approx(0.04 + 4 * 6 * 0.5 + 0.12)
    assert decision.chosen == options.WAIT


def test_near_the_end_nobody_is_waited_for() -> None:
    costs = costs_of(10.0, 12.0, committed=999)
    assert lost(costs).chosen == options.DROP
    assert "join" in lost(costs).options[0].parts and lost(costs).options[0].parts["join"] == 0.0


@pytest.mark.slow
@given(data=st.data())
def test_without_drop_the_world_never_shrinks(data: st.DataObject) -> None:
    strategy = Adaptive(drop=False)
    view = data.draw(failed_views(strategy))
    decision = strategy.on_failure(view)
    for action in decision.actions:
        if isinstance(action, Form):
            assert len(action.members) >= len(view.members)
    assert not set(prices(decision)) & set(options.INEXACT)


FIGURES = st.builds(Figure, st.floats(0.0, 1e4), st.integers(0, 9))


@st.composite
def costly_views(draw: st.DrawFn) -> ClusterView:
    """Views of all kinds with costs of all kinds, noticed, warned and sharded members."""
    view: ClusterView = draw(failed_views(ADAPTIVE))
    sharded = view.world % 2 == 0 and len(view.members) % 2 == 0 and draw(st.booleans())
    processes = tuple(
        process._replace(
            noticed=draw(st.booleans()) if process.health is not Health.DEAD else False,
            warned=draw(st.booleans()),
            age_s=draw(st.floats(0.0, 100.0)),
            shard=process.rank % 2 if sharded and process.rank is not None else process.shard,
        )
        for process in view.processes
    )
    places = [(failure.rank, failure.cause.value) for failure in view.failures]
    tried = st.builds(
        Tried,
        option=st.sampled_from(["swap", "wait", "drop", "restart-here", "refill", "regroup"]),
        places=st.frozensets(st.sampled_from(places), min_size=1),
    )
    sizes = st.integers(1, 6)
    step = st.builds(Figure, st.floats(1e-4, 1e4), st.integers(1, 9))
    return replace(
        view,
        processes=processes,
        shards=2 if sharded else 1,
        costs=Costs(
            step_s=draw(st.dictionaries(sizes, step, max_size=3)),
            form_s=draw(FIGURES),
            copy_s=draw(FIGURES),
            start_s=draw(FIGURES),
            restore_s=draw(FIGURES),
            committed=draw(st.integers(0, 100)),
            steps=draw(st.integers(0, 120)),
        ),
        tried=tuple(draw(st.lists(tried, max_size=6))),
        no_place=draw(st.booleans()),
        saved=draw(st.booleans()),
        saved_step=draw(st.integers(-1, 10)),
    )


@pytest.mark.slow
@given(view=costly_views())
def test_whatever_things_cost_its_decision_can_be_carried_out(view: ClusterView) -> None:
    decision = ADAPTIVE.on_failure(view)
    assert decision.actions and decision.reason
    if any(isinstance(action, GiveUp) for action in decision.actions):
        assert len(decision.actions) == 1
        return
    form = one_form(decision)
    if form.state is StateFrom.PEER and view.shards == 1:
        check_form(view, decision)
    killed = {action.process for action in decision.actions if isinstance(action, Kill)}
    spawned = sum(isinstance(action, Spawn) for action in decision.actions)
    assert len(form.members) % view.shards == 0
    assert len(set(form.members)) == len(form.members) <= view.world
    for name in form.members:
        if name.startswith("new-"):
            assert int(name[4:]) < spawned
        else:
            assert name not in killed
            assert view.process(name).health in (Health.PARKED, Health.READY, Health.STARTING)
    blamed = {f.process for f in view.failures if f.cause is Cause.NONFINITE}
    if form.state is StateFrom.PEER and view.shards == 1:  # else nobody else may hold its part
        assert not blamed & set(form.members) - set(form.refill)


@pytest.mark.slow
@given(view=costly_views())
def test_an_incident_that_comes_back_is_answered_in_other_ways_and_then_no_more(
    view: ClusterView,
) -> None:
    view = replace(view, tried=(), history=())
    places = frozenset((failure.rank, failure.cause.value) for failure in view.failures)
    seen: Counter[str] = Counter()
    for _ in range(TRIES * 8 + 1):
        decision = ADAPTIVE.on_failure(view)
        if any(isinstance(action, GiveUp) for action in decision.actions):
            assert decision.reason
            return
        assert decision.chosen
        seen[decision.chosen] += 1
        assert seen[decision.chosen] <= TRIES
        again = Tried(option=decision.chosen, places=places)
        view = replace(view, tried=(*view.tried, again))
    raise AssertionError(f"it goes on for ever: {seen}")


def test_it_gives_up_with_words_when_everything_was_tried_in_vain() -> None:
    view = view_of(ADAPTIVE, "PPPD", costs=costs_of(0.05, 1.0), saved=True, saved_step=40)
    places = frozenset({(3, "exit")})
    every = (options.DROP, options.WAIT, options.HERE, options.ANEW)
    tried = tuple(Tried(option=name, places=places) for name in every for _ in range(TRIES))
    decision = ADAPTIVE.on_failure(replace(view, tried=tried))
    assert decision.actions == (GiveUp(),)
    assert all(name in decision.reason for name in every)
    elsewhere = tuple(replace(each, places=frozenset({(1, "exit")})) for each in tried)
    assert ADAPTIVE.on_failure(replace(view, tried=elsewhere)).chosen == options.DROP


def blamed(step: int, answer: str = "", name: str = "w2") -> Failure:
    """Non-finite values of rank 2."""
    return Failure(
        process=name, rank=2, cause=Cause.NONFINITE, step=step, time_s=1.0, answer=answer
    )


def test_a_sample_that_is_not_finite_by_itself_is_left_out() -> None:
    failure = replace(blamed(11), samples=(5,))
    decision = ADAPTIVE.on_failure(view_of(ADAPTIVE, "PPPP", failures=(failure,)))
    assert one_form(decision).skip == (5,)
    assert decision.chosen == "skip"


def test_a_rank_whose_values_go_bad_again_and_again_is_replaced() -> None:
    history: tuple[Failure, ...] = ()
    for number in range(REFILLS):
        now = blamed(11 + number)
        view = view_of(ADAPTIVE, "PPPP", failures=(now,), history=history)
        decision = ADAPTIVE.on_failure(view)
        assert decision.chosen == "refill" and one_form(decision).refill == ("w2",)
        history = (*history, replace(now, answer="refill"))
    view = view_of(ADAPTIVE, "PPPP", failures=(blamed(20),), history=history)
    decision = ADAPTIVE.on_failure(view)
    assert "w2" not in one_form(decision).members
    near = costs_of(5.0, 0.001, committed=10, copy_s=Figure(50.0, 1), restore_s=Figure(0.0, 1))
    cheap = replace(view, costs=near, saved=True, saved_step=10)
    decision = ADAPTIVE.on_failure(cheap)
    assert decision.chosen == options.HERE and "w2" not in one_form(decision).members
    others = tuple(replace(old, process="w1") for old in history)
    view = view_of(ADAPTIVE, "PPPP", failures=(blamed(20),), history=others)
    assert ADAPTIVE.on_failure(view).chosen == "refill", "it was another process"
    view = view_of(ADAPTIVE, "PPPP", failures=(blamed(5_000),), history=history)
    assert ADAPTIVE.on_failure(view).chosen == "refill", "that was long ago"


def warned_view(outside: str = "", **more: Any) -> ClusterView:
    """A job at work whose rank 3 is about to fail."""
    view = view_of(ADAPTIVE, "PPPP", outside=outside, failures=(), **more)
    processes = tuple(
        process._replace(
            health=Health.TRAINING if process.rank is not None else process.health,
            warned=process.name == "w3",
        )
        for process in view.processes
    )
    return replace(view, processes=processes)


def test_a_warned_rank_moves_to_a_ready_process_where_its_loss_is_dearer() -> None:
    view = warned_view("R", costs=costs_of(2.0, 1.0))
    decision = ADAPTIVE.on_warning(view)
    assert decision.actions == (Pause(),) and decision.chosen == "move"
    # half of: the swap, and half a step of four ranks that is done again
    assert prices(decision)["stay"] == pytest.approx((4 * 0.03 + 4 * 2.0 / 2) / 2)
    assert ADAPTIVE.on_ready(view).chosen == "move"
    costs = costs_of(0.05, 1.0, copy_s=Figure(5.0, 1), restore_s=Figure(5.0, 1))
    dear = replace(view, costs=costs)
    assert ADAPTIVE.on_warning(dear).actions == ()
    assert ADAPTIVE.on_ready(dear).actions == ()


def test_the_more_warnings_come_true_the_more_is_done_about_one() -> None:
    view = warned_view("R", costs=costs_of(0.3, 1.0, copy_s=Figure(0.5, 1)))
    assert ADAPTIVE.on_warning(view).actions == ()
    came_true = tuple(
        Failure(process=f"x{n}", rank=0, cause=cause, step=5, time_s=1.0)
        for n in range(8)
        for cause in (Cause.WARNING, Cause.EXIT)
    )
    again = replace(view, costs=costs_of(0.3, 1.0, copy_s=Figure(0.5, 1)), history=came_true)
    more = ADAPTIVE._warning(again)[2], ADAPTIVE._warning(view)[2]
    after, before = ({p.name: p.rank_s for p in each}["stay"] for each in more)
    assert after == pytest.approx(before * (9 / 10) / (1 / 2))


def test_a_ready_process_waits_for_others_only_as_long_as_that_pays() -> None:
    view = view_of(ADAPTIVE, "PP", outside="RS", failures=(), world=4)
    working = tuple(
        p._replace(health=Health.TRAINING) if p.rank is not None else p for p in view.processes
    )
    view = replace(view, processes=working, costs=costs_of(0.05, 30.0))
    assert ADAPTIVE.on_ready(view).actions == (Pause(),)
    soon = tuple(p._replace(age_s=29.99) if p.name == "s1" else p for p in view.processes)
    assert ADAPTIVE.on_ready(replace(view, processes=soon)).actions == ()


def test_what_is_missing_for_longer_is_part_of_every_price() -> None:
    """A world that is short of another rank already is so however the new loss is answered."""
    view = view_of(ADAPTIVE, "PPD", outside="S", costs=costs_of(1.0, 3.0), world=4)
    found = {option.name: option.parts for option in ADAPTIVE.on_failure(view).options}
    assert found[options.WAIT]["missing"] > 0 and found[options.WAIT]["join"] > 0
    assert found[options.DROP]["missing"] > found[options.WAIT]["missing"]
    full = lost(costs_of(1.0, 3.0), outside="S")
    assert all("missing" not in o.parts for o in full.options if o.name == options.WAIT)


def test_for_a_warned_rank_a_process_is_started_and_saved_only_where_a_loss_would_need_it() -> None:
    costs = costs_of(0.05, 1.0)
    assert ADAPTIVE.on_warning(warned_view(costs=costs)).actions == (Spawn(role="worker"),)
    alone = ClusterView(
        now_s=2.0,
        generation=1,
        world=1,
        spares=0,
        members=("w0",),
        processes=(
            ProcessView(
                name="w0", role="worker", health=Health.TRAINING, rank=0, warned=True, shard=0
            ),
        ),
        failures=(),
        costs=costs,
    )
    decision = ADAPTIVE.on_warning(alone)
    assert decision.actions == (Spawn(role="worker"), Pause(save=True))
    assert "restart" in decision.reason
    dear = replace(costs, save_s=Figure(100.0, 1))
    assert ADAPTIVE.on_warning(replace(alone, costs=dear)).actions == (Spawn(role="worker"),)


def test_near_the_end_a_ready_process_joins_only_where_that_pays() -> None:
    view = view_of(ADAPTIVE, "PPP", outside="R", failures=(), world=4)
    working = tuple(
        p._replace(health=Health.TRAINING) if p.rank is not None else p for p in view.processes
    )
    dear = costs_of(0.05, 1.0, copy_s=Figure(5.0, 1))
    view = replace(view, processes=working, costs=dear)
    assert ADAPTIVE.on_ready(view).actions == (Pause(),)
    nearly = replace(view, costs=replace(dear, committed=990))
    assert ADAPTIVE.on_ready(nearly).actions == ()


def decided(rig: Rig) -> dict[str, Any]:
    """The last decision as the log has it."""
    return rig.events(Kind.DECISION)[-1]


def test_the_log_has_what_was_weighed_as_data() -> None:
    rig = Rig(Adaptive())
    rig.train(steps=56)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    event = decided(rig)
    assert event["chosen"] == event["options"][0]["name"]
    assert {option["name"] for option in event["options"]} >= {"drop", "wait", "restart-here"}
    for option in event["options"]:
        assert option["rank_s"] == pytest.approx(sum(option["parts"].values()), abs=1e-4)
        assert f"{option['name']} " in event["reason"]


def test_other_strategies_weigh_nothing_and_their_log_says_nothing_of_it() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=56)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    assert set(decided(rig)) == {"actions", "reason"}


def long_steps(rig: Rig) -> None:
    """A job whose steps take so long that it waits for a new process."""
    rig.train(steps=10)
    for step in range(11, 16):
        rig.hands.now += 30.0
        rig.at(*rig.members, step=step, committed=step)
        rig.control.job.meter.saw(4, step, rig.hands.now)


def test_all_wait_for_a_new_process_and_go_on_with_it() -> None:
    rig = Rig(Adaptive())
    long_steps(rig)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=15)
    assert decided(rig)["chosen"] == options.WAIT
    assert rig.stage is Stage.WAITING
    rig.ready("w4")
    assert rig.members == ("w0", "w4", "w2", "w3")
    assert set(rig.copies()) == {1}


def test_where_nothing_can_be_started_it_goes_on_with_fewer() -> None:
    rig = Rig(Adaptive())
    long_steps(rig)
    rig.hands.full = True
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=15)
    assert [event["chosen"] for event in rig.events(Kind.DECISION)] == [options.WAIT, options.DROP]
    assert rig.members == ("w0", "w2", "w3")
    assert rig.control.outcome == ""


def test_an_answer_that_failed_twice_is_not_given_again() -> None:
    rig = Rig(Adaptive())
    long_steps(rig)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=15)
    rig.die("w4")
    rig.die("w5")
    chosen = [event["chosen"] for event in rig.events(Kind.DECISION)]
    assert chosen == [options.WAIT, options.WAIT, options.DROP]
    assert "wait" in decided(rig)["reason"] and "(tried)" in decided(rig)["reason"]


def test_more_on_their_way_than_are_missing_are_no_reason_to_start_another() -> None:
    costs = costs_of(1.0, 30.0)
    one, two = (view_of(ADAPTIVE, "PPPD", outside=outside, costs=costs) for outside in ("S", "SS"))
    soon = [
        replace(view, processes=tuple(p._replace(age_s=29.0) for p in view.processes))
        for view in (one, two)
    ]
    found = [prices(ADAPTIVE.on_failure(view))[options.DROP] for view in soon]
    assert found[0] == pytest.approx(found[1])
    assert found[0] < prices(ADAPTIVE.on_failure(one))[options.DROP]
