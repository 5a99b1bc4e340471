"""Records the arm's keepers of in-memory checkpoints in its event log and its undo ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.launch.launcher import Exited, KeeperStarted
from trainchaos.recovery.checkpoint.memory import ROLE

if TYPE_CHECKING:
    from trainchaos.harness.arm.fault_context import Scene
    from trainchaos.harness.launch.launcher import Cluster


class KeeperTracker:
    """Records starts and ends of keepers; does nothing in an arm without keepers."""

    def __init__(self, scene: Scene, cluster: Cluster) -> None:
        self._scene = scene
        self._cluster = cluster
        self._keepers = cluster.keepers
        self._living: dict[str, int] = {}  # process -> pid
        self._records: dict[str, str] = {}

    def look(self) -> None:
        """Record starts and ends since the last call."""
        for news in self._keepers.look() if self._keepers is not None else ():
            self._note(news)

    def on(self, node: int) -> list[str]:
        """The living keeper of a node."""
        name = self._keepers.keeper_of(node) if self._keepers is not None else None
        return [name] if name in self._living else []

    def owns(self, process: str) -> bool:
        """Whether a process is, or was, a keeper."""
        return process in self._records or process in self._living

    def signal(self, process: str, signum: int) -> None:
        """Signal a keeper, for faults."""
        if self._keepers is not None:
            self._keepers.signal(process, signum)

    def os_state(self, process: str) -> str:
        """The kernel's state of a keeper."""
        return self._keepers.os_state(process) if self._keepers is not None else "X"

    def end(self) -> None:
        """End all, and wait until they are gone."""
        self.look()
        asked_ns = self._scene.now_ns()
        for exited in self._keepers.end() if self._keepers is not None else ():
            self._note(exited, asked_ns=asked_ns)

    def _note(self, news: KeeperStarted | Exited, asked_ns: int | None = None) -> None:
        name = news.process
        if isinstance(news, KeeperStarted):
            self._living[name] = news.pid
            undo = self._cluster.undo(name, news.pid)
            arm = self._scene.setup.id
            self._records[name] = (
                self._scene.ledger.will(undo, arm=arm, process=name) if undo is not None else ""
            )
            self._scene.record(
                Kind.PROCESS_SPAWNED,
                process=name,
                pid=news.pid,
                role=ROLE,
                mode="warm",
                node=news.node,
            )
            return
        pid = self._living.pop(name)
        hung_s = self._keepers.hung_s(name) if self._keepers is not None else None
        more: dict[str, Any] = {} if hung_s is None else {"hung_s": hung_s}
        if self._records[name]:
            self._scene.ledger.undone(self._records[name], f"{name} has ended")
        self._scene.record(
            Kind.PROCESS_EXITED,
            process=name,
            pid=pid,
            exit_code=news.exit_code,
            signal=news.signal,
            expected=asked_ns is not None,
            last_seq=None,
            asked_ns=asked_ns,
            role=ROLE,
            **more,
        )
