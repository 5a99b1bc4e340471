"""Go on at once with the ranks that are left; let a replacement join later."""

from __future__ import annotations

from typing import ClassVar, Literal

from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.strategy import ClusterView, Decision, Nonfinite, Pause, Strategy


class DropReplica(Strategy):
    """Survivors keep their state, form a smaller group, redo the interrupted step; a replacement
    joins later.

    A replica of several shards leaves as a whole: what lives of it waits, and comes back with the
    replacement. ``batch``: ``constant`` keeps the global batch (survivors take over the lost
    share), ``shrink`` drops the lost share. ``rejoin``: start a replacement, which joins at a step
    boundary with a peer's state. ``nonfinite``: what to do about a non-finite loss or gradient (see
    ``recovery.policy.strategy.Nonfinite``).
    """

    exact: ClassVar[bool] = False

    batch: Literal["constant", "shrink"] = "constant"
    rejoin: bool = True
    nonfinite: Nonfinite = "retry"

    @property
    def nonfinite_policy(self) -> Nonfinite:
        return self.nonfinite

    @property
    def batch_policy(self) -> str:
        return self.batch

    def on_failure(self, view: ClusterView) -> Decision:
        """Refill, re-form or shrink, whichever loses least."""
        whole = fallback.mend(view, nonfinite=self.nonfinite)
        if whole:
            return whole
        return fallback.shrink(view, why="the lost rank is dropped")

    def on_spare_lost(self, view: ClusterView) -> Decision:
        if not self.rejoin:
            return Decision(actions=(), reason="nobody is replaced")
        return fallback.replenish(view, spares=0, role="worker")

    def on_ready(self, view: ClusterView) -> Decision:
        """Ask for a pause as soon as a replacement is ready and no other is on its way."""
        if len(fallback.with_room(view)) > len(view.members) and not view.starting:
            return Decision(actions=(Pause(),), reason="a replacement is ready")
        return Decision(
            actions=(), reason="no replica can be filled now, or more replacements are on their way"
        )

    def on_notice(self, view: ClusterView) -> Decision:
        """Park at the next step boundary."""
        return fallback.make_way(view)

    def on_paused(self, view: ClusterView) -> Decision:
        """Let go whoever was noticed, take in whoever is ready."""
        return fallback.relieve(view) or fallback.grow(view)
