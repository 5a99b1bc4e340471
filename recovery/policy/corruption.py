"""How strategies answer corrupted values and states: refill a rank, exclude samples, go back to a
checkpoint; and how they answer a broken group, which loses no process either. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainchaos.recovery.policy.fallback import (
    CORRUPTIONS,
    rejoin_all,
    restart,
    suspects,
    valid_survivors,
)
from trainchaos.recovery.policy.rank_assignment import common_step
from trainchaos.recovery.policy.strategy import (
    Cause,
    ClusterView,
    Decision,
    Failure,
    Form,
    GiveUp,
    Kill,
    Nonfinite,
    StateFrom,
    in_words,
)

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
