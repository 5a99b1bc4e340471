"""Driver reports about devices, in a file with one JSON line each.

A driver's event is appended to the file; each reader reads it from where it stopped. Injected
events (``health-event``) take the same path as NVML's, so that readers can tell them apart only by
``source``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

MOST_BYTES = 1 << 20
"""Read at once; a report has about 100 bytes, and a longer line than this is none."""


class HealthReport(BaseModel):
    """One report. ``what``: xid (``code`` is its number), ecc, thermal or nvlink (``code`` is a
    count or a value); ``device``: slot or CUDA device; ``node`` and ``rank``: its node and rank,
    where known; ``source``: nvml|injected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: Literal["xid", "ecc", "thermal", "nvlink"]
    code: int
    device: str | None = None
    node: int | None = None
    rank: int | None = None
    source: Literal["nvml", "injected"]


class ReportFile:
    """The file, with the position of its reader. ``new_only``: what is in it now is not read: it is
    of an earlier job.
    """

    def __init__(self, path: Path, *, new_only: bool = False) -> None:
        self._path = path
        self._offset = 0
        if new_only:
            with contextlib.suppress(OSError):  # there is none yet
                self._offset = os.stat(path).st_size

    def append(self, reading: HealthReport) -> None:
        """Append a report, as a driver would. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab") as stream:
            stream.write(reading.model_dump_json().encode() + b"\n")

    def read(self) -> Iterator[HealthReport]:
        """Reports since the last call; malformed lines are skipped, and so is what there is of a
        file that cannot be read.
        """
        with contextlib.suppress(OSError):
            yield from self.take()

    def take(self) -> list[HealthReport]:
        """As ``read``. Raises OSError; a file that does not exist has no reports yet."""
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return []
        if size == self._offset:
            return []
        if size < self._offset:  # somebody began it anew
            self._offset = 0
        with open(self._path, "rb") as stream:
            stream.seek(self._offset)
            data = stream.read(MOST_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole) or (len(data) if len(data) == MOST_BYTES else 0)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValidationError):
                found.append(HealthReport.model_validate_json(line))
        return found
