"""Real processes of places: one that is slowed down is named, and none is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainchaos.harness.host.processes import is_same, with_descendants
from trainchaos.harness.preflight.check import HOST, Asking, Finding, Task
from trainchaos.harness.preflight.links import AllReduce, Bandwidth
from trainchaos.harness.preflight.places import Places
from trainchaos.harness.preflight.preflight import FULL, fit
from trainchaos.recovery.process.processes import start_time

pytestmark = pytest.mark.real

NAMES = [f"cpu:{i}" for i in range(4)]
LIMIT_S = 90.0
STOPPED_S, RUNS_S = 0.15, 0.003


@pytest.fixture
def places() -> Iterator[Places]:
    """Four, and the host's; none is left, whatever the test did to them."""
    made = Places([*NAMES, HOST], limit_s=LIMIT_S)
    born = {pid: start_time(pid) for pid in made.pids.values()}
    assert len(born) == 5
    try:
        yield made
    finally:
        assert made.close() == []
        assert [pid for pid, started in born.items() if is_same(pid, started)] == []


@contextmanager
def pulses(pid: int) -> Iterator[None]:
    """Stop a process of ours again and again, so that it works little of the time."""
    over, fd = threading.Event(), os.pidfd_open(pid)

    def stop_and_go() -> None:
        while not over.wait(RUNS_S):
            signal.pidfd_send_signal(fd, signal.SIGSTOP)
            over.wait(STOPPED_S)
            signal.pidfd_send_signal(fd, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=LIMIT_S)
        os.close(fd)


@pytest.mark.long
def test_a_real_place_that_is_slowed_down_is_named(places: Places, tmp_path: Path) -> None:
    """At once on an idle machine. On a busy one the limit is as wide as the noise, and it is
    measured again: nobody else is named meanwhile.
    """
    until_s = time.monotonic() + LIMIT_S
    bad: list[Finding] = []
    with pulses(places.pids["cpu:2"]):
        while not any(row.place == "cpu:2" for row in bad):
            assert time.monotonic() < until_s, "it was never named"
            one = Asking(places, NAMES, tmp_path, until_s=until_s)
            one.run([Bandwidth()])
            bad = [row for row in one.findings.values() if row.state == "unfit"]
            assert all("cpu:2" in row.place for row in bad), one.findings
    assert bad[0].measured is not None and bad[0].bound is not None
    assert bad[0].measured < bad[0].bound and "top" in bad[0].todo
    assert len(bad[0].evidence["pairs"]) == 2


@pytest.mark.long
@pytest.mark.slow
def test_a_real_place_that_hangs_is_named_and_no_other(places: Places, tmp_path: Path) -> None:
    fd = os.pidfd_open(places.pids["cpu:2"])
    signal.pidfd_send_signal(fd, signal.SIGSTOP)
    os.close(fd)
    until_s = time.monotonic() + LIMIT_S
    one = Asking(places, NAMES, tmp_path, until_s=until_s)
    one.run([Bandwidth(), AllReduce()])
    bad = [(row.check, row.place) for row in one.findings.values() if row.state == "unfit"]
    assert bad == [("bandwidth", "cpu:2")], one.findings
    (every,) = (row for row in one.findings.values() if row.check == "all-reduce")
    assert every.state == "fit" and "3 places" in every.said


def test_a_place_that_does_not_answer_is_killed_and_the_others_go_on(places: Places) -> None:
    task = Task(place="cpu:0", budget_s=0.1)
    fd = os.pidfd_open(places.pids["cpu:1"])
    signal.pidfd_send_signal(fd, signal.SIGSTOP)
    tasks = dict.fromkeys(("cpu:0", "cpu:1"), task)
    answers = places.ask("product", tasks, limit_s=10.0)
    assert answers["cpu:0"].found is not None and answers["cpu:0"].found["wrong"] == 0
    assert (answers["cpu:1"].kind, answers["cpu:1"].found) == ("silent", None)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(1000 * LIMIT_S), "it was not killed"
    os.close(fd)
    again = places.ask("product", tasks, limit_s=LIMIT_S)
    assert again["cpu:0"].found is not None and again["cpu:1"].kind == "ended"
    unknown = places.ask("dance", {"cpu:0": task}, limit_s=LIMIT_S)
    assert (unknown["cpu:0"].kind, unknown["cpu:0"].error) == ("KeyError", "'dance'")


def test_one_place_before_it_rejoins(tmp_path: Path) -> None:
    found = fit("cpu:0", directory=tmp_path, total_s=LIMIT_S)
    assert found.fit, found
    assert [(row.check, row.place) for row in found.findings] == [
        ("memory", "cpu:0"),
        ("product", "cpu:0"),
    ]


def doctor(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    """The command, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainchaos", "doctor", "--preflight", *more],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def family(process: subprocess.Popen[str], least: int) -> list[tuple[int, int]]:
    """(pid, start time) of it and its descendants, once there are so many."""
    fd, until_s = os.pidfd_open(process.pid), time.monotonic() + LIMIT_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        while time.monotonic() < until_s:
            found = with_descendants([(process.pid, start_time(process.pid))])
            if len(found) >= least:
                return found
            assert not poll.poll(20), "it ended before its places began"
    finally:
        os.close(fd)
    raise AssertionError(f"it has not {least} processes")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.long),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_however_it_is_ended(tmp_path: Path, signum: int, code: int) -> None:
    process = doctor(tmp_path)
    rows = family(process, 7)  # itself, the fork server, four places and the host
    process.send_signal(signum)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (code, "")
    until_s = time.monotonic() + LIMIT_S
    never = threading.Event()
    while any(is_same(*row) for row in rows) and time.monotonic() < until_s:
        never.wait(0.02)
    assert [row for row in rows if is_same(*row)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.slow
def test_the_command_measures_this_machine(tmp_path: Path) -> None:
    process = doctor(tmp_path, "--format", "json", "--preflight-time", f"{LIMIT_S:.0f}s")
    out, err = process.communicate(timeout=2 * LIMIT_S)
    answer: dict[str, Any] = json.loads(out)
    absolute = {"memory", "product", "disk", "store"}
    rows = [row for row in answer["findings"] if row["check"] in absolute]
    assert [row["state"] for row in rows] == ["fit"] * 10, err
    assert {row["check"] for row in answer["findings"]} == set(FULL)
    assert process.returncode in (0, 1), "a shared machine may be uneven; its memory is right"
    assert answer["hardware"]["cores"] >= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_time_nothing_is_measured(tmp_path: Path) -> None:
    process = doctor(tmp_path, "--preflight-time", "100ms")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 7
    assert "torch was not imported" in out and "nothing could be measured" in out
