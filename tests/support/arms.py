"""Whole clean arms, one for each strategy and kind of fault, and the evidence a checker gets of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.support.logs import BATCH, EVERY, MS, RANKS, STEP_MS, STEPS, Script
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.model import Cell, Scenario
from trainchaos.harness.judge.checkers import CHECKERS, OF_SUPERVISOR, Evidence, check
from trainchaos.harness.judge.results import Finding

FAIL, OPEN = "fail", "inconclusive"
LEFT_OPEN = {name: OPEN for name in CHECKERS if name not in OF_SUPERVISOR}
"""What is said where the record of a rank is not whole."""
EXACT = {"checkpoint-restart": True, "hot-spare": True, "drop-replica": False, "none": True}
SLOWER = 1.5
KILL = {
    "id": "kill",
    "kind": "process-kill",
    "target": {"rank": 2},
    "at": {"step": 27, "phase": "backward"},
}


def control(strategy: str, *, seed: int = 17, spares: int = 0, **more: Any) -> Script:
    """A clean unfaulted arm."""
    script = Script(strategy, arm="control", seed=seed, spares=spares, **more)
    script.train(script.steps)
    return script.finish()


def plan(script: Script, fault: str = "kill", kind: str = "process-kill", **target: Any) -> None:
    """The plan entry of a fault."""
    lasts = kind in ("straggler", "link-throttle", "process-stop")
    script.orchestrator(
        Kind.FAULT_PLANNED, fault=fault, kind=kind, target=target, at={"step": 27}, lasts=lasts
    )


def inject(
    script: Script,
    fault: str = "kill",
    kind: str = "process-kill",
    *,
    step: int | None = 27,
    **target: Any,
) -> None:
    """Inject a fault, and have it land: a kill once its process is reaped, a straggler when
    ``land`` says so. ``step``: in which its ranks hold; None between two steps.
    """
    script.orchestrator(
        Kind.FAULT_INJECTED, step=step, fault=fault, kind=kind, occurrence=0, target=target
    )
    if kind == "process-kill":
        about = {"fault": fault, "occurrence": 0}
        script.killed[target["process"]] = {
            **about,
            "witness": "kernel: wait status",
            "evidence": {"signal": 9},
        }
    elif kind == "tensor-corrupt":
        seen = {"surface": "gradient", "op": "nan", "before": "aa", "after": "bb"}
        script.write(
            target["process"], Kind.FAULT_EFFECT, step=27, fault=fault, occurrence=0, evidence=seen
        )
        land(script, fault, "rank: tensor digests", seen)
    elif kind == "checkpoint-corrupt":
        seen = {"verifier": "checksums differ"}
        script.orchestrator(Kind.FAULT_EFFECT, step=27, fault=fault, occurrence=0, evidence=seen)
        land(script, fault, "checkpoint verifier", {"complaint": "checksums differ"})


def land(script: Script, fault: str, witness: str, evidence: dict[str, Any]) -> None:
    """Somebody saw it."""
    script.orchestrator(
        Kind.FAULT_LANDED, fault=fault, occurrence=0, witness=witness, evidence=evidence, step=27
    )


def fail(script: Script, process: str = "w2", rank: int = 2, cause: str = "exit") -> None:
    """A member is declared failed."""
    script.now += 3 * MS
    script.orchestrator(
        Kind.FAILURE_DETECTED,
        step=27,
        failure=1,
        cause=cause,
        process=process,
        rank=rank,
        detail="gone",
    )


def park(
    script: Script,
    survivors: Sequence[str],
    steps: dict[str, int] | None = None,
    why: str = "aborted",
) -> None:
    """Abort, and have the survivors stand still."""
    held = {name: (steps or {}).get(name, script.step) for name in survivors}
    script.orchestrator(Kind.ABORT_SENT, processes=list(survivors))
    for name in survivors:
        script.write(name, Kind.PARKED, step=held[name], valid=True, why=why)
    script.orchestrator(
        Kind.SURVIVORS_PARKED,
        processes={name: {"step": step, "valid": True} for name, step in held.items()},
    )


def interrupted(strategy: str, *, committers: Sequence[str] = (), **more: Any) -> Script:
    """An arm up to the death of rank 2 in step 27; ``committers`` had already applied that step."""
    script = Script(strategy, **more)
    plan(script, rank=2)
    script.train(26)
    script.now += MS
    script.take(27)
    script.now += 20 * MS
    inject(script, process="w2", rank=2)
    script.now += MS
    if committers:
        script.commit(27, committers)
    script.exit("w2", signal=9, expected=False)
    fail(script)
    return script


def restart_all(script: Script) -> list[str]:
    """The survivors of w2 are killed, and four new workers started; their names."""
    script.orchestrator(
        Kind.DECISION,
        actions=["kill", *["spawn warm worker"] * 4, "form"],
        reason="restart all from a checkpoint",
    )
    for name in ("w0", "w1", "w3"):
        script.exit(name, signal=9, expected=True)
    fresh = [f"w{n}" for n in range(4, 8)]
    for name in fresh:
        script.spawn(name)
    return fresh


def spare_joins(script: Script, resume: int = 26) -> None:
    """A generation forms in which s0 has the place of w2."""
    script.form(
        ("w0", "w1", "s0", "w3"),
        state="peer",
        cause="failure",
        resume=resume,
        source="w0",
        fresh=("s0",),
    )


def restart(resume: int = 20) -> Script:
    """checkpoint-restart: all die, the newest checkpoint (step 20) is restored, 21 to 26 are done
    again.
    """
    script = interrupted("checkpoint-restart")
    fresh = restart_all(script)
    script.form(
        fresh, state="checkpoint", cause="failure", resume=resume, checkpoint=f"step-{resume}"
    )
    script.train(STEPS)
    return script.finish(healed=["kill"])


def drop_replica(
    *, mixed: bool = False, grow: bool = True, shrink: bool = False, resume: int | None = None
) -> Script:
    """drop-replica: three go on; a replacement joins after step 33. ``mixed``: w0 and w1 had
    applied step 27.
    """
    ahead = ("w0", "w1") if mixed else ()
    script = interrupted("drop-replica", committers=ahead, shrink=shrink)
    park(script, ("w0", "w1", "w3"), dict.fromkeys(ahead, 27))
    spawns = ["spawn warm worker"] if grow else []
    script.orchestrator(Kind.DECISION, actions=["form", *spawns], reason="3 ranks go on")
    resume = resume or (27 if mixed else 26)
    script.form(
        ("w0", "w1", "w3"),
        state="peer",
        cause="failure",
        resume=resume,
        source="w0",
        fresh=("w3",) if mixed else (),
    )
    if not grow:
        script.train(STEPS)
        return script.finish(healed=["kill"])
    script.train(33)
    script.spawn("w4")
    park(script, ("w0", "w1", "w3"), why="pause")
    script.orchestrator(Kind.DECISION, actions=["form"], reason="w4 joins")
    script.form(
        ("w0", "w1", "w3", "w4"), state="peer", cause="grow", resume=33, source="w0", fresh=("w4",)
    )
    script.slip = 1e-6
    script.train(STEPS)
    return script.finish(healed=["kill"])


def hot_spare() -> Script:
    """hot-spare: s0 takes rank 2, and the job goes on at step 27."""
    script = interrupted("hot-spare", spares=1)
    park(script, ("w0", "w1", "w3"))
    script.orchestrator(Kind.DECISION, actions=["form"], reason="s0 takes over from w2")
    spare_joins(script)
    script.train(STEPS)
    return script.finish(healed=["kill"])


def nan() -> Script:
    """A NaN in rank 2's gradient is caught by all, and the step is done again."""
    script = Script("hot-spare", spares=1)
    plan(script, "nan", "tensor-corrupt", rank=2)
    script.train(26)
    script.take(27)
    inject(script, "nan", "tensor-corrupt", process="w2", rank=2)
    for rank, name in enumerate(script.members):
        script.write(name, Kind.NONFINITE_CAUGHT, step=27, rank=rank, blamed=[2], what="gradient")
    fail(script, cause="nonfinite")
    park(script, script.members, why="nonfinite")
    script.orchestrator(Kind.DECISION, actions=["form"], reason="w2 is refilled")
    script.form(script.members, state="peer", cause="refill", resume=26, source="w0", fresh=("w2",))
    script.train(STEPS)
    return script.finish(healed=["nan"])


