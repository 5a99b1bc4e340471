"""Checks that a scenario with a command asks only for what works on a program from outside."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainchaos.chaos.fault.base import Fault, Need, Where
from trainchaos.chaos.loading.explain import valid
from trainchaos.chaos.scenario.fault import FaultSpec, StepsDuration
from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.chaos.scenario.workload import COMMAND, ONLY_BUILT_IN, ONLY_COMMAND
from trainchaos.chaos.source.diagnostics import Loc, Problem

OWN = "own"
"""Recovery strategy of a command: the command's own."""
FROM_OUTSIDE = (Where.PROCESS, Where.NODE, Where.STORAGE, Where.CHECKPOINT)
NEEDS = frozenset({Need.NODES, Need.MOUNT})
SCRATCH = "$CHAOS_SCRATCH"
EVENTS = ("recovery_started", "regroup")
CAUSES = ("exit", "hang")
_GROUPS = {"regex": ("step", "step (?P<step>[0-9]+)"), "loss": ("loss", r"loss (?P<loss>\S+)")}
"""Key of workload.progress -> the group that its expression needs, and an example."""
POINTS = "workload.points: true, for a script that calls beacon.point"


def is_command(tree: Mapping[str, Any]) -> bool:
    """Whether a scenario's plain values give a command instead of a built-in workload."""
    workload = tree.get("workload")
    return isinstance(workload, dict) and workload.get("command") is not None


def of_commands(tree: dict[str, Any]) -> None:
    """Fill in what differs for a command: it recovers by itself, and is judged by what it shows."""
    if is_command(tree):
        tree.setdefault("recovery", OWN)
        tree.setdefault("invariants", "observable")


def place_directory(tree: dict[str, Any], directory_of: Callable[[Loc], Path]) -> None:
    """Make a command's directory relative to the file that sets it, or else to the file with the
    command.

    ``directory_of``: place in the tree -> directory of its file.
    """
    if is_command(tree):
        workload = tree["workload"]
        given = workload.get("directory", ".")
        if isinstance(given, str):
            key = "directory" if "directory" in workload else "command"
            workload["directory"] = os.path.normpath(directory_of(("workload", key)) / given)


def check_keys(workload: Any) -> Iterator[Problem]:
    """Keys that belong to the other sort of workload."""
    if not isinstance(workload, dict):
        return
    if workload.get("command") is None:
        for name in ONLY_COMMAND:
            if name in workload:
                message = f"{name} goes with a command, not with a built-in workload"
                yield Problem(("workload", name), message, on_key=True)
        if isinstance(workload.get("checkpoint"), dict) and "directory" in workload["checkpoint"]:
            message = (
                "a built-in workload's checkpoints lie in the run directory; only a command has a"
                " directory"
            )
            yield Problem(("workload", "checkpoint", "directory"), message, on_key=True)
        return
    if workload.get("kind", COMMAND) != COMMAND:
        message = "give a kind (a built-in workload) or a command, not both"
        yield Problem(("workload", "kind"), message, on_key=True)
    for name in ONLY_BUILT_IN:
        # where size was merged into
        if name in workload and not (name == "params" and "size" in workload):
            message = f"{name} is for built-in workloads: a command takes its own options"
            yield Problem(("workload", name), message, on_key=True)
    for name in (
        ("every", "keep", "mode", "sharded", "delta", "mtbf")
        if isinstance(workload.get("checkpoint"), dict)
        else ()
    ):
        if name in workload["checkpoint"]:
            message = f"a command decides {name} itself; say only its checkpoint.directory"
            yield Problem(("workload", "checkpoint", name), message, on_key=True)
    where = (
        workload["checkpoint"].get("directory")
        if isinstance(workload.get("checkpoint"), dict)
        else None
    )
    if isinstance(where, str) and (not where.startswith(SCRATCH) or ".." in where):
        message = (
            f"checkpoints that faults may touch lie in {SCRATCH}, the run's own:"
            f" {SCRATCH}/{where.lstrip('./')}"
        )
        yield Problem(("workload", "checkpoint", "directory"), message)
    for name, why in (("ranks", "how many ranks it starts"), ("steps", "how many steps it trains")):
        if name not in workload:
            message = f"{name!r} is missing in workload: a command does not tell {why}"
            yield Problem(("workload", "command"), message, on_key=True)
    yield from _words(workload)
    yield from _regex(workload.get("progress"))


