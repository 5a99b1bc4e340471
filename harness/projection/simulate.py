"""Event simulation of a job of any size: all trials advance together, one event each at a time.

What the closed forms leave out: recoveries that take as long as they take, failures during a
restart, several nodes lost at once, spares that are used up and come back repaired, and a job that
goes on smaller. The cost is that of the number of events of a trial, as each operation is on arrays
with one entry a trial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainchaos.harness.projection.arrivals import Floats, Law
from trainchaos.harness.projection.durations import Duration, Lasting

Bools = NDArray[np.bool_]
MOST_EVENTS = 2_000_000
WIDER = 8  # nodes in repair at once for which room is made
AHEAD = 64  # times between failures drawn for each trial at once
CLASSES = ("rework", "restart", "stall", "waiting", "saving", "reduced", "slow")
"""Where time goes that is not useful: work done again, restarts (loading a checkpoint, also in
vain), detection and recovery, waiting for a node (until there are enough, or one at all), saving
checkpoints, nodes missing from a job that goes on without them, and waiting for a slow node.
"""


@dataclass(frozen=True, kw_only=True)
class Lemons:
    """Nodes that fail ``times`` as often as the rest: each is one with probability ``share``.
    ``quarantine``: failures of one after which a plain node takes its place for good; None: never.
    """

    share: float
    times: float
    quarantine: int | None = None


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Nodes that do not fail but work slowly. ``mean_s``: running time between two of them, at a
    constant rate; ``factor``: so much longer the job takes while there is one, however many;
    ``found_s``: running time from the first of them until they are found, and all that are slow
    then are swapped at once with a stall, but without work done again; None: never.
    """

    mean_s: float
    factor: float
    found_s: float | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job and how it recovers. ``nodes`` it wants; ``between``: the law of the times between
    failures, while it runs, or with ``wall`` also while it does not; ``processes``: share of the
    failures that take no node; ``several``: probabilities that another takes 1, 2, ... nodes.

    ``replica_nodes``: nodes that hold one copy of the model, which leave together where one of them
    is missing; ``slowing``: share of what is missing by which the rest is slower: 1 where each node
    computes for itself, less where nodes share a machine; ``rollback``: a failure costs the work
    since the last checkpoint, else the step under way; ``shrinks``: it goes on without the nodes
    that are missing, else it waits for them; ``segment_s``: work between two checkpoints,
    ``save_s``: what each holds the job up; ``step_s``: a step; ``restart_s``: loading after a
    rollback, which fails with the job; ``stall``: from a failure until the job goes on, which does
    not. ``spares``: nodes beside those of the job, None: there is always another; ``repair``: until
    a lost node is a spare again. ``lemons`` are beside ``between``, which is of plain nodes.
    """

    nodes: int
    between: Law
    wall: bool = False
    replica_nodes: int = 1
    slowing: float = 1.0
    processes: float = 0.0
    several: tuple[float, ...] = (1.0,)
    rollback: bool
    shrinks: bool
    segment_s: float
    save_s: float
    step_s: float
    restart_s: float
    stall: Lasting
    spares: int | None = None
    repair: Duration = field(default_factory=lambda: Duration(median_s=0.0))
    lemons: Lemons | None = None
    slow: Slow | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of each trial, arrays with one entry a trial. ``useful_s``: time of the whole job's work that
    was kept; ``lost_s``: class of ``CLASSES`` -> time; with ``useful_s`` they sum to ``horizon_s``;
    ``failures``: that interrupted the job; ``nodes_lost``: with them; ``quarantined``: lemons;
    ``swaps``: of slow nodes.
    """

    horizon_s: float
    useful_s: Floats
    lost_s: dict[str, Floats]
    failures: Floats
    nodes_lost: Floats
    quarantined: Floats
    swaps: Floats

    @property
    def goodput(self) -> Floats:
        """Share of the time that was useful, of each trial."""
        return self.useful_s / self.horizon_s


class TooManyEventsError(ValueError):
    """A trial has more events than can be played."""


