"""A stack that is read from outside, where a process cannot write it down."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import readable, stand_in
from trainchaos.recovery.process.outside_stacks import (
    LIMIT_S,
    MOST_FRAMES,
    PROGRAM,
    OutsideStack,
    stack_of,
)
from trainchaos.recovery.process.stacks import STACK_SIGNAL, StackReader, training_frames

BOUND_S = 120.0
FRAME = {"name": "waits", "filename": "/a/train.py", "line": 7, "module": None, "locals": None}
THREAD = {"pid": 5, "os_thread_id": 5, "thread_name": "MainThread", "frames": [FRAME]}


def dump_of(*threads: Any) -> bytes:
    return json.dumps(threads).encode()


def test_the_main_thread_is_told_as_it_would_tell_itself() -> None:
    other = {**THREAD, "os_thread_id": 6, "frames": [{**FRAME, "name": "other"}]}
    found = stack_of(dump_of(other, THREAD), 5)
    assert training_frames(found) == ["/a/train.py:7 in waits"]
    assert stack_of(dump_of(other), 5) == ""


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"no json",
        b"[" * 100_000,
        b"{}",
        b"[1, null]",
        dump_of({**THREAD, "frames": None}),
        dump_of({**THREAD, "frames": [None, 3, {"line": True}, {"line": "7"}]}),
    ],
)
def test_garbage_is_no_stack(output: bytes) -> None:
    assert stack_of(output, 5) == ""


@pytest.mark.slow
def test_a_stack_is_bounded_and_stays_in_its_lines() -> None:
    odd = {**FRAME, "name": 'a\nFile "x"' + "n" * 9999}
    found = stack_of(dump_of({**THREAD, "frames": [odd] * 2000}), 5)
    assert len(found.splitlines()) == 2 + MOST_FRAMES
    assert len(found) < MOST_FRAMES * 1000


def program(folder: Path, text: str) -> str:
    """A stand-in for py-spy."""
    return str(stand_in(folder / PROGRAM, text))


def seen(read: Callable[[], str | None]) -> str | None:
    """What is read once it is there; waits for it, bounded."""
    waited = select.poll()
    for _ in range(int(BOUND_S * 100)):
        text = read()
        if text != "":
            return text
        waited.poll(10)
    raise AssertionError("nothing was seen")


def test_the_program_is_asked_and_nobody_waits_for_it(tmp_path: Path) -> None:
    says = f"import sys; print({dump_of(THREAD).decode()!r} if sys.argv[3] == '5' else '')"
    path = program(tmp_path, says)
    look = OutsideStack(5, find=lambda: path, now_s=lambda: 100.0)
    assert look.read() is None, "nobody looked yet"
    look.begin()
    assert training_frames(seen(look.read) or "") == ["/a/train.py:7 in waits"]
    look.close()


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    path = program(tmp_path, "import signal\nsignal.pause()")
    now_s = [100.0]
    look = OutsideStack(5, find=lambda: path, now_s=lambda: now_s[0])
    look.begin()
    process = look._process
    assert process is not None and look.read() == "" and process.poll() is None
    now_s[0] += LIMIT_S + 0.1
    assert look.read() == ""
    assert process.returncode == -signal.SIGKILL and look._process is None
    look.begin()
    again = look._process
    look.close()
    assert again is not None and again.returncode == -signal.SIGKILL


def test_without_the_program_there_is_nothing(tmp_path: Path) -> None:
    look = OutsideStack(5, find=lambda: None)
    look.begin()
    assert look.read() is None
    broken = OutsideStack(5, find=lambda: str(tmp_path / "gone"))
    broken.begin()
    assert broken.read() is None


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")
@pytest.mark.real
def test_a_process_without_the_handler_is_read_by_the_real_program() -> None:
    text = "import os, signal\ndef waits():\n    os.write(1, b'!')\n    signal.pause()\nwaits()\n"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, bufsize=0)
    try:
        assert process.stdout is not None
        assert readable(process.stdout)
        reader = StackReader(process.pid)
        assert not reader.before(STACK_SIGNAL), "the signal would end it"
        frames = training_frames(seen(reader.read) or "")
        assert frames and frames[0].endswith(" in waits"), frames
        assert reader.before(signal.SIGKILL)
        reader.close()
        assert process.poll() is None, "it was only looked at"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=BOUND_S)
