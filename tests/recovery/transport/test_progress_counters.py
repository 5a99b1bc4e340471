"""Progress marks: one page of shared memory, written by a rank and read by its supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.progress_counters import Mark, MarkPage


@pytest.fixture
def fd() -> Iterator[int]:
    number = progress_counters.create()
    yield number
    os.close(number)


def test_a_new_mark_says_nothing_has_happened(fd: int) -> None:
    assert MarkPage(fd).read() == Mark(
        generation=0, step=0, phase="idle", collective=0, time_ns=0, committed=0, last_seq=-1
    )


def test_what_one_side_writes_the_other_reads(fd: int) -> None:
    rank, supervisor = MarkPage(fd), MarkPage(fd)
    before = time.monotonic_ns()
    rank.begin(3, 57)
    rank.enter(progress_counters.COLLECTIVE)
    rank.collective(4)
    rank.commit(56)
    rank.wrote(812)
    mark = supervisor.read()
    assert (mark.generation, mark.step, mark.phase, mark.collective) == (3, 57, "collective", 4)
    assert (mark.committed, mark.last_seq) == (56, 812)
    assert before <= mark.time_ns <= time.monotonic_ns()


@pytest.mark.parametrize("number", range(len(progress_counters.PHASES)))
def test_every_phase_has_its_name_and_number(fd: int, number: int) -> None:
    page = MarkPage(fd)
    page.enter(number)
    assert page.read().phase == progress_counters.PHASES[number]
    assert getattr(progress_counters, progress_counters.PHASES[number].upper()) == number


@pytest.mark.parametrize("move", ["enter", "collective", "touch"])
def test_progress_moves_the_time(fd: int, move: str) -> None:
    page = MarkPage(fd)
    assert page.read().time_ns == 0
    getattr(page, move)(*([] if move == "touch" else [1]))
    assert page.read().time_ns > 0


def test_the_first_event_counts(fd: int) -> None:
    page = MarkPage(fd)
    page.wrote(0)
    assert page.read().last_seq == 0


def test_a_mark_outlives_its_rank(fd: int) -> None:
    code = (
        "import os, signal, sys\n"
        "from trainchaos.recovery.transport.progress_counters import MarkPage\n"
        "page = MarkPage(int(sys.argv[1]))\n"
        "page.begin(2, 9); page.enter(3); page.wrote(41)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], timeout=60)
    assert done.returncode == -9
    mark = MarkPage(fd).read()
    assert (mark.generation, mark.step, mark.phase, mark.last_seq) == (2, 9, "backward", 41)


def test_a_closed_page_is_closed(fd: int) -> None:
    page = MarkPage(fd)
    page.close()
    with pytest.raises(ValueError, match="released"):
        page.read()