def simulate(
    job: Job,
    horizon_s: float,
    trials: int,
    random: np.random.Generator,
    each: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """Play ``trials`` jobs for ``horizon_s`` seconds. ``each``: is told the share that is done, now
    and then. Raises TooManyEventsError beyond 2 million events a trial, before anything is played
    where twice as many are to be expected.
    """
    if events_expected(job, horizon_s) > 2 * MOST_EVENTS:
        raise _too_many(horizon_s)
    played = _Trials(job, horizon_s, trials, random)
    for event in range(MOST_EVENTS):
        if not played.advance():
            return played.outcome()
        if event % 256 == 0:
            each(float(played.now_s.min()) / horizon_s)
    raise _too_many(horizon_s)


def _too_many(horizon_s: float) -> TooManyEventsError:
    return TooManyEventsError(f"more than {MOST_EVENTS} failures in {horizon_s / 86_400:.0f} days")


def events_expected(job: Job, horizon_s: float) -> float:
    """Failures, and nodes that become slow, to be expected of a trial of so many seconds."""
    more = job.lemons.share * (job.lemons.times - 1.0) if job.lemons else 0.0
    free_s = job.between.mean_s / (1.0 + more)
    failures = horizon_s / (free_s + (0.0 if job.wall else job.stall.mean_s))
    if job.slow is None:
        return failures
    return failures + horizon_s / (job.slow.mean_s + (job.slow.found_s or 0.0))


class _Trials:
    """The state of all trials."""

    def __init__(
        self, job: Job, horizon_s: float, trials: int, random: np.random.Generator
    ) -> None:
        self._job, self._horizon_s, self._random, self._count = job, horizon_s, random, trials
        self._ahead = np.empty((0, trials))
        self._row = 0
        self.now_s = np.zeros(trials)
        self._useful_s = np.zeros(trials)
        self._lost_s = {name: np.zeros(trials) for name in CLASSES}
        self._failures = np.zeros(trials)
        self._nodes_lost = np.zeros(trials)
        self._lemons = _LemonNodes(job, trials, random) if job.lemons else None
        self._slow = _SlowNodes(job.slow, trials, random) if job.slow else None
        self._whole = self._part = np.ones(trials)  # of the full speed, since the last event
        self._until_s = self._next()  # running time until the next failure
        self._restart_s = np.zeros(trials)  # what is left of a restart
        self._since_s = np.zeros(trials)  # into the segment, or into the step
        self._back_s = np.full((WIDER, trials), np.inf)  # when each node in repair is back
        self._away = np.zeros(trials, dtype=np.int64)  # nodes in repair
        self._limited = job.spares is not None

    def advance(self) -> bool:
        """Play each trial to its next event; whether there was one left."""
        left_s = self._horizon_s - self.now_s
        if not (left_s > 0).any():
            return False
        job, part, back_s = self._job, self._whole, np.inf
        runs: Bools | bool = True
        if self._limited:
            gone = self._missing() * job.replica_nodes / job.nodes
            part = np.where(gone < 1.0, 1.0 - gone * job.slowing, 0.0)
            runs = (part > 0.0) | job.wall  # a job that stands still fails by the clock only
            back_s = self._back_s.min(axis=0) - self.now_s
        run_s = np.minimum(left_s, back_s)
        np.minimum(run_s, self._until_s, out=run_s, where=runs)
        if self._slow:
            run_s = np.minimum(run_s, self._slow.next_s())
        run_s = np.maximum(run_s, 0.0)
        self._run(run_s, part)
        self.now_s += run_s
        np.subtract(self._until_s, run_s, out=self._until_s, where=runs)
        if self._limited:
            self._take_back()
        if self._slow and (found := self._slow.pass_time(run_s)).any():
            self._spend("stall", np.where(found, job.stall.sample(self._random, self._count), 0.0))
        failed = (self._until_s <= 0.0) & (self.now_s < self._horizon_s)
        if failed.any():
            self._fail(failed)
        return True

    def outcome(self) -> Outcome:
        """What became of all of them."""
        return Outcome(
            horizon_s=self._horizon_s,
            useful_s=self._useful_s,
            lost_s=self._lost_s,
            failures=self._failures,
            nodes_lost=self._nodes_lost,
            quarantined=self._lemons.gone if self._lemons else np.zeros(self._count),
            swaps=self._slow.swaps if self._slow else np.zeros(self._count),
        )

    def _missing(self) -> Floats:
        """Nodes of the job that nobody takes the place of."""
        return np.clip(self._away - (self._job.spares or 0), 0, self._job.nodes).astype(np.float64)

    def _take_back(self) -> None:
        """Nodes whose repair has ended."""
        back = self._back_s <= self.now_s
        if back.any():
            self._back_s[back] = np.inf
            self._away -= back.sum(axis=0)

    def _run(self, run_s: Floats, part: Floats) -> None:
        """Work for these times at these shares of the full speed."""
        restart_s = np.minimum(self._restart_s, run_s)
        self._restart_s -= restart_s
        self._lost_s["restart"] += restart_s
        work_s = run_s - restart_s
        job = self._job
        busy = job.segment_s / (job.segment_s + job.save_s)
        self._since_s += work_s
        work_s, saving_s = work_s * busy, work_s * (1.0 - busy)
        self._lost_s["saving"] += saving_s
        stands = part <= 0.0
        self._lost_s["waiting"] += np.where(stands, work_s, 0.0)
        self._lost_s["reduced"] += np.where(stands, 0.0, work_s * (1.0 - part))
        if self._slow:
            waited = part * self._slow.share()
            self._lost_s["slow"] += work_s * waited
            part = part - waited
        self._useful_s += work_s * part
        self._part = part

    def _fail(self, failed: Bools) -> None:
        """Lose what is lost, stall, and wait where there is no node."""
        job, count = self._job, self._count
        self._failures += failed
        cycle_s = job.segment_s + job.save_s if job.rollback else job.step_s
        begun_s = np.floor(self._since_s / cycle_s) * cycle_s  # fmod is twenty times slower
        undone_s = np.where(failed, np.maximum(self._since_s - begun_s, 0.0), 0.0)
        self._undo(undone_s, failed)
        taken = self._take(failed)
        stall_s = np.where(failed, job.stall.sample(self._random, count), 0.0)
        if self._lemons:
            self._lemons.fail(failed)
        self._until_s = np.where(failed, self._next(), self._until_s)
        self._spend("stall", stall_s)
        if not job.shrinks and self._limited:
            self._wait(failed & (taken > 0))
        if job.rollback:
            self._restart_s = np.where(failed, job.restart_s, self._restart_s)
        self._since_s = np.where(failed, 0.0, self._since_s)

    def _undo(self, undone_s: Floats, failed: Bools) -> None:
        """Work since the last checkpoint was not useful. A save under way counts as begun work."""
        job = self._job
        busy = job.segment_s / (job.segment_s + job.save_s)
        kept = np.where(failed, np.minimum(undone_s * busy * self._part, self._useful_s), 0.0)
        self._useful_s -= kept
        self._lost_s["rework"] += kept

    def _take(self, failed: Bools) -> Floats:
        """Nodes that each failure takes, of those not in repair; they go there."""
        job, count = self._job, self._count
        taken = np.where(failed, 1.0, 0.0)
        if len(job.several) > 1:
            drawn = self._random.choice(len(job.several), count, p=np.asarray(job.several))
            taken = np.where(failed, 1.0 + drawn, 0.0)
        if job.processes > 0.0:
            taken = np.where(self._random.random(count) < job.processes, 0.0, taken)
        if self._limited:
            taken = np.minimum(taken, job.nodes + (job.spares or 0) - self._away)  # all there are
            for more in range(int(taken.max())):
                self._to_repair(taken > more)
        self._nodes_lost += taken
        return taken

    def _to_repair(self, which: Bools) -> None:
        if (self._away[which] == len(self._back_s)).any():
            self._back_s = np.vstack([self._back_s, np.full((WIDER, self._count), np.inf)])
        columns = np.flatnonzero(which)
        free = np.isinf(self._back_s[:, columns]).argmax(axis=0)
        repair_s = self._job.repair.sample(self._random, len(columns))
        self._back_s[free, columns] = self.now_s[columns] + repair_s
        self._away[columns] += 1

    def _wait(self, failed: Bools) -> None:
        """Until enough nodes are back for all places of the job."""
        while True:
            short = failed & (self._missing() > 0) & (self.now_s < self._horizon_s)
            if not short.any():
                return
            back_s = np.where(short, self._back_s.min(axis=0) - self.now_s, 0.0)
            self._spend("waiting", np.maximum(back_s, 0.0))
            self._take_back()

    def _spend(self, what: str, times_s: Floats) -> None:
        """Pass time in which nothing runs, up to the horizon."""
        times_s = np.minimum(times_s, np.maximum(self._horizon_s - self.now_s, 0.0))
        self._lost_s[what] += times_s
        self.now_s += times_s
        if self._job.wall:
            self._until_s -= times_s  # what comes due meanwhile hits the job as it begins again

    def _next(self) -> Floats:
        if self._row == len(self._ahead):
            drawn = self._job.between.sample(self._random, AHEAD * self._count)
            self._ahead, self._row = drawn.reshape(AHEAD, self._count), 0
        self._row += 1
        gap_s = self._ahead[self._row - 1]
        return gap_s / self._lemons.faster() if self._lemons else gap_s.copy()


class _LemonNodes:
    """How many lemons each trial has left, by how often each has failed."""

    def __init__(self, job: Job, trials: int, random: np.random.Generator) -> None:
        lemons = job.lemons or Lemons(share=0.0, times=1.0)
        self._kind, self._nodes, self._random = lemons, job.nodes, random
        self._left = np.zeros((lemons.quarantine or 1, trials))
        self._left[0] = random.binomial(job.nodes, lemons.share, trials)
        self.gone = np.zeros(trials)

    def faster(self) -> Floats:
        """By what factor the job fails more often than one of plain nodes."""
        lemons = self._left.sum(axis=0)
        return 1.0 + lemons * (self._kind.times - 1.0) / self._nodes

    def fail(self, failed: Bools) -> None:
        """A node of each of these trials fails: a lemon as often as lemons fail among all."""
        if self._kind.quarantine is None:
            return
        lemons = self._left.sum(axis=0)
        weight = lemons * self._kind.times
        share = self._random.random(len(failed)) * (self._nodes - lemons + weight)
        hit = failed & (share < weight)
        if not hit.any():
            return
        which = share / self._kind.times  # uniform below the number of lemons
        upto = np.cumsum(self._left, axis=0)
        row = np.minimum((which >= upto).sum(axis=0), len(self._left) - 1)
        columns = np.flatnonzero(hit)
        rows = row[columns]
        self._left[rows, columns] -= 1
        last = rows == len(self._left) - 1
        self.gone[columns[last]] += 1
        self._left[rows[~last] + 1, columns[~last]] += 1


class _SlowNodes:
    """When the next node becomes slow, and how long until those that are slow are found."""

    def __init__(self, kind: Slow, trials: int, random: np.random.Generator) -> None:
        self._kind, self._random = kind, random
        self._onset_s = random.exponential(kind.mean_s, trials)
        self._found_s = np.zeros(trials)  # 0: none is slow
        self.swaps = np.zeros(trials)

    def next_s(self) -> Floats:
        """Running time until something changes."""
        return np.minimum(self._onset_s, np.where(self._found_s > 0, self._found_s, np.inf))

    def share(self) -> Floats:
        """Share of the speed that is lost."""
        return np.where(self._found_s > 0, 1.0 - 1.0 / self._kind.factor, 0.0)

    def pass_time(self, run_s: Floats) -> Bools:
        """Whether all that were slow have just been found, after this running time."""
        kind = self._kind
        slow = self._found_s > 0
        self._found_s = np.where(slow, self._found_s - run_s, 0.0)
        self._onset_s = self._onset_s - run_s
        begins = self._onset_s <= 0.0
        found = slow & (self._found_s <= 0.0)
        if begins.any():
            after_s = np.inf if kind.found_s is None else kind.found_s
            self._found_s = np.where(begins & ~slow, after_s, self._found_s)
            drawn_s = self._random.exponential(kind.mean_s, len(begins))
            self._onset_s = np.where(begins, drawn_s, self._onset_s)
            found |= begins & ~slow & (self._found_s <= 0.0)
        self._found_s = np.maximum(self._found_s, 0.0)
        self.swaps += found
        return found
