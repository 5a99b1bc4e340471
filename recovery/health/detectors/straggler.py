"""A rank computes for longer than its peers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainchaos.chaos.stats import student_quantile
from trainchaos.recovery.health.detectors.base import MOST_PLACES, RATE, STEP_S, Alarm, tail
from trainchaos.recovery.health.readings.reading import Place, Reading
from trainchaos.recovery.health.statistics.blocks import Block, Blocks, of_others
from trainchaos.recovery.health.statistics.robust import NU, median, spread

STEPS = 20
"""In a block: the median stands until 10 of them are slow."""
ROW = 4
"""Blocks in a row: the noise of a block may be heavy-tailed, and four such in a row are not."""
PAST = 64
"""Blocks of a rank's own past: a minute, in which a lasting difference hardly changes."""
GAP = 8
"""Latest blocks that are not part of it; and blocks after which a rank that was away is another."""
LEAST_PAST = 24
LASTING_ROW = 32
"""Blocks in a row of a rank that was never faster: half a minute, as it is no news."""
HISTORY = 1024
LEAST_HISTORY = 64


@dataclass(kw_only=True)
class _Rank:
    block: int = 0
    past: deque[float] = field(default_factory=lambda: deque(maxlen=PAST + GAP))
    row: int = 0
    lasting: int = 0
    since_s: float = 0.0
    alarmed: bool = False

    def usual(self) -> float | None:
        """Its ratio to its peers before now; None: not known yet."""
        past = list(self.past)[:-GAP]
        return median(past) if len(past) >= LEAST_PAST else None


@dataclass(kw_only=True)
class StragglerDetector:
    """Metric ``compute``, s. Value: a block's own compute time over the median of the peers';
    threshold: the same, above which it is for ``ROW`` blocks of ``STEPS`` steps in a row.

    A rank is one if it is slower than its peers by ``least`` and slower than it was itself by more
    than noise explains; or for ``LASTING_ROW`` blocks slower than its peers by ``lasting``,
    whatever it was.

    Null model: a rank's log ratio to its peers is a lasting difference of less than ``lasting``,
    which changes in a minute by less than the noise of a block, and noise, of a scale that the
    history of all ranks shows, of Student's t with 3 degrees of freedom and independent between
    blocks: then ROW of them in a row are above the quantile of p^(1/ROW) with probability p.
    ``least``: a rank that is 10 % slower costs a job of its kind 10 %; less is within what equal
    devices differ by. ``lasting``: what no pair of equal devices differs by. Both are our choice.
    ``step_s``: a longer step makes longer blocks by itself.
    """

    what: str = field(default="straggler", init=False)
    rate: float = RATE
    step_s: float = STEP_S
    least: float = 0.1
    lasting: float = 0.25
    _noise: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY), repr=False)
    _ranks: dict[Place, _Rank] = field(default_factory=dict, repr=False)
    _block: int = 0

    def __post_init__(self) -> None:
        block_s = STEPS * self.step_s
        self._blocks = Blocks(block_s=block_s, least=STEPS // 4, wanted=STEPS)
        self._scales = student_quantile(tail(self.rate, block_s) ** (1.0 / ROW), NU)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found: list[Alarm] = []
        for reading in readings:
            if reading.metric == "compute" and reading.value > 0.0:
                for block in self._blocks.add(reading):
                    found += self._judge(block)
        return found

    def _judge(self, block: Block) -> Iterator[Alarm]:
        self._block += 1
        peers = of_others(block.medians)
        noise = math.inf
        if len(self._noise) >= LEAST_HISTORY:
            level = median(self._noise)
            noise = level + self._scales * spread(list(self._noise), level)
        if len(self._ranks) > MOST_PLACES:
            self._ranks.clear()
        for where, others in peers.items():
            rank = self._ranks.get(where)
            if rank is None or rank.block < self._block - GAP:
                rank = self._ranks[where] = _Rank()
            if rank.block < self._block - 1:  # blocks in which it was not there are no row
                rank.row = rank.lasting = 0
            rank.block = self._block
            ratio, usual = math.log(block.medians[where] / others), rank.usual()
            limit = math.inf
            if usual is not None:
                limit = max(math.log1p(self.least), usual + noise)
                self._noise.append(ratio - usual)
            slower, far = ratio > limit, ratio > math.log1p(self.lasting)
            if not slower:
                rank.past.append(ratio)
            if not (slower or far):
                rank.row, rank.lasting, rank.alarmed = 0, 0, False
                continue
            rank.since_s = rank.since_s if rank.row or rank.lasting else block.start_s
            rank.row = rank.row + 1 if slower else 0
            rank.lasting = rank.lasting + 1 if far else 0
            if rank.alarmed or (rank.row < ROW and rank.lasting < LASTING_ROW):
                continue
            if rank.row < ROW:
                limit = math.log1p(self.lasting)
            rank.alarmed = True
            yield Alarm(
                what=self.what,
                where=where,
                since_s=rank.since_s,
                value=math.exp(ratio),
                threshold=math.exp(limit),
                evidence={
                    "own_s": block.medians[where],
                    "peers_s": others,
                    "peers": len(peers) - 1,
                    "blocks": max(rank.row, rank.lasting),
                },
            )
