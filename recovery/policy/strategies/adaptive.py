"""Answer each incident in the way that costs least now, by what this job has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from trainchaos.recovery.policy import fallback, options
from trainchaos.recovery.policy.costs import Costs, Priced
from trainchaos.recovery.policy.interval import Rewinds
from trainchaos.recovery.policy.options import Option
from trainchaos.recovery.policy.strategy import (
    ANNOUNCED,
    Action,
    Cause,
    ClusterView,
    Decision,
    Form,
    GiveUp,
    Pause,
    Spawn,
    Strategy,
)

TRIES = 2
"""How often an incident is answered in one way before a dearer one is taken: once may be bad luck,
and a second failure in the same place without a step in between is not.
"""
REFILLS = 2
"""How often a rank with non-finite values or another state than the others may copy a peer's state
within ``LATELY_STEPS`` before it is replaced: what comes back in the same process is of the process
or its device.
"""
LATELY_STEPS = 1_000
LAST_STEPS = 20
"""Only within so many steps of the end may a process that is ready be left out because its joining
costs more than it brings.
"""
REGROUP, REFILL, SKIP = "regroup", "refill", "skip"
_BY_CAUSE = {"refill": REFILL, "skip": SKIP}


class Adaptive(Strategy):
    """Choose per incident what costs least: swap, wait for a new process, go on with fewer ranks,
    or go back to a checkpoint.

    Prices are lost rank-seconds, from the times this job has shown; the log has those of all
    options. ``spares``: processes held ready (0: replacements are started when they are needed).
    ``batch``: as for drop-replica. ``drop``: go on with fewer ranks where that is cheapest; false:
    never, so that the result is the same bit for bit. Non-finite values: retried in the same
    process, without the samples found to cause them, in another process if they come back, and
    after a rollback if nothing else is left. An answer that brought no new step twice is not given
    a third time.
    """

    exact: ClassVar[bool] = False

    spares: int = Field(default=0, ge=0, le=64)
    batch: Literal["constant", "shrink"] = "constant"
    drop: bool = True

    @property
    def spares_wanted(self) -> int:
        return self.spares

    @property
    def batch_policy(self) -> str:
        return self.batch

    def rewinds(self, costs: Costs) -> Rewinds | None:
        """Those after which a checkpoint was read: the others are answered without one."""
        return costs.rewinds

    def on_failure(self, view: ClusterView) -> Decision:
        """Take the cheapest option that has not failed twice in this place."""
        told = _told(view)
        if told is not None:
            return told
        kept = _keeping_all(view)
        if kept is not None and _tries(view, kept.chosen) < TRIES:
            return kept
        found = self._allowed(options.cheapest_first(view, shrinks=self.batch == "shrink"))
        left = [option for option in found if _tries(view, option.name) < TRIES]
        if left:
            return _take(left[0], found, left)
        if not found:
            return fallback.restart(view, why="nothing else is left")
        tried = ", ".join(dict.fromkeys(each.option for each in view.tried))
        reason = f"every answer was given {TRIES} times and brought no new step: {tried}"
        return Decision(actions=(GiveUp(),), reason=reason)

    def _allowed(self, found: Sequence[Option]) -> list[Option]:
        return [option for option in found if self.drop or option.name not in options.INEXACT]

    def on_spare_lost(self, view: ClusterView) -> Decision:
        """Start the processes that the world and its spares lack."""
        role = "spare" if self.spares else "worker"
        return fallback.replenish(view, spares=self.spares, role=role)

    def on_ready(self, view: ClusterView) -> Decision:
        """Let a ready process in, with others that are on their way if that costs less; move away
        from a place that is about to fail.
        """
        ranks, shrinks = len(fallback.with_room(view)), self.batch == "shrink"
        if ranks > len(view.members) and options.joins_now(view, ranks, shrinks=shrinks):
            return self._join(view)
        if view.warned:
            return self._away(view) or Decision(actions=(), reason="kept for a rank that may fail")
        return Decision(actions=(), reason="kept as spare, or more are on their way")

    def _join(self, view: ClusterView) -> Decision:
        left, shrinks = view.costs.left(), self.batch == "shrink"
        price = options.joining(view)
        if left is not None and left <= LAST_STEPS:
            seconds = left * view.costs.step_with(len(view.members), shrinks=shrinks)
            gain = options.missing(view, len(view.members), seconds, shrinks=shrinks)
            if gain < price:
                return Decision(actions=(), reason="the job is over before joining pays")
        return Decision(
            actions=(Pause(),), reason=f"a process is ready, and joins for {price:.3g} rank-s"
        )

    def on_notice(self, view: ClusterView) -> Decision:
        """Park at the next step boundary."""
        return fallback.make_way(view)

    def on_warning(self, view: ClusterView) -> Decision:
        """Move to a ready process where that is cheaper than the loss to be expected; else start
        one for them, and save a checkpoint where that is cheaper than the steps to be redone.
        """
        if away := self._away(view):
            return away
        who, loss, weighed, text = self._warning(view)
        lacks = len(view.warned) - len(view.refuge) - len(view.starting)
        spawns = () if view.no_place else tuple(Spawn(role="worker") for _ in range(lacks))
        redone = _credence(view) * loss.priced.parts.get("redo", 0.0)
        saves = redone > view.world * view.costs.save_s.value
        actions: tuple[Action, ...] = (*spawns, *((Pause(save=True),) if saves else ()))
        if not actions:
            return Decision(actions=(), reason=f"{who} may fail soon: {text}")
        done = ("a process to move to is started", spawns), ("a checkpoint is saved before", saves)
        what = " and ".join(words for words, so in done if so)
        reason = f"{who} may fail soon: {what}; {text}"
        return Decision(actions=actions, reason=reason, options=weighed, chosen="stay")

    def _warning(self, view: ClusterView) -> tuple[str, Option, tuple[Priced, ...], str]:
        """Who is warned, the answer to their loss, moving and that loss as priced, and in words."""
        answers = options.to_the_loss(view, view.warned, shrinks=self.batch == "shrink")
        loss = (*self._allowed(answers), *answers)[0]
        redone = view.world * view.costs.step_with(len(view.members)) / 2
        chance = _credence(view)
        parts = {
            loss.name: chance * loss.priced.rank_s,
            "redo": chance * redone,  # on average half of the step that it interrupts
        }
        move = Priced(name="move", rank_s=options.joining(view))
        stay = Priced(name="stay", rank_s=sum(parts.values()), parts=parts)
        weighed = tuple(sorted((move, stay), key=lambda priced: priced.rank_s))
        text = (
            f"rank-s: move {move.rank_s:.3g}; stay {stay.rank_s:.3g} ({chance:.0%} of"
            f" {loss.name} {loss.priced.rank_s:.3g} and half a step)"
        )
        return ", ".join(view.warned), loss, weighed, text

    def _away(self, view: ClusterView) -> Decision | None:
        """Move warned members to ready processes. None where that cannot be, or does not pay."""
        away = fallback.move_away(view)
        if away is None:
            return None
        _, _, weighed, text = self._warning(view)
        if weighed[0].name != "move":
            return None
        return replace(away, reason=f"{away.reason}; {text}", options=weighed, chosen="move")

    def on_paused(self, view: ClusterView) -> Decision:
        """Replace whoever was noticed or may fail, or fill the world."""
        return fallback.relieve(view) or fallback.move(view) or fallback.grow(view)


def _credence(view: ClusterView) -> float:
    """How likely a warning comes true: by Laplace's rule of succession, (k + 1) / (k + 2) after k
    processes that failed as announced. One that never failed is not counted against it, as most of
    them were moved away.
    """
    warned = {old.process for old in view.history if old.cause is Cause.WARNING}
    failed = {old.process for old in view.history if old.cause not in ANNOUNCED}
    come_true = len(warned & failed)
    return (come_true + 1) / (come_true + 2)


def _tries(view: ClusterView, option: str) -> int:
    """How often this answer was given, since the last new step, to a failure of the same place and
    cause as one of the current ones.
    """
    places = {(failure.rank, failure.cause.value) for failure in view.failures}
    return sum(each.option == option and bool(each.places & places) for each in view.tried)


def _told(view: ClusterView) -> Decision | None:
    """The answer where there is only one: states that differ and no majority, a state that is not
    finite, or samples found to be the reason.
    """
    named = fallback.undecided(view) or fallback.skip(view)
    if named is not None:
        return replace(named, chosen=_BY_CAUSE.get(_cause(named), options.HERE))
    if any(failure.applied for failure in view.failures):
        return fallback.restart(view, why="a state that is not finite")
    return None


def _cause(decision: Decision) -> str:
    return next((action.cause for action in decision.actions if isinstance(action, Form)), "")


def _keeping_all(view: ClusterView) -> Decision | None:
    """The answer where nobody is lost: the same members, with a peer's state where theirs is
    doubted. None where a process is lost, or was doubted before.
    """
    refill = None if _comes_back(view) else fallback.refill(view)
    if decided := refill or fallback.rejoin_all(view):
        name = REFILL if refill else REGROUP
        stall = view.costs.form_s.value + (view.costs.copy_s.value if refill else 0.0)
        priced = Priced(name=name, rank_s=view.world * stall)
        reason = f"{decided.reason}; {name} {priced.rank_s:.3g} rank-s"
        return replace(decided, reason=reason, options=(priced,), chosen=name)
    return None


def _comes_back(view: ClusterView) -> bool:
    """Whether a process that is blamed now has been refilled before, again and again."""
    blamed = set(fallback.suspects(view))
    now = max((failure.step for failure in view.failures), default=0)
    before = [
        old.process
        for old in view.history
        if old.process in blamed
        and old.cause in (Cause.NONFINITE, Cause.DIVERGED)
        and now - old.step <= LATELY_STEPS
        and old.answer == "refill"
    ]
    return any(before.count(name) >= REFILLS for name in blamed)


def _take(option: Option, found: Sequence[Option], left: Sequence[Option]) -> Decision:
    """Carry out that option. ``found``: all of them, ``left``: those not yet tried in vain."""
    names = {each.name for each in left}
    prices = "; ".join(
        f"{each.name} {each.priced.rank_s:.3g}{'' if each.name in names else ' (tried)'}"
        for each in found
    )
    return Decision(
        actions=option.actions,
        reason=f"{option.why}; rank-s: {prices}",
        options=tuple(each.priced for each in found),
        chosen=option.name,
    )
