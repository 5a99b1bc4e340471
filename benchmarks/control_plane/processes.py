"""The processes of a case: held by pidfd, sampled, and ended."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from benchmarks.control_plane.measure import ProcessSample
from trainchaos.chaos.errors import MissingCapability

SPARE_FILES = 256
"""Descriptors beside one for each agent: logs, libraries, the handshakes under way."""
END_LIMIT_S = 10.0
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Held:
    """A process that we started, in a session of its own; output goes to a file."""

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        *,
        environment: Mapping[str, str],
        passed: Sequence[int] = (),
    ) -> None:
        self.output = output
        with open(output, "ab") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=dict(environment),
                pass_fds=tuple(passed),
            )
        self.pidfd = os.pidfd_open(self._process.pid)
        self.samples: list[ProcessSample] = []

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def sample(self) -> None:
        """Note its processor time and memory, as long as it runs."""
        with suppress(OSError):
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
            self.samples.append(
                ProcessSample(at_s=monotonic(), cpu_s=cpu_s, rss=int(fields[21]) * PAGE)
            )

    def end(self, signum: int = signal.SIGKILL) -> None:
        """Send it a signal and wait for its end; kill it if that takes END_LIMIT_S."""
        for number in (signum, signal.SIGKILL):
            if self.ended:
                break
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            poll.poll(END_LIMIT_S * 1000)
        self._process.wait(END_LIMIT_S)

    def close(self) -> None:
        """End it and let go of it."""
        self.end()
        os.close(self.pidfd)

    def said(self, most: int = 2000) -> str:
        """The end of what it wrote."""
        with suppress(OSError):
            return self.output.read_text(errors="replace")[-most:]
        return ""


def allow_files(agents: int) -> None:
    """Raise the limit of open files of this process, and those that it starts, so that a connection
    for each agent fits. Raises MissingCapability where the hard limit is too low.
    """
    wanted = agents + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise MissingCapability(
                f"{agents} agents need {wanted} open files, and the hard limit is {hard}",
                hint="raise it (ulimit -Hn), or take fewer --agents",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def free_port() -> int:
    """A port of the loopback interface on which nobody listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
