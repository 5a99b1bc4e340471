"""A comparison as large as a real one, for the tests of its pages: every outcome, infinities,
missing values.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

from trainchaos.chaos.stats import median_ci95
from trainchaos.harness.compare.result.model import (
    SAYS_NOTHING,
    CellSummary,
    Comparison,
    FaultFreeSummary,
    OutcomeClass,
    Ratio,
    StackInfo,
    Trial,
)
from trainchaos.harness.compare.result.statistics import (
    EVERY,
    outliers,
    paired_ratio,
    repetitions_needed,
)
from trainchaos.harness.compare.result.summary import survival_of
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.incident import PhaseSpan
from trainchaos.harness.judge.results import FalseAlarms

HOSTILE = "<script>alert('1')</script> & \"q\" | `tick`"
REFERENCE = "hot-spare"
FAMILIES = {
    "kill": "rank 1 is killed (SIGKILL) in the backward pass",
    "hang": "rank 1 is stopped (SIGSTOP)",
    "exception": "rank 1 raises in its training step",
    "nan": "a gradient of rank 1 becomes NaN",
    "corrupted-checkpoint": "the newest checkpoint is damaged, then rank 1 is killed",
    "kill-in-checkpoint": "rank 1 is killed while it saves",
}
STACKS = {
    "none": 0.0,
    REFERENCE: 0.05,
    "drop-replica": 0.04,
    "checkpoint-restart": 0.7,
    "torchrun default": 7.5,
    "torchrun tuned": 6.5,
    "torchft default": 5.1,
    "torchft tuned": 0.54,
    "nvrx-inprocess default": 2.2,
    "nvrx-inprocess tuned": 0.65,
    "nvrx-ft-launcher tuned": 6.3,
    "dlrover tuned": 7.2,
    "ray-train tuned": 17.4,
}
OURS = ("none", REFERENCE, "drop-replica", "checkpoint-restart")
STEP_S = 0.05
STEPS = 60
_WITNESS: dict[OutcomeClass, str] = {
    "masked": "no step took longer than 3 usual ones",
    "recovered": "first new step 31 at 4.1 s, same loss",
    "degraded": "2 of 3 ranks after step 30",
    "rolled back": "steps 26 to 30 were committed twice",
    "started over": "step 1 was committed again at 9.2 s",
    "all ranks died": "exit codes 1, 1, -9",
    "hung": "no step for 120 s, then ended",
    "committed bad values": "loss not finite from step 31 on, committed",
    "not landed": "the rank had ended before the fault was due",
    "not offered": "has no checkpoint to damage",
    "refuted": "identity: the log says seed 99, the scenario 1",
}


def outcome_of(label: str, family: str, number: int) -> OutcomeClass:
    """What became of one trial; stable, with each class somewhere."""
    if label == "none":
        return "all ranks died" if family != "hang" else "hung"
    if family == "nan":
        by = {"torchft default": "committed bad values", "torchft tuned": "committed bad values"}
        return by.get(label, "masked" if label in OURS else "committed bad values")  # type: ignore[return-value]
    if label.endswith("default") and family == "hang":
        return "hung" if number % 2 == 0 else "rolled back"
    if label.startswith("torchft"):
        return (
            "not offered" if "checkpoint" in family else "degraded" if number == 1 else "recovered"
        )
    if label.startswith("ray") and family == "hang":
        return "not landed"
    if label == "nvrx-ft-launcher tuned" and family == "hang":
        return "refuted"
    if label.startswith("dlrover"):
        return "started over" if family == "corrupted-checkpoint" else "rolled back"
    if label == "drop-replica":
        return "degraded"
    return "recovered" if label == REFERENCE else "rolled back"


def build(repeats: int = 10, *, stacks: int = 13, price: float | None = 2.5) -> Comparison:
    """``repeats`` trials of up to 13 stacks under 6 kinds of fault."""
    labels = list(STACKS)[:stacks]
    trials = [
        trial
        for family in FAMILIES
        for label in labels
        for number in range(repeats)
        if (trial := _trial(label, family, number)) is not None
    ]
    again = [
        t.model_copy(update={"label": f"{REFERENCE} again"}) for t in trials if t.label == REFERENCE
    ]
    families = (*FAMILIES, EVERY)
    ratios = [
        _ratio(trials, label, family)
        for label in labels
        for family in families
        if label != REFERENCE
    ]
    same = [_ratio(trials + again, f"{REFERENCE} again", family) for family in FAMILIES]
    return Comparison(
        name="all-stacks",
        started="2026-11-21T20:00:00Z",
        finished="2026-11-21T21:24:00Z",
        machine={"processor": "x86_64", "cores": 2, "memory_gib": 16.0, "cuda_devices": []},
        workload={"model": "gpt nano", "steps": STEPS, "ranks": 3},
        deadline=120.0,
        stacks=[_stack(label) for label in labels],
        families=dict(FAMILIES),
        trials=trials,
        cells=[_cell(trials, label, family) for label in labels for family in FAMILIES],
        ratios=[r for r in ratios if r is not None],
        reference=REFERENCE,
        same=[r for r in same if r is not None],
        skipped={
            "lm-resiliency tuned": (
                "its environment is not there: chaos stacks install lm-resiliency"
            )
        },
        price=price,
        currency="USD",
        fidelity=["CPU and gloo: no NCCL, no GPU memory", "one machine plays all nodes"],
        at_rest=[_at_rest(label, number) for number, label in enumerate(labels)],
        reproduce=f"chaos compare scenarios/compare/*.yaml --stacks all --repeat {repeats}",
    )


def _at_rest(label: str, spares: int) -> FaultFreeSummary:
    alarms = FalseAlarms(
        count=spares, rank_hours=2.0 + spares, rate=spares / (2.0 + spares), upper=3.5
    )
    return FaultFreeSummary(
        label=label, ranks=3, spares=spares, share=spares / (3 + spares), false_alarms=alarms
    )


def _stack(label: str) -> StackInfo:
    name, _, settings = label.partition(" ")
    return StackInfo(
        label=label,
        stack=name,
        settings="default" if settings == "default" else "tuned",
        ours=label in OURS,
        description=f"what {name} is {HOSTILE}",
        chosen={"heartbeat_ms": 500, "max_restarts": 3} if settings else {},
        because=f"its guide recommends it {HOSTILE}" if settings == "tuned" else "",
        versions={"torch": "2.13.0", name: "0.2.0"},
        fidelity=["replicas of one rank each"] if "torchft" in label else [],
    )


def _trial(label: str, family: str, number: int) -> Trial | None:
    outcome = outcome_of(label, family, number)
    if outcome == "not offered":
        return None
    generator = random.Random(f"{label} {family} {number}")
    never = outcome in ("all ranks died", "hung", "committed bad values")
    noise = math.exp(generator.gauss(0, 0.12)) * (
        4.0 if number == 7 and label == "torchrun tuned" else 1.0
    )
    recovery: float | None = STACKS[label] * noise
    if outcome in ("masked", "not landed", "refuted"):
        recovery = None
    elif never:
        recovery = math.inf
    wall = STEPS * STEP_S + (recovery or 0.0 if not never else 30.0) + 2.0
    lost = 0.0 if recovery is None else 30.0 if never else recovery
    badput = {
        "initialisation": 2.0,
        "detection": lost * 0.3,
        "regroup": lost * 0.5,
        "restore": lost * 0.2,
    }
    return Trial(
        label=label,
        family=family,
        seed=17 + number,
        outcome=outcome,
        witness=f"{_WITNESS[outcome]} {HOSTILE}",
        recovery=recovery,
        detection=None if recovery is None else lost * 0.3,
        phases=_phases(lost, never),
        steps_lost=5 if outcome in ("rolled back", "started over") else 0,
        samples_lost=None if label.startswith("ray") else 0 if label in OURS else 32,
        ranks=3,
        goodput=0.0 if never else STEPS * STEP_S / wall,
        control_goodput=STEPS * STEP_S / (STEPS * STEP_S + 2.0),
        ettr=0.0 if never else 0.98 * STEPS * STEP_S / wall,
        badput=badput,
        step_time=STEP_S * noise,
        wall=wall,
        verdict="fail" if never else "pass",
        run=f"runs/{family}/{label.replace(' ', '-')}/{17 + number}",
        reproduce=(
            f"chaos compare {family}.yaml --stacks {label.replace(' ', ':')} --seed {17 + number}"
        ),
        losses=_losses(generator, outcome) if number == 0 else (),
        control_losses=_losses(None, "masked") if number == 0 else (),
        full_rate=None if recovery is None or number == 2 else recovery * 1.25,
        redundancy=None if recovery is None else recovery * 2,
    )


def plain_trial(
    label: str,
    seed: int,
    recovery: float | None,
    outcome: OutcomeClass = "recovered",
    **other: Any,
) -> Trial:
    """A trial in which only a few numbers matter; ``other``: further fields."""
    fields: dict[str, Any] = {
        "family": "kill",
        "witness": f"{outcome} {seed}",
        "detection": None,
        "phases": [],
        "steps_lost": 0,
        "samples_lost": 0,
        "goodput": 0.5,
        "control_goodput": 0.6,
        "badput": {},
        "step_time": 0.05,
        "wall": 10.0,
        "ranks": 4,
        "verdict": "pass",
        "run": "",
        "reproduce": "",
    }
    return Trial(label=label, seed=seed, recovery=recovery, outcome=outcome, **(fields | other))


def _phases(lost: float, never: bool) -> list[PhaseSpan]:
    shares = {
        "detect": 0.3,
        "abort": 0.05,
        "regroup": 0.45,
        "restore": 0.12,
        "redo": 0.05,
        "first step": 0.03,
    }
    spans, start = [], 0.0
    for name, share in list(shares.items())[: 1 if never else 6]:
        spans.append(PhaseSpan(name=name, start=start, seconds=lost * share))
        start += lost * share
    return spans if lost else []


def _losses(
    generator: random.Random | None, outcome: OutcomeClass
) -> tuple[tuple[int, float], ...]:
    series = []
    for step in range(1, STEPS + 1, 2):
        loss = 4.0 * math.exp(-step / 40)
        if generator is not None and outcome in ("degraded", "started over") and step > 30:
            loss += generator.gauss(0.02, 0.02)
        if outcome == "committed bad values" and step > 30:
            loss = math.nan
        if outcome in ("hung", "all ranks died") and step > 30:
            break
        series.append((step, loss))
    return tuple(series)


def metric(
    unit: str, values: list[float], better: str = "lower", of: int | None = None
) -> Metric | None:
    """A metric over ``values``, of so many trials; None without any."""
    if not values:
        return None
    return Metric(
        unit=unit,
        values=values,
        n=len(values),
        median=statistics.median(values),
        min=min(values),
        max=max(values),
        ci95=median_ci95(values),
        better=better,
        of=of,
    )


def _cell(trials: list[Trial], label: str, family: str) -> CellSummary:
    mine = [t for t in trials if (t.label, t.family) == (label, family)]
    order = list(_WITNESS)
    found = [t.outcome for t in mine] or ["not offered"]
    worst: OutcomeClass = max(found, key=order.index)  # type: ignore[assignment]
    lost = [t.recovery * t.ranks / 3600 for t in mine if t.recovery is not None]
    shown = [t.phases for t in mine if t.phases]
    return CellSummary(
        label=label,
        family=family,
        n=len(mine),
        worst=worst,
        witness=_WITNESS[worst],
        outcomes={o: found.count(o) for o in dict.fromkeys(found)} if mine else {},
        recovery=metric("s", [t.recovery for t in mine if t.recovery is not None], of=len(mine)),
        full_rate=metric("s", [t.full_rate for t in mine if t.full_rate is not None], of=len(mine)),
        redundancy=metric(
            "s", [t.redundancy for t in mine if t.redundancy is not None], of=len(mine)
        ),
        detection=metric("s", [t.detection for t in mine if t.detection is not None]),
        goodput=metric("ratio", [t.goodput for t in mine if t.goodput is not None], "higher"),
        steps_lost=metric("steps", [float(t.steps_lost) for t in mine]),
        samples_lost=metric(
            "samples", [float(t.samples_lost) for t in mine if t.samples_lost is not None]
        ),
        overhead=metric(
            "ratio", [1.0 + 0.03 * len(label) / 10 + 0.01 * k for k in range(len(mine))]
        ),
        phases={s.name: s.seconds for s in shown[0]} if shown else {},
        outliers=outliers({t.seed: t.recovery for t in mine if t.recovery is not None}),
        cost_gpu_hours=statistics.median(lost) if lost else None,
        note="this stack keeps no checkpoints" if worst == "not offered" else "",
        survival=survival_of([t for t in mine if t.outcome not in SAYS_NOTHING]),
        ettr=metric("ratio", [t.ettr for t in mine if t.ettr is not None], "higher", of=len(mine)),
    )


def _ratio(trials: list[Trial], label: str, family: str) -> Ratio | None:
    def times(name: str) -> dict[int, float]:
        mine = [t for t in trials if t.label == name and family in (EVERY, t.family)]
        place = list(FAMILIES).index
        return {place(t.family) * 1000 + t.seed: t.recovery for t in mine if t.recovery is not None}

    ours, theirs = times(REFERENCE), times(label)
    value, interval, says = paired_ratio(ours, theirs)
    n = len(ours.keys() & theirs.keys())
    if not n:
        return None
    open_ = says in ("too few", "no difference shown")
    return Ratio(
        label=label,
        against=REFERENCE,
        family=family,
        metric="recovery",
        n=n,
        value=value,
        interval=interval,
        says=says,
        needed=repetitions_needed(ours, theirs) if open_ else None,
    )
