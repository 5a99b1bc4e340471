"""What a rank exchanges in circles besides gradients: entered, counted, waited for and looked at as
gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainchaos.recovery.collectives.group import Circle
from trainchaos.recovery.collectives.reduce import Reducer


class Traffic:
    """``waiting``: called before (True) and after (False) each wait."""

    def __init__(self, reducer: Reducer, waiting: Callable[[bool], None]) -> None:
        self._reducer = reducer
        self._waiting = waiting

    def exchange(
        self,
        circle: Circle,
        ring_bytes: int,
        operation: Callable[[Any], dist.Work],
        *,
        sent: Sequence[Tensor] = (),
        got: Sequence[Tensor] = (),
    ) -> None:
        """Do it, and wait. ``ring_bytes``: what each rank would send in a ring without end;
        ``sent``, ``got``: tensors that others get of this rank, and it of them. Raises
        GenerationLost.
        """
        self.pass_on(sent)
        self._waiting(True)
        circle.wait(self._reducer.enter(ring_bytes, circle.ranks, lambda: circle.start(operation)))
        self._waiting(False)
        self._reducer.came(got)

    def pass_on(self, sent: Sequence[Tensor]) -> None:
        """Values are about to go to other ranks. Raises GenerationLost if it is too late."""
        if self._reducer.check:
            self._reducer.check()
        self._reducer.goes(sent)

    def await_peer(
        self, circle: Circle, work: Any, got: Sequence[Tensor], land: Callable[[], None]
    ) -> None:
        """Wait for what was begun with one other rank; ``land``: puts it into ``got``. Raises
        GenerationLost.
        """
        self._waiting(True)
        circle.wait(work)
        land()
        self._waiting(False)
        self._reducer.came(got)
