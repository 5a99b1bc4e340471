"""One process as its supervisor holds it: a pidfd, a channel, and shared memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainchaos.recovery.process.stacks import StackReader
from trainchaos.recovery.process.starvation import Starvation
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.event_ring import LineRing
from trainchaos.recovery.transport.exit_hint import Bell
from trainchaos.recovery.transport.progress_counters import MarkPage

LOOK_LIMIT_S = 0.3
"""For a look at a process that is to be killed; it took 0.07 to 0.12 s on a loaded machine
(``recovery.process.outside_stacks``).
"""
LOOK_EVERY_S = 0.005
"""Between two questions whether it is still stopped."""


class ChildProcess:
    """``log``: its event log, completed when it dies; ``gone``: its exit is known; ``watch``: the
    thread that waits for its bell, once there is one.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        channel: Channel,
        page: MarkPage,
        *,
        ring: LineRing,
        bell: Bell,
        log: Path | None,
    ) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.channel: Channel | None = channel
        self.page = page
        self.ring = ring
        self.bell = bell
        self.log = log
        self.gone = False
        self.starvation = Starvation()
        self.stacks = StackReader(pid)
        self.watch: threading.Thread | None = None
        self._last_look: threading.Thread | None = None

    def signal(self, signum: int) -> None:
        """Signal it through the pidfd; one that has exited is no error, nor is one that would not
        answer ``STACK_SIGNAL``. SIGKILL comes a moment later to one that is stopped and being
        looked at.
        """
        if signum == signal.SIGKILL and self.stacks.looks:
            if self._last_look is None:
                self._last_look = kill_after(self.pidfd, lambda: self.stacks.looks)
        elif self.stacks.before(signum):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def let_go(self) -> None:
        """Release everything held for it. Its watch, if there is one, closes the bell when it
        ends.
        """
        self.stacks.close()
        self.page.close()
        self.ring.close()
        if self.watch is None:
            self.bell.close()
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        os.close(self.pidfd)


def kill_after(
    pidfd: int,
    looks: Callable[[], bool],
    *,
    now_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> threading.Thread:
    """Kill a process as soon as ``looks`` is not true any more, or LOOK_LIMIT_S is over, on a
    thread that is returned: it is read from outside meanwhile, and counts as dead already.
    ``pidfd``: of the process; a copy is held.
    """
    held = os.dup(pidfd)

    def kill() -> None:
        until_s = now_s() + LOOK_LIMIT_S
        while looks() and now_s() < until_s:
            pause(LOOK_EVERY_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(held, signal.SIGKILL)
        os.close(held)

    thread = threading.Thread(target=kill, name="last look", daemon=True)
    thread.start()
    return thread
