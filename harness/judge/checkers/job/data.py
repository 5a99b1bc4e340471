"""Whether the job trained on the right samples, by finite steps, whose counters agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.evidence.evidence import (
    Evidence,
    failed,
    passed,
    unknown,
    verdict_of,
)
from trainchaos.harness.judge.measure.measure import account, skips_of
from trainchaos.harness.judge.record.history import History, RunInfo, StepRun, due_in
from trainchaos.harness.judge.record.nodes import witnessed
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.data.order import without


def sample_accounting(evidence: Evidence) -> Finding:
    """The samples of the final lineage are those of the reference order, as a multiset and step by
    step.

    With ``batch: shrink`` the samples of absent ranks are lost by design: this is allowed in a
    smaller world, and the finding counts them.
    """
    history = evidence.history
    if not history.committed_step:
        return unknown("no step was committed, so no sample can be accounted for")
    found = account(history)
    due = 1 if evidence.cell.scenario.recovery.params.get("nonfinite") == "skip" else 2
    if unjustified := _unjustified(history, due):
        times = "twice" if due == 2 else "at all"
        return failed(f"{unjustified}, though that step was not refused {times}")
    numbers = f"lost {found.lost}, duplicated {found.duplicated}, unexpected {found.unexpected}"
    numbers += f", skipped by decision {found.skipped}" if found.skipped else ""
    numbers += f" in steps 1..{found.steps}"
    if found.witnessed:
        numbers += (
            f"; {found.witnessed} of a lost node's last step are known by the reduced count of"
            " samples only"
        )
    if found.duplicated or found.unexpected:
        return failed(f"{numbers}; first at step {found.misplaced}")
    if found.misplaced is not None:
        return failed(
            f"the right samples in the wrong steps: step {found.misplaced} holds some of another"
            " step"
        )
    if not found.lost:
        return passed(numbers)
    lineage, ranks = history.lineage, history.info.ranks
    full = [step for step in found.lost_in if step not in lineage or lineage[step].world == ranks]
    if evidence.shrinks_batch and not full:
        return passed(
            f"{numbers}: lost by design (batch: shrink) in {len(found.lost_in)} steps of a smaller"
            " world"
        )
    return failed(f"{numbers}; first at step {min(full or found.lost_in)}")


def _unjustified(history: History, times: int) -> str:
    """A sample that was left out although its step had not been refused often enough: twice, or
    once where a whole share is left out at once (``nonfinite: skip``).
    """
    refused: dict[int, set[int]] = {}
    for event in history.log.of(Kind.NONFINITE_CAUGHT):
        refused.setdefault(event.step or 0, set()).add(event.generation)
    for sample, step in skips_of(history).items():
        if len(refused.get(step, ())) < times:
            return f"sample {sample} was left out from step {step} on"
    return ""


def step_arithmetic(evidence: Evidence) -> Finding:
    """Each generation makes one step after the other from where it resumed, also those that a
    rollback discards; optimizer and scheduler steps, sample counts and learning rates agree.

    The learning rate is compared with the control arm's at the same step, if there is one.
    """
    history = evidence.history
    if not history.runs:
        return unknown("no step was committed")
    lineage = history.lineage
    problems = [
        f"step {s} is missing" for s in range(1, history.committed_step + 1) if s not in lineage
    ]
    problems += _gaps(history)
    for run in history.runs:
        problems += [*_counters(run), *_sample_count(evidence, run)]
    if history.outcome == "completed" and history.committed_step != history.info.steps:
        problems.append(f"completed at step {history.committed_step} of {history.info.steps}")
    problems += _learning_rates(evidence)
    return verdict_of(problems, f"{len(history.runs)} executions of {len(lineage)} steps agree")


def _gaps(history: History) -> Iterator[str]:
    """Steps that a generation left out."""
    for generation in history.worked:
        last = generation.resume_step or 0
        for run in history.runs_of(generation.number):
            if run.step != last + 1:
                yield f"generation {generation.number} made step {run.step} after step {last}"
            last = run.step


def _counters(run: StepRun) -> Iterator[str]:
    names = ("optimizer_step", "scheduler_step")
    if all(run.done.all_say(name, run.step) for name in names):
        return
    for event in run.commits:
        for name in names:
            value = event.data[name]
            if value is not None and value != run.step:
                yield f"{name} {value} after step {run.step} on rank {event.data['rank']}"


def _sample_count(evidence: Evidence, run: StepRun) -> Iterator[str]:
    info, skips = evidence.history.info, skips_of(evidence.history, run.generation)
    due = len(_without(info, run.step, skips)) if skips else info.global_batch
    taken = sum(map(len, run.taken.said["samples"]))
    if taken < due:
        required = Counter(_without(info, run.step, skips))
        taken += witnessed(evidence.history, run, required).total()
    if taken == due and run.done.all_say("samples", taken):
        return
    shrunk = evidence.shrinks_batch and run.world < info.ranks
    for count in run.done.said["samples"]:
        if count != taken:
            yield f"step {run.step} reduced {count} samples, the ranks took {taken}"
            return
        if count != due and not shrunk:
            yield f"step {run.step} had {count} samples instead of {due}"
            return


def _without(info: RunInfo, step: int, skips: Mapping[int, int]) -> list[int]:
    return without([*due_in(info, step)], step, skips)


def _learning_rates(evidence: Evidence) -> list[str]:
    control = evidence.control_history
    if control is None or evidence.shrinks_batch:
        return []
    mine, theirs = (
        {step: run.commits[0].data["lr"] for step, run in history.lineage.items()}
        for history in (evidence.history, control)
    )
    return [
        f"learning rate {rate!r} at step {step}, the control arm had {theirs[step]!r}"
        for step, rate in mine.items()
        if step in theirs and rate != theirs[step]
    ]


def nan_containment(evidence: Evidence) -> Finding:
    """No step was committed with a non-finite loss or gradient norm. A planted value that nobody
    caught shows in one of these, or in the state, which ``loss-equality`` compares.
    """
    problems = []
    count = 0
    for run in evidence.history.runs:
        count += len(run.commits)
        losses, norms = run.done.said["loss"], run.done.said["grad_norm"]
        if _all_finite(losses) and _all_finite(norms):
            continue
        for rank, loss, norm in zip(run.done.said["rank"], losses, norms, strict=True):
            for name, value in (("loss", loss), ("grad_norm", norm)):
                missing = value is None and name == "loss"
                if missing or (value is not None and not math.isfinite(float(value))):
                    problems.append(f"rank {rank} committed step {run.step} with {name} {value}")
    if not count:
        return unknown("no step was committed")
    refusals = sum(1 for _ in evidence.log.of(Kind.NONFINITE_CAUGHT))
    return verdict_of(problems, f"{count} commits finite, {refusals} refusals")


def _all_finite(values: Sequence[Any]) -> bool:
    """Whether these are finite numbers, found without a look at each alone."""
    return set(map(type, values)) == {float} and all(map(math.isfinite, values))