def corrupt_checkpoint(*, refuse: bool = True) -> Script:
    """The newest checkpoint is corrupted, then a rank dies: 20 is refused, 10 restored."""
    script = Script("checkpoint-restart")
    plan(script, "rot", "checkpoint-corrupt", checkpoint="latest")
    plan(script, rank=2)
    script.train(22)
    inject(script, "rot", "checkpoint-corrupt", checkpoint="step-20")
    script.orchestrator(Kind.FAULT_HEALED, fault="rot", occurrence=0, how="nothing to undo")
    script.train(26)
    script.take(27)
    inject(script, process="w2", rank=2)
    script.exit("w2", signal=9, expected=False)
    fail(script)
    fresh = restart_all(script)
    resume = 20
    if refuse:
        script.generation += 1
        script.write(
            "w4", Kind.CHECKPOINT_REFUSED, step=20, checkpoint="step-20", reason="checksums differ"
        )
        script.generation -= 1
        script.kept, resume = [10], 10
    script.form(
        fresh, state="checkpoint", cause="failure", resume=resume, checkpoint=f"step-{resume}"
    )
    script.train(STEPS)
    return script.finish(healed=["kill"])


def straggler(*, slow_ms: float = 90) -> Script:
    """Rank 2 computes slowly for steps 20 to 25; nobody has to do anything."""
    script = Script("hot-spare", spares=1)
    plan(script, "slow", "straggler", rank=2)
    script.train(19)
    inject(script, "slow", "straggler", step=None, process="w2", rank=2)
    script.step_ns, script.slower = int(slow_ms * MS), SLOWER
    script.train(25)
    land(
        script, "slow", "job: phase times", {"requested_factor": SLOWER, "measured_factor": SLOWER}
    )
    script.orchestrator(Kind.FAULT_HEALED, fault="slow", occurrence=0, how="duration over")
    script.step_ns, script.slower = STEP_MS * MS, 1.0
    script.train(STEPS)
    return script.finish()


