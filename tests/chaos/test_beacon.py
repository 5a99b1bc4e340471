"""The one line in a training script: silent outside a run, cheap inside, harmless always."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.costs import calls
from trainchaos import beacon
from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.harness.script.listen.progress import (
    LINE_LIMIT,
    BeaconReader,
    GrowingFile,
    RegexReader,
    parse_beacon,
)

MOST_CALLS = 40  # of Python and C; 27 today


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "beacon.txt"
    path.touch()
    monkeypatch.setenv(beacon.VARIABLE, str(path))
    monkeypatch.setenv("RANK", "3")
    return path


def test_outside_a_run_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(beacon.VARIABLE, raising=False)
    opened: list[object] = []
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(arguments))
    beacon.step(1, loss=0.5)
    assert opened == []


def test_a_report_is_read_back(heard: Path) -> None:
    before = time.monotonic_ns()
    beacon.step(7, loss=0.1 + 0.2, samples=16)
    beacon.step(8)
    first, second = BeaconReader(GrowingFile(heard)).read()
    assert (first.step, first.rank, first.pid, first.loss, first.samples) == (
        7,
        3,
        os.getpid(),
        0.1 + 0.2,
        16,
    )
    assert first.time_ns is not None and before <= first.time_ns <= time.monotonic_ns()
    assert (second.step, second.loss, second.samples) == (8, None, None)


def test_a_busy_process_says_so(heard: Path) -> None:
    with beacon.busy("evaluation on the test set\n1 1 1 1 1 1 1", limit_s=90):
        pass
    beacon.busy("x")
    first, second, third = BeaconReader(GrowingFile(heard)).read()
    assert (first.busy_s, first.rank, first.pid) == (90, 3, os.getpid())
    assert (second.busy_s, third.busy_s) == (0, 3600)
    assert (first.what, second.what, third.what) == (
        "evaluation-on-the-test-set-1-1-1-1-1-1-1"[:40],
        "-",
        "x",
    )
    assert len(parse_beacon(f"1 5 7 3 busy 90.0 {'y' * 4000}").what) == 40  # type: ignore[union-attr]


@pytest.mark.parametrize("limit", ["-1", "nan", "inf", "1e99", "x"])
def test_a_busy_line_that_makes_no_sense_is_refused(limit: str) -> None:
    assert parse_beacon(f"1 5 7 3 busy {limit} evaluation") is None
    assert parse_beacon("1 5 7 3 busy 90.0 evaluation") is not None


def test_a_forked_process_speaks_for_itself(heard: Path) -> None:
    beacon.step(1)
    child = os.fork()
    if child == 0:
        beacon.step(2)
        os._exit(0)
    os.waitpid(child, 0)
    assert [progress.pid for progress in BeaconReader(GrowingFile(heard)).read()] == [
        os.getpid(),
        child,
    ]


@pytest.mark.parametrize("step", [1, "x", None, 1e400, object()])
def test_it_never_raises(heard: Path, monkeypatch: pytest.MonkeyPatch, step: Any) -> None:
    monkeypatch.setenv(beacon.VARIABLE, str(heard.parent / "nowhere" / "file"))
    beacon.step(step, loss=object())  # type: ignore[arg-type]


def test_a_report_is_one_write_and_few_calls(heard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is measured by ``benchmarks.calls``."""
    beacon.step(0)
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(data))
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it is open"))
    assert calls(lambda: beacon.step(1, loss=0.5, samples=16)) < MOST_CALLS
    assert len(written) == 1


def test_a_copy_works_without_the_package(heard: Path) -> None:
    copy = heard.parent / "lonely" / "beacon.py"
    copy.parent.mkdir()
    shutil.copy(beacon.__file__, copy)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import beacon; beacon.step(5)"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(copy.parent)], check=True, timeout=120
    )
    assert [progress.step for progress in BeaconReader(GrowingFile(heard)).read()] == [5]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "1",
        "2 5 6 0 1 - -",
        "1 5 6 0 -1 - -",
        "1 5 6 0 1 - - -",
        "1 5 6 0 1e3 - -",
        "1 x 6 0 1 - -",
        "1 5 99999999999 0 1 - -",
        "1 5 6 0 9999999999999999999999 - -",
        "1 5 6 0 １ - -",
    ],
)
def test_what_is_no_report_is_refused(line: str) -> None:
    assert parse_beacon(line) is None


@given(st.text(max_size=200))
def test_no_line_gives_an_exception(line: str) -> None:
    report = parse_beacon(line)
    assert report is None or (report.step >= 0 and report.pid > 0)


def test_long_lines_are_cut_and_do_not_hide_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(
        b"x" * (3 * LINE_LIMIT) + b"\nstep 1\nstep " + b"2" * 30 + b"\n\xff\xfe step 3\rstep 4"
    )
    lines = GrowingFile(path)
    reader = RegexReader(lines, RegexProgress(regex=r"step (?P<step>\d+)"), steps=100)
    assert [progress.step for progress in reader.read()] == [1, 3]
    assert reader.refused == 1  # a step of 30 digits
    with path.open("ab") as stream:
        stream.write(b"2\n")
    assert [progress.step for progress in reader.read()] == [42]  # a line is one only with its end
    assert max(len(line) for line in lines.last) <= LINE_LIMIT


def test_a_line_without_end_is_not_kept_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"step 7 " + b"x" * LINE_LIMIT)
    reader = RegexReader(GrowingFile(path), RegexProgress(regex=r"step (?P<step>\d+)"), steps=100)
    assert [progress.step for progress in reader.read()] == [7]
    with path.open("ab") as stream:
        stream.write(b" step 8\nstep 9\n")
    assert [progress.step for progress in reader.read()] == [9]


def test_prefixes_colours_and_thousands(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("[default0]:\x1b[32mstep 1,200\x1b[0m loss nan\n[rank1] step 1_201 loss 2e-3\n")
    reader = RegexReader(
        GrowingFile(path),
        RegexProgress(regex=r"step (?P<step>[\d,_]+) loss (?P<loss>\S+)"),
        steps=100,
    )
    first, second = reader.read()
    assert first.step == 1200 and first.loss is not None and math.isnan(first.loss)
    assert (second.step, second.loss) == (1201, 0.002)


def test_a_rank_that_is_numbered_anew_says_its_new_number(
    heard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beacon.step(1)
    monkeypatch.setenv("RANK", "1")
    beacon.step(2)
    assert [progress.rank for progress in BeaconReader(GrowingFile(heard)).read()] == [3, 1]
