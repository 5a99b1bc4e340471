"""Event logs and outputs stay within a limit, and what is dropped for that shows."""

from __future__ import annotations

import os
import signal
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.support.arms import cell_of
from tests.support.running import Running
from trainchaos.chaos.events.log import EventWriter, Kind, read_actor, read_log
from trainchaos.harness.judge.checkers import CHECKERS, Evidence, check
from trainchaos.harness.judge.record.whole import broken
from trainchaos.recovery.process.logroom import BLOCK, LogRoom
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.event_ring import RingWriter

MB = 1 << 20
STARTED = ("w0", "w1", "s2", "s3")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainchaos.recovery.process.logroom.EVERY_S", 0.0)


def file(path: Path, size: int, age_s: float) -> Path:
    path.write_bytes(b"x" * size)
    now_s = time.time()
    os.utime(path, (now_s - age_s, now_s - age_s))
    return path


def held(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_files_of_those_who_are_gone_go_first_and_the_oldest_of_them(memory: Path) -> None:
    kept = [
        file(memory / "orchestrator.jsonl", MB, 900),
        file(memory / "w0.jsonl", MB, 800),
        file(memory / "supervisor.lock", MB, 900),
        file(memory / "s3.log", MB, 1),
    ]
    gone = [file(memory / "w1.jsonl", MB, 700), file(memory / "s2.log", MB, 600)]
    retention = LogRoom([memory, memory / "none"], 6 * MB, before=STARTED)
    assert retention.look({"w0"}) is None, "there is room for all of it"
    cleared = LogRoom([memory], 4 * MB, before=STARTED).look({"w0"})
    assert (
        cleared is not None and cleared.files == ("w1.jsonl", "s2.log") and cleared.bytes == 2 * MB
    )
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)


def test_the_beginning_of_what_somebody_still_writes_is_taken_away(memory: Path) -> None:
    fd = progress_counters.create()
    ring = progress_counters.ring_of(fd)
    os.close(fd)
    writer, path = RingWriter(memory, "w0", time.monotonic_ns, ring), memory / "w0.jsonl"
    for number in range(2000):
        writer.write(Kind.ERROR_RAISED, type="none", message=f"{number} {'x' * 1000}")
    writer.flush()
    size = path.stat().st_size
    cleared = LogRoom([memory], MB, before=STARTED).look({"w0"})
    if cleared is None:
        pytest.skip("this file system cannot give back a part of a file")
    assert cleared.files == ("w0.jsonl",) and cleared.cut == cleared.bytes > MB
    assert path.stat().st_size == size and held(memory) < MB
    writer.write(Kind.ERROR_RAISED, type="none", message="after")
    writer.flush()
    assert LogRoom([memory], MB, before=STARTED).look({"w0"}) is None
    writer.write(Kind.ERROR_RAISED, type="none", message="in the ring")
    writer.abandon()
    ring.salvage(path)  # as the supervisor does: the size still tells what is missing
    log = read_actor(path)
    numbers = [event.seq for event in log.events]
    assert numbers == list(range(numbers[0], 2002)) and numbers[0] > 1000
    (problem,) = log.problems
    assert "bytes were dropped" in problem and int(problem.split()[3]) > cleared.cut - BLOCK


