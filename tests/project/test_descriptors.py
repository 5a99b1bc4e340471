"""What a supervisor holds for its processes: nothing once they are gone, however many
there were.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.open_files import open_files
from tests.support.running import LIMIT_S, until
from trainchaos.recovery.process import local, processes
from trainchaos.recovery.process.host import Exited, MessageReceived
from trainchaos.recovery.process.local import KEPT_MARKS, Children, LeftoverSessions
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import NEVER

ROUNDS = 100
HOLDER = """
import os, signal, sys
from trainchaos.recovery.transport import progress_counters as marks
marks.bell_of(int(sys.argv[2])).hold()
os.write(int(sys.argv[1]), b'\\0\\0\\0\\x11{"type":"Notice"}')
signal.pause()
"""


def program(*command: str) -> Callable[[list[int]], int]:
    """Starts a process that has the descriptors of a rank, in a session of its own."""

    def start(fds: list[int]) -> int:
        child = subprocess.Popen(command, pass_fds=fds, start_new_session=True)
        child.returncode = 0  # it is reaped by its pidfd
        return child.pid

    return start


def await_exit(children: Children, name: str) -> None:
    while not any(isinstance(r, Exited) and r.process == name for r in children.wait(LIMIT_S)):
        assert children.alive(name)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("named", [False, True])
def test_a_process_that_is_gone_holds_nothing(tmp_path: Path, named: bool) -> None:
    children = Children(named=named)
    before, threads = open_files(), threading.active_count()
    for number in range(ROUNDS):
        children.begin(
            f"w{number}", program("true"), log=tmp_path / f"w{number}.jsonl" if named else None
        )
        await_exit(children, f"w{number}")
    assert (open_files(), threading.active_count()) == (before, threads)
    assert children.pulse("w3") == Pulse(), "asked by whoever has not heard of its end yet"
    assert (
        children.mark("w3") == NEVER and children.os_state("w3") == "X" and not children.alive("w3")
    )
    children.signal("w3", signal.SIGKILL)
    assert not list(tmp_path.glob("*.memory"))
    assert not children.close()


def test_the_watch_for_a_dying_process_ends_with_it() -> None:
    children, before = Children(), open_files()
    threads = threading.active_count()
    for number in range(3):
        name = f"w{number}"

        def start(fds: list[int]) -> int:
            return program(sys.executable, "-c", HOLDER, *map(str, fds))(fds)

        children.begin(name, start)
        assert [type(report) for report in children.wait(LIMIT_S)] == [MessageReceived]
        assert threading.active_count() == threads + 1
        children.signal(name, signal.SIGKILL)
        await_exit(children, name)
        until(lambda: threading.active_count() == threads, LIMIT_S)
    assert open_files() == before
    assert not children.close()


def test_only_the_newest_marks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEPT_MARKS > 100, "the marks of a generation's dead are asked for"
    monkeypatch.setattr("trainchaos.recovery.process.local.KEPT_MARKS", 3)
    children = Children()
    for number in range(5):
        children.begin(f"w{number}", program("true"))
        await_exit(children, f"w{number}")
    assert list(children._last) == ["w2", "w3", "w4"]
    assert not children.close()


def test_a_channel_that_a_grandchild_keeps_open_is_closed_with_the_process() -> None:
    children, before = Children(), open_files()
    children.begin("w0", program("sh", "-c", "sleep 60 &"))
    await_exit(children, "w0")
    assert open_files() == before
    assert not children.close(), "what it left is ended"


def test_what_cannot_be_started_holds_nothing(tmp_path: Path) -> None:
    children, before = Children(), open_files()

    def refused(_: list[int]) -> int:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        children.begin("w0", refused)
    assert open_files() == before
    assert not children.close()


def test_what_a_process_left_in_its_session_is_ended_while_the_job_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "LOOK_AFTER_S", 0.0)
    processes.become_subreaper()
    children = Children()
    pid = children.begin("w0", program("sh", "-c", "sleep 60 & sleep 61 &"))
    await_exit(children, "w0")
    until(lambda: not children.wait(0.01) and not children._sessions.ended, LIMIT_S)
    assert not [fields for _, fields in processes.everybody() if fields[3] == str(pid)], (
        "reaped, too"
    )
    assert not children.close()


def test_a_session_of_the_same_number_that_came_later_is_a_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "LOOK_AFTER_S", 0.0)
    sessions = LeftoverSessions()
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        sessions.add(stranger.pid)
        sessions.ended[stranger.pid] -= 10.0  # our leader of that number ended long before
        sessions.look()
        assert not sessions.ended and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(LIMIT_S)
