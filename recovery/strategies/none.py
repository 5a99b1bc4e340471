"""No recovery: the job ends at the first failure."""

from __future__ import annotations

from recovery.strategy import ClusterView, Decision, GiveUp, Strategy


class NoRecovery(Strategy):
    """Give up at the first failure: what a plain training script does."""

    def on_failure(self, view: ClusterView) -> Decision:
        """Give up."""
        return Decision(actions=(GiveUp(),), reason="no recovery strategy")
