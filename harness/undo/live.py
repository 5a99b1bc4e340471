"""Tracks which runs are live: each has a file, ``live.json``, from its start until nothing of it is
left.

The file exists while a run has something that may have to be undone. It contains the harness's pid
and start time, and the harness holds a lock on it, which the kernel releases however the harness
ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.files import read_model
from trainchaos.harness.host import processes
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.undo.records import MARKER

FILE = "live.json"


class HarnessProcess(BaseModel):
    """The harness process of a run. ``pid_namespace``: its pids mean nothing in another one;
    ``marker``: value of CHAOS_RUN in the environment of its processes; ``since_ns``: Unix time.
    """

    model_config = ConfigDict(frozen=True)

    pid: int = Field(gt=0, lt=2**31)
    start_time: int
    boot_id: str
    host: str
    pid_namespace: str
    marker: str = Field(min_length=8)
    since_ns: int = Field(ge=0, lt=2**63)

    @classmethod
    def me(cls, marker: str) -> HarnessProcess:
        """This process."""
        pid = os.getpid()
        return cls(
            pid=pid,
            start_time=processes.start_time(pid),
            boot_id=processes.boot_id(),
            host=socket.gethostname(),
            pid_namespace=_pid_namespace(),
            marker=marker,
            since_ns=time.time_ns(),
        )

    @property
    def here(self) -> bool:
        """Whether it ran on this machine, in this pid namespace."""
        return self.host == socket.gethostname() and self.pid_namespace == _pid_namespace()

    @property
    def restarted(self) -> bool:
        """Whether this machine has restarted since then."""
        return self.boot_id != processes.boot_id()

    @property
    def alive(self) -> bool:
        """Whether the harness itself is still running; meaningful only if ``here``."""
        return not self.restarted and processes.is_same(self.pid, self.start_time)


@contextmanager
def holding(run: RunDirectory) -> Iterator[HarnessProcess]:
    """Be the harness of a run: write its file, and let everything started inside inherit its
    marker.

    The file stays; ``release`` removes it once nothing is left to undo. Raises InfrastructureError.
    """
    holder = HarnessProcess.me(f"{run.root.name}-{secrets.token_hex(8)}")
    path, temporary = run.root / FILE, run.root / f".{FILE}"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(fd, holder.model_dump_json().encode() + b"\n")
        os.fsync(fd)
        with suppress(OSError):  # a file system without locks: the pid must do
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(temporary, path)  # visible whole and locked, or not at all
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {path}: {error.strerror}", hint="free disk space"
        ) from error
    before = os.environ.get(MARKER)
    os.environ[MARKER] = holder.marker
    try:
        yield holder
    finally:
        if before is None:
            del os.environ[MARKER]
        else:
            os.environ[MARKER] = before
        os.close(fd)


def release(run: RunDirectory) -> None:
    """Mark the run as over: nothing of it is left."""
    (run.root / FILE).unlink(missing_ok=True)


def read_holder(run: RunDirectory) -> HarnessProcess | None:
    """The harness of a run; None if the run is over, or if its file is incomplete because the
    harness was killed while it wrote the file, before anything else. Raises PermissionError.
    """
    try:
        return read_model(run.root / FILE, HarnessProcess)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None


def unfinished(runs: Path) -> list[RunDirectory]:
    """Runs below ``runs`` that are live or have left something, oldest first."""
    return [
        RunDirectory(path.parent)
        for path in sorted(runs.glob(f"*/*/{FILE}"))
        if not path.parent.is_symlink()
    ]


@contextmanager
def healing(run: RunDirectory) -> Iterator[bool]:
    """Claim a run for healing; yields False if another process is healing it."""
    fd = os.open(run.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def locked(run: RunDirectory) -> bool:
    """Whether a process of this machine, in any namespace, holds the run's file."""
    try:
        fd = os.open(run.root / FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
