"""How Ctrl-C, a termination request and a lost terminal end a run: the first signal by healing, the
second at once.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from trainchaos.chaos.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_UNSAFE
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.run import heal
from trainchaos.recovery.supervise.supervision import StopFlag

GIVE_UP_LIMIT_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def stop_on_signal(stop: StopFlag, run: RunDirectory) -> Iterator[None]:
    """The first signal sets the flag, so that the arm ends by healing; the second ends this
    process.

    Only the main thread may install handlers; elsewhere nothing changes. A SIGHUP that the user has
    chosen to ignore (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(signum: int, _: object) -> None:
        if signum == signal.SIGHUP:
            _leave_terminal()
        if stop.signum:
            _give_up(run, {stop.signum, signum})
        stop.signum = signum
        word = "terminated" if signum == signal.SIGTERM else "interrupted"
        _say_now(f"{word}: ending the run's processes (a second signal ends the run at once)\n")

    wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, note) for number in wanted}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _say_now(text: str) -> None:
    """Write to standard error from a signal handler. Text that would have to wait is dropped: a
    stopped terminal must not delay healing, and a handler may not use a stream that it interrupted.
    """
    with suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poll.poll(0)):
            os.write(2, (b"\r" if os.isatty(2) else b"") + text.encode())


def _give_up(run: RunDirectory, signums: set[int]) -> NoReturn:
    """Undo what can be undone in GIVE_UP_LIMIT_S, and end without further output; a third signal
    ends even that.

    ``signums``: the first signal and the second. The exit code does not depend on their order:
    sent at once, the handler of one is interrupted by that of the other.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    code = EXIT_TERMINATED if signal.SIGTERM in signums else EXIT_INTERRUPTED
    said = ["interrupted twice: ended at once"]
    try:
        outcomes = heal.finish(run, limit_s=GIVE_UP_LIMIT_S)
        said += [f"  {outcome.text}" for outcome in outcomes if outcome.did or not outcome.ok]
        if not all(outcome.ok for outcome in outcomes):
            code = EXIT_UNSAFE
            said.append(f"  something is left: chaos heal {run.root}")
    finally:
        with suppress(OSError):
            os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + "\n".join([*said, ""]).encode())
        os._exit(code)


def _leave_terminal() -> None:
    """The terminal is gone: discard further output, so that writing it does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        if stat.S_ISCHR(os.fstat(fd).st_mode):  # isatty says no once it is hung up
            os.dup2(nowhere, fd)
    os.close(nowhere)