def bitflip() -> Script:
    """A finite corruption that nobody notices: the result differs from then on."""
    script = Script("hot-spare", spares=1)
    plan(script, "flip", "tensor-corrupt", rank=2)
    script.train(26)
    inject(script, "flip", "tensor-corrupt", step=None, process="w2", rank=2)
    script.slip = 1e-3
    script.train(STEPS)
    return script.finish(healed=["flip"])


CLEAN: dict[str, tuple[Callable[[], Script], list[dict[str, Any]]]] = {
    "checkpoint-restart": (restart, [KILL]),
    "drop-replica": (drop_replica, [KILL]),
    "drop-replica, mixed": (lambda: drop_replica(mixed=True), [KILL]),
    "hot-spare": (hot_spare, [KILL]),
    "nan": (nan, [{**KILL, "id": "nan", "kind": "tensor-corrupt", "params": {"op": "nan"}}]),
    "corrupt checkpoint": (
        corrupt_checkpoint,
        [
            {
                "id": "rot",
                "kind": "checkpoint-corrupt",
                "target": {"checkpoint": "latest"},
                "at": {"step": 23},
            },
            KILL,
        ],
    ),
    "straggler": (
        straggler,
        [{**KILL, "id": "slow", "kind": "straggler", "params": {"factor": SLOWER}}],
    ),
}


def cell_of(strategy: str, faults: Sequence[dict[str, Any]], **more: Any) -> Cell:
    """A cell for these logs; ``more`` replaces scenario fields."""
    fields: dict[str, Any] = {
        "version": 1,
        "name": "synthetic",
        "recovery": strategy,
        "faults": list(faults),
        "seed": 17,
        "workload": {
            "kind": "gpt",
            "ranks": RANKS,
            "steps": STEPS,
            "global_batch": BATCH,
            "checkpoint": {"every": EVERY},
        },
    }
    return Cell(id="default", params={}, scenario=Scenario.model_validate({**fields, **more}))


def evidence_of(
    script: Script, faults: Sequence[dict[str, Any]], other: Script | None = None, **more: Any
) -> Evidence:
    """Evidence of a faulted arm beside a clean control."""
    spares = script.lines[0].data["spares"]
    paired = (other or control(script.strategy, spares=spares)).log()
    recovery = more.pop("recovery", script.strategy)
    return Evidence(
        arm="faulted",
        cell=cell_of(recovery, faults, **more),
        log=script.log(),
        control=paired,
        controls=(paired,),
        exact=EXACT,
    )


def judged(evidence: Evidence) -> dict[str, Finding]:
    """What every checker says."""
    return {name: check(checker, evidence) for name, checker in CHECKERS.items()}


def red(evidence: Evidence) -> dict[str, str]:
    """The checkers that are not green, with their verdicts."""
    return {
        name: finding.verdict
        for name, finding in judged(evidence).items()
        if finding.verdict != "pass"
    }
