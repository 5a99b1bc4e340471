"""What a command, which is only seen from outside, is judged by: that its steps were seen, what it
kept of its progress and its ranks through its faults, and why other invariants cannot be judged.

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
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from types import MappingProxyType
from typing import NamedTuple

from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.chaos.scenario.sla import Clause, evaluate, parse_clause
from trainchaos.harness.judge.checkers.job.values import LEAVE_OUT, unread_shown
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, unknown
from trainchaos.harness.judge.record.commands import half_known, losses_of, strength_of
from trainchaos.harness.judge.record.history import NS, Generation, History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.record.observed import from_0, samples_of_steps, stride_of, unseen
from trainchaos.harness.judge.results import Finding

PROGRESS = "progress"
REPEATED = 3  # steps; fewer may be a line that was printed twice
ECHO_S = 1.0  # how long a process's output may be in flight
ECHOES = 5  # steps of a job that completes without any of its ranks: more than are in flight
LACKING: Mapping[str, str] = MappingProxyType(
    {
        "sample-accounting": "which samples each step trained on",
        "no-lost-commit": "which checkpoints it wrote and restored",
        "single-writer": "who wrote what",
        "replica-equality": "digests of the ranks' state",
        "checkpoint-integrity": "which checkpoints it wrote, refused and restored",
        "nan-containment": "gradients, and steps it refused to take",
        "membership": "which members its ranks were given",
        "step-arithmetic": "optimizer and scheduler steps, samples and learning rates",
    }
)
"""Checker -> the evidence that a command does not give."""

OBSERVABLE = "observable"
"""Selects what a command's evidence can support."""
LOSSES = "loss-equality"
UNREPORTED = 1  # reports that a process may owe when it is killed


def unjudged(scenario: Scenario, findings: Mapping[str, Finding]) -> dict[str, str]:
    """Checker -> the evidence that a command does not give, of those that ``observable`` leaves out
    of a verdict; of losses, what was found of them. ``findings``: of an arm or a whole cell.
    """
    if scenario.workload.command is None or scenario.invariants != OBSERVABLE:
        return {}
    losses = findings.get(LOSSES)
    if losses is None or losses.verdict != "inconclusive":
        return dict(LACKING)
    return {**LACKING, LOSSES: losses.witness.removesuffix(LEAVE_OUT.format(LOSSES))}


def lacking(name: str) -> Finding:
    """The finding of a checker that cannot judge a command."""
    cure = f"leave it out by saying so, invariants: {{leave_out: [{name}]}}"
    return unknown(f"a command does not tell {LACKING[name]}; {cure}")


def progress(evidence: Evidence) -> Finding:
    """The command was seen working: its ranks were found, and its steps were reported from the
    first.
    """
    history, reports = evidence.history, evidence.history.reports
    ended = history.finished.data if history.finished else {}
    end, found = ended.get("reason", "the harness did not get to the end"), history.found
    if not reports:
        unmatched = re.search(r"workload\.progress\.(regex|preset) matched", end)
        return unknown(
            f"{evidence.place('workload.progress' if unmatched else 'workload.command')}{end}"
        )
    if found == history.info.ranks and ended.get("miscounted"):
        return unknown(f"{evidence.place('workload.ranks')}{end}")
    if found != history.info.ranks:
        return unknown(
            f"{evidence.place('workload.ranks')}{found} of {history.info.ranks} ranks were found"
            " among the command's processes: each needs RANK (or LOCAL_RANK) in its environment,"
            " or a beacon that says it; or correct ranks"
        )
    first, stride = reports[0].step or 0, stride_of(history)
    if first > max(stride, 1) and not from_0(history):
        return unknown(
            f"the first step reported was {first}: the script went on from an earlier run; give"
            " each arm a directory of its own, $CHAOS_SCRATCH"
        )
    if many := _too_many_samples(evidence):
        return failed(many)
    if jump := _jump_of(evidence):
        return jump
    if odd := _beyond(evidence) or _went_back(evidence) or _outlived(history, stride):
        return unknown(odd)
    if ended.get("unused") and not evidence.is_control:
        return unknown(
            "the command never wrote into $CHAOS_SCRATCH, where alone storage faults act: have it"
            " save its checkpoints there"
        )
    every = "" if stride == 1 else f", every {stride} steps"
    odd = f"; {shown}" if (shown := unread_shown(evidence)) else ""
    if refused := ended.get("refused"):
        odd += f"; {refused} reports were left out, as their step is not a number"
    return passed(
        f"{found} ranks, {len(reports)} reports{every}, up to step {history.committed_step}{odd}"
    )


def _too_many_samples(evidence: Evidence) -> str:
    """A step with more samples than a batch has and than any step of the control arm, provided that
    most control steps had equally many; "" if there is none.

    Fewer samples are a batch that was not full, or fewer ranks. A script that reports the whole
    batch on every rank does so in both arms.
    """
    batch, control = evidence.cell.scenario.workload.global_batch, evidence.control_history
    if control is None or evidence.is_control:
        return ""
    known = list(samples_of_steps(control).values())
    if not known or statistics.median(known) < max(known):
        return ""
    for (generation, step), samples in samples_of_steps(evidence.history).items():
        if samples > max(*known, batch):
            return (
                f"step {step} of generation {generation} is said to have trained on {samples}"
                f" samples, and no step of the control arm on more than {max(known)}"
            )
    return ""


def _beyond(evidence: Evidence) -> str:
    """A step that the run cannot have. The last one is ``steps``, or one more: scripts count from 0
    or from 1.
    """
    steps = evidence.history.info.steps
    beyond = (event.step for event in evidence.history.reports if (event.step or 0) > steps + 1)
    first = next(beyond, None)
    if first is None:
        return ""
    return (
        f"{evidence.place('workload.progress')}step {first} was reported, and workload.steps is"
        f" {steps}: correct workload.steps, or let progress find nothing but the step of the"
        " whole run"
    )


