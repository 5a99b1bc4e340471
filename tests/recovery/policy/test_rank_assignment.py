"""Who sits where: over random sharded jobs, every generation that is decided on can form, and has
all of its state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.rank_assignment import (
    can_supply,
    common_step,
    least_followed,
    seat,
)
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import (
    Cause,
    ClusterView,
    Failure,
    Form,
    Health,
    Nonfinite,
    ProcessView,
    Spawn,
    StateFrom,
    Strategy,
)
from trainchaos.recovery.supervise.process_table import ProcessTable

STRATEGIES: list[Strategy] = [
    HotSpare(),
    HotSpare(spares=3),
    DropReplica(),
    DropReplica(rejoin=False),
]


def member(rank: int, shards: int, **more: Any) -> ProcessView:
    """A parked member that has applied step 10."""
    known: dict[str, Any] = {
        "name": f"w{rank}",
        "rank": rank,
        "health": Health.PARKED,
        "step": 10,
        "valid": True,
    }
    return ProcessView(role="worker", shard=rank % shards, **{**known, **more})


def view_of(
    members: list[ProcessView], shards: int, *others: ProcessView, **more: Any
) -> ClusterView:
    """A generation that failed."""
    dead = [
        Failure(process=p.name, rank=p.rank, cause=Cause.EXIT, step=11, time_s=1.0)
        for p in members
        if p.health is Health.DEAD
    ]
    error = Failure(process="", rank=None, cause=Cause.ERROR, step=11, time_s=1.0)
    return ClusterView(
        now_s=2.0,
        generation=3,
        world=more.pop("world", len(members)),
        spares=1,
        shards=shards,
        members=tuple(p.name for p in members),
        processes=(*members, *others),
        failures=tuple(dead or [error]),
        **more,
    )


@st.composite
def broken_jobs(draw: st.DrawFn) -> ClusterView:
    """Ranks that died, are torn, a step ahead, or hold one that they have not applied; others that
    wait, some of them spares that follow a shard.
    """
    shards, replicas, missing = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 1)),
    )
    fates: dict[str, dict[str, Any]] = {
        "well": {},
        "dead": {"health": Health.DEAD},
        "torn": {"valid": False},
        "ahead": {"step": 11},
        "pending": {"pending": 11},
    }
    chance = st.sampled_from([*["well"] * 3, "dead", "torn", "ahead", "pending"])
    members = [member(rank, shards, **fates[draw(chance)]) for rank in range(shards * replicas)]
    outside = [
        ProcessView(
            name=f"s{n}",
            role="spare",
            health=draw(st.sampled_from([Health.READY, Health.STARTING])),
        )
        for n in range(draw(st.integers(0, 3)))
    ]
    benched = [
        member(shard, shards, health=Health.READY, valid=draw(st.booleans()))._replace(
            name=f"b{shard}", rank=None
        )
        for shard in range(draw(st.integers(0, shards)) if missing else 0)
    ]
    following = [
        ProcessView(
            name=f"f{n}",
            role="spare",
            health=Health.READY,
            shard=draw(st.integers(0, shards - 1)),
            live=draw(st.booleans()),
        )
        for n in range(draw(st.integers(0, 3)))
    ]
    return view_of(
        members,
        shards,
        *outside,
        *benched,
        *following,
        world=shards * (replicas + missing),
        saved=draw(st.booleans()),
    )


def form_of(strategy: Strategy, view: ClusterView) -> tuple[Form, str]:
    """What a strategy decides."""
    decision = strategy.on_failure(view)
    (form,) = [action for action in decision.actions if isinstance(action, Form)]
    new = [name for name in form.members if name.startswith("new-")]
    assert len(new) <= sum(isinstance(action, Spawn) for action in decision.actions)
    return form, decision.reason


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@given(view=broken_jobs())
def test_whole_replicas_and_every_shard_in_its_column(
    strategy: Strategy, view: ClusterView
) -> None:
    form, reason = form_of(strategy, view)
    layout = Layout(world=len(form.members), shards=view.shards)  # raises if a replica is not whole
    assert len(set(form.members)) == layout.world <= view.world
    seated = {r: view.process(n) for r, n in enumerate(form.members) if not n.startswith("new-")}
    for rank, process in seated.items():
        assert process.health is not Health.DEAD
        assert process.shard in (None, layout.shard_of(rank)), "a process keeps its shard for life"
    if form.state is StateFrom.CHECKPOINT:
        assert layout.world == view.world, "a restart fills every rank"
        first = [process for rank, process in seated.items() if layout.replica_of(rank) == 0]
        assert view.saved or all(process.shard is None for process in first)
        return
    step = common_step(seated.values(), view.shards)
    assert step is not None, reason
    assert not [n for n in form.members if n.startswith("new-")], "nobody with state waits"
    living = {p.name for p in view.processes if p.health is Health.PARKED}
    assert living - set(form.members) == set(form.bench), (
        "who finds no seat waits, and is not killed"
    )
    most = Counter(p.shard for p in fallback.trusted(view))
    fresh = len(view.fresh) if isinstance(strategy, HotSpare) else 0
    short = layout.replicas + 1
    lacking = sum(max(0, short - most[shard]) for shard in range(view.shards))
    assert lacking > fresh or short * view.shards > len(view.members), (
        "as many replicas as there can be"
    )


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=12))
def test_spares_are_spread_over_the_shards_whoever_is_lost(shards: int, losses: list[int]) -> None:
    following: list[int] = []
    for _ in range(shards):
        following.append(least_followed(following, shards))
    assert following == [*range(shards)], "the first ones follow a shard each"
    for lost in losses:  # one that takes a rank, or dies, is replaced
        gone = following.pop(lost % shards)
        following.append(least_followed(following, shards))
        assert following[-1] == gone
    more = [least_followed(following, shards)]
    more.append(least_followed([*following, *more], shards))
    assert more == [0, 1 % shards]


def spare(name: str, shard: int | None, **more: Any) -> ProcessView:
    """One that is ready, and follows a shard where it has one."""
    live = shard is not None
    return ProcessView(name=name, role="spare", health=Health.READY, shard=shard, live=live, **more)


def test_a_lost_rank_is_taken_by_the_spare_that_follows_its_shard() -> None:
    strategy = HotSpare(sync="live", spares=2)
    gone = [member(0, 2), member(1, 2), member(2, 2), member(3, 2, health=Health.DEAD)]
    form, reason = form_of(strategy, view_of(gone, 2, spare("a", 0), spare("b", 1)))
    assert form.members == ("w0", "w1", "w2", "b") and form.state is StateFrom.PEER
    assert reason == "b takes over from w3"
    form, reason = form_of(strategy, view_of(gone, 2, spare("a", 0), spare("c", 0)))
    assert form.members == ("w0", "w1") and form.bench == ("w2",)
    assert reason.startswith("1 lost, 0 spares ready, what they cannot fill is dropped")
    form, _ = form_of(strategy, view_of(gone, 2, spare("a", 0), spare("new", None)))
    assert form.members == ("w0", "w1", "w2", "new"), "one that follows no shard takes any"


def test_of_those_that_wait_the_one_that_follows_comes_first_and_members_keep_their_places() -> (
    None
):
    benched = member(0, 2, health=Health.READY, valid=False, step=4)._replace(name="b", rank=None)
    two = [member(0, 2), member(1, 2)]
    view = view_of(two, 2, benched, spare("f", 0), spare("new", None), world=4)
    assert fallback.with_room(view) == ("w0", "w1", "f", "new")
    torn = [member(0, 2), member(1, 2), member(2, 2, valid=False), member(3, 2)]
    form, _ = form_of(HotSpare(sync="live", spares=2), view_of(torn, 2, spare("f", 0)))
    assert form.members == ("w0", "w1", "w2", "w3")


@pytest.mark.parametrize(
    ("spares", "moves"),
    [
        ([spare("a", 0), spare("b", 1)], True),
        ([spare("a", 0), spare("c", 0)], False),
        ([spare("a", 0), spare("new", None)], True),
        ([spare("b", 1, warned=True)], False),
        ([spare("b", 1, warned=True), spare("new", None)], True),
        ([spare("b", 1)._replace(live=False)], False),
    ],
    ids=["follows", "another", "free", "warned", "warned-and-free", "not-yet"],
)
def test_a_rank_that_may_fail_moves_to_a_spare_of_its_shard(
    spares: list[ProcessView], moves: bool
) -> None:
    people = [member(rank, 2, warned=rank == 3, health=Health.TRAINING) for rank in range(4)]
    view = view_of(people, 2, *spares)
    assert (fallback.move_away(view) is not None) == moves
    parked = [one._replace(health=Health.PARKED) for one in people]
    moved = fallback.move(view_of(parked, 2, *spares))
    assert (moved is not None) == moves
    if moved is not None:
        (form,) = [action for action in moved.actions if isinstance(action, Form)]
        taker = form.members[3]
        assert form.members[:3] == ("w0", "w1", "w2") and taker in ("b", "new")
        assert not next(one for one in spares if one.name == taker).warned


class NoHands:
    """Of processes that do nothing."""

    def now_s(self) -> float:
        return 0.0


def table_of(view: ClusterView) -> ProcessTable:
    """The processes of a view as their supervisor knows them."""
    table = ProcessTable(NoHands(), start_timeout_s=1.0)  # type: ignore[arg-type]
    for process in view.processes:
        entry = table.know(process.name, process.role)
        entry.health, entry.step, entry.valid = process.health, process.step, process.valid
        entry.shard, entry.pending = process.shard, process.pending
    return table


@given(view=broken_jobs())
def test_after_the_copies_all_shards_are_at_one_step(view: ClusterView) -> None:
    form = fallback.fill(view, tuple(p.name for p in view.fresh))
    if form is None:
        people = fallback.trusted(view)
        assert common_step(people, view.shards) is None or len(people) > len(view.members)
        return
    plan = table_of(view).plan_transfer(form, view.shards)
    copies, finish = plan.copies, plan.finish
    layout = Layout(world=len(form.members), shards=view.shards)
    held = {rank: view.process(name) for rank, name in enumerate(form.members)}
    step = common_step(held.values(), view.shards)
    assert step is not None
    after = {}
    for rank, process in held.items():
        at = process.step if process.valid else None
        after[rank] = (
            finish
            if finish and process.valid and process.pending == finish == process.step + 1
            else at
        )
    for rank, source in copies.items():
        assert layout.shard_of(rank) == layout.shard_of(source) and source not in copies
        assert can_supply(held[source], step)
        after[rank] = after[source]
    assert set(after.values()) == {step}
    if finish:
        assert any(p.valid and p.step == finish for p in held.values()), (
            "somebody can tell how the step ended"
        )


@st.composite
def poisoned_jobs(draw: st.DrawFn) -> ClusterView:
    """Everybody lives; some are to blame for non-finite values, and may have named samples."""
    shards, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    fates: list[dict[str, Any]] = [{}, {}, {"step": 11}, {"pending": 11}, {"valid": False}]
    members = [
        member(rank, shards, **draw(st.sampled_from(fates))) for rank in range(shards * replicas)
    ]
    blamed = draw(st.lists(st.sampled_from(members), unique_by=lambda p: p.name))
    named = st.lists(st.integers(0, 99), max_size=3).map(tuple)
    failures = [
        Failure(
            process=p.name,
            rank=p.rank,
            cause=Cause.NONFINITE,
            step=11,
            time_s=1.0,
            samples=draw(named),
        )
        for p in blamed
    ]
    nobody = Failure(process="", rank=None, cause=Cause.NONFINITE, step=11, time_s=1.0)
    view = view_of(members, shards, *[ProcessView(name="s0", role="spare", health=Health.READY)])
    history = (
        replace(nobody, generation=1, answer=draw(st.sampled_from(["refill", "skip", "rollback"]))),
    )
    return replace(
        view, failures=tuple(failures or [nobody]), history=history[: draw(st.integers(0, 1))]
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("nonfinite", ["retry", "skip", "rollback"])
@pytest.mark.parametrize("kind", [HotSpare, DropReplica])
@given(view=poisoned_jobs())
def test_whoever_is_to_blame_the_next_generation_has_all_of_its_state(
    kind: type[HotSpare | DropReplica], nonfinite: Nonfinite, view: ClusterView
) -> None:
    form, reason = form_of(kind(nonfinite=nonfinite), view)
    if form.state is not StateFrom.PEER:
        return
    copies = table_of(view).plan_transfer(form, view.shards).copies
    blamed = {form.members.index(name) for name in fallback.suspects(view) if name in form.members}
    layout = Layout(world=len(form.members), shards=view.shards)
    well = {
        r for r, name in enumerate(form.members) if r not in blamed and view.process(name).valid
    }
    for rank in blamed if form.refill else ():
        others = well.intersection(layout.holders(layout.shard_of(rank)))
        assert not others or copies[rank] in others, (
            f"{reason}: rank {rank} keeps a doubtful state, or gives it on"
        )


def test_a_pending_step_is_finished_and_not_computed_again() -> None:
    members = [
        member(0, 2, step=11),
        member(1, 2, pending=11),
        member(2, 2, pending=11),
        member(3, 2, health=Health.DEAD),
    ]
    assert common_step([p for p in members if p.health is Health.PARKED], 2) == 11
    alone = [member(0, 2, pending=11), member(1, 2, pending=11)]
    assert common_step(alone, 2) == 10, "nobody knows how step 11 ended"
    behind = [member(0, 2, step=11), member(1, 2)]
    assert common_step(behind, 2) is None


def test_a_replica_that_is_given_up_is_the_most_broken_one() -> None:
    members = [member(rank, 2) for rank in range(6)]
    members[3] = member(3, 2, health=Health.DEAD)
    view = view_of(members, 2)
    assert seat(view, fallback.trusted(view), (), replicas=3) == ("w0", "w1", "w4", "w5")
    assert fallback.fill(view, ("s9",)).members == ("w0", "w1", "w2", "s9", "w4", "w5")  # type: ignore[union-attr]
