"""One account of each incident of a stored run: what came first, who was hit and who was blamed,
what it cost, and what its evidence means. Computed from the event logs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Event, Log, read_log
from trainchaos.harness.explain.collectives import FlightRecord, records_between
from trainchaos.harness.explain.course import Moment, course_of
from trainchaos.harness.explain.diagnose import diagnose
from trainchaos.harness.explain.diagnosis import DiagnosedIncident
from trainchaos.harness.explain.signs import Sign, signs_between
from trainchaos.harness.host.rundir import RunDirectory, arm_id
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.cost import failure_cost
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.episodes import episodes_of, unclaimed_failures
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import CellResult, Results
from trainchaos.harness.judge.verdict.judge import judge
from trainchaos.recovery.playbook.entry import Entry

EARLY_S = 0.25
"""A silence may have begun so long before the fault that it is told of: a rank falls behind while
it waits for its point.
"""
LEAST = 3
"""Incidents of the other strategy without which nothing is said of it."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a log holds of a time. ``failure``: the first that was declared; ``stacks``: those
    dumped (``chaos.events.kinds``).
    """

    arm: str
    failure: Event | None
    signs: tuple[Sign, ...]
    stacks: tuple[Event, ...]
    records: tuple[FlightRecord, ...]

    @property
    def advice(self) -> Entry | None:
        """The entry of the best sign."""
        return next((sign.entry for sign in self.signs if sign.entry), None)


@dataclass(frozen=True, kw_only=True)
class Account(Told):
    """An incident that fired: its post-mortem. ``hit``: processes; empty where a fault hits none (a
    link, a disk); ``right``: whether who was blamed was hit; None: nobody was blamed, or no process
    was hit; ``moments``, ``signal``: its course (``course_of``); ``rank_s``: what it cost,
    rank-seconds (``cost_of``); ``cheaper``: None: the run supports no claim; ``diagnosis``: what
    the log without its fault events says of that time.
    """

    incident: Incident
    hit: tuple[str, ...]
    right: bool | None
    moments: tuple[Moment, ...]
    signal: Moment | None
    rank_s: float | None
    cheaper: Cheaper | None
    diagnosis: DiagnosedIncident | None


@dataclass(frozen=True, kw_only=True)
class Unexplained(Told):
    """A failure that no fault explains. ``at_s``: since the arm began."""

    failure: Event
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Story:
    """All of a run. ``idle``: planned faults that never fired."""

    results: Results
    accounts: tuple[Account, ...]
    unexplained: tuple[Unexplained, ...]
    idle: int


def story_of(run: RunDirectory) -> Story:
    """Judge a stored run and tell its incidents; writes nothing. Raises LogError, ScenarioError,
    NewerVersion as ``judge``.
    """
    results, budget = judge(run), Budget()
    accounts: list[Account] = []
    unexplained: list[Unexplained] = []
    for arm in results.arms:
        log = read_log(run.events(arm.id), budget)
        if arm.arm == "faulted":
            accounts += told_of(log, arm.id, results)
        history = history_of(log)
        for failure in unclaimed_failures(history, episodes_of(history)):
            time_ns, about = failure.time_ns, {failure.data["process"]}
            unexplained.append(
                Unexplained(
                    arm=arm.id,
                    failure=failure,
                    at_s=(time_ns - history.start_ns) / NS,
                    signs=signs_between(log, time_ns - NS, time_ns, about),
                    stacks=_stacks(log, time_ns, time_ns + NS),
                    records=records_between(log, time_ns, time_ns + NS),
                )
            )
    idle = sum(not incident.fired for incident in results.faults)
    return Story(
        results=results, accounts=tuple(accounts), unexplained=tuple(unexplained), idle=idle
    )


def told_of(log: Log, arm: str, results: Results) -> list[Account]:
    """The incidents of one faulted arm. ``log``: of the arm with this id; ``results``: of its run.
    Raises LogError where the log does not say how its run began.
    """
    history, said = history_of(log), diagnose(log)
    episodes = [one for one in episodes_of(history) if one.injected]
    by_hit = {(one.fault, one.occurrence): one for one in episodes}
    starts = sorted(one.injected.time_ns for one in episodes if one.injected)
    accounts = []
    for incident in results.faults:
        if not incident.fired or arm_id(incident.cell, incident.repeat, "faulted") != arm:
            continue
        keys = ((incident.fault, number) for number in incident.occurrences)
        hits = [by_hit[key] for key in keys if key in by_hit]
        if not hits:
            continue
        first = next((one for one in hits if one.failure), hits[0])
        failure, hit = first.failure, tuple(dict.fromkeys(p for one in hits for p in one.processes))
        blamed = failure.data["process"] if failure else None
        start, end = _span(incident, hits, starts, history)
        moments, signal = course_of(log, start, incident.kind, failure, end)
        accounts.append(
            Account(
                arm=arm,
                incident=incident,
                hit=hit,
                failure=failure,
                right=first.may_be_blamed(failure) or blamed in hit
                if failure and blamed is not None and hit
                else None,
                signs=signs_between(log, start, end, {*hit, blamed} if hit else ()),
                moments=moments,
                signal=signal,
                rank_s=cost_of(results, incident),
                cheaper=cheaper_than(results, incident),
                diagnosis=_said(said, history, (start, end), failure),
                stacks=_stacks(log, start, end),
                records=records_between(log, start, end),
            )
        )
    return accounts


def _stacks(log: Log, start_ns: float, end_ns: float) -> tuple[Event, ...]:
    return tuple(e for e in log.of(Kind.STACKS_DUMPED) if start_ns <= e.time_ns <= end_ns)


def _said(
    said: Sequence[DiagnosedIncident],
    history: History,
    span: tuple[float, float],
    failure: Event | None,
) -> DiagnosedIncident | None:
    """The diagnosis of a time: one that names who was blamed, else the first."""
    start, end = ((moment - history.start_ns) / NS for moment in span)
    inside = [one for one in said if start - EARLY_S <= one.at_s <= end]
    rank = failure.data["rank"] if failure else None
    return next((one for one in inside if one.rank == rank), inside[0] if inside else None)


def _span(
    incident: Incident, hits: Sequence[Episode], starts: Sequence[int], history: History
) -> tuple[int, float]:
    """From the first hit to the recovery; without one, to the next hit of another incident, or the
    end.
    """
    own = [one.injected.time_ns for one in hits if one.injected]
    failures = [one.failure.time_ns for one in hits if one.failure]
    if incident.recovery_time is not None and math.isfinite(incident.recovery_time):
        end = min(own) + incident.recovery_time * NS
    else:
        end = next((other for other in starts if other > max(own)), history.end_ns)
    return min(own), max(end, *failures, *own)


@dataclass(frozen=True, kw_only=True)
class Cheaper:
    """Another strategy, under which each of ``n`` incidents of the same fault cost less than this
    one. ``rank_s``: their median, rank-seconds.
    """

    label: str
    rank_s: float
    n: int


def cost_of(results: Results, incident: Incident) -> float | None:
    """Rank-seconds of an incident: everything provisioned, times the recovery time, as the metric
    ``failure_cost`` (there in hours); infinity: the job never recovered; 0: training did not stand
    still; None: the arm is not in the results.
    """
    arm = (incident.cell, incident.repeat, "faulted")
    ranks = next(
        (a.provisioned_ranks for a in results.arms if (a.cell, a.repeat, a.arm) == arm), None
    )
    return None if ranks is None else 3600 * failure_cost(ranks, incident.recovery_time)


def cheaper_than(results: Results, incident: Incident) -> Cheaper | None:
    """The cheapest strategy that the run supports a claim for: its cell differs from the incident's
    in the strategy alone, it had at least ``LEAST`` incidents of the same fault, all landed, and
    each of them cost less. None: there is none, and nothing is to be said.
    """
    own = next((cell for cell in results.cells if cell.id == incident.cell), None)
    cost = cost_of(results, incident)
    if own is None or cost is None or not incident.landed:
        return None
    found: list[Cheaper] = []
    for cell in results.timed:
        costs = _costs(results, cell, incident.fault) if _comparable(cell, own) else []
        if len(costs) >= LEAST and max(costs) < cost:
            found.append(Cheaper(label=cell.label or cell.id, rank_s=median(costs), n=len(costs)))
    return min(found, key=lambda one: one.rank_s, default=None)


def _costs(results: Results, cell: CellResult, fault: str) -> Sequence[float]:
    of = [i for i in results.faults if i.cell == cell.id and i.fault == fault and i.fired]
    if not all(i.landed and i.answered_with is None for i in of):
        return []  # what did not land cost nothing; what another incident paid for looks cheap
    costs = [cost_of(results, one) for one in of]
    return [cost for cost in costs if cost is not None]


def _comparable(cell: CellResult, own: CellResult) -> bool:
    """Whether two cells differ in their strategy and in nothing else."""
    rest = [
        {name: value for name, value in one.params.items() if not _says_strategy(one, name, value)}
        for one in (cell, own)
    ]
    return cell.strategy != own.strategy and rest[0] == rest[1]


def _says_strategy(cell: CellResult, name: str, value: object) -> bool:
    """Whether a parameter of a cell is its strategy, by its value: users name them freely."""
    if isinstance(value, dict):
        return value.get("strategy") == cell.strategy and len(value) == 1
    return bool(name) and value == cell.strategy
