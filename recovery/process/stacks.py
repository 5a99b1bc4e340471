"""The Python stack of a rank's training thread, written down by the rank itself when its supervisor
asks: evidence of where it hangs, collected before it is killed.

A rank registers ``faulthandler`` for ``STACK_SIGNAL`` (docs.python.org/3/library/faulthandler.html:
the dump is made in the signal handler, in C, without the GIL, so that a thread which sits in C code
or holds the GIL hinders nobody). It writes into memory that only this process and whoever may read
its descriptors can see: no disk can hold it up, and nothing is left where nothing was asked. A
stopped process, or one that waits in the kernel for a device, does not answer.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from trainchaos.recovery.process import processes
from trainchaos.recovery.process.outside_stacks import OutsideStack

STACK_SIGNAL = signal.SIGRTMIN + 11
"""Used by nothing else here: not by Python, torch or CUDA's tools. Its default ends a process, so
it is sent only to one that the kernel shows to handle it.
"""
MUTE = "DT"
"""States of the kernel in which a process does not handle a signal, and may be read from outside:
it waits for a device, or is stopped.
"""
STOPPED = "T"
MEMORY = "trainchaos-stacks"
MOST_READ = 64 << 10  # bytes: a dump of 10 threads has about 5,000
MOST_FRAMES = 12
SUFFIX = ".stacks"
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_HEADS = ("Stack (", "Current thread ")


def answer_requests() -> None:
    """Write down the stack of the thread that ``STACK_SIGNAL`` interrupts, whenever it comes, into
    memory. The kernel gives a process's signal to its main thread, which trains. The frames of
    other threads change while they would be read, which could end a rank that is well, and is only
    suspected. Call it in a rank's process, after it was forked. Where there is no such memory
    nothing is registered, and the process is not asked.
    """
    with suppress(OSError):
        memory = os.memfd_create(MEMORY, os.MFD_CLOEXEC)
        # the reader empties it before each request
        fcntl.fcntl(memory, fcntl.F_SETFL, fcntl.fcntl(memory, fcntl.F_GETFL) | os.O_APPEND)
        faulthandler.register(STACK_SIGNAL, file=memory, all_threads=False, chain=False)
        os.register_at_fork(after_in_child=lambda: faulthandler.unregister(STACK_SIGNAL))


class StackReader:
    """The stacks of one process of this machine, read through its descriptors under /proc. ``pid``
    must be pinned, by a pidfd that is held and a process that was not waited for.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._outside = OutsideStack(pid)
        self._asked = False
        self._kept: str | None = None

    def before(self, signum: int) -> bool:
        """Call before a signal is sent; whether it may be. ``STACK_SIGNAL``: the memory is emptied,
        and the process must handle the signal; SIGKILL: what was written is read while it exists.
        """
        if signum == STACK_SIGNAL:
            self._kept = None
            self._asked = handles(self._pid, STACK_SIGNAL) and self._empty()
            if not self._asked or processes.state(self._pid) in MUTE:
                self._outside.begin()
            return self._asked
        if signum == signal.SIGKILL:
            self._kept = self.read()
            self._outside.close()
        return True

    @property
    def looks(self) -> bool:
        """Whether the process is stopped and being read from outside, which takes a moment."""
        return self._outside.under_way and processes.state(self._pid) == STOPPED

    def read(self) -> str | None:
        """What the process wrote since it was asked, at most the first ``MOST_READ`` bytes, else
        what was read from outside; empty: nothing yet; None: it was not asked, or cannot be read.
        """
        if self._kept is not None:
            return self._kept
        own = self._own()
        seen = None if own else self._outside.read()
        return seen if seen is not None else own

    def close(self) -> None:
        """Nothing is read any more. Safe to repeat."""
        self._outside.close()

    def _own(self) -> str | None:
        if not self._asked:
            return None
        memory = self._memory()
        if memory is None:
            return None
        with suppress(OSError):
            fd = os.open(memory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(fd, MOST_READ).decode(errors="replace")
            finally:
                os.close(fd)
        return None

    def _empty(self) -> bool:
        memory = self._memory()
        if memory is None:
            return False
        with suppress(OSError):
            os.truncate(memory, 0)
            return True
        return False

    def _memory(self) -> str | None:
        """The path of the process's memory, under its descriptors."""
        folder = f"/proc/{self._pid}/fd"
        with suppress(OSError):
            for name in os.listdir(folder):
                path = f"{folder}/{name}"
                with suppress(OSError):  # closed since it was listed
                    if os.readlink(path).startswith(f"/memfd:{MEMORY}"):
                        return path
        return None


def handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, by the kernel (``SigCgt`` of
    /proc/<pid>/status; man 5 proc).
    """
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as stream:
        for line in stream:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def training_frames(text: str) -> list[str]:
    """The frames in a dump, the innermost first, each as ``path:line in function``; at most
    ``MOST_FRAMES`` of the last stack that was begun.
    """
    frames: list[str] | None = None
    for line in text.splitlines():
        if line.startswith(_HEADS):
            frames = []
        elif frames is not None and (found := _FRAME.match(line)):
            frames.append("{path}:{line} in {name}".format(**found.groupdict()))
    return (frames or [])[:MOST_FRAMES]


def keep(folder: Path | None, name: str, text: str) -> str:
    """Append a dump to ``NAME.stacks`` of a folder; returns the file's name, "" where there is no
    folder or its disk does not take it: evidence is no reason to disturb a recovery.
    """
    if folder is None or not text:
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{name}{SUFFIX}", "a", encoding="utf-8") as stream:
            stream.write(f"{text.rstrip()}\n\n")
    except OSError:
        return ""
    return f"{name}{SUFFIX}"
