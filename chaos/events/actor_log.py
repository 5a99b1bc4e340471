"""Content of one actor's file, as it was read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind


@dataclass(frozen=True, kw_only=True)
class ActorLog:
    """Content of one file: its complete events in order, and its problems. ``unread``: the file was
    not read, for instance because it is too large.

    Checkers that look at all events look at ``kinds``, ``generations``, ``steps`` and ``times``:
    events are far apart in memory, so that to go through them takes several times as long.
    """

    actor: str
    events: tuple[Event, ...]
    problems: tuple[str, ...]
    ended: bool
    unread: bool = False

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kind of each event, in their order."""
        return [event.kind for event in self.events]

    @cached_property
    def generations(self) -> list[int]:
        """The generation of each event, in their order."""
        return [event.generation for event in self.events]

    @cached_property
    def steps(self) -> list[int | None]:
        """The step of each event, in their order."""
        return [event.step for event in self.events]

    @cached_property
    def times(self) -> list[int]:
        """The time of each event in nanoseconds, in their order."""
        return [event.time_ns for event in self.events]
