"""From the stored runs of a comparison to what its report shows. Pure: event logs and a plan in,
``Comparison`` out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.errors import LogError
from chaos.events.budget import Budget
from chaos.events.log import Kind, Log, read_log
from chaos.files import read_model
from harness.compare.plan.directory import Directory, Plan, PlannedStack, Played
from harness.compare.plan.plan import AGAIN, Arm, control_of
from harness.compare.result import rules, summary
from harness.compare.result.at_rest import at_rest
from harness.compare.result.believed import Record, without_twins
from harness.compare.result.model import AtRest, Comparison, StackInfo, Trial
from harness.compare.result.outcome import FOR_EVER, Judged, completed, ended, judged
from harness.host import dns_check
from harness.host.rundir import RunDirectory, read_resolved
from harness.judge.measure.measure import ArmMeasures, goodput_of, measure
from harness.judge.record.lineage import History, history_of
from harness.judge.results import Results

MOST_POINTS = 200
BARE = "none"
"""The stack without recovery, whose fault-free step is the measure of all others'."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A faulted arm and what it is compared with. ``ideal``: whose fault-free steps are the measure
    of goodput; ``beside``: processes provisioned beside the ranks; ``contradictions``: why its
    record cannot be what happened, ``against``: what is to be said of those it is compared with
    (``harness.compare.result.believed``).
    """

    label: str
    family: str
    seed: int
    log: Log
    control: Log | None
    ideal: Log | None
    run: str
    control_run: str
    verdict: str
    reproduce: str
    beside: int = 0
    contradictions: Sequence[str] = ()
    against: Sequence[str] = ()


@dataclass(kw_only=True)
class _Runs:
    """The runs of a comparison, each log read once and judged once; all together are within one
    budget.
    """

    directory: Directory
    played: Mapping[Arm, Played]
    logs: dict[Arm, Log | None] = field(default_factory=dict)
    records: dict[Arm, Record | None] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)

    def log(self, arm: Arm | None) -> Log | None:
        """None: not played, or nothing left to read."""
        if arm is None or arm not in self.played:
            return None
        if arm not in self.logs:
            self.logs[arm] = log_of(self._run(arm), self.budget)
        return self.logs[arm]

    def record(self, arm: Arm | None) -> Record | None:
        """What the arm should be, beside its log; None: it has no log, or nobody says what it
        should be.
        """
        log = self.log(arm)
        if arm is None or log is None:
            return None
        if arm not in self.records:
            self.records[arm] = _record(self._run(arm), log, arm)
        return self.records[arm]

    def contradictions(self, arm: Arm | None) -> list[str]:
        """Why the arm's record cannot be what happened."""
        record = self.record(arm)
        return record.contradictions if record is not None else []

    def trusted(self, arm: Arm | None) -> Log | None:
        """The log of an arm that can be what happened."""
        return None if self.contradictions(arm) else self.log(arm)

    def set_apart(self) -> None:
        """Find arms with the log of another one, of all that were played."""
        known = {
            arm.id: (arm, record) for arm in self.played if (record := self.record(arm)) is not None
        }
        told = without_twins({name: record for name, (_, record) in known.items()})
        self.records |= {known[name][0]: record for name, record in told.items()}

    def _run(self, arm: Arm) -> RunDirectory:
        return RunDirectory(self.directory.root / self.played[arm].run)


def gather(directory: Directory) -> Comparison:
    """What a comparison says so far. Raises NoRun or LogError when there is none."""
    plan = directory.read_plan()
    played = directory.played()
    runs = _Runs(directory=directory, played=played)
    runs.set_apart()
    trials = [
        trial_of(source)
        for arm in plan.arms
        if arm.family is not None and (source := _source(arm, plan, runs)) is not None
    ]
    stacks = [info_of(stack) for stack in plan.stacks]
    cells = summary.cells_of(
        [stack.label for stack in stacks],
        [f.name for f in plan.families],
        trials,
        bare=next((stack.label for stack in stacks if stack.stack == BARE), None),
        not_offered={
            (s.label, family): why for s in plan.stacks for family, why in s.not_offered.items()
        },
    )
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
        cells=cells,
        ratios=[ratio for ratio in ratios if ratio.label != again],
        reference=plan.reference,
        same=same,
        skipped=plan.skipped,
        price=plan.price,
        currency=plan.currency,
        fidelity=_fidelity(plan, played.values(), directory),
        reproduce=" ".join(["chaos", *plan.argv]),
        deadline=plan.deadline,
        cautions=[*_cautions(plan), *refuted],
        at_rest=list(_at_rest(plan, runs)),
        missing=missing,
        script=script,
        division="closed" if plan.closed and not broken else "open",
        broken=broken,
    )


