"""A separate file system for one arm's checkpoints: limited in size, filled, and made read-only
from outside.

It is a tmpfs over the arm's checkpoint directory. The ledger holds its unmount record before it is
mounted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.base import Need
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.requirements import needs_of, parameters
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import Unmount

BALLAST = ".ballast"
PROBE = ".probe"
DEFAULT_MIB = 64
MIB = 1 << 20
BUSY_LIMIT_S = 1.0
TRY_LIMIT_S = 10.0
_SAFE = 2 | 4 | 8  # no setuid programs, no devices, no programs
_READ_ONLY, _REMOUNT = 1, 32


def lacks_mount() -> str | None:
    """Why this process cannot mount; None if it can. Tried in a temporary mount namespace."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "mounting cannot be tried: unshare and mount of util-linux are not installed"
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "chaos-trial", "/tmp"]
    try:
        ran = subprocess.run(
            trial, capture_output=True, text=True, timeout=TRY_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"mount did not answer within {TRY_LIMIT_S:.0f} s"
    if ran.returncode == 0:
        return None
    return (
        f"this user may not mount ({(ran.stderr.strip().splitlines() or ['no reason given'])[-1]});"
        " run as root"
    )


def mount_for(setup: ArmSetup) -> Storage | None:
    """The file system that an arm's faults need, mounted; None if they need none.

    The control arm gets the same. Raises InfrastructureError if it cannot be mounted.
    """
    if Need.MOUNT not in needs_of(setup.cell):
        return None
    sizes = [size for size in parameters(setup.cell, "size_mib") if isinstance(size, int)]
    return Storage(setup, size_mib=max(sizes, default=DEFAULT_MIB))


class Storage:
    """Implements ``chaos.fault.targets.StorageTarget``."""

    def __init__(self, setup: ArmSetup, *, size_mib: int) -> None:
        self.path = setup.checkpoints
        self._size = self._limit = size_mib * MIB
        self._filled = self._read_only = False
        source = f"chaos-{setup.run.root.name}-{setup.id}"
        self._undo = Unmount(path=self.path.resolve(), source=source)
        self._ledger = Ledger(setup.run.ledger)
        self._record = self._ledger.will(self._undo, arm=setup.id)
        try:
            mount(source, self.path, _SAFE, "tmpfs", f"size={self._size},mode=700")
        except OSError as error:
            self._ledger.undone(self._record, "it was never mounted")
            raise InfrastructureError(
                f"cannot mount {self.path}: {error.strerror}", hint="mounting needs root"
            ) from error

    def fill(self, *, shrink: bool) -> None:
        """Leave no free byte: write a ballast file, or shrink the file system to its contents."""
        self._filled = True
        if shrink:
            found = os.statvfs(self.path)
            self._limit = max(found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize)
            self._remount()
            return
        fd = os.open(
            self.path / BALLAST, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        try:
            for size in (MIB, 4096, 1):
                _write_until_full(fd, bytes(size))
        finally:
            os.close(fd)

    def free(self) -> None:
        """Restore the size and remove the ballast, as soon as the file system is writable."""
        self._filled, self._limit = False, self._size
        self._remount()
        self._drop_ballast()

    def set_read_only(self, read_only: bool) -> None:
        """Remount. An open file for writing delays read-only: retries for BUSY_LIMIT_S."""
        before, self._read_only = self._read_only, read_only
        deadline = time.monotonic() + BUSY_LIMIT_S
        while True:
            try:
                self._remount()
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    self._read_only = before
                    raise
            time.sleep(0.005)
        self._drop_ballast()

    def probe(self) -> str | None:
        """The kernel's error for writing one more byte, or None."""
        path = self.path / PROBE
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, b"x")
            finally:
                os.close(fd)
                path.unlink(missing_ok=True)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error.errno))
        return None

    def used(self) -> bool:
        """Whether the directory holds anything but the harness's own files."""
        with os.scandir(self.path) as entries:
            return any(entry.name not in (BALLAST, PROBE) for entry in entries)

    def close(self) -> None:
        """Unmount, and record it in the ledger; safe to call twice."""
        outcome = self._undo.undo()
        note = self._ledger.undone if outcome.ok else self._ledger.failed
        note(self._record, outcome.text)

    def _drop_ballast(self) -> None:
        """Remove the ballast once no fault needs it; on a read-only file system nothing can be
        removed.
        """
        if not self._filled and not self._read_only:
            (self.path / BALLAST).unlink(missing_ok=True)

    def _remount(self) -> None:
        """Remount with all wanted options: a remount that left out another fault's option would
        undo it.
        """
        flags = _REMOUNT | (_READ_ONLY if self._read_only else 0)
        mount("none", self.path, _SAFE | flags, "tmpfs", f"size={self._limit}")


def _write_until_full(fd: int, block: bytes) -> None:
    try:
        while os.write(fd, block) == len(block):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def mount(source: str, path: Path, flags: int, kind: str | None = None, data: str = "") -> None:
    """mount(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [None if kind is None else kind.encode(), data.encode() or None]
    if libc.mount(os.fsencode(source), os.fsencode(path), words[0], flags, words[1]):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
