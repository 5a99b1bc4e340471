"""``job.busy("evaluation")``: a rank reports work other than training, so that it is not taken for
hung.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.collectives.lost import GenerationLost

LIMIT_S = 3600.0
LONGEST = 200  # characters kept of the description


class Busy:
    """Lasts from its creation to the end of its ``with`` block or, without a block, to the next
    phase of a step. ``outer``: the block that it is inside of.
    """

    def __init__(self, blocks: BusyBlocks, what: str, limit_s: float, outer: Busy | None) -> None:
        if not 0 < limit_s < float("inf"):
            raise ValueError(
                f"busy with {what} for {limit_s} s: say how long it may take, more than 0 seconds"
            )
        self.what = str(what)[:LONGEST]
        self.outer = outer
        self.limit_s = math.ceil(limit_s)
        self.inside = False
        self._blocks = blocks
        self._since_s: float | None = time.monotonic()
        blocks.note(self.limit_s)

    @property
    def wanted(self) -> bool:
        """Whether another rank has failed and the job waits for this one: a long evaluation may
        stop early then.
        """
        return self._blocks.wanted()

    def __enter__(self) -> Busy:
        self.inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.inside = False
        self._blocks.note(self.outer.limit_s if self.outer is not None else 0)
        self.end()
        return self.outer is None and isinstance(error, GenerationLost) and self._blocks.lost(error)

    def end(self) -> None:
        """End it, if it has not ended yet."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None:
            self._blocks.ended(self, time.monotonic() - since_s)


class BusyBlocks:
    """What one rank is busy with: nested ``with`` blocks, or one call that lasts until the next
    phase of a step.

    ``note``: tells the supervisor for how many seconds the rank may be busy; ``write``: logs an
    event; ``rank``: its number, negative in a spare; ``wanted``: whether the generation is over;
    ``lost``: called when the generation is lost within a block, returns whether that ends the block
    without an error.
    """

    def __init__(
        self,
        *,
        note: Callable[[int], None],
        write: Callable[..., Any],
        rank: Callable[[], int],
        wanted: Callable[[], bool],
        lost: Callable[[GenerationLost], bool] = lambda error: False,
    ) -> None:
        self.note, self.wanted, self.lost = note, wanted, lost
        self._write = write
        self._rank = rank
        self._innermost: Busy | None = None

    def begin(self, what: str, limit_s: float) -> Busy:
        """The rank is busy from now on. Raises ValueError for a limit that is not above 0 s."""
        outer = self.entered()
        busy = Busy(self, what, limit_s, outer)
        if self._innermost is not None and self._innermost is not outer:
            self._innermost.end()  # a call without a block lasts until the next call
        self._innermost = busy
        self._write(Kind.BUSY, rank=self._own_rank(), what=busy.what, limit_s=busy.limit_s)
        return busy

    def entered(self) -> Busy | None:
        """The innermost ``with`` block that the script is in, or None."""
        busy = self._innermost
        while busy is not None and not busy.inside:
            busy = busy.outer
        return busy

    def training(self) -> None:
        """Training goes on: a call without a ``with`` block ends here."""
        if self._innermost is not None and self.entered() is None:
            self._innermost.end()
            self._innermost = None
            self.note(0)

    def ended(self, busy: Busy, seconds: float) -> None:
        """What the rank was busy with is done."""
        rank = self._own_rank()
        self._write(Kind.BUSY_ENDED, rank=rank, what=busy.what, seconds=round(seconds, 6))

    def _own_rank(self) -> int | None:
        rank = self._rank()
        return rank if rank >= 0 else None