def _at_rest(plan: Plan, runs: _Runs) -> Iterator[AtRest]:
    for stack in plan.stacks:
        arms = [
            arm for arm in plan.arms if arm.label == stack.label and not runs.contradictions(arm)
        ]
        told = [
            (arm.family, record.history) for arm in arms if (record := runs.record(arm)) is not None
        ]
        controls = [history for family, history in told if family is None]
        faulted = [history for family, history in told if family is not None]
        one = at_rest(stack.label, controls, faulted, stack.ranks_beside)
        if one is not None:
            yield one


def log_of(run: RunDirectory, budget: Budget) -> Log | None:
    """The log of the only arm of a run; None when there is none. Raises LogError when it was not
    read to its end.
    """
    arms = run.arms()
    return log_in(run.events(arms[0]), budget) if arms else None


def log_in(events: Path, budget: Budget) -> Log | None:
    """The log of one arm; None when there is none. Raises LogError when it was not read to its end:
    a comparison without a trial that it has played would be another one.
    """
    try:
        log = read_log(events, budget)
    except LogError:
        return None
    if log.unread:
        raise LogError(f"{events}: {log.unread}")
    return log


def _record(run: RunDirectory, log: Log, arm: Arm) -> Record | None:
    """None where the run does not say what it was to be, or not in the words of this version."""
    try:
        resolved = read_resolved(run)
    except LogError:
        return None
    if log.first(Kind.RUN_STARTED) is None or not resolved.cells:
        return None
    name = arm.id.rpartition(".")[0]
    return Record(log=log, resolved=resolved, cell=resolved.cells[0], name=name, seed=arm.seed)


def _refuted(arms: Iterable[Arm], runs: _Runs) -> Iterator[str]:
    """Arms whose record cannot be what happened, or that do not say what they were to be, for
    people.
    """
    for arm in arms:
        who = f"{arm.label}, {arm.family or f'control of {arm.like}'}, seed {arm.seed}"
        if why := runs.contradictions(arm):
            yield f"the record of {who} cannot be what happened, and counts for nothing: {why[0]}"
        elif runs.log(arm) is not None and runs.record(arm) is None:
            yield (
                f"the run of {who} does not say what it was to be, so its record was not judged"
                " again"
            )


def seen_of(directory: Directory, plan: Plan, played: Played) -> str:
    """What became of one arm, in a few words, as soon as it was played."""
    try:
        return _seen(directory, plan, played)
    except LogError as error:
        return error.message


def _seen(directory: Directory, plan: Plan, played: Played) -> str:
    runs = _Runs(directory=directory, played={**directory.played(), played.arm: played})
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
    """What a report says about a stack."""
    return StackInfo(
        label=stack.label,
        stack=stack.name,
        settings=stack.settings,
        ours=stack.ours,
        description=stack.title,
        chosen=stack.chosen,
        because=stack.because,
        versions=stack.versions,
        fidelity=stack.fidelity,
        way=stack.way,
        against=stack.against,
    )


