"""What a coordinator sends to one agent: messages to several processes of a node, sent together,
travel as one.
"""

from __future__ import annotations

from collections.abc import Callable

from trainchaos.recovery.nodes.link.link import Lazy, Link, Post
from trainchaos.recovery.nodes.link.protocol import Tell
from trainchaos.recovery.transport.wire import Message


class Outbox(Post):
    """A post whose messages to processes wait for others until the next turn, or until another
    frame has to go. ``needed``: the job cannot continue before the message has
    arrived; ``on_put``: called whenever there is something to send.
    """

    def __init__(self, *, limit: int) -> None:
        super().__init__(limit=limit)
        self.on_put: Callable[[], None] | None = None
        self._open: list[tuple[str, Message]] = []
        self._open_needed = False
        self._needed = 0  # number of the last needed frame

    def tell(self, process: str, message: Message, *, needed: bool = False) -> None:
        """Queue a message to a process; it is sent until it arrives."""
        self._open.append((process, message))
        self._open_needed |= needed
        self._stir()

    def put(self, frame: Message, *, needed: bool = False) -> None:
        """Queue a frame, after all queued before it."""
        number = self.add(frame)
        self._needed = number if needed else self._needed

    @property
    def waits(self) -> bool:
        """Whether a needed message is not confirmed yet."""
        return self._open_needed or self.awaits(self._needed)

    def add(self, frame: Message | Lazy, *, then: Callable[[], None] | None = None) -> int:
        self._seal()
        self._stir()
        return super().add(frame, then=then)

    def pump(self, link: Link) -> None:
        self._seal()
        super().pump(link)

    def reconnected(self) -> None:
        self._seal()
        super().reconnected()

    def _stir(self) -> None:
        if self.on_put is not None:
            self.on_put()

    def _seal(self) -> None:
        letters, self._open = self._open, []
        for frame in Tell.of(letters):
            number = super().add(frame)
            if self._open_needed:
                self._needed = number
        self._open_needed = False
