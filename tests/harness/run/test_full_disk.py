"""A disk that takes no event lines: work goes on, what is dropped is counted, and nothing is
claimed of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.running import Running, kill, until
from trainchaos.chaos import disk
from trainchaos.chaos.errors import InfrastructureError, LogError
from trainchaos.chaos.events import writer as events
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import EventWriter, Kind, read_actor, read_log
from trainchaos.harness.judge.checkers import check
from trainchaos.harness.judge.evidence.evidence import failed, passed
from trainchaos.recovery.cli.takeover_log import read_takeover_log
from trainchaos.recovery.transport import event_ring, progress_counters
from trainchaos.recovery.transport.event_ring import CAPACITY, RingWriter

ROOT = Path(__file__).resolve().parents[3]
JOB = ROOT / "tests/support/clusters/longrun_job.py"


class Disk:
    """Stands for the disk below a module's ``os``: full or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, *names: str) -> None:
        self.full = False
        for name in names:
            real = getattr(os, name)

            def call(*arguments: object, real: object = real) -> object:
                if self.full:
                    raise disk.full()
                return real(*arguments)  # type: ignore[operator]

            monkeypatch.setattr(module.os, name, call)  # type: ignore[attr-defined]


def error(writer: EventWriter, text: str) -> int:
    return writer.write(Kind.ERROR_RAISED, type="none", message=text).seq


def test_events_that_do_not_fit_are_numbered_dropped_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Disk(monkeypatch, events, "write")
    writer = EventWriter(tmp_path, "w0", time.monotonic_ns)
    error(writer, "0")
    below.full = True
    assert [error(writer, "lost") for _ in range(3)] == [1, 2, 3]
    below.full = False
    assert error(writer, "again") == 5
    writer.close()
    log = read_actor(tmp_path / "w0.jsonl")
    assert [event.seq for event in log.events] == [0, 4, 5, 6] and log.ended
    assert log.problems == ("w0.jsonl:2: events 1 to 3 were dropped: No space left on device",)


def test_a_line_that_fits_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EventWriter(tmp_path, "w0", time.monotonic_ns)
    error(writer, "0")
    real = os.write
    monkeypatch.setattr(events.os, "write", lambda fd, data: real(fd, data[:10]))
    error(writer, "torn")
    monkeypatch.setattr(events.os, "write", real)
    error(writer, "whole")
    writer.close()
    log = read_actor(tmp_path / "w0.jsonl")
    assert [event.seq for event in log.events] == [0, 2, 3, 4] and len(log.problems) == 1


def test_a_file_that_cannot_be_made_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Disk(monkeypatch, events, "open")
    below.full = True
    writer = EventWriter(tmp_path, "w0", time.monotonic_ns)
    error(writer, "lost")
    assert not (tmp_path / "w0.jsonl").exists()
    below.full = False
    error(writer, "kept")
    writer.close()
    assert [event.seq for event in read_actor(tmp_path / "w0.jsonl").events] == [1, 2, 3]
    with pytest.raises(LogError, match="File exists"):
        EventWriter(tmp_path, "w0", time.monotonic_ns)


def test_a_closed_writer_opens_nothing(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, "w0", time.monotonic_ns)
    writer.close()
    error(writer, "late")
    assert len(read_actor(tmp_path / "w0.jsonl").events) == 1


def test_room_is_kept_ahead_for_who_must_not_lose_a_line(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, "orchestrator", time.monotonic_ns, reserve=1 << 20)
    error(writer, "first")
    found = (tmp_path / "orchestrator.jsonl").stat()
    assert found.st_size < 1000 < 1 << 20 <= found.st_blocks * 512
    for _ in range(30):
        error(writer, "x" * 40_000)
    found = (tmp_path / "orchestrator.jsonl").stat()
    assert found.st_blocks * 512 >= found.st_size + (1 << 18), (
        "more was kept when half of it was used"
    )
    writer.close()
    assert not read_actor(tmp_path / "orchestrator.jsonl").problems


