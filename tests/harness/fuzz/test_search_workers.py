"""``chaos fuzz`` as its user starts it: several processes, Ctrl-C, and nothing left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
LIMIT_S = 120


def started(into: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainchaos", "fuzz", "--into", str(into), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    for options, said in (
        (("--strategy", "hotspare"), "unknown strategy"),
        (("--budget", "x"), "not a duration"),
    ):
        search = started(tmp_path, *options)
        told, _ = search.communicate(timeout=LIMIT_S)
        assert (search.returncode, said in told) == (2, True), told


@pytest.mark.long
def test_so_many_runs_are_the_same_search_each_time(tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        search = started(tmp_path, "--runs", "6", "--budget", "5m", "--seed", "3")
        told, _ = search.communicate(timeout=LIMIT_S)
        assert search.returncode == 0, told
        lines = [line for line in told.splitlines() if line.startswith("6 runs (")]
        said.append(lines[-1].partition("),")[2])  # a slow machine says it while it searches, too
    assert said[0] == said[1]
