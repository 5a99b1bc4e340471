"""Which connections have something to read or to send, and which nodes have to be looked after, so
that a turn costs as much as there is to do, however many nodes there are.
"""

from __future__ import annotations

import heapq
import selectors
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE

from trainchaos.recovery.nodes.coordinator.node_state import NodeState


class Switchboard:
    """The connections of all nodes, kept between turns."""

    def __init__(self) -> None:
        self._selector: selectors.EpollSelector | None = None
        self._stirred: dict[int, NodeState] = {}
        self._listens: int | None = None
        self._agenda: list[tuple[int, int]] = []  # when, node
        self._due_ns: dict[int, int] = {}

    # ---- connections

    def _open(self) -> selectors.EpollSelector:
        self._selector = self._selector or selectors.EpollSelector()
        return self._selector

    def close(self) -> None:
        """Let go of the descriptor, once there is no connection; ``listens`` makes another."""
        if self._selector is not None:
            self._selector.close()
            self._selector = None

    def listens(self, fd: int | None) -> None:
        """Wait for this descriptor as well, in place of the one before; None: no more."""
        if self._listens is not None:
            self._forget(self._listens)
        self._listens = fd
        if fd is not None:
            self._open().register(fd, EVENT_READ)

    def connected(self, state: NodeState) -> None:
        """A node has a new connection, may have something to send over it, and is to be looked
        after at once.
        """
        if state.link is None:
            return
        fd = state.link.fileno()
        self._open().register(fd, EVENT_READ, state)
        state.on_hang_up = partial(self._forget, fd)
        state.post.on_put = partial(self.stir, state)
        self.stir(state)
        self.look_at(state, 0)

    def stir(self, state: NodeState) -> None:
        """Something waits to be sent to a node."""
        self._stirred[state.node] = state

    def take_stirred(self) -> Iterable[NodeState]:
        """The nodes to which something waits to be sent, or may; they are forgotten here."""
        stirred, self._stirred = self._stirred, {}
        return stirred.values()

    def awaits_room(self, state: NodeState, *, more: bool) -> None:
        """Whether a node's connection did not take all, so that ``wait`` stirs it once it does.
        ``more``: it did not.
        """
        if state.link is None:
            return
        fd, wanted = state.link.fileno(), EVENT_READ | (EVENT_WRITE if more else 0)
        if self._open().get_key(fd).events != wanted:
            self._open().modify(fd, wanted, state)

    def wait(self, timeout_s: float) -> tuple[list[NodeState], bool]:
        """Wait until something comes, at most so long: nodes from which something came, and whether
        agents wait to be admitted. Nodes that take more again are stirred.
        """
        read: list[NodeState] = []
        dialled = False
        if self._selector is None:
            time.sleep(timeout_s)
            return read, dialled
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                dialled = True
                continue
            if events & EVENT_WRITE:
                self.stir(key.data)
            if events & EVENT_READ:
                read.append(key.data)
        return read, dialled

    def _forget(self, fd: int) -> None:
        """Closing would do, unless a process that was forked meanwhile holds a copy."""
        if self._selector is not None:
            with suppress(KeyError):
                self._selector.unregister(fd)

    # ---- what is due

    def look_at(self, state: NodeState, at_ns: int) -> None:
        """Look after a node at that time, and not before; an earlier request is forgotten."""
        self._due_ns[state.node] = at_ns
        heapq.heappush(self._agenda, (at_ns, state.node))

    @property
    def next_ns(self) -> int | None:
        """When a node has to be looked after next; None: there is no node."""
        while self._agenda and self._due_ns.get(self._agenda[0][1]) != self._agenda[0][0]:
            heapq.heappop(self._agenda)
        return self._agenda[0][0] if self._agenda else None

    def due(self, now_ns: int) -> Iterator[int]:
        """Nodes that have to be looked after by now; each has to be asked for anew."""
        while (at_ns := self.next_ns) is not None and at_ns <= now_ns:
            _, node = heapq.heappop(self._agenda)
            del self._due_ns[node]
            yield node
