"""Follows the event file of a process that still writes it."""

from __future__ import annotations

import os
from pathlib import Path

from chaos.events.log import Event


class Shared:
    """One file that several follow, each from its beginning: it is looked at once for all of them
    (``look``).
    """

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self._tail = Tail(path)

    def look(self) -> None:
        """See what was written since. Raises LogError on a foreign line."""
        self.events += self._tail.read()


class Follower:
    """One of those who follow a file."""

    def __init__(self, file: Shared) -> None:
        self.file = file
        self._taken = 0

    def take(self) -> list[Event]:
        """What others have seen of it by now, and this one not yet."""
        new = self.file.events[self._taken :]
        self._taken += len(new)
        return new


class Tail:
    """Follows one actor's growing file; a line not yet whole waits for the next look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Events written since the last call; none when the file does not exist yet. Raises
        LogError on a foreign line.
        """
        try:
            if os.stat(self._path).st_size == self._offset:
                return []  # most looks find nothing new, and cost no more than this
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [Event.from_line(line) for line in whole.decode().splitlines()]
