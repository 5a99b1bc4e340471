"""Shrinks a scenario that shows a defect, while it shows the same: fewer faults, options, steps and
ranks, rounder numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from trainchaos.harness.fuzz.draw.draw import is_mesh

Tree = dict[str, Any]
Path = tuple[str | int, ...]
Case = TypeVar("Case")

OPTIONAL: tuple[Path, ...] = (
    ("workload", "determinism"),
    ("workload", "verify_every"),
    ("workload", "evaluate"),
    ("launcher", "nodes_per_rack"),
    ("health",),
    ("health", "taint_alarms"),
    ("workload", "checkpoint", "delta"),
    ("workload", "checkpoint", "sharded"),
    ("workload", "checkpoint", "memory"),
    ("workload", "checkpoint", "mode"),
    ("workload", "checkpoint", "keep"),
)
OF_A_FAULT: tuple[Path, ...] = (
    ("retrigger",),
    ("at", "probability"),
    ("at", "phase"),
    ("at", "nth"),
    ("at", "every"),
    ("at", "max"),
    ("duration",),
    ("params",),
    ("target",),
)


def shrunk(
    case: Case, shows: Callable[[Case], bool], smaller: Callable[[Case], Iterator[Case]], most: int
) -> tuple[Case, int]:
    """The smallest case found, and how many were tried, at most ``most``. ``shows``: whether a case
    still shows the defect; ``smaller``: cases that are one step smaller.
    """
    tried, known, again = 0, {repr(case)}, True
    while again:
        again = False
        for candidate in smaller(case):
            if repr(candidate) in known:
                continue
            known.add(repr(candidate))
            if tried >= most:
                return case, tried
            tried += 1
            if shows(candidate):
                case, again = candidate, True
                break
    return case, tried


def smaller_than(tree: Tree) -> Iterator[Tree]:
    """Trees that are one step smaller, largest steps first."""
    faults = range(len(tree["faults"]))
    for number in faults if len(faults) > 1 else ():
        yield _without(tree, ("faults", number))
    for path in OPTIONAL:
        yield from _if_there(tree, path)
    for name in [name for name in tree["recovery"] if name != "strategy"]:
        yield from _if_there(tree, ("recovery", name))
    for number in faults:
        for path in OF_A_FAULT:
            yield from _if_there(tree, ("faults", number, *path))
        for name in tree["faults"][number].get("params", {}):
            yield from _if_there(tree, ("faults", number, "params", name))
        yield from _simpler_trigger(tree, number)
    yield from _smaller_job(tree)
    for number in faults:
        yield from _rounder(tree, ("faults", number))


def _smaller_job(tree: Tree) -> Iterator[Tree]:
    job = tree["workload"]
    if job["parallelism"] != "ddp":
        yield _with(tree, ("workload", "parallelism"), "ddp")
    if is_mesh(job["parallelism"]):
        yield from _smaller_mesh(tree)
    elif job["kind"] != "mlp":
        yield _with(tree, ("workload", "kind"), "mlp")
    for nodes in _lower(tree["launcher"].get("nodes", 1), 1):
        yield _with(tree, ("launcher", "nodes"), nodes)
    if isinstance(job["parallelism"], str):
        for ranks in _lower(job["ranks"], 2):
            smaller = _with(tree, ("workload", "ranks"), ranks)
            smaller["workload"]["global_batch"] = ranks * max(
                1, job["global_batch"] // job["ranks"]
            )
            yield smaller
        if job["global_batch"] != job["ranks"]:
            yield _with(tree, ("workload", "global_batch"), job["ranks"])
    for steps in _lower(job["steps"], 4):
        yield _with(tree, ("workload", "steps"), steps)
    every = job["checkpoint"].get("every")
    for value in _lower(every, 1) if isinstance(every, int) else (5,):
        yield _with(tree, ("workload", "checkpoint", "every"), value)
    if tree["seed"] != 0:
        yield _with(tree, ("seed",), 0)


def _smaller_mesh(tree: Tree) -> Iterator[Tree]:
    shape = tree["workload"]["parallelism"]
    for name in ("schedule", "microbatches"):
        yield from _if_there(tree, ("workload", "parallelism", name))
    for dim in ("shard", "pipeline", "context", "tensor", "replicate"):
        for size in _lower(shape[dim], 1):
            smaller = _with(tree, ("workload", "parallelism", dim), size)
            job = smaller["workload"]
            job["ranks"] = job["ranks"] // shape[dim] * size
            job["global_batch"] = max(job["ranks"], job["global_batch"])
            yield smaller


def _simpler_trigger(tree: Tree, number: int) -> Iterator[Tree]:
    path, at = ("faults", number, "at"), tree["faults"][number]["at"]
    rest = {key: value for key, value in at.items() if key == "phase"}
    if len(at.get("steps", ())) > 1:
        for index in range(len(at["steps"])):
            yield _without(tree, (*path, "steps", index))
    elif "steps" in at:
        yield _with(tree, path, {"step": at["steps"][0], **rest})
    if "from" in at:
        yield _with(tree, path, {"step": at["from"], **rest})
        for until in _lower(at["until"], at["from"]):
            yield _with(tree, (*path, "until"), until)
    if at.keys() & {"mtbf", "weibull"}:
        yield _with(tree, path, {"time": 0.5})
    if "time" in at or "event" in at:
        yield _with(tree, path, {"step": max(1, tree["workload"]["steps"] // 2)})
    for step in _lower(at["step"], 1) if "step" in at else ():
        yield _with(tree, (*path, "step"), step)


def _rounder(tree: Tree, path: Path) -> Iterator[Tree]:
    """Every number below a path, with fewer digits."""
    for inner, value in _numbers(_at(tree, path), path):
        if isinstance(value, float):
            for digits in (0, 1, 2):
                if (rounded := round(value, digits)) not in (value, 0.0):
                    yield _with(tree, inner, rounded)
                    break


def _numbers(value: Any, path: Path) -> Iterator[tuple[Path, int | float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, (*path, index))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def _lower(value: int, least: int) -> Iterator[int]:
    """The least value, half way to it, and one less."""
    yield from sorted(
        {number for number in (least, (value + least) // 2, value - 1) if least <= number < value}
    )


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _if_there(tree: Tree, path: Path) -> Iterator[Tree]:
    try:
        _at(tree, path)
    except (KeyError, TypeError):
        return
    yield _without(tree, path)


def _without(tree: Tree, path: Path) -> Tree:
    made = copy.deepcopy(tree)
    del _at(made, path[:-1])[path[-1]]
    return made


def _with(tree: Tree, path: Path, value: Any) -> Tree:
    made = copy.deepcopy(tree)
    _at(made, path[:-1])[path[-1]] = value
    return made
