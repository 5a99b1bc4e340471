"""Derives a comparison's report from its stored runs. Pure: event logs and a plan in,
``Comparison`` out.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.units import with_unit
from trainchaos.harness.compare.plan.directory import (
    ComparisonPlan,
    Directory,
    PlannedStack,
    PlayedArm,
)
from trainchaos.harness.compare.plan.plan import AGAIN, Arm, control_of
from trainchaos.harness.compare.result import rules, summary
from trainchaos.harness.compare.result.model import Comparison, FaultFreeSummary, StackInfo, Trial
from trainchaos.harness.compare.result.outcome import completed, ended
from trainchaos.harness.compare.result.records import ComparedRuns
from trainchaos.harness.compare.result.trials import trial_of
from trainchaos.harness.host import dns_check
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.verdict.judge import fidelity_of

BARE = "none"
"""The stack without recovery, whose fault-free step time is the reference for all others."""


def gather(directory: Directory) -> Comparison:
    """The comparison's results so far. Raises NoRun or LogError if it cannot be read."""
    plan, played = directory.read_plan(), directory.played()
    runs = ComparedRuns(directory=directory, played=played)
    known = (_trial(arm, plan, runs) for arm in plan.arms if arm.family is not None)
    trials = [trial for trial in known if trial is not None]
    script = [family.name for family in plan.families if family.script]
    against = {stack.label: stack.against for stack in plan.stacks if stack.against}
    ratios = summary.ratios_of(trials, plan.reference, apart=script, against=against)
    again = f"{plan.reference} {AGAIN}"
    same = [ratio for ratio in ratios if ratio.label == again]
    missing = sum(arm not in played for arm in plan.arms)
    done = [one.finished for one in played.values()]
    refuted = list(_refuted(plan, runs))
    slow = dns_check.caution(plan.provenance.get("slowest_lookup_s", 0.0))
    broken = rules.broken_by(plan, played.values(), same, missing, refuted) if plan.closed else []
    return Comparison(
        name=plan.name,
        started=plan.started,
        finished=max(done, default=None) if not missing else None,
        machine=plan.provenance,
        workload=_workload(plan),
        stacks=[info_of(stack) for stack in plan.stacks],
        families={family.name: family.about for family in plan.families},
        trials=trials,
        cells=summary.cells_of(
            [stack.label for stack in plan.stacks],
            [family.name for family in plan.families],
            trials,
            bare=_bare(plan),
            not_offered={
                (s.label, f): why for s in plan.stacks for f, why in s.not_offered.items()
            },
        ),
        ratios=[ratio for ratio in ratios if ratio.label != again],
        reference=plan.reference,
        same=same,
        skipped=plan.skipped,
        price=plan.price,
        currency=plan.currency,
        fidelity=_fidelity(plan, runs),
        reproduce=" ".join(["chaos", *plan.argv]),
        deadline=plan.deadline,
        cautions=[*plan.changes, *([slow] if slow else []), *refuted],
        at_rest=list(_at_rest(plan, runs)),
        missing=missing,
        script=script,
        division="closed" if plan.closed and not broken else "open",
        broken=broken,
    )


def info_of(stack: PlannedStack) -> StackInfo:
    """The stack as shown in reports."""
    same = stack.model_dump(include=set(StackInfo.model_fields))
    return StackInfo(stack=stack.name, description=stack.title, **same)


def seen_of(directory: Directory, plan: ComparisonPlan, played: PlayedArm) -> str:
    """Outcome of one arm in a few words, right after it was played."""
    runs = ComparedRuns(directory=directory, played={**directory.played(), played.arm: played})
    try:
        log = runs.log(played.arm)
        if log is None:
            return "nothing to read"
        if played.arm.family is None:
            made = measure(log, None)
            if not completed(made.history):
                return f"did not get to its end: {ended(made.history)}"
            return (
                "done" if made.step_time is None else f"done, {made.step_time * 1e3:.0f} ms a step"
            )
        trial = _trial(played.arm, plan, runs)
    except LogError as error:
        return error.message
    if trial is None or trial.outcome == "masked":
        return "masked" if trial else "nothing to read"
    if trial.recovery in (None, float("inf")):
        return f"{trial.outcome}: {trial.witness}"
    return f"{trial.outcome}, {with_unit(trial.recovery, 's', 'lower')} to the first new step"


