"""Random scenarios over everything that the format allows, as trees for YAML. Seeded; pure.

Options drawn rarely so far are preferred (``Dice.pick``). Impossible scenarios are not strictly
avoided: the loader refuses them, which is cheap, and refusals need testing too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel

from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.scenario.fault import PHASES, EventName
from trainchaos.harness.fuzz.draw.scale import SIMULATED, Scale
from trainchaos.harness.fuzz.draw.values import params_of
from trainchaos.recovery.policy.strategy import Strategy

Tree = dict[str, Any]

MOST_FAULTS = 4
CHECKED = "place_checked"
EVENTS: tuple[str, ...] = tuple(name for name in get_args(EventName) if name != CHECKED)
"""Those of every job."""
SHAPES = ("ddp", "fsdp", "hsdp", "mesh")
NEEDS = ("recovery_started", "regroup", "restore", "recovered")
"""Events of a job in which something failed before."""
RESTORES = ("checkpoint-restart",)
"""Strategies that restore a checkpoint after any failure."""
ROOM = 16
"""Steps that are left after most faults: a verdict needs some that are healthy."""
SAVES = 30
"""Steps in which a job that saves by time does."""
BEFORE = 4
"""Steps before, and between, faults that last."""
CHECK = 100
"""Steps in which a place is checked."""
ALONE = ("collective-skip",)
"""Kinds that show of one rank only: of several that hang, one is declared hung."""
TRIGGERS = frozenset(("step", "steps", "from", "time", "event", "mtbf", "weibull"))
"""Keys of a fault's ``at``; each has one of them."""
LATE = 0.02
"""Share of faults for which none need to be left, and of those before which none need to be."""
SELDOM = 0.7
"""How strongly rarely drawn options are preferred: 0 not at all, 1 in proportion."""


@dataclass(kw_only=True)
class Dice:
    """Random choices of one search. ``seen``: (axis, option) -> how often it was chosen in the
    search.
    """

    rng: random.Random
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def pick(self, axis: str, options: Sequence[Any]) -> Any:
        """One of the options; rarely chosen ones are more likely."""
        weights = [1.0 / (1 + self.seen[axis, str(option)]) ** SELDOM for option in options]
        chosen = self.rng.choices(options, weights)[0]
        self.seen[axis, str(chosen)] += 1
        return chosen

    def chance(self, share: float) -> bool:
        """True with probability ``share``."""
        return self.rng.random() < share


@dataclass(frozen=True, kw_only=True)
class World:
    """The options to draw from: plugins by name, the requested strategy (None: any), and the
    launcher and scale of the jobs.
    """

    kinds: Mapping[str, type[Fault]]
    strategies: Mapping[str, type[Strategy]]
    strategy: str | None = None
    launcher: str = "sim"
    scale: Scale = SIMULATED

    @property
    def real(self) -> bool:
        """Whether real processes train."""
        return self.launcher != "sim"

    def params(self, model: type[BaseModel], dice: Dice) -> Tree:
        """Parameters of a plugin."""
        return params_of(model, dice.rng, self.scale.most, self.scale.least)


def scenario(dice: Dice, world: World) -> Tree:
    """A whole scenario, with unrelated faults."""
    made = job(dice, world)
    count = int(dice.pick("faults", (1, 1, 1, 2, 2, 3, MOST_FAULTS)))  # several hide one another
    if count > 1:
        long_enough(made, dice, world)
    names = [dice.pick("kind", sorted(world.kinds)) for _ in range(count)]
    if dice.chance(0.8):  # what lasts shows beside earlier steps of the same processes
        names.sort(key=lambda name: not world.kinds[name].lasting)
    workload, recovery = made["workload"], made["recovery"]
    for number, name in enumerate(names):
        part = number / count, (number + 1) / count
        made["faults"].append(fault_of(name, dice, world, made, number, part=part))
    checks_of_places(made, dice)
    for one in made["faults"]:
        if one["at"].get("event") == "restore" and recovery["strategy"] not in RESTORES:
            one["at"]["event"] = "recovered"
    shape = workload["parallelism"]
    copies = workload["ranks"] if shape == "ddp" else replicas_of(shape)
    if "health" in made and copies > 2 and dice.chance(0.8):  # of two nobody knows which is wrong
        made["faults"][-1]["at"] = {"event": CHECKED, "nth": 1}
        made["faults"].append(_first_failure(workload, dice, "replica-desync"))
        workload["steps"] += CHECK
    elif any(one["at"].get("event") in NEEDS for one in made["faults"]):
        made["faults"].append(_first_failure(workload, dice, "process-kill"))
    made["seed"] = dice.rng.randrange(10_000)
    return made


