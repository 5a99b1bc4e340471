"""A group that is formed in the background, while its process trains in another group or waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from trainchaos.recovery.collectives.dialing import NotingStore
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.sockets import connections, keep_alive

PAUSE_S = 0.005


class AsideGroup(Group):
    """As ``Group``, with gloo. ``group``: its name among those that stand by in ``generation``.

    Other threads may open sockets while it is formed, so those of this group are known by their
    addresses: until all of them are, ``abort`` breaks none. Each group listens at a port of its
    own, which is closed with it: gloo does not tell a port that a set-up has failed, and a peer
    that connects there later crashes the process.
    """

    def __init__(self, *, group: str, **words: Any) -> None:
        super().__init__(**words)
        self.called += f"-standby-{group}"
        self._stores: list[NotingStore] = []
        self._own = set()
        self._formed = False

    def form(self) -> None:
        """As for any group; nothing is left to do the second time."""
        if not self._formed:
            try:
                super().form()
            finally:
                self._forget_store()
            self._formed = True

    def adopt(self, generation: int, check: Callable[[], None]) -> None:
        """Be the group of a generation, which ``check`` tells when it is aborted."""
        self.generation, self._check = generation, check

    def _forget_store(self) -> None:
        """Nothing of this group, which may be kept for long, keeps a connection to the store."""
        self._stores.clear()
        self._link = self._roll = None

    def _meet(self, client: Any, ranks: Sequence[int], called: str) -> Any:
        self._await_all(client, ranks, called)
        return super()._meet(client, ranks, called)

    def _gloo(self, store: Any, place: int, size: int, options: Any) -> Any:
        noting = NotingStore(store, place)
        self._stores.append(noting)
        return super()._gloo(noting, place, size, options)

    def _await_all(self, client: Any, ranks: Sequence[int], called: str) -> None:
        """Wait until all are about to connect: gloo's own wait for one that does not cannot be
        ended. Raises GenerationLost.
        """
        own = f"{called}/here-{self.rank}"
        client.set(own, "")
        keys = [f"{called}/here-{rank}" for rank in ranks]
        while not client.check(keys):
            if self._aborted:
                # one that came late may leave a group whose keys are deleted already
                client.delete_key(own)
                raise GenerationLost("aborted while the group was formed")
            time.sleep(PAUSE_S)

    def _opened(self) -> set[str]:
        own = {address for store in self._stores for address in store.own}
        peers = {address for store in self._stores for address in store.peers}
        found = connections(own, peers)
        keep_alive(found)
        return found
