"""Points in a training script: nothing where nothing is armed, a bounded hold where something is,
harmless always; and a harness that whoever talks nonsense cannot hurt.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.costs import calls
from tests.support.running import LIMIT_S
from trainchaos import beacon
from trainchaos.harness.script.points import (
    LINE_LIMIT,
    Disconnected,
    PointDone,
    PointRequest,
    Points,
    parse,
)

MOST_CALLS = 30  # of Python and C; 18 today


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Points]:
    made = Points(tmp_path / "points.txt", [(7, "backward"), (8, "gradient"), (0, "optimizer")])
    monkeypatch.setenv(beacon.POINTS, str(tmp_path / "points.txt"))
    yield made
    made.close()
    beacon._LOADED.clear()


def heard(points: Points, count: int = 1) -> list[PointRequest | PointDone | Disconnected]:
    """What is said, once it is so much."""
    found: list[PointRequest | PointDone | Disconnected] = []
    deadline = time.monotonic() + LIMIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"heard only {found}"
        found += points.listen()
    return found


def at(name: str, step: int) -> tuple[threading.Thread, list[Any]]:
    """``point`` on a thread of its own, and what it returned or raised."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(beacon.point(name, step))
        except RuntimeError as error:
            result.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, result


def done(thread: threading.Thread) -> None:
    thread.join(LIMIT_S)
    assert not thread.is_alive()


# ---- the script's side


def test_outside_a_run_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(beacon.POINTS, raising=False)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it opened something"))
    assert beacon.point("backward", 7) is None
    beacon.did("nan", 7)


@pytest.mark.parametrize(
    "place", [("backward", 7), ("backward", 6), ("sideways", 7), ("optimizer", 7)]
)
def test_where_nothing_is_armed_nobody_asks(
    points: Points, monkeypatch: pytest.MonkeyPatch, place: tuple[str, int]
) -> None:
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("it connected"))
    assert beacon.point(*place) is None


def test_it_is_few_calls_where_nothing_is_armed(points: Points) -> None:
    """What they take is measured by ``benchmarks.calls``."""
    beacon.point("optimizer", 7)
    assert calls(lambda: beacon.point("optimizer", 7)) < MOST_CALLS


@pytest.mark.parametrize("word", ["go", "nan", "something else"])
def test_it_holds_until_it_is_answered(points: Points, word: str) -> None:
    points.arm([(8, "gradient")])
    thread, result = at("gradient", 8)
    (asked,) = heard(points)
    assert isinstance(asked, PointRequest)
    assert (asked.pid, asked.step, asked.name) == (os.getpid(), 8, "gradient")
    assert thread.is_alive() and not result
    points.answer(asked.connection, asked.number, word)
    done(thread)
    assert result == ["nan" if word == "nan" else None]


def test_a_place_of_any_step_is_armed_and_disarmed(points: Points) -> None:
    points.arm([(0, "optimizer"), (99, "nowhere")])
    thread, result = at("optimizer", 1234)
    (asked,) = heard(points)
    assert isinstance(asked, PointRequest) and asked.step == 1234
    points.arm([])
    points.answer(asked.connection, asked.number, "go")
    done(thread)
    assert result == [None] and beacon.point("optimizer", 1235) is None


def test_what_it_raises_is_announced_first(points: Points) -> None:
    points.arm([(7, "backward")])
    thread, result = at("backward", 7)
    (asked,) = heard(points)
    assert isinstance(asked, PointRequest)
    points.answer(asked.connection, asked.number, "raise out\nof luck")
    done(thread)
    assert type(result[0]) is RuntimeError and str(result[0]) == "injected by chaos: out of luck"
    (said,) = heard(points)
    assert said == PointDone(
        connection=asked.connection, step=7, what="raise", before=None, after=None
    )


def test_what_was_done_is_told_with_its_numbers(points: Points) -> None:
    points.arm([(8, "gradient")])
    thread, _ = at("gradient", 8)
    (asked,) = heard(points)
    assert isinstance(asked, PointRequest)
    points.answer(asked.connection, asked.number, "nan")
    done(thread)
    beacon.did("nan", 8, before=0.5, after=float("nan"))
    beacon.did("nan", cast("int", object()), after=cast("float", "x"))  # never raises
    (said,) = heard(points)
    assert isinstance(said, PointDone) and said.before == 0.5 and math.isnan(said.after or 0.0)


def test_without_a_harness_nobody_holds_for_long_or_twice(
    points: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beacon, "HOLD_LIMIT_S", 0.2)
    points.arm([(7, "backward"), (8, "gradient")])
    start = time.monotonic()
    assert beacon.point("backward", 7) is None
    assert time.monotonic() - start >= 0.2
    assert beacon.point("gradient", 8) is None
    said = [*points.listen(), *points.listen()]  # the first look takes in who connects
    assert [one.step for one in said if isinstance(one, PointRequest)] == [7]


def test_a_harness_that_ends_lets_go(points: Points) -> None:
    points.arm([(7, "backward"), (8, "gradient")])
    thread, result = at("backward", 7)
    heard(points)
    points.close()
    done(thread)
    assert result == [None]
    assert beacon.point("gradient", 8) is None  # nobody is there to be asked


