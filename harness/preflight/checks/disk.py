"""The disk of the runs directory takes what is written, keeps it, and gives it back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trainchaos.chaos.stats import percentile
from trainchaos.harness.preflight.checks.bounds import in_rounds
from trainchaos.harness.preflight.checks.check import Measured, PlaceCheck, Task
from trainchaos.harness.preflight.checks.findings import Finding, Rate

BLOCK_BYTES = 1 << 20
MOST_BLOCKS, LEAST_BLOCKS = 64, 4


class TemporaryFile:
    """A file without a name, so that nothing is left of it however this process ends. Raises
    OSError.
    """

    def __init__(self, directory: str) -> None:
        self._file = tempfile.TemporaryFile(prefix=".preflight-", dir=directory)  # noqa: SIM115  # noqa: SIM115

    def write(self, offset: int, data: bytes) -> None:
        """Write, and wait until the disk has it."""
        self._file.seek(offset)
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def read(self, offset: int, length: int) -> bytes:
        """Read from the disk: pages that are on it are dropped from memory first, as far as the
        kernel allows.
        """
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
        self._file.seek(offset)
        return self._file.read(length)

    def close(self) -> None:
        """Give it up; nothing is left of it."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class DiskCheck(PlaceCheck):
    """``open``: gives the file of a directory; ``blocks``: MiB at the most."""

    name: ClassVar = "disk"
    seconds: ClassVar = (2.0, 2.0)
    of_host: ClassVar = True
    open: Callable[[str], TemporaryFile] = TemporaryFile
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

    def judge(self, place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
        """A block that reads wrong, or an error, is unfit. Compared are the latency of a block with
        fsync, and reading.
        """
        (measured,) = rounds
        where, blocks, wrong = measured["directory"], measured["blocks"], measured["wrong"]
        writes_s, reads_s = measured["writes_s"], measured["reads_s"]
        shown: dict[str, Any] = {
            "directory": where,
            "blocks": blocks,
            "wrong": wrong[:8],
            "error": measured["error"],
            "seed": measured["seed"],
        }
        if measured["error"]:
            after = f" after {blocks} MiB" if blocks else ""
            said = f"{where}: {measured['error']}{after}"
            todo = "repair or free the disk, or say another directory with --runs"
            return Finding(state="unfit", said=said, todo=todo, evidence=shown), ()
        middle, late = (1e3 * percentile(writes_s, share) for share in (0.5, 0.99))
        finding = Finding(
            said=f"{blocks} MiB at {where}: write with fsync {blocks / sum(writes_s):.0f} MiB/s,"
            f" median {middle:.1f} ms a MiB, 99th percentile {late:.1f} ms; read back"
            f" {blocks / max(1e-9, sum(reads_s)):.0f} MiB/s, all as written",
            measured=float(len(wrong)),
            bound=0.0,
            unit="MiB",
            evidence=shown,
        )
        if wrong:
            finding = replace(
                finding,
                state="unfit",
                said=f"{where}: {len(wrong)} of {blocks} MiB read back otherwise than written,"
                f" the first at MiB {wrong[0]}",
                todo="write no checkpoint there: replace the disk (smartctl -a says what it knows)",
            )
        todo = "look for other writers (iostat -x 1), a full or failing disk, or a slow mount"
        writes = [1e3 * one for one in in_rounds(writes_s)]
        reads = [1.0 / max(1e-9, one) for one in in_rounds(reads_s)]
        return finding, (
            Rate(metric="write_ms", rounds=writes, unit="ms", high_is_good=False, todo=todo),
            Rate(metric="read", rounds=reads, unit="MiB/s", todo=todo),
        )
