"""Buffers of reduced gradients that are kept after their step: for a spare that has not received
them yet, and of the last step for one that lacks it at its promotion.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from trainchaos.recovery.collectives.buckets import Buffers


class HeldGradients:
    """The gradients of one step, as the optimizer was given them. ``none``: parameters without;
    ``loss``: of the step, known once it is applied.

    Used until each of those that use them has called ``release``.
    """

    def __init__(
        self, step: int, buffers: Sequence[Buffers], none: Sequence[str], pool: Pool
    ) -> None:
        self.step = step
        self.loss = 0.0
        self.buffers = list(buffers)
        self.none = list(none)
        self._pool = pool
        self._uses = 1

    def use(self) -> HeldGradients:
        """One more user. Called by one that uses them, so that they are not gone."""
        with self._pool.lock:
            self._uses += 1
        return self

    def release(self) -> None:
        """One user less; after the last the buffers are free for another step."""
        with self._pool.lock:
            self._uses -= 1
            if not self._uses and len(self._pool.free) < self._pool.most:
                self._pool.free.append(self.buffers)


class Pool:
    """Sets of buffers that are ``free`` to be used again, at most ``most``; thread-safe."""

    def __init__(self, *, most: int = 2) -> None:
        self.lock = threading.Lock()
        self.free: list[list[Buffers]] = []
        self.most = most

    def take(self) -> list[Buffers]:
        """A free set, or an empty one: new ones are made then."""
        with self.lock:
            return self.free.pop() if self.free else []
