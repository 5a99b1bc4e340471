"""What every strategy promises, over cluster views of all kinds, and what each one is for."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.portions import long_but
from trainchaos.chaos import plugins
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategies.none import NoRecovery
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
    Strategy,
)

FOUND = plugins.load(plugins.STRATEGIES, Strategy)
VARIANTS: list[Strategy] = [
    *(kind() for kind in FOUND.values()),
    DropReplica(rejoin=False),
    DropReplica(batch="shrink"),
    DropReplica(nonfinite="skip"),
    HotSpare(nonfinite="skip"),
    HotSpare(nonfinite="rollback"),
    HotSpare(spares=2),
    HotSpare(replenish=False),
    CheckpointRestart(restart="cold"),
]

PLAYED = long_but(VARIANTS, *VARIANTS[: len(FOUND)])
"""Each strategy as it is in ``make test``, with its options in ``make test-all``."""


def name(strategy: Strategy) -> str:
    """For test ids."""
    changed = strategy.model_dump(exclude_defaults=True)
    return f"{type(strategy).__name__}{changed or ''}"


@st.composite
def failed_views(draw: st.DrawFn, strategy: Strategy) -> ClusterView:
    """A generation in which something failed and whoever lives has parked (or trains on, where
    nobody parks).
    """
    world = draw(st.integers(1, 6))
    size = draw(st.integers(1, world))
    alive = Health.PARKED if strategy.keeps_survivors else Health.TRAINING
    members: list[ProcessView] = []
    failures: list[Failure] = []
    for rank in range(size):
        fate = draw(st.sampled_from(["well", "well", "dead", "hung", "torn", "blamed"]))
        step = draw(st.integers(9, 10))
        health = Health.DEAD if fate in ("dead", "hung") else alive
        who = f"w{rank}"
        members.append(
            ProcessView(
                name=who,
                role="worker",
                health=health,
                rank=rank,
                step=step,
                valid=fate != "torn",
                shard=0,
            )
        )
        cause = {"dead": Cause.EXIT, "hung": Cause.HANG, "blamed": Cause.NONFINITE}.get(fate)
        if cause:
            failures.append(Failure(process=who, rank=rank, cause=cause, step=10, time_s=1.0))
    if not failures:
        cause = draw(st.sampled_from([Cause.ERROR, Cause.NONFINITE]))
        failures.append(Failure(process="", rank=None, cause=cause, step=10, time_s=1.0))
    outside = st.sampled_from([Health.READY, Health.STARTING, Health.DEAD])
    others = [
        ProcessView(name=f"s{number}", role="spare", health=draw(outside))
        for number in range(draw(st.integers(0, 3)))
    ]
    old = st.builds(
        Failure,
        process=st.sampled_from(["w0", "x"]),
        rank=st.sampled_from([None, 0]),
        cause=st.sampled_from(Cause),
        step=st.integers(8, 10),
        time_s=st.just(0.5),
        generation=st.integers(1, 2),
        answer=st.sampled_from(["refill", "rollback", "skip"]),
    )
    return ClusterView(
        now_s=2.0,
        generation=3,
        world=world,
        spares=strategy.spares_wanted,
        members=tuple(m.name for m in members),
        processes=(*members, *others),
        failures=tuple(failures),
        history=tuple(draw(st.lists(old, max_size=4))),
        rollbacks=draw(st.integers(0, 3)),
    )


def decide(strategy: Strategy, view: ClusterView, question: str) -> Decision:
    """Ask twice: a pure function gives the same answer and leaves the view as it was."""
    before = copy.deepcopy(view)
    first = getattr(strategy, question)(view)
    assert getattr(strategy, question)(view) == first
    assert view == before
    assert (
        first.reason and first.reason == first.reason.strip() and not first.reason.startswith(",")
    ), first
    return first


def one_form(decision: Decision) -> Form:
    forms = [action for action in decision.actions if isinstance(action, Form)]
    assert len(forms) == 1, decision
    return forms[0]


def check_form(view: ClusterView, decision: Decision) -> Form:
    """A generation can be formed of these members, and somebody among them has the state."""
    form = one_form(decision)
    spawned = [action for action in decision.actions if isinstance(action, Spawn)]
    killed = {action.process for action in decision.actions if isinstance(action, Kill)}
    assert 1 <= len(form.members) <= view.world
    assert len(set(form.members)) == len(form.members), "nobody holds two ranks"
    for member in form.members:
        if member.startswith("new-"):
            assert int(member[4:]) < len(spawned)
        else:
            assert view.process(member).health in (Health.PARKED, Health.READY, Health.STARTING)
            assert member not in killed
    if form.state is StateFrom.PEER:
        sources = [m for m in form.members if not m.startswith("new-") and m not in form.refill]
        assert any(
            view.process(m).health is Health.PARKED and view.process(m).valid for m in sources
        )
        blamed = {f.process for f in view.failures if f.cause is Cause.NONFINITE and f.process}
        assert not blamed & set(form.members) - set(form.refill), (
            "a blamed rank's state is never trusted"
        )
        assert all(view.process(m).health is not Health.STARTING for m in sources), (
            "nobody with state waits"
        )
    if form.state is StateFrom.CHECKPOINT:
        assert len(form.members) == view.world, "a restart fills every rank"
        first = form.members[0]
        fresh = first.startswith("new-") or view.process(first).health in (
            Health.READY,
            Health.STARTING,
        )
        assert fresh, (
            "without any checkpoint rank 0 gives its own state to all: it must be the initial one"
        )
    return form


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", PLAYED, ids=name)
@given(data=st.data())
def test_every_failure_is_answered_with_a_generation_that_can_form(
    strategy: Strategy, data: st.DataObject
) -> None:
    view = data.draw(failed_views(strategy))
    decision = decide(strategy, view, "on_failure")
    if any(isinstance(action, GiveUp) for action in decision.actions):
        assert len(decision.actions) == 1
        return
    form = check_form(view, decision)
    spawned = sum(isinstance(action, Spawn) for action in decision.actions)
    outside = {p.name for p in (*view.ready, *view.starting)} - set(form.members)
    killed = {action.process for action in decision.actions if isinstance(action, Kill)}
    known = {m for m in form.members if not m.startswith("new-")}
    provisioned = len(known) + len(outside - killed) + spawned
    before = len(view.survivors) + len(view.ready) + len(view.starting)
    assert provisioned <= max(view.world + view.spares, before), (
        "more processes than were asked for"
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", PLAYED, ids=name)
@given(data=st.data())
def test_a_loss_is_replaced_where_that_is_promised(strategy: Strategy, data: st.DataObject) -> None:
    view = data.draw(failed_views(strategy))
    promises = getattr(
        strategy, "rejoin", getattr(strategy, "replenish", not isinstance(strategy, NoRecovery))
    )
    decision = decide(strategy, view, "on_failure")
    if not promises or any(isinstance(action, GiveUp) for action in decision.actions):
        return
    form = one_form(decision)
    spawned = sum(isinstance(action, Spawn) for action in decision.actions)
    if form.state is not StateFrom.CHECKPOINT:
        later = decide(strategy, gone_on(view, form), "on_spare_lost")  # once the ranks train again
        spawned += sum(isinstance(action, Spawn) for action in later.actions)
    waiting = {p.name for p in (*view.ready, *view.starting)} - set(form.members)
    known = [m for m in form.members if not m.startswith("new-")]
    if form.cause == "failure" and set(form.members) != set(view.members):
        assert len(known) + len(waiting) + spawned >= view.world


def gone_on(view: ClusterView, form: Form) -> ClusterView:
    """The same job when the decided generation trains."""
    processes = [
        p._replace(health=Health.TRAINING) if p.name in form.members else p for p in view.processes
    ]
    return replace(view, members=form.members, processes=tuple(processes), failures=(), history=())


@st.composite
def training_views(draw: st.DrawFn, strategy: Strategy, health: Health) -> ClusterView:
    """A generation at work, or paused, with processes of all kinds outside."""
    world = draw(st.integers(1, 6))
    size = draw(st.integers(1, world))
    members = [
        ProcessView(
            name=f"w{rank}", role="worker", health=health, rank=rank, step=10, valid=True, shard=0
        )
        for rank in range(size)
    ]
    outside = st.sampled_from([Health.READY, Health.STARTING, Health.DEAD])
    others = [
        ProcessView(name=f"s{number}", role="spare", health=draw(outside))
        for number in range(draw(st.integers(0, 5)))
    ]
    lost = draw(st.integers(0, 20))
    history = [  # one after the other, up to this moment
        Failure(
            process=f"x{n}", rank=None, cause=Cause.EXIT, step=1, time_s=2.0 - 4.0 * (lost - 1 - n)
        )
        for n in range(lost)
    ]
    return ClusterView(
        now_s=2.0,
        generation=3,
        world=world,
        spares=strategy.spares_wanted,
        members=tuple(m.name for m in members),
        processes=(*members, *others),
        failures=(),
        history=tuple(history),
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", PLAYED, ids=name)
@given(data=st.data())
def test_somebody_ready_never_stops_training_by_force(
    strategy: Strategy, data: st.DataObject
) -> None:
    view = data.draw(training_views(strategy, Health.TRAINING))
    decision = decide(strategy, view, "on_ready")
    assert all(isinstance(action, Pause) for action in decision.actions)
    if decision.actions:
        assert view.ready and len(view.members) < view.world, "a pause for nothing"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", PLAYED, ids=name)
@given(data=st.data())
def test_losses_outside_the_generation_are_made_good_but_not_for_ever(
    strategy: Strategy, data: st.DataObject
) -> None:
    view = data.draw(training_views(strategy, Health.TRAINING))
    decision = decide(strategy, view, "on_spare_lost")
    assert all(isinstance(action, Spawn) for action in decision.actions)
    there = len(view.members) + len(view.ready) + len(view.starting)
    wanted = view.world + view.spares
    if decision.actions:
        assert there + len(decision.actions) == wanted
    elif isinstance(strategy, HotSpare) and strategy.replenish and len(view.history) <= 10:
        assert there >= wanted
    if len(view.history) > 10:
        assert not decision.actions


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", PLAYED, ids=name)
@given(data=st.data())
def test_a_pause_keeps_every_member_in_its_place(strategy: Strategy, data: st.DataObject) -> None:
    view = data.draw(training_views(strategy, Health.PARKED))
    form = check_form(view, decide(strategy, view, "on_paused"))
    assert form.members[: len(view.members)] == view.members
    assert form.state is StateFrom.PEER
    assert not form.refill


def view_of(
    strategy: Strategy,
    healths: str,
    *,
    outside: str = "",
    failures: tuple[Failure, ...] = (),
    **more: Any,
) -> ClusterView:
    """A view from letters: P parked, t torn, D dead, R ready, S starting."""
    meaning = {
        "P": Health.PARKED,
        "t": Health.PARKED,
        "D": Health.DEAD,
        "R": Health.READY,
        "S": Health.STARTING,
    }
    members = [
        ProcessView(
            name=f"w{i}", role="worker", health=meaning[c], rank=i, step=10, valid=c == "P", shard=0
        )
        for i, c in enumerate(healths)
    ]
    others = [
        ProcessView(name=f"s{i}", role="spare", health=meaning[c]) for i, c in enumerate(outside)
    ]
    dead = tuple(
        Failure(process=m.name, rank=m.rank, cause=Cause.EXIT, step=11, time_s=1.0)
        for m in members
        if m.health is Health.DEAD
    )
    return ClusterView(
        now_s=2.0,
        generation=1,
        world=more.pop("world", len(members)),
        spares=strategy.spares_wanted,
        members=tuple(m.name for m in members),
        processes=(*members, *others),
        failures=failures or dead,
        **more,
    )


def test_hot_spare_puts_the_spare_in_the_dead_ranks_place() -> None:
    decision = HotSpare().on_failure(view_of(HotSpare(), "PDPP", outside="R"))
    assert one_form(decision).members == ("w0", "s0", "w2", "w3")
    # another spare is started when the ranks train again
    assert decision.actions == (one_form(decision),)


def test_hot_spare_keeps_a_rank_whose_state_broke_off_in_transfer() -> None:
    """The source died while it sent: the receiver is well and only needs the state from somebody
    else.
    """
    decision = HotSpare().on_failure(view_of(HotSpare(), "DtPP", outside="R"))
    assert one_form(decision).members == ("s0", "w1", "w2", "w3")


def test_drop_replica_keeps_a_rank_whose_state_broke_off_in_transfer() -> None:
    decision = DropReplica().on_failure(view_of(DropReplica(), "DtPP"))
    assert one_form(decision).members == ("w1", "w2", "w3")


def test_a_connection_lost_in_the_middle_of_a_transfer_loses_nobody() -> None:
    failure = Failure(process="", rank=None, cause=Cause.ERROR, step=11, time_s=1.0)
    for strategy in (HotSpare(), DropReplica()):
        form = one_form(
            strategy.on_failure(view_of(strategy, "PtPP", outside="R", failures=(failure,)))
        )
        assert form.members == ("w0", "w1", "w2", "w3")


def test_a_blamed_rank_that_outlived_its_refill_is_replaced_and_the_world_filled_again() -> None:
    blamed = Failure(process="w2", rank=2, cause=Cause.NONFINITE, step=11, time_s=1.0)
    strategy = DropReplica()
    view = view_of(strategy, "PPPP", failures=(blamed,), history=(blamed,))
    decision = strategy.on_failure(view)
    form = one_form(decision)
    assert form.members == ("w0", "w1", "w3")
    later = strategy.on_spare_lost(gone_on(view, form))
    assert later.actions == (Spawn(role="worker"),)


def test_a_step_that_stays_non_finite_after_every_rollback_is_given_up() -> None:
    everybody = tuple(
        Failure(process=f"w{i}", rank=i, cause=Cause.NONFINITE, step=11, time_s=1.0)
        for i in range(2)
    )
    strategy = DropReplica()
    rolled_back = tuple(
        replace(f, generation=n, answer="rollback") for n in range(2) for f in everybody
    )
    decision = strategy.on_failure(view_of(strategy, "PP", failures=everybody, history=rolled_back))
    assert decision.actions == (GiveUp(),)


def test_a_restart_is_led_by_a_process_that_still_holds_the_initial_state() -> None:
    for strategy in (HotSpare(), DropReplica()):
        form = one_form(strategy.on_failure(view_of(strategy, "DttD", outside="R")))
        assert form.state is StateFrom.CHECKPOINT
        assert form.members[0] == "s0"
        assert {"w1", "w2"} <= set(form.members)
    everybody = tuple(
        Failure(process=f"w{i}", rank=i, cause=Cause.NONFINITE, step=11, time_s=1.0)
        for i in range(3)
    )
    decision = DropReplica().on_failure(view_of(DropReplica(), "PPP", failures=everybody))
    form = one_form(decision)
    assert form.members[0] == "new-0"
    assert len(form.members) == 3
    assert sum(isinstance(action, Spawn) for action in decision.actions) == 1


def test_a_spare_that_followed_does_not_begin_a_job_anew() -> None:
    view = view_of(HotSpare(sync="live"), "DttD", outside="R")
    following = tuple(p._replace(live=p.name == "s0") for p in view.processes)
    for saved, first in ((False, "new-0"), (True, "s0")):
        seen = replace(view, processes=following, saved=saved)
        form = one_form(HotSpare(sync="live").on_failure(seen))
        assert (form.state, form.members[0]) == (StateFrom.CHECKPOINT, first)


def test_checkpoint_restart_keeps_nobody() -> None:
    strategy = CheckpointRestart(restart="cold")
    decision = strategy.on_failure(view_of(strategy, "PDPP", outside="S"))
    assert {a.process for a in decision.actions if isinstance(a, Kill)} == {"w0", "w2", "w3", "s0"}
    assert [a.mode for a in decision.actions if isinstance(a, Spawn)] == ["cold"] * 4
    assert one_form(decision).members == ("new-0", "new-1", "new-2", "new-3")


def test_no_recovery_gives_up() -> None:
    assert NoRecovery().on_failure(view_of(NoRecovery(), "PD")).actions == (GiveUp(),)