def test_it_looks_now_and_then(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainchaos.recovery.process.logroom.EVERY_S", 60.0)
    retention = LogRoom([memory], MB)
    assert retention.look(()) is None
    retention.begins("w1")
    file(memory / "w1.jsonl", 3 * MB, 1)
    assert retention.look(()) is None and (memory / "w1.jsonl").exists()


def test_what_was_deleted_makes_the_log_incomplete(memory: Path) -> None:
    writer = EventWriter(memory, "orchestrator", time.monotonic_ns)
    writer.write(Kind.FILES_DROPPED, files=["w1.jsonl"], bytes=5, why="more than 1 GB")
    writer.close()
    assert broken(read_log(memory))["w1"] == "there is no w1.jsonl"


def test_files_that_the_job_did_not_write_are_neither_counted_nor_touched(memory: Path) -> None:
    """The user may name a directory that holds other logs, of an earlier job too."""
    theirs = [
        file(memory / name, 2 * MB, 900)
        for name in (
            "nginx.log",
            "w1.log",
            "w0.1.log",
            "w00.log",
            "s1.jsonl",
            "metrics.jsonl",
            "w9.log",
        )
    ]
    room = LogRoom([memory, memory], 3 * MB)
    for name in ("w0", "w1", "s2", "keeper-0"):
        room.begins(name)
    later = file(memory / "w77.log", 2 * MB, 800)  # another program's, which came meanwhile
    link = memory / "s2.jsonl"
    link.symlink_to(theirs[0])
    assert room.look(()) is None, "nothing of it is this job's"
    ours = [
        file(memory / name, MB, 1)
        for name in ("w0.log", "keeper-0.log", "w1.jsonl", "orchestrator.jsonl")
    ]
    cleared = room.look(())
    assert cleared is not None and set(cleared.files) < {"w0.log", "keeper-0.log", "w1.jsonl"}
    assert all(path.exists() for path in (*theirs, later, link, ours[-1]))


def test_who_takes_a_job_over_knows_its_files_and_no_others(memory: Path) -> None:
    old, theirs = file(memory / "w1.jsonl", 3 * MB, 900), file(memory / "access.log", 3 * MB, 900)
    room = LogRoom([memory], MB, before=["w1"])
    cleared = room.look(())
    assert cleared is not None and cleared.files == ("w1.jsonl",)
    assert not old.exists() and theirs.exists()


def test_looking_takes_no_more_memory_with_many_files(memory: Path) -> None:
    room = LogRoom([memory], MB, before=[f"w{number}" for number in range(3000)])

    def peak(files: range) -> int:
        for number in files:
            (memory / f"w{number}.jsonl").touch()
        tracemalloc.start()
        try:
            assert room.look(()) is None
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few = peak(range(100))
    # Other threads of this process count too: the least of three looks is nearest to what a look
    # takes.
    assert min(peak(range(100, 3000)) for _ in range(3)) < few + 64_000, (
        "more than 20 bytes for each"
    )


OFTEN = (
    "import sys; from trainchaos.recovery import run; "
    "from trainchaos.recovery.process import logroom; "
    "logroom.EVERY_S = 0.0; sys.exit(run.main())"
)
TALKS = """
import torch
from trainchaos import recovery
job = recovery.join(samples=64, steps=1_000_000, global_batch=4)
model = torch.nn.Linear(2, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
while job.running():
    with job.step() as step:
        step.backward(model(torch.ones(len(step.samples), 2)).sum())
        step.commit()
        if step.number <= 300:
            print("x" * 65535, flush=True)  # a block of 64 KiB
"""


@pytest.mark.real
@pytest.mark.long
def test_a_job_that_says_more_than_there_is_room_for_is_kept_within_it_and_proves_nothing(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks print 40 MB; there is room for 12, the supervisor's 4 among them."""
    limit, printed = 12 * MB, 2 * 300 * BLOCK
    monkeypatch.setattr(Running, "command", (sys.executable, "-c", OFTEN))
    (memory / "talks.py").write_text(TALKS)
    (logs := memory / "logs").mkdir()
    options = (
        "--ranks",
        "2",
        "--strategy",
        "drop-replica",
        "--logs",
        logs,
        "--log-limit",
        f"{limit / 1e9}",
    )
    job = Running(memory, *options, memory / "talks.py")

    def said() -> int:
        return sum(path.stat().st_size for path in logs.iterdir())

    try:
        job.wait_for(lambda: said() >= printed and held(logs) + held(job.events) <= limit)
    finally:
        job.process.send_signal(signal.SIGTERM)
        code = job.end()
    assert code == 143, job.said
    log = read_log(job.events)
    counted = sum(event.data["bytes"] for event in log.of(Kind.FILES_DROPPED))
    assert limit < counted <= said() - held(logs) + 4 * BLOCK
    evidence = Evidence(arm="control", cell=cell_of("hot-spare", []), log=log)
    assert {check(checker, evidence).verdict for checker in CHECKERS.values()} == {"inconclusive"}
