"""The disk of the runs directory takes what is written, keeps it, and gives it back."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainchaos.harness.preflight.checks.bounds import in_rounds, percentile
from trainchaos.harness.preflight.checks.check import Measured, Task
from trainchaos.harness.preflight.checks.findings import Finding, Rate

BLOCK_BYTES = 1 << 20
MOST_BLOCKS, LEAST_BLOCKS = 64, 4
MIB = float(1 << 20)


class Disk(Protocol):
    """A file that nobody else sees."""

    def write(self, offset: int, data: bytes) -> None:
        """Write, and wait until the disk has it. Raises OSError."""

    def read(self, offset: int, length: int) -> bytes:
        """Read from the disk, not from memory as far as the kernel allows. Raises OSError."""

    def close(self) -> None:
        """Give it up; nothing is left of it."""


class TemporaryFile:
    """A file without a name, so that nothing is left of it however this process ends (O_TMPFILE; an
    unlinked one where the file system has no such files). Raises OSError.
    """

    def __init__(self, directory: str) -> None:
        try:
            self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self._fd, name = tempfile.mkstemp(prefix=".preflight-", dir=directory)
            os.unlink(name)

    def write(self, offset: int, data: bytes) -> None:
        """``pwrite`` of all, and ``fsync``."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done
        os.fsync(self._fd)

    def read(self, offset: int, length: int) -> bytes:
        """Pages that are on the disk are dropped from memory first (posix_fadvise)."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)
        parts = []
        while length:
            part = os.pread(self._fd, length, offset)
            if not part:
                break
            parts.append(part)
            length, offset = length - len(part), offset + len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


@dataclass(frozen=True, kw_only=True)
class DiskCheck:
    """``open``: gives the file of a directory; ``blocks``: MiB at the most."""

    name: str = "disk"
    open: Callable[[str], Disk] = TemporaryFile
    blocks: int = MOST_BLOCKS

    def measure(self, task: Task) -> Measured:
        """Blocks of random bytes: all written, each with fsync, then all read and compared. An
        error of the disk is part of what is measured.
        """
        began_s = time.monotonic()
        source = random.Random(task.seed)
        written: list[bytes] = []
        writes_s, reads_s, wrong, error = [], [], [], ""
        try:
            with contextlib.closing(self.open(task.directory)) as file:
                while len(written) < self.blocks and (
                    len(written) < LEAST_BLOCKS or time.monotonic() - began_s < task.budget_s / 2
                ):
                    data = source.randbytes(BLOCK_BYTES)
                    at_s = time.monotonic()
                    file.write(len(written) * BLOCK_BYTES, data)
                    writes_s.append(time.monotonic() - at_s)
                    written.append(hashlib.sha256(data).digest())
                for block, digest in enumerate(written):
                    at_s = time.monotonic()
                    data = file.read(block * BLOCK_BYTES, BLOCK_BYTES)
                    reads_s.append(time.monotonic() - at_s)
                    if hashlib.sha256(data).digest() != digest:
                        wrong.append(block)
        except OSError as caught:
            error = f"{caught.strerror or caught}"
        return {
            "directory": task.directory,
            "blocks": len(written),
            "writes_s": writes_s,
            "reads_s": reads_s,
            "wrong": wrong,
            "error": error,
            "seed": task.seed,
        }

    def judge(self, place: str, measured: Measured) -> Finding:
        """A block that reads wrong, or an error, is unfit."""
        where, blocks, wrong = measured["directory"], measured["blocks"], measured["wrong"]
        shown: dict[str, Any] = {
            "directory": where,
            "blocks": blocks,
            "wrong": wrong[:8],
            "error": measured["error"],
            "seed": measured["seed"],
        }
        if measured["error"]:
            after = f" after {blocks} MiB" if blocks else ""
            return Finding(
                check=self.name,
                place=place,
                state="unfit",
                said=f"{where}: {measured['error']}{after}",
                todo="repair or free the disk, or say another directory with --runs",
                evidence=shown,
            )
        if wrong:
            return Finding(
                check=self.name,
                place=place,
                state="unfit",
                said=f"{where}: {len(wrong)} of {blocks} MiB read back otherwise than written,"
                f" the first at MiB {wrong[0]}",
                todo="write no checkpoint there: replace the disk (smartctl -a says what it knows)",
                measured=float(len(wrong)),
                bound=0.0,
                unit="MiB",
                evidence=shown,
            )
        write = len(measured["writes_s"]) / sum(measured["writes_s"])
        read = len(measured["reads_s"]) / max(1e-9, sum(measured["reads_s"]))
        middle, late = (1e3 * percentile(measured["writes_s"], part) for part in (0.5, 0.99))
        said = (
            f"{blocks} MiB at {where}: write with fsync {write:.0f} MiB/s, median"
            f" {middle:.1f} ms a MiB, 99th percentile {late:.1f} ms; read back"
            f" {read:.0f} MiB/s, all as written"
        )
        return Finding(
            check=self.name,
            place=place,
            state="fit",
            said=said,
            measured=0.0,
            bound=0.0,
            unit="MiB",
            evidence=shown,
        )

    def rates(self, place: str, measured: Measured) -> Sequence[Rate]:
        """Latency of a block with fsync, in ms, and reading, in MiB/s."""
        if measured["error"] or not measured["reads_s"]:
            return ()
        todo = "look for other writers (iostat -x 1), a full or failing disk, or a slow mount"
        writes = [1e3 * one for one in in_rounds(measured["writes_s"])]
        reads = [BLOCK_BYTES / MIB / max(1e-9, one) for one in in_rounds(measured["reads_s"])]
        return (
            Rate(
                check=self.name,
                metric="write_ms",
                place=place,
                rounds=writes,
                unit="ms",
                high_is_good=False,
                todo=todo,
            ),
            Rate(
                check=self.name, metric="read", place=place, rounds=reads, unit="MiB/s", todo=todo
            ),
        )


def nearest(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
