"""Nodes emulated by agents on this machine, each with its own loopback address; implements
``Platform``.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.processes import with_descendants
from trainchaos.harness.launch.nodes.platform import FewActs, Platform, PlatformNeeds
from trainchaos.harness.undo.records import KillProcess
from trainchaos.recovery.nodes.coordinator.loss import TakenAway
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.processes import readable, start_time, state

END_LIMIT_S = 5.0
BYE_LIMIT_S = 3.0
SAID_BYTES = 300


@dataclass(frozen=True, kw_only=True)
class NodeAgentProcess:
    """One agent process of a node."""

    process: subprocess.Popen[bytes]
    pidfd: int
    started: int

    @property
    def ended(self) -> bool:
        """Whether it has exited; the pidfd shows that before the process is reaped."""
        return readable(self.pidfd)


class LoopbackPlatform(Platform):
    """Agents of one run. They end when the run ends them, or when their lease expires after the run
    is gone.
    """

    emulates = (
        "nodes are agents of one machine, which share its processors, memory, disk, clock and"
        " network"
    )
    host = LOOPBACK

    def __init__(self, wanted: PlatformNeeds) -> None:
        self._wanted = wanted
        self._logs = wanted.run.root / "nodes"
        self._lives: dict[int, NodeAgentProcess] = {}
        self._lock = threading.Lock()  # a lost node starts anew on a separate thread
        self.machines = Machines(self)

    def address(self, node: int) -> str:
        """An address above the host's, so that ranks connect to the link proxy and not the other
        way round.
        """
        return f"127.2.{node // 250}.{node % 250 + 1}"

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the node's agent."""
        try:
            self._logs.mkdir(exist_ok=True)
            with (self._logs / f"n{node}.log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
        except OSError as error:
            raise InfrastructureError(
                f"cannot start the agent of node {node}: {error.strerror}",
                hint="free memory or processes",
            ) from error
        self._wanted.will(KillProcess.of(process.pid, f"agent of node {node}"))
        life = NodeAgentProcess(
            process=process, pidfd=os.pidfd_open(process.pid), started=start_time(process.pid)
        )
        with self._lock:
            before = self._lives.get(node)
            self._lives[node] = life
        if before is not None:
            _reap(before)

    def gone(self, node: int) -> str | None:
        """Whether its agent has exited; includes its last output if it exited with an error
        code.
        """
        with self._lock:
            life = self._lives.get(node)
        if life is None or not life.ended:
            return None
        code = life.process.poll()
        if code is not None and code > 0:
            return f"its agent ended with exit code {code}: {self._last_words(node)}"
        words = "its agent has ended"
        return TakenAway(words) if code is not None and code < 0 else words

    def close(self) -> Sequence[str]:
        """End the agents that have not exited by themselves."""
        until_s = time.monotonic() + BYE_LIMIT_S
        with self._lock:
            lives, self._lives = self._lives, {}
        for life in lives.values():
            with suppress(subprocess.TimeoutExpired):
                life.process.wait(timeout=max(0.0, until_s - time.monotonic()))
        return [
            f"the agent of node {node} stays" for node, life in lives.items() if not _reap(life)
        ]

    def life(self, node: int) -> NodeAgentProcess:
        """The node's present agent. Raises ProcessLookupError."""
        with self._lock:
            if node not in self._lives:
                raise ProcessLookupError(errno.ESRCH, f"node {node} was never started")
            return self._lives[node]

    def _last_words(self, node: int) -> str:
        with suppress(OSError):
            text = (self._logs / f"n{node}.log").read_text(errors="replace")[-SAID_BYTES:]
            return " · ".join(text.strip().splitlines()[-2:])
        return "no output"


class Machines(FewActs):
    """Implements ``harness.launch.launcher.MachineControl`` as far as a process can emulate a
    machine.
    """

    can_pause = True
    who = "an agent of this machine, which stands for the node,"

    def __init__(self, platform: LoopbackPlatform) -> None:
        self._platform = platform

    def kill(self, node: int) -> Mapping[str, Any]:
        """Kill its agent; the kernel then kills the node's processes, by their parent-death
        signal.
        """
        life = self._platform.life(node)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(life.pidfd, signal.SIGKILL)
        return {"pid": life.process.pid, "signal": "SIGKILL"}

    def pause(self, node: int) -> None:
        """Stop the agent and all its descendants."""
        self._signal_all(node, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Continue the agent and all its descendants."""
        self._signal_all(node, signal.SIGCONT)

    def seen(self, node: int) -> Mapping[str, Any]:
        """The kernel's state of the agent."""
        life = self._platform.life(node)
        if life.ended:
            code = life.process.poll()
            signum = -code if code is not None and code < 0 else None
            return {
                "state": "exited",
                "exit_code": code if signum is None else None,
                "signal": signum,
            }
        return {"state": "paused" if state(life.process.pid) in "Tt" else "running"}

    def _signal_all(self, node: int, signum: int) -> None:
        life = self._platform.life(node)
        for pid, started in with_descendants([(life.process.pid, life.started)]):
            with suppress(OSError):
                fd = os.pidfd_open(pid)
                try:
                    if start_time(pid) == started:
                        signal.pidfd_send_signal(fd, signum)
                finally:
                    os.close(fd)


def _reap(life: NodeAgentProcess) -> bool:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(life.pidfd, signal.SIGKILL)
    try:
        life.process.wait(timeout=END_LIMIT_S)
    except subprocess.TimeoutExpired:
        return False
    os.close(life.pidfd)
    return True
