"""A rank's groups that stand by, formed beside the one it trains in, or waits outside of.

One thread forms them in the order in which the supervisor asks, the same for all members, so that
no two wait for each other.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.storelink import StoreLink
from trainchaos.recovery.standby.aside import AsideGroup
from trainchaos.recovery.transport.wire import StandBy, StoodBy

FORM_LIMIT_S = 5.0
"""Seconds until a group is given up whose other members do not come."""
CONNECT_LIMIT_S = 1.0
"""Gloo's timeout once all have come; for a peer that does not connect it waits five times that."""
LEAVE_AFTER_S = 1.0
"""Seconds from when groups are void until they are left: the recovery needs the processors."""


class Make(Protocol):
    """Makes a group that is not connected yet. ``check`` raises GenerationLost once it is not
    wanted any more; ``link``: to the store, for this group and others.
    """

    def __call__(self, order: StandBy, *, check: Callable[[], None], link: StoreLink) -> AsideGroup:
        """One more."""


class StandbyGroups:
    """``tell``: sends the supervisor an answer."""

    def __init__(self, make: Make, tell: Callable[[StoodBy], object]) -> None:
        self._make = make
        self._tell = tell
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[StandBy] = queue.SimpleQueue()
        self._busy = False
        self._generation = 0
        self._over = -1
        self._formed: dict[int, tuple[str, AsideGroup]] = {}
        self._left: list[AsideGroup] = []
        self._closed = threading.Event()

    def ask(self, order: StandBy) -> None:
        """Form a group, soon. On any thread."""
        with self._lock:
            if order.generation <= self._over or order.generation < self._generation:
                return
            if order.generation > self._generation:
                self._void()
                self._generation = order.generation
            self._asked.put(order)
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._work, name="standby-groups", daemon=True).start()

    def take(self, name: str) -> AsideGroup | None:
        """The group of that name, which the caller leaves in the end. All others are void, and left
        later.
        """
        with self._lock:
            found = [(lost, group) for lost, (own, group) in self._formed.items() if own == name]
            for lost, _ in found:
                del self._formed[lost]
            self._void()
            self._over = self._generation  # what is being formed is not wanted any more
            some_left = bool(self._left)
        if some_left:
            threading.Thread(target=self._leave_soon, name="standby-left", daemon=True).start()
        return found[0][1] if found else None

    def close(self) -> None:
        """Leave all of them."""
        self._closed.set()
        self.take("")
        self._leave_void()

    def _void(self) -> None:
        self._left += [group for _, group in self._formed.values()]
        self._formed = {}

    def _leave_void(self) -> None:
        with self._lock:
            left, self._left = self._left, []
        for group in left:
            group.leave()

    def _leave_soon(self) -> None:
        self._closed.wait(LEAVE_AFTER_S)
        self._leave_void()

    def _work(self) -> None:
        link = StoreLink()
        while True:
            self._leave_void()
            with self._lock:
                if self._asked.empty():
                    self._busy = False
                    return
                order = self._asked.get_nowait()
            if self._wanted(order):
                self._form(order, link)

    def _wanted(self, order: StandBy) -> bool:
        return order.generation == self._generation > self._over

    def _form(self, order: StandBy, link: StoreLink) -> None:
        until_s = time.monotonic() + FORM_LIMIT_S

        def check() -> None:
            if not self._wanted(order):
                raise GenerationLost("the generation is over")
            if time.monotonic() > until_s:
                raise GenerationLost(f"not all members came within {FORM_LIMIT_S:g} s")

        group = None
        try:
            group = self._make(order, check=check, link=link)
            group.form()
        except Exception as error:  # nobody depends on it: a group is formed when it is needed
            traceback.clear_frames(error.__traceback__)  # of what they hold open
            if group is not None:
                group.leave()
            return
        with self._lock:
            wanted = self._wanted(order)
            if wanted and order.lost in self._formed:
                self._left.append(self._formed[order.lost][1])
            if wanted:
                self._formed[order.lost] = order.group, group
        if wanted:
            self._tell(StoodBy(generation=order.generation, group=order.group))
        else:
            group.leave()
