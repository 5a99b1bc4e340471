"""Ctrl-C while the program still imports: one line and exit code 130 instead of a traceback."""

from __future__ import annotations

import os
import signal

from trainchaos.chaos.errors import EXIT_INTERRUPTED
from trainchaos.recovery.process.output import say


def end_on_sigint() -> None:
    """Until another handler is installed, SIGINT ends this process at once, so call it only before
    anything is started. A SIGINT that is ignored stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(signum: int, frame: object) -> None:
    say("interrupted")
    os._exit(EXIT_INTERRUPTED)
