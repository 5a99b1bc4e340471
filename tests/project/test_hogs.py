"""Hogs share their two processors with the test, on a machine of any size, and leave nothing
behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hogs import HOGS, PROCESSORS, URGENCIES, hogs
from tests.support.running import until


@pytest.mark.slow
@pytest.mark.parametrize("nice", URGENCIES.values(), ids=URGENCIES)
def test_hogs_and_what_a_test_starts_have_the_same_two_processors(nice: int) -> None:
    before = os.sched_getaffinity(0)
    ask = "import os; print(sorted(os.sched_getaffinity(0)))"
    with hogs(nice) as pids:
        mine = os.sched_getaffinity(0)
        assert len(mine) == min(PROCESSORS, len(before)) and mine <= before
        said = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=True
        )
        assert said.stdout.strip() == str(sorted(mine))
        assert len(pids) == HOGS and all(os.sched_getaffinity(pid) == mine for pid in pids)
        until(lambda: all(os.getpriority(os.PRIO_PROCESS, pid) >= nice for pid in pids))
    assert os.sched_getaffinity(0) == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_hogs_end_with_whoever_started_them() -> None:
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from tests.support.hogs import hogs\n"
        "with hogs() as pids: print(*pids, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parents[2])],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    left = [int(pid) for pid in done.stdout.split()]
    assert len(left) == HOGS
    until(lambda: not any(ours(pid) for pid in left))


def ours(pid: int) -> bool:
    """Whether it is there and a hog still."""
    try:
        return b"getppid" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
