"""Start all ranks anew from the newest checkpoint that verifies."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.strategy import (
    Cause,
    ClusterView,
    Decision,
    Form,
    GiveUp,
    Health,
    Kill,
    Pause,
    Spawn,
    StateFrom,
    Strategy,
)


class CheckpointRestart(Strategy):
    """Kill every rank, start new ones, restore the newest checkpoint that verifies, redo the steps
    since.

    Non-finite values and states that differ are answered by the same rollback.

    ``restart``: ``warm`` forks ranks from a process that has imported everything, ``cold`` starts
    Python.
    """

    exact: ClassVar[bool] = True
    keeps_survivors: ClassVar[bool] = False

    restart: Literal["warm", "cold"] = "warm"

    @property
    def start_mode(self) -> str:
        """Processes start as they restart, so that both cost the same."""
        return self.restart

    def on_failure(self, view: ClusterView) -> Decision:
        """Restart everything; the failed generation's processes are of no more use."""
        doubt = fallback.undecided(view)
        if doubt is not None and not view.saved:
            return doubt  # it gives up
        if not view.saved and any(f.cause is Cause.DIVERGED for f in view.failures):
            # Whether a checkpoint with the difference in it was saved by now is a race.
            return Decision(actions=(GiveUp(),), reason=fallback.NEVER_AGREED)
        kills = tuple(Kill(process=p.name) for p in view.processes if p.health is not Health.DEAD)
        spawns = tuple(Spawn(role="worker", mode=self.restart) for _ in range(view.world))
        form = Form(
            members=tuple(f"new-{i}" for i in range(view.world)), state=StateFrom.CHECKPOINT
        )
        reason = f"{self.restart} restart: {fallback.origin(view)}"
        traced = fallback.skip(view)
        if traced is not None:
            if not isinstance(traced.actions[0], Form):
                return traced  # too many: it gives up
            form = replace(form, skip=traced.actions[0].skip, skip_from=traced.actions[0].skip_from)
            reason = f"{traced.reason}; {reason}"
        return Decision(actions=(*kills, *spawns, form), reason=reason)

    def on_notice(self, view: ClusterView) -> Decision:
        """Save a checkpoint at the next step boundary, and park there."""
        reason = f"{', '.join(view.leaving)} will be ended soon: a checkpoint now loses no step"
        return Decision(actions=(Pause(save=True),), reason=reason)

    def on_paused(self, view: ClusterView) -> Decision:
        """Restart from the checkpoint just saved."""
        return self.on_failure(view) if view.leaving else super().on_paused(view)
