"""The rank's agent: listens to the supervisor while the training thread works.

One thread reads the supervisor's messages.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import structs

from trainchaos.recovery.process.stacks import STACK_SIGNAL
from trainchaos.recovery.rank.membership import Order, SupervisorOrders
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.stream import MessageError
from trainchaos.recovery.transport.wire import (
    Abort,
    Digest,
    Extra,
    Feed,
    Inquiry,
    Recall,
    Recalled,
    StandBy,
    Status,
)

EXIT_ORPHANED = 70
ABORT_REPEAT_S = 0.005
ABORT_LIMIT_S = 60.0


def end_process() -> None:
    """End this process at once, from any thread."""
    os._exit(EXIT_ORPHANED)


class Abortable(Protocol):
    """A group that the agent breaks when the supervisor aborts its generation."""

    generation: int

    def abort(self) -> int:
        """Unblock every thread that waits in the group."""

    def unfinished(self) -> int:
        """Operations begun and not done."""


class RankAgent:
    """Reads ``channel``; orders wait in ``orders``, all other messages are noted in ``heard``.

    Both are plain attributes, so reading them costs a step nothing. ``orphaned``: called on the
    agent's thread when this rank has lost its supervisor; it must stop training then. ``status``:
    returns the answer to an inquiry, given its number. ``digest``: the last one sent; a supervisor
    that was lost may have read it and not those of the other ranks, so the next one gets it too.
    ``recall``: returns the answer to a ``Recall``, given its number; called on a thread of its own,
    because a device that does not answer may hold it up, and orders must not wait for that.
    """

    def __init__(self, channel: Channel, *, orphaned: Callable[[], None] = end_process) -> None:
        self.channel = channel
        self._orphaned = orphaned
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.heard = SupervisorOrders()
        self.status: Callable[[int], Status] | None = None
        self.recall: Callable[[int], Recalled] | None = None
        self._recalling: threading.Thread | None = None
        self.digest: Digest | None = None
        self.on_feed: Callable[[Feed], None] | None = None
        self.on_stand_by: Callable[[StandBy], None] | None = None
        self.on_extra: Callable[[str, dict[str, Any]], None] | None = None
        self._group: Abortable | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="recovery-agent", daemon=True)

    def start(self) -> None:
        """Start the agent's thread if it is not running."""
        if self._thread.ident is None:
            self._thread.start()

    def entering(self, group: Abortable) -> None:
        """The training thread is about to use this group."""
        self._left.clear()
        self._group = group

    def left(self) -> None:
        """The training thread is out of its group."""
        self._group = None
        self._left.set()

    def _listen(self) -> None:
        # its stack, or that of a recall, which inherits this, would be written for the training
        # thread's: both requests come at once, and a kernel may give the signal to who is awake
        signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
        while True:
            try:
                messages = self.channel.receive()
            except MessageError:
                messages = None
            if messages is None:
                self._orphaned()
                return
            for message in messages:
                self._handle(message)

    def _handle(self, message: object) -> None:
        order = self.heard.take(message)
        if order is not None:
            self.orders.put(order)
        if isinstance(message, Abort):
            self._break_group(message.generation)
        elif isinstance(message, Inquiry) and self.status is not None:
            if self.digest is not None:  # first, since the last status ends the takeover
                self.channel.send(self.digest)
            self.channel.send(self.status(message.number))
        elif isinstance(message, Recall) and self.recall is not None:
            self._answer(self.recall, message.number)
        elif isinstance(message, Feed) and self.on_feed:
            self.on_feed(message)
        elif isinstance(message, StandBy) and self.on_stand_by:
            self.on_stand_by(message)
        elif isinstance(message, Extra) and self.on_extra:
            self.on_extra(message.topic, message.payload)

    def _answer(self, recall: Callable[[int], Recalled], number: int) -> None:
        """One at a time: while the last one is held up, another would be too."""
        if self._recalling is None or not self._recalling.is_alive():
            self._recalling = threading.Thread(
                target=lambda: self.channel.send(self._with_begun(recall(number))),
                name="recall",
                daemon=True,
            )
            self._recalling.start()

    def _with_begun(self, told: Recalled) -> Recalled:
        group = self._group
        return told if group is None else structs.replace(told, begun=group.unfinished())

    def _break_group(self, generation: int) -> None:
        # Repeated, because the training thread may open a connection just after a sweep while it
        # forms the group.
        for _ in range(int(ABORT_LIMIT_S / ABORT_REPEAT_S)):
            group = self._group
            if group is None or group.generation > generation:
                return
            group.abort()
            if self._left.wait(ABORT_REPEAT_S):
                return
