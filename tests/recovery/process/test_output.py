"""Output that nobody can read any more breaks nothing: a terminal that is gone, a reader that left,
a full disk.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.running import LIMIT_S, ROOT, readable
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.process import output
from trainchaos.recovery.process.output import Output

SCENARIO = """\
version: 1
name: unread
launcher: sim
baseline: none
workload: {kind: mlp, ranks: 2, steps: 80, global_batch: 16, checkpoint: {every: 20}}
recovery: hot-spare
faults: [{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 20}}]
"""
GONE = "terminal-is-gone"
PRINTS = f"""
import os, sys, time, torch
from trainchaos import recovery
job = recovery.join(samples=64, steps=200, global_batch=4)
model = torch.nn.Linear(2, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
while job.running():
    with job.step() as step:
        step.backward(model(torch.ones(len(step.samples), 2)).sum())
        step.commit()
    # One write, as lines that two ranks print in pieces get mixed up on a terminal.
    sys.stdout.write(f"step {{step.number}}\\n")
    sys.stdout.flush()
    print("likewise", file=sys.stderr)
    # It goes on once nobody reads any more: else it may be over before the test has read a line.
    until_s = time.monotonic() + 60
    while step.number == 5 and not os.path.exists({GONE!r}) and time.monotonic() < until_s:
        time.sleep(0.01)
"""


# --- the stream


class Broken(io.StringIO):
    """A stream that fails as it is told."""

    number = errno.EIO
    taken = ""

    def write(self, text: str) -> int:
        """Fail, or take it."""
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        self.taken += text
        return len(text)

    def flush(self) -> None:
        """As a write."""
        self.write("")


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE, errno.EBADF, errno.ENOSPC])
def test_what_cannot_be_written_is_dropped_and_known_to_be_lost(number: int) -> None:
    broken = Broken()
    broken.number = number
    stream = Output(broken)
    assert stream.lost is None
    print("one", file=stream, flush=True)
    stream.writelines(["two", "three"])
    assert stream.lost == os.strerror(number)


def test_a_full_disk_may_have_room_again() -> None:
    broken = Broken()
    broken.number = errno.ENOSPC
    stream = Output(broken)
    stream.write("one")
    broken.number = 0
    stream.write("two")
    assert broken.taken == "two" and stream.lost == os.strerror(errno.ENOSPC)


def test_a_closed_stream_takes_nothing() -> None:
    closed = io.StringIO()
    closed.close()
    stream = Output(closed)
    stream.write("one")
    stream.flush()
    assert stream.lost


def test_what_is_left_in_memory_and_what_children_write_goes_nowhere_from_then_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = Output(os.fdopen(writer, "w"))
    stream.write("one")
    stream.flush()
    assert stream.lost == os.strerror(errno.EPIPE)
    os.write(writer, b"a child")
    stream.close()


def test_a_process_shields_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    output.shield()
    first = sys.stdout
    output.shield()
    assert sys.stdout is first and isinstance(first, Output) and sys.stderr is None
    assert output.lost_output() is None


# --- programs


@dataclass
class Unread:
    """A program on a terminal of its own that hangs up; nobody sends it SIGHUP that it would heed
    (``nohup``).
    """

    process: subprocess.Popen[bytes]
    master: int

    @classmethod
    def start(cls, folder: Path, *command: str | Path) -> Unread:
        """In ``folder``."""
        master, slave = pty.openpty()

        def become() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            start_new_session=True,
            preexec_fn=become,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        os.close(slave)
        return cls(process, master)

    def hang_up(self, *, after: bytes = b"", gone: Path | None = None) -> int:
        """Close the terminal once it has shown that; the exit code. ``gone``: made then."""
        seen = b""
        try:
            while after not in seen:
                assert readable(self.master), seen
                seen += os.read(self.master, 4096)
        finally:
            os.close(self.master)
            if gone is not None:
                gone.touch()
        try:
            return self.process.wait(timeout=LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait(timeout=LIMIT_S)


def scenario(folder: Path) -> Path:
    """A simulated run."""
    path = folder / "unread.yaml"
    path.write_text(SCENARIO)
    return path


def whole(folder: Path) -> Path:
    """The run's directory, in which everything is."""
    run = folder / "runs" / "unread" / "latest"
    assert json.loads((run / "results.json").read_text())["verdict"] == "pass"
    assert {"report.html", "summary.md", "junit.xml"} <= {path.name for path in run.iterdir()}
    return run


@pytest.mark.long
def test_a_run_whose_terminal_is_gone_ends_as_any_other_and_so_does_what_follows_it(
    tmp_path: Path,
) -> None:
    run = Unread.start(tmp_path, "-m", "trainchaos", "run", scenario(tmp_path))
    assert run.hang_up(after=b"unread") == 0
    made = whole(tmp_path)
    (made / "results.json").unlink()
    assert Unread.start(tmp_path, "-m", "trainchaos", "analyze", made).hang_up() == 0
    whole(tmp_path)


def unread(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[bytes]:
    """A command whose standard output, a pipe, nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "trainchaos", *map(str, words)],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=folder,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    finally:
        os.close(writer)


@pytest.mark.long
def test_a_run_whose_reader_has_left_is_judged_as_any_other(tmp_path: Path) -> None:
    ended = unread(tmp_path, "run", scenario(tmp_path), "-v")
    assert ended.returncode == 0, ended.stderr
    whole(tmp_path)
    assert (
        b"cannot write the output: Broken pipe" in ended.stderr and b"Traceback" not in ended.stderr
    )


@pytest.mark.slow
def test_a_list_that_nobody_got_is_an_error() -> None:
    ended = unread(ROOT, "list", "faults")
    assert ended.returncode == 4
    assert ended.stderr == b"cannot write the output: Broken pipe\n"


@pytest.mark.slow
def test_an_agent_says_its_exit_code_though_its_terminal_is_gone(tmp_path: Path) -> None:
    words: Sequence[str] = (
        "--coordinator",
        "127.0.0.1:1",
        "--node",
        "0",
        "--token-file",
        "missing",
    )
    assert Unread.start(tmp_path, "-m", "trainchaos.recovery.nodes.serve", *words).hang_up() == 2


@pytest.mark.long
@pytest.mark.real
def test_a_job_whose_terminal_is_gone_trains_to_its_end(tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    words = ("--ranks", "2", "--events", "events", "--device", "cpu", script)
    job = Unread.start(tmp_path, "-m", "trainchaos.recovery.run", *words)
    assert job.hang_up(after=b"step 3\r\n", gone=tmp_path / GONE) == 0
    events = EventLogTail(tmp_path / "events" / "orchestrator.jsonl").read()
    assert not [e for e in events if e.kind is Kind.FAILURE_DETECTED]
    assert [e.data["outcome"] for e in events if e.kind is Kind.RUN_FINISHED] == ["completed"]
    exits = [e.data["exit_code"] for e in events if e.kind is Kind.PROCESS_EXITED]
    assert exits and set(exits) == {0}
