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
        self._spot: Spot | None = None  # that is being checked
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._taken_s = self._looked_s = 0.0

    @property
    def pids(self) -> tuple[int, ...]:
        """The program's process, if one runs."""
        return () if self._process is None else (self._process.pid,)

    def begin(self, spot: Spot) -> None:
        self._due.append(spot)

    def take(self) -> Sequence[Answer]:
        """See ``Checker``; begins the next check where none runs."""
        if self._process is not None:
            now_s = self._now_s()
            self._taken_s += min(now_s - self._looked_s, MOST_LOOK_S)
            self._looked_s = now_s
            # An answer that is there counts, even if nobody looked for it in time.
            ended = _ended(self._process)
            if ended or self._taken_s > LIMIT_S:
                self._over(self._process, late=not ended)
        while self._process is None and self._due:
            self._start(self._due.popleft())
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        self._due.clear()
        self._answers = []
        if self._process is not None:
            _end(self._process)
        self._rest()

    def _start(self, spot: Spot) -> None:
        self._spot, self._taken_s, self._looked_s = spot, 0.0, self._now_s()
        try:
            self._output = _new_file()
            self._process = subprocess.Popen(
                [*self._command, spot[1].partition("@")[0]],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._answer(None, [f"cannot be checked: {error.strerror}"])

    def _over(self, process: subprocess.Popen[bytes], *, late: bool) -> None:
        stopped = processes.state(process.pid) in STOPPED
        _end(process)
        if late:
            # A device that does not answer is what the check looks for; a stopped check asks none.
            why = f"no answer within {LIMIT_S:g} s"
            more = ": its check was stopped" if stopped else ""
            self._answer(None if stopped else False, [why + more])
            return
        assert self._output is not None
        self._output.seek(0)
        found = _found(self._output.read(MOST_OUTPUT).decode(errors="replace").splitlines())
        if found is None:
            self._answer(None, [f"its check ended with {process.returncode}"])
            return
        said, fit = found.get("said"), found.get("fit")
        words = [str(one) for one in said] if isinstance(said, list) else []
        self._answer(fit if isinstance(fit, bool) else None, words)

    def _answer(self, fit: bool | None, said: Sequence[str]) -> None:
        assert self._spot is not None
        self._answers.append(Answer(self._spot, fit, "; ".join(said)[:1000]))
        self._rest()

    def _rest(self) -> None:
        if self._output is not None:
            self._output.close()
        self._spot = self._process = self._output = None


def _new_file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _found(lines: Sequence[str]) -> Mapping[str, Any] | None:
    """The last line that is an answer."""
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and "fit" in found:
            return found
    return None


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a program has ended; it stays to be reaped, so that its group keeps its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program that is not reaped yet, and what is left of its group, and reap it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)  # else the kernel waits for a device: it dies as that answers
