"""The present container of a node: whether it is alive, and how it ended."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.container_engine import asking
from trainchaos.recovery.process.processes import readable

SETTLING_S = 4.0  # an end this early is a failed start
NOTICED_S = 5.0  # the engine notices an end later than the pidfd does
LOOK_EVERY_S = 0.02
ENDED = ("exited", "dead", "removing")
SAID_LINES = 3


@dataclass(frozen=True, kw_only=True)
class NodeContainer:
    """``container``: a docker-py container; ``pid``: its first process on this machine, 0 if
    unknown; ``pidfd``: of that process, or -1; ``at_s``: monotonic start time; ``life``: changes
    each time the node starts anew.
    """

    container: Any
    pid: int
    pidfd: int
    at_s: float
    life: int

    @classmethod
    def of(cls, container: Any, *, life: int) -> NodeContainer:
        """The node's container, which has just been started."""
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
        """Whether it has ended, by its pidfd; the engine is queried only if there is none."""
        if self.pidfd >= 0:
            return readable(self.pidfd)
        try:
            with asking("say whether it runs"):
                self.container.reload()
        except InfrastructureError:
            return False  # the engine is unreachable; its containers may well be alive
        return self.container.status in ENDED

    @property
    def live_pid(self) -> int:
        """Pid of its first process on this machine; 0 if unknown or if it has ended."""
        return 0 if self.ended else self.pid

    def why_ended(self) -> str:
        """Why it ended, for people. An early end is a failed start: then the agent's last output is
        worth the time to query the engine.
        """
        if time.monotonic() - self.at_s < SETTLING_S:
            return f"its container ended at once: {self.last_words()}"
        return "its container ended"

    def last_words(self) -> str:
        """How it ended and its last output, once it has ended."""
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
        killed = ", killed by the OOM killer" if state["OOMKilled"] else ""
        words = " / ".join(line.strip() for line in said if line.strip())
        return f"exit code {state['ExitCode']}{killed}" + (f", it said: {words}" if words else "")

    def keep_output(self, node: int, place: Path) -> None:
        """Save the agent's output before its container is removed, if the engine still has it.
        ``place``: directory for it.
        """
        with contextlib.suppress(InfrastructureError, OSError), asking("say what it printed"):
            said = self.container.logs()
            if said:
                place.mkdir(exist_ok=True)
                (place / f"n{node}.{self.life}.log").write_bytes(said)

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd >= 0:
            os.close(self.pidfd)


def remove(container: Any) -> None:
    """Kill and remove a container; no error if it is already gone."""
    from docker.errors import NotFound

    with contextlib.suppress(NotFound):
        container.remove(force=True, v=True)


def _hold(pid: int, container: str) -> int:
    """A pidfd of a container's first process; -1 if the engine's pids do not apply here."""
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
