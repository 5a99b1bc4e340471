"""What every rank's process does first and last, whatever it trains."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.notice import tell_on_sigterm
from trainchaos.recovery.process.output import shield
from trainchaos.recovery.process.stacks import answer_requests
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.event_ring import RingWriter
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import Failed

EXIT_ERROR = 1
MESSAGE_LENGTH = 500


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
