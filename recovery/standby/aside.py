"""A group that is formed in the background, while its process trains in another group or waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainchaos.recovery.collectives.circle import GenerationLost
from trainchaos.recovery.collectives.dialing import NotingStore
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.sockets import connections, keep_alive

PAUSE_S = 0.005


class AsideGroup(Group):
    """As ``Group``, with gloo. ``group``: its name among those that stand by in ``generation``;
    ``devices``: of a process, for all of its groups, made with the first: each has a thread of
    gloo's that wakes up a hundred times a second.

    Other threads may open sockets while it is formed, so those of this group are known by their
    addresses: until all of them are, ``abort`` breaks none.
    """

    def __init__(self, *, group: str, devices: list[Any], **words: Any) -> None:
        super().__init__(**words)
        self._devices = devices
        self.called += f"-standby-{group}"
        self._stores: list[NotingStore] = []
        self._own = set()
        self._formed = False

    def form(self) -> None:
        """As for any group; nothing is left to do the second time."""
        if not self._formed:
            super().form()
            self._formed = True

    def adopt(self, generation: int, check: Callable[[], None]) -> None:
        """Be the group of a generation, which ``check`` tells when it is aborted."""
        self.generation, self._check = generation, check

    def _listening(self) -> Any:
        if not self._devices:
            self._devices.append(super()._listening())
        return self._devices[0]

    def _gloo(self, store: Any, place: int, size: int, options: Any) -> Any:
        self._await_all(store, place, size)
        noting = NotingStore(store, place)
        self._stores.append(noting)
        return super()._gloo(noting, place, size, options)

    def _await_all(self, store: Any, place: int, size: int) -> None:
        """Wait until all are about to connect: gloo's own wait cannot be ended, and leaves on the
        device what crashes this process if a peer connects later. Raises GenerationLost.
        """
        store.set(f"here-{place}", "")
        keys = [f"here-{other}" for other in range(size)]
        while not store.check(keys):
            if self._aborted:
                raise GenerationLost("aborted while the group was formed")
            time.sleep(PAUSE_S)

    def _opened(self) -> set[str]:
        own = {address for store in self._stores for address in store.own}
        peers = {address for store in self._stores for address in store.peers}
        self._stores.clear()
        found = connections(own, peers) - self._foreign  # those of the process's other groups
        keep_alive(found)
        return found
