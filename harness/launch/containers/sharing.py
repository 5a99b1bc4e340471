"""A directory whose later mounts also appear in containers: bound onto itself and made shared."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.launch.nodes.platform import Will
from trainchaos.harness.undo.base import mounts
from trainchaos.harness.undo.records import Unmount

PROPAGATION = "rslave"
"""For a bind of such a directory: mounts propagate into the container, but not out of it."""
_BIND, _REC, _SHARED = 4096, 16384, 1 << 20


class SharedDirectory:
    """A directory shared until ``close``. Raises InfrastructureError if it cannot be mounted."""

    def __init__(self, path: Path, will: Will) -> None:
        self._undo = Unmount(path=path, source=_source(path))
        will(self._undo)
        try:
            _mount(str(path), path, _BIND | _REC)
            _mount("none", path, _SHARED | _REC)
        except OSError as error:
            self.close()
            raise InfrastructureError(
                f"cannot share mounts below {path} with containers: {error.strerror}",
                hint="mounting needs root",
            ) from error

    def close(self) -> str:
        """Unmount it; safe to repeat. Returns an error message, or ""."""
        outcome = self._undo.undo()
        return "" if outcome.ok else outcome.text


def _source(path: Path) -> str:
    """Mountinfo's source of the device that a path is on; a bind of the path has the same
    source.
    """
    above = [(place, source) for place, source in mounts() if path.is_relative_to(place)]
    longest = max(len(place) for place, _ in above)
    return [source for place, source in above if len(place) == longest][-1]


def _mount(source: str, path: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(path), None, flags, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