def check_command(
    tree: Mapping[str, Any], faults: Mapping[str, type[Fault]], recovery: Any
) -> Iterator[Problem]:
    """Everything else that does not work with a command: launcher, recovery, faults that act inside
    a rank.
    """
    launcher = tree.get("launcher", "local")
    kind = launcher.get("kind", "local") if isinstance(launcher, dict) else launcher
    if kind != "local":
        loc: Loc = ("launcher", "kind") if isinstance(launcher, dict) else ("launcher",)
        why = "a simulation cannot run it" if kind == "sim" else f"{kind} cannot run it"
        yield Problem(loc, f"a command runs on this machine, as it is: {why}; use launcher: local")
    if recovery not in (OWN, {"strategy": OWN}, {"strategy": OWN, "params": {}}):
        message = "a command recovers by itself: leave recovery out (or say own)"
        yield Problem(("recovery",), message, on_key=True)
    given = tree.get("faults")
    points = tree["workload"].get("points") is True
    for index, raw in enumerate(given if isinstance(given, list) else ()):
        spec = valid(FaultSpec, raw)
        model = faults.get(spec.kind) if spec else None
        if spec is not None and model is not None:
            yield from _fault(spec, model, ("faults", index), faults, points)
            yield from _checkpoint(tree, spec, ("faults", index))


def _checkpoint(tree: Mapping[str, Any], spec: FaultSpec, loc: Loc) -> Iterator[Problem]:
    """Checkpoint files can be changed if their directory is known; their content is not known."""
    if spec.target.checkpoint is None:
        return
    given = tree["workload"].get("checkpoint")
    if not isinstance(given, dict) or "directory" not in given:
        message = (
            f"{spec.kind} needs to know where the checkpoints are: workload.checkpoint.directory"
        )
        yield Problem((*loc, "kind"), message)
    if spec.target.checkpoint != "latest":
        message = "the step of a command's checkpoint is unknown: use latest"
        yield Problem((*loc, "target", "checkpoint"), message)
    if spec.params.get("mode") in ("torn", "lose-unsynced"):
        message = (
            f"mode {spec.params['mode']} needs an agent in the rank; the other modes change files"
            " from outside"
        )
        yield Problem((*loc, "params", "mode"), message)


OF_LAUNCHERS = ("process-kill", "process-stop", "process-term")
"""What can be done to a launcher, of which no more is known than its process."""


def works_from_outside(model: type[Fault]) -> bool:
    """Whether a fault kind can be applied to a program without any hook inside it."""
    outside = model.where in FROM_OUTSIDE and model.needs <= NEEDS
    return outside and model.role != "spare"


def works_by_script(model: type[Fault]) -> bool:
    """Whether a script that calls ``beacon.point`` can apply the fault to itself."""
    return bool(model.by_script)


def _fault(
    spec: FaultSpec, model: type[Fault], loc: Loc, faults: Mapping[str, type[Fault]], points: bool
) -> Iterator[Problem]:
    if not works_from_outside(model) and not (points and works_by_script(model)):
        able = ", ".join(
            sorted(name for name, other in faults.items() if works_from_outside(other))
        )
        message = f"{spec.kind} cannot be done to a command from outside; what can: {able}"
        message += f". It can with {POINTS}" if works_by_script(model) else ""
        yield Problem((*loc, "kind"), message)
        return
    yield from _at_points(spec, model, loc, points)
    if spec.at.event is not None and spec.at.event not in EVENTS:
        message = (
            f"{spec.at.event} of a command cannot be seen from outside; {' and '.join(EVENTS)} can"
        )
        yield Problem((*loc, "at", "event"), message)
    if isinstance(spec.duration, StepsDuration):
        yield Problem(
            (*loc, "duration"), "a duration in steps needs an agent in the rank: give seconds"
        )
    if spec.target.role == "launcher" and spec.kind not in OF_LAUNCHERS:
        yield Problem(
            (*loc, "target", "role"), f"what can be done to a launcher: {', '.join(OF_LAUNCHERS)}"
        )
    if spec.target.role == "spare":
        yield Problem(
            (*loc, "target", "role"), "it is unknown which process of a command is a spare"
        )
    causes = (*CAUSES, "error") if points else CAUSES
    if spec.expect.detected_by not in (None, *causes):
        message = f"from outside a failure is seen as {' or '.join(causes)}"
        yield Problem((*loc, "expect", "detected_by"), message)
    if spec.expect.alarm is not None:
        message = (
            "health detectors read what built-in ranks log of their steps, which a command does not"
        )
        yield Problem((*loc, "expect", "alarm"), message)
    if spec.expect.preflight is not None:
        message = "a command chooses its places itself: none is checked before a process rejoins"
        yield Problem((*loc, "expect", "preflight"), message)


