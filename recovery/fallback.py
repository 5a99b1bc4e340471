"""What strategies share: deciding from what is left, weakest loss first. Pure."""

from __future__ import annotations

from recovery.strategy import Cause, ClusterView, Decision, Failure, Form, GiveUp, ProcessView, Spawn, StateFrom

MAX_NONFINITE_ROLLBACKS = 2
MAX_LOST_OUTSIDERS = 10


def valid_survivors(view: ClusterView) -> tuple[ProcessView, ...]:
    """Survivors whose state is whole."""
    return tuple(p for p in view.survivors if p.valid)


def suspects(view: ClusterView) -> tuple[str, ...]:
    """Processes blamed for non-finite values by the failures at hand."""
    return tuple(f.process for f in view.failures if f.cause is Cause.NONFINITE and f.process)


def seen_before(view: ClusterView, failure: Failure) -> bool:
    """Whether the same step already failed with non-finite values: then a repeat did not help."""
    return any(old.cause is Cause.NONFINITE and old.step == failure.step for old in view.history)


def refill(view: ClusterView) -> Decision | None:
    """Answer non-finite values alone (nobody died): blamed ranks copy a healthy peer's state and the step is redone.

    None when that cannot help: somebody died, everybody is blamed, or it was tried for this step already.
    """
    only_nonfinite = all(f.cause is Cause.NONFINITE for f in view.failures)
    if not only_nonfinite or len(view.survivors) != len(view.members):
        return None
    blamed = suspects(view)
    trusted = [p for p in valid_survivors(view) if p.name not in blamed]
    if not trusted or any(seen_before(view, f) for f in view.failures):
        return None
    form = Form(members=view.members, state=StateFrom.PEER, refill=blamed, cause="refill")
    names = ", ".join(blamed) or "nobody"
    return Decision(actions=(form,), reason=f"non-finite values ({names} blamed): state from a healthy peer, step redone")


def rejoin_all(view: ClusterView) -> Decision | None:
    """Answer a broken connection with nobody dead: the same members form a new generation. None when somebody died."""
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
    blamed = suspects(view)
    left = tuple(p for p in valid_survivors(view) if p.name not in blamed)
    if not left:
        return restart(view, why=f"{why}; no rank holds a whole state")
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
        return Decision(actions=(), reason=f"{lost} processes died before they held a rank: no more are started")
    spawns = tuple(Spawn(role=role) for _ in range(missing))
    return Decision(actions=spawns, reason=f"{missing} missing: started anew")


def restart(view: ClusterView, *, why: str) -> Decision:
    """Fill the world from survivors, ready processes and new ones, and restore the newest good checkpoint."""
    repeats = sum(1 for old in view.history if old.cause is Cause.NONFINITE and old.step == view.failures[-1].step)
    if repeats > MAX_NONFINITE_ROLLBACKS:
        return Decision(actions=(GiveUp(),), reason=f"step {view.failures[-1].step} is non-finite after every rollback")
    alive = [p.name for p in (*view.survivors, *view.ready, *view.starting)][: view.world]
    missing = view.world - len(alive)
    new = tuple(f"new-{i}" for i in range(missing))
    spawns = tuple(Spawn(role="worker") for _ in range(missing))
    form = Form(members=(*alive, *new), state=StateFrom.CHECKPOINT)
    return Decision(actions=(*spawns, form), reason=f"{why}; restored from the newest good checkpoint")