def _source(arm: Arm, plan: Plan, runs: _Runs) -> Source | None:
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
    return Source(
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


def trial_of(source: Source) -> Trial:
    """One pair of arms, measured and judged; of a record that cannot be what happened
    nothing is.
    """
    if source.contradictions:
        return _nothing_of(source)
    ideal, control = _usable(source.ideal), _usable(source.control)
    measures = measure(source.log, ideal)
    against = history_of(control) if control else None
    own = measure(control, ideal) if control else None
    result = judged(measures, against)
    notes = [result.note, *source.against]
    if source.control is not None and (against is None or not completed(against)):
        notes.append("its control did not get to its end either: see control_run")
    history = measures.history
    info = history.info
    provisioned = info.ranks + info.spares + source.beside
    share = (info.ranks + info.spares) / provisioned
    return Trial(
        label=source.label,
        family=source.family,
        seed=source.seed,
        outcome=result.outcome,
        witness=result.witness,
        recovery=result.recovery,
        detection=result.detection,
        phases=result.phases,
        steps_lost=result.steps_lost,
        samples_lost=result.samples_lost,
        goodput=0.0 if result.outcome == "committed bad values" else _goodput(measures, share),
        ettr=0.0 if result.outcome == "committed bad values" else _ettr(measures),
        control_goodput=_goodput(own, share) if own else None,
        badput=_badput(measures, share),
        step_time=own.step_time if own else None,
        wall=history.wall_s,
        ranks=provisioned,
        verdict=source.verdict,
        run=source.run,
        control_run=source.control_run,
        reproduce=source.reproduce,
        note="; ".join(filter(None, notes)),
        losses=losses_of(history),
        control_losses=losses_of(against) if against else (),
        **_until_whole(source.log, measures, ideal, control, result),
    )


def _nothing_of(source: Source) -> Trial:
    info = history_of(source.log).info
    return Trial(
        label=source.label,
        family=source.family,
        seed=source.seed,
        outcome="refuted",
        witness="; ".join(source.contradictions),
        recovery=None,
        detection=None,
        phases=[],
        steps_lost=0,
        samples_lost=None,
        goodput=None,
        control_goodput=None,
        badput={},
        step_time=None,
        wall=0.0,
        ranks=info.ranks + info.spares + source.beside,
        verdict=source.verdict,
        run=source.run,
        control_run=source.control_run,
        reproduce=source.reproduce,
    )


def _until_whole(
    log: Log, measures: ArmMeasures, ideal: Log | None, control: Log | None, result: Judged
) -> dict[str, float | None]:
    """Times until the job was at its full rate and as safe as before, of several faults the
    slowest.

    Where nobody was seen to fail, a window of steps may begin before the standstill: the rate is
    full no sooner than there are new steps.
    """
    if result.outcome == "not landed":
        return {}
    if result.outcome in FOR_EVER:
        return {"full_rate": math.inf, "redundancy": math.inf}
    # A stack that costs something while nothing fails never has the bare one's rate again.
    own = measures if ideal is control else measure(log, control)
    full = [one.time_to_full_rate for one in own.incidents if one.time_to_full_rate is not None]
    whole = [one.time_to_redundancy for one in own.incidents if one.time_to_redundancy is not None]
    if full and result.recovery is not None:
        full.append(result.recovery)
    return {"full_rate": max(full, default=None), "redundancy": max(whole, default=None)}


def _usable(log: Log | None) -> Log | None:
    """A control that committed nothing gives nothing to compare with."""
    return log if log is not None and history_of(log).committed_step else None


def _goodput(measures: ArmMeasures, share: float) -> float | None:
    """``share``: of the ranks in everything provisioned. What a job did that did not reach its end
    is of no use.
    """
    if measures.ideal is None or measures.history.cut_short:
        return None
    if not completed(measures.history):
        return 0.0
    return goodput_of(measures.history, measures.partition) * share


def _ettr(measures: ArmMeasures) -> float | None:
    """As in a run: no rank that waits counts, and no ideal step."""
    if measures.history.cut_short:
        return None
    if not completed(measures.history):
        return 0.0
    return measures.partition.productive_s / measures.partition.wall_s


def _badput(measures: ArmMeasures, share: float) -> dict[str, float]:
    badput = {name: seconds * share for name, seconds in measures.partition.badput.items()}
    badput["spare_idle"] = badput.get("spare_idle", 0.0) + measures.partition.wall_s * (1 - share)
    return {name: seconds for name, seconds in badput.items() if seconds > 0}


def losses_of(history: History) -> tuple[tuple[int, float], ...]:
    """(step, loss) of the surviving steps, at most 200 of them, evenly thinned; the last one is
    always there.
    """
    points = [
        (step, float(loss))
        for step, run in history.lineage.items()
        if (loss := run.commits[0].data["loss"]) is not None
    ]
    every = max(1, math.ceil(len(points) / MOST_POINTS))
    return tuple(
        point
        for index, point in enumerate(points)
        if index % every == 0 or index == len(points) - 1
    )


def _workload(plan: Plan) -> dict[str, object]:
    names = ("size", "ranks", "steps", "global_batch", "checkpoint_every")
    told = {family.workload for family in plan.families}
    if len(told) == 1:
        return {"kind": "gpt", **dict(zip(names, told.pop(), strict=True))}
    return {
        family.name: {"kind": "gpt", **dict(zip(names, family.workload, strict=True))}
        for family in plan.families
    }


def _cautions(plan: Plan) -> list[str]:
    """What makes pairs unfair."""
    slow = dns_check.caution(plan.provenance.get("slowest_lookup_s", 0.0))
    return [*plan.changes, *([slow] if slow else [])]


def _fidelity(plan: Plan, played: Iterable[Played], directory: Directory) -> list[str]:
    """What was emulated, as the runs themselves say, and how the clock of this comparison runs."""
    notes: list[str] = []
    for one in played:
        results = read_results(RunDirectory(directory.root / one.run))
        notes += results.fidelity if results else []
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


def read_results(run: RunDirectory) -> Results | None:
    """The stored ``results.json``; None when it cannot be read."""
    try:
        return read_model(run.results, Results)
    except (OSError, ValueError):
        return None
