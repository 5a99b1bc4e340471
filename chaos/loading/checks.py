"""Checks beyond the models: plugins and their parameters, metrics, enough samples.

Every check works on the plain values of one cell and tolerates what the models report, so that one
load shows all errors at once. Warnings are in ``chaos.loading.cautions``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from trainchaos.chaos.loading import commandchecks
from trainchaos.chaos.loading.explain import valid, validate
from trainchaos.chaos.loading.faultchecks import Setting, check_fault, check_together
from trainchaos.chaos.loading.placechecks import check_limits
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.forms import in_seconds
from trainchaos.chaos.scenario.model import (
    RETIRED_INVARIANTS,
    BlastRadius,
    FaultSpec,
    LauncherSpec,
    WorkloadSpec,
)
from trainchaos.chaos.scenario.parallelism import MeshShape
from trainchaos.chaos.scenario.sla import (
    ClauseError,
    parse_clause,
    samples_needed,
)
from trainchaos.chaos.schedule.blast import NO_COSTS
from trainchaos.chaos.schedule.plan import most_occurrences
from trainchaos.chaos.source.diagnostics import Loc, Problem, unknown

ALWAYS_JUDGED = ("progress", "finished", "expectation", "alarms", "preflight", "steady-state")
"""Findings that no list of invariants selects: each is judged wherever it applies."""


def normalise(
    tree: Mapping[str, Any], catalogue: Catalogue
) -> tuple[dict[str, Any], list[Problem]]:
    """A copy with ``size`` in ``params``, times of plugins (parameters ``..._s``) in seconds, and
    what differs for a command.
    """
    out = copy.deepcopy(dict(tree))
    problems: list[Problem] = []
    holders: list[tuple[Any, Loc, str, Mapping[str, type[BaseModel]]]] = [
        (fault, ("faults", index), "kind", catalogue.faults)
        for index, fault in enumerate(_items(out.get("faults")))
    ]
    holders += [
        (out.get("workload"), ("workload",), "kind", catalogue.workloads),
        (out.get("launcher"), ("launcher",), "kind", catalogue.launchers),
        (out.get("recovery"), ("recovery",), "strategy", catalogue.strategies),
    ]
    for holder, loc, key, kinds in holders:
        if isinstance(holder, dict) and isinstance(name := holder.get(key), str) and name in kinds:
            if key == "strategy":
                problems += _seconds(holder, kinds[name], loc)
            problems += _seconds(holder.get("params"), kinds[name], (*loc, "params"))
    problems += _merge_size(out.get("workload"))
    commandchecks.of_commands(out)
    return out, problems


def check_cell(tree: Mapping[str, Any], catalogue: Catalogue) -> list[Problem]:
    """Every catalogue check on one cell."""
    problems = [
        *_workload(tree.get("workload"), catalogue),
        *commandchecks.check_keys(tree.get("workload")),
    ]
    problems += _launcher(tree.get("launcher"), catalogue)
    strategy = None
    if commandchecks.is_command(tree):
        problems += commandchecks.check_command(tree, catalogue.faults, tree.get("recovery"))
    else:
        strategy, found = _strategy(tree.get("recovery"), catalogue)
        problems += found
    workload = valid(WorkloadSpec, tree.get("workload"))
    problems += _elastic(workload, strategy)
    problems += _spares(workload, strategy)
    faults = _items(tree.get("faults"))
    setting = _setting(tree, catalogue, workload, strategy)
    for index, raw in enumerate(faults):
        problems += check_fault(raw, ("faults", index), setting)
    problems += _repeated_ids(faults)
    problems += check_together(faults, setting)
    if setting.given is not None and setting.topology is not None:
        problems += check_limits(setting.given, setting.topology)
    problems += _sla(tree, catalogue)
    problems += _invariants(tree.get("invariants"), catalogue.checkers)
    return problems


def _setting(
    tree: Mapping[str, Any],
    catalogue: Catalogue,
    workload: WorkloadSpec | None,
    strategy: BaseModel | None,
) -> Setting:
    launcher = valid(LauncherSpec, tree.get("launcher", {}))
    limits = valid(BlastRadius, tree.get("blast_radius", {}))
    kind = catalogue.launchers.get(launcher.kind) if launcher else None
    seed = tree.get("seed", 0)
    return Setting(
        kinds=catalogue.faults,
        workload=workload,
        strategy=strategy,
        launcher=launcher,
        given=limits,
        offers=getattr(kind, "offers", None),
        costs=getattr(kind, "costs", NO_COSTS),
        seed=seed if isinstance(seed, int) else 0,
    )


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _seconds(params: Any, model: type[BaseModel], loc: Loc) -> Iterator[Problem]:
    """Times as numbers, whole ones as whole numbers, which a parameter may need."""
    for name in model.model_fields if isinstance(params, dict) else ():
        value = params.get(name)
        if not name.endswith("_s") or isinstance(value, bool | list | dict | None):
            continue
        try:
            seconds = in_seconds(value)
            params[name] = int(seconds) if seconds % 1 == 0 else seconds
        except ClauseError as error:
            yield Problem((*loc, name), str(error), word=error.word)
            params[name] = 1.0  # a valid value, so that the models do not report it again


def _merge_size(workload: Any) -> list[Problem]:
    """Put the shorthand ``size`` where the workload's model looks for it."""
    if not isinstance(workload, dict) or not isinstance(size := workload.get("size"), str):
        return []
    params = workload.get("params", {})
    if not isinstance(params, dict):
        return []
    workload["params"] = {**params, "size": size}
    if params.get("size", size) == size:
        return []
    return [Problem(("workload", "size"), "size is given twice, here and in params", on_key=True)]


