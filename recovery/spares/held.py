"""Buffers of reduced gradients that are kept after their step: for a spare that has not received
them yet, and of the last step for one that lacks it at its promotion.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from trainchaos.recovery.collectives.buckets import Buffers
from trainchaos.recovery.spares.hostcopy import Fence, HostCopy


def _nothing() -> None:
    """Nobody has to be told."""


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
        self._copy: HostCopy | None = None

    def lend(self) -> tuple[HostCopy, Callable[[], None]]:
        """The bytes of each buffer's gradients, and what to call once they are of no more use. Of
        buffers on a GPU there is one copy, however many ask; who has it does not keep the buffers.
        For the training thread.
        """
        gradients = [part.gradients for part in self.buffers]
        if not any(part.is_cuda for part in gradients):
            return HostCopy(gradients, apart=False), self.use().release
        if self._copy is None:
            self._copy = HostCopy(gradients, apart=True)
        return self._copy, _nothing

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
                fence = None if self._copy is None else self._copy.fence
                self._pool.free.append((self.buffers, fence))


class Pool:
    """Sets of buffers that are ``free`` to be used again, at most ``most``; thread-safe."""

    def __init__(self, *, most: int = 2) -> None:
        self.lock = threading.Lock()
        self.free: list[tuple[list[Buffers], Fence | None]] = []
        self.most = most

    def take(self) -> list[Buffers]:
        """A free set, or an empty one: new ones are made then."""
        with self.lock:
            buffers, fence = self.free.pop() if self.free else ([], None)
        if fence is not None:
            fence.hold_writers()
        return buffers

    def close(self) -> None:
        """No set is used again."""
        with self.lock:
            self.most = 0
            self.free.clear()