def _trial(arm: Arm, plan: ComparisonPlan, runs: ComparedRuns) -> Trial | None:
    """None: not played yet."""
    log = runs.log(arm)
    if log is None:
        return None
    bare, played, record = _bare(plan), runs.played[arm], runs.record(arm)
    control = control_of(arm, plan.arms, plan.workloads)
    as_bare = arm.model_copy(update={"label": bare}) if bare else None
    bare_control = control_of(as_bare, plan.arms, plan.workloads) if as_bare else None
    against = runs.played.get(control) if control else None
    others = {"its control": control, f"the control of {bare}": bare_control}
    known = [(who, record) for who, one in others.items() if (record := runs.record(one))]
    return trial_of(
        log,
        runs.trusted(control),
        runs.trusted(bare_control) or runs.trusted(control),
        beside=next((stack.ranks_beside for stack in plan.stacks if stack.label == arm.label), 0),
        contradictions=runs.contradictions(arm),
        against=[note for who, one in known for note in one.notes(who)],
        label=arm.label,
        family=arm.family,
        seed=arm.seed,
        run=played.run,
        control_run=against.run if against else "",
        verdict=record.verdict(played.verdict) if record else played.verdict,
        reproduce=f"chaos run scenarios/{arm.id}.yaml",
    )


def _bare(plan: ComparisonPlan) -> str | None:
    return next((stack.label for stack in plan.stacks if stack.name == BARE), None)


def _at_rest(plan: ComparisonPlan, runs: ComparedRuns) -> Iterator[FaultFreeSummary]:
    for stack in plan.stacks:
        arms = [a for a in plan.arms if a.label == stack.label and not runs.contradictions(a)]
        known = [(arm.family, record.history) for arm in arms if (record := runs.record(arm))]
        controls = [history for family, history in known if family is None]
        faulted = [history for family, history in known if family is not None]
        one = summary.at_rest(stack.label, controls, faulted, stack.ranks_beside)
        if one is not None:
            yield one


def _refuted(plan: ComparisonPlan, runs: ComparedRuns) -> Iterator[str]:
    """Messages about arms whose record is not credible, or whose run does not state its plan."""
    for arm in plan.arms:
        who = f"{arm.label}, {arm.family or f'control of {arm.like}'}, seed {arm.seed}"
        if why := runs.contradictions(arm):
            yield f"the record of {who} cannot be what happened, and counts for nothing: {why[0]}"
        elif runs.log(arm) is not None and runs.record(arm) is None:
            yield (
                f"the run of {who} does not say what it was to be, so its record was not judged"
                " again"
            )


def _workload(plan: ComparisonPlan) -> dict[str, object]:
    """What is trained, if it is the same in all families; else by family."""
    names = ("size", "ranks", "steps", "global_batch", "checkpoint_every")
    known = {
        name: {"kind": "gpt", **dict(zip(names, workload, strict=True))}
        for name, workload in plan.workloads.items()
    }
    alike = len(set(plan.workloads.values())) == 1
    return dict(next(iter(known.values()))) if alike else dict(known)


def _fidelity(plan: ComparisonPlan, runs: ComparedRuns) -> list[str]:
    """What was emulated, according to the runs, and how this comparison measures time."""
    records = [record for arm in runs.played if (record := runs.record(arm)) is not None]
    notes = [note for one in records for note in fidelity_of(one.resolved, [one.log])]
    notes.append(
        f"a job that reports no new step for {plan.deadline:g} s counts as never recovered;"
        " recovery is counted from the fault to the first new step, and the clock is never stopped"
        " in between"
    )
    if _bare(plan) is None:
        notes.append(
            f"goodput is against each stack's own fault-free step, as the stack {BARE} did not take"
            " part: what a stack costs while nothing fails is not in it"
        )
    return list(dict.fromkeys(notes))
