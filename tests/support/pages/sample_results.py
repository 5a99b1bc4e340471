"""A realistic finished run for the tests of reports: three strategies, three repeats, two arms,
with logs.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.harness.host.rundir import RunDirectory, arm_id
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.incident import PHASE_NAMES, Incident, PhaseSpan
from trainchaos.harness.judge.results import (
    ArmResult,
    CellResult,
    Finding,
    Results,
    Skip,
    SlaResult,
)

HOSTILE = "<script>alert('1')</script> & \"q\" | `tick` \x1b[31m"
STEPS = 120
BATCH = 16
STEP_S = 0.046
KILL_STEP = 77
REPEATS = 3
PHASES = {
    "checkpoint-restart": (0.004, 0.003, 0.31, 0.18, 0.094, 0.055),
    "drop-replica": (0.004, 0.003, 0.022, 0.001, 0.046, 0.051),
    "hot-spare": (0.004, 0.003, 0.031, 0.028, 0.0, 0.052),
}
INVARIANTS = (
    "fault-landed",
    "sample-accounting",
    "no-lost-commit",
    "single-writer",
    "replica-equality",
    "loss-equality",
    "checkpoint-integrity",
    "nan-containment",
    "detection",
    "liveness",
    "membership",
    "step-arithmetic",
    "no-orphans",
    "evidence-complete",
)


def metric(unit: str, values: list[float], better: str = "lower") -> Metric:
    """A metric over ``values``."""
    return Metric(
        unit=unit,
        values=values,
        n=len(values),
        median=statistics.median(values) if values else None,
        min=min(values, default=None),
        max=max(values, default=None),
        ci95=None,
        better=better,
    )


def build(root: Path, *, logs: bool = True) -> tuple[RunDirectory, Results]:
    """A run directory (with event logs) and its results: one SLA fails, one is inconclusive."""
    run = RunDirectory(root)
    root.mkdir(parents=True, exist_ok=True)
    arms: list[ArmResult] = []
    faults: list[Incident] = []
    for strategy in PHASES:
        for repeat in range(REPEATS):
            incident = _incident(strategy, repeat)
            faults.append(incident)
            arms += [
                _arm(strategy, repeat, "control", None),
                _arm(strategy, repeat, "faulted", incident),
            ]
    if logs:
        for arm in arms:
            _write_logs(
                run, arm, next((f for f in faults if arm.arm == "faulted" and _same(arm, f)), None)
            )
    return run, _results(arms, faults)


def empty() -> Results:
    """A run that was interrupted before its first arm."""
    return Results(
        scenario="kill-one-rank",
        description="",
        run_id="2026-11-20T18-02-11-17",
        seed=17,
        started="2026-11-20T18:02:11Z",
        source="scenarios/kill-one-rank.yaml",
        system={},
        workload={},
        verdict="interrupted",
        exit_code=130,
        reason="interrupted by the user before the first arm",
        cells=[],
        arms=[],
        faults=[],
        slas=[],
        skipped=[],
        fidelity=[],
        reproduce="chaos run scenarios/kill-one-rank.yaml --seed 17",
    )


def _same(arm: ArmResult, incident: Incident) -> bool:
    return (arm.cell, arm.repeat) == (incident.cell, incident.repeat)


def _never(strategy: str, repeat: int) -> bool:
    return strategy == "drop-replica" and repeat == 2


def _incident(strategy: str, repeat: int) -> Incident:
    scale = 1 + 0.15 * repeat
    spans, start = [], 0.0
    for name, base in zip(PHASE_NAMES, PHASES[strategy], strict=True):
        spans.append(PhaseSpan(name=name, start=start, seconds=base * scale))
        start += base * scale
    lost = KILL_STEP - 1 - 75 if strategy == "checkpoint-restart" else 0
    never = _never(strategy, repeat)
    return Incident(
        fault="kill",
        kind="process-kill",
        cell=f"recovery={strategy}",
        repeat=repeat,
        occurrence=0,
        target={"process": "w2", "rank": 2},
        step=KILL_STEP,
        injected_s=1.5 + STEP_S * (KILL_STEP - 0.5),
        landed=True,
        witness="supervisor",
        evidence={"signal": 9, "pid": 4242 + repeat},
        healed=True,
        detected_by="exit",
        blamed_rank=2,
        detection_time=0.004 * scale,
        recovery_time=math.inf if never else start,
        outcome="hang" if never else "recovered",
        phases=spans[:3] if never else spans,
        steps_lost=lost,
        restored_step=75 if lost else None,
        first_new_step=None if never else KILL_STEP,
        decision=f"rank 2 exited: {strategy} {HOSTILE}",
    )


def _arm(strategy: str, repeat: int, kind: str, incident: Incident | None) -> ArmResult:
    cell = f"recovery={strategy}"
    useful = STEPS * STEP_S
    never = incident is not None and incident.recovery_time == math.inf
    badput = {
        "initialisation": 1.5,
        "data": 0.02,
        "checkpoint_save": 0.09,
        "shutdown": 0.15,
        "other": 0.04,
    }
    if incident:
        spans = {p.name: p.seconds for p in incident.phases}
        badput |= {
            "detection": spans["detect"],
            "regroup": spans["abort"] + spans["regroup"],
            "restore": spans.get("restore", 0.0),
            "recomputation": spans.get("redo", 0.0),
        }
        if strategy == "drop-replica":
            badput["degraded_world"] = 0.4
    if strategy == "hot-spare":
        badput["spare_idle"] = 1.6
    if never:
        useful = KILL_STEP * STEP_S
        badput["other"] = 2.0
    wall = useful + sum(badput.values()) + 0.01
    verdict = "fail" if never else "pass"
    return ArmResult(
        id=arm_id(cell, repeat, kind),
        cell=cell,
        repeat=repeat,
        arm=kind,
        seed=17 + repeat,
        events=f"events/{arm_id(cell, repeat, kind)}",
        outcome="timed-out" if never else "completed",
        reason="no step for 2 s" if never else "",
        wall_s=wall,
        committed_step=76 if never else STEPS,
        steps=STEPS,
        goodput=useful / wall,
        badput=badput,
        useful_s=useful,
        residual_s=0.01,
        step_time_median=STEP_S,
        provisioned_ranks=5 if strategy == "hot-spare" else 4,
        invariants={
            n: Finding(verdict=verdict if n == "liveness" else "pass", witness=_witness(n))
            for n in INVARIANTS
        },
    )


def _witness(name: str) -> str:
    return {
        "sample-accounting": f"{STEPS * BATCH} of {STEPS * BATCH} samples, none lost, none twice",
        "loss-equality": f"{STEPS} steps equal to the control {HOSTILE}",
        "liveness": f"step {STEPS} committed before the deadline",
    }.get(name, "nothing to object to")


def _results(arms: list[ArmResult], faults: list[Incident]) -> Results:
    cells = [_cell(strategy, arms, faults) for strategy in PHASES]
    system = {
        "host": "node-1",
        "cpu": {"model": "8-core", "cores": 2},
        "torch": "2.13.0",
        "note": HOSTILE,
    }
    return Results(
        scenario="kill-one-rank",
        description=f"Kill one rank in backward. {HOSTILE}",
        run_id="2026-11-20T18-02-11-17",
        seed=17,
        started="2026-11-20T18:02:11Z",
        source="scenarios/kill-one-rank.yaml",
        system=system,
        workload={"kind": "gpt", "size": "nano", "ranks": 4, "steps": STEPS, "device": "cpu"},
        verdict="fail",
        exit_code=1,
        reason="recovery_time of drop-replica: max < 5s failed (never recovered in repeat 2)",
        cells=cells,
        arms=arms,
        faults=faults,
        slas=[s for c in cells for s in _slas(c)],
        skipped=[
            Skip(cell="recovery=hot-spare,device=cuda", reason=f"needs 4 CUDA devices {HOSTILE}")
        ],
        fidelity=["ranks are processes on one machine, not nodes", f"gloo over loopback {HOSTILE}"],
        reproduce="chaos run scenarios/kill-one-rank.yaml --seed 17",
    )


def _cell(strategy: str, arms: list[ArmResult], faults: list[Incident]) -> CellResult:
    cell = f"recovery={strategy}"
    mine = [f for f in faults if f.cell == cell]
    times = [f.recovery_time for f in mine if f.recovery_time is not None]
    failed = math.inf in times
    findings = {n: Finding(verdict="pass", witness=_witness(n)) for n in INVARIANTS}
    if failed:
        findings["liveness"] = Finding(
            verdict="fail", witness=f"{cell}.r2.faulted: no step after 76 {HOSTILE}"
        )
        findings["loss-equality"] = Finding(
            verdict="inconclusive", witness="r2 ended at step 76: nothing to compare"
        )
    return CellResult(
        id=cell,
        label=strategy,
        params={"recovery": strategy},
        strategy=strategy,
        verdict="fail" if failed else "pass",
        reason="recovery_time failed" if failed else "all held",
        metrics={
            "recovery_time": metric("s", times),
            "detection_time": metric("s", [f.detection_time or 0.0 for f in mine]),
            "steps_lost": metric("steps", [float(f.steps_lost) for f in mine]),
            "samples_lost": metric("samples", [0.0] * REPEATS),
            "goodput": metric(
                "ratio",
                [a.goodput or 0.0 for a in arms if a.cell == cell and a.arm == "faulted"],
                "higher",
            ),
        },
        invariants=findings,
        exactness="within the control band" if strategy == "drop-replica" else "bit for bit",
    )


def _slas(cell: CellResult) -> Iterator[SlaResult]:
    recovery, goodput, lost = (cell.metrics[n] for n in ("recovery_time", "goodput", "steps_lost"))
    worst = recovery.max or 0.0
    rows = (
        ("recovery_time", "median < 800ms", recovery, recovery.median, "pass", 14),
        ("recovery_time", "max < 5s", recovery, worst, "fail" if math.isinf(worst) else "pass", 14),
        ("goodput", "median >= 0.50", goodput, goodput.median, "pass", 16),
        ("steps_lost", "max <= 25", lost, lost.max, "pass", 15),
    )
    for name, clause, source, observed, verdict, line in rows:
        yield SlaResult(
            cell=cell.id,
            metric=name,
            clause=clause,
            severity="fail",
            verdict=verdict,
            observed=observed,
            unit=source.unit,
            values=source.values,
            arms=list(range(len(source.values))),
            detail="never recovered in 1 of 3" if verdict == "fail" else "",
            line=line,
        )
    if cell.strategy == "hot-spare":
        yield SlaResult(
            cell=cell.id,
            metric="time_to_full_rate",
            clause="median < 3s",
            severity="warn",
            verdict="inconclusive",
            observed=None,
            unit="s",
            values=[],
            detail="no arm ran 20 steps at full rate: raise workload.steps",
            line=17,
        )


def _write_logs(run: RunDirectory, arm: ArmResult, incident: Incident | None) -> None:
    """Event logs of one arm on a hand-moved clock; only what reports read is written."""
    run.make_arm(arm.id)
    now = [5_000_000_000]
    writers = {
        n: EventWriter(run.events(arm.id), n, lambda: now[0])
        for n in ("orchestrator", "w0", "w1", "w2", "w3")
    }
    head = writers["orchestrator"]
    head.write(Kind.ACTOR_STARTED, pid=1, host="h", wall_ns=0)
    head.write(
        Kind.RUN_STARTED,
        arm=arm.arm,
        cell=arm.cell,
        repeat=arm.repeat,
        seed=arm.seed,
        ranks=4,
        spares=0,
        steps=STEPS,
        global_batch=BATCH,
        strategy=arm.cell,
        order={"seed": 17, "samples": 1000},
    )
    members = ["w0", "w1", "w2", "w3"]
    head.write(
        Kind.GENERATION_STARTED,
        members=members,
        state="initial",
        source=None,
        cause="start",
        generation=1,
    )
    now[0] += 1_400_000_000
    head.write(Kind.GENERATION_READY, members=members, resume_step=0, checkpoint=None, generation=1)
    noise = random.Random(arm.id)
    curve = random.Random(arm.repeat)
    losses = [5.6 * math.exp(-s / 70) + 1.9 + curve.gauss(0, 0.03) for s in range(STEPS + 1)]
    step, generation = 1, 1
    while step <= STEPS:
        if incident and generation == 1 and step == KILL_STEP:
            generation = 2
            if not _strike(head, incident, now):
                break
            step = (incident.restored_step or KILL_STEP - 1) + 1
        now[0] += int(STEP_S * 1e9 * noise.uniform(0.9, 1.15))
        drift = 2e-5 * (step - KILL_STEP) if "drop" in arm.cell and generation == 2 else 0.0
        _commit(writers, now, generation, step, losses[step] + drift)
        step += 1
    head.write(Kind.RUN_FINISHED, outcome=arm.outcome, reason=arm.reason, committed_step=step - 1)
    for writer in writers.values():
        writer.close()


def _strike(head: EventWriter, incident: Incident, now: list[int]) -> bool:
    now[0] += int(0.02e9)
    now[0] += int(0.004e9)
    head.write(
        Kind.FAULT_LANDED,
        fault=incident.fault,
        occurrence=0,
        witness="supervisor",
        evidence=incident.evidence,
    )
    head.write(Kind.FAULT_HEALED, fault=incident.fault, occurrence=0, how="process gone")
    if incident.recovery_time == math.inf:
        now[0] += int(2e9)
        return False
    now[0] += int(sum(p.seconds for p in incident.phases[1:4]) * 1e9)
    head.write(
        Kind.GENERATION_READY,
        members=["w0", "w1", "w3", "w2"],
        resume_step=KILL_STEP - 1,
        checkpoint=None,
        generation=2,
    )
    return True


def _commit(
    writers: dict[str, EventWriter], now: list[int], generation: int, step: int, loss: float
) -> None:
    seconds = {
        "data": 0.001,
        "forward": 0.012,
        "backward": 0.021,
        "collective": 0.008,
        "optimizer": 0.003,
    }
    for rank in range(4):
        now[0] += 1000
        writers[f"w{rank}"].write(
            Kind.STEP_COMMITTED,
            step=step,
            generation=generation,
            rank=rank,
            world=4,
            samples=BATCH,
            loss=loss,
            lr=1e-3,
            grad_norm=1.0,
            optimizer_step=step,
            scheduler_step=step,
            seconds=seconds,
        )
