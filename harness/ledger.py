"""The undo ledger: what is about to be done and how to undo it, written before it is done."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from chaos.errors import InfrastructureError


class Ledger:
    """Appends records to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, *, durable: bool = True, **record: Any) -> None:
        """Append one record. ``durable``: also survive a crash of the host, which no process does but changed
        files do.

        Raises InfrastructureError when the disk refuses: then the fault must not act.
        """
        line = json.dumps({"wall_ns": time.time_ns(), **record}, separators=(",", ":")) + "\n"
        try:
            with open(self._path, "a") as stream:
                stream.write(line)
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())
        except OSError as error:
            raise InfrastructureError(
                f"cannot write {self._path}: {error.strerror}", hint="free disk space"
            ) from error
