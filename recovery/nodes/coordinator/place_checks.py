"""Whether places of nodes are fit, asked of their agents; implements
``recovery.health.checks.Checker``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trainchaos.recovery.health.checks import LIMIT_S, Answer, Spot
from trainchaos.recovery.nodes.coordinator.node_state import (
    FleetReport,
    NodeChecked,
    NodeGone,
    NodeLost,
)

SLACK_S = 30.0
"""For an agent to say what it found, beside what its checks may take: its connection may have to be
made again.
"""


class NodeChecks:
    """``ask``: has the agent of a node check a device (``Fleet.check``). Whoever reads the reports
    of the fleet passes each on to ``hear``.
    """

    def __init__(
        self, ask: Callable[[int, str], None], *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._now_s = ask, now_s
        self._until_s: dict[Spot, float] = {}  # by when each must be answered
        self._answers: list[Answer] = []

    def begin(self, spot: Spot) -> None:
        """See ``Checker``. An agent checks its places one after the other."""
        node, device = spot
        waiting = [until_s for other, until_s in self._until_s.items() if other[0] == node]
        begins_s = max([self._now_s() + SLACK_S, *waiting])
        self._until_s[spot] = begins_s + LIMIT_S
        try:
            self._ask(node, _torch_name(device))
        except NodeGone as error:
            self._answer(spot, None, error.why)

    def hear(self, report: FleetReport) -> None:
        """Something happened; most of it is no answer. An agent that is lost answers nothing, nor
        does the next one for it. That an agent joined may be heard after it was asked, by a
        coordinator that takes over.
        """
        match report:
            case NodeChecked(node=node, device=device, fit=fit, said=said):
                for spot in self._asked(node):
                    if _torch_name(spot[1]) == device:
                        self._answer(spot, fit, said)
            case NodeLost(node=node):
                for spot in self._asked(node):
                    self._answer(spot, None, "its agent has gone")

    def take(self) -> Sequence[Answer]:
        now_s = self._now_s()
        for spot in [spot for spot, until_s in self._until_s.items() if now_s > until_s]:
            self._answer(spot, None, "its agent did not answer")
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """See ``Checker``. Agents end what they do for an arm with the arm."""
        self._until_s, self._answers = {}, []

    def _asked(self, node: int) -> list[Spot]:
        return [spot for spot in self._until_s if spot[0] == node]

    def _answer(self, spot: Spot, fit: bool | None, said: str) -> None:
        del self._until_s[spot]
        self._answers.append(Answer(spot, fit, said))


def _torch_name(device: str) -> str:
    """``cuda:3@n1`` is ``cuda:3`` on its node."""
    return device.partition("@")[0]
