"""Building blocks that strategies share: decide by what is left, smallest loss first; corrupted
values and states, which lose no process, are refilled, left out or sent back. Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from trainchaos.recovery.policy.backoff import BackoffSchedule
from trainchaos.recovery.policy.rank_assignment import by_shard, common_step, missing_shards, seat
from trainchaos.recovery.policy.strategy import (
    SAVED,
    Cause,
    ClusterView,
    Decision,
    Failure,
    Form,
    GiveUp,
    Health,
    Kill,
    Nonfinite,
    Pause,
    ProcessView,
    Spawn,
    StateFrom,
    in_words,
)

MAX_NONFINITE_ROLLBACKS = 2
LOST_OUTSIDERS = BackoffSchedule(free=10, first_s=5.0, most_s=600.0)
MISFITS = BackoffSchedule(free=0, first_s=60.0, most_s=3600.0)
CORRUPTIONS = (Cause.NONFINITE, Cause.DIVERGED)


def valid_survivors(view: ClusterView) -> tuple[ProcessView, ...]:
    """Survivors whose state is whole."""
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


NEVER_AGREED = (
    "the replicas differ, and there is no checkpoint from before they last agreed: save the first"
    " one sooner, or use a strategy that goes on with the state of most"
)
MAX_SKIPPED_SAMPLES = 16
MAX_SKIPPED_SHARES = 16
SKIP_WINDOW_STEPS = 1_000


def mend(view: ClusterView, *, nonfinite: Nonfinite) -> Decision | None:
    """Answer failures that lose no process: corrupted values or states, a broken connection. None:
    a process is lost.

    ``nonfinite``: see ``recovery.policy.strategy.Nonfinite``.
    """
    named = undecided(view) or skip(view, refills=nonfinite == "skip")
    if named is not None:
        return named
    if any(f.applied for f in view.failures):
        return restart(view, why="a state that is not finite")
    if nonfinite == "rollback" and any(f.cause is Cause.NONFINITE for f in view.failures):
        return restart(view, why="non-finite values")
    return refill(view) or rejoin_all(view)


def undecided(view: ClusterView) -> Decision | None:
    """Answer states that differ without a majority: none is known to be right, so none is kept. All
    ranks go back to a checkpoint from before the last agreement; without one the job ends.
    """
    if not any(f.cause is Cause.DIVERGED and not f.process for f in view.failures):
        return None
    why = "the replicas hold different states and no majority says which is right"
    if view.saved:
        return restart(view, why=f"{why}: back to before they last agreed")
    reason = (
        f"{why}, and there is no checkpoint from before they last agreed: seed the model alike on"
        " every rank, keep checkpoints, or train three replicas or more"
    )
    return Decision(actions=(GiveUp(),), reason=reason)


def refill(view: ClusterView) -> Decision | None:
    """Answer corruptions alone (no process died): blamed ranks copy a healthy peer's state, and an
    interrupted step is redone. A rank whose shard has no other holder keeps its own: nothing
    non-finite was applied to it.

    None when that cannot help: a process died, all are blamed, or it was tried already.
    """
    only_corrupt = all(f.cause in CORRUPTIONS for f in view.failures)
    if not only_corrupt or len(view.survivors) != len(view.members):
        return None
    blamed, replaced = suspects(view), replaceable(view)
    if set(blamed) >= {p.name for p in view.survivors if p.valid}:
        return None
    if replaced is None or any(seen_before(view, f) for f in view.failures):
        return None
    form = Form(members=view.members, state=StateFrom.PEER, refill=replaced, cause="refill")
    names = ", ".join(blamed) or "nobody"
    how = (
        "state from a healthy peer"
        if replaced or not blamed
        else "nobody else holds its part of the state"
    )
    if any(f.cause is Cause.DIVERGED for f in view.failures):
        return Decision(actions=(form,), reason=f"{names} held another state than most: {how}")
    return Decision(
        actions=(form,), reason=f"non-finite values ({names} blamed): {how}, step redone"
    )


def replaceable(view: ClusterView) -> tuple[str, ...] | None:
    """Blamed survivors whose part of the state a healthy process also holds and can send. The
    others keep theirs: no process could fill them, and the non-finite values were not applied.

    None when the remaining parts do not make one whole state.
    """
    blamed = set(suspects(view))
    healthy = {p.shard for p in view.survivors if p.valid and p.name not in blamed}
    replaced = tuple(p.name for p in view.survivors if p.name in blamed and p.shard in healthy)
    removed = set(replaced)
    left = [p for p in view.survivors if p.name not in removed]
    return replaced if common_step(left, view.shards) is not None else None


def skip(view: ClusterView, *, refills: bool = False) -> Decision | None:
    """Answer samples found to be non-finite by themselves: exclude them from this step on, and redo
    it.

    The ranks that computed them are healthy, so no state is replaced. ``refills``: their whole
    shares are excluded, whatever the reason was, so that their state is replaced too, where another
    process holds it. None when no sample was named, another failure happened too, or no state is
    left whole. Gives up when the job would exclude too many.
    """
    named = tuple(dict.fromkeys(sample for f in view.failures for sample in f.samples))
    only_nonfinite = all(f.cause is Cause.NONFINITE for f in view.failures)
    if not named or not only_nonfinite or len(valid_survivors(view)) != len(view.members):
        return None
    refill = replaceable(view) if refills else ()
    if refill is None or common_step(view.survivors, view.shards) is None:
        return None
    if reason := _skips_too_many(view, len(named), shares=refills):
        return Decision(actions=(GiveUp(),), reason=reason)
    step = view.failures[-1].step
    form = Form(
        members=view.members,
        state=StateFrom.PEER,
        cause="skip",
        skip=named,
        skip_from=step,
        refill=refill,
    )
    ids = f"sample{'s' if len(named) > 1 else ''} {in_words(named, ', ')}"
    if refills:
        whose = ", ".join(suspects(view)) or "the rank to blame"
        why = (
            f"non-finite values: the share of {whose} ({ids}) is left out from step {step} on,"
            " unexamined"
        )
    else:
        why = f"{ids} non-finite whoever computes them: left out from step {step} on"
    return Decision(actions=(form,), reason=why)


def _skips_too_many(view: ClusterView, more: int, *, shares: bool) -> str:
    """The reason to give up when the job would exclude too much of its data; else empty. A rate,
    since a job that runs for a year may meet any number of bad samples.
    """
    step = view.failures[-1].step
    if not shares and view.skipped + more > MAX_SKIPPED_SAMPLES:
        return (
            f"{view.skipped + more} samples of the last {SKIP_WINDOW_STEPS} steps are non-finite,"
            " more than are left out: the data or the model are broken"
        )
    refused = {
        (old.generation, old.step)
        for old in view.history
        if old.cause is Cause.NONFINITE
        and old.answer == "skip"
        and old.step > step - SKIP_WINDOW_STEPS
    }
    if shares and len(refused) >= MAX_SKIPPED_SHARES:
        return (
            f"shares of {len(refused)} of the last {SKIP_WINDOW_STEPS} steps were left out already"
            " because of non-finite values: the data or the model are broken"
        )
    return ""


def seen_before(view: ClusterView, failure: Failure) -> bool:
    """Whether another refill is useless: the same step already failed with non-finite values, or
    the same process has already differed from the others.
    """
    if failure.cause is Cause.DIVERGED:
        return any(
            old.cause is Cause.DIVERGED and old.process == failure.process for old in view.history
        )
    return any(old.cause is Cause.NONFINITE and old.step == failure.step for old in view.history)


def wrong_values(decision: Decision, failures: Sequence[Failure]) -> list[str]:
    """The processes that a decision replaces because of their values, non-finite ones or another
    state than the others': it ends them, or forms a generation without them.
    """
    wrong = dict.fromkeys(
        f.process
        for f in failures
        if f.process is not None and f.cause in (Cause.NONFINITE, Cause.DIVERGED)
    )
    ended = {action.process for action in decision.actions if isinstance(action, Kill)}
    forms = [action for action in decision.actions if isinstance(action, Form)]
    kept = {name for form in forms for name in (*form.members, *form.bench)}
    return [name for name in wrong if name in ended or (forms and name not in kept)]
