"""Logs the starts and ends of the keepers of a job's checkpoints in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.memory import ROLE
from trainchaos.recovery.checkpoint.memory.keepers import KeeperStarted
from trainchaos.recovery.process.host import Exited, RecordEvent


class KeeperControl(Protocol):
    """The keepers of a job, one a node (``recovery.checkpoint.memory.keepers``)."""

    def look(self) -> Sequence[KeeperStarted | Exited]:
        """Starts and exits since the last look; every keeper that exited has a successor."""

    def keeper_of(self, node: int) -> str:
        """Name of the node's current keeper process."""

    def hung_s(self, process: str) -> float | None:
        """Seconds without an answer, of a keeper that was ended for that."""

    def signal(self, process: str, signum: int) -> None:
        """Signal a keeper; no error if it is already gone."""

    def os_state(self, process: str) -> str:
        """Kernel state of a keeper, as for a rank."""

    def end(self) -> Sequence[Exited]:
        """Kill all keepers and wait for their exits."""


class KeeperLog:
    """``keepers``: None in a job without them; ``starts`` and ``ended`` are called with the name
    (and pid) of a keeper before its start or end is recorded.
    """

    def __init__(
        self,
        keepers: KeeperControl | None,
        record: RecordEvent,
        now_ns: Callable[[], int],
        *,
        starts: Callable[[str, int], object],
        ended: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._keepers, self._record, self._now_ns = keepers, record, now_ns
        self._starts, self._ended = starts, ended
        self._living: dict[str, int] = {}
        self._known: set[str] = set()

    @property
    def names(self) -> list[str]:
        return list(self._living)

    def look(self) -> None:
        """Record starts and ends since the last call."""
        for news in self._keepers.look() if self._keepers is not None else ():
            self._note(news)

    def end(self) -> None:
        """End all, and wait until they are gone."""
        self.look()
        asked_ns = self._now_ns()
        for exited in self._keepers.end() if self._keepers is not None else ():
            self._note(exited, asked_ns=asked_ns)

    # ---- for faults

    def on(self, node: int) -> list[str]:
        """The living keeper of a node."""
        name = self._keepers.keeper_of(node) if self._keepers is not None else None
        return [name] if name in self._living else []

    def owns(self, process: str) -> bool:
        """Whether a process is, or was, a keeper."""
        return process in self._known

    def signal(self, process: str, signum: int) -> None:
        if self._keepers is not None:
            self._keepers.signal(process, signum)

    def os_state(self, process: str) -> str:
        """The kernel's state of a keeper."""
        return self._keepers.os_state(process) if self._keepers is not None else "X"

    def _note(self, news: KeeperStarted | Exited, asked_ns: int | None = None) -> None:
        name = news.process
        if isinstance(news, KeeperStarted):
            self._living[name] = news.pid
            self._known.add(name)
            self._starts(name, news.pid)
            self._record(
                Kind.PROCESS_SPAWNED,
                process=name,
                pid=news.pid,
                role=ROLE,
                mode="warm",
                node=news.node,
            )
            return
        assert self._keepers is not None
        hung_s = self._keepers.hung_s(name)
        more: dict[str, Any] = {} if hung_s is None else {"hung_s": hung_s}
        self._ended(name)
        self._record(
            Kind.PROCESS_EXITED,
            process=name,
            pid=self._living.pop(name),
            exit_code=news.exit_code,
            signal=news.signal,
            expected=asked_ns is not None,
            last_seq=None,
            asked_ns=asked_ns,
            role=ROLE,
            **more,
        )
