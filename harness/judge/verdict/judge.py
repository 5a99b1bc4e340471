"""Derives everything in ``results.json`` from a run directory: from the resolved scenario and the
event logs, and from the undo ledger what could not be undone; from nothing else.

Deterministic, and robust: arms that did not run, logs without an end and torn lines make verdicts
inconclusive and never raise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainchaos.chaos.errors import InfrastructureError, LogError
from trainchaos.chaos.events.log import ORCHESTRATOR, Log
from trainchaos.chaos.fault.base import Fault, Fidelity
from trainchaos.chaos.fault.build import build
from trainchaos.chaos.files import write_whole
from trainchaos.chaos.plugins import FAULTS, LAUNCHERS, load
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.harness.host import seal
from trainchaos.harness.host.rundir import RunDirectory, read_resolved, read_system
from trainchaos.harness.judge.checkers.faults.due import arrivals_of
from trainchaos.harness.judge.checkers.job import observed
from trainchaos.harness.judge.checkers.job.leftovers import left_in, unhealed
from trainchaos.harness.judge.evidence.expected import refuse_unknown_launcher, refuse_wrong_params
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.flops import mfu, work_of
from trainchaos.harness.judge.measure.labels import CellIdentity, labels
from trainchaos.harness.judge.measure.measure import METRICS, ArmMeasures, goodput_of, summarise
from trainchaos.harness.judge.measure.pressure import others_of
from trainchaos.harness.judge.measure.reliability import false_alarms, spares_of, survival
from trainchaos.harness.judge.measure.samples import chances, why_absent
from trainchaos.harness.judge.record.episodes import NEVER_FIRED
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.nodes import nodes_of
from trainchaos.harness.judge.results import (
    ArmResult,
    CellResult,
    Finding,
    Reliability,
    Results,
    Skip,
    SlaResult,
    merge,
)
from trainchaos.harness.judge.verdict import gates
from trainchaos.harness.judge.verdict.arms import (
    JudgedArm,
    judge_arms,
    logs_of,
    planned_arms,
    unplanned,
)
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.undo.ledger import read_open

EXACT = ("differs", "not compared", "within the control band", "bit for bit")
"""How an arm's result may compare with its control's, the worst first."""


def judge(run: RunDirectory, *, unsealed: bool = False, root: str = "") -> Results:
    """Judge a run. Where its seal is broken, or it has an arm that its scenario does not plan, the
    verdict is inconclusive, whatever the logs say.

    ``unsealed``: judge such a run all the same; ``root``: the root digest that its seal must have.
    Raises DamagedRun for an unreadable scenario, ScenarioError for its launcher.
    """
    sealed = seal.check(run, root=root)
    resolved = read_resolved(run)
    refuse_unknown_launcher(resolved)
    refuse_wrong_params(resolved, run.resolved)
    if strange := unplanned(run, resolved):
        named = [f"the scenario does not plan the arm events/{name}" for name in strange]
        problems = [*named, *sealed.problems]
        sealed = sealed.model_copy(update={"state": "broken", "problems": problems})
    with logs_of(run, resolved) as (logs, unread):
        results = _results(run, resolved, logs, unread)
    broken = sealed.state == "broken"
    results = results.model_copy(update={"seal": sealed, "unsealed": broken and unsealed})
    if not results.refused:
        return results
    why = f"the record is not whole: {sealed.reason}; --unsealed judges it all the same"
    open_ = {"verdict": "inconclusive", "exit_code": gates.EXIT_CODES["inconclusive"]}
    return results.model_copy(update={**open_, "reason": why})


def judge_whole(run: RunDirectory) -> Results:
    """Judge a run whose figures are to be used elsewhere. Raises DamagedRun where its seal is
    broken, and what ``judge`` raises.
    """
    results = judge(run)
    seal.refuse_broken(run, results.seal)
    return results


def _results(
    run: RunDirectory, resolved: ResolvedRun, logs: Mapping[str, Log], unread: Mapping[str, str]
) -> Results:
    system = read_system(run)
    arms, senseless = judge_arms(
        resolved, logs, complete=lambda arm: _make_all(arm, resolved, system)
    )
    unread = {**unread, **senseless}
    names = labels(
        CellIdentity(id=c.id, strategy=c.scenario.recovery.strategy, params=c.params)
        for c in resolved.cells
    )
    judged = [
        _judge_cell(cell, names[cell.id], arms, resolved, system, unread) for cell in resolved.cells
    ]
    cells, slas = [cell for cell, _ in judged], [sla for _, mine in judged for sla in mine]
    whole = [arm for arm in arms if not arm.lost]
    incidents = [i for arm in whole if arm.arm == "faulted" for i in arm.measures.incidents]
    # a killed harness logs no end: missing evidence, not a verdict on the machine
    supervised = [arm for arm in arms if ORCHESTRATOR not in arm.lost]
    ended = {arm.id: arm.measures.history for arm in supervised if arm.measures.history.finished}
    outcomes = {name: (history.outcome, _end_reason(history)) for name, history in ended.items()}
    fired = [incident for incident in incidents if incident.occurrence != NEVER_FIRED]
    gate = gates.judge_run(
        cells,
        slas,
        outcomes,
        [*_unsafe(supervised), *_not_undone(run)],
        (sum(i.landed and i.healed for i in fired), len(fired)),
        [f"{skip.cell}: {skip.reason}" for skip in resolved.skipped],
    )
    first = resolved.cells[0].scenario if resolved.cells else None
    simulated = _simulated(resolved)
    return Results(
        scenario=first.name if first else run.root.parent.name,
        description=first.description if first else "",
        run_id=resolved.run_id,
        seed=resolved.seed,
        started=resolved.started,
        source=resolved.source,
        system=system,
        workload=first.workload.model_dump(mode="json") if first else {},
        verdict=gate.verdict,
        exit_code=gate.exit_code,
        reason=gate.reason,
        cells=cells,
        arms=[_arm_result(arm) for arm in arms],
        faults=[_said_so(incident, simulated) for incident in incidents],
        slas=slas,
        skipped=[Skip(cell=skip.cell, reason=skip.reason) for skip in resolved.skipped],
        fidelity=fidelity_of(resolved, logs.values()),
        reproduce=resolved.reproduce,
        simulated=bool(simulated),
    )


def write_results(run: RunDirectory, results: Results) -> None:
    """Write ``results.json``, whole or not at all. Raises InfrastructureError when the disk
    refuses.
    """
    text = json.dumps(results.model_dump(mode="json"), indent=1, allow_nan=False)
    try:
        write_whole(run.results, text + "\n")
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {run.results}: {error.strerror}", hint="free disk space"
        ) from error


def _make_all(arm: JudgedArm, resolved: ResolvedRun, system: Mapping[str, Any]) -> None:
    """Run everything that later combines arms on this arm alone, so that a bad value in its log
    cannot break the results of others.
    """
    _judge_cell(arm.cell, arm.cell.id, [arm], resolved, system, {})
    _arm_result(arm).model_dump_json()
    fidelity_of(resolved, [arm.evidence.log])
    _unsafe([arm])


def _judge_cell(
    cell: Cell,
    label: str,
    arms: list[JudgedArm],
    resolved: ResolvedRun,
    system: Mapping[str, Any],
    unread: Mapping[str, str],
) -> tuple[CellResult, list[SlaResult]]:
    mine = [arm for arm in arms if arm.cell.id == cell.id]
    faulted = [arm for arm in mine if arm.arm == "faulted"]
    work = work_of(cell.scenario, system)
    whole = [arm for arm in faulted if not arm.lost]
    struck = [arm.measures.incidents for arm in whole]
    metrics = _metrics(cell, whole, work)
    invariants = _merge_findings(mine)
    left_out = observed.unjudged(cell.scenario, invariants)
    invariants = {name: one for name, one in invariants.items() if name not in left_out}
    planned = [name for name, *_ in planned_arms(cell)]
    gone = next((f"{name}: {unread[name]}" for name in planned if name in unread), "")
    few = gone or f"{len(mine)} of {len(planned)} arms ran"
    slas = gates.judge_slas(
        cell,
        metrics,
        resolved.sla_lines,
        _why_no_value(faulted, invariants) if faulted else few,
        why_absent(struck),
        {  # repeat -> seconds of a step of its control arm, of those that have one
            arm.repeat: arm.measures.ideal.step_s
            for arm in whole
            if arm.evidence.control and arm.measures.ideal and arm.measures.ideal.step_s > 0
        },
    )
    verdict, reason = gates.judge_cell(
        cell.id,
        slas,
        invariants,
        len(mine),
        len(planned),
        resolved.source,
        untried="" if cell.scenario.faults else "nothing was tried: the scenario has no faults",
        unread=gone,
    )
    result = CellResult(
        id=cell.id,
        label=label,
        params=cell.params,
        exact_for=cell.exact_for,
        strategy=cell.scenario.recovery.strategy,
        verdict=verdict,
        reason=reason,
        metrics=metrics,
        invariants=invariants,
        exactness=min((a.exactness for a in faulted), key=EXACT.index, default="not compared"),
        reliability=_reliability([arm for arm in mine if not arm.lost]),
        absent={"mfu": work} if isinstance(work, str) else {},
        unjudged=left_out,
    )
    return result, slas


def _metrics(
    cell: Cell, arms: Sequence[JudgedArm], work: tuple[float, float] | str
) -> dict[str, Metric]:
    """Every metric over these arms."""
    own = [(arm.repeat, {**arm.measures.values, "mfu": _mfu(arm.measures, work)}) for arm in arms]
    struck, tried = [arm.measures.incidents for arm in arms], bool(cell.scenario.faults)
    return {
        name: summarise(
            name,
            [value for _, found in own for value in found[name]],
            max((arm.measures.bounds[name] for arm in arms), default=0.0),
            [repeat for repeat, found in own for _ in found[name]],
            chances(name, struck, cell.scenario.repeat, tried),
        )
        for name in METRICS
    }


def _why_no_value(faulted: Sequence[JudgedArm], invariants: Mapping[str, Finding]) -> str:
    """Why a metric may have no value: a record is not whole, no step of the job was seen, or a
    fault did not land.
    """
    for arm in faulted:
        for why in arm.lost.values():
            return f"{arm.id}: the record is not whole: {why}"
    for name in ("progress", "fault-landed"):
        found = invariants.get(name)
        if found is not None and found.verdict == "inconclusive":
            return found.witness
    return ""


def _mfu(measures: ArmMeasures, work: tuple[float, float] | str) -> list[float]:
    if isinstance(work, str) or not measures.step_time:
        return []
    flops, peak = work
    return [mfu(flops, measures.history.info.global_batch, measures.step_time, peak)]


def _reliability(arms: list[JudgedArm]) -> Reliability | None:
    """Rates over the arms of a cell; None if no arm ran."""
    faulted = [arm.measures for arm in arms if arm.arm == "faulted"]
    controls = [arm.measures.history for arm in arms if arm.arm == "control"]
    struck = [measures.history for measures in faulted]
    if not arms:
        return None
    return Reliability(
        survival=survival(faulted),
        false_alarms=false_alarms(controls, struck),
        spares=spares_of([*struck, *controls]),
    )


def _merge_findings(arms: list[JudgedArm]) -> dict[str, Finding]:
    """One finding per checker over all arms of a cell; the witness names the deciding arm."""
    merged: dict[str, Finding] = {}
    for name in dict.fromkeys(name for arm in arms for name in arm.findings):
        found = [(arm, arm.findings[name]) for arm in arms if name in arm.findings]
        verdict = merge([finding.verdict for _, finding in found])
        arm, finding = next((a, f) for a, f in found if f.verdict == verdict)
        witness = f"r{arm.repeat}.{arm.arm}: {finding.witness}"
        merged[name] = Finding(verdict=verdict, witness=witness)
    return merged


def _arm_result(arm: JudgedArm) -> ArmResult:
    history, split = arm.measures.history, arm.measures.partition
    left_out = observed.unjudged(arm.cell.scenario, arm.findings)
    return ArmResult(
        id=arm.id,
        cell=arm.cell.id,
        repeat=arm.repeat,
        arm=arm.arm,
        seed=history.info.seed,
        events=f"events/{arm.id}",
        outcome=history.outcome,
        reason=_end_reason(history),
        wall_s=history.wall_s,
        committed_step=history.committed_step,
        steps=history.info.steps,
        goodput=None if arm.lost else goodput_of(history, split),
        badput=dict(split.badput),
        useful_s=split.useful_s,
        residual_s=split.residual_s,
        step_time_median=arm.measures.step_time,
        provisioned_ranks=history.info.ranks + history.info.spares,
        invariants={name: f for name, f in arm.findings.items() if name not in left_out},
        nodes=nodes_of(arm.evidence.log),
        arrivals=arrivals_of(
            history, arm.measures.episodes, arm.cell.scenario.faults if arm.arm == "faulted" else ()
        ),
        others=others_of(arm.evidence.log),
    )


def _end_reason(history: History) -> str:
    if history.finished is None:
        return "the log has no end: the harness was killed"
    return str(history.finished.data["reason"])


def _unsafe(arms: list[JudgedArm]) -> list[str]:
    """What arms left behind, and faults not healed in arms that finished."""
    found = []
    for arm in arms:
        found += [f"{what} {left} of {arm.id}" for what, left in left_in(arm.evidence.log)]
        if arm.measures.history.finished is not None:
            found += [f"fault {one.fault} of {arm.id}" for one in unhealed(arm.measures.episodes)]
    return found


def _not_undone(run: RunDirectory) -> list[str]:
    """What a heal tried to undo and could not. What no heal has tried yet is left to ``chaos
    heal``.
    """
    try:
        return [entry.problem for entry in read_open(run.ledger) if entry.problem]
    except LogError as error:
        return [f"what cannot be known: {error.message}"]


def _simulated(resolved: ResolvedRun) -> set[str]:
    """Ids of the cells that were simulated."""
    launchers = load(LAUNCHERS, Launcher)
    return {cell.id for cell in resolved.cells if launchers[cell.scenario.launcher.kind].simulates}


def _said_so(incident: Incident, simulated: set[str]) -> Incident:
    """A witness of a simulation is none of the kernel's, and must not be cited as one."""
    if incident.witness is None or incident.cell not in simulated:
        return incident
    return incident.model_copy(update={"witness": f"simulated {incident.witness}"})


def fidelity_of(resolved: ResolvedRun, logs: Iterable[Log]) -> list[str]:
    """One line per launcher, platform and fault kind that emulates instead of using the real
    mechanism.
    """
    launchers = load(LAUNCHERS, Launcher)
    where = sorted({cell.scenario.launcher.kind for cell in resolved.cells})
    emulating = [
        f"{name}: {launchers[name].emulates}" for name in where if launchers[name].emulates
    ]
    own = (log.actors[ORCHESTRATOR].events[:1] for log in logs)
    emulating += sorted(
        {e.data["emulates"] for first in own for e in first if e.data.get("emulates")}
    )
    kinds = load(FAULTS, Fault)
    imitating = {
        fault.kind
        for cell in resolved.cells
        for fault in cell.scenario.faults
        if fault.kind in kinds
        and build(fault.kind, fault.params, kinds).acts(
            cuda=cell.scenario.workload.device == "cuda",
            real=launchers[cell.scenario.launcher.kind].real,
        )
        is Fidelity.EMULATED
    }
    return emulating + [
        f"{kind}: emulated ({(kinds[kind].__doc__ or kind).strip().splitlines()[0]})"
        for kind in sorted(imitating)
    ]