def _went_back(evidence: Evidence) -> str:
    """Steps that were reported again before any fault or failure: probably steps of an epoch.

    Where reports do not name their rank, each rank may report a step once, slow ranks late.
    """
    log, history = evidence.log, evidence.history
    until = [event.time_ns for event in log.of(Kind.FAULT_INJECTED, Kind.FAILURE_DETECTED)]
    until += [g.started_ns for g in history.generations if g.cause == "restart" and g.number > 1]
    early = [event for event in history.reports if event.time_ns < min(until, default=math.inf)]
    times: Counter[tuple[int, int | None]] = Counter()
    last: dict[int | None, int] = {}
    for event in early:
        step, rank = event.step or 0, event.data["rank"]
        if last.get(rank) != step:  # a step repeated in succession is one report
            times[step, rank] += 1
        last[rank] = step
    ranks = history.info.ranks
    again = [step for (step, rank), n in times.items() if n > (ranks if rank is None else 1)]
    if len(again) < REPEATED or min(again) > (early[0].step or 0):
        return ""  # going back to a checkpoint is not restarting from the first step
    return (
        f"{evidence.place('workload.progress')}steps {min(again)} to {max(again)} were reported"
        " again without a restart and without a fault: is this the step of the epoch? let progress"
        " find the step of the whole run"
    )


def _outlived(history: History, stride: int) -> str:
    """Steps that went on after the ranks that make them had ended, with no replacement seen."""
    exits = [*history.log.of(Kind.PROCESS_EXITED)]
    badly = {e.data["process"] for e in exits if e.data["exit_code"] != 0}
    for failure in history.log.of(Kind.FAILURE_DETECTED):
        number, rank = failure.generation, failure.data["rank"]
        generation, after = history.generation(number), history.generation(number + 1)
        if failure.data["cause"] != "exit" or generation is None:
            continue
        gone = [history.exited_ns.get(name) for name in generation.members]
        alone = None not in gone
        left = after.world if after is not None and after.cause == "shrunk" else 0
        mine = [e for e in history.reports if e.generation in (number, number + bool(left))]
        before = max((e.step or 0 for e in mine if e.time_ns <= failure.time_ns), default=0)
        ends = [ns for ns in gone if ns] if alone else []
        since = max([failure.time_ns, *ends])
        beyond = [e for e in mine if e.time_ns > since and (e.step or 0) > before + stride]
        nobody = after is None and badly >= set(generation.members)
        done = history.outcome == "completed" and len({e.step for e in beyond}) >= ECHOES
        echo_s = 0.0 if nobody and done else ECHO_S
        late = [e for e in beyond if e.time_ns > since + echo_s * NS]
        # surviving ranks may be renumbered, but never to a number as high as this one
        own = any(rank is not None and e.data["rank"] == rank >= left for e in late)
        if own or (alone and late):
            return (
                f"{failure.data['process']} ended, yet the steps went on to"
                f" {max(e.step or 0 for e in mine)} and no process had been"
                " started in its place: what was hit is not what trains; give each training"
                " process RANK in its environment, or a beacon; else they were printed and not"
                " trained"
            )
    return ""


def _jump_of(evidence: Evidence) -> Finding | None:
    """The finding on the first jump of a faulted arm, None if there is none: steps that a command
    left out when it went on after a failure.

    Reports show it where the control arm has them and the distance is larger than any between two
    of its reports. One may be missing: of a step that was saved, and whose process was killed
    before it reported it. Lines of output may be lost in the buffer of a killed process as well;
    reports of the beacon are not.
    """
    control, history = evidence.control_history, evidence.history
    if control is None or evidence.is_control:
        return None
    known, said = (sorted({e.step or 0 for e in one.reports}) for one in (control, history))
    stride = stride_of(history)
    usual = max([stride, *(after - before for before, after in itertools.pairwise(known))])
    for before, after in itertools.pairwise(history.generations):
        if after.resume_step is None:
            continue
        earlier = [e.step or 0 for e in history.reports if e.generation < after.number]
        high, first = max(earlier, default=0), after.resume_step + stride
        missing = [step for step in known if high < step < first and step not in said]
        if not high or first - high <= usual or len(missing) <= UNREPORTED:
            continue
        low, high = missing[0], missing[-1]
        of = "each" if len(missing) == high - low + 1 else f"{len(missing)} of them"
        when = "the restart" if after.cause == "restart" else "the failure"
        sure = _all_heard(history, before)
        how = "left out" if sure else "reported by nobody"
        words = (
            f"steps {low} to {high} were {how}: the job went on with step {first} after {when}"
            f"{', the beacon reported none of them' if sure else ''},"
            f" and the control arm reports {of}"
        )
        return (
            failed(words) if sure else unknown(f"{words}: were they trained, or their lines lost?")
        )
    return None


def _all_heard(history: History, generation: Generation) -> bool:
    """Whether no rank of a generation can have trained on unheard: each reported by the beacon, or
    those that did were not lost.
    """
    if history.finished is not None and history.finished.data.get("refused"):
        return False
    mine = [event for event in history.reports if event.generation == generation.number]
    if not all(event.data["source"] == "beacon" for event in mine):
        return False
    failures = history.log.of(Kind.FAILURE_DETECTED)
    ranks = {event.data["rank"] for event in mine}
    lost = {event.data["rank"] for event in failures if event.generation == generation.number}
    named = None not in ranks
    apart = named and None not in lost and ranks.isdisjoint(lost)
    return generation.world == 1 or apart or (named and len(ranks) == generation.world)


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
