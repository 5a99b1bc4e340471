"""``job.busy("evaluation")``: a rank says that it does something else than training, and is not
taken for hung.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from chaos.events.log import Kind

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


class BusyBlocks:
    """What one rank is busy with: blocks within blocks, or one call that holds until the next phase
    of a step.

    ``note``: tells the supervisor for how many seconds the rank may be busy; ``write``: logs an
    event; ``rank``: its number, negative in a spare; ``wanted``: whether the generation is over.
    """

    def __init__(
        self,
        *,
        note: Callable[[int], None],
        write: Callable[..., Any],
        rank: Callable[[], int],
        wanted: Callable[[], bool],
    ) -> None:
        self._note = note
        self._write = write
        self._rank = rank
        self._wanted = wanted
        self._innermost: Busy | None = None

    def begin(self, what: str, limit_s: float) -> Busy:
        """The rank is busy from now on. Raises ValueError for a limit that is not above 0 s."""
        outer = self.entered()
        busy = Busy(
            what, limit_s, note=self._note, wanted=self._wanted, outer=outer, ended=self._ended
        )
        if self._innermost is not None and self._innermost is not outer:
            self._innermost.end()  # a call without a block holds until the next
        self._innermost = busy
        self._write(Kind.BUSY, rank=self._own_rank(), what=busy.what, limit_s=busy.limit_s)
        return busy

    def entered(self) -> Busy | None:
        """The innermost ``with`` block that the script is in, if in any."""
        busy = self._innermost
        while busy is not None and not busy.inside:
            busy = busy.outer
        return busy

    def training(self) -> None:
        """Training goes on: what was said without a ``with`` block does not hold any more."""
        if self._innermost is not None and self.entered() is None:
            self._innermost.end()
            self._innermost = None
            self._note(0)

    def _ended(self, busy: Busy, seconds: float) -> None:
        rank = self._own_rank()
        self._write(Kind.BUSY_ENDED, rank=rank, what=busy.what, seconds=round(seconds, 6))

    def _own_rank(self) -> int | None:
        rank = self._rank()
        return rank if rank >= 0 else None
