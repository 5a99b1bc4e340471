"""Derives a comparison's report from its stored runs. Pure: event logs and a plan in,
``Comparison`` out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from trainchaos.chaos.errors import LogError
from trainchaos.harness.compare.plan.directory import (
    ComparisonPlan,
    Directory,
    PlannedStack,
    PlayedArm,
)
from trainchaos.harness.compare.plan.plan import AGAIN, Arm, control_of
from trainchaos.harness.compare.result import rules, summary
from trainchaos.harness.compare.result.at_rest import at_rest
from trainchaos.harness.compare.result.model import (
    CellSummary,
    Comparison,
    FaultFreeSummary,
    StackInfo,
    Trial,
)
from trainchaos.harness.compare.result.outcome import completed, ended
from trainchaos.harness.compare.result.runs import ComparedRuns
from trainchaos.harness.compare.result.trials import TrialSource, trial_of
from trainchaos.harness.host import dns_check
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.verdict.judge import fidelity_of

BARE = "none"
"""The stack without recovery, whose fault-free step time is the reference for all others."""


def gather(directory: Directory) -> Comparison:
    """The comparison's results so far. Raises NoRun or LogError if it cannot be read."""
    plan = directory.read_plan()
    played = directory.played()
    runs = ComparedRuns(directory=directory, played=played)
    trials = [
        trial_of(source)
        for arm in plan.arms
        if arm.family is not None and (source := _source(arm, plan, runs)) is not None
    ]
    stacks = [info_of(stack) for stack in plan.stacks]
    seed = plan.seeds[0] if plan.seeds else 0
    script = [family.name for family in plan.families if family.script]
    ratios = summary.ratios_of(
        trials,
        plan.reference,
        seed=seed,
        apart=script,
        against={stack.label: stack.against for stack in plan.stacks if stack.against},
    )
    again = f"{plan.reference} {AGAIN}"
    same = [ratio for ratio in ratios if ratio.label == again]
    done = [one.finished for one in played.values()]
    missing = sum(1 for arm in plan.arms if arm not in played)
    refuted = list(_refuted(plan.arms, runs))
    broken = rules.broken_by(plan, played.values(), same, missing, refuted) if plan.closed else []
    return Comparison(
        name=plan.name,
        started=plan.started,
        finished=max(done, default=None) if not missing else None,
        machine=plan.provenance,
        workload=_workload(plan),
        stacks=stacks,
        families={family.name: family.about for family in plan.families},
        trials=trials,
        cells=_cells(plan, stacks, trials),
        ratios=[ratio for ratio in ratios if ratio.label != again],
        reference=plan.reference,
        same=same,
        skipped=plan.skipped,
        price=plan.price,
        currency=plan.currency,
        fidelity=_fidelity(plan, runs),
        reproduce=" ".join(["chaos", *plan.argv]),
        deadline=plan.deadline,
        cautions=[*_cautions(plan), *refuted],
        at_rest=list(_at_rest(plan, runs)),
        missing=missing,
        script=script,
        division="closed" if plan.closed and not broken else "open",
        broken=broken,
    )


def _cells(
    plan: ComparisonPlan, stacks: Sequence[StackInfo], trials: Sequence[Trial]
) -> list[CellSummary]:
    return summary.cells_of(
        [stack.label for stack in stacks],
        [family.name for family in plan.families],
        trials,
        bare=next((stack.label for stack in stacks if stack.stack == BARE), None),
        not_offered={
            (s.label, family): why for s in plan.stacks for family, why in s.not_offered.items()
        },
    )


def _at_rest(plan: ComparisonPlan, runs: ComparedRuns) -> Iterator[FaultFreeSummary]:
    for stack in plan.stacks:
        arms = [
            arm for arm in plan.arms if arm.label == stack.label and not runs.contradictions(arm)
        ]
        histories = [
            (arm.family, record.history) for arm in arms if (record := runs.record(arm)) is not None
        ]
        controls = [history for family, history in histories if family is None]
        faulted = [history for family, history in histories if family is not None]
        one = at_rest(stack.label, controls, faulted, stack.ranks_beside)
        if one is not None:
            yield one


def _refuted(arms: Iterable[Arm], runs: ComparedRuns) -> Iterator[str]:
    """Messages about arms whose record is not credible, or whose run does not state its plan."""
    for arm in arms:
        who = f"{arm.label}, {arm.family or f'control of {arm.like}'}, seed {arm.seed}"
        if why := runs.contradictions(arm):
            yield f"the record of {who} cannot be what happened, and counts for nothing: {why[0]}"
        elif runs.log(arm) is not None and runs.record(arm) is None:
            yield (
                f"the run of {who} does not say what it was to be, so its record was not judged"
                " again"
            )


