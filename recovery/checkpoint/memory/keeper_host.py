"""Where keepers run: starts their processes and reports on them, on this machine or on the nodes of
a job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from trainchaos.recovery.checkpoint.memory.keeper import KeeperConfig
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.host import Report
from trainchaos.recovery.process.local import Children
from trainchaos.recovery.transport.wire import Message

Fork = Callable[[bytes, Sequence[int]], int]


class KeeperHost(Protocol):
    """Processes by name, as ``recovery.process.local.Children``, each on a node."""

    def takes(self, node: int) -> bool:
        """Whether a process can be started on a node now."""

    def address(self, node: int) -> str:
        """Address at which a keeper of that node listens for the others."""

    def start(self, process: str, config: KeeperConfig) -> int:
        """Start a keeper on the node its configuration names, which lacks ``parent`` and ``log``;
        returns its pid.

        Raises InfrastructureError, ConnectionError when its node is lost meanwhile.
        """

    def alive(self, process: str) -> bool:
        """Whether its exit has not been reported yet."""

    def send(self, process: str, message: Message) -> bool:
        """Send a message; False when the keeper has exited."""

    def signal(self, process: str, signum: int) -> None:
        """Signal a keeper; one that has exited is no error."""

    def os_state(self, process: str) -> str:
        """The process state as the kernel reports it, X when it has exited."""

    def wait(self, timeout_s: float) -> list[Report]:
        """Messages of keepers, and exits."""

    def close(self) -> dict[int, str]:
        """End all keepers; returns what could not be removed, as ``Children.close``."""


class LocalKeeperHost:
    """All nodes are this machine. ``fork``: starts a process that becomes ``be_keeper`` of a
    configuration; ``log``: directory for keepers' output, None: the supervisor's output. The caller
    must be a child subreaper.
    """

    def __init__(self, fork: Fork, *, log: Path | None) -> None:
        self._fork = fork
        self._log = log
        self._children = Children()
        self.alive = self._children.alive
        self.send = self._children.send
        self.signal = self._children.signal
        self.os_state = self._children.os_state
        self.wait = self._children.wait
        self.close = self._children.close

    def takes(self, node: int) -> bool:
        """Always."""
        return True

    def address(self, node: int) -> str:
        """The loopback address."""
        return LOOPBACK

    def start(self, process: str, config: KeeperConfig) -> int:
        """Fork it."""
        log = self._log / f"{process}.log" if self._log is not None else None
        whole = config.model_copy(update={"parent": os.getpid(), "log": log})
        return self._children.begin(
            process, lambda fds: self._fork(whole.model_dump_json().encode(), fds)
        )
