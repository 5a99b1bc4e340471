"""A running command: started through its guard, observed, and ended with everything it started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host import processes
from trainchaos.harness.host.processes import readable
from trainchaos.harness.script.processes import guard, tree
from trainchaos.harness.script.processes.environment import MARK

START_LIMIT_S = 20.0
END_LIMIT_S = guard.KILL_LIMIT_S + 5.0
KILL_LIMIT_S = 5.0
_MESSAGE_LIMIT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class CommandEnded:
    """How a command ended: exit code or signal, the other None."""

    exit_code: int | None
    signal: int | None

    @property
    def well(self) -> bool:
        """Whether it exited with code 0."""
        return self.exit_code == 0

    @property
    def how(self) -> str:
        """How it ended, for people."""
        return f"signal {self.signal}" if self.signal is not None else f"exit code {self.exit_code}"


class Command:
    """One start of a command. Use ``start``; always ``close``. ``lost``: its guard was killed, and
    the command with it.
    """

    def __init__(self, holder: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._holder = holder
        self._control = control
        self._buffer = b""
        self._since = processes.start_time(holder.pid)
        self.pid = 0
        self.error = ""
        self.ended: CommandEnded | None = None
        self.killed = 0
        self.left: int | None = None
        self.lost = False

    @classmethod
    def start(
        cls, argv: Sequence[str], *, directory: Path, env: Mapping[str, str], output: Path
    ) -> Command:
        """Start it with standard output and error appended to ``output``.

        ``error`` of the result says why it could not be started. Raises InfrastructureError if the
        guard could not be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with open(output, "ab") as stream:
                fds = [str(theirs.fileno()), str(stream.fileno())]
                holder = subprocess.Popen(
                    [sys.executable, "-E", "-s", "-S", guard.__file__, *fds, *argv],
                    cwd=directory,
                    env=dict(env),
                    pass_fds=[theirs.fileno(), stream.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                )
        except OSError as error:
            ours.close()
            raise InfrastructureError(
                f"cannot start Python in {directory}: {error.strerror}",
                hint="free memory or processes",
            ) from error
        finally:
            theirs.close()
        command = cls(holder, ours)
        command._await_start()
        return command

    @property
    def guard_pid(self) -> int:
        """The process that all the command's processes descend from."""
        return self._holder.pid

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._control.fileno()

    def look(self) -> None:
        """Process the guard's messages, without waiting."""
        while self.left is None and readable(self._control.fileno()):
            try:
                data = self._control.recv(_MESSAGE_LIMIT)
            except OSError:
                data = b""
            if not data:
                self._guard_gone()
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def terminate(self) -> None:
        """SIGTERM to the command's process group, as a cluster scheduler ends a job."""
        self._tell(b"t")

    def close(self, mark: str) -> int:
        """Kill and reap everything left of it; returns how many processes could not be killed.

        ``mark``: in its environment, to find processes that escaped a guard that was itself killed.
        """
        self._tell(b"k")
        deadline = time.monotonic() + END_LIMIT_S
        while self.left is None and time.monotonic() < deadline:
            self._await_news(deadline - time.monotonic())
            self.look()
        if self._holder.poll() is None and self.left is None:
            self._holder.kill()
        self._holder.wait(timeout=END_LIMIT_S)
        self._control.close()
        return len(self._end_marked(mark))

    def _end_marked(self, mark: str) -> list[int]:
        """Kill processes that still have the mark; returns those that stay."""
        entry = f"{MARK}={mark}"
        found = [
            row for row in processes.since(self._since) if processes.environment_has(row[0], entry)
        ]
        return [
            pid
            for pid, start in found
            if processes.end(pid, start, limit_s=KILL_LIMIT_S) in ("stays", "refused")
        ]

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self.pid and not self.error and time.monotonic() < deadline:
            self._await_news(deadline - time.monotonic())
            self.look()
        if not self.pid and not self.error:
            self._holder.kill()
            self._holder.wait(timeout=END_LIMIT_S)
            raise InfrastructureError(
                "the guard of the command did not start", hint="free memory or processes"
            )

    def _await_news(self, limit_s: float) -> None:
        self._control.settimeout(max(0.01, limit_s))
        try:
            self._control.recv(1, socket.MSG_PEEK)
        except OSError:
            pass

    def _take(self, message: Mapping[str, object]) -> None:
        if "started" in message:
            self.pid = int(str(message["started"]))
        elif "error" in message:
            self.error, self.left = str(message["error"]), 0
        elif "ended" in message:
            self.ended = CommandEnded(
                **dict(
                    zip(("exit_code", "signal"), tree.how(int(str(message["ended"]))), strict=True)
                )
            )
        elif "left" in message:
            self.left, self.killed = int(str(message["left"])), int(str(message["killed"]))

    def _guard_gone(self) -> None:
        """Without its guard the kernel has killed the command; other processes of it may be
        alive.
        """
        self.lost = self.ended is None
        self.ended = self.ended or CommandEnded(exit_code=None, signal=9)
        self.left = 0

    def _tell(self, order: bytes) -> None:
        try:
            self._control.sendall(order)
        except OSError:  # it is gone, with everything it held
            pass
