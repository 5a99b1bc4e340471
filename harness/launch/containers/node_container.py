"""The container that a node is at present: whether it lives, and what it said when it ended."""

from __future__ import annotations

import contextlib
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.errors import InfrastructureError
from harness.host.container_engine import asking

SETTLING_S = 4.0  # an end so early is a failed start
NOTICED_S = 5.0  # the engine hears of an end later than the holder of the pidfd
LOOK_EVERY_S = 0.02
ENDED = ("exited", "dead", "removing")
SAID_LINES = 3


@dataclass(frozen=True, kw_only=True)
class NodeContainer:
    """``container``: docker-py's; ``pid``: of its first process on this machine, 0 where that
    cannot be known; ``pidfd``: held on that process, -1 then; ``at_s``: when it began, monotonic;
    ``life``: another one each time the node begins anew.
    """

    container: Any
    pid: int
    pidfd: int
    at_s: float
    life: int

    @classmethod
    def of(cls, container: Any, *, life: int) -> NodeContainer:
        """Of a container that has just been started."""
        pid = int(container.attrs["State"]["Pid"])
        pidfd = _hold(pid, str(container.id))
        return cls(
            container=container,
            pid=pid if pidfd >= 0 else 0,
            pidfd=pidfd,
            at_s=time.monotonic(),
            life=life,
        )

    @property
    def ended(self) -> bool:
        """By its pidfd; the engine is asked only where there is none."""
        if self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            with asking("say whether it runs"):
                self.container.reload()
        except InfrastructureError:
            return False  # the engine is away; its containers may well live
        return self.container.status in ENDED

    def why_ended(self) -> str:
        """For people. An agent that ends early has failed to start: what it said then matters more
        than the time to ask the engine.
        """
        if time.monotonic() - self.at_s < SETTLING_S:
            return f"its container ended at once: {self.last_words()}"
        return "its container ended"

    def last_words(self) -> str:
        """How it ended and what it said last, once it has ended."""
        deadline = time.monotonic() + NOTICED_S
        try:
            with asking("say how it ended"):
                self.container.reload()
                while self.container.status not in ENDED and time.monotonic() < deadline:
                    time.sleep(LOOK_EVERY_S)
                    self.container.reload()
                state = self.container.attrs["State"]
                said = self.container.logs(tail=SAID_LINES).decode(errors="replace").split("\n")
        except InfrastructureError as error:
            return error.message
        killed = ", killed for want of memory" if state["OOMKilled"] else ""
        words = " / ".join(line.strip() for line in said if line.strip())
        return f"exit code {state['ExitCode']}{killed}" + (f", it said: {words}" if words else "")

    def keep_output(self, node: int, place: Path) -> None:
        """What the agent printed outlives its container, as far as the engine still tells.
        ``place``: directory for it.
        """
        with contextlib.suppress(InfrastructureError, OSError), asking("say what it printed"):
            said = self.container.logs()
            if said:
                place.mkdir(exist_ok=True)
                (place / f"n{node}.{self.life}.log").write_bytes(said)

    def close(self) -> None:
        """Let go of the pidfd."""
        if self.pidfd >= 0:
            os.close(self.pidfd)


def remove(container: Any) -> None:
    """Kill and remove a container, unless somebody else has."""
    from docker.errors import NotFound

    with contextlib.suppress(NotFound):
        container.remove(force=True, v=True)


def _hold(pid: int, container: str) -> int:
    """A pidfd of a container's first process; -1 where pids of the engine mean something
    else here.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    try:
        if container in Path(f"/proc/{pid}/cgroup").read_text():
            return pidfd
    except OSError:
        pass
    os.close(pidfd)
    return -1
