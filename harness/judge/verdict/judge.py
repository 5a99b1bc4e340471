"""Re-derives everything ``results.json`` holds from a run directory: the resolved scenario, the
event logs, and from the undo ledger what could not be undone; no more.

Deterministic, and content with less than everything: arms that did not run, logs without an end and
torn lines make verdicts inconclusive, never an exception.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import chaos.faults
import harness.launchers
import recovery.policy.strategies
from chaos.errors import InfrastructureError, LogError
from chaos.events.budget import Budget
from chaos.events.log import ORCHESTRATOR, Kind, Log, SenselessLog, read_log
from chaos.fault.base import Fault, Fidelity
from chaos.fault.build import build
from chaos.files import read_json, write_whole
from chaos.plugins import load
from chaos.scenario.model import Cell, ResolvedRun
from harness.host.rundir import RunDirectory, arm_id, read_resolved
from harness.judge.checkers import Evidence, check_all
from harness.judge.checkers.job.loss import compare
from harness.judge.evidence.absurd import absurdity
from harness.judge.evidence.expected import expected_of, twins_of
from harness.judge.measure.flops import mfu, work_of
from harness.judge.measure.labels import Named, labels
from harness.judge.measure.measure import METRICS, ArmMeasures, goodput_of, summarise
from harness.judge.measure.reliability import false_alarms, spares_of, survival
from harness.judge.measure.samples import chances
from harness.judge.record.episodes import NEVER_FIRED
from harness.judge.record.lineage import History, history_of
from harness.judge.record.node_attribution import nodes_of
from harness.judge.results import (
    ArmResult,
    CellResult,
    Finding,
    Reliability,
    Results,
    Skip,
    SlaResult,
    merge,
)
from harness.judge.verdict import gates
from harness.launch.launcher import Launcher
from harness.undo.ledger import read_open
from recovery.policy.strategy import Strategy

MOST_SAID = 500
ARMS: tuple[Literal["faulted"], Literal["control"]] = ("faulted", "control")


@dataclass(frozen=True, kw_only=True)
class _Arm:
    """One arm that left a usable log, judged."""

    id: str
    cell: Cell
    repeat: int
    arm: Literal["faulted", "control"]
    evidence: Evidence
    measures: ArmMeasures
    findings: Mapping[str, Finding]
    exactness: str


@dataclass(frozen=True, kw_only=True)
class _JudgedCell:
    result: CellResult
    slas: list[SlaResult]


def judge(run: RunDirectory) -> Results:
    """Judge a run. Raises LogError when the directory holds no readable resolved scenario."""
    resolved = read_resolved(run)
    logs, unread = _read_logs(run, resolved)
    system = _read_system(run)
    arms, senseless = _judge_arms(resolved, logs, system)
    unread |= senseless
    names = labels(
        Named(id=c.id, strategy=c.scenario.recovery.strategy, params=c.params)
        for c in resolved.cells
    )
    judged = [
        _judge_cell(cell, names[cell.id], arms, resolved, system, unread) for cell in resolved.cells
    ]
    cells, slas = [one.result for one in judged], [sla for one in judged for sla in one.slas]
    incidents = [i for arm in arms if arm.arm == "faulted" for i in arm.measures.incidents]
    # a harness that was killed wrote no end: that is missing evidence, not a verdict on the machine
    ended = {arm.id: arm.measures.history for arm in arms if arm.measures.history.finished}
    outcomes = {name: (history.outcome, _end_reason(history)) for name, history in ended.items()}
    fired = [incident for incident in incidents if incident.occurrence != NEVER_FIRED]
    gate = gates.judge_run(
        cells,
        slas,
        outcomes,
        [*_unsafe(arms), *_not_undone(run)],
        (sum(i.landed and i.healed for i in fired), len(fired)),
        [f"{skip.cell}: {skip.reason}" for skip in resolved.skipped],
    )
    first = resolved.cells[0].scenario if resolved.cells else None
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
        faults=incidents,
        slas=slas,
        skipped=[Skip(cell=skip.cell, reason=skip.reason) for skip in resolved.skipped],
        fidelity=_fidelity(resolved, logs.values()),
        reproduce=resolved.reproduce,
    )


def write_results(run: RunDirectory, results: Results) -> None:
    """Write ``results.json``, whole or not at all. Raises InfrastructureError when the disk
    refuses.
    """
    try:
        write_whole(
            run.results,
            json.dumps(results.model_dump(mode="json"), indent=1, allow_nan=False) + "\n",
        )
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {run.results}: {error.strerror}", hint="free disk space"
        ) from error


def _read_logs(run: RunDirectory, resolved: ResolvedRun) -> tuple[dict[str, Log], dict[str, str]]:
    """Arm -> log, for the arms that at least began, within what all of them may take; and why
    others were not read.
    """
    budget = Budget()
    logs, unread = {}, {}
    for cell in resolved.cells:
        for name, _, _ in _planned(cell):
            try:
                log = read_log(run.events(name), budget)
            except SenselessLog as error:
                unread[name] = error.message
                continue
            except LogError:
                continue
            if log.unread:
                unread[name] = log.unread
            elif log.first(Kind.RUN_STARTED) is not None:
                logs[name] = log
    return logs, unread


def _planned(cell: Cell) -> list[tuple[str, int, Literal["faulted", "control"]]]:
    wanted = ARMS if cell.scenario.baseline == "paired" else ARMS[:1]
    return [
        (arm_id(cell.id, n, arm), n, arm) for n in range(cell.scenario.repeat) for arm in wanted
    ]


def _judge_arms(
    resolved: ResolvedRun, logs: Mapping[str, Log], system: Mapping[str, Any]
) -> tuple[list[_Arm], dict[str, str]]:
    """The arms that have a log, and of those whose log makes no sense why not: anything may stand
    in a file.
    """
    exact = {
        name: kind.exact
        for name, kind in load(recovery.policy.strategies.__name__, Strategy).items()
    }
    arms: list[_Arm] = []
    senseless = _senseless(resolved, logs)  # a control arm's, too, which others are compared with
    logs = {name: log for name, log in logs.items() if name not in senseless}
    simulated = {
        name: cell.scenario.launcher.kind == "sim" and cell.scenario.workload.command is None
        for cell in resolved.cells
        for name, _, _ in _planned(cell)
    }
    twins = twins_of(logs, simulated)
    for cell in resolved.cells:
        controls = _controls(resolved, cell, logs)
        for name, repeat, arm in _planned(cell):
            if name not in logs:
                continue
            control = logs.get(arm_id(cell.id, repeat, "control")) if arm == "faulted" else None
            expected = replace(expected_of(resolved, cell, repeat, arm), twins=twins.get(name, ()))
            try:
                evidence = Evidence(
                    arm=arm,
                    cell=cell,
                    log=logs[name],
                    control=_usable(control),
                    controls=controls,
                    exact=exact,
                    source=resolved.source,
                    lines=resolved.lines,
                    expected=expected,
                )
                one = _Arm(
                    id=name,
                    cell=cell,
                    repeat=repeat,
                    arm=arm,
                    evidence=evidence,
                    measures=evidence.measures,
                    findings=check_all(evidence),
                    exactness=_exactness(evidence),
                )
                _all_there_is(one, resolved, system)
            except Exception as error:
                senseless[name] = _no_sense(error)
            else:
                arms.append(one)
    return arms, senseless


def _senseless(resolved: ResolvedRun, logs: Mapping[str, Log]) -> dict[str, str]:
    found = {}
    for cell in resolved.cells:
        for name in (name for name, *_ in _planned(cell) if name in logs):
            try:
                if absurd := absurdity(logs[name], cell.scenario):
                    raise ValueError(absurd)
                history_of(logs[name])
            except Exception as error:
                found[name] = _no_sense(error)
    return found


def _no_sense(error: Exception) -> str:
    return f"what it holds makes no sense: {type(error).__name__}: {error}"[:MOST_SAID]


def _all_there_is(arm: _Arm, resolved: ResolvedRun, system: Mapping[str, Any]) -> None:
    """Make all of one arm alone that is made of several, so that no value of its log breaks what
    others show.
    """
    _judge_cell(arm.cell, arm.cell.id, [arm], resolved, system, {})
    _arm_result(arm).model_dump_json()
    _fidelity(resolved, [arm.evidence.log])
    _unsafe([arm])


def _usable(control: Log | None) -> Log | None:
    """A control that committed nothing gives nothing to compare with."""
    return control if control is not None and history_of(control).committed_step else None


def _controls(resolved: ResolvedRun, cell: Cell, logs: Mapping[str, Log]) -> tuple[Log, ...]:
    """Control arms of every cell that trains the same thing."""
    alike = [other for other in resolved.cells if other.scenario.workload == cell.scenario.workload]
    names = [name for other in alike for name, _, arm in _planned(other) if arm == "control"]
    return tuple(logs[name] for name in names if name in logs)


def _exactness(evidence: Evidence) -> str:
    """How the arm's result compares with its control's; a job that did not finish has no result,
    and a command does not show its own.
    """
    if evidence.history.outcome != "completed" or evidence.history.info.observed:
        return "not compared"
    try:
        return compare(evidence)[0]
    except Exception:
        return "not compared"


def _judge_cell(
    cell: Cell,
    label: str,
    arms: list[_Arm],
    resolved: ResolvedRun,
    system: Mapping[str, Any],
    unread: Mapping[str, str],
) -> _JudgedCell:
    mine = [arm for arm in arms if arm.cell.id == cell.id]
    faulted = [arm for arm in mine if arm.arm == "faulted"]
    work = work_of(cell.scenario, system)
    of_arms = [
        (arm.repeat, {**arm.measures.values, "mfu": _mfu(arm.measures, work)}) for arm in faulted
    ]
    values = {name: [v for _, own in of_arms for v in own[name]] for name in METRICS}
    bounds = {
        name: max((arm.measures.bounds[name] for arm in faulted), default=0.0) for name in METRICS
    }
    owners = {name: [repeat for repeat, own in of_arms for _ in own[name]] for name in METRICS}
    struck, tried = [arm.measures.incidents for arm in faulted], bool(cell.scenario.faults)
    possible = {name: chances(name, struck, cell.scenario.repeat, tried) for name in METRICS}
    invariants = _merge_findings(mine)
    planned = len(_planned(cell))
    gone = next((f"{name}: {unread[name]}" for name, *_ in _planned(cell) if name in unread), "")
    landed = invariants.get("fault-landed")
    missing = landed.witness if landed and landed.verdict == "inconclusive" else ""
    seen = invariants.get("progress")
    missing = seen.witness if seen and seen.verdict == "inconclusive" else missing
    if not faulted:
        missing = gone or f"{len(mine)} of {planned} arms ran"
    slas = gates.judge_slas(cell, values, resolved.sla_lines, missing, bounds, owners, possible)
    verdict, reason = gates.judge_cell(
        cell.id,
        slas,
        invariants,
        len(mine),
        planned,
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
        metrics={
            name: summarise(name, found, bounds[name], owners[name], possible[name])
            for name, found in values.items()
        },
        invariants=invariants,
        exactness=_worst_exactness([arm.exactness for arm in faulted]),
        reliability=_reliability(mine),
        absent={"mfu": work} if isinstance(work, str) else {},
    )
    return _JudgedCell(result=result, slas=slas)


def _mfu(measures: ArmMeasures, work: tuple[float, float] | str) -> list[float]:
    if isinstance(work, str) or not measures.step_time:
        return []
    flops, peak = work
    return [mfu(flops, measures.history.info.global_batch, measures.step_time, peak)]


def _reliability(arms: list[_Arm]) -> Reliability | None:
    """Rates over the arms of a cell; None where none ran."""
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


def _merge_findings(arms: list[_Arm]) -> dict[str, Finding]:
    """One finding per checker over all arms of a cell; the witness names the arm that
    decided it.
    """
    merged: dict[str, Finding] = {}
    for name in dict.fromkeys(name for arm in arms for name in arm.findings):
        found = [(arm, arm.findings[name]) for arm in arms if name in arm.findings]
        verdict = merge([finding.verdict for _, finding in found])
        arm, finding = next((a, f) for a, f in found if f.verdict == verdict)
        merged[name] = Finding(
            verdict=verdict, witness=f"r{arm.repeat}.{arm.arm}: {finding.witness}"
        )
    return merged


def _worst_exactness(found: list[str]) -> str:
    order = ("differs", "not compared", "within the control band", "bit for bit")
    return min(found, key=order.index, default="not compared")


def _arm_result(arm: _Arm) -> ArmResult:
    history, split = arm.measures.history, arm.measures.partition
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
        goodput=goodput_of(history, split),
        badput=dict(split.badput),
        useful_s=split.useful_s,
        residual_s=split.residual_s,
        step_time_median=arm.measures.step_time,
        provisioned_ranks=history.info.ranks + history.info.spares,
        invariants=dict(arm.findings),
        nodes=nodes_of(arm.evidence.log),
    )


def _end_reason(history: History) -> str:
    return (
        str(history.finished.data["reason"])
        if history.finished
        else "the log has no end: the harness was killed"
    )


def _unsafe(arms: list[_Arm]) -> list[str]:
    """What arms that came to their end left behind."""
    found = []
    for arm in arms:
        left = arm.evidence.log.first(Kind.LEFTOVERS)
        for what in ("processes", "ports", "shared_memory"):
            if left is not None and left.data[what]:
                found.append(f"{what} {left.data[what]} of {arm.id}")
        if arm.measures.history.finished is None:
            continue
        for episode in arm.measures.episodes:
            if episode.injected and not episode.failed and episode.healed is None:
                found.append(f"fault {episode.fault} of {arm.id}")
    return found


def _not_undone(run: RunDirectory) -> list[str]:
    """What a heal tried to undo and could not; what nobody has tried to undo yet, ``chaos heal`` is
    there for.
    """
    try:
        return [entry.problem for entry in read_open(run.ledger) if entry.problem]
    except LogError as error:
        return [f"what cannot be known: {error.message}"]


def _fidelity(resolved: ResolvedRun, logs: Iterable[Log]) -> list[str]:
    """A line for each launcher, platform and fault kind that imitates instead of using the real
    mechanism.
    """
    launchers = load(harness.launchers.__name__, Launcher)
    where = sorted({cell.scenario.launcher.kind for cell in resolved.cells})
    emulating = [
        f"{name}: {launchers[name].emulates}" for name in where if launchers[name].emulates
    ]
    own = (log.actors[ORCHESTRATOR].events[:1] for log in logs)
    emulating += sorted(
        {e.data["emulates"] for first in own for e in first if e.data.get("emulates")}
    )
    kinds = load(chaos.faults.__name__, Fault)
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


def _read_system(run: RunDirectory) -> dict[str, Any]:
    try:
        found = read_json(run.system)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    if not isinstance(found.get("versions", {}), dict):
        del found["versions"]  # everybody who shows a machine goes through them
    return found
