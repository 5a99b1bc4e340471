"""One account of each incident of a stored run: what came first, who was hit and who was blamed,
what it cost, and what its evidence means. Computed from the event logs alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import Event, read_log
from trainchaos.harness.explain.signs import Sign, Signs
from trainchaos.harness.host.rundir import RunDirectory, arm_id
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.episodes import episodes_of, unclaimed_failures
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import Results
from trainchaos.harness.judge.verdict.judge import judge
from trainchaos.recovery.playbook.book import Playbook
from trainchaos.recovery.playbook.entry import Entry


@dataclass(frozen=True, kw_only=True)
class Blame:
    """A failure as it was declared. ``process`` None: nobody was named."""

    cause: str
    process: str | None
    rank: int | None
    detail: str


@dataclass(frozen=True, kw_only=True)
class Account:
    """An incident that fired. ``hit``: processes; empty where a fault hits none (a link, a disk);
    ``right``: whether who was blamed was hit; None: nobody was blamed, or no process was hit.
    """

    arm: str
    incident: Incident
    hit: tuple[str, ...]
    blame: Blame | None
    right: bool | None
    signs: tuple[Sign, ...]

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


def story_of(run: RunDirectory, playbook: Playbook) -> Story:
    """Judge a stored run and tell its incidents; writes nothing. Raises LogError, ScenarioError,
    NewerVersion as ``judge``.
    """
    results, budget = judge(run), Budget()
    accounts: list[Account] = []
    unexplained: list[Unexplained] = []
    fired = [incident for incident in results.faults if incident.fired]
    for arm in results.arms:
        log = read_log(run.events(arm.id), budget)
        history, signs = history_of(log), Signs(log, playbook)
        episodes = episodes_of(history)
        if arm.arm == "faulted":
            own = [one for one in fired if arm_id(one.cell, one.repeat, "faulted") == arm.id]
            accounts += _accounts(arm.id, own, episodes, history, signs)
        unexplained += [
            Unexplained(
                arm=arm.id,
                step=failure.step,
                at_s=(failure.time_ns - history.start_ns) / NS,
                blame=_blame(failure),
                signs=signs.between(
                    failure.time_ns - NS, failure.time_ns, {failure.data["process"]}
                ),
            )
            for failure in unclaimed_failures(history, episodes)
        ]
    idle = len(results.faults) - len(fired)
    return Story(
        results=results, accounts=tuple(accounts), unexplained=tuple(unexplained), idle=idle
    )


def _accounts(
    arm: str,
    incidents: Sequence[Incident],
    episodes: Sequence[Episode],
    history: History,
    signs: Signs,
) -> Iterator[Account]:
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
        yield Account(
            arm=arm,
            incident=incident,
            hit=hit,
            blame=_blame(first.failure) if first.failure else None,
            right=first.may_be_blamed(first.failure) or blamed in hit
            if first.failure and blamed is not None and hit
            else None,
            signs=signs.between(start, end, {*hit, blamed} if hit else ()),
        )


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