def seen_of(directory: Directory, plan: ComparisonPlan, played: PlayedArm) -> str:
    """Outcome of one arm in a few words, right after it was played."""
    try:
        return _seen(directory, plan, played)
    except LogError as error:
        return error.message


def _seen(directory: Directory, plan: ComparisonPlan, played: PlayedArm) -> str:
    runs = ComparedRuns(directory=directory, played={**directory.played(), played.arm: played})
    if played.arm.family is None:
        log = runs.log(played.arm)
        history = history_of(log) if log else None
        step = measure(log, None).step_time if log else None
        if history is None or not completed(history):
            return f"did not get to its end: {ended(history) if history else 'no log'}"
        return "done" if step is None else f"done, {step * 1000:.0f} ms a step"
    source = _source(played.arm, plan, runs)
    trial = trial_of(source) if source else None
    if trial is None:
        return "nothing to read"
    if trial.recovery is None:
        return trial.outcome if trial.outcome == "masked" else f"{trial.outcome}: {trial.witness}"
    if math.isinf(trial.recovery):
        return f"{trial.outcome}: {trial.witness}"
    return f"{trial.outcome}, {trial.recovery:.3g} s to the first new step"


def info_of(stack: PlannedStack) -> StackInfo:
    """The stack as shown in reports."""
    same = stack.model_dump(include=set(StackInfo.model_fields))
    return StackInfo(stack=stack.name, description=stack.title, **same)


def _source(arm: Arm, plan: ComparisonPlan, runs: ComparedRuns) -> TrialSource | None:
    """None: not played yet."""
    log = runs.log(arm)
    if log is None or arm.family is None:
        return None
    control = control_of(arm, plan.arms, plan.workloads)
    bare = next((stack.label for stack in plan.stacks if stack.name == BARE), None)
    as_bare = arm.model_copy(update={"label": bare}) if bare else None
    bare_control = control_of(as_bare, plan.arms, plan.workloads) if as_bare else None
    ideal = runs.trusted(bare_control)
    played, record = runs.played[arm], runs.record(arm)
    against = runs.played.get(control) if control else None
    others = {"its control": control, f"the control of {bare}": bare_control}
    return TrialSource(
        label=arm.label,
        family=arm.family,
        seed=arm.seed,
        log=log,
        control=runs.trusted(control),
        ideal=ideal or runs.trusted(control),
        run=played.run,
        control_run=against.run if against else "",
        verdict=record.verdict(played.verdict) if record else played.verdict,
        reproduce=f"chaos run scenarios/{arm.id}.yaml",
        beside=next((stack.ranks_beside for stack in plan.stacks if stack.label == arm.label), 0),
        contradictions=runs.contradictions(arm),
        against=[
            said
            for who, one in others.items()
            if (known := runs.record(one))
            for said in known.said_as(who)
        ],
    )


def _workload(plan: ComparisonPlan) -> dict[str, object]:
    names = ("size", "ranks", "steps", "global_batch", "checkpoint_every")
    workloads = {family.workload for family in plan.families}
    if len(workloads) == 1:
        return {"kind": "gpt", **dict(zip(names, workloads.pop(), strict=True))}
    return {
        family.name: {"kind": "gpt", **dict(zip(names, family.workload, strict=True))}
        for family in plan.families
    }


def _cautions(plan: ComparisonPlan) -> list[str]:
    """Reasons why pairs are not comparable."""
    slow = dns_check.caution(plan.provenance.get("slowest_lookup_s", 0.0))
    return [*plan.changes, *([slow] if slow else [])]


def _fidelity(plan: ComparisonPlan, runs: ComparedRuns) -> list[str]:
    """What was emulated, according to the runs, and how this comparison measures time."""
    notes: list[str] = []
    for arm in runs.played:
        if (record := runs.record(arm)) is not None:
            notes += fidelity_of(record.resolved, [record.log])
    notes.append(
        f"a job that reports no new step for {plan.deadline:g} s counts as never recovered;"
        " recovery is counted from the fault to the first new step, and the clock is never stopped"
        " in between"
    )
    if not any(stack.name == BARE for stack in plan.stacks):
        notes.append(
            f"goodput is against each stack's own fault-free step, as the stack {BARE} did not take"
            " part: what a stack costs while nothing fails is not in it"
        )
    return list(dict.fromkeys(notes))
