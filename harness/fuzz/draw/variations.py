"""Variations of scenarios that reached something new: one part of a scenario is drawn again."""

from __future__ import annotations

import copy

from trainchaos.harness.fuzz.draw.draw import (
    MOST_FAULTS,
    Dice,
    Tree,
    World,
    checkpoint,
    fault_of,
    recovery_of,
    trigger,
)
from trainchaos.harness.fuzz.draw.stories import related

WAYS = ("another", "kind", "more", "related", "when", "recovery", "seed", "checkpoint")


def varied(tree: Tree, dice: Dice, world: World) -> Tree:
    """A variation of the scenario, which itself stays unchanged."""
    made: Tree = copy.deepcopy(tree)
    rng, faults = dice.rng, made["faults"]
    job = made["workload"]
    how = dice.pick("variation", WAYS)
    number = rng.randrange(len(faults))
    if how in ("another", "kind"):
        name = dice.pick("kind", sorted(world.kinds))
        other = fault_of(name, dice, world, made, number)
        at = other["at"] if how == "another" else faults[number]["at"]
        faults[number] = {**other, "at": at}
    elif how == "more" and len(faults) < MOST_FAULTS:
        name = dice.pick("kind", sorted(world.kinds))
        faults.append(fault_of(name, dice, world, made, len(faults)))
    elif how == "related" and len(faults) < MOST_FAULTS:
        related(dice, world, made)
    elif how == "when":
        one = faults[number]
        one["at"] = trigger(dice, one["kind"], world, job)
    elif how == "recovery":
        made["recovery"] = recovery_of(dice, world, made["workload"].get("parallelism", "ddp"))
    elif how == "checkpoint":
        job["checkpoint"] = checkpoint(dice, job["steps"])
    else:
        made["seed"] = rng.randrange(10_000)
    return made