def long_enough(made: Tree, dice: Dice, world: World) -> None:
    """Enough steps for all faults, in the upper part of the range."""
    least, most = world.scale.steps
    made["workload"]["steps"] = dice.rng.randint((least + most) // 2, most)


def _first_failure(workload: Tree, dice: Dice, kind: str) -> Tree:
    """What the events of a recovery need, or of a check of a place."""
    at = {"step": dice.rng.randint(1, max(1, workload["steps"] // 2))}
    target = {"rank": dice.rng.randrange(workload["ranks"])}
    return {"id": "first", "kind": kind, "target": target, "at": at}


def checks_of_places(made: Tree, dice: Dice) -> None:
    """In some jobs suspect places are checked."""
    if dice.chance(0.15):
        made["health"] = {"preflight_rejoins": True}
        if dice.chance(0.5):
            made["health"]["taint_alarms"] = True


def job(dice: Dice, world: World) -> Tree:
    """A scenario without faults, and with a placeholder seed."""
    rng, scale = dice.rng, world.scale
    ranks, shape = _shape(dice, scale.ranks)
    steps = rng.randint(*scale.steps)
    nodes = dice.pick("nodes", [n for n in scale.nodes if n <= ranks])
    workload: Tree = {
        "kind": "gpt" if is_mesh(shape) else "mlp",
        "ranks": ranks,
        "steps": steps,
        "parallelism": shape,
        "global_batch": ranks * rng.randint(1, 6)
        + (rng.randrange(ranks) if dice.chance(0.2) and not world.real else 0),
        "checkpoint": checkpoint(dice, steps),
    }
    if dice.chance(0.3):
        sums = ("default", "elastic") if shape == "ddp" else ("default",)
        workload["determinism"] = dice.pick("determinism", sums)
    elif world.real:  # by default a second pair of arms may be played beside the first
        workload["determinism"] = "default"
    if dice.chance(0.2):
        workload["verify_every"] = dice.pick("verify_every", (0, 1, 5))
    if dice.chance(0.15):
        workload["evaluate"] = {
            "every": rng.randint(1, steps),
            "takes": round(rng.uniform(0.05, scale.evaluates_s), 2),
        }
    recovery = recovery_of(dice, world, shape)
    place = {"kind": world.launcher, "nodes": nodes}
    if nodes > 1 and dice.chance(0.3):
        place["nodes_per_rack"] = rng.randint(1, nodes)
    return {
        "version": 1,
        "name": "fuzz",
        "seed": 0,
        "launcher": place,
        "workload": workload,
        "recovery": recovery,
        "faults": [],
        "stop_conditions": [{"when": f"no_committed_step_for > {scale.still_s}s"}],
    }


def is_mesh(shape: Any) -> bool:
    """Whether a model is spread over a mesh, which one kind of workload supports."""
    return isinstance(shape, dict) and "hsdp" not in shape


def replicas_of(shape: Any) -> int:
    """Copies of the model; 0 where the shape does not say so."""
    if not isinstance(shape, dict):
        return 0
    return int(shape["replicate"] if is_mesh(shape) else shape["hsdp"]["replicas"])


def parts_of(shape: Any) -> int:
    """Ranks that hold one copy of the model together; 0 where the shape does not say so."""
    if not isinstance(shape, dict):
        return 0
    if not is_mesh(shape):
        return int(shape["hsdp"]["shards"])
    return math.prod(int(shape.get(dim, 1)) for dim in ("shard", "pipeline", "context", "tensor"))


def _shape(dice: Dice, sizes: Sequence[int]) -> tuple[int, Any]:
    """The number of ranks, and how the model is spread over them."""
    most = max(sizes)
    word = dice.pick("parallelism", SHAPES)
    if word == "mesh":
        return _mesh(dice, most)
    if word != "hsdp":
        return dice.rng.choice(sizes), word
    shards = dice.rng.randint(1, min(3, most // 2))
    replicas = dice.rng.randint(2, most // shards)
    return replicas * shards, {"hsdp": {"replicas": replicas, "shards": shards}}


def _mesh(dice: Dice, most: int) -> tuple[int, Any]:
    """Dimensions of a mesh of at most so many ranks, one of them above 1."""
    rng = dice.rng
    grids = [
        {"shard": shard, "pipeline": stages, "context": parts, "tensor": tensor}
        for shard in (1, 2)
        for stages in (1, 2, 3)
        for parts in (1, 2)
        for tensor in (1, 2, 4)
        if 1 < shard * stages * parts * tensor <= most
    ]
    shape: Tree = dict(dice.pick("mesh", grids))
    cells = math.prod(shape.values())
    shape["replicate"] = rng.randint(1, most // cells)
    if shape["pipeline"] > 1:
        shape["schedule"] = dice.pick("schedule", ("1f1b", "gpipe"))
        shape["microbatches"] = rng.randint(1, 5)
    return shape["replicate"] * cells, shape


def checkpoint(dice: Dice, steps: int) -> Tree:
    """How often, how and where a job saves."""
    rng = dice.rng
    most = steps if dice.chance(0.1) else steps // 4  # faults of saves need some
    made: Tree = {"every": rng.randint(1, most), "keep": rng.randint(1, 3)}
    if dice.chance(0.15):
        made["every"] = dice.pick("every", ("auto", "1s", "0.3s"))
    if dice.chance(0.3):
        made["mode"] = dice.pick("mode", ("sync", "async"))
    if dice.chance(0.2):
        made["sharded"] = True
    if dice.chance(0.15):
        made["delta"] = rng.randint(2, 5)
    if dice.chance(0.3):
        kinds = (True, {"every": 3}, {"every": 1, "replicate": False}, {"every": "auto"})
        made["memory"] = dice.pick("memory", (*kinds, {"every": "0.2s"}))
    return made


def recovery_of(dice: Dice, world: World, shape: Any) -> Tree:
    """A strategy with its parameters. ``shape``: how the model is spread; spares rehearse whole
    models only, and follow each part of one of which there are several copies.
    """
    names = (
        [world.strategy]
        if world.strategy
        else [name for name in world.strategies if name != "none"]
    )
    name = dice.pick("strategy", names)
    made = {"strategy": name, **world.params(world.strategies[name], dice)}
    if shape != "ddp" and "rehearse" in made:
        made["rehearse"] = False
    if shape != "ddp" and made.get("sync") == "live":
        parts = parts_of(shape)
        if replicas_of(shape) > 1 and parts <= world.scale.most["spares"]:
            made["spares"] = max(made.get("spares", 1), parts)
        else:
            made["sync"] = "none"
    return made


def fault_of(
    name: str,
    dice: Dice,
    world: World,
    scenario: Tree,
    number: int,
    *,
    part: tuple[float, float] = (0.0, 1.0),
) -> Tree:
    """One fault of the kind ``name`` for a scenario. ``part``: of the steps in which it could
    strike.
    """
    kind, workload, scale = world.kinds[name], scenario["workload"], world.scale
    lasts = kind.lasting or (kind.may_last and dice.chance(0.4))
    duration = _duration(dice, kind, workload, scale) if lasts else None
    steps = _in_steps(duration, scale)
    at = trigger(dice, name, world, workload, lasts_steps=steps, part=part)
    made: Tree = {"id": f"f{number}", "kind": name, "at": at}
    if params := world.params(kind, dice):
        made["params"] = params
    if target := _target(dice, kind, name, scenario):
        made["target"] = target
    if duration is not None:
        made["duration"] = duration
    if dice.chance(0.1):
        made["retrigger"] = dice.pick("retrigger", ({"max": 2}, {"max": 4}))
    return made


def _duration(dice: Dice, kind: type[Fault], workload: Tree, scale: Scale) -> Any:
    """Long enough to show, in most cases: of what acts on saves, until there was one."""
    rng, every = dice.rng, workload["checkpoint"]["every"]
    if kind.on_saves:
        return {"steps": (every if isinstance(every, int) else SAVES) + rng.randint(1, 4)}
    if kind.seems_still or (dice.chance(0.3) and not kind.harmless):
        return round(rng.uniform(*(scale.hides_s if kind.seems_still else scale.lasts_s)), 3)
    return {"steps": rng.randint(5, 9)}


def _in_steps(duration: Any, scale: Scale) -> int:
    if isinstance(duration, dict):
        return int(duration["steps"])
    return math.ceil(min(duration or 0.0, scale.lasts_s[1]) / scale.step_s)


def trigger(
    dice: Dice,
    name: str,
    world: World,
    workload: Tree,
    *,
    lasts_steps: int = 0,
    part: tuple[float, float] = (0.0, 1.0),
) -> Tree:
    """When a fault of a kind strikes. ``lasts_steps``: about how many steps it lasts; ``part``: of
    the steps in which it could strike.
    """
    kind, scale, steps = world.kinds[name], world.scale, int(workload["steps"])
    rng, last = dice.rng, max(1, steps - ROOM - lasts_steps)
    # what lasts shows beside steps without it, and by its end
    first, apart, most = (min(last, BEFORE), lasts_steps + BEFORE, 1) if lasts_steps else (1, 1, 3)
    on_saves = kind.on_saves or kind.where is Where.CHECKPOINT
    if on_saves and isinstance(every := workload["checkpoint"]["every"], int):
        first = min(last, every + 2)  # there was one before
    first, last = (first + math.floor(share * (last - first)) for share in part)
    if dice.chance(LATE):
        first = 1
    how = dice.pick("trigger", ("step", "step", "steps", "row", "time", "event", "mtbf", "weibull"))
    if (first > 1 or kind.relentless) and how in ("mtbf", "weibull") and dice.chance(0.8):
        how = "time"  # those may strike at once
    if part[0] > 0 and how in ("time", "mtbf", "weibull") and dice.chance(0.8):
        how = dice.pick("trigger", ("step", "steps", "row"))  # recoveries before it take time
    if dice.chance(LATE):
        last = steps
    lasts_s = last * scale.step_s
    at: Tree
    if how == "step":
        some = rng.randint(first, last), rng.randint(first, last)
        at = {"step": dice.pick("place", (first, min(last, first + 1), last, *some))}
    elif how == "steps":
        there = range(first, last + 1, apart)
        at = {"steps": sorted(rng.sample(there, rng.randint(1, min(3, len(there)))))}
    elif how == "row":
        begin = rng.randint(first, last)
        at = {
            "from": begin,
            "until": rng.randint(begin, last),
            "every": rng.randint(apart, apart + 7),
        }
    elif how == "time":
        at = {"time": round(rng.uniform(first * scale.step_s, lasts_s), 3)}
    elif how == "event":
        at = _event(dice, first, last, lasts=lasts_steps > 0)
    elif how == "mtbf":
        at = {"mtbf": round(rng.uniform(0.05, 0.25) * lasts_s, 3), "max": rng.randint(1, most)}
    else:
        mean = round(rng.uniform(0.05, 0.25) * lasts_s, 3)
        at = {"weibull": {"mean": mean, "shape": rng.choice((0.7, 1.5))}, "max": min(2, most)}
    if how in ("step", "steps", "row"):
        at |= phase(dice, name, kind)
    if dice.chance(0.03):
        at["probability"] = 0.8
    return at


def _event(dice: Dice, first: int, last: int, *, lasts: bool) -> Tree:
    """An event. What lasts shows beside earlier steps of the same processes."""
    healthy = lasts and dice.chance(0.8)
    event = dice.pick("event", [one for one in EVENTS if not healthy or one not in NEEDS])
    nth = 1 if event in NEEDS else dice.rng.choice((1, 1, 1, 1, 2))
    # the nth batch is taken in step n
    return {"event": event, "nth": dice.rng.randint(first, last) if event == "data" else nth}


def phase(dice: Dice, name: str, kind: type[Fault]) -> Tree:
    """A phase of the step, in most cases."""
    return (
        {"phase": dice.pick(f"phase of {name}", kind.phases or PHASES)} if dice.chance(0.7) else {}
    )


def _target(dice: Dice, kind: type[Fault], name: str, scenario: Tree) -> Tree:
    rng, workload, nodes = dice.rng, scenario["workload"], scenario["launcher"]["nodes"]
    ranks = workload["ranks"]
    if kind.where is Where.CHECKPOINT:
        every = workload["checkpoint"]["every"]
        named = isinstance(every, int) and dice.chance(0.1)
        return {"checkpoint": {"step": every} if named else "latest"}
    if kind.where in (Where.STORAGE, Where.STORE, Where.COORDINATOR):
        return {}
    if kind.on_saves and not workload["checkpoint"].get("sharded"):
        return {"rank": 0}
    if kind.where is Where.NODE:
        used = -(-ranks // -(-ranks // nodes))  # the last may be empty
        one: Tree = {"node": rng.randrange(used)}
        return {"select": "one"} if used == nodes and dice.chance(0.5) else one
    if kind.where is Where.LINK and dice.chance(0.4):
        src, dst = rng.sample(range(ranks), 2)
        return {"link": {"src": src, "dst": dst} if dice.chance(0.7) else {"src": src}}
    if (kind.seems_still or name in ALONE) and dice.chance(0.9):
        return {"rank": rng.randrange(ranks)}
    shape = workload["parallelism"]
    if name == "data-corrupt" and is_mesh(shape):  # not all ranks of a copy take data
        return {"rank": parts_of(shape) * rng.randrange(replicas_of(shape))}
    how = dice.pick("target", ("rank", "rank", "select", "replica", "node", "spare", "any"))
    if how == "replica" and (replicas := replicas_of(shape)):
        return {"replica": rng.randrange(replicas)}
    if how == "select":
        several = (
            "one",
            "all",
            "minority",
            "majority",
            {"count": rng.randint(1, ranks)},
            {"percent": 50},
        )
        return {"select": dice.pick("select", several)}
    if how == "node" and nodes > 1:
        return {"node": rng.randrange(nodes), "select": "all"}
    if (
        how in ("spare", "any")
        and scenario["recovery"]["strategy"] == "hot-spare"
        and kind.where is Where.PROCESS
    ):
        return {"role": how, "select": "one" if dice.chance(0.7) else "all"}
    return {"rank": rng.randrange(ranks)}
