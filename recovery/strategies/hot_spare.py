"""Swap in a process that waits, built and warm, for exactly this."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from recovery import fallback
from recovery.strategy import ClusterView, Decision, Form, Health, Pause, Spawn, StateFrom, Strategy


class HotSpare(Strategy):
    """A waiting spare takes the lost rank's place with a live peer's state; same step, same world, same result bit for bit.

    ``spares``: processes held ready. ``replenish``: start a new spare for each one used. With none left the world shrinks.
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
        whole = fallback.refill(view) or fallback.rejoin_all(view)
        if whole:
            return whole
        blamed = fallback.suspects(view)
        kept = {p.name for p in fallback.valid_survivors(view) if p.name not in blamed}
        lost = [name for name in view.members if name not in kept]
        if not kept:
            return fallback.restart(view, why="no rank holds a whole state")
        spares = [p.name for p in view.ready][: len(lost)]
        again = tuple(Spawn(role="spare") for _ in range(len(lost))) if self.replenish else ()
        if len(spares) < len(lost):
            why = f"{len(lost)} lost, {len(spares)} spares ready"
            return fallback.shrink(view, refill_world=self.replenish, why=why)
        place = dict(zip(lost, spares, strict=True))
        form = Form(members=tuple(place.get(name, name) for name in view.members), state=StateFrom.PEER)
        return Decision(actions=(form, *again), reason=f"{', '.join(spares)} takes over from {', '.join(lost)}")

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

    def on_paused(self, view: ClusterView) -> Decision:
        """Fill the world."""
        room = view.world - len(view.members)
        joining = tuple(p.name for p in view.processes if p.health is Health.READY)[:room]
        form = Form(members=(*view.members, *joining), state=StateFrom.PEER, cause="grow")
        return Decision(actions=(form,), reason=f"{', '.join(joining)} joins with a peer's state")
