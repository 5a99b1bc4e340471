"""The post-mortem of each incident of a run, in the words that all reports share."""

from __future__ import annotations

from dataclasses import dataclass

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.units import MISSING, with_unit
from trainchaos.harness.explain.account import Account, told_of
from trainchaos.harness.explain.text import facts_of, moments_of
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.cost import failure_cost
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports.content.facts import labels
from trainchaos.reports.content.series import log_of
from trainchaos.reports.content.timeline import ended_well

MAX_ARMS = 24
MAX_INCIDENTS = 60


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """One incident. ``facts``: label and text; ``moments``: time after the hit, what, who;
    ``ended_well``: it was masked or recovered from, and nobody else was blamed.
    """

    account: Account
    facts: tuple[tuple[str, str], ...]
    moments: tuple[tuple[str, str, str], ...]
    ended_well: bool

    @property
    def incident(self) -> Incident:
        """As it was judged."""
        return self.account.incident


def postmortems(run: RunDirectory, results: Results) -> tuple[list[PostMortem], int]:
    """Post-mortems in the order of the results, and how many incidents that fired have none here.
    Of more than ``MAX_ARMS`` arms, those that did not end well come first; of more than
    ``MAX_INCIDENTS``, incidents that did not. An arm whose log cannot be read has none.
    """
    faulted = [arm for arm in results.arms if arm.arm == "faulted"]
    chosen = {arm.id for arm in sorted(faulted, key=ended_well)[:MAX_ARMS]}
    found = [one for arm in faulted if arm.id in chosen for one in _of_arm(run, results, arm)]
    kept = sorted(range(len(found)), key=lambda number: found[number].ended_well)[:MAX_INCIDENTS]
    fired = sum(incident.fired for incident in results.faults)
    return [found[number] for number in sorted(kept)], fired - len(kept)


def _of_arm(run: RunDirectory, results: Results, arm: ArmResult) -> list[PostMortem]:
    log = log_of(run, arm)
    try:
        accounts = told_of(log, arm.id, results) if log else []
    except LogError:  # readable, and without what a history begins with
        return []
    return [
        PostMortem(
            account=one,
            facts=tuple(facts_of(one)),
            moments=tuple(moments_of(one)),
            ended_well=one.incident.outcome in ("masked", "recovered") and one.right is not False,
        )
        for one in accounts
    ]


def stood(run: RunDirectory, results: Results) -> list[tuple[str, str]]:
    """Of each declared hang whose ranks left flight records: the incident, and in which collectives
    they stood. Reads the logs of arms with a hang only, MAX_ARMS at most.
    """
    hung = {(one.cell, one.repeat) for one in results.faults if one.detected_by == "hang"}
    arms = [a for a in results.arms if a.arm == "faulted" and (a.cell, a.repeat) in hung]
    found = [one for arm in arms[:MAX_ARMS] for one in _of_arm(run, results, arm)]
    told = [
        (f"{one.incident.fault}, {one.account.arm}", text)
        for one in found
        for label, text in one.facts
        if label == "waits"
    ]
    return told[:MAX_INCIDENTS]


def lines(results: Results) -> tuple[list[tuple[str, ...]], int]:
    """One line for each incident that fired, and how many more there are: cell, repeat, fault,
    outcome, who was blamed, cost, steps lost, decision. Of more than ``MAX_INCIDENTS``, those that
    were not recovered from come first. From the results alone.
    """
    fired = [incident for incident in results.faults if incident.fired]
    order = range(len(fired))
    kept = sorted(order, key=lambda n: fired[n].outcome in ("masked", "recovered"))[:MAX_INCIDENTS]
    return [_line(results, fired[number]) for number in sorted(kept)], len(fired) - len(kept)


def _line(results: Results, one: Incident) -> tuple[str, ...]:
    ranks = {(a.cell, a.repeat): a.provisioned_ranks for a in results.arms if a.arm == "faulted"}
    cost = 3600 * failure_cost(ranks.get((one.cell, one.repeat), 0), one.recovery_time)
    return (
        labels(results).get(one.cell, one.cell),
        str(one.repeat),
        f"{one.fault} ({one.kind})",
        one.outcome,
        _blamed(one),
        with_unit(cost, "rank-s", "lower"),
        one.lost,
        one.decision,
    )


def _blamed(one: Incident) -> str:
    """Who was blamed; that it is not who was hit where the fault hit one rank."""
    if one.detected_by is None:
        return MISSING
    if one.blamed_rank is None:
        return f"nobody, by {one.detected_by}"
    hit = one.target.get("rank")
    wrong = f", but rank {hit} was hit" if hit is not None and hit != one.blamed_rank else ""
    return f"rank {one.blamed_rank}, by {one.detected_by}{wrong}"
