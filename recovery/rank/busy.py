"""``job.busy("evaluation")``: a rank says that it does something else than training, and is not
taken for hung.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

LIMIT_S = 3600.0
LONGEST = 200  # characters of what is said


class Busy:
    """From its making on, to the end of its ``with`` block, or to the next phase of a step where
    there is none. ``ended``: told once, with the seconds that it took.
    """

    def __init__(
        self,
        what: str,
        limit_s: float,
        *,
        note: Callable[[int], None],
        wanted: Callable[[], bool],
        outer: Busy | None = None,
        ended: Callable[[Busy, float], None] = lambda busy, seconds: None,
    ) -> None:
        if not 0 < limit_s < float("inf"):
            raise ValueError(
                f"busy with {what} for {limit_s} s: say how long it may take, more than 0 seconds"
            )
        self.what = str(what)[:LONGEST]
        self.outer = outer
        self.limit_s = math.ceil(limit_s)
        self._note = note
        self._wanted = wanted
        self.inside = False
        self._ended = ended
        self._since_s: float | None = time.monotonic()
        note(self.limit_s)

    @property
    def wanted(self) -> bool:
        """Whether the job waits for this rank, because another failed: a long evaluation may break
        off then.
        """
        return self._wanted()

    def __enter__(self) -> Busy:
        self.inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.inside = False
        self._note(self.outer.limit_s if self.outer is not None else 0)
        self.end()

    def end(self) -> None:
        """It is over, if it was not before."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None:
            self._ended(self, time.monotonic() - since_s)
