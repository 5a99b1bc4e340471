"""Keeps the agents of a session in contact while no arm of theirs is played: other cells of the run
may take longer than the lease after which an agent takes its coordinator for lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from trainchaos.chaos.errors import InfrastructureError

EVERY_S = 0.2
"""How long one turn waits: an arm that begins waits for no more than that."""
LIMIT_S = 60.0
"""For a turn to end, which takes so long only where this process gets no processor."""
R = TypeVar("R")


class Tending(Generic[R]):
    """``turn``: waits up to so many seconds, and returns what happened. It is called on a thread of
    its own between ``begin`` and ``end``, and by nobody else meanwhile.
    """

    def __init__(self, turn: Callable[[float], Sequence[R]]) -> None:
        self._turn = turn
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._happened: list[R] = []
        self._error: Exception | None = None

    def begin(self) -> None:
        """From now on, until ``end``. Nothing where it has begun already."""
        if self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._run, name="tend-nodes", daemon=True)
            self._thread.start()

    def end(self) -> list[R]:
        """Stop, and return what happened since the last call, in order. Raises what a turn has
        raised, and InfrastructureError where a turn does not end.
        """
        if self._thread is not None:
            self._over.set()
            self._thread.join(LIMIT_S)
            if self._thread.is_alive():
                raise InfrastructureError(
                    f"the nodes' connections did not answer within {LIMIT_S:g} s",
                    hint="see what holds this machine up",
                )
            self._thread = None
        happened, self._happened = self._happened, []
        error, self._error = self._error, None
        if error is not None:
            raise error
        return happened

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._happened += self._turn(EVERY_S)
        except Exception as error:  # whoever plays the next arm raises it
            self._error = error
