"""What a coordinator sends to one agent: messages to several processes of a node, sent together,
travel as one line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainchaos.recovery.nodes.link.link import Lazy, Link, Post
from trainchaos.recovery.nodes.link.protocol import Frame, Tell
from trainchaos.recovery.transport.wire import Extra, LeaveOut, Message

LONGEST = 1 << 20  # characters in one line, unless one message has more
USUAL = 400  # in a message's own part; only the common part may have more

_LONG = (Extra, LeaveOut)

Letter = tuple[str, Message]
"""A message, and the process that it is for."""


class Outbox(Post):
    """A post whose messages to processes wait for others of their kind until the next turn, or
    until another frame has to go. ``needed``: the job cannot continue before the message has
    arrived; ``on_put``: called whenever there is something to send.
    """

    def __init__(self, *, limit: int) -> None:
        super().__init__(limit=limit)
        self.on_put: Callable[[], None] | None = None
        self._open: list[Letter] = []
        self._open_needed = False
        self._needed = 0  # number of the last needed frame

    def tell(self, process: str, message: Message, *, needed: bool = False) -> None:
        """Queue a message to a process; it is sent until it arrives."""
        self._open.append((process, message))
        self._open_needed |= needed
        self._stir()

    def put(self, frame: Frame, *, needed: bool = False) -> None:
        """Queue a frame, after all queued before it."""
        number = self.add(frame)
        self._needed = number if needed else self._needed

    @property
    def waits(self) -> bool:
        """Whether a needed message is not confirmed yet."""
        return self._open_needed or self.awaits(self._needed)

    def add(self, frame: Frame | Lazy, *, then: Callable[[], None] | None = None) -> int:
        """See ``Post``."""
        self._seal()
        self._stir()
        return super().add(frame, then=then)

    def pump(self, link: Link) -> None:
        """See ``Post``."""
        self._seal()
        super().pump(link)

    def reconnected(self) -> None:
        """See ``Post``."""
        self._seal()
        super().reconnected()

    def _stir(self) -> None:
        if self.on_put is not None:
            self.on_put()

    def _seal(self) -> None:
        letters, self._open = self._open, []
        for frame in together(letters):
            number = super().add(frame)
            if self._open_needed:
                self._needed = number
        self._open_needed = False


def together(letters: Sequence[Letter]) -> Iterator[Tell]:
    """Lines for some messages, in their order."""
    for _, group in itertools.groupby(letters, key=lambda letter: type(letter[1])):
        people = list(group)
        first = vars(people[0][1])
        differ = {
            key
            for _, message in people[1:]
            if message is not people[0][1]
            for key, value in vars(message).items()
            if value is not first[key] and value != first[key]
        }
        common = {key: value for key, value in first.items() if key not in differ}
        apart = [key for key in first if key in differ]
        each: list[tuple[str, dict[str, Any]]] = []
        length = 0
        for process, message in people:
            fields = vars(message)
            own = {key: fields[key] for key in apart}
            size = len(message.model_dump_json()) if isinstance(message, _LONG) else USUAL
            if each and length + size > LONGEST:
                yield Tell.model_construct(common=common, each=tuple(each))
                each, length = [], 0
            each.append((process, own))
            length += size
        yield Tell.model_construct(common=common, each=tuple(each))