def test_a_handler_that_interrupts_a_hold_is_not_in_its_way(points: Points) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    asked: list[PointRequest | PointDone | Disconnected] = []

    def ring() -> None:
        asked.extend(heard(points))
        os.kill(os.getpid(), signal.SIGALRM)

    points.arm([(7, "backward"), (8, "gradient")])
    before, ringing = signal.signal(signal.SIGALRM, interrupt), threading.Thread(target=ring)
    try:
        ringing.start()
        with pytest.raises(Interrupted):
            beacon.point("backward", 7)
    finally:
        ringing.join(LIMIT_S)
        signal.signal(signal.SIGALRM, before)
    (first,), (left,) = asked, heard(points)
    assert isinstance(first, PointRequest) and left == Disconnected(connection=first.connection)
    thread, result = at("gradient", 8)  # a new connection, that no late answer can reach
    (second,) = heard(points)
    assert isinstance(second, PointRequest) and second.connection != first.connection
    points.answer(first.connection, first.number, "nan")
    points.answer(second.connection, second.number, "go")
    done(thread)
    assert result == [None]


def test_a_forked_worker_is_silent(points: Points, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beacon, "HOLD_LIMIT_S", 0.2)
    assert beacon.point("forward", 1) is None  # the process is known from here on
    points.arm([(7, "backward")])
    child = os.fork()
    if child == 0:
        os._exit(0 if beacon.point("backward", 7) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [*points.listen(), *points.listen()] == []  # the first look takes in who connects


def test_processes_started_anew_connect_anew_even_by_a_copy(points: Points, tmp_path: Path) -> None:
    copy = tmp_path / "lonely" / "beacon.py"
    copy.parent.mkdir()
    shutil.copy(beacon.__file__, copy)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import beacon;"
        " sys.exit(beacon.point('backward', 7) == 'nan')"
    )
    points.arm([(7, "backward")])
    for word, expected in (("go", 0), ("nan", 1)):
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, str(copy.parent)])
        (asked,) = heard(points)
        assert isinstance(asked, PointRequest) and asked.pid == process.pid
        points.answer(asked.connection, asked.number, word)
        assert process.wait(LIMIT_S) == expected
        assert heard(points) == [Disconnected(connection=asked.connection)]


@pytest.mark.parametrize(
    "text", ["", "2 x\n1 7 backward\n", "1\n", "1 x\n1 7\n", "1 x\n1 seven backward\n", "\xff"]
)
def test_a_file_that_makes_no_sense_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "points.txt"
    path.write_text(text)
    monkeypatch.setenv(beacon.POINTS, str(path))
    assert beacon.point("backward", 7) is None
    monkeypatch.setenv(beacon.POINTS, str(tmp_path / "nowhere"))
    assert beacon.point("backward", 7) is None
    beacon._LOADED.clear()


@pytest.mark.parametrize("step", ["x", None, 1e400, object()])
@pytest.mark.parametrize("name", ["backward", None, [], object()])
def test_wrong_arguments_never_raise(points: Points, name: Any, step: Any) -> None:
    points.arm([(7, "backward")])
    assert beacon.point(name, step) is None


# ---- the harness's side


def client(points: Points) -> socket.socket:
    """Whoever wants to."""
    path = os.environ[beacon.POINTS]
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.connect("\0" + Path(path).read_text().split()[1])
    return made


@pytest.mark.parametrize(
    "line",
    [
        b"hello\n",
        b"at 1 7\n",
        b"at 1 -7 backward\n",
        b"at 1 7 back ward\n",
        b"at 1 7 ../x\n",
        b"\n",
        b"\xff\xfe\n",
        b"at " + b"9" * 30 + b" 7 backward\n",
        b"did 7 nan 1\n",
        b"did 7 nan 0x1 -\n",
        b"did 7 n\0n - -\n",
        b"x" * (LINE_LIMIT + 1),
        b"at 1 7 " + b"a" * LINE_LIMIT + b"\n",
    ],
)
def test_who_talks_nonsense_is_hung_up_on_and_others_are_heard(points: Points, line: bytes) -> None:
    with client(points) as hostile, client(points) as good:
        hostile.sendall(line)
        assert [type(said) for said in heard(points)] == [Disconnected]
        assert hostile.recv(1) == b""
        good.sendall(b"at 1 7 backward\n")
        assert [type(said) for said in heard(points)] == [PointRequest]


def test_who_reads_nothing_does_not_block_the_harness(points: Points) -> None:
    with client(points) as deaf:
        deaf.sendall(b"at 1 7 backward\n")
        (asked,) = heard(points)
        assert isinstance(asked, PointRequest)
        for _ in range(10_000):
            points.answer(asked.connection, asked.number, "go")
    assert heard(points) == [Disconnected(connection=asked.connection)]


@given(st.binary(max_size=300))
def test_no_line_gives_an_exception(line: bytes) -> None:
    said = parse(1, 2, line)
    assert said is None or said.connection == 1
