"""Whether the job trained on the right samples, and whether its step counters agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.evidence.evidence import (
    Evidence,
    failed,
    passed,
    unknown,
    verdict_of,
)
from trainchaos.harness.judge.measure.measure import account, skips_of
from trainchaos.harness.judge.record.history import History, RunInfo, StepRun
from trainchaos.harness.judge.record.nodes import witnessed
from trainchaos.harness.judge.record.reference import due_in
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
    unjustified = _unjustified(history, due)
    if unjustified:
        times = "twice" if due == 2 else "at all"
        return failed(f"{unjustified[0]}, though that step was not refused {times}")
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
    lineage = history.lineage
    full = [
        step
        for step in found.lost_in
        if step not in lineage or lineage[step].world == history.info.ranks
    ]
    if evidence.shrinks_batch and not full:
        return passed(
            f"{numbers}: lost by design (batch: shrink) in {len(found.lost_in)} steps of a smaller"
            " world"
        )
    first = min(full or found.lost_in)
    return failed(f"{numbers}; first at step {first}")


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
        problems += _counters(run)
        problems += _sample_count(evidence, run)
    if history.finished is not None:
        claimed = history.finished.data["committed_step"]
        unknown_to_it = _hidden(evidence, claimed) or _before_a_takeover(evidence, claimed)
        if claimed != history.committed_step and not unknown_to_it:
            problems.append(
                f"run_finished claims step {claimed}, the ranks committed {history.committed_step}"
            )
        if history.outcome == "completed" and history.committed_step != history.info.steps:
            problems.append(f"completed at step {history.committed_step} of {history.info.steps}")
    problems += _learning_rates(evidence)
    return verdict_of(problems, f"{len(history.runs)} executions of {len(lineage)} steps agree")


def _gaps(history: History) -> list[str]:
    """Steps that a generation left out."""
    found = []
    for generation in history.worked:
        last = generation.resume_step or 0
        for run in history.runs_of(generation.number):
            if run.step != last + 1:
                found.append(
                    f"generation {generation.number} made step {run.step} after step {last}"
                )
            last = run.step
    return found


def _before_a_takeover(evidence: Evidence, claimed: int) -> bool:
    """Whether an unfinished job claims fewer steps because its supervisor was lost after them,
    and the new one found none of the processes that had made them.
    """
    history = evidence.history
    taken = list(history.log.of(Kind.COORDINATOR_ADOPTED))
    if not taken or claimed > history.committed_step or history.outcome == "completed":
        return False
    last = taken[-1]
    gone = {name for name, at_ns in history.exited_ns.items() if at_ns < last.time_ns}
    return all(
        run.end_ns < last.time_ns and {commit.actor for commit in run.commits} <= gone
        for step, run in history.lineage.items()
        if step > claimed
    )


def _hidden(evidence: Evidence, claimed: int) -> bool:
    """Whether an unfinished job claims fewer steps because a fault hid a member's progress.

    The fault lasted until the member was declared hung, or until a failure other than a hang ended
    the job, and no later generation became ready, which would have revealed the progress. Or it hid
    half of the members or more, who cannot be told from a job that waits for its data
    (``recovery.detection.hangs``), until the job was halted.
    """
    history = evidence.history
    if claimed > history.committed_step or history.outcome == "completed":
        return False
    last = history.worked[-1].number
    failures = [e.data for e in history.log.of(Kind.FAILURE_DETECTED) if e.generation == last]
    cut_off = any(failure["cause"] != "hang" for failure in failures)
    taken_for_hung = {failure["process"] for failure in failures}
    hiding = [
        (e.injected.time_ns, e.healed.time_ns if e.healed else history.end_ns, e.process)
        for e in evidence.measures.episodes
        if e.seems_still and e.injected
    ]

    def unseen(run: StepRun) -> bool:
        actors = {commit.actor for commit in run.commits}
        hidden = {name for since, until, name in hiding if since < run.end_ns <= until} & actors
        if 2 * len(hidden) >= len(actors) and history.outcome == "halted":
            return True
        return bool(hidden if cut_off else hidden & taken_for_hung)

    return all(
        run.generation == last and unseen(run)
        for step, run in history.lineage.items()
        if step > claimed
    )


def _counters(run: StepRun) -> list[str]:
    problems: list[str] = []
    if all(run.done.all_say(name, run.step) for name in ("optimizer_step", "scheduler_step")):
        return problems
    for event in run.commits:
        for name in ("optimizer_step", "scheduler_step"):
            value = event.data[name]
            if value is not None and value != run.step:
                problems.append(
                    f"{name} {value} after step {run.step} on rank {event.data['rank']}"
                )
    return problems


def _unjustified(history: History, times: int) -> list[str]:
    """Samples that were left out although their step had not been refused often enough: twice, or
    once where a whole share is left out at once (``nonfinite: skip``).
    """
    refused: dict[int, set[int]] = {}
    for event in history.log.of(Kind.NONFINITE_CAUGHT):
        refused.setdefault(event.step or 0, set()).add(event.generation)
    skips = skips_of(history)
    return [
        f"sample {s} was left out from step {n} on"
        for s, n in skips.items()
        if len(refused.get(n, ())) < times
    ]


def _sample_count(evidence: Evidence, run: StepRun) -> list[str]:
    info, skips = evidence.history.info, skips_of(evidence.history, run.generation)
    due = len(_without(info, run.step, skips)) if skips else info.global_batch
    taken = sum(map(len, run.taken.said["samples"]))
    if taken < due:
        required = Counter(_without(info, run.step, skips))
        taken += witnessed(evidence.history, run, required).total()
    problems: list[str] = []
    if taken == due and run.done.all_say("samples", taken):
        return problems
    for count in run.done.said["samples"]:
        if count != taken:
            problems.append(f"step {run.step} reduced {count} samples, the ranks took {taken}")
        elif count == taken != due and not (
            evidence.shrinks_batch and run.world < evidence.history.info.ranks
        ):
            problems.append(f"step {run.step} had {count} samples instead of {due}")
    return problems[:1]


def _without(info: RunInfo, step: int, skips: Mapping[int, int]) -> list[int]:
    return without([*due_in(info, step)], step, skips)


def _learning_rates(evidence: Evidence) -> list[str]:
    control = evidence.control_history
    if control is None or evidence.shrinks_batch:
        return []
    theirs = {step: run.commits[0].data["lr"] for step, run in control.lineage.items()}
    return [
        f"learning rate {event.data['lr']!r} at step {step}, the control arm had {theirs[step]!r}"
        for step, run in evidence.history.lineage.items()
        for event in run.commits[:1]
        if step in theirs and event.data["lr"] != theirs[step]
    ]
