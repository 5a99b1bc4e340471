"""One operation with one other rank, begun and waited for as every wait here is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainchaos.recovery.collectives.group import Circle
from trainchaos.recovery.policy.jobconfig import COLLECTIVE_TIMEOUT_S

_LAST_RESORT = timedelta(seconds=COLLECTIVE_TIMEOUT_S)


def begin(circle: Circle, operation: Callable[[Any], dist.Work]) -> Any:
    """Begin an operation on torch's process group of ``circle``. Raises GenerationLost."""
    work = circle.start(operation)
    return _Waiting(work, circle.is_over) if circle.backend == "gloo" else work


def send(circle: Circle, tensor: Tensor, to: int, tag: int) -> Any:
    """Begin to send a tensor to one rank of the circle. Raises GenerationLost."""
    place = circle.ranks.index(to)
    return begin(circle, lambda made: made.send([tensor], place, tag))


def receive(circle: Circle, tensor: Tensor, source: int, tag: int) -> Any:
    """Begin to fill a tensor with what one rank of the circle sends. Raises GenerationLost."""
    place = circle.ranks.index(source)
    return begin(circle, lambda made: made.recv([tensor], place, tag))


class _Waiting:
    """One of gloo's operations with one other rank, waited for on a thread of its own: a wait of
    gloo's that ends by its time limit closes the connection, so that it cannot be looked up from.
    """

    def __init__(self, work: dist.Work, is_over: Callable[[dist.Work], None]) -> None:
        self._work = work
        self._is_over = is_over
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._await, name="await-peer", daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError as torch does, also when the time is up."""
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not yet")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._over.is_set()

    def _await(self) -> None:
        try:
            self._work.wait(_LAST_RESORT)
        except RuntimeError as error:
            self._error = error
        self._is_over(self._work)
        self._over.set()
