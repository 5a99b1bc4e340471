"""Taints a place for what was found there: a credible alarm or report, or a preflight that it
failed. In a thread of its own, as another process may hold the list for long.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

from trainchaos.chaos.errors import ChaosError
from trainchaos.recovery.health.credible import announced
from trainchaos.recovery.health.readings.reports import HealthReport
from trainchaos.recovery.health.readings.signs import Sign
from trainchaos.recovery.health.taints import MAX_TEXT, TaintList, made

CLOSE_LIMIT_S = 5.0
"""For what is still to be written at the end. Writing takes milliseconds unless another holds the
list (``recovery.health.taints.LOCK_LIMIT_S``).
"""
MOST_WAITING = 1000
LOOK_S = 60.0


class AlarmTaints:
    """Adds to ``taints``. Each (place, reason) once, and nothing of an injected report: the place
    itself is well. Call ``close`` at the end.
    """

    def __init__(
        self, taints: TaintList, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._taints, self._now = taints, now
        self._known: set[tuple[str, str]] = set()
        self._wanted: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._done: deque[tuple[str, str, str]] = deque()
        self._thread = threading.Thread(target=self._serve, name="taints", daemon=True)
        self._thread.start()

    def heard(self, sign: Sign, host: str, device: str | None) -> None:
        """Something was found on a ``device`` of a host (None: on the host). Only what announces a
        failure taints. Raises PlaybookError.
        """
        why = announced(sign)
        if not why or getattr(sign, "source", "") == "injected":
            return
        if isinstance(sign, HealthReport):
            evidence: dict[str, Any] = {"what": sign.what, "code": sign.code}
        else:
            evidence = {"what": sign.what, "value": sign.value, "threshold": sign.threshold}
        self.taint(host, device, why, evidence, by="alarm")

    def taint(
        self,
        host: str,
        device: str | None,
        why: str,
        evidence: dict[str, Any],
        *,
        by: Literal["alarm", "preflight"],
    ) -> None:
        """Have a place tainted."""
        place = host if device is None else f"{host}/{device}"
        if (place, why) in self._known:
            return
        self._known.add((place, why))
        fields = {"node" if device is None else "device": place, "reason": _short(why), "by": by}
        try:
            self._wanted.put_nowait({**fields, "since": self._now(), "evidence": evidence})
        except queue.Full:
            self._done.append((place, by, f"more than {MOST_WAITING} wait to be written"))

    def take(self) -> list[tuple[str, str, str]]:
        """What became of them since the last call: place, origin, and why it could not be written
        ("": it was).
        """
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Write what waits, and end the thread. Safe to repeat."""
        if self._thread.is_alive():
            try:
                self._wanted.put(None, timeout=CLOSE_LIMIT_S)
            except queue.Full:
                return  # it is a daemon, and ends with the process
            self._thread.join(CLOSE_LIMIT_S)

    def _serve(self) -> None:
        while True:
            try:
                fields = self._wanted.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if fields is None:
                return
            failed = ""
            try:
                self._taints.add(made(fields), self._now())
            except ChaosError as error:
                failed = str(error)
            place = str(fields.get("node") or fields.get("device"))
            self._done.append((place, str(fields["by"]), failed))


def _short(text: str) -> str:
    """A text as a taint may have it."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable if len(printable) <= MAX_TEXT else f"{printable[: MAX_TEXT - 3]}..."
