"""What every rank's process does first and last, whatever it trains."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.output import shield
from trainchaos.recovery.process.stacks import answer_requests
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.event_ring import RingWriter
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import Failed, Notice

EXIT_ERROR = 1
MESSAGE_LENGTH = 500
_HELD = threading.local()  # ``mask``: the signals of the forking thread that were blocked before


class Birth(BaseModel):
    """Given to every rank process at its start.

    ``parent``: pid that must be its parent; ``events``: directory of the event logs; ``log``: file
    for its output, None: the supervisor's output; ``run``: id of the run that the first line of its
    log carries, if it has one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    parent: int
    events: Path
    log: Path | None
    run: str = ""


def live(
    birth: Birth,
    control_fd: int,
    mark_fd: int,
    train: Callable[[Channel, MarkPage, EventWriter], None],
) -> NoReturn:
    """Run the process: ``train``, log an error if there is one, report to the supervisor, end."""
    processes.die_with(birth.parent)
    if birth.log is not None:
        processes.redirect_output(birth.log)
    answer_requests()
    shield()  # a training script that prints must not fail because its output has no reader
    writer = RingWriter(
        birth.events, birth.name, time.monotonic_ns, progress_counters.ring_of(mark_fd)
    )
    page = MarkPage(mark_fd)
    bell = progress_counters.bell_of(mark_fd)
    bell.hold()
    channel = Channel(socket.socket(fileno=control_fd))
    tell_on_sigterm(channel)
    run: dict[str, Any] = {"run": birth.run} if birth.run else {}
    writer.write(
        Kind.ACTOR_STARTED,
        pid=os.getpid(),
        host=socket.gethostname(),
        wall_ns=time.time_ns(),
        **run,
    )
    page.wrote(writer.last_seq)
    code = 0
    try:
        train(channel, page, writer)
        writer.close()
    except BaseException as error:  # KeyboardInterrupt too: it has a name
        traceback.print_exc()
        message = str(error)[:MESSAGE_LENGTH]
        page.wrote(writer.write(Kind.ERROR_RAISED, type=type(error).__name__, message=message).seq)
        channel.send(
            Failed(error=f"{type(error).__name__}: {message.splitlines()[0] if message else ''}")
        )
        code = EXIT_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: tearing torch down takes a tenth of a second in which the other ranks would not
    # know.
    os._exit(code)


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