def patience(writer: RingWriter, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long this thread would wait for the file, each time that it moves lines itself."""
    waits, drain, here = list[float](), writer._drain, threading.get_ident()

    def noted(limit_s: float) -> None:
        if threading.get_ident() == here:
            waits.append(limit_s)
        drain(limit_s)

    monkeypatch.setattr(writer, "_drain", noted)
    return waits


def test_a_full_ring_drops_events_at_once_and_tells_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Disk(monkeypatch, event_ring, "writev")
    fd = progress_counters.create()
    writer = RingWriter(tmp_path, "w0", time.monotonic_ns, progress_counters.ring_of(fd))
    os.close(fd)
    error(writer, "0")
    until(lambda: (tmp_path / "w0.jsonl").stat().st_size > 0)
    below.full = True
    count, waits = 2 * CAPACITY // 5000, patience(writer, monkeypatch)
    for _ in range(count):
        error(writer, "x" * 5000)
    assert sum(waits) <= event_ring.PATIENCE_S and writer.last_seq == count
    below.full = False
    until(lambda: (tmp_path / "w0.jsonl").stat().st_size > CAPACITY // 2)
    error(writer, "again")
    writer.close()
    log = read_actor(tmp_path / "w0.jsonl")
    (told,) = [event for event in log.events if event.kind is Kind.EVENTS_DROPPED]
    assert told.data["first"] > 100 and told.data["last"] == count and told.seq == count + 1
    assert len(log.problems) == 1 and log.ended


def test_a_slow_disk_holds_a_rank_up_once_and_not_at_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = progress_counters.create()
    writer = RingWriter(tmp_path, "w0", time.monotonic_ns, progress_counters.ring_of(fd))
    os.close(fd)
    with writer._draining:  # as if a write to the file took for ever
        waits = patience(writer, monkeypatch)
        for _ in range(2 * CAPACITY // 5000):
            error(writer, "x" * 5000)
        assert sum(waits) == event_ring.PATIENCE_S
    error(writer, "again")
    writer.close()
    assert len(read_actor(tmp_path / "w0.jsonl").problems) == 1


def test_a_supervisor_whose_events_were_dropped_is_not_taken_over_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Disk(monkeypatch, events, "write")
    writer = EventWriter(tmp_path, "orchestrator", time.monotonic_ns)
    below.full = True
    error(writer, "lost")
    below.full = False
    error(writer, "kept")
    with pytest.raises(InfrastructureError, match="were dropped"):
        read_takeover_log(tmp_path)


def test_what_was_dropped_proves_nothing_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Disk(monkeypatch, events, "write")
    judged = []
    for full in (False, True):
        folder = tmp_path / f"full-{full}"
        folder.mkdir()
        writer = EventWriter(folder, "orchestrator", time.monotonic_ns)
        writer.write(Kind.ACTOR_STARTED, pid=os.getpid(), host="h", wall_ns=time.time_ns())
        below.full = full
        error(writer, "lost")
        below.full = False
        writer.write(Kind.ACTOR_ENDED)
        writer.close()
        judged.append(SimpleNamespace(log=read_log(folder)))
    for finding in (failed("lost samples"), passed("all of them")):
        whole, holed = (check(lambda _, finding=finding: finding, one) for one in judged)  # type: ignore[misc, arg-type]
        assert (whole, holed.verdict) == (finding, "inconclusive")


def test_output_that_cannot_be_kept_goes_nowhere(tmp_path: Path) -> None:
    script = (
        "import errno, os; from pathlib import Path;"
        "from trainchaos.recovery.process import processes; real = os.open\n"
        "def refuse(path, *rest):\n    if str(path) == 'out': raise OSError(errno.ENOSPC,"
        " 'full')\n    return real(path, *rest)\nos.open = refuse;"
        " processes.redirect_output(Path('out')); print('x', flush=True)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB, for root alone."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", place],
        capture_output=True,
        timeout=120,
        check=False,
    ).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], timeout=120, check=True)


@pytest.mark.real
@pytest.mark.long
def test_a_job_on_a_full_disk_trains_on_and_recovers(small_disk: Path) -> None:
    job = Running(small_disk, "--ranks", "2", "--spares", "1", "--logs", small_disk / "logs", JOB)
    tail = EventLogTail(job.events / "orchestrator.jsonl")
    seen = []

    def count(kind: Kind) -> int:
        seen.extend(tail.read())
        return sum(event.kind is kind for event in seen)

    try:
        job.wait_for(lambda: job.trained(20) and count(Kind.PROCESS_READY) == 3)
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as stream:
            while True:
                stream.write(b"x" * 4096)
        for failures in (1, 2, 3):
            pid = next(
                e.data["pid"]
                for e in reversed(seen)
                if e.kind is Kind.PROCESS_READY
                for e in seen
                if e.kind is Kind.PROCESS_SPAWNED and e.data["process"] == _second(seen)
            )
            kill(pid)
            job.wait_for(lambda n=failures: count(Kind.GENERATION_READY) == n + 1)  # type: ignore[misc]
            job.wait_for(lambda n=failures: count(Kind.PROCESS_READY) == n + 3)  # type: ignore[misc]
        assert os.statvfs(small_disk).f_bavail == 0, (
            "the supervisor's lines went where room was kept for them"
        )
        ballast.unlink()
        size = (job.events / "w0.jsonl").stat().st_size
        job.wait_for(lambda: (job.events / "w0.jsonl").stat().st_size > size)
    finally:
        job.process.send_signal(signal.SIGTERM)
        code = job.end()
    assert code == 143
    assert not read_actor(job.events / "orchestrator.jsonl").problems


def _second(seen: list[events.Event]) -> str:
    """Who holds rank 1."""
    return str([e for e in seen if e.kind is Kind.GENERATION_READY][-1].data["members"][1])
