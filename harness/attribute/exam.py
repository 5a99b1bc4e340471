"""The questions of an exam: every kind of fault at several places, phases and strategies, as
scenarios. Seeded; pure.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.scenario.fault import PHASES

Tree = dict[str, Any]

RANKS = 4
STEPS = 60
EARLIEST, LATEST = 22, 38
"""Steps at which a fault strikes: after the first checkpoint (step 20, or 10), and early enough
that it lasts and is recovered from before the end.
"""
SAVED_AT = 40
"""A step after which every job here saves, for faults that strike in a save."""
UNFAULTED = "unfaulted"
"""The kind of a question in which nothing happens."""
STRATEGIES = ("hot-spare", "drop-replica", "checkpoint-restart")


class ExamError(ChaosError):
    """An exam that cannot be made: an unknown kind or strategy. Exit code 2."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to ask for a kind. ``params``, ``target``, ``duration``, ``at``: as in a scenario
    (None: chosen by the kind's place, with the seed); ``workload``: laid over the job's;
    ``launcher``: its nodes; ``kill``: another rank is killed this many steps later, or at the same
    moment (0), because the fault shows only in a recovery (None: no kill); ``spares``: waiting
    processes (None: the strategy's own number).
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    target: Mapping[str, Any] | None = None
    duration: Any = None
    at: Mapping[str, Any] | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 2
    nodes_per_rack: int | None = None
    kill: int | None = None
    spares: int | None = None
    strategies: tuple[str, ...] = STRATEGIES


@dataclass(frozen=True, kw_only=True)
class Question:
    """One run of an exam. ``id``: ``q0001``...; ``kind``: of the fault asked for, or ``unfaulted``;
    ``tree``: the scenario, as for YAML.
    """

    id: str
    kind: str
    strategy: str
    tree: Tree


def _saves(every: int) -> Mapping[str, Any]:
    return {"checkpoint": {"every": every, "keep": 3}}


_HOLD: Mapping[str, Any] = MappingProxyType({"hold_s": 60})
_REPAIRED = {"steps": 12}

VARIANTS: Mapping[str, tuple[Variant, ...]] = MappingProxyType(
    {
        "checkpoint-corrupt": (
            Variant(
                params={"mode": "bitflip"},
                target={"checkpoint": "latest"},
                at={"event": "checkpoint_committed", "nth": 2},
                workload=_saves(10),
                kill=0,
                strategies=("checkpoint-restart",),
            ),
            Variant(
                params={"mode": "torn", "stage": "manifest"},
                target={"checkpoint": "latest"},
                workload=_saves(10),
            ),
        ),
        "clock-skew": (
            Variant(params={"offset_s": 3600, "direction": "back"}, duration=_REPAIRED),
        ),
        "coordinator-kill": (Variant(params={"down_s": 0.5}),),
        "data-corrupt": (Variant(params={"shift": 3}),),
        "data-stall": (
            Variant(params={"delay_s": 0.15}, duration=_REPAIRED),
            Variant(params={"delay_s": 600}, duration=_REPAIRED),
        ),
        "disk-full": (Variant(duration={"steps": 15}, workload=_saves(10)),),
        "gil-deadlock": (Variant(params=_HOLD),),
        "gpu-hang": (Variant(params=_HOLD),),
        "health-event": (
            Variant(params={"what": "xid", "code": 48}),
            Variant(params={"what": "xid", "code": 79}),
            Variant(params={"what": "xid", "code": 94}),
            Variant(params={"what": "thermal", "code": 96}),
        ),
        "heartbeat-drop": (Variant(duration=30),),
        "io-error": (
            Variant(
                params={"error": "EIO"},
                target={"rank": 0},
                duration={"steps": 15},
                workload=_saves(5),
            ),
            Variant(
                params={"error": "ESTALE"},
                target={"rank": 0},
                duration={"steps": 15},
                workload=_saves(5),
            ),
        ),
        "io-slow": (
            Variant(
                params={"delay_s": 0.05},
                target={"rank": 0},
                duration={"steps": 20},
                workload=_saves(5),
            ),
        ),
        "link-delay": (Variant(params={"delay_ms": 15, "jitter_ms": 3}, duration=_REPAIRED),),
        "link-flap": (Variant(params={"down_s": 0.3, "up_s": 0.5}, duration=1.4),),
        "link-loss": (Variant(params={"percent": 10}, duration=_REPAIRED),),
        "link-throttle": (
            Variant(params={"mbit_per_s": 5, "method": "links"}, duration=_REPAIRED),
        ),
        "node-isolate": (Variant(duration=4),),
        "node-slow": (Variant(params={"cores": 0.25}, duration=_REPAIRED),),
        "partition": (
            Variant(duration=4),
            Variant(params={"one_way": True}, duration=4),
            Variant(target={"select": {"count": 2}}, duration=4),
        ),
        "process-term": (Variant(params={"grace_s": 10}), Variant(params={"grace_s": 0.05})),
        "rack-kill": (Variant(target={"rack": 1}, nodes=4, nodes_per_rack=2, spares=4),),
        "rank-hang": tuple(
            Variant(params={"how": how, **_HOLD}) for how in ("sleep", "spin", "kernel")
        ),
        "read-only": (Variant(duration={"steps": 15}, workload=_saves(10)),),
        "replica-desync": (Variant(workload={"verify_every": 5}),),
        "spare-kill": (Variant(strategies=("hot-spare",)),),
        "store-kill": (Variant(), Variant(at={"event": "regroup"}, kill=0)),
        "store-latency": (Variant(params={"latency_ms": 500}, duration=3, kill=2),),
        "straggler": (Variant(params={"factor": 3}, duration=_REPAIRED),),
        "tensor-corrupt": (
            Variant(params={"surface": "gradient", "op": "nan"}),
            Variant(params={"surface": "activation", "op": "inf"}),
            Variant(params={"surface": "parameter", "op": "nan"}),
            Variant(params={"surface": "parameter", "op": "bitflip", "bit": 21}),
            Variant(params={"surface": "gradient", "op": "stale", "count": 100}),
        ),
    }
)
"""How kinds are asked for whose defaults would say nothing, or are not complete."""


def variants_of(kind: str) -> tuple[Variant, ...]:
    """The ways to ask for a kind: those above, or one with the kind's own defaults."""
    return VARIANTS.get(kind, (Variant(),))


def questions(
    kinds: Mapping[str, type[Fault]],
    *,
    names: Sequence[str],
    strategies: Sequence[str],
    runs: int,
    seed: int,
    launcher: str = "sim",
    unfaulted: int = 0,
) -> list[Question]:
    """An exam: for each kind of ``names``, each variant and each strategy, ``runs`` questions at
    places drawn from the seed; then ``unfaulted`` runs in which nothing happens. In an order drawn
    from the seed, so that numbers tell nothing. Raises ExamError.
    """
    _refuse_unknown("kind", names, kinds)
    _refuse_unknown("strategy", strategies, STRATEGIES)
    rng = random.Random(f"exam {seed}")
    made: list[tuple[str, str, Tree]] = []
    for name in names:
        for variant in variants_of(name):
            for strategy in strategies:
                if strategy in variant.strategies:
                    for _ in range(runs):
                        tree = _tree(name, kinds[name], variant, strategy, launcher, rng)
                        made.append((name, strategy, tree))
    for number in range(unfaulted):
        strategy = strategies[number % len(strategies)]
        tree = _job(Variant(), strategy, launcher, rng)
        made.append((UNFAULTED, strategy, tree))
    rng.shuffle(made)
    return [
        Question(id=f"q{number:04}", kind=kind, strategy=strategy, tree=tree)
        for number, (kind, strategy, tree) in enumerate(made, start=1)
    ]


def _refuse_unknown(
    what: str, asked: Sequence[str], known: Sequence[str] | Mapping[str, Any]
) -> None:
    for name in asked:
        if name not in known:
            raise ExamError(f"unknown {what} {name!r}", hint=f"one of {', '.join(sorted(known))}")


def _job(variant: Variant, strategy: str, launcher: str, rng: random.Random) -> Tree:
    place: Tree = {"kind": launcher, "nodes": variant.nodes}
    if variant.nodes_per_rack is not None:
        place["nodes_per_rack"] = variant.nodes_per_rack
    recovery: Tree = {"strategy": strategy}
    if variant.spares is not None and strategy == "hot-spare":
        recovery["spares"] = variant.spares
    return {
        "version": 1,
        "name": "exam",
        "seed": rng.randrange(1_000_000),
        "launcher": place,
        "workload": {
            "kind": "gpt",
            "size": "nano",
            "ranks": RANKS,
            "steps": STEPS,
            "global_batch": 16,
            "determinism": "default",
            "checkpoint": {"every": 20, "keep": 3},
            **variant.workload,
        },
        "recovery": recovery,
        "baseline": "none",
        "faults": [],
        "stop_conditions": [{"when": "no_committed_step_for > 60s"}],
    }


def _tree(
    name: str,
    kind: type[Fault],
    variant: Variant,
    strategy: str,
    launcher: str,
    rng: random.Random,
) -> Tree:
    tree = _job(variant, strategy, launcher, rng)
    step, rank = rng.randint(EARLIEST, LATEST), rng.randrange(RANKS)
    fault: Tree = {"id": "asked", "kind": name}
    if variant.params:
        fault["params"] = dict(variant.params)
    target = _target(kind, variant, rank, rng)
    if target:
        fault["target"] = target
    at: Tree = dict(variant.at) if variant.at else {"step": step}
    if "step" in at and kind.where in (Where.RANK, Where.PROCESS) and kind.role != "spare":
        at["phase"] = rng.choice(kind.phases or [one for one in PHASES if one != "any"])
        if at["phase"] == "checkpoint":
            at["step"] = SAVED_AT
    fault["at"] = at
    if variant.duration is not None:
        fault["duration"] = variant.duration
    tree["faults"].append(fault)
    if variant.kill is not None:
        tree["faults"].append(
            {
                "id": "kill",
                "kind": "process-kill",
                "target": {"rank": (rank + 1 + rng.randrange(RANKS - 1)) % RANKS},
                "at": {"step": step + variant.kill if variant.at is None else 25 + variant.kill},
            }
        )
    return tree


def _target(kind: type[Fault], variant: Variant, rank: int, rng: random.Random) -> Tree:
    if variant.target is not None:
        return dict(variant.target)
    match kind.where:
        case Where.PROCESS | Where.RANK | Where.HEALTH | Where.LINK if not (
            kind.role == "spare" or (kind.separates and kind.where is Where.NODE)
        ):
            return {"role": "worker", "select": "all"} if kind.everywhere else {"rank": rank}
        case Where.NODE:
            return {"node": rng.randrange(variant.nodes)}
        case _:
            return {}
