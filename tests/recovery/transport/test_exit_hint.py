"""The hint that a process is dying: earlier than its pidfd, and never wrong."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.running import LIMIT_S
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.host import (
    Dying,
    Exited,
    MessageReceived,
    Report,
)
from trainchaos.recovery.process.local import Children
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.exit_hint import Bell
from trainchaos.recovery.transport.wire import Ready, Stop

# A process with memory that takes the kernel a while to give back, and a thread that does nothing.
HOLDER = """
import mmap, os, sys, threading
from trainchaos.recovery.transport import progress_counters as marks
bell = marks.bell_of(int(sys.argv[1]))
bell.hold()
heavy = mmap.mmap(-1, 300 << 20)
for at in range(0, len(heavy), 4096):
    heavy[at] = 1
threading.Thread(target=threading.Event().wait, args=(60.0,), daemon=True).start()
print("holding", flush=True)
word = sys.stdin.readline().strip()
if word == "exec":
    os.execv("/bin/sleep", ["sleep", "60"])
os._exit(int(word))
"""


class Holder:
    """A process that holds a bell."""

    def __init__(self) -> None:
        fd = progress_counters.create()
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(fd)],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.bell: Bell = progress_counters.bell_of(fd)
        os.close(fd)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "holding\n"

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


@pytest.fixture
def holder() -> Iterator[Holder]:
    found = Holder()
    yield found
    found.process.kill()
    found.process.communicate(timeout=LIMIT_S)


def rings(holder: Holder) -> tuple[list[float], threading.Thread]:
    """When the bell rings, once it does, on a thread of its own."""
    found: list[float] = []
    limit = time.monotonic() + LIMIT_S

    def wait() -> None:
        if holder.bell.wait(lambda: time.monotonic() > limit):
            found.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    return found, thread


def head_start_s() -> float:
    """Kill a holder: how much earlier than its pidfd the bell tells."""
    holder = Holder()
    assert holder.bell.held
    found, thread = rings(holder)
    pidfd = os.pidfd_open(holder.process.pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    holder.process.kill()
    assert poll.poll(LIMIT_S * 1000)
    dead_s = time.monotonic()
    thread.join(timeout=LIMIT_S)
    os.close(pidfd)
    holder.process.communicate(timeout=LIMIT_S)
    return dead_s - found[0]


@pytest.mark.real
def test_a_killed_process_is_known_to_die_before_it_is_dead() -> None:
    # Giving back 300 MB takes tens of milliseconds; but a busy machine may not run the waiting
    # thread at once.
    assert any(head_start_s() > 0.002 for _ in range(40))


@pytest.mark.real
def test_a_stopped_process_is_not_dying(holder: Holder) -> None:
    holder.process.send_signal(signal.SIGSTOP)
    looks = iter([False, True])
    assert not holder.bell.wait(lambda: next(looks))
    assert not processes.is_exiting(holder.process.pid)


@pytest.mark.long
@pytest.mark.real
def test_a_process_that_executes_another_program_rings_but_is_not_dying(holder: Holder) -> None:
    found, thread = rings(holder)
    holder.tell("exec")
    thread.join(timeout=LIMIT_S)
    assert found
    assert not processes.is_exiting(holder.process.pid)


def test_nobody_waits_where_nobody_holds() -> None:
    fd = progress_counters.create()
    bell = progress_counters.bell_of(fd)
    os.close(fd)
    assert not bell.held
    bell.close()


# ---- under a supervisor

RANK = """
import ctypes, os, platform, socket, sys, threading, time
from pathlib import Path
from trainchaos.recovery.process.entry import Birth, live
from trainchaos.recovery.transport.wire import Ready
def train(channel, page, writer):
    heavy = bytearray(os.urandom(1 << 20)) * 300
    channel.send(Ready())
    if channel.receive() == [Ready()]:
        os._exit(3)
    threading.Thread(target=threading.Event().wait, args=(60.0,), daemon=True).start()
    # exit(2): of this thread alone
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
birth = Birth(name="w0", parent=os.getppid(), events=Path(sys.argv[3]), log=None)
live(birth, int(sys.argv[1]), int(sys.argv[2]), train)
"""


class Family:
    """One rank under ``Children``."""

    def __init__(self, directory: Path) -> None:
        processes.become_subreaper()
        self.children = Children()
        self.reports: list[Report] = []

        def start(fds: list[int]) -> int:
            child = subprocess.Popen(
                [sys.executable, "-c", RANK, *map(str, fds), str(directory)],
                pass_fds=fds,
                start_new_session=True,
            )
            child.returncode = 0  # reaped by its pidfd
            return child.pid

        self.pid = self.children.begin("w0", start)
        self.until(
            lambda report: isinstance(report, MessageReceived) and isinstance(report.message, Ready)
        )

    def until(self, wanted: Callable[[Report], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not any(map(wanted, self.reports)):
            assert time.monotonic() < deadline
            self.reports += self.children.wait(0.1)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    found = Family(tmp_path)
    yield found
    assert found.children.close() == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "bell"]


def gone(report: Report) -> bool:
    return isinstance(report, Exited)


@pytest.mark.real
def test_a_supervisor_hears_of_the_dying_before_the_dead(family: Family) -> None:
    # Its main thread ends, another does not: it cannot be dead before the supervisor has heard and
    # killed the rest.
    family.children.send("w0", Stop())
    family.until(gone)
    kinds = [type(report) for report in family.reports if not isinstance(report, MessageReceived)]
    assert kinds == [Dying, Exited]
    last = family.reports[-1]
    assert isinstance(last, Exited) and (last.exit_code, last.signal) == (None, 9)


@pytest.mark.real
def test_a_killed_process_exits_once_whether_or_not_its_dying_was_heard_in_time(
    family: Family,
) -> None:
    os.kill(family.pid, signal.SIGKILL)
    family.until(gone)
    kinds = [type(report) for report in family.reports if not isinstance(report, MessageReceived)]
    assert kinds in ([Dying, Exited], [Exited])
    last = family.reports[-1]
    assert isinstance(last, Exited) and (last.exit_code, last.signal) == (None, 9)


@pytest.mark.long
@pytest.mark.real
def test_how_a_process_ended_by_itself_is_still_told(family: Family) -> None:
    family.children.send("w0", Ready())
    family.until(gone)
    assert [type(report) for report in family.reports if not isinstance(report, MessageReceived)][
        -1
    ] is Exited
    last = family.reports[-1]
    assert isinstance(last, Exited) and (last.exit_code, last.signal) == (3, None)
