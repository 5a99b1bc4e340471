"""How a rank learns that it will be ended soon: SIGTERM, as a cloud sends before it takes a machine
back.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.wire import Notice

_HELD = threading.local()  # ``mask``: the signals of the forking thread that were blocked before


def tell_on_sigterm(channel: Channel) -> None:
    """Report every SIGTERM to the supervisor from now on, instead of ending. Call it on the main
    thread, once.

    The kernel runs the C half of the handler at once, whatever the main thread does; a separate
    thread sends the message, so that a training thread deep in a computation or a collective delays
    nothing.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, _nothing)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_as_before)
    threading.Thread(
        target=_listen, args=(reader, channel), name="recovery-notice", daemon=True
    ).start()


def _listen(reader: int, channel: Channel) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGTERM in numbers:
            channel.send(Notice())


def _nothing(signum: int, frame: FrameType | None) -> None:
    """The Python half of the handler: without one the process would end."""


def _hold_back() -> None:
    """Between a fork and its hook a child has its parent's handler: a SIGTERM that comes to it by
    then would be lost on it, and be reported as the parent's. It waits instead.
    """
    _HELD.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _HELD.mask)


def _as_before() -> None:
    """A child of the rank (a data loader's worker) ends on SIGTERM, and reports nothing."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_through()
