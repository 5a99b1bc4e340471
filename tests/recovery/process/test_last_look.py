"""A stopped process that is being read from outside is killed a moment later. Real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainchaos.recovery.process.local import LOOK_EVERY_S, LOOK_LIMIT_S, kill_after
from trainchaos.recovery.process.outside_stacks import PROGRAM
from trainchaos.recovery.process.stacks import STACK_SIGNAL, StackReader

BOUND_S = 120.0


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process
    process.kill()
    process.wait(BOUND_S)


def is_gone(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_it_lives_while_it_is_looked_at_and_no_longer(stopped: subprocess.Popen[bytes]) -> None:
    answers = [True, True, True, False]
    seen: list[bool] = []
    pidfd = os.pidfd_open(stopped.pid)

    def looks() -> bool:
        seen.append(is_gone(stopped))
        return answers[len(seen) - 1]

    thread = kill_after(pidfd, looks, pause=lambda s: None)
    os.close(pidfd)  # a copy is held
    thread.join(BOUND_S)
    stopped.wait(BOUND_S)
    assert seen == [False] * 4 and stopped.returncode == -signal.SIGKILL


def test_it_is_not_looked_at_for_long(stopped: subprocess.Popen[bytes]) -> None:
    clock_s = [100.0]

    def pause(seconds: float) -> None:
        assert seconds == LOOK_EVERY_S and not is_gone(stopped)
        clock_s[0] += seconds

    pidfd = os.pidfd_open(stopped.pid)
    kill_after(pidfd, lambda: True, now_s=lambda: clock_s[0], pause=pause).join(BOUND_S)
    os.close(pidfd)
    stopped.wait(BOUND_S)
    assert LOOK_LIMIT_S <= clock_s[0] - 100.0 <= LOOK_LIMIT_S + 2 * LOOK_EVERY_S


def test_one_that_goes_on_is_not_looked_at_any_more(
    stopped: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was given up must not write to the job again."""
    program = tmp_path / PROGRAM
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reader = StackReader(stopped.pid)
    reader.before(STACK_SIGNAL)
    assert reader.looks
    os.kill(stopped.pid, signal.SIGCONT)
    waited = select.poll()
    for _ in range(int(BOUND_S * 100)):
        if not reader.looks:
            break
        waited.poll(10)
    assert not reader.looks
    reader.close()
