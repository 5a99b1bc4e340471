"""Shrinks what shows a defect, while it shows the same: of a scenario fewer faults, options, steps
and ranks, and rounder numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from trainchaos.harness.fuzz.draw.draw import TRIGGERS, Tree, is_mesh

Path = tuple[str | int, ...]
Case = TypeVar("Case")
PARTS: tuple[Path, ...] = (
    ("workload",),
    ("launcher",),
    ("workload", "checkpoint"),
    ("recovery",),
    ("health",),
)
"""Parts of a scenario with options."""
NEEDED = frozenset(
    (
        *("kind", "ranks", "steps", "parallelism", "global_batch", "checkpoint", "every"),
        *("nodes", "strategy", "id", "at"),
    )
)
"""Keys of a job or a fault that cannot be left out."""


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
    """Scenarios that are one step smaller, largest steps first."""
    faults: list[Path] = [("faults", number) for number in range(len(tree["faults"]))]
    for fault in faults if len(faults) > 1 else ():
        yield _without(tree, fault)
    if "health" in tree:
        yield _without(tree, ("health",))
    for part in PARTS:
        yield from _less(tree, part, NEEDED)
    for fault in faults:
        yield from _less(tree, fault, NEEDED)
        yield from _less(tree, (*fault, "at"), TRIGGERS | {"until"})
        yield from _less(tree, (*fault, "params"))
        yield from _simpler_trigger(tree, (*fault, "at"))
    yield from _smaller_job(tree)
    for fault in faults:
        yield from _rounder(tree, fault)


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
            each = max(1, job["global_batch"] // job["ranks"])
            smaller["workload"]["global_batch"] = ranks * each
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
    path: Path = ("workload", "parallelism")
    shape = _at(tree, path)
    dims = ("shard", "pipeline", "context", "tensor", "replicate")
    yield from _less(tree, path, frozenset(dims))
    for dim in dims:
        for size in _lower(shape[dim], 1):
            smaller = _with(tree, (*path, dim), size)
            job = smaller["workload"]
            job["ranks"] = job["ranks"] // shape[dim] * size
            job["global_batch"] = max(job["ranks"], job["global_batch"])
            yield smaller


def _simpler_trigger(tree: Tree, path: Path) -> Iterator[Tree]:
    at = _at(tree, path)
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
    value = _at(tree, path)
    if isinstance(value, float):
        rounded = (round(value, digits) for digits in (0, 1, 2))
        for number in [number for number in rounded if number not in (value, 0.0)][:1]:
            yield _with(tree, path, number)
    elif isinstance(value, (Mapping, list)):
        for key in value if isinstance(value, Mapping) else range(len(value)):
            yield from _rounder(tree, (*path, key))


def _lower(value: int, least: int) -> list[int]:
    """The least value, half way to it, and one less."""
    return sorted(n for n in {least, (value + least) // 2, value - 1} if least <= n < value)


def _less(tree: Tree, path: Path, needed: frozenset[str] = frozenset()) -> Iterator[Tree]:
    """Without one of the other keys of a mapping, if it is there."""
    holder = _at(tree, path[:-1])
    if path[-1] in holder or isinstance(path[-1], int):
        for key in holder[path[-1]]:
            if key not in needed:
                yield _without(tree, (*path, key))


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _without(tree: Tree, path: Path) -> Tree:
    made = copy.deepcopy(tree)
    del _at(made, path[:-1])[path[-1]]
    return made


def _with(tree: Tree, path: Path, value: Any) -> Tree:
    made = copy.deepcopy(tree)
    _at(made, path[:-1])[path[-1]] = value
    return made
