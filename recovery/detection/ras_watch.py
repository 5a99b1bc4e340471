"""Asks NCCL's RAS beside the supervisor's loop, which waits for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from trainchaos.recovery.detection.ras import RasError, RasFinding, ask
from trainchaos.recovery.process.local import ras_address

EVERY_S = 2.0
"""Shortest time between two requests: each has every process of the job answer, all of them on this
machine.
"""


class RasWatch:
    """Asks in a thread of its own, one request at a time. ``asks``, ``address``: of tests."""

    def __init__(
        self,
        asks: Callable[[str], RasFinding] = ask,
        address: Callable[[], str] = ras_address,
    ) -> None:
        self._asks = asks
        self._address = address
        self._thread: threading.Thread | None = None
        self._asked_s: float | None = None
        self._found: RasFinding | None = None

    def may_ask(self, now_s: float) -> bool:
        """Whether no request is under way, nor was made lately. ``now_s``: monotonic seconds."""
        return not self.under_way and (self._asked_s is None or now_s >= self._asked_s + EVERY_S)

    def ask(self, pids: Mapping[int, str], now_s: float) -> None:
        """Begin to ask about these processes of this machine; nobody is asked about none."""
        self._asked_s, self._found = now_s, None
        if pids and (address := self._address()):
            self._thread = threading.Thread(
                target=self._ask, args=(address, dict(pids)), name="ras", daemon=True
            )
            self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether an answer may still come; for ``recovery.detection.ras.LIMIT_S`` at most."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def found(self) -> RasFinding | None:
        """The answer to the last request; None: there is none (yet), as with gloo."""
        return self._found

    def _ask(self, address: str, pids: Mapping[int, str]) -> None:
        try:
            self._found = self._asks(address).of(pids)
        except RasError:
            pass  # nobody listens where there is no NCCL, and what is no evidence is not written
