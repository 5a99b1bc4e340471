"""Event lines through shared memory: whole, in order and once, whoever dies when."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind, read_actor
from trainchaos.recovery.process.host import Exited
from trainchaos.recovery.process.local import Children
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.event_ring import CAPACITY, LineRing, RingWriter

CHILD = """
import sys, time
from pathlib import Path
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.transport import progress_counters as marks
from trainchaos.recovery.transport.event_ring import RingWriter
fd, directory, longest = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
page = marks.MarkPage(fd)
writer = RingWriter(directory, "w0", time.monotonic_ns, marks.ring_of(fd))
while True:
    text = "x" * (writer.last_seq * 7919 % longest)
    page.wrote(writer.write(Kind.ERROR_RAISED, type="none", message=text).seq)
"""


@pytest.fixture
def fd() -> Iterator[int]:
    number = progress_counters.create()
    yield number
    os.close(number)


def lines(count: int, *, start: int = 0, length: int = 100) -> list[bytes]:
    return [f"{n:0{length - 1}d}\n".encode() for n in range(start, start + count)]


def test_what_is_put_in_comes_out_in_order_across_the_end_of_the_ring(
    fd: int, tmp_path: Path
) -> None:
    buffer, path = progress_counters.ring_of(fd), tmp_path / "log"
    put = lines(3 * CAPACITY // 1000, length=1001)
    with open(path, "wb", buffering=0) as stream:
        for number, line in enumerate(put):
            assert buffer.put(line)
            if number % 100 == 99:
                buffer.drain(stream.fileno())
        buffer.drain(stream.fileno())
    assert path.read_bytes() == b"".join(put)


def test_a_full_ring_takes_nothing_and_loses_nothing(fd: int, tmp_path: Path) -> None:
    buffer, path = progress_counters.ring_of(fd), tmp_path / "log"
    put = [line for line in lines(CAPACITY // 1000 + 5, length=1000) if buffer.put(line)]
    assert len(put) == CAPACITY // 1000
    with open(path, "wb", buffering=0) as stream:
        buffer.drain(stream.fileno())
    assert path.read_bytes() == b"".join(put)


@pytest.mark.parametrize("written", [0, 100, 150, 1000, 1999, 2000])
@pytest.mark.parametrize("noted", [False, True])
def test_whoever_comes_after_the_dead_completes_the_file(
    fd: int, tmp_path: Path, written: int, noted: bool
) -> None:
    """Killed before, in the middle of and after a write, and before it was noted."""
    buffer, path, put = progress_counters.ring_of(fd), tmp_path / "log", lines(20)
    for line in put:
        buffer.put(line)
    path.write_bytes(b"".join(put)[:written])
    if noted:
        buffer._words[1] = written // 2
    LineRing(fd, progress_counters.SIZE).salvage(path)
    assert path.read_bytes() == b"".join(put)


def test_the_file_of_one_that_put_nothing_into_the_ring_is_left_as_it_is(
    fd: int, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    progress_counters.ring_of(fd).salvage(path)
    assert path.read_bytes() == b"one\ntwo\n"
    path.write_bytes(b"one\ntwo\nthr")
    progress_counters.ring_of(fd).salvage(path)
    assert path.read_bytes() == b"one\ntwo\n"


def write(writer: RingWriter, text: str) -> None:
    writer.write(Kind.ERROR_RAISED, type="none", message=text)


def wait_for_seq(path: Path, seq: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (events := read_actor(path).events) or events[-1].seq < seq:
        assert time.monotonic() < deadline


def test_lines_come_to_the_file_by_themselves(fd: int, tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, "w0", time.monotonic_ns, progress_counters.ring_of(fd))
    write(writer, "first")
    wait_for_seq(tmp_path / "w0.jsonl", 0)
    write(writer, "second")
    writer.close()
    writer.close()
    log = read_actor(tmp_path / "w0.jsonl")
    assert log.ended and not log.problems and len(log.events) == 3


def test_a_line_longer_than_the_ring_comes_in_its_place(fd: int, tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, "w0", time.monotonic_ns, progress_counters.ring_of(fd))
    for text in ("before", "x" * (CAPACITY + 1), "after"):
        write(writer, text)
    writer.close()
    log = read_actor(tmp_path / "w0.jsonl")
    assert not log.problems
    assert [len(event.data["message"]) for event in log.events[:3]] == [6, CAPACITY + 1, 5]


@pytest.mark.real
@pytest.mark.parametrize(
    "rounds", [range(6), pytest.param(range(6, 25), marks=pytest.mark.long)], ids=str
)
def test_no_line_is_lost_or_doubled_by_sigkill(rounds: range, tmp_path: Path) -> None:
    for round_ in rounds:
        draw = random.Random(f"kill of a writer {round_}")
        directory = tmp_path / str(round_)
        directory.mkdir()
        longest = draw.choice([40, 400, 20_000])
        after = draw.randrange(1000, 6000)
        claimed = _kill_a_writer(directory, longest, after=after)
        log = read_actor(directory / "w0.jsonl")
        assert not log.problems
        assert log.events[-1].seq in (claimed, claimed + 1) and claimed >= after


def _kill_a_writer(directory: Path, longest: int, *, after: int) -> int:
    """Returns the last line that the writer had said it wrote."""
    children, started = Children(), []

    def start(fds: list[int]) -> int:
        argv = [sys.executable, "-c", CHILD, str(fds[1]), str(directory), str(longest)]
        started.append(subprocess.Popen(argv, pass_fds=fds))
        return started[0].pid

    path = directory / "w0.jsonl"
    children.begin("w0", start, log=path)
    try:
        deadline = time.monotonic() + LIMIT_S
        while children.mark("w0").last_seq < after:
            assert time.monotonic() < deadline
        children.signal("w0", signal.SIGKILL)
        while not any(isinstance(report, Exited) for report in children.wait(0.1)):
            assert time.monotonic() < deadline
        claimed = children.mark("w0").last_seq
    finally:
        children.close()
        started[0].returncode = -9  # reaped by its pidfd
    return claimed
