"""Compares runs that were made separately: of several strategies, or of one in two versions of the
code.

Nothing ensured equal conditions, so all differences besides the stack are reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import Kind, Log
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.compare.plan.directory import Directory, differences, now
from trainchaos.harness.compare.result import summary
from trainchaos.harness.compare.result.gather import gather
from trainchaos.harness.compare.result.model import Comparison, StackInfo
from trainchaos.harness.compare.result.records import ArmRecord, log_in
from trainchaos.harness.compare.result.trials import trial_of
from trainchaos.harness.host.rundir import RunDirectory, arm_id, open_run, read_resolved
from trainchaos.harness.judge.evidence.expected import refuse_wrong_params
from trainchaos.harness.judge.measure.labels import CellIdentity, labels
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import Results
from trainchaos.harness.judge.verdict.judge import judge_whole

MAKES_THE_JOB = (
    "kind",
    "params",
    "ranks",
    "steps",
    "global_batch",
    "parallelism",
    "device",
    "determinism",
)
"""Workload settings that must be equal for times to be comparable."""


def compare_stored(
    paths: Sequence[Path], *, name: str, argv: Sequence[str], price: float | None, currency: str
) -> Comparison:
    """Compare run directories, and comparisons. Raises NoRun for a path that is neither,
    ScenarioError if there is nothing to compare.
    """
    parts = _told_apart([(path, _part(path)) for path in paths])
    made = [part for _, part in parts]
    stacks = [stack for part in made for stack in part.stacks]
    trials = [trial for part in made for trial in part.trials]
    if not trials:
        raise ScenarioError(
            "these runs hold no faulted arm that could be compared",
            hint="name runs that came to their end",
        )
    families = {name: about for part in made for name, about in part.families.items()}
    labels = [stack.label for stack in stacks]
    return Comparison(
        name=name,
        started=min(part.started for part in made),
        finished=now(),
        machine=made[0].machine,
        workload=made[0].workload,
        stacks=stacks,
        families=families,
        trials=trials,
        cells=summary.cells_of(labels, list(families), trials, bare=None, not_offered={}),
        ratios=summary.ratios_of(trials, labels[0]),
        reference=labels[0],
        price=price,
        currency=currency,
        fidelity=list(dict.fromkeys(note for part in made for note in part.fidelity)),
        reproduce=" ".join(["chaos", *argv]),
        cautions=_cautions(parts),
        at_rest=[one for part in made for one in part.at_rest],
    )


def _part(path: Path) -> Comparison:
    """One of the compared directories by itself; of a run without what needs others."""
    if Directory(path).plan.is_file():
        return gather(Directory(path))
    return _of_run(path, open_run(path))


def _of_run(path: Path, run: RunDirectory) -> Comparison:
    """A control, an arm without faults and one that was cut short are no trial."""
    results, resolved, budget = judge_whole(run), read_resolved(run), Budget()
    refuse_wrong_params(resolved, run.resolved)
    cells = {cell.id: cell for cell in resolved.cells if cell.exact_for is None}
    names = labels(
        CellIdentity(id=c.id, strategy=_program(c), params=c.params) for c in cells.values()
    )
    known: dict[str, tuple[list[History], list[History]]] = {}
    trials, stacks, cautions = [], {}, []
    for arm in results.arms:
        cell = cells.get(arm.cell)
        log = log_in(run.events(arm.id), budget) if cell else None
        if cell is None or log is None or not cell.scenario.faults or arm.arm != "faulted":
            continue
        if arm.outcome in ("broken", "interrupted"):
            continue
        record = partial(ArmRecord, resolved=resolved, cell=cell, repeat=arm.repeat)
        label, control_id = names[cell.id], arm_id(arm.cell, arm.repeat, "control")
        paired = cell.scenario.baseline == "paired"
        control = log_in(run.events(control_id), budget) if paired else None
        own = record(log=log, control=control)
        control, against = _credible(control, record)
        trial = trial_of(
            log,
            control,
            contradictions=own.contradictions,
            against=against,
            label=label,
            family=" + ".join(sorted({fault.kind for fault in cell.scenario.faults})),
            seed=arm.seed,
            run=f"{path}/events/{arm.id}",
            control_run=f"{path}/events/{control_id}" if control else "",
            verdict=arm.outcome,
            reproduce=f"chaos analyze {path}",
        )
        trials.append(trial)
        stacks[label] = _info(label, cell, results)
        why = f"the record of {trial.run} cannot be what happened: "
        cautions += [*(why + one for one in own.contradictions)]
        cautions += [f"{trial.run}: {note}" for note in against]
        controls, faulted = known.setdefault(label, ([], []))
        controls += [history_of(control)] if control is not None else []
        faulted += [history_of(log)] if not own.contradictions else []
    at_rest = (summary.at_rest(label, *arms, beside=0) for label, arms in known.items())
    return Comparison(
        name=results.run_id,
        stacks=list(stacks.values()),
        trials=trials,
        families={trial.family: trial.family for trial in trials},
        machine=results.system,
        workload=results.workload,
        fidelity=results.fidelity,
        started=results.started,
        cautions=cautions,
        at_rest=[one for one in at_rest if one is not None],
    )


def _credible(
    control: Log | None, record: Callable[..., ArmRecord]
) -> tuple[Log | None, list[str]]:
    """(the control, None if it cannot be what happened; what there is to say about it)."""
    if control is None or control.first(Kind.RUN_STARTED) is None:
        return control, []
    other = record(log=control, arm="control")
    return None if other.contradictions else control, other.notes("its control", failures=False)


def _program(cell: Cell) -> str:
    """The strategy, or the program of a command."""
    workload = cell.scenario.workload
    return workload.title if workload.command is not None else cell.scenario.recovery.strategy


def _info(label: str, cell: Cell, results: Results) -> StackInfo:
    spec = cell.scenario.recovery
    versions = results.system.get("versions")
    return StackInfo(
        label=label,
        stack=spec.strategy,
        settings="default",
        ours=cell.scenario.workload.command is None,
        description=f"{results.scenario}, run {results.run_id}",
        chosen=dict(spec.params),
        because="",
        versions=dict(versions) if isinstance(versions, dict) else {},
        fidelity=[],
    )


def _told_apart(parts: Sequence[tuple[Path, Comparison]]) -> list[tuple[Path, Comparison]]:
    """Give runs of the same stack distinct labels by adding the directory's name, to compare two
    versions of it.
    """
    times = Counter(stack.label for _, part in parts for stack in part.stacks)
    places = [path.resolve().name for path, _ in parts]
    made = []
    for number, ((path, part), place) in enumerate(zip(parts, places, strict=True), start=1):
        own = place if places.count(place) == 1 else f"{place} ({number})"
        many = {label: f"{label} {own}" for label in times if times[label] > 1}
        renamed = {
            name: [
                one.model_copy(update={"label": many.get(one.label, one.label)})
                for one in getattr(part, name)
            ]
            for name in ("stacks", "trials", "at_rest")
        }
        made.append((path, part.model_copy(update=renamed)))
    return made


def _cautions(parts: Sequence[tuple[Path, Comparison]]) -> list[str]:
    """Differences between the first directory and each other one."""
    (path, first), found = parts[0], [line for _, part in parts for line in part.cautions]
    for other_path, other in parts[1:]:
        where = f"{other_path} and {path}"
        for key in MAKES_THE_JOB:
            mine, theirs = first.workload.get(key), other.workload.get(key)
            if mine != theirs:
                found.append(f"{where} do not train the same: {key} is {theirs} and {mine}")
        found += [f"{where} differ in {what}" for what in differences(first.machine, other.machine)]
        if set(other.families).isdisjoint(first.families):
            found.append(f"{where} have no kind of fault in common")
        elif {t.seed for t in other.trials}.isdisjoint(t.seed for t in first.trials):
            found.append(f"{where} have no seed in common, so there are no pairs")
    return found
