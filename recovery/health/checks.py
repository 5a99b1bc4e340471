"""Whether a place is fit, asked of a program in a process of its own on the place's machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple, Protocol

from trainchaos.recovery.process import processes

LIMIT_S = 90.0
"""For one check: ``harness.preflight.one`` has 55 s, and 25 s more to end its own processes."""
MOST_LOOK_S = 1.0
"""Of the time between two looks that counts: in a longer one this process stood still, and perhaps
the machine.
"""
MOST_OUTPUT = 65_536
STOPPED = "Tt"
END_S = 1.0
PROGRAM = "trainchaos.harness.preflight.one"
"""The harness has the checks, which recovery does not import."""

Spot = tuple[int, str]
"""Node and device."""


class Answer(NamedTuple):
    """What was found. ``fit`` None: nobody knows; ``said``: in words; ``emulated``: a fault of a
    scenario made it up, and the hardware is well.
    """

    spot: Spot
    fit: bool | None
    said: str
    emulated: bool = False


class Checker(Protocol):
    """Checks places, here or on nodes. Nothing waits."""

    def begin(self, spot: Spot) -> None:
        """Have a place checked, after those that were asked for before."""

    def take(self) -> Sequence[Answer]:
        """Answers since the last call; one for each ``begin``, within bounded time."""

    def close(self) -> None:
        """End what still runs; no answer follows. Safe to repeat."""


def check_command() -> tuple[str, ...]:
    """The program of ``PlaceChecks``: it ends with the process that calls this."""
    return (sys.executable, "-m", PROGRAM, "--parent", str(os.getpid()))


class _Check(NamedTuple):
    spot: Spot
    process: subprocess.Popen[bytes]
    output: IO[bytes]


class PlaceChecks:
    """Checks places of this machine, one after the other, since each takes a core and memory beside
    the job. ``command``: called with the device, as torch names it, as last argument; prints a
    line of JSON, ``fit`` (true, false, null) and ``said`` (words). Always ``close``: the program is
    ended then.
    """

    def __init__(
        self, command: Sequence[str], *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._command, self._now_s = command, now_s
        self._due: deque[Spot] = deque()
        self._answers: list[Answer] = []
        self._check: _Check | None = None
        self._taken_s = self._looked_s = 0.0

    @property
    def pids(self) -> tuple[int, ...]:
        """The program's process, if one runs."""
        return () if self._check is None else (self._check.process.pid,)

    def begin(self, spot: Spot) -> None:
        self._due.append(spot)

    def take(self) -> Sequence[Answer]:
        """See ``Checker``; begins the next check where none runs."""
        if self._check is not None:
            now_s = self._now_s()
            self._taken_s += min(now_s - self._looked_s, MOST_LOOK_S)
            self._looked_s = now_s
            # An answer that is there counts, even if nobody looked for it in time. Who has ended
            # stays to be reaped, so that its group keeps its number.
            pid, flags = self._check.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, pid, flags) is not None
            if ended or self._taken_s > LIMIT_S:
                self._over(self._check, late=not ended)
        while self._check is None and self._due:
            self._start(self._due.popleft())
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        self._due.clear()
        self._answers = []
        if self._check is not None:
            self._end(self._check)

    def _start(self, spot: Spot) -> None:
        self._taken_s, self._looked_s = 0.0, self._now_s()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - held as long as the program runs
        try:
            process = subprocess.Popen(
                [*self._command, spot[1].partition("@")[0]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            self._answers.append(Answer(spot, None, f"cannot be checked: {error.strerror}"))
        else:
            self._check = _Check(spot, process, output)

    def _over(self, check: _Check, *, late: bool) -> None:
        stopped = processes.state(check.process.pid) in STOPPED
        check.output.seek(0)
        text = check.output.read(MOST_OUTPUT).decode(errors="replace")
        self._end(check)
        if late:
            # A device that does not answer is what the check looks for; a stopped check asks none.
            said = f"no answer within {LIMIT_S:g} s" + (
                ": its check was stopped" if stopped else ""
            )
            self._answers.append(Answer(check.spot, None if stopped else False, said))
            return
        found = _found(text.splitlines())
        if found is None:
            found = {"said": [f"its check ended with {check.process.returncode}"]}
        fit, words = found.get("fit"), found.get("said")
        said = "; ".join(map(str, words)) if isinstance(words, list) else ""
        self._answers.append(
            Answer(check.spot, fit if isinstance(fit, bool) else None, said[:1000])
        )

    def _end(self, check: _Check) -> None:
        """Kill a program that is not reaped yet, and what is left of its group, and reap it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(check.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            check.process.wait(END_S)  # else the kernel waits for a device: it dies as that answers
        check.output.close()
        self._check = None


def _found(lines: Sequence[str]) -> Mapping[str, Any] | None:
    """The last line that is an answer."""
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and "fit" in found:
                return found
    return None
