"""Undo records: each undoes exactly what it names, once as well as twice, and nothing of anybody
else.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.running import LIMIT_S
from trainchaos.harness.host import processes, shared_memory
from trainchaos.harness.undo.base import mounts
from trainchaos.harness.undo.records import (
    MARKER,
    FreeShm,
    KillMarked,
    KillProcess,
    KillSession,
    RemoveCgroup,
    RemoveQdisc,
    RemoveTree,
    Unmount,
)

pytestmark = pytest.mark.real
IDLE = "import sys; print('up', flush=True); sys.stdin.read()"
# The leader's child leaves the session when argv[1] says so, says its pid, and both wait.
FAMILY = """
import os, sys, time
reader, writer = os.pipe()
if os.fork() == 0:
    if sys.argv[1] == "daemon":
        os.setsid()
    os.write(writer, str(os.getpid()).encode())
    sys.stdin.read()
    os._exit(0)
print(os.read(reader, 32).decode(), flush=True)
sys.stdin.read()
"""
# A child that has nothing of its parent but the parent.
STRANGER = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program in a session of its own that says a line and waits; all are gone
    afterwards.
    """
    started: list[subprocess.Popen[str]] = []

    def go(
        code: str = IDLE, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        started.append(process)
        return process

    yield go
    for process in started:
        process.kill()
        process.wait(timeout=LIMIT_S)
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


def said(process: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def gone(pid: int) -> bool:
    """Whether a process ends before the limit; one that is not ours to reap may stay a zombie."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(LIMIT_S * 1000))
    os.close(pidfd)
    return ended


def alive(pid: int) -> bool:
    """Whether it executes now."""
    return processes.state(pid) not in ("X", "Z")


# ---- processes


def test_a_process_is_killed_once_and_a_second_time_is_fine(start: Start) -> None:
    process = start()
    said(process)
    record = KillProcess.of(process.pid, "w0")
    first, second = record.undo(), record.undo()
    assert process.wait(timeout=LIMIT_S) == -signal.SIGKILL
    assert (first.ok, first.did) == (
        True,
        True,
    ) and first.text == f"killed process {process.pid} (w0)"
    assert (second.ok, second.did) == (True, False)


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another"}])
def test_another_process_with_the_same_pid_is_not_touched(
    start: Start, change: dict[str, object]
) -> None:
    process = start()
    said(process)
    for record in (KillProcess.of(process.pid), KillSession.of(process.pid)):
        outcome = record.model_copy(update=change).undo()
        assert outcome.ok and not outcome.did
    assert process.poll() is None and alive(process.pid)


def test_a_stopped_process_is_killed_as_it_is(start: Start) -> None:
    process = start()
    said(process)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert KillProcess.of(process.pid).undo().did


def test_a_session_is_killed_with_its_members(start: Start) -> None:
    leader = start(FAMILY, "member")
    child = int(said(leader))
    outcome = KillSession.of(leader.pid).undo()
    assert outcome.ok and outcome.did, outcome
    assert gone(child) and leader.wait(timeout=LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("marked", [True, False])
def test_what_is_left_of_a_session_is_ours_only_with_our_marker(start: Start, marked: bool) -> None:
    marker = secrets.token_hex(8)
    leader = start(FAMILY, "member", environment={MARKER: marker} if marked else {})
    child = int(said(leader))
    record = KillSession.of(leader.pid).model_copy(update={"marker": marker})
    leader.kill()
    leader.wait(timeout=LIMIT_S)
    outcome = record.undo()
    assert outcome.ok and outcome.did == marked
    assert gone(child) if marked else alive(child)
    assert leader.stdin is not None
    leader.stdin.close()  # ends the child that was left alone


def test_marked_processes_are_killed_wherever_they_went(start: Start) -> None:
    marker = secrets.token_hex(8)
    stranger = start()
    said(stranger)
    parent = start(FAMILY, "daemon", environment={MARKER: marker})
    child = int(said(parent))
    record = KillMarked(marker=marker, since=processes.start_time(parent.pid))
    assert {pid for pid, _ in record.members()} == {parent.pid, child}
    assert record.undo().did and not record.undo().did
    assert gone(child) and parent.wait(timeout=LIMIT_S) == -signal.SIGKILL
    assert stranger.poll() is None


@pytest.mark.parametrize("by", ["marker", "session"])
def test_a_child_without_session_and_marker_goes_with_its_parent(start: Start, by: str) -> None:
    marker = secrets.token_hex(8)
    parent = start(STRANGER, environment={MARKER: marker})
    child = int(said(parent))
    since = processes.start_time(parent.pid)
    record = (
        KillMarked(marker=marker, since=since) if by == "marker" else KillSession.of(parent.pid)
    )
    assert record.undo().did
    assert gone(child) and parent.wait(timeout=LIMIT_S) == -signal.SIGKILL


def test_marked_processes_older_than_the_run_are_not_touched(start: Start) -> None:
    marker = secrets.token_hex(8)
    process = start(environment={MARKER: marker})
    said(process)
    record = KillMarked(marker=marker, since=processes.start_time(process.pid) + 1)
    assert not record.undo().did and process.poll() is None


def test_who_heals_is_not_healed_away(start: Start) -> None:
    marker = secrets.token_hex(8)
    code = (
        "import sys; from trainchaos.harness.undo.records import KillMarked; sys.stdin.readline();"
        f"print(KillMarked(marker={marker!r}, since=0).undo().did)"
    )
    process = start(
        code.replace("import sys;", f"import sys; sys.path[:0] = {sys.path!r};"),
        environment={MARKER: marker},
    )
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert said(process) == "False"


# ---- mounts, control groups, queues

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root mounts and makes control groups"
)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A place with a small file system of ours."""
    place = tmp_path / "a place"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "chaos-test", str(place)]
    subprocess.run(mount, check=True, timeout=LIMIT_S)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True, timeout=LIMIT_S)


