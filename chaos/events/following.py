"""Follows the event file of a process that is still writing it."""

from __future__ import annotations

from pathlib import Path

from trainchaos.chaos.events.log import Event, Tail


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
        events = self.file.events
        if len(events) == self._taken:
            return []
        new = events[self._taken :]
        self._taken += len(new)
        return new


class EventLogTail:
    """Follows one actor's growing file; an incomplete last line waits for the next read."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)

    def read(self) -> list[Event]:
        """Events written since the last call; none if the file does not exist yet. Raises LogError
        on a line that is not an event.
        """
        try:
            whole = self._tail.read()
        except FileNotFoundError:
            return []
        return [Event.from_line(line) for line in whole.decode().splitlines()]
