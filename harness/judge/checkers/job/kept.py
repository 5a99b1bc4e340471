"""What a command kept through its faults: its progress, by its steps and losses, and its ranks.

Losses tell whether a job goes on with what it had learned. After each recovery the median of the
first FIRST losses is compared with that of the control arm's at the same steps. It may be above it
by the larger of

- BAND sigma sqrt(2 / FIRST), sigma being the noise of a single loss: of the control's losses the
  median of what one differs from the next, which for normal noise is 0.6745 sqrt(2) sigma (medians,
  as losses have spikes, and what differs at the start is no noise but training); a median of few
  values varies by a quarter more than a mean, so that BAND are four standard deviations; and
- what the two arms, and any two control arms, differed by where no fault had acted.

A job beyond that which has lost at least half of what the control had gained by then fails: it
began again with other weights, whatever step it says. Less is inconclusive, as of a job that does
not restore its optimizer or its place in the data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from trainchaos.chaos.scenario.sla import Clause, evaluate, parse_clause
from trainchaos.harness.judge.checkers.job.observed import progress
from trainchaos.harness.judge.checkers.job.values import LEAVE_OUT
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, unknown
from trainchaos.harness.judge.record.commands import half_known, losses_of, strength_of
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.record.observed import stride_of, unseen
from trainchaos.harness.judge.results import Finding

FEW = 2  # steps; losing no more than these is not worth reporting
FIRST = 5
"""Losses after a recovery that are compared: a job that lost its weights learns again."""
BAND = 5.0
NORMAL_MEDIAN = 0.6745 * math.sqrt(2)
STILL = 5
"""Equal losses in a row, to the last digit, after which a job is taken to learn nothing."""


def kept_progress(evidence: Evidence) -> Finding | None:
    """After a fault the job did not restart from its first step, and its losses go on from where
    they were. None if it never went back and no losses can be compared, or if its steps are
    unknown. An SLA that admits as many lost steps as had been done allows it. Where
    the control arm did the same without a fault, it is not known to be the fault's doing.
    """
    history, limits = evidence.history, _limits(evidence)
    hit = history.first_hit_ns
    if evidence.is_control or hit is None or progress(evidence).verdict != "pass":
        return None
    by_losses = _by_losses(evidence, hit)
    if by_losses is not None and by_losses.verdict != "pass":
        return by_losses
    few, back, where = max(FEW + 1, 2 * stride_of(history)), 0, "never to its first step"
    cure = "say how many may be lost, sla: {steps_lost: [...]}"
    if limits:
        cure = f"sla.steps_lost allows fewer, {limits[0].text}"
    cure += LEAVE_OUT.format("kept-progress")
    for generation in history.worked:
        done, resume = history.high_water(generation.number - 1), generation.resume_step or 0
        if generation.started_ns < hit or resume >= done:
            continue
        back += 1
        if resume > 0 or done < few:
            continue
        if limits and all(evaluate(clause, [float(done)])[0] for clause in limits):
            where = f"to its first step after {done} steps, which sla.steps_lost allows"
            continue
        mine = (event for event in history.reports if event.generation == generation.number)
        reported = min(event.step or 0 for event in mine)
        if reported > 1:
            return unknown(
                f"{done} steps had been done, and the first one reported after a restart was"
                f" {reported}: whether the job began again from step 1 is not known; {cure}"
            )
        again = f"the job began again from step 1, and {done} steps had been done"
        if (control := evidence.control_history) is not None and _begins_again(control):
            return unknown(
                f"{again}; the control arm began again too, without a fault: correct the"
                " command first, until it ends well without one"
            )
        return failed(f"after a fault {again}: {cure}")
    if not back:
        return by_losses
    more = f"; {by_losses.witness}" if by_losses is not None else ""
    return passed(f"the job went back {back} times, {where}{more}")


class _Compared(NamedTuple):
    """Losses from ``step`` on after a recovery: medians, and by how much they may differ."""

    step: int
    mine: float
    control: float
    band: float


def _by_losses(evidence: Evidence, hit_ns: int) -> Finding | None:
    """Whether losses went on from where they were; see the module. None if nothing can be
    compared.
    """
    history, control = evidence.history, evidence.control_history
    if control is None:
        return None
    mine, theirs = _means(history), _means(control)
    if len(theirs) >= 2 * STILL and len(set(theirs.values())) == 1:
        return unknown(
            f"the loss is {next(iter(theirs.values()))!r} in each step of the control arm: nothing"
            f" shows that the job learns{LEAVE_OUT.format('kept-progress')}"
        )
    found: list[_Compared] = []
    for generation in history.worked:
        if generation.number == 1 or generation.started_ns < hit_ns:
            continue
        steps = [
            step
            for step in sorted(mine.keys() & theirs.keys())
            if history.lineage[step].generation == generation.number
        ]
        if still := _stands_still([mine[step] for step in steps], [theirs[s] for s in steps]):
            return failed(f"from step {steps[0]} on, after the recovery, {still}")
        if len(steps) >= FEW and len(theirs) >= 2 * FIRST:
            found.append(_compared(evidence, steps[:FIRST], mine, theirs))
    if not found:
        return None
    worst = max(found, key=lambda one: one.mine - one.control - one.band)
    gap = worst.mine - worst.control
    said = (
        f"after the recovery the loss from step {worst.step} on is {worst.mine:.4g}, the control"
        f" arm's {worst.control:.4g} (band {worst.band:.2g})"
    )
    if gap <= worst.band:
        return passed(said)
    gained = median(list(theirs.values())[:FIRST]) - worst.control
    cure = LEAVE_OUT.format("kept-progress")
    if gap >= gained / 2 > worst.band:
        return failed(
            f"{said}: of what the job had learned {min(1.0, gap / gained):.0%} is lost, as if it"
            f" had begun with other weights, though it says that step{cure}"
        )
    return unknown(f"{said}: it does not go on with all that it had{cure}")


def _means(history: History) -> dict[int, float]:
    """Of each step whose losses are finite the mean over those who reported one."""
    found = {
        step: fmean(itertools.chain.from_iterable(by_rank.values()))
        for step, by_rank in losses_of(history).items()
    }
    return {step: loss for step, loss in found.items() if math.isfinite(loss)}


def _stands_still(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """Why losses that do not change say that nothing is learned; "" if they do not say so."""
    if len(mine) < STILL or len(set(mine)) > 1 or len(set(theirs)) < STILL:
        return ""
    return f"the loss was {mine[0]!r} in each of {len(mine)} steps, and the control arm's changed"


def _compared(
    evidence: Evidence, steps: Sequence[int], mine: Mapping[int, float], theirs: Mapping[int, float]
) -> _Compared:
    values = list(theirs.values())
    sigma = median(abs(b - a) for a, b in itertools.pairwise(values)) / NORMAL_MEDIAN
    before = [step for step in mine.keys() & theirs.keys() if step < steps[0]]
    apart = [abs(gap) for gap in _windows([mine[s] - theirs[s] for s in sorted(before)])]
    for log in evidence.controls:
        other = _means(history_of(log))
        common = sorted(other.keys() & theirs.keys())
        apart += [abs(gap) for gap in _windows([other[step] - theirs[step] for step in common])]
    noise = BAND * sigma * math.sqrt(2 / len(steps))
    ours, others = (median(losses[step] for step in steps) for losses in (mine, theirs))
    return _Compared(steps[0], ours, others, max([noise, *apart]))


def _windows(gaps: Sequence[float]) -> list[float]:
    """Medians over FIRST in a row."""
    return [median(gaps[end - FIRST : end]) for end in range(FIRST, len(gaps) + 1)]


def _begins_again(history: History) -> bool:
    """Whether a job left more than a few steps behind and began from its first one."""
    few = max(FEW + 1, 2 * stride_of(history))
    return any(
        one.resume_step == 0 and history.high_water(one.number - 1) >= few for one in history.worked
    )


def _limits(evidence: Evidence) -> list[Clause]:
    """The clauses that say how many steps may be lost at most."""
    scenario = evidence.cell.scenario
    checks = [one for one in scenario.sla.get("steps_lost", ()) if one.covers(scenario.faults)]
    clauses = [parse_clause(check.check, "steps") for check in checks]
    return [clause for clause in clauses if not clause.op.startswith(">")]


def full_strength(evidence: Evidence) -> Finding:
    """The job ended with as many ranks as it started with."""
    history = evidence.history
    if not history.info.observed:
        if not history.worked:
            return unknown("no generation was ever ready")
        world, ranks = history.worked[-1].world, history.info.ranks
        witness = f"the last generation had {world} of {ranks} ranks"
        return passed(witness) if world >= ranks else failed(witness)
    if not history.runs:
        return unknown(unseen(history))
    if lacking := half_known(history):
        return unknown(f"{lacking}: how many there were at the end is not known")
    found = strength_of(history)
    said = f"{found.ended} of {found.began} ranks at the end"
    return failed(found.short) if found.short else passed(said)
