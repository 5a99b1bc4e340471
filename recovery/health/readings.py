"""What health sources say: one measurement of one thing at one moment, and what could not be
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Whose it is; None where it is not known, or does not apply. All None: the job's. ``device``:
    slot or CUDA device.
    """

    rank: int | None = None
    node: int | None = None
    device: str | None = None

    def __str__(self) -> str:
        named = zip(("rank", "node", "device"), self, strict=True)
        return ", ".join(f"{name} {one}" for name, one in named if one is not None) or "job"


JOB = Place()


class Reading(NamedTuple):
    """``value`` in ``unit``, at ``time_s`` of the reader's monotonic clock. ``step``: of training,
    where the value belongs to one; ``text``: a value that is no number, such as a digest.

    A tuple rather than a frozen dataclass: a job of many ranks makes thousands a second, and a
    tuple takes a third of the time.
    """

    where: Place
    metric: str
    value: float
    unit: str
    time_s: float
    step: int | None = None
    text: str = ""


class Problem(NamedTuple):
    """A metric that a source cannot read. ``metric``: "" for all of a device's; ``device``: "" for
    all of a source's.
    """

    source: str
    metric: str
    device: str
    why: str

    def __str__(self) -> str:
        what = " of ".join(word for word in (self.metric, self.device) if word)
        return f"{self.source}: {f'{what} cannot' if what else 'nothing can'} be read: {self.why}"


MOST_PROBLEMS = 10_000
"""Remembered by a source: a machine has at most 16 devices of some 40 metrics, so that more are
nonsense.
"""
MOST_WORDS = 200


class Problems:
    """What a source cannot read: each (metric, device) is said once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._known: set[tuple[str, str]] = set()
        self._new: list[Problem] = []

    def note(self, metric: str, device: str, why: object) -> None:
        """Note one, unless it is known. ``why``: an exception, or words."""
        key = (metric, device)
        if key in self._known or len(self._known) >= MOST_PROBLEMS:
            return
        self._known.add(key)
        words = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else str(why)
        self._new.append(Problem(self._source, metric, device, words[:MOST_WORDS]))

    def take(self) -> Sequence[Problem]:
        """Those that are new since the last call."""
        new, self._new = self._new, []
        return new
