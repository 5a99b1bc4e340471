"""The tail of a growing file of lines, such as the event file of a process that still writes it;
nobody waits for the writer.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainchaos.chaos.events.event import Event


class Tail:
    """``offset``: read up to there."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def take(self, most: int = -1) -> bytes:
        """What was written since, in whole lines and at most so many bytes: an incomplete last line
        waits for the next time, and one that is longer is left out. A file that has become shorter
        was begun anew. Raises OSError.
        """
        size = os.stat(self.path).st_size
        if size == self.offset:
            return b""  # most reads find nothing new and cost only this
        self.offset = 0 if size < self.offset else self.offset
        with open(self.path, "rb") as stream:
            stream.seek(self.offset)
            data = stream.read(most)
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole) or (len(data) if len(data) == most else 0)
        return whole


class EventLogTail(Tail):
    """The tail of one actor's file."""

    def read(self) -> list[Event]:
        """Events written since the last call; none if the file does not exist yet. Raises LogError
        on a line that is not an event.
        """
        try:
            return [Event.from_line(line) for line in self.take().decode().splitlines()]
        except FileNotFoundError:
            return []


class SharedTail:
    """One file with several followers, each from its beginning; ``look`` reads it once for all."""

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self._tail = EventLogTail(path)

    def look(self) -> None:
        """Read what was written since. Raises LogError on a line that is not an event."""
        self.events += self._tail.read()


class Follower:
    """One follower of a shared file."""

    def __init__(self, file: SharedTail) -> None:
        self.file = file
        self._taken = 0

    def take(self) -> list[Event]:
        """Events read so far that this follower has not taken yet."""
        new = self.file.events[self._taken :]
        self._taken += len(new)
        return new
