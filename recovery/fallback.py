"""What strategies share: deciding from what is left, weakest loss first. Pure."""

from __future__ import annotations

from recovery.strategy import (
    Cause,
    ClusterView,
    Decision,
    Failure,
    Form,
    GiveUp,
    Pause,
    ProcessView,
    Spawn,
    StateFrom,
)

MAX_NONFINITE_ROLLBACKS = 2
MAX_LOST_OUTSIDERS = 10
MAX_SKIPPED_SAMPLES = 16


def valid_survivors(view: ClusterView) -> tuple[ProcessView, ...]:
    """Survivors whose state is whole."""
    return tuple(p for p in view.survivors if p.valid)


def suspects(view: ClusterView) -> tuple[str, ...]:
    """Processes blamed for non-finite values by the failures at hand."""
    return tuple(f.process for f in view.failures if f.cause is Cause.NONFINITE and f.process)


def seen_before(view: ClusterView, failure: Failure) -> bool:
    """Whether the same step already failed with non-finite values: then a repeat did not help."""
    return any(old.cause is Cause.NONFINITE and old.step == failure.step for old in view.history)


def kept(view: ClusterView) -> tuple[ProcessView, ...]:
    """Survivors that go on, in rank order; none when nobody among them holds a whole state.

    One whose state is torn (its source was lost in the middle of a transfer) is well otherwise: it gets the
    state from another.
    """
    blamed = suspects(view)
    trusted = tuple(p for p in view.survivors if p.name not in blamed)
    return trusted if any(p.valid for p in trusted) else ()


def refill(view: ClusterView) -> Decision | None:
    """Answer non-finite values alone (nobody died): blamed ranks copy a healthy peer's state, the step is
    redone.

    None when that cannot help: somebody died, everybody is blamed, or it was tried for this step already.
    """
    only_nonfinite = all(f.cause is Cause.NONFINITE for f in view.failures)
    if not only_nonfinite or len(view.survivors) != len(view.members):
        return None
    if not kept(view) or any(seen_before(view, f) for f in view.failures):
        return None
    blamed = suspects(view)
    form = Form(members=view.members, state=StateFrom.PEER, refill=blamed, cause="refill")
    names = ", ".join(blamed) or "nobody"
    why = f"non-finite values ({names} blamed): state from a healthy peer, step redone"
    return Decision(actions=(form,), reason=why)


def skip(view: ClusterView) -> Decision | None:
    """Answer samples found to be non-finite by themselves: leave them out from the step on, and redo it.

    The ranks that computed them are well, so nobody's state is replaced. None when no sample was named, or something
    else went wrong too. Gives up when the job would leave out too many.
    """
    named = tuple(dict.fromkeys(sample for f in view.failures for sample in f.samples))
    only_nonfinite = all(f.cause is Cause.NONFINITE for f in view.failures)
    if not named or not only_nonfinite or len(valid_survivors(view)) != len(view.members):
        return None
    if view.skipped + len(named) > MAX_SKIPPED_SAMPLES:
        return Decision(
            actions=(GiveUp(),),
            reason=f"{view.skipped + len(named)} samples are non-finite, more than {MAX_SKIPPED_SAMPLES}: "
            "the data or the model are broken",
        )
    step = view.failures[-1].step
    form = Form(members=view.members, state=StateFrom.PEER, cause="skip", skip=named, skip_from=step)
    many = "sample" if len(named) == 1 else "samples"
    why = (
        f"{many} {', '.join(map(str, named))} non-finite whoever computes them: left out from step {step} on"
    )
    return Decision(actions=(form,), reason=why)


def rejoin_all(view: ClusterView) -> Decision | None:
    """Answer a broken connection with nobody dead.

    The same members form a new generation. None if somebody died.
    """
    if len(view.survivors) != len(view.members) or not valid_survivors(view):
        return None
    if any(f.cause is Cause.NONFINITE for f in view.failures):
        return None
    form = Form(members=view.members, state=StateFrom.PEER)
    return Decision(actions=(form,), reason="all ranks are alive: the group is formed again")


