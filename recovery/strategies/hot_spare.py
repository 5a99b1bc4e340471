"""Swap in a process that waits, built and warm, for exactly this."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from recovery import fallback
from recovery.strategy import ClusterView, Decision, Form, Pause, Spawn, StateFrom, Strategy


class HotSpare(Strategy):
    """A waiting spare takes the lost rank's place with a live peer's state.

    Same step, same world, same result bit for bit. ``spares``: processes held ready. ``replenish``: start a
    new spare for each one used. With none left the world shrinks.
    """

    exact: ClassVar[bool] = True

    spares: int = Field(default=1, ge=1, le=64)
    replenish: bool = True

    @property
    def spares_wanted(self) -> int:
        """As many as configured."""
        return self.spares

    def on_failure(self, view: ClusterView) -> Decision:
        """Refill, re-form, swap, or shrink when there are more losses than spares."""
        whole = fallback.skip(view) or fallback.refill(view) or fallback.rejoin_all(view)
        if whole:
            return whole
        lost = fallback.lost(view)
        spares = [p.name for p in view.ready][: len(lost)]
        if not lost or not fallback.kept(view) or len(spares) < len(lost):
            why = f"{len(lost)} lost, {len(spares)} spares ready"
            return fallback.shrink(view, refill_world=self.replenish, why=why)
        place = dict(zip(lost, spares, strict=True))
        form = Form(members=tuple(place.get(name, name) for name in view.members), state=StateFrom.PEER)
        missing = (
            view.world + self.spares - len(view.members) - len(view.starting) - len(view.ready) + len(spares)
        )
        again = tuple(Spawn(role="spare") for _ in range(missing)) if self.replenish else ()
        verb = "takes" if len(lost) == 1 else "take"
        reason = f"{', '.join(spares)} {verb} over from {', '.join(lost)}"
        return Decision(actions=(form, *again), reason=reason)

    def on_spare_lost(self, view: ClusterView) -> Decision:
        """Start another one, so that the next failure finds its spare and the world is filled again."""
        if not self.replenish:
            return Decision(actions=(), reason="spares are not replenished")
        return fallback.replenish(view, spares=self.spares, role="spare")

    def on_ready(self, view: ClusterView) -> Decision:
        """After a shrink, let a ready process fill the world again."""
        if len(view.members) < view.world and view.ready:
            return Decision(actions=(Pause(),), reason="a process is ready to fill the world")
        return Decision(actions=(), reason="kept as spare")

    def on_notice(self, view: ClusterView) -> Decision:
        """Park at the next step boundary."""
        return fallback.make_way(view)

    def on_paused(self, view: ClusterView) -> Decision:
        """Replace whoever was noticed, or fill the world."""
        return fallback.relieve(view) or fallback.grow(view)