def _plugin(
    name: Any, params: Any, kinds: Mapping[str, type[BaseModel]], what: str, locs: tuple[Loc, Loc]
) -> tuple[BaseModel | None, list[Problem]]:
    """Make the plugin of a name with its parameters. ``locs``: places of the name and of the
    parameters.
    """
    if not isinstance(name, str):
        return None, []
    if name not in kinds:
        return None, [Problem(locs[0], unknown(what, name, kinds))]
    return validate(kinds[name], params, locs[1]) if isinstance(params, dict) else (None, [])


def _workload(raw: Any, catalogue: Catalogue) -> list[Problem]:
    if not isinstance(raw, dict) or raw.get("command") is not None:
        return []
    params = raw.get("params", {})
    locs: tuple[Loc, Loc] = (("workload", "kind"), ("workload", "params"))
    made, problems = _plugin(raw.get("kind"), params, catalogue.workloads, "workload", locs)
    problems += _mesh(raw.get("parallelism"), made)
    moved = ("workload", "params", "size")
    return [
        (
            Problem(("workload", "size"), p.message, on_key=p.on_key)
            if p.loc == moved and raw.get("size") is not None
            else p
        )
        for p in problems
    ]


def _mesh(raw: Any, workload: BaseModel | None) -> list[Problem]:
    """Whether the model of the workload can be cut up like that."""
    mesh = valid(MeshShape, raw) if isinstance(raw, dict) and "hsdp" not in raw else None
    misfit = getattr(workload, "misfit", None)
    why = misfit(mesh) if mesh is not None and misfit is not None else None
    return [] if why is None else [Problem(("workload", "parallelism"), why)]


def _launcher(raw: Any, catalogue: Catalogue) -> list[Problem]:
    if isinstance(raw, dict):
        locs: tuple[Loc, Loc] = (("launcher", "kind"), ("launcher", "params"))
        return _plugin(
            raw.get("kind", "local"), raw.get("params", {}), catalogue.launchers, "launcher", locs
        )[1]
    return _plugin(raw, {}, catalogue.launchers, "launcher", (("launcher",), ("launcher",)))[1]


def _strategy(raw: Any, catalogue: Catalogue) -> tuple[BaseModel | None, list[Problem]]:
    if not isinstance(raw, dict):
        return _plugin(raw, {}, catalogue.strategies, "strategy", (("recovery",), ("recovery",)))
    base: Loc = ("recovery", "params") if "params" in raw else ("recovery",)
    params = raw.get("params", {key: value for key, value in raw.items() if key != "strategy"})
    return _plugin(
        raw.get("strategy"),
        params,
        catalogue.strategies,
        "strategy",
        (("recovery", "strategy"), base),
    )


def _elastic(workload: WorkloadSpec | None, strategy: BaseModel | None) -> Iterator[Problem]:
    elastic = workload is not None and workload.determinism == "elastic"
    if elastic and getattr(strategy, "batch", None) == "shrink":
        yield Problem(
            ("workload", "determinism"),
            "determinism: elastic promises the same result however many ranks there are, and"
            " recovery with batch: shrink leaves samples of missing ranks out: use batch:"
            " constant, or determinism: default",
        )


