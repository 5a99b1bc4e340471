"""What a command leaves behind: which of it is known to be its own, and what is held against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.script.test_script_observer import COMMAND, Job, begun
from tests.support import arms
from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import Evidence, check_all
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.script.processes import leftovers
from trainchaos.harness.script.processes.leftovers import CommandLeftovers

HOLD = (
    "import mmap, os, sys, threading\nf = open(sys.argv[1] + '/mapped', 'wb+'); f.truncate(4096); m"
    " = mmap.mmap(f.fileno(), 4096); f.close()\ng = open(sys.argv[1] + '/open',"
    " 'wb')\nopen(sys.argv[1] + f'/torch_{os.getpid()}_1', 'wb').close()\nopen(sys.argv[1] +"
    " '/loose', 'wb').close(); print('ready', flush=True)\nthreading.Event().wait(300)\n"
)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with shared memory, in a session of its own."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "before").touch()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "shm")],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield child
    child.kill()
    child.communicate(timeout=LIMIT_S)


def ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None and child.stdout.readline() == "ready\n"


def test_shared_memory_is_the_commands_when_it_was_seen_to_have_it(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    shm = tmp_path / "shm"
    seen = CommandLeftovers(shm)
    seen._before = {"before"}  # it may be quicker than we are
    ready(child)
    seen.look(os.getpid(), lambda pid: "w1" if pid == child.pid else None)
    assert [one["name"] for one in seen.memory()] == [f"torch_{child.pid}_1"], (
        "somebody has the others"
    )
    os.kill(child.pid, signal.SIGKILL)
    child.wait(LIMIT_S)
    left = {one["name"]: one["held_by"] for one in seen.memory()}
    assert left == {"mapped": ["w1"], "open": ["w1"]}
    assert {path.name for path in shm.iterdir()} == {
        "before",
        "loose",
    }, "whose that is nobody knows"


def test_what_another_program_has_is_not_ours(child: subprocess.Popen[str], tmp_path: Path) -> None:
    seen = CommandLeftovers(tmp_path / "shm")
    seen._before = {"before"}
    ready(child)
    for _ in range(leftovers.TRIES + 1):
        seen.look(child.pid, lambda pid: None)  # below it there is nobody
    os.kill(child.pid, signal.SIGKILL)
    child.wait(LIMIT_S)
    assert seen.memory() == [] and (tmp_path / "shm" / "mapped").exists()


def test_who_lives_on_is_waited_for_and_then_named(
    child: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "LINGER_S", 0.1)
    ready(child)
    (left,) = [
        one
        for one in CommandLeftovers().processes(os.getpid(), os.getsid(0))
        if one["pid"] == child.pid
    ]
    assert left["detached"] and left["name"].startswith("python")
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT_S
    while any(
        one["pid"] == child.pid for one in CommandLeftovers().processes(os.getpid(), os.getsid(0))
    ):
        assert time.monotonic() < deadline
    monkeypatch.setattr(leftovers, "LINGER_S", LIMIT_S)
    os.kill(child.pid, signal.SIGKILL)
    assert not [
        one for one in CommandLeftovers().processes(os.getpid(), 0) if one["pid"] == child.pid
    ]


# ---- what is held against it


def checked(job: Job, control: Job | None = None) -> Finding:
    cell = arms.cell_of("own", [], workload=COMMAND, invariants=["no-orphans"])
    without = control.log() if control else None
    evidence = Evidence(arm="faulted", cell=cell, log=job.log(), control=without)
    return check_all(evidence)["no-orphans"]


def ended(
    *,
    left: list[dict[str, Any]] | None = None,
    memory: list[dict[str, Any]] | None = None,
    code: int = 0,
    killed: str = "",
) -> Job:
    job = begun(*range(1, 101))
    for name in ("w0", "w1"):
        how = (None, 9) if name == killed else (0, None)
        job.record(
            Kind.PROCESS_EXITED,
            process=name,
            pid=1,
            exit_code=how[0],
            signal=how[1],
            expected=True,
            last_seq=None,
        )
    extra = {} if left is None else {"left": left}
    job.record(Kind.COMMAND_ENDED, attempt=1, exit_code=code, signal=None, asked=False, **extra)
    more = {} if memory is None else {"of_command": memory}
    job.record(Kind.LEFTOVERS, processes=[], ports=[], shared_memory=[], **more)
    return job


def test_a_command_that_leaves_nothing_passes_and_so_do_logs_of_before() -> None:
    assert checked(ended(left=[], memory=[])).verdict == checked(ended()).verdict == "pass"


def test_a_process_that_lives_on_fails() -> None:
    found = checked(ended(left=[{"pid": 7, "name": "sleep", "detached": True}]))
    assert found.verdict == "fail"
    assert (
        found.witness
        == "the command ended well and left sleep (pid 7) running, in a session of its own"
    )


def test_what_a_command_that_failed_leaves_is_named() -> None:
    found = checked(ended(left=[{"pid": 7, "name": "sleep", "detached": False}], code=1))
    assert found.verdict == "pass"
    assert "sleep (pid 7), which a command that failed left running was removed" in found.witness


def test_what_stays_without_a_fault_too_is_a_warning() -> None:
    left = [{"pid": 7, "name": "sleep", "detached": True}]
    memory = [{"name": "psm_1", "held_by": ["w1"]}]
    both = checked(ended(left=left, memory=memory), ended(left=left, memory=memory))
    assert both.verdict == "pass" and both.witness.startswith("warning: the command ended well")
    assert both.witness.endswith("invariants: {leave_out: [no-orphans]}")
    assert checked(ended(left=left, memory=memory), ended(left=left)).verdict == "fail"
    assert checked(ended(left=left), ended()).verdict == "fail"


def test_shared_memory_that_stays_fails_unless_who_had_it_was_killed() -> None:
    memory = [{"name": "psm_1", "held_by": ["w1"]}]
    assert checked(ended(memory=memory)).witness == "the command left psm_1 (shared memory of w1)"
    assert checked(ended(memory=memory, killed="w1")).verdict == "pass"
    assert "psm_1" in checked(ended(memory=memory, killed="w1")).witness
    assert checked(ended(memory=memory, killed="w0")).verdict == "fail"
    assert checked(ended(memory=memory, code=1)).verdict == "pass", "it had no chance to remove it"
