"""Revocable access to the job; every call raises once the coordinator is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.launch.launcher import Report
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.supervise.supervision import Hands
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import NOTHING_OWN, Message


class CoordinatorLost(Exception):
    """The coordinator was lost, possibly in the middle of an act."""


class RevocableHands:
    """Implements ``recovery.supervise.supervision.Hands`` by delegating to ``hands`` until
    ``lost``; every call raises then.

    ``before``: called before each act with its name; tests lose the coordinator there.
    """

    def __init__(self, hands: Hands, before: Callable[[str], None] | None = None) -> None:
        self.lost = False
        self._hands = hands
        self._before = before

    def now_s(self) -> float:
        """See Hands."""
        return self._hands.now_s()

    def spawn(self, role: str, mode: str) -> str:
        """See Hands."""
        self._check("spawn")
        name = self._hands.spawn(role, mode)
        self._check()
        return name

    def expect(self, role: str, mode: str, count: int) -> None:
        """See Hands."""
        self._hands.expect(role, mode, count)

    def send(self, process: str, message: Message, own: Mapping[str, Any] = NOTHING_OWN) -> bool:
        """See Hands."""
        self._check("send")
        sent = self._hands.send(process, message, own)
        self._check()
        return sent

    def kill(self, process: str) -> None:
        """See Hands."""
        self._check("kill")
        self._hands.kill(process)
        self._check()

    def distrust(self, process: str) -> None:
        """See Hands."""
        self._check()
        self._hands.distrust(process)

    def mark(self, process: str) -> Mark:
        """See Hands."""
        return self._hands.mark(process)

    def os_state(self, process: str) -> str:
        """See Hands."""
        return self._hands.os_state(process)

    def pulse(self, process: str) -> Pulse:
        """See Hands."""
        return self._hands.pulse(process)

    def pid(self, process: str) -> int | None:
        """See Hands."""
        return self._hands.pid(process)

    def ask_stacks(self, process: str) -> None:
        """See Hands."""
        self._check()
        self._hands.ask_stacks(process)

    def stacks(self, process: str) -> tuple[str, str] | None:
        """See Hands."""
        return self._hands.stacks(process)

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> object:
        """See Hands."""
        self._check("record")
        event = self._hands.record(kind, step=step, generation=generation, **data)
        self._check()
        return event

    def _check(self, act: str | None = None) -> None:
        if act is not None and self._before is not None and not self.lost:
            self._before(act)
        if self.lost:
            raise CoordinatorLost


@dataclass(kw_only=True)
class CoordinatorAbsence:
    """A time without a coordinator, by the arm's clock. ``stage``: the job's stage when it began;
    ``held``: reports that arrived meanwhile.
    """

    since_ns: int
    until_ns: int
    stage: str
    held: list[Report] = field(default_factory=list)
