"""Event simulation of a job of any size: all trials advance together, one event each at a time.

What the closed forms leave out: recoveries that take as long as they take, failures during a
restart, several nodes lost at once, spares that are used up and come back repaired, and a job that
goes on smaller. The cost is that of the number of events of a trial, as each operation is on arrays
with one entry a trial.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.projection.laws import Duration, Floats, Lasting, Law

Bools = NDArray[np.bool_]
MOST_EVENTS = 2_000_000
WIDER = 8  # nodes in repair at once for which room is made
CLASSES = ("rework", "restart", "stall", "waiting", "saving", "reduced", "slow")
"""Where time goes that is not useful: work done again, restarts (loading a checkpoint, also in
vain), detection and recovery, waiting for a node as there is none, saving checkpoints, nodes
missing from a job that goes on without them, and waiting for a slow node.
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
    since the last checkpoint, else the step under way; ``segment_s``: work between two checkpoints,
    ``save_s``: what each holds the job up; ``step_s``: a step; ``restart_s``: loading after a
    rollback, which fails with the job; ``stall``: from a failure until the job goes on, which does
    not, and takes ``stall_times`` as long (of each trial its own). ``spares``: nodes beside those
    of the job, which goes on without those that are missing; None: there is always another;
    ``repair``: until a lost node is a spare again. ``lemons`` are beside ``between``, which is of
    plain nodes.
    """

    nodes: int
    between: Law
    wall: bool = False
    replica_nodes: int = 1
    slowing: float = 1.0
    processes: float = 0.0
    several: tuple[float, ...] = (1.0,)
    rollback: bool
    segment_s: float
    save_s: float
    step_s: float
    restart_s: float
    stall: Lasting
    stall_times: Floats | float = 1.0
    spares: int | None = None
    repair: Duration = field(default_factory=lambda: Duration(median_s=0.0))
    lemons: Lemons | None = None
    slow: Slow | None = None

    @property
    def busy(self) -> float:
        """Share of running time that is not saving."""
        return self.segment_s / (self.segment_s + self.save_s)


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


def simulate(job: Job, horizon_s: float, trials: int, random: np.random.Generator) -> Outcome:
    """Play ``trials`` jobs for ``horizon_s`` seconds. Raises ScenarioError beyond 2 million events
    a trial, before anything is played where twice as many are to be expected.
    """
    played = _Trials(job, horizon_s, trials, random)
    if events_expected(job, horizon_s) <= 2 * MOST_EVENTS:
        for _ in range(MOST_EVENTS):
            if not played.advance():
                return played.outcome()
    raise ScenarioError(
        f"more than {MOST_EVENTS} failures in {horizon_s / 86_400:.0f} days",
        hint="fewer --gpus or --days, or a lower --rate",
    )


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
        self.now_s, self._useful_s, self._failures, self._nodes_lost = np.zeros((4, trials))
        self._lost_s = {name: np.zeros(trials) for name in CLASSES}
        self._lemons = _LemonNodes(job.lemons, job.nodes, trials, random) if job.lemons else None
        self._slow = _SlowNodes(job.slow, trials, random) if job.slow else None
        self._part = np.ones(trials)  # of the full speed, since the last event
        self._until_s = self._next()  # running time until the next failure
        self._restart_s = np.zeros(trials)  # what is left of a restart
        self._since_s = np.zeros(trials)  # into the segment, or into the step
        self._back_s = np.full((WIDER, trials), np.inf)  # when each node in repair is back
        self._away = np.zeros(trials, dtype=np.int64)  # nodes in repair

    def advance(self) -> bool:
        """Play each trial to its next event; whether there was one left."""
        left_s = self._horizon_s - self.now_s
        if not (left_s > 0).any():
            return False
        job = self._job
        part: Floats | float = 1.0
        runs: Bools | bool = True
        run_s = left_s
        if job.spares is not None:
            missing = np.clip(self._away - job.spares, 0, job.nodes)
            gone = missing * job.replica_nodes / job.nodes
            part = np.where(gone < 1.0, 1.0 - gone * job.slowing, 0.0)
            runs = (part > 0.0) | job.wall  # a job that stands still fails by the clock only
            run_s = np.minimum(run_s, self._back_s.min(axis=0) - self.now_s)
        run_s = np.where(runs, np.minimum(run_s, self._until_s), run_s)
        if self._slow:
            run_s = np.minimum(run_s, self._slow.next_s())
        run_s = np.maximum(run_s, 0.0)
        self._run(run_s, part)
        self.now_s += run_s
        self._until_s -= np.where(runs, run_s, 0.0)
        if job.spares is not None and (back := self._back_s <= self.now_s).any():
            self._back_s[back] = np.inf
            self._away -= back.sum(axis=0)
        if self._slow and (swapped := self._slow.pass_time(run_s)).any():
            self._stall(swapped)
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

    def _run(self, run_s: Floats, part: Floats | float) -> None:
        """Work for these times at these shares of the full speed."""
        restart_s = np.minimum(self._restart_s, run_s)
        self._restart_s -= restart_s
        work_s = run_s - restart_s
        self._since_s += work_s
        work_s, saving_s = work_s * self._job.busy, work_s * (1.0 - self._job.busy)
        stands = np.asarray(part) <= 0.0
        self._lost_s["restart"] += restart_s
        self._lost_s["saving"] += saving_s
        self._lost_s["waiting"] += np.where(stands, work_s, 0.0)
        self._lost_s["reduced"] += np.where(stands, 0.0, work_s * (1.0 - part))
        if self._slow:
            waited = part * self._slow.share()
            self._lost_s["slow"] += work_s * waited
            part = part - waited
        self._useful_s += work_s * part
        self._part = np.broadcast_to(part, work_s.shape)

    def _fail(self, failed: Bools) -> None:
        """Lose what is lost, and stall."""
        job = self._job
        self._failures += failed
        cycle_s = job.segment_s + job.save_s if job.rollback else job.step_s
        begun_s = np.floor(self._since_s / cycle_s) * cycle_s  # fmod is twenty times slower
        # work since the last checkpoint was not useful; a save under way counts as begun work
        undone_s = np.maximum(self._since_s - begun_s, 0.0) * job.busy * self._part
        undone_s = np.where(failed, np.minimum(undone_s, self._useful_s), 0.0)
        self._useful_s -= undone_s
        self._lost_s["rework"] += undone_s
        self._take(failed)
        if self._lemons:
            self._lemons.fail(failed)
        self._until_s = np.where(failed, self._next(), self._until_s)
        self._stall(failed)
        if job.rollback:
            self._restart_s = np.where(failed, job.restart_s, self._restart_s)
        self._since_s = np.where(failed, 0.0, self._since_s)

    def _take(self, failed: Bools) -> None:
        """Nodes that each failure takes, of those not in repair, go there."""
        job, count = self._job, self._count
        taken = np.where(failed, 1.0, 0.0)
        if len(job.several) > 1:
            drawn = self._random.choice(len(job.several), count, p=np.asarray(job.several))
            taken = np.where(failed, 1.0 + drawn, 0.0)
        if job.processes > 0.0:
            taken = np.where(self._random.random(count) < job.processes, 0.0, taken)
        if job.spares is not None:
            taken = np.minimum(taken, job.nodes + job.spares - self._away)  # all there are
            for more in range(int(taken.max())):
                self._to_repair(np.flatnonzero(taken > more))
        self._nodes_lost += taken

    def _to_repair(self, trials: NDArray[np.intp]) -> None:
        if (self._away[trials] == len(self._back_s)).any():
            self._back_s = np.vstack([self._back_s, np.full((WIDER, self._count), np.inf)])
        free = np.isinf(self._back_s[:, trials]).argmax(axis=0)
        repair_s = self._job.repair.sample(self._random, len(trials))
        self._back_s[free, trials] = self.now_s[trials] + repair_s
        self._away[trials] += 1

    def _stall(self, which: Bools) -> None:
        """Nothing runs for the time of a recovery, up to the horizon."""
        stall_s = self._job.stall.sample(self._random, self._count) * self._job.stall_times
        left_s = np.maximum(self._horizon_s - self.now_s, 0.0)
        stall_s = np.where(which, np.minimum(stall_s, left_s), 0.0)
        self._lost_s["stall"] += stall_s
        self.now_s += stall_s
        if self._job.wall:
            self._until_s -= stall_s  # what comes due meanwhile hits the job as it begins again

    def _next(self) -> Floats:
        gap_s = self._job.between.sample(self._random, self._count)
        return gap_s / self._lemons.faster() if self._lemons else gap_s


class _LemonNodes:
    """How many lemons each trial has left, by how often each has failed."""

    def __init__(self, kind: Lemons, nodes: int, trials: int, random: np.random.Generator) -> None:
        self._kind, self._nodes, self._random = kind, nodes, random
        self._left = np.zeros((kind.quarantine or 1, trials))
        self._left[0] = random.binomial(nodes, kind.share, trials)
        self.gone = np.zeros(trials)

    def faster(self) -> Floats:
        """By what factor the job fails more often than one of plain nodes."""
        return 1.0 + self._left.sum(axis=0) * (self._kind.times - 1.0) / self._nodes

    def fail(self, failed: Bools) -> None:
        """A node of each of these trials fails: a lemon as often as lemons fail among all."""
        if self._kind.quarantine is None:
            return
        lemons = self._left.sum(axis=0)
        weight = lemons * self._kind.times
        share = self._random.random(len(failed)) * (self._nodes - lemons + weight)
        columns = np.flatnonzero(failed & (share < weight))
        which = share[columns] / self._kind.times  # uniform below the number of lemons
        last = len(self._left) - 1
        upto = np.cumsum(self._left[:, columns], axis=0)
        rows = np.minimum((which >= upto).sum(axis=0), last)
        self._left[rows, columns] -= 1
        self.gone[columns[rows == last]] += 1
        self._left[rows[rows < last] + 1, columns[rows < last]] += 1


class _SlowNodes:
    """When the next node becomes slow, and how long until those that are slow are found."""

    def __init__(self, kind: Slow, trials: int, random: np.random.Generator) -> None:
        self._kind, self._random = kind, random
        self._onset_s = random.exponential(kind.mean_s, trials)
        self._found_s = np.full(trials, np.inf)  # running time until they are found
        self._slow = np.zeros(trials, dtype=np.bool_)
        self.swaps = np.zeros(trials)

    def next_s(self) -> Floats:
        """Running time until something changes."""
        return np.minimum(self._onset_s, self._found_s)

    def share(self) -> Floats:
        """Share of the speed that is lost."""
        return np.where(self._slow, 1.0 - 1.0 / self._kind.factor, 0.0)

    def pass_time(self, run_s: Floats) -> Bools:
        """Whether all that were slow have just been found, after this running time."""
        self._found_s -= run_s
        self._onset_s -= run_s
        begins = self._onset_s <= 0.0
        if begins.any():
            after_s = np.inf if self._kind.found_s is None else self._kind.found_s
            self._found_s = np.where(begins & ~self._slow, after_s, self._found_s)
            self._slow |= begins
            drawn_s = self._random.exponential(self._kind.mean_s, len(begins))
            self._onset_s = np.where(begins, drawn_s, self._onset_s)
        swapped = self._slow & (self._found_s <= 0.0)
        self._slow &= ~swapped
        self._found_s[swapped] = np.inf
        self.swaps += swapped
        return swapped
