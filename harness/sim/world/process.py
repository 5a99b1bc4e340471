"""A simulated process: a body that sleeps and waits, signals that stop and kill it, and its
progress mark.

The body is a generator. It yields nanoseconds to sleep, or None to wait until it is woken. A waker
must hold the process's ``ticket`` of that wait, which becomes void as soon as the body continues
for another reason.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from trainchaos.harness.sim.world.clock import Clock
from trainchaos.recovery.transport.progress_counters import SIZE, MarkPage

Body = Generator[float | None, Any, int]


class SimMark(MarkPage):
    """A progress mark on a simulated clock, in ``memory``."""

    def __init__(self, clock: Clock, memory: bytearray) -> None:
        self._begin(memory, lambda: clock.now_ns)


class Killed(BaseException):
    """The body kills its own process with a signal. Not an Exception, so that nothing in the body
    can catch it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Process:
    """One process. ``on_message`` handles its messages, ``on_end`` is called once it stops
    executing, ``on_term`` handles SIGTERM; ``mark``: as it notes its progress, ``seen``: as its
    supervisor sees it.
    """

    def __init__(self, *, name: str, role: str, pid: int, clock: Clock, seed: str) -> None:
        self.name = name
        self.role = role
        self.pid = pid
        self.clock = clock
        self.rng = random.Random(seed)
        page = bytearray(SIZE)
        self.mark, self.seen = SimMark(clock, page), SimMark(clock, page)
        self.ticket = 0
        self.running = True  # executing, or only stopped
        self.stopped = self.frozen = False
        self.reaped = False
        self.on_message: Callable[[Any], None] = lambda _: None
        self.on_term: Callable[[], None] = lambda: None
        self.on_end: Callable[[int | None, int | None], None] = lambda code, signum: None
        self._body: Body | None = None
        self._deferred: list[Callable[[], None]] = []
        self._last_delivery_ns = 0

    def start(self, body: Body) -> None:
        """Start to execute, a moment from now."""
        self._body = body
        self.clock.after(0, partial(self.wake, self.ticket))

    # ---- called from outside

    def deliver(self, message: Any, latency_ns: float) -> bool:
        """Send a message, which arrives after those sent before; False if the process is gone."""
        if not self.running:
            return False
        self._last_delivery_ns = max(self._last_delivery_ns, self.clock.now_ns + int(latency_ns))
        arrive = partial(self._when_executing, partial(self._take, message))
        self.clock.after(self._last_delivery_ns - self.clock.now_ns, arrive)
        return True

    def signal(self, signum: int) -> None:
        """SIGSTOP, SIGCONT, SIGKILL, and SIGTERM, which it handles; no effect on a process that is
        gone.
        """
        if not self.running:
            return
        if signum == signal.SIGKILL:
            self._end(None, signum)
        elif signum == signal.SIGSTOP:
            self.stopped = True
        elif signum == signal.SIGTERM:
            self._when_executing(self.on_term)
        elif signum == signal.SIGCONT and self.stopped:
            self.stopped = False
            self._go_on()

    def freeze(self, ns: float) -> None:
        """Execute nothing for ``ns``, without being stopped in the kernel's sense."""
        self.frozen = True
        self.clock.after(ns, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        if not self.stopped:
            self._go_on()

    def _go_on(self) -> None:
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.clock.after(0, partial(self._when_executing, action))

    @property
    def state(self) -> str:
        """The kernel's state letter: S, T, Z (dead, not reaped) or X."""
        if self.reaped:
            return "X"
        if not self.running:
            return "Z"
        return "T" if self.stopped else "S"

    # ---- waking

    def wake(self, ticket: int, value: Any = None) -> None:
        """End the wait of this ticket."""
        self._when_executing(partial(self._resume, ticket, value, None))

    def fail(self, ticket: int, error: Exception) -> None:
        """End the wait of this ticket with an error."""
        self._when_executing(partial(self._resume, ticket, None, error))

    def _take(self, message: Any) -> None:
        self.on_message(message)

    def _when_executing(self, action: Callable[[], None]) -> None:
        """Run the action now, or once the process continues; never if it is dead."""
        if not self.running:
            return
        if self.stopped or self.frozen:
            self._deferred.append(action)
        else:
            action()

    def _resume(self, ticket: int, value: Any, error: Exception | None) -> None:
        body = self._body
        if ticket != self.ticket or body is None:
            return
        self.ticket += 1
        try:
            wanted = body.throw(error) if error is not None else body.send(value)
        except StopIteration as stop:
            self._end(int(stop.value), None)
            return
        except Killed as killed:
            self._end(None, killed.signum)
            return
        if wanted is not None:
            self.clock.after(wanted, partial(self.wake, self.ticket))

    def _end(self, exit_code: int | None, signum: int | None) -> None:
        self.running = False
        self._deferred = []
        if self._body is not None:
            self._body.close()
        self.on_end(exit_code, signum)
