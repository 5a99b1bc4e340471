"""No recovery: the job ends at the first failure."""

from __future__ import annotations

from typing import ClassVar

from trainchaos.recovery.policy.strategy import ClusterView, Decision, GiveUp, Strategy


class NoRecovery(Strategy):
    """Give up at the first failure: what a plain training script does."""

    replaces: ClassVar[bool] = False

    def on_failure(self, view: ClusterView) -> Decision:
        return Decision(actions=(GiveUp(),), reason="no recovery strategy")

    def on_warning(self, view: ClusterView) -> Decision:
        return Decision(actions=(), reason="no recovery strategy")
