"""The simulated file system of the checkpoints: real files, with write errors on demand."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class SimStorage:
    """Implements ``chaos.fault.targets.StorageTarget``; ranks call ``disk`` before each operation
    of a save.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._full = False
        self._read_only = False

    def fill(self, *, shrink: bool) -> None:
        """Refuse writes from now on."""
        self._full = True

    def free(self) -> None:
        """Undo ``fill``."""
        self._full = False

    def set_read_only(self, read_only: bool) -> None:
        """Refuse changes from now on, or allow them again."""
        self._read_only = read_only

    def probe(self) -> str | None:
        """The kernel's error for a write, or None."""
        try:
            self.disk("write", self.path)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return None

    def disk(self, what: str, path: Path) -> None:
        """See recovery.checkpoint.files.checkpoints.Disk. Raises OSError."""
        number = (
            errno.EROFS
            if self._read_only
            else errno.ENOSPC
            if self._full and what == "write"
            else 0
        )
        if number:
            raise OSError(number, os.strerror(number))
