"""Swap in a process that waits, built and warm, for exactly this."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.jobconfig import MOST_SPARES, SpareSync
from trainchaos.recovery.policy.strategy import ClusterView, Decision, Nonfinite, Pause, Strategy


class HotSpare(Strategy):
    """A waiting spare takes the lost rank's place with a live peer's state.

    Same step, same world, same result bit for bit. ``spares``: processes held ready. ``replenish``:
    start a new spare for each one used. With none left replicas that cannot be filled are dropped;
    when no state is left whole either, the newest checkpoint is restored. ``nonfinite``: what to do
    about a non-finite loss or gradient (see ``recovery.policy.strategy.Nonfinite``). ``sync``: with
    ``live`` spares receive each step's reduced gradients and apply them too, so that nothing is
    copied when one is needed (each follows one part of a model that several ranks hold together);
    ``lag``: steps that may wait for a live spare. ``rehearse``: before a spare is ready it trains a
    step alone that counts for nothing, so that what is slow the first time (kernels loaded or
    compiled, workers of data started) is not waited for at its first step.
    """

    exact: ClassVar[bool] = True

    spares: int = Field(default=1, ge=1, le=MOST_SPARES)
    replenish: bool = True
    nonfinite: Nonfinite = "retry"
    sync: Literal["none", "live"] = "none"
    lag: int = Field(default=4, ge=1, le=64)
    rehearse: bool = False

    @property
    def nonfinite_policy(self) -> Nonfinite:
        return self.nonfinite

    @property
    def spares_wanted(self) -> int:
        return self.spares

    @property
    def spare_sync(self) -> SpareSync:
        return SpareSync(self.sync, self.lag, self.rehearse)

    def on_failure(self, view: ClusterView) -> Decision:
        """Refill, re-form, swap, or shrink when there are more losses than spares."""
        whole = fallback.mend(view, nonfinite=self.nonfinite)
        if whole:
            return whole
        lost, fresh = fallback.lost(view), tuple(p.name for p in view.fresh)
        form = fallback.fill(view, fresh)
        if form is None or not lost or len(form.members) < len(view.members):
            rest = "" if form is None else ", what they cannot fill is dropped"
            parts = {view.process(name).shard for name in lost}
            ready = len(fresh) + sum(spare.shard in parts for spare in view.benched)
            why = f"{len(lost)} lost, {ready} spares ready{rest}"
            return fallback.shrink(view, why=why, fresh=fresh)
        before = set(view.members)
        takers = [name for name in form.members if name not in before]
        verb = "takes" if len(takers) == 1 else "take"
        reason = f"{', '.join(takers)} {verb} over from {', '.join(lost)}"
        return Decision(actions=(form,), reason=reason)

    def on_spare_lost(self, view: ClusterView) -> Decision:
        """Start another one, so that the next failure finds its spare and the world is filled
        again.
        """
        if not self.replenish:
            return Decision(actions=(), reason="spares are not replenished")
        return fallback.replenish(view, spares=self.spares, role="spare")

    def on_ready(self, view: ClusterView) -> Decision:
        """After a shrink, let a ready process fill the world again."""
        if len(fallback.with_room(view)) > len(view.members):
            return Decision(actions=(Pause(),), reason="a process is ready to fill the world")
        if away := fallback.move_away(view):
            return away
        return Decision(actions=(), reason="kept as spare")

    def on_notice(self, view: ClusterView) -> Decision:
        """Park at the next step boundary."""
        return fallback.make_way(view)

    def on_warning(self, view: ClusterView) -> Decision:
        """Move to a spare at the next step boundary, or save a checkpoint where none is ready."""
        return fallback.move_away(view) or super().on_warning(view)

    def on_paused(self, view: ClusterView) -> Decision:
        """Replace whoever was noticed or may fail, or fill the world."""
        return fallback.relieve(view) or fallback.move(view) or fallback.grow(view)