@needs_root
def test_a_mount_is_unmounted_even_when_busy(mounted: Path) -> None:
    with (mounted / "open").open("w") as stream:
        record = Unmount(path=mounted, source="chaos-test")
        first, second = record.undo(), record.undo()
        stream.write("still usable")
    assert first.ok and first.did and second.ok and not second.did
    assert str(mounted) not in [place for place, _ in mounts()]


@needs_root
def test_a_mount_of_somebody_else_is_left(mounted: Path) -> None:
    outcome = Unmount(path=mounted, source="chaos-other").undo()
    assert outcome.ok and not outcome.did
    assert (str(mounted), "chaos-test") in mounts()


@needs_root
def test_a_tree_with_a_mount_in_it_is_not_removed(mounted: Path) -> None:
    (mounted / "file").write_text("kept")
    outcome = RemoveTree(path=mounted, inside=mounted.parent).undo()
    assert not outcome.ok and "mount" in outcome.text
    assert (mounted / "file").exists()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A control group of ours, where this machine lets us make one."""
    for base in ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup"):
        path = Path(base) / f"chaos-test-{secrets.token_hex(4)}"
        try:
            path.mkdir()
        except OSError:
            continue
        if (path / "cgroup.procs").exists():
            break
        path.rmdir()
    else:
        pytest.skip("no control group can be made here")
    yield path
    RemoveCgroup(path=path).undo()


def test_a_control_group_is_emptied_and_removed(cgroup: Path, start: Start) -> None:
    inner = cgroup / "inner"
    inner.mkdir()
    process = start()
    said(process)
    (inner / "cgroup.procs").write_text(str(process.pid))
    if (inner / "freezer.state").exists():
        (inner / "freezer.state").write_text("FROZEN")
    record = RemoveCgroup(path=cgroup)
    first, second = record.undo(), record.undo()
    assert first.ok and first.did, first
    assert second.ok and not second.did
    assert process.wait(timeout=LIMIT_S) == -signal.SIGKILL and not cgroup.exists()


@pytest.mark.parametrize("path", ["/sys/fs/cgroup/system.slice", "/tmp/chaos-not-a-group"])
def test_only_our_control_groups_are_touched(path: str) -> None:
    outcome = RemoveCgroup(path=Path(path)).undo()
    assert not outcome.ok and "left alone" in outcome.text


@needs_root
def test_our_queue_is_removed_and_no_other() -> None:
    name = f"chaos{secrets.token_hex(4)}"
    tc = ["tc", "-netns", name, "qdisc"]
    subprocess.run(["ip", "netns", "add", name], check=True, timeout=LIMIT_S)
    try:
        queue = [
            "dev",
            "lo",
            "root",
            "handle",
            "c4a0:",
            "tbf",
            "rate",
            "1gbit",
            "burst",
            "128kb",
            "latency",
            "50ms",
        ]
        subprocess.run([*tc, "add", *queue], check=True, timeout=LIMIT_S)
        other = RemoveQdisc(device="lo", handle="beef:", namespace=name)
        ours = RemoveQdisc(device="lo", handle="c4a0:", namespace=name)
        assert not other.undo().did
        first, second = ours.undo(), ours.undo()
        assert first.ok and first.did and second.ok and not second.did
        shown = subprocess.run(
            [*tc, "show", "dev", "lo"], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert "c4a0:" not in shown.stdout
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True, timeout=LIMIT_S)


# ---- files and shared memory


def test_a_tree_is_removed_only_inside_what_the_run_owns(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (run / "data" / "deep", outside):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    (run / "link").symlink_to(outside)
    (run / "door").symlink_to(outside)
    for record in (
        RemoveTree(path=run / "data", inside=run),
        RemoveTree(path=run / "link", inside=run),
    ):
        first, second = record.undo(), record.undo()
        assert first.ok and first.did and second.ok and not second.did
    for path in (outside, run / ".." / "outside", run / "door" / "file", run):
        outcome = RemoveTree(path=path, inside=run).undo()
        assert not outcome.ok and "left alone" in outcome.text
    assert (outside / "file").read_text() == "x" and run.exists()


def test_files_are_undone_even_after_a_restart_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "made").write_text("x")
    assert RemoveTree(path=tmp_path / "made", inside=tmp_path, boot_id="an earlier one").undo().did
    assert not (tmp_path / "made").exists()


def test_shared_memory_of_dead_processes_is_freed_and_of_living_ones_is_not(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A directory of its own: in /dev/shm, any other run that ends now frees what nobody holds.
    monkeypatch.setattr(shared_memory, "SHM", tmp_path)
    dead, held, mapped = (tmp_path / f"torch_{what}" for what in ("dead", "held", "mapped"))
    semaphore = tmp_path / "sem.linked"  # as glibc makes them: mapped under another name
    since_ns = time.time_ns()
    for path in (dead, held, mapped):
        path.write_bytes(bytes(4096))
    holders = [
        start(
            "import sys; f = open(sys.argv[1]); print(1, flush=True); sys.stdin.read()", str(held)
        ),
        start(
            "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 4096);"
            " f.close();print(1, flush=True); sys.stdin.read()",
            str(mapped),
        ),
        start(
            "import mmap, os, sys; first, name = sys.argv[1] + '.new', sys.argv[1];"
            " f = open(first, 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096);"
            " f.close(); os.link(first, name); os.unlink(first);"
            " print(1, flush=True); sys.stdin.read()",
            str(semaphore),
        ),
    ]
    for holder in holders:
        said(holder)
    (tmp_path / "ledger.jsonl").write_text("")
    record = FreeShm(run=tmp_path, since_ns=since_ns)
    assert not FreeShm(run=tmp_path, since_ns=time.time_ns() + 10**9).undo().did
    outcome = record.undo()
    assert outcome.ok and dead.name in outcome.text
    left = [path.exists() for path in (dead, held, mapped, semaphore)]
    assert left == [False, True, True, True]


def test_a_semaphore_of_a_living_process_is_held(tmp_path: Path) -> None:
    """Python's, as any program makes them to share with the processes that it starts."""
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = Path("/dev/shm") / f"sem.{semaphore._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]
    here = shared_memory.inode_of(name)
    assert here is not None and here in shared_memory.held_by(os.getpid(), name.parent)
    assert shared_memory.unheld([name]) == []


def test_shared_memory_made_at_once_counts_although_a_files_time_is_behind_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHM", tmp_path)
    for number in range(1000):  # the time of a file is that of the last tick, at most 10 ms ago
        since_ns = time.time_ns()
        made = tmp_path / f"torch_{number}"
        made.write_bytes(b"")
        assert shared_memory.abandoned(since_ns, time.time_ns()) == [made]
        behind = made.stat().st_ctime_ns < since_ns
        made.unlink()
        if behind:
            return
    pytest.skip("the times of files are exact here")
