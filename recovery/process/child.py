"""One process as its supervisor holds it: a pidfd, a channel, and shared memory."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from trainchaos.recovery.process.last_look import kill_after
from trainchaos.recovery.process.stacks import StackReader
from trainchaos.recovery.process.starvation import Starvation
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.event_ring import LineRing
from trainchaos.recovery.transport.exit_hint import Bell
from trainchaos.recovery.transport.progress_counters import MarkPage


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
