"""Links that alternate between down and up, on one thread for all links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainchaos.chaos.fault.targets import LinkShape

Link = tuple[str, str]
JOIN_LIMIT_S = 15.0


@dataclass(kw_only=True)
class _Turn:
    """The state of one flapping link. ``next_s``: monotonic time of its next change."""

    down_s: float
    up_s: float
    down: bool
    next_s: float


class LinkFlapper:
    """``turned``: called on the thread with the links that have just changed."""

    def __init__(self, turned: Callable[[Sequence[Link]], None]) -> None:
        self._turned = turned
        self._turns: dict[Link, _Turn] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def set(self, link: Link, shape: LinkShape) -> None:
        """Flap from now on, starting down; or stop flapping."""
        with self._changed:
            if shape.down_s <= 0:
                self._turns.pop(link, None)
            else:
                now = time.monotonic()
                self._turns[link] = _Turn(
                    down_s=shape.down_s, up_s=shape.up_s, down=True, next_s=now + shape.down_s
                )
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="flapping links", daemon=True
                    )
                    self._thread.start()
            self._changed.notify()

    def down(self) -> list[Link]:
        """The links that are down now."""
        with self._changed:
            return [link for link, turn in self._turns.items() if turn.down]

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._turns.clear()
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                due = [link for link, turn in self._turns.items() if turn.next_s <= now]
                for link in due:
                    turn = self._turns[link]
                    turn.down = not turn.down
                    turn.next_s += turn.down_s if turn.down else turn.up_s
                if not due:
                    next_s = min((turn.next_s for turn in self._turns.values()), default=None)
                    self._changed.wait(None if next_s is None else max(0.0, next_s - now))
                    continue
            self._turned(due)
