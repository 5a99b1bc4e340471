"""Building blocks that strategies share: decide by what is left, smallest loss first. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from trainchaos.recovery.policy.backoff import BackoffSchedule
from trainchaos.recovery.policy.rank_assignment import by_shard, common_step, missing_shards, seat
from trainchaos.recovery.policy.strategy import (
    SAVED,
    Cause,
    ClusterView,
    Decision,
    Form,
    GiveUp,
    Health,
    Pause,
    ProcessView,
    Spawn,
    StateFrom,
)

MAX_NONFINITE_ROLLBACKS = 2
LOST_OUTSIDERS = BackoffSchedule(free=10, first_s=5.0, most_s=600.0)
MISFITS = BackoffSchedule(free=0, first_s=60.0, most_s=3600.0)
CORRUPTIONS = (Cause.NONFINITE, Cause.DIVERGED)


def valid_survivors(view: ClusterView) -> tuple[ProcessView, ...]:
    return tuple(p for p in view.survivors if p.valid)


def suspects(view: ClusterView) -> tuple[str, ...]:
    """Processes that the current failures blame for non-finite values or for a state that
    differs.
    """
    return tuple(f.process for f in view.failures if f.cause in CORRUPTIONS and f.process)


def trusted(view: ClusterView) -> tuple[ProcessView, ...]:
    """Living processes with a shard that are not blamed: survivors in rank order, then those that
    wait.

    A process whose state is torn (its source was lost in the middle of a transfer) is healthy
    otherwise: it gets the state from another one.
    """
    people, blamed = (*view.survivors, *view.benched), set(suspects(view))
    return tuple(p for p in people if p.name not in blamed) if blamed else people


def kept(view: ClusterView) -> tuple[ProcessView, ...]:
    """Processes that can continue; none when no step is held whole among them."""
    people = trusted(view)
    return people if common_step(people, view.shards) is not None else ()


def no_copy(view: ClusterView) -> str:
    """Why no process can give its state to the next generation."""
    gone = missing_shards(view, trusted(view))
    if not gone:
        return (
            "the shards that are left belong to different steps: only a checkpoint or a memory copy"
            " can help"
        )
    if view.shards == 1:
        return "no rank holds a whole state"
    what = f"shard{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
    lost = (
        f"there is no second copy of {what}"
        if view.replicas == 1
        else f"nobody is left who holds {what}"
    )
    return f"{lost}: only a checkpoint or a memory copy can help"


def fill(view: ClusterView, fresh: tuple[str, ...]) -> Form | None:
    """As many replicas as can be filled, with state from each other; None when no step is held
    whole.

    ``fresh``: processes without a shard that may be used. A process without a place in a whole
    replica waits.
    """
    people = kept(view)
    members = seat(view, people, fresh, replicas=len(view.members) // view.shards)
    seated = set(members)
    there = [p for p in people if p.name in seated]
    if common_step(there, view.shards) is None:
        return None
    alone = common_step([p for p in there if not p.live], view.shards) is None
    state = StateFrom.SPARE if alone else StateFrom.PEER
    return Form(members=members, state=state, bench=waiting(people, seated))


def waiting(people: Iterable[ProcessView], members: AbstractSet[str]) -> tuple[str, ...]:
    """Of these processes, the parked ones that are not members: they wait for a place in a whole
    replica.
    """
    return tuple(p.name for p in people if p.health is Health.PARKED and p.name not in members)


def rejoin_all(view: ClusterView) -> Decision | None:
    """Answer a broken connection where all processes are alive.

    The same members form a new generation. None if one died, or holds a wrong state, or may: whom
    a wrong state was blamed on, and who is no member of the generation that broke as it formed, is
    out already.
    """
    if lost(view):
        return None
    # the order that makes it a member may not have reached it
    members = [view.process(name) for name in view.members]
    if common_step(members, view.shards) is None:
        return None
    wrong = [f.process for f in view.failures if f.cause in CORRUPTIONS]
    if any(not name or name in view.members for name in wrong):
        return None
    form = Form(members=view.members, state=StateFrom.PEER)
    return Decision(actions=(form,), reason="all ranks are alive: the group is formed again")


def shrink(view: ClusterView, *, why: str, fresh: tuple[str, ...] = ()) -> Decision:
    """Continue with the replicas that are whole or can be filled, from a checkpoint if no state
    survived whole.

    ``fresh``: processes that may fill gaps at once. Replacements are started when the smaller world
    trains (``replenish``): now they would slow it down.
    """
    form = fill(view, fresh)
    if form is None:
        return restart(view, why=f"{why}; {no_copy(view)}")
    if form.members == view.members:
        return restart(view, why="redoing the step did not help and nobody is to blame")
    wait = f", {', '.join(form.bench)} waiting for a place in a whole replica" if form.bench else ""
    reason = f"{why}: {len(form.members)} of {view.world} ranks go on{wait}"
    return Decision(actions=(form,), reason=reason)


def replenish(view: ClusterView, *, spares: int, role: str) -> Decision:
    """Start the processes that the world and its spares lack, beyond those ready or on their way.

    Where many died in a row without ever holding a rank, or one did not match the others, another
    one probably would fail too: the longer the row, the later the next start.
    """
    missing = view.world - len(view.members) + spares - len(view.ready) - len(view.starting)
    if missing <= 0:
        return Decision(actions=(), reason="nobody is missing")
    outside = [failure for failure in view.history if failure.process and failure.rank is None]
    unfit = MISFITS.again_s(failure.time_s for failure in outside if failure.cause is Cause.UNFIT)
    # Processes that may be lost with one node: those of a broken replica wait outside as well.
    together = view.spares + view.shards
    again_s = max(
        unfit, LOST_OUTSIDERS.again_s((failure.time_s for failure in outside), together=together)
    )
    if again_s > view.now_s:
        why = (
            "did not fit the others"
            if again_s == unfit
            else "died before they held a rank, one after the other"
        )
        wait = f"the next one is started in {again_s - view.now_s:.0f} s"
        return Decision(actions=(), reason=f"processes {why}: {wait}", again_s=again_s)
    spawns = tuple(Spawn(role=role) for _ in range(missing))
    return Decision(actions=spawns, reason=f"{missing} missing: started anew")


def with_room(view: ClusterView) -> tuple[str, ...]:
    """The members, and ready processes as far as whole replicas can be filled."""
    members = tuple(view.process(name) for name in view.members)
    fresh = [p.name for p in view.fresh]
    return seat(view, (*members, *view.benched), fresh, replicas=view.replicas)


def grow(view: ClusterView) -> Decision:
    """Answer a pause: the paused members continue, with ready processes as far as the world has
    room.
    """
    form = Form(members=with_room(view), state=StateFrom.PEER, cause="grow")
    there = set(view.members)
    joining = [name for name in form.members if name not in there]
    if not joining:
        gone = "whoever was to join is gone: the same members go on"
        return Decision(actions=(form,), reason=SAVED if view.pause_saves else gone)
    verb = "joins" if len(joining) == 1 else "join"
    return Decision(actions=(form,), reason=f"{', '.join(joining)} {verb} with a peer's state")


def make_way(view: ClusterView) -> Decision:
    """Answer a notice: park at the next step boundary, so that no step is lost when the noticed
    processes leave.

    When no other process holds some shard, a checkpoint keeps the state.
    """
    return Decision(
        actions=(Pause(save=_alone(view, view.leaving)),),
        reason=f"{', '.join(view.leaving)} will be ended soon",
    )


def relieve(view: ClusterView) -> Decision | None:
    """Answer the pause that ``make_way`` asked for: the noticed processes leave, and ready ones
    take their places as far as they suffice. None when no process was noticed.

    When the last holder of some shard was noticed too late for that pause to save anything, the
    same members continue, until a further pause that saves.
    """
    if not view.leaving:
        return None
    return _without(view, view.leaving, view.fresh, Cause.NOTICE, "will be ended soon")


def move_away(view: ClusterView) -> Decision | None:
    """Answer a warning: park at the next step boundary, so that spares take the places of those
    that may fail and no step is lost. None without a spare for each of them.

    When no other process holds some shard, a checkpoint keeps the state.
    """
    if not _can_move(view):
        return None
    return Decision(
        actions=(Pause(save=_alone(view, view.warned)),),
        reason=f"{', '.join(view.warned)} may fail soon, and a spare is ready",
    )


def move(view: ClusterView) -> Decision | None:
    """Answer the pause that ``move_away`` asked for. None without a spare for each process that may
    fail.
    """
    if not _can_move(view):
        return None
    return _without(view, view.warned, view.refuge, Cause.WARNING, "may fail soon")


def _can_move(view: ClusterView) -> bool:
    """Whether there is a spare for each process that may fail: one that follows its shard, or one
    that can take any.
    """
    follow = Counter(spare.shard for spare in view.benched if spare.live and not spare.warned)
    lack = Counter(view.process(name).shard for name in view.warned) - follow
    return bool(view.warned) and lack.total() <= len(view.refuge)


def _alone(view: ClusterView, names: Collection[str]) -> bool:
    """Whether these members hold all copies of some shard."""
    leaving, shards = set(names), range(view.shards)
    return any(leaving.issuperset(view.members[shard :: view.shards]) for shard in shards)


def _without(
    view: ClusterView,
    leaving: Collection[str],
    takers: Iterable[ProcessView],
    cause: Cause,
    what: str,
) -> Decision:
    """Go on without these paused members, ``takers`` in their places as far as they suffice;
    ``what``: is to become of those who leave, for people.
    """
    stay = [view.process(name) for name in view.members if name not in leaving]
    idle = [p for p in view.benched if cause is Cause.NOTICE or not p.warned]
    people = (*stay, *idle)
    members = seat(view, people, [p.name for p in takers], replicas=view.replicas)
    seated, there = set(members), set(view.members)
    if common_step([p for p in people if p.name in seated], view.shards) is None:
        why = f"{', '.join(leaving)} {what}, and nobody else holds the state"
        held = common_step([view.process(name) for name in view.members], view.shards)
        if held is None or held <= view.saved_step or view.pause_saves:
            return restart(view, why=why, without=leaving)
        again = Form(members=view.members, state=StateFrom.PEER, cause=cause.value)
        return Decision(
            actions=(again,), reason=f"{why}: step {held} is not saved, so they go on until one is"
        )
    bench = waiting(people, seated)
    form = Form(members=members, state=StateFrom.PEER, bench=bench, cause=cause.value)
    new = [name for name in members if name not in there]
    taken = f"{', '.join(new)} in place of" if new else "without"
    return Decision(actions=(form,), reason=f"goes on {taken} {', '.join(leaving)}, who {what}")


def restart(view: ClusterView, *, why: str, without: Collection[str] = ()) -> Decision:
    """Fill the world from ready processes, survivors and new ones, and restore the newest good
    checkpoint. ``without``: survivors that are to leave.

    Unless a checkpoint is known to exist, the first replica is made of processes that have neither
    trained nor followed: if there is none, the job begins anew with their state.
    """
    step = view.failures[-1].step if view.failures else -1
    back = {
        old.generation
        for old in view.history
        if old.cause is Cause.NONFINITE and old.step == step and old.answer == "rollback"
    }
    if len(back) >= MAX_NONFINITE_ROLLBACKS and any(
        f.cause is Cause.NONFINITE for f in view.failures
    ):
        reason = f"step {step} is non-finite again after {len(back)} rollbacks"
        return Decision(actions=(GiveUp(),), reason=reason)
    living = (*view.survivors, *view.benched)
    used = [p for p in living if not p.noticed and p.name not in without]
    outside = [p.name for p in (*view.fresh, *view.starting) if view.saved or not p.live]
    most = view.replicas if view.saved else view.replicas - 1
    reserve = itertools.chain(outside, (f"new-{number}" for number in itertools.count()))
    columns = []
    for holders in by_shard(used, view.shards):
        again = [p.name for p in holders][:most]
        columns.append([*itertools.islice(reserve, view.replicas - len(again)), *again])
    members = tuple(column[replica] for replica in range(view.replicas) for column in columns)
    spawns = tuple(Spawn(role="worker") for name in members if name.startswith("new-"))
    form = Form(members=members, state=StateFrom.CHECKPOINT)
    return Decision(actions=(*spawns, form), reason=f"{why}; {origin(view)}")


def origin(view: ClusterView) -> str:
    """What a restart begins with, as far as is known in advance."""
    if view.saved:
        return "back to the newest good checkpoint"
    return "no checkpoint of this job is known: begun anew, unless an earlier job left one"


def lost(view: ClusterView) -> list[str]:
    """Members that died or are blamed, in rank order."""
    well = {p.name for p in trusted(view)}
    return [name for name in view.members if name not in well]