def shrink(view: ClusterView, *, refill_world: bool, why: str) -> Decision:
    """Go on with whoever is left, from a checkpoint if no state survived whole.

    ``refill_world``: start as many replacements as the world then lacks, beyond those ready or on their way.
    """
    left = kept(view)
    if not left:
        return restart(view, why=f"{why}; no rank holds a whole state")
    if len(left) == len(view.members):
        return restart(view, why="redoing the step did not help and nobody is to blame")
    missing = view.world - len(left) - len(view.ready) - len(view.starting)
    spawns = tuple(Spawn(role="worker") for _ in range(missing if refill_world else 0))
    form = Form(members=tuple(p.name for p in left), state=StateFrom.PEER)
    return Decision(actions=(form, *spawns), reason=f"{why}: {len(left)} of {view.world} ranks go on")


def replenish(view: ClusterView, *, spares: int, role: str) -> Decision:
    """Start what the world and its spares lack, beyond those ready or on their way.

    Not for ever: when too many died without ever holding a rank, another one would too.
    """
    missing = view.world - len(view.members) + spares - len(view.ready) - len(view.starting)
    if missing <= 0:
        return Decision(actions=(), reason="nobody is missing")
    lost = sum(1 for failure in view.history if failure.process and failure.rank is None)
    if lost > MAX_LOST_OUTSIDERS:
        return Decision(
            actions=(), reason=f"{lost} processes died before they held a rank: no more are started"
        )
    spawns = tuple(Spawn(role=role) for _ in range(missing))
    return Decision(actions=spawns, reason=f"{missing} missing: started anew")


def grow(view: ClusterView) -> Decision:
    """Answer a pause: the paused members, and whoever is ready as far as the world has room."""
    joining = tuple(p.name for p in view.ready)[: view.world - len(view.members)]
    form = Form(members=(*view.members, *joining), state=StateFrom.PEER, cause="grow")
    if not joining:
        return Decision(actions=(form,), reason="whoever was to join is gone: the same members go on")
    verb = "joins" if len(joining) == 1 else "join"
    return Decision(actions=(form,), reason=f"{', '.join(joining)} {verb} with a peer's state")


def make_way(view: ClusterView) -> Decision:
    """Answer a notice: park at the next step boundary, so that no step is lost when the noticed go.

    When they are all members there are, a checkpoint keeps the state that nobody else will hold.
    """
    names = ", ".join(view.leaving)
    everybody = len(view.leaving) == len(view.members)
    return Decision(actions=(Pause(save=everybody),), reason=f"{names} will be ended soon")


def relieve(view: ClusterView) -> Decision | None:
    """Answer the pause that ``make_way`` asked for: the noticed leave, ready processes take their places as far
    as they go. None when nobody was noticed."""
    leaving = view.leaving
    if not leaving:
        return None
    ready = [p.name for p in view.ready]
    place = dict(zip(leaving, ready, strict=False))
    stay = [name for name in view.members if name not in leaving]
    if not stay:
        return restart(view, why=f"{', '.join(leaving)} will be ended soon, and nobody else holds the state")
    members = [place.get(name, name) for name in view.members if name in place or name not in leaving]
    more = ready[len(place) :][: view.world - len(members)]
    form = Form(members=(*members, *more), state=StateFrom.PEER, cause="notice")
    taken = f"{', '.join(place.values())} in place of" if place else "without"
    return Decision(actions=(form,), reason=f"goes on {taken} {', '.join(leaving)} before the deadline")


def restart(view: ClusterView, *, why: str) -> Decision:
    """Fill the world from ready processes, survivors and new ones, and restore the newest good checkpoint.

    Rank 0 goes to a process that has never trained: if no checkpoint verifies, the job begins anew with its
    state.
    """
    step = view.failures[-1].step if view.failures else -1
    repeats = sum(1 for old in view.history if old.cause is Cause.NONFINITE and old.step == step)
    if repeats > MAX_NONFINITE_ROLLBACKS:
        return Decision(actions=(GiveUp(),), reason=f"step {step} is non-finite after every rollback")
    fresh = [p.name for p in (*view.ready, *view.starting)]
    used = [p.name for p in view.survivors if not p.noticed]
    alive = [*fresh, *used][: view.world] if fresh else used[: view.world - 1]
    missing = view.world - len(alive)
    new = [f"new-{i}" for i in range(missing)]
    spawns = tuple(Spawn(role="worker") for _ in range(missing))
    members = (*alive, *new) if fresh else (*new, *alive)
    form = Form(members=members, state=StateFrom.CHECKPOINT)
    return Decision(actions=(*spawns, form), reason=f"{why}; restored from the newest good checkpoint")


def lost(view: ClusterView) -> list[str]:
    """Members that do not go on, in rank order."""
    going_on = {p.name for p in kept(view)}
    return [name for name in view.members if name not in going_on]
