"""One account of each incident of a stored run: what came first, who was hit and who was blamed,
what it cost, and what its evidence means. Computed from the event logs alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import Event, Log, read_log
from trainchaos.harness.explain.cheaper import Cheaper, cheaper_than, cost_of
from trainchaos.harness.explain.collectives import FlightRecord, records_between
from trainchaos.harness.explain.course import Course, course_of
from trainchaos.harness.explain.diagnose import diagnose
from trainchaos.harness.explain.diagnosis import DiagnosedIncident
from trainchaos.harness.explain.signs import Sign, Signs
from trainchaos.harness.explain.stacks import Stack, stacks_between
from trainchaos.harness.host.rundir import RunDirectory, arm_id
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.episodes import episodes_of, unclaimed_failures
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import Results
from trainchaos.harness.judge.verdict.judge import judge
from trainchaos.recovery.playbook.book import Playbook, playbook
from trainchaos.recovery.playbook.entry import Entry

EARLY_S = 0.25
"""A silence may have begun so long before the fault that it is told of: a rank falls behind while
it waits for its point.
"""


@dataclass(frozen=True, kw_only=True)
class Blame:
    """A failure as it was declared. ``process`` None: nobody was named."""

    cause: str
    process: str | None
    rank: int | None
    detail: str


@dataclass(frozen=True, kw_only=True)
class Account:
    """An incident that fired: its post-mortem. ``hit``: processes; empty where a fault hits none (a
    link, a disk); ``right``: whether who was blamed was hit; None: nobody was blamed, or no process
    was hit; ``rank_s``: what it cost, rank-seconds (``cost_of``); ``cheaper``: None: the run
    supports no claim; ``diagnosis``: what the log without its fault events says of that time.
    """

    arm: str
    incident: Incident
    hit: tuple[str, ...]
    blame: Blame | None
    right: bool | None
    signs: tuple[Sign, ...]
    course: Course
    rank_s: float | None
    cheaper: Cheaper | None
    diagnosis: DiagnosedIncident | None
    stacks: tuple[Stack, ...]
    records: tuple[FlightRecord, ...]

    @property
    def advice(self) -> Entry | None:
        """The entry of the best sign."""
        return _advice(self.signs)


@dataclass(frozen=True, kw_only=True)
class Unexplained:
    """A failure that no fault explains. ``at_s``: since the arm began."""

    arm: str
    step: int | None
    at_s: float
    blame: Blame
    signs: tuple[Sign, ...]
    stacks: tuple[Stack, ...]
    records: tuple[FlightRecord, ...]

    @property
    def advice(self) -> Entry | None:
        """The entry of the best sign."""
        return _advice(self.signs)


@dataclass(frozen=True, kw_only=True)
class Story:
    """All of a run. ``idle``: planned faults that never fired."""

    results: Results
    accounts: tuple[Account, ...]
    unexplained: tuple[Unexplained, ...]
    idle: int


def story_of(run: RunDirectory, known: Playbook) -> Story:
    """Judge a stored run and tell its incidents; writes nothing. Raises LogError, ScenarioError,
    NewerVersion as ``judge``.
    """
    results, budget = judge(run), Budget()
    accounts: list[Account] = []
    unexplained: list[Unexplained] = []
    for arm in results.arms:
        log = read_log(run.events(arm.id), budget)
        history, signs = history_of(log), Signs(log, known)
        episodes = episodes_of(history)
        if arm.arm == "faulted":
            said = diagnose(log, known)
            accounts += _accounts(arm.id, results, episodes, history, signs, said)
        unexplained += [
            Unexplained(
                arm=arm.id,
                step=failure.step,
                at_s=(failure.time_ns - history.start_ns) / NS,
                blame=_blame(failure),
                signs=signs.between(
                    failure.time_ns - NS, failure.time_ns, {failure.data["process"]}
                ),
                stacks=stacks_between(log, failure.time_ns, failure.time_ns + NS),
                records=records_between(log, failure.time_ns, failure.time_ns + NS),
            )
            for failure in unclaimed_failures(history, episodes)
        ]
    idle = sum(not incident.fired for incident in results.faults)
    return Story(
        results=results, accounts=tuple(accounts), unexplained=tuple(unexplained), idle=idle
    )


def told_of(log: Log, arm: str, results: Results) -> list[Account]:
    """The incidents of one faulted arm. ``log``: of the arm with this id; ``results``: of its run.
    Raises LogError where the log does not say how its run began.
    """
    book, history = playbook(), history_of(log)
    signs, said = Signs(log, book), diagnose(log, book)
    return [*_accounts(arm, results, episodes_of(history), history, signs, said)]


def _accounts(
    arm: str,
    results: Results,
    episodes: Sequence[Episode],
    history: History,
    signs: Signs,
    said: Sequence[DiagnosedIncident],
) -> Iterator[Account]:
    fired = [one for one in results.faults if one.fired]
    incidents = [one for one in fired if arm_id(one.cell, one.repeat, "faulted") == arm]
    by_hit = {(one.fault, one.occurrence): one for one in episodes if one.injected}
    starts = sorted(one.injected.time_ns for one in episodes if one.injected)
    for incident in incidents:
        keys = ((incident.fault, number) for number in incident.occurrences)
        hits = [by_hit[key] for key in keys if key in by_hit]
        if not hits:
            continue
        first = next((one for one in hits if one.failure), hits[0])
        hit = tuple(dict.fromkeys(name for one in hits for name in one.processes))
        blamed = first.failure.data["process"] if first.failure else None
        start, end = _span(incident, hits, starts, history)
        course = course_of(history.log, round(start), incident.kind, first.failure, end)
        yield Account(
            arm=arm,
            incident=incident,
            hit=hit,
            blame=_blame(first.failure) if first.failure else None,
            right=first.may_be_blamed(first.failure) or blamed in hit
            if first.failure and blamed is not None and hit
            else None,
            signs=signs.between(start, end, {*hit, blamed} if hit else ()),
            course=course,
            rank_s=cost_of(results, incident),
            cheaper=cheaper_than(results, incident),
            diagnosis=_said(said, history, (start, end), first.failure),
            stacks=stacks_between(history.log, start, end),
            records=records_between(history.log, start, end),
        )


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
) -> tuple[float, float]:
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


def _blame(failure: Event) -> Blame:
    data = failure.data
    return Blame(
        cause=str(data["cause"]),
        process=data["process"],
        rank=data["rank"],
        detail=str(data["detail"]),
    )


def _advice(signs: Sequence[Sign]) -> Entry | None:
    return next((sign.entry for sign in signs if sign.entry), None)
