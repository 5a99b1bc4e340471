"""Carries a strategy's decisions out, action by action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chaos.events.log import Kind
from recovery.policy.strategy import Decision, Form, GiveUp, Kill, Pause, Spawn, describe
from recovery.supervise.process_table import Crew
from recovery.supervise.supervision import Hands


class Stages(Protocol):
    """Whose stage an action may change: the controller."""

    def take(self, form: Form, new: Sequence[str]) -> None:
        """Form this next, as soon as all its members are ready; ``new``: who stands behind
        ``new-0``, ``new-1`` ...
        """

    def pause(self, *, save: bool) -> None:
        """Have the generation park at the next step boundary."""

    def stop(self, outcome: str, reason: str) -> None:
        """End the job."""


def carry_out(decision: Decision, stages: Stages, crew: Crew, hands: Hands) -> None:
    """Write the decision down, if there is anything to do, and do it."""
    if not decision.actions:
        return
    hands.record(
        Kind.DECISION,
        actions=[describe(action) for action in decision.actions],
        reason=decision.reason,
    )
    new: list[str] = []
    form: Form | None = None
    for action in decision.actions:
        match action:
            case Kill():
                crew.kill(crew[action.process])
            case Spawn():
                new.append(crew.spawn(action.role, action.mode))
            case Pause():
                stages.pause(save=action.save)
            case Form():
                form = action
                if not any(name.startswith("new-") for name in form.members):
                    # Nobody to wait for: the group forms before replacements cost any time.
                    stages.take(form, new)
                    form = None
            case GiveUp():
                stages.stop("gave-up", decision.reason)
                return
    if form is not None:
        stages.take(form, new)
