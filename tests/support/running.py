"""``python -m trainchaos.recovery.run`` and ``chaos run`` in processes of their own, as a user
starts them.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Event, Kind


class HasFileno(Protocol):
    """A socket, a file, a pidfd."""

    def fileno(self) -> int: ...


ROOT = Path(__file__).resolve().parents[2]
RECOVERABLE = ROOT / "examples" / "ddp_recoverable.py"
LIMIT_S = 120.0
PYTHON = shlex.quote(sys.executable)
"""For a shell: the path may have a blank."""
EPOCHS = "10"
STEPS = 320


class Running:
    """A ``recovery.run`` in a process of its own."""

    command: Sequence[str] = (sys.executable, "-m", "trainchaos.recovery.run")

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        self.events = folder / "events"
        command_line = [*self.command, "--events", self.events, *arguments]
        self.process = subprocess.Popen(
            list(map(str, command_line)),
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        self.said = ""

    def of(self, actor: str, kind: Kind) -> list[Event]:
        """Events of that kind."""
        path = self.events / f"{actor}.jsonl"
        return [e for e in EventLogTail(path).read() if e.kind is kind] if path.exists() else []

    def wait_for(self, enough: Callable[[], bool]) -> None:
        """Until it is so."""

        def so() -> bool:
            if enough():
                return True
            assert self.process.poll() is None, self.process.communicate(timeout=LIMIT_S)[1]
            return False

        until(so)

    def trained(self, step: int) -> bool:
        """Whether the first process has committed that step."""
        return any((e.step or 0) >= step for e in self.of("w0", Kind.STEP_COMMITTED))

    def pid_of(self, name: str) -> int:
        """Pid of one of its processes."""
        return next(
            e.data["pid"]
            for e in self.of("orchestrator", Kind.PROCESS_SPAWNED)
            if e.data["process"] == name
        )

    def end(self) -> int:
        """Its exit status; what it said is kept."""
        self.said = self.process.communicate(timeout=LIMIT_S)[1]
        return self.process.returncode

    def digest(self, step: int = STEPS) -> dict[str, object]:
        """Of all state after a step, such as the last, the same on every rank that committed it."""
        found = [
            {k: v for k, v in e.data.items() if k != "rank"}
            for path in self.events.glob("[ws]*.jsonl")
            for e in self.of(path.stem, Kind.STATE_DIGEST)
            if e.step == step
        ]
        assert len(found) == 4 and all(digest == found[0] for digest in found), found
        return found[0]


@contextmanager
def scripts(folder: Path, script: str) -> Iterator[Callable[..., Running]]:
    """Starts jobs of a script, each in a folder of its own, which share a checkpoint directory;
    none outlives the context.
    """
    started: list[Running] = []
    (folder / "train.py").write_text(script)

    def begin(options: Sequence[str], *arguments: object) -> Running:
        own = folder / f"job-{len(started)}"
        own.mkdir()
        given = (folder / "train.py", folder / "checkpoints", *map(str, arguments))
        started.append(Running(own, *options, *given))
        return started[-1]

    yield begin
    for job in started:
        job.process.kill()
        job.process.communicate(timeout=LIMIT_S)


def supervised(
    folder: Path, script: str, *options: str, arguments: Sequence[str] = ()
) -> dict[str, list[Event]]:
    """Run a script under ``recovery.run`` to its end; events by process."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(script)
    job = Running(folder, *options, folder / "train.py", *arguments)
    try:
        assert job.end() == 0, job.said
    finally:
        job.process.kill()
    return {path.stem: list(EventLogTail(path).read()) for path in job.events.glob("*.jsonl")}


def chaos_run(scenario: Path, runs: Path, *options: str) -> list[str]:
    """The command line of a ``chaos run``."""
    command = [sys.executable, "-m", "trainchaos", "run"]
    return [*command, str(scenario), "--runs", str(runs), *options]


def stand_in(path: Path, text: str) -> Path:
    """Write a program in Python, started by a shell: a ``#!`` line holds no path with a blank."""
    path.write_text(f"#!/bin/sh\n'''exec' {PYTHON} \"$0\" \"$@\"\n' '''\n{text}\n")
    path.chmod(0o755)
    return path


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Through a pidfd, as an operator's tool would."""
    fd = os.pidfd_open(pid)
    signal.pidfd_send_signal(fd, signum)
    os.close(fd)


def until(enough: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Wait until it is so; what it gives then."""
    pause, deadline = threading.Event(), time.monotonic() + limit_s
    while not (found := enough()):
        assert time.monotonic() < deadline, "it never came to it"
        pause.wait(0.01)
    return found


def readable(file: int | HasFileno, limit_s: float = LIMIT_S) -> bool:
    """Whether there is something to read in time. select() knows only the first 1024 descriptors;
    jobs of this process may hold as many.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))
