"""The stacks of a rank that hangs: asked for, read, and cut into frames. Real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.running import LIMIT_S, readable
from trainchaos.recovery.process.stacks import (
    MOST_FRAMES,
    MOST_READ,
    STACK_SIGNAL,
    StackReader,
    handles,
    keep,
    training_frames,
)

ANSWERS = "from trainchaos.recovery.process.stacks import answer_requests; answer_requests()"
READY = "import os; os.write(1, b'!')"
WAYS = {
    "asleep in a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "in a loop": "exec('while True: pass')",
    "in C with the GIL": "import re; re.match('(a+)+b', 'a' * 64)",
}
HEAD = "Stack (most recent call first):"
DUMP = f"""\
{HEAD}
  File "/x/a b.py", line 7 in stuck
  File "<frozen runpy>", line 88 in _run_code
  ...
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program that says when it is about to do its last line; ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*lines: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, bufsize=0
        )
        started.append(process)
        assert process.stdout is not None
        assert readable(process.stdout)
        assert process.stdout.read(1) == b"!"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def ask(process: subprocess.Popen[bytes]) -> tuple[StackReader, bool]:
    """A reader whose process was asked, as a supervisor does it."""
    reader = StackReader(process.pid)
    may = reader.before(STACK_SIGNAL)
    if may:
        os.kill(process.pid, STACK_SIGNAL)
    return reader, may


def answer(reader: StackReader, complete: str = HEAD) -> str:
    """What it writes; waits for it, bounded."""
    waited = select.poll()
    for _ in range(int(LIMIT_S * 100)):
        text = reader.read()
        assert text is not None
        if complete in text and text.endswith("\n"):
            return text
        waited.poll(10)
    raise AssertionError("no answer")


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_hangs_says_where(start: Start, way: str) -> None:
    process = start(ANSWERS, "def stuck():", f"    {READY}; {WAYS[way]}", "stuck()")
    reader, may = ask(process)
    assert may
    frames = training_frames(answer(reader, "in stuck"))
    assert any(frame.endswith(" in stuck") for frame in frames), frames
    assert process.poll() is None, "it goes on"


def test_each_request_is_answered_anew(start: Start) -> None:
    process = start(ANSWERS, READY, WAYS["in a loop"])
    reader, _ = ask(process)
    answer(reader)
    assert reader.before(STACK_SIGNAL)
    assert reader.read() == "", "the earlier answer is of another time"
    os.kill(process.pid, STACK_SIGNAL)
    assert answer(reader).count(HEAD) == 1


def test_a_script_that_takes_the_handler_away_is_not_sent_the_signal(start: Start) -> None:
    takes = f"import faulthandler; faulthandler.unregister({int(STACK_SIGNAL)})"
    process = start(ANSWERS, takes, READY, WAYS["in a loop"])
    assert not ask(process)[1], "the signal would end it"
    assert process.poll() is None


def test_a_process_that_does_not_handle_the_signal_is_not_sent_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no py-spy
    process = start(READY, WAYS["in a loop"])
    assert not handles(process.pid, STACK_SIGNAL)
    reader, may = ask(process)
    assert not may, "the signal would end it"
    assert reader.read() is None
    assert process.poll() is None


def test_a_stopped_process_does_not_answer(start: Start) -> None:
    process = start(ANSWERS, READY, WAYS["in a loop"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    reader, may = ask(process)
    assert may
    assert reader.read() == ""


def test_the_answer_outlives_the_process(start: Start) -> None:
    process = start(ANSWERS, READY, WAYS["in a loop"])
    reader, _ = ask(process)
    said = answer(reader)
    assert reader.before(signal.SIGKILL)
    process.kill()
    process.wait(timeout=LIMIT_S)
    assert reader.read() == said


def test_of_a_process_that_is_gone_nothing_is_read(start: Start) -> None:
    process = start(ANSWERS, READY, WAYS["in a loop"])
    reader = StackReader(process.pid)
    assert reader.before(STACK_SIGNAL)
    process.kill()
    process.wait(timeout=LIMIT_S)
    assert reader.read() is None
    assert not reader.before(STACK_SIGNAL)
    assert reader.before(signal.SIGTERM), "other signals are not its affair"


def test_frames_are_those_of_the_dump() -> None:
    assert training_frames(DUMP) == ["/x/a b.py:7 in stuck", "<frozen runpy>:88 in _run_code"]
    assert training_frames(DUMP.replace("stuck", "before") + DUMP) == training_frames(DUMP)


def test_only_the_thread_that_trains_is_read(start: Start) -> None:
    """The frames of the others change meanwhile: to read them could end a rank that is well."""
    others = "import threading; threading.Thread(target=exec, args=('while True: pass',)).start()"
    process = start(ANSWERS, others, "def stuck():", f"    {READY}; {WAYS['in a loop']}", "stuck()")
    reader, _ = ask(process)
    text = answer(reader, "in stuck")
    assert text.count("most recent call first") == 1 and "threading.py" not in text


@pytest.mark.parametrize("text", ["", "\0\0", HEAD, "  File x", "no dump\n" * 3])
def test_what_is_no_dump_has_no_frames(text: str) -> None:
    assert training_frames(text) == []


def test_many_frames_are_cut() -> None:
    deep = f"{HEAD}\n" + '  File "a", line 1 in f\n' * 100
    assert len(training_frames(deep)) == MOST_FRAMES


def test_a_long_answer_is_cut(start: Start) -> None:
    process = start(ANSWERS, READY, WAYS["in a loop"])
    reader, _ = ask(process)
    answer(reader)
    memory = reader._memory()
    assert memory is not None
    with open(memory, "ab") as stream:
        stream.write(b"x" * (2 * MOST_READ))
    text = reader.read()
    assert text is not None
    assert len(text) == MOST_READ


def test_dumps_are_kept_one_after_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    assert keep(folder, "w2", "first\n") == keep(folder, "w2", "second\n\n") == "w2.stacks"
    assert (folder / "w2.stacks").read_text() == "first\n\nsecond\n\n"
    assert keep(folder, "w3", "") == keep(None, "w3", "text") == ""
    assert [path.name for path in folder.iterdir()] == ["w2.stacks"]


def test_a_disk_that_takes_nothing_costs_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert keep(tmp_path / "file" / "below", "w2", "text") == ""
