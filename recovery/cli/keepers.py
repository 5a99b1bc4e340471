"""Starts the keeper of a supervised job's checkpoints in memory, and logs its starts and exits."""

from __future__ import annotations

import os
from typing import Any, Protocol

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.memory import ROLE
from trainchaos.recovery.checkpoint.memory.keepers import Keepers, KeeperStarted, LocalKeeperHost
from trainchaos.recovery.cli.job_spec import JobSpec
from trainchaos.recovery.cli.process_host import LocalProcessHost
from trainchaos.recovery.policy.jobconfig import InMemory
from trainchaos.recovery.process.local import Exited
from trainchaos.recovery.process.logroom import LogRoom


class WriteSupervisorEvent(Protocol):
    """Writes an event of the supervisor."""

    def __call__(self, kind: Kind, /, **data: Any) -> object:
        """Write it."""


class JobKeepers:
    """The keeper of this machine; without effect before ``start``, and where the job has none."""

    def __init__(self, spec: JobSpec, log_room: LogRoom, write: WriteSupervisorEvent) -> None:
        self._spec = spec
        self._log_room = log_room
        self._write = write
        self._keepers: Keepers | None = None
        self._job = f"{spec.script.name}-{os.getpid()}"

    def start(self, host: LocalProcessHost) -> None:
        """Start a keeper. Raises InfrastructureError."""
        self._keepers = Keepers(
            LocalKeeperHost(host.fork, log=host.logs),
            job=self._job,
            nodes=1,
            limit_bytes=self._spec.memory_bytes,
            replicate=False,
        )

    @property
    def names(self) -> list[str]:
        """Name of the living keeper."""
        return [self._keepers.keeper_of(0)] if self._keepers is not None else []

    @property
    def memory(self) -> InMemory | None:
        """How ranks reach it."""
        if self._keepers is None:
            return None
        return InMemory(
            socket=self._keepers.socket_of(0), job=self._job, every=self._spec.memory_every
        )

    def look(self) -> None:
        """Log starts and exits since the last call."""
        for news in self._keepers.look() if self._keepers is not None else ():
            self._note(news)

    def end(self) -> dict[int, str]:
        """End the keeper, and log that; returns what could not be removed: pid -> name."""
        if self._keepers is None:
            return {}
        for news in self._keepers.end():
            self._note(news, expected=True)
        return self._keepers.close()

    def _note(self, news: KeeperStarted | Exited, *, expected: bool = False) -> None:
        if isinstance(news, KeeperStarted):
            self._log_room.begins(news.process)
            self._write(
                Kind.PROCESS_SPAWNED,
                process=news.process,
                pid=news.pid,
                role=ROLE,
                mode="warm",
                node=0,
            )
            return
        assert self._keepers is not None
        hung_s = self._keepers.hung_s(news.process)
        more: dict[str, Any] = {} if hung_s is None else {"hung_s": hung_s}
        self._write(
            Kind.PROCESS_EXITED,
            process=news.process,
            pid=self._keepers.pid_of(news.process),
            exit_code=news.exit_code,
            signal=news.signal,
            expected=expected,
            last_seq=None,
            role=ROLE,
            **more,
        )