def _at_points(spec: FaultSpec, model: type[Fault], loc: Loc, points: bool) -> Iterator[Problem]:
    """Phases, and faults that a script applies to itself."""
    where = model.where
    if spec.at.phase is not None and not points:
        message = (
            "the phases of a command's steps are unknown from outside: leave phase out, or set"
            f" {POINTS}"
        )
        yield Problem((*loc, "at", "phase"), message, on_key=True)
    elif spec.at.phase is not None and where not in (Where.PROCESS, Where.RANK):
        message = f"{spec.kind} acts on no rank that could hold at a point: leave phase out"
        yield Problem((*loc, "at", "phase"), message, on_key=True)
    if works_by_script(model):
        fault = valid(model, spec.params)
        if fault is not None and (only := fault.not_by_script()):
            yield Problem((*loc, "params"), f"of {spec.kind} a script can do {only}")


def _words(workload: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that system calls reject: a zero byte anywhere, a variable without a name."""
    words = workload["command"]
    for index, word in enumerate(words if isinstance(words, list) else ()):
        if isinstance(word, str) and ("\0" in word or (not word and index == 0)):
            message = "a program has a name, and a word of a command holds no zero byte"
            yield Problem(("workload", "command", index), message)
    env = workload.get("env")
    for name, value in env.items() if isinstance(env, dict) else ():
        if isinstance(name, str) and (not name or "=" in name or "\0" in f"{name}{value}"):
            message = (
                "the name of a variable is not empty and holds no '=', and neither it nor its value"
                " a zero byte"
            )
            yield Problem(("workload", "env", name), message, on_key=True)
    if isinstance(directory := workload.get("directory"), str) and "\0" in directory:
        yield Problem(("workload", "directory"), "a directory holds no zero byte")


def _regex(progress: Any) -> Iterator[Problem]:
    for key, (group, example) in _GROUPS.items():
        if not isinstance(progress, dict) or not isinstance(progress.get(key), str):
            continue
        loc: Loc = ("workload", "progress", key)
        try:
            pattern = re.compile(progress[key])
        except (re.error, OverflowError, RecursionError) as error:
            yield Problem(loc, f"not a regular expression: {error}")
            continue
        if group not in pattern.groupindex:
            yield Problem(loc, f"the expression needs a group named {group}: {example!r}")
        elif key == "regex":
            yield from _epochs(progress, pattern.groupindex)


def _epochs(progress: Mapping[str, Any], groups: Collection[str]) -> Iterator[Problem]:
    """Keys that say nothing without a group of the expression."""
    stated = "of" in groups or progress.get("epoch_steps") is not None
    rows = (
        ("epochs_from", "epoch" in groups, "a group epoch"),
        ("epoch_steps", "epoch" in groups, "a group epoch"),
        ("steps_from", stated, "a group of, or epoch_steps beside a group epoch"),
    )
    for key, useful, need in rows:
        # a scenario that was written from its model says defaults as well
        default = RegexProgress.model_fields[key].default
        if progress.get(key, default) != default and not useful:
            message = f"{key} goes with {need} in the expression"
            yield Problem(("workload", "progress", key), message, on_key=True)
