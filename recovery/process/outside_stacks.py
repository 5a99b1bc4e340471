"""The Python stack of a process's main thread, read from outside by ``py-spy`` where that is
installed (github.com/benfred/py-spy): for a process that cannot write it down itself.

``py-spy dump --nonblocking`` reads the process's memory and does not stop it, so that it needs the
right to read it (the same user and, by ptrace's rules, an ancestor or root), and no answer. It runs
as a process of its own; nobody waits for it, and it is ended with the process that it looks at.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

PROGRAM = "py-spy"
LIMIT_S = 2.0
"""It took 0.07 to 0.12 s for a process with torch on a loaded machine (n = 3)."""
MOST_OUTPUT = 1 << 20
MOST_FRAMES = 64
MOST_NAME = 400
END_S = 1.0


class OutsideStack:
    """One look at a process, ``pid``, which must be pinned. ``find``: the path of the program,
    None: it is not installed.
    """

    def __init__(
        self,
        pid: int,
        *,
        find: Callable[[], str | None] = lambda: shutil.which(PROGRAM),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid, self._find, self._now_s = pid, find, now_s
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._since_s = 0.0
        self._text: str | None = None

    def begin(self) -> None:
        """Look at the process; an earlier look does not count any more."""
        self.close()
        self._text = None
        program = self._find()
        if program is None:
            return
        self._output, self._since_s = _new_file(), self._now_s()
        command = [program, "dump", "--pid", str(self._pid), "--json", "--nonblocking"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            self.close()

    @property
    def under_way(self) -> bool:
        """Whether a look has begun and is not over."""
        process = self._process  # another thread may ask
        return process is not None and process.poll() is None

    def read(self) -> str | None:
        """What was seen, as ``faulthandler`` writes it; empty: nothing yet, or it could not be
        read; None: nobody looked. Never waits.
        """
        process = self._process
        if process is not None and self._output is not None:
            if process.poll() is not None:
                self._output.seek(0)
                self._text = stack_of(self._output.read(MOST_OUTPUT), self._pid)
                self.close()
            elif self._now_s() - self._since_s > LIMIT_S:
                self._text = ""
                self.close()
            else:
                return ""
        return self._text

    def close(self) -> None:
        """End a look that is under way. Safe to repeat."""
        if self._process is not None:
            if self._process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)  # killed: at once
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None


def stack_of(output: bytes, pid: int) -> str:
    """The main thread's stack in what ``py-spy dump --json`` printed, in ``faulthandler``'s form,
    the innermost frame first; "" where it has none. Pure.
    """
    try:
        threads = json.loads(output)
    except (ValueError, RecursionError):
        return ""
    listed = [one for one in threads if isinstance(one, dict)] if isinstance(threads, list) else []
    main = next((one for one in listed if one.get("os_thread_id") == pid), None)
    frames = main.get("frames") if main is not None else None
    lines = [_line(one) for one in frames[:MOST_FRAMES]] if isinstance(frames, list) else []
    told = [line for line in lines if line]
    head = f"By {PROGRAM}, from outside:\nStack (most recent call first):\n"
    return head + "".join(told) if told else ""


def _line(frame: Any) -> str:
    if not isinstance(frame, dict) or type(line := frame.get("line")) is not int:
        return ""
    path, name = (str(frame.get(key, "?"))[:MOST_NAME] for key in ("filename", "name"))
    path, name = (text.replace("\n", " ").replace('"', "'") for text in (path, name))
    return f'  File "{path}", line {line} in {name}\n'


def _new_file() -> IO[bytes]:
    return tempfile.TemporaryFile()
