"""The part of a rank that listens while the training thread works.

One thread reading the supervisor's messages.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from recovery.wire import (
    Abort,
    Agreed,
    Channel,
    Extra,
    Inquiry,
    Join,
    LeaveOut,
    PauseRequest,
    Status,
    Stop,
    WireError,
)

EXIT_ORPHANED = 70
ABORT_REPEAT_S = 0.005
ABORT_LIMIT_S = 60.0


def end_process() -> None:
    """End this process at once, from any thread."""
    os._exit(EXIT_ORPHANED)


class Abortable(Protocol):
    """What the agent breaks when told to abort."""

    generation: int

    def abort(self) -> int:
        """Unblock whoever waits in it."""


class Agent:
    """Reads ``channel``; orders wait in ``orders``.

    The flags are plain attributes: looking costs the step nothing. ``orphaned``: called, on the agent's
    thread, when nobody supervises this rank any more; it must not train on then.
    """

    def __init__(self, channel: Channel, *, orphaned: Callable[[], None] = end_process) -> None:
        self.channel = channel
        self._orphaned = orphaned
        self.orders: queue.SimpleQueue[Join | LeaveOut | Abort | Stop] = queue.SimpleQueue()
        self.pause_wanted = self.save_wanted = False
        self.aborted_generation = 0
        self.told_generation = 0  # the last one it was told to join, whether its training thread knows or not
        self.agreed = -1  # the last step at which the replicas were the same, as far as is known
        self.status: Callable[[], Status] | None = None
        self.on_extra: Callable[[str, dict[str, Any]], None] | None = None
        self._group: Abortable | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="recovery-agent", daemon=True)

    def start(self) -> None:
        """Start listening, if it does not listen yet."""
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
        while True:
            try:
                messages = self.channel.receive()
            except WireError:
                messages = None
            if messages is None:
                self._orphaned()
                return
            for message in messages:
                self._handle(message)

    def _handle(self, message: object) -> None:
        if isinstance(message, Abort):
            self.aborted_generation = max(self.aborted_generation, message.generation)
            self.orders.put(message)
            self._break_group(message.generation)
        elif isinstance(message, Join | LeaveOut | Stop):
            if isinstance(message, Join):
                self.told_generation = message.generation
                self.agreed = message.agreed if message.agreed >= 0 else self.agreed
            self.orders.put(message)
        elif isinstance(message, Agreed):
            self.agreed = message.step
        elif isinstance(message, PauseRequest):
            self.pause_wanted, self.save_wanted = True, self.save_wanted or message.save
        elif isinstance(message, Inquiry) and self.status is not None:
            self.channel.send(self.status().model_copy(update={"number": message.number}))
        elif isinstance(message, Extra) and self.on_extra:
            self.on_extra(message.topic, message.payload)

    def _break_group(self, generation: int) -> None:
        # Repeated: the training thread may open a connection just after one sweep, while it forms the group.
        for _ in range(int(ABORT_LIMIT_S / ABORT_REPEAT_S)):
            group = self._group
            if group is None or group.generation > generation:
                return
            group.abort()
            if self._left.wait(ABORT_REPEAT_S):
                return
