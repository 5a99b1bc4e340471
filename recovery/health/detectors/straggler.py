"""A rank computes for longer than its peers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainchaos.recovery.health.detectors.base import RATE, STEP_S, Alarm, tail
from trainchaos.recovery.health.readings.reading import Place, Reading
from trainchaos.recovery.health.statistics.blocks import Block, Blocks, of_others
from trainchaos.recovery.health.statistics.robust import median, spread
from trainchaos.recovery.health.statistics.tails import student_quantile

STEPS = 20
"""In a block: the median stands until 10 of them are slow."""
ROW = 4
"""Blocks in a row: the noise of a block may be heavy-tailed, and four such in a row are not."""
HISTORY = 1024
LEAST_HISTORY = 64


@dataclass(kw_only=True)
class StragglerDetector:
    """Metric ``compute``, s. Value: a block's own compute time over the median of the peers';
    threshold: the same, above which it is for ``ROW`` blocks of ``STEPS`` steps in a row.

    Null model: log ratios of all ranks, lasting differences between ranks included, have one level
    and a scale that their history shows, with noise of Student's t with 3 degrees of freedom that
    is independent between blocks; then ROW of them in a row are above the quantile of p^(1/ROW)
    with probability p. ``least``: a rank that is 10 % slower costs a job of its kind 10 %; less is
    within what equal devices differ by.
    """

    what: str = field(default="straggler", init=False)
    rate: float = RATE
    step_s: float = STEP_S
    least: float = 0.1
    _history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY), repr=False)
    _rows: dict[Place, tuple[int, float]] = field(default_factory=dict, repr=False)
    _alarmed: set[Place] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        block_s = STEPS * self.step_s
        self._blocks = Blocks(block_s=block_s, least=STEPS // 4)
        self._scales = student_quantile(tail(self.rate, block_s) ** (1.0 / ROW))

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found: list[Alarm] = []
        for reading in readings:
            if reading.metric == "compute" and reading.value > 0.0:
                for block in self._blocks.add(reading):
                    found += self._judge(block)
        return found

    def _judge(self, block: Block) -> Iterator[Alarm]:
        peers = of_others(block.medians)
        ratios = {where: math.log(block.medians[where] / peers[where]) for where in peers}
        known = len(self._history) >= LEAST_HISTORY
        limit = math.log1p(self.least)
        if known:
            level = median(self._history)
            limit = max(limit, level + self._scales * spread(list(self._history), level))
        self._history.extend(ratios.values())
        self._forget(ratios.keys() | block.medians.keys())
        for where, ratio in ratios.items() if known else ():
            if ratio <= limit:
                self._rows.pop(where, None)
                self._alarmed.discard(where)
                continue
            row, since_s = self._rows.get(where, (0, block.start_s))
            self._rows[where] = row + 1, since_s
            if row + 1 >= ROW and where not in self._alarmed:
                self._alarmed.add(where)
                yield Alarm(
                    what=self.what,
                    where=where,
                    since_s=since_s,
                    value=math.exp(ratio),
                    threshold=math.exp(limit),
                    evidence={
                        "own_s": block.medians[where],
                        "peers_s": peers[where],
                        "peers": len(peers) - 1,
                        "blocks": row + 1,
                    },
                )

    def _forget(self, there: set[Place]) -> None:
        """Ranks that are not in a block are not in a row of blocks either."""
        for where in self._rows.keys() - there:
            del self._rows[where]
            self._alarmed.discard(where)