def _spares(workload: WorkloadSpec | None, strategy: BaseModel | None) -> Iterator[Problem]:
    if workload is None or workload.shards == 1:
        return
    if getattr(strategy, "rehearse", False):
        yield Problem(
            ("recovery", "rehearse"),
            "rehearse: true serves models that each rank holds whole, and this one is spread"
            f" over {workload.shards} ranks: use parallelism: ddp, or rehearse: false",
        )
    if getattr(strategy, "sync", None) != "live":
        return
    if workload.ranks == workload.shards:
        yield Problem(
            ("recovery", "sync"),
            f"the {workload.ranks} ranks hold one copy of the model, and a live spare is"
            " compared with another rank that holds the same part: use two copies or more"
            " (hsdp, or replicate: 2 of a mesh), or sync: none",
        )
    elif (spares := getattr(strategy, "spares_wanted", 0)) < workload.shards:
        enough = f"spares: {workload.shards} or more, or "
        yield Problem(
            ("recovery", "sync"),
            f"a live spare follows one of the {workload.shards} parts of the model, and"
            f" {spares} of them leave parts that none follows: use"
            f" {enough if workload.shards <= _most(strategy, 'spares') else ''}sync: none",
        )


def _most(strategy: Any, name: str) -> float:
    """The largest value that a parameter may have."""
    described = strategy.model_json_schema()["properties"].get(name, {})
    return float(described.get("maximum", math.inf))


def _repeated_ids(faults: list[Any]) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, raw in enumerate(faults):
        name = raw.get("id") if isinstance(raw, dict) else None
        if isinstance(name, str):
            if name in seen:
                yield Problem(("faults", index, "id"), f"fault id {name!r} is used twice")
            seen.add(name)


def _sla(tree: Mapping[str, Any], catalogue: Catalogue) -> Iterator[Problem]:
    sla, metrics = tree.get("sla"), catalogue.metrics
    repeat = tree.get("repeat", 1)
    if isinstance(repeat, int) and repeat < 1:
        return  # its own error; how many values there would be says nothing
    arms = repeat if isinstance(repeat, int) else 1
    incidents = arms * max(1, _incidents(tree, catalogue))
    paired = tree.get("baseline") != "none"
    for metric, clauses in sla.items() if isinstance(sla, dict) else ():
        if metric not in metrics:
            yield Problem(("sla", metric), unknown("metric", metric, metrics), on_key=True)
            continue
        values = arms if metric in catalogue.per_arm else incidents
        for index, raw in enumerate(_items(clauses)):
            loc: Loc = ("sla", metric, index)
            if isinstance(raw, dict):
                kind = raw.get("fault")
                if isinstance(kind, str) and kind not in catalogue.faults:
                    yield Problem((*loc, "fault"), unknown("fault", kind, catalogue.faults))
                raw, loc = raw.get("check"), (*loc, "check")
            if isinstance(raw, str):
                yield from _clause(raw, metrics[metric], values, loc, paired=paired)


def _clause(text: str, unit: str, values: int, loc: Loc, *, paired: bool) -> Iterator[Problem]:
    try:
        clause = parse_clause(text, unit)
    except ClauseError as error:
        yield Problem(loc, str(error), word=error.word)
        return
    if clause.in_steps and not paired:
        message = (
            "these are steps of the control arm, and baseline: none plays none: write a time such"
            " as 5s, leave it out (null), or say baseline: paired"
        )
        yield Problem(loc, message, word="step")
    needed = samples_needed(clause.aggregate)
    if values < needed:
        message = (
            f"{clause.aggregate} needs at least {needed} values to mean anything with 95 %"
            f" confidence, and this scenario gives {values}: raise repeat, or use max"
        )
        yield Problem(loc, message, word=clause.aggregate)


def _incidents(tree: Mapping[str, Any], catalogue: Catalogue) -> int:
    """Incidents of one repeat that there is something to recover from."""
    count = 0
    for fault in _items(tree.get("faults")):
        spec = valid(FaultSpec, fault)
        kind = catalogue.faults.get(spec.kind) if spec else None
        if kind is None or not kind.harmless:
            count += most_occurrences(spec.at) if spec else 1
    return count


def _invariants(raw: Any, checkers: Collection[str]) -> Iterator[Problem]:
    base: Loc = ("invariants",)
    if isinstance(raw, dict):
        raw, base = raw.get("leave_out"), (*base, "leave_out")
    for index, name in enumerate(_items(raw)):
        if name in ALWAYS_JUDGED:
            fix = "it cannot be left out" if "leave_out" in base else "remove it"
            message = f"{name} is judged wherever it applies, whatever is listed: {fix}"
            yield Problem((*base, index), message)
        elif name in RETIRED_INVARIANTS:
            message = f"{name} is not judged any more (docs/verdicts.md): remove it"
            yield Problem((*base, index), message)
        elif isinstance(name, str) and name not in checkers:
            yield Problem((*base, index), unknown("checker", name, checkers))
        elif name == "fault-landed" and "leave_out" in base:
            message = (
                "fault-landed cannot be left out: a run whose fault did not land proves nothing"
            )
            yield Problem((*base, index), message)
