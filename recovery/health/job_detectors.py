"""What looks wrong in what the ranks of a job say of their steps: stragglers, spikes, drops of
throughput, states that differ, silence.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainchaos.chaos.stats import student_quantile
from trainchaos.recovery.detection.pace import HangLimits, Pace
from trainchaos.recovery.health.detector import (
    MOST_PLACES,
    RATE,
    STEP_S,
    Alarm,
    BlockDetector,
    DropDetector,
    tail,
)
from trainchaos.recovery.health.estimates import (
    NU,
    Block,
    Blocks,
    autocorrelation,
    median,
    of_others,
    spread,
    without_trend,
)
from trainchaos.recovery.health.readings import JOB, Place, Reading

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
NOISE = 1024
LEAST_NOISE = 64


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
class StragglerDetector(BlockDetector):
    """A rank computes for longer than its peers. Metric ``compute``, s. Value: a block's own
    compute time over the median of the peers'; threshold: the same, above which it is for ``ROW``
    blocks of ``STEPS`` steps in a row.

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
    metric: str = field(default="compute", init=False)
    step_s: float = STEP_S
    least: float = 0.1
    lasting: float = 0.25
    _noise: deque[float] = field(default_factory=lambda: deque(maxlen=NOISE), repr=False)
    _ranks: dict[Place, _Rank] = field(default_factory=dict, repr=False)
    _block: int = 0

    def __post_init__(self) -> None:
        block_s = STEPS * self.step_s
        self._blocks = Blocks(block_s=block_s, least=STEPS // 4, wanted=STEPS)
        self._scales = student_quantile(tail(self.rate, block_s) ** (1.0 / ROW), NU)

    def _judge(self, block: Block) -> Iterator[Alarm]:
        self._block += 1
        peers = of_others(block.medians)
        noise = math.inf
        if len(self._noise) >= LEAST_NOISE:
            level = median(self._noise)
            noise = level + self._scales * spread(list(self._noise), level)
        if len(self._ranks) > MOST_PLACES:
            self._ranks.clear()
        for where, others in peers.items():
            own = block.medians[where]
            rank, limit = self._judge_rank(where, math.log(own / others), noise, block.start_s)
            if limit < math.inf:
                facts = {"own_s": own, "peers_s": others, "peers": len(peers) - 1}
                facts["blocks"] = max(rank.row, rank.lasting)
                yield self._alarm(where, rank.since_s, own / others, math.exp(limit), **facts)

    def _judge_rank(
        self, where: Place, ratio: float, noise: float, start_s: float
    ) -> tuple[_Rank, float]:
        """A rank after a block, and the limit that it is above where that is an alarm now."""
        rank = self._ranks.get(where)
        if rank is None or rank.block < self._block - GAP:
            rank = self._ranks[where] = _Rank()
        if rank.block < self._block - 1:  # blocks in which it was not there are no row
            rank.row = rank.lasting = 0
        rank.block = self._block
        usual, limit, far_limit = rank.usual(), math.inf, math.log1p(self.lasting)
        if usual is not None:
            limit = max(math.log1p(self.least), usual + noise)
            self._noise.append(ratio - usual)
        slower, far = ratio > limit, ratio > far_limit
        if not slower:
            rank.past.append(ratio)
        if not (slower or far):
            rank.row, rank.lasting, rank.alarmed = 0, 0, False
            return rank, math.inf
        rank.since_s = rank.since_s if rank.row or rank.lasting else start_s
        rank.row = rank.row + 1 if slower else 0
        rank.lasting = rank.lasting + 1 if far else 0
        if rank.alarmed or (rank.row < ROW and rank.lasting < LASTING_ROW):
            return rank, math.inf
        rank.alarmed = True
        return rank, limit if rank.row >= ROW else far_limit


@dataclass(kw_only=True)
class ThroughputDetector(DropDetector):
    """The job does less in the same time than it did, and goes on so. Metric ``throughput``, of
    each place that reports it, medians of ``STEPS`` steps. Value: the share of the earlier
    throughput that is lost; threshold: ``least``, or what the noise hides, whichever is more.
    ``least``: 5 %, about what the same job differs by from one day to the next.
    """

    what: str = field(default="throughput-drop", init=False)
    metric: str = field(default="throughput", init=False)
    step_s: float = STEP_S
    least: float = 0.05

    def __post_init__(self) -> None:
        block_s = STEPS * self.step_s
        self._blocks = Blocks(block_s=block_s, least=STEPS // 4, wanted=STEPS)
        self._tail = tail(self.rate, block_s)

    def _judge(self, block: Block) -> Iterator[Alarm]:
        for where, value in block.medians.items():
            drop = self._dropped(where, math.log(value), block)
            if drop is not None:
                facts = {
                    "before": math.exp(drop.level),
                    "now": math.exp(drop.latest),
                    "sum": drop.score,
                    "sum_limit": drop.limit,
                    "blocks": drop.blocks,
                }
                yield self._alarm(where, drop.since_s, drop.share, self.least, **facts)


HISTORY = 512
"""Steps: 20 s of 40 ms, in which the level of a loss does not move by its noise."""
LEAST_HISTORY = 128
REFRESH = 32
"""Steps after which level and scale are computed anew: that takes 0.2 ms, as long as 200 steps'
other work.
"""
WELL = 8
"""Steps below the threshold that end an alarm."""


@dataclass(kw_only=True)
class _Series:
    history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    waiting: list[float] = field(default_factory=list)
    level: float = 0.0
    scale: float = 0.0
    related: float = 0.0
    row: float = math.inf
    alone: float = math.inf
    distance: float = 0.0
    above: int = 0
    below: int = 0
    since_s: float = 0.0
    alarmed: bool = False
    last_s: float = -math.inf


@dataclass(kw_only=True)
class SpikeDetector:
    """A value of the job jumps above its own recent past. ``metric``: of which reading; ``steps``:
    in a row; ``least``: a spike is at least so much of the level (relative), smaller ones are not
    worth a warning; ``step_s``: of the job. Value and threshold are in the metric's unit. A value
    that is no number is an alarm at once.

    Null model: a level that follows a line + noise, the noise an autoregression of first order
    whose innovations are Student's t with 3 degrees of freedom. Judged is what is new in a value:
    its distance from the level, less what the distance before it leads to expect. Two tests share
    the rate of false alarms:

    - one step alone: above the quantile of one decision;
    - ``steps`` in a row: above the quantile of the probability that, independent, all of them have.

    The autocorrelation is taken from the history, two standard errors too high, and a distance
    below the level leads to expect nothing: otherwise one large innovation would be in what follows
    it too, and a row of its own. (In heavy-tailed sums a row is one big jump: Embrechts,
    Klüppelberg and Mikosch, Modelling Extremal Events, 1997, sec. 8.3.)
    """

    what: str
    metric: str
    rate: float = RATE
    step_s: float = STEP_S
    steps: int = 3
    least: float = 0.2
    _series: dict[Place, _Series] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Half of the rate for each of the two tests.
        self._one = student_quantile(tail(self.rate / 2.0, self.step_s), NU)
        self._all = student_quantile(tail(self.rate / 2.0, self.step_s) ** (1.0 / self.steps), NU)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found = [self._one_more(one) for one in readings if one.metric == self.metric]
        return [alarm for alarm in found if alarm is not None]

    def _one_more(self, reading: Reading) -> Alarm | None:
        series = self._series.get(reading.where)
        if series is None:
            if len(self._series) >= MOST_PLACES:
                return None
            series = self._series[reading.where] = _Series()
        if not math.isfinite(reading.time_s):
            return None
        before_s, series.last_s = series.last_s, reading.time_s
        if reading.time_s <= before_s:  # told twice, or the clock was set back
            return None
        value = reading.value
        if not math.isfinite(value):
            return self._above(series, reading, series.level + series.row)
        expected = series.level + series.related * max(0.0, series.distance)
        series.distance = value - series.level
        if value - expected > series.row and series.distance > self.least * abs(series.level):
            alone = value - expected > series.alone
            return self._above(
                series, reading, expected + (series.alone if alone else series.row), alone=alone
            )
        if series.above:
            series.below += 1
            if series.below >= WELL or not series.alarmed:
                series.above, series.below, series.alarmed = 0, 0, False
        self._learn(series, value)
        return None

    def _above(
        self, series: _Series, reading: Reading, threshold: float, *, alone: bool = True
    ) -> Alarm | None:
        if not series.above:
            series.since_s = reading.time_s
        series.above, series.below = series.above + 1, 0
        if math.isfinite(reading.value):
            self._learn(series, reading.value)
        if series.alarmed or not (alone or series.above >= self.steps):
            return None
        series.alarmed = True
        return Alarm(
            what=self.what,
            where=reading.where,
            since_s=series.since_s,
            value=reading.value,
            threshold=threshold,
            evidence={
                "level": series.level,
                "scale": series.scale,
                "steps": series.above,
                "history": len(series.history),
            },
        )

    def _learn(self, series: _Series, value: float) -> None:
        """Values are learned in batches, so that a spike is not its own history before it is
        judged; what lasts for longer than half of the history becomes the level.
        """
        series.waiting.append(value)
        if len(series.waiting) < REFRESH:
            return
        series.history.extend(series.waiting)
        series.waiting.clear()
        if len(series.history) < LEAST_HISTORY:
            return
        level, distances = without_trend(list(series.history))
        # A window of equal values has no scale: rounding alone would be a spike.
        scale = max(spread(distances, 0.0), 1e-9 * abs(level), 1e-12)
        series.level, series.scale = level, scale
        series.related = autocorrelation(distances, 0.0, errors=2.0)
        series.row = scale * self._all
        series.alone = scale * self._one


def gradient_spike(step_s: float = STEP_S) -> SpikeDetector:
    """The gradient norm jumps. ``least`` 0.5: clipping is usual, and half as much again as the
    level is within it.
    """
    return SpikeDetector(what="gradient-spike", metric="gradient_norm", step_s=step_s, least=0.5)


def loss_spike(step_s: float = STEP_S) -> SpikeDetector:
    """The loss jumps. ``least`` 0.1: a tenth of a loss is weeks of training late in a job, and
    noise early in it. Six steps in a row, as a loss that has jumped takes many to come back, and a
    longer row needs a smaller jump.
    """
    return SpikeDetector(what="loss-spike", metric="loss", step_s=step_s, steps=6, least=0.1)


MOST_OPEN = 4
"""Digests that are waited for: ranks are a step apart at the most, and a rank that is lost never
answers.
"""


@dataclass(kw_only=True)
class DigestDetector:
    """Ranks that should hold the same state say that they do not. Metric ``digest``: its ``text``
    after ``step``. Value: digests of one step; threshold: 1. The alarm names each rank that differs
    from most others, or the job where no digest has a majority. ``shard_of``: the shard that a rank
    holds, where not all hold the same.

    Null model: all are equal, bit for bit, so that there are no false alarms. A job whose sums
    differ from rank to rank has no use for this detector. It is for whoever has no supervisor: the
    supervisor compares the digests of a generation itself, and acts on them
    (``recovery.supervise.divergence``).
    """

    what: str = field(default="digest-mismatch", init=False)
    rate: float = field(default=0.0, init=False)
    shard_of: Callable[[int], int] = lambda rank: 0
    _open: dict[int, dict[Place, tuple[str, float]]] = field(default_factory=dict, repr=False)
    _known: dict[Place, int] = field(default_factory=dict, repr=False)
    _done: int = -1
    _alarmed: set[Place] = field(default_factory=set, repr=False)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found: list[Alarm] = []
        for reading in readings:
            if reading.metric != "digest" or reading.step is None or not reading.text:
                continue
            known = reading.where in self._known or len(self._known) < MOST_PLACES
            if not known or not math.isfinite(reading.time_s):
                continue
            if reading.step <= self._done - MOST_OPEN:  # the job went back to an earlier step
                self._open.clear()
                self._done = -1
            self._known[reading.where] = reading.step
            if reading.step <= self._done:
                continue
            step = self._open.setdefault(reading.step, {})
            step[reading.where] = reading.text, reading.time_s
            # Of the first step nobody knows how many there will be.
            if self._done >= 0 and len(step) == len(self._known):
                found += self._close(reading.step)
            elif self._done < 0 and len(self._open) > 1:
                found += self._close(min(self._open))
        for step_number in sorted(self._open)[:-MOST_OPEN]:
            found += self._close(step_number)
        return found

    def _close(self, number: int) -> list[Alarm]:
        """Compare what there is of a step, and of all before it."""
        found: list[Alarm] = []
        for step in sorted(one for one in self._open if one <= number):
            held: dict[int, dict[Place, tuple[str, float]]] = {}
            for where, said in self._open.pop(step).items():
                shard = 0 if where.rank is None else self.shard_of(where.rank)
                held.setdefault(shard, {})[where] = said
            for digests in held.values():
                found += self._compare(step, digests)
        self._done = max(self._done, number)
        # A rank that was not heard of for so long is not waited for.
        self._known = {
            where: step for where, step in self._known.items() if step > self._done - MOST_OPEN
        }
        return found

    def _compare(self, step: int, digests: Mapping[Place, tuple[str, float]]) -> Iterator[Alarm]:
        counts = Counter(text for text, _ in digests.values())
        if len(counts) == 1:
            self._alarmed -= digests.keys() | {JOB}
            return
        (most, votes), *_ = counts.most_common(1)
        majority = 2 * votes > len(digests)
        odd = [where for where, (text, _) in digests.items() if text != most] if majority else [JOB]
        for where in [where for where in odd if where not in self._alarmed]:
            self._alarmed.add(where)
            yield Alarm(
                what=self.what,
                where=where,
                since_s=min(time_s for _, time_s in digests.values()),
                value=float(len(counts)),
                threshold=1.0,
                evidence={"step": step, "ranks": len(digests), "with_the_majority": votes},
            )


PHASE = "forward"
"""Whose deadline holds: of one that has no longer limit of its own, as a checkpoint has."""


@dataclass(kw_only=True)
class HangDetector:
    """Nothing is committed for longer than steps take: a warning, from commits alone. Metric
    ``committed``, steps. Value: seconds since the slowest ranks' last commit; threshold: the
    learned deadline, 8 median steps or 0.6 s, whichever is longer. The alarm names the ranks that
    are behind, or the job where none is.

    The supervisor's own detection (``recovery.detection.hangs``) sees the phases of each rank and
    the kernel's view of its process, and decides; both learn ``pace`` and deadline by one class.

    Null model: steps scatter around their median by a scale of 5 % with the tail of Student's t
    with 3 degrees of freedom. Then a step of 40 ms takes more than 0.57 s with probability 6e-8
    (265 scales), in an hour 0.005 times; one of 0.25 s more than 7.8 medians with 5e-7, in an hour
    0.007 times. Pauses that the job knows of (checkpoint, evaluation) are no part of it: say so by
    ``limits``.
    """

    what: str = field(default="hang", init=False)
    rate: float = field(default=RATE, init=False)
    limits: HangLimits = field(default_factory=HangLimits)
    _at: dict[Place, tuple[float, float]] = field(default_factory=dict, repr=False)
    _lowest: tuple[float, float] | None = field(default=None, repr=False)
    _alarmed: bool = False

    def __post_init__(self) -> None:
        self.pace = Pace(limits=self.limits)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms: of silence until the latest reading or ``now_s``."""
        found: list[Alarm] = []
        for reading in readings:
            finite = math.isfinite(reading.value) and math.isfinite(reading.time_s)
            if reading.metric == "committed" and finite:
                found += self._silent(reading.time_s)
                self._commit(reading)
        return [*found, *self._silent(now_s)]

    def _commit(self, reading: Reading) -> None:
        before = self._at.get(reading.where)
        if before is not None and before[0] == reading.value:
            return
        if before is None and len(self._at) >= MOST_PLACES:
            return
        self._at[reading.where] = reading.value, reading.time_s
        lowest = min(step for step, _ in self._at.values())
        if self._lowest is None or lowest < self._lowest[0]:  # began, or went back
            self._lowest = lowest, reading.time_s
        elif lowest > self._lowest[0]:
            took_s = (reading.time_s - self._lowest[1]) / (lowest - self._lowest[0])
            # A step that ended a silence is none to learn from.
            if took_s > 0.0 and not self._alarmed:
                self.pace.step_took(took_s)
            self._lowest = lowest, reading.time_s
            self._alarmed = False

    def _silent(self, now_s: float) -> Iterator[Alarm]:
        if self._lowest is None or self._alarmed or not math.isfinite(now_s):
            return
        step, since_s = self._lowest
        if now_s < since_s:  # the clock was set back: silence is counted from now
            self._lowest = step, now_s
            return
        limit_s = self.pace.deadline_s(PHASE)
        if now_s - since_s <= limit_s:
            return
        self._alarmed = True
        behind = [where for where, (at, _) in self._at.items() if at == step]
        for where in behind if len(behind) < len(self._at) else [JOB]:
            yield Alarm(
                what=self.what,
                where=where,
                since_s=since_s,
                value=now_s - since_s,
                threshold=limit_s,
                evidence={"step": step, "behind": len(behind), "ranks": len(self._at)},
            )
