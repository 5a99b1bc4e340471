"""Goodput, badput and cost of a job of each size under each strategy, by both engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.projection import closed
from trainchaos.harness.projection.breakeven import break_even, curve, formulas_fail
from trainchaos.harness.projection.costs import LEAST_INCIDENTS, RecoveryCost
from trainchaos.harness.projection.figures import Part, projected
from trainchaos.harness.projection.job import SPARES, nodes_of, often, repair_of
from trainchaos.harness.projection.parallel import in_processes
from trainchaos.harness.projection.presets import Preset, rate_of
from trainchaos.harness.projection.result import (
    GPUS_PER_NODE,
    Definitions,
    Projection,
    Setting,
    SparesNeeded,
)

FEW_GAPS = 30
"""Between failures of a trace; from fewer their rate is known within a third at best."""
FARTHER = 8.0
"""Times as many nodes as a cost was measured at, beyond which it is an extrapolation."""


def project(
    setting: Setting,
    costs: Mapping[str, RecoveryCost],
    failures_from: str,
    each: Callable[[float], None] = lambda share: None,
    jobs: int = 1,
) -> Projection:
    """Project every strategy of ``costs`` to every size of ``setting``, in ``jobs`` processes; the
    figures are the same whatever their number. ``each``: is told the share that is done.

    Raises ScenarioError where hot-spare has more spares than the job has nodes, or a copy of the
    model takes more, checkpoints are less than a step apart, or there are more failures than can be
    played.
    """
    _refuse(setting, costs)
    parts = [Part(setting, gpus, cost) for gpus in setting.gpus for cost in costs.values()]
    points, more = curve(setting, costs)
    # all in one go, as processes are forked only before the first share is told
    played = in_processes([*more, *parts], projected, each, jobs)
    rows = played[len(more) :]
    off = formulas_fail(rows)
    points = [point for point in points if point.strategy not in off]
    points += [row.point for row in played[: len(more)]]
    points.sort(key=lambda point: point.gpus)
    return Projection(
        setting=setting,
        failures_from=failures_from,
        costs={name: cost.said for name, cost in costs.items()},
        cautions=_cautions(setting, costs),
        notes=_notes(setting, costs),
        rows=rows,
        curve=points,
        break_even=break_even(setting, costs, rows, points),
        spares=spares_needed(setting),
    )


def nothing(setting: Setting) -> Projection:
    """Of a setting that nothing is projected for: where only a comparison is asked for, which has
    its own definitions.
    """
    own = Definitions(failures_while="always", spares_count=False)
    return Projection(setting=setting.model_copy(update={"gpus": (), "definitions": own}))


def spares_needed(setting: Setting) -> list[SparesNeeded]:
    """For the availability of the setting, at each size; [] where none is asked for. Of a job that
    never stalls, which has a little more failures than others.
    """
    if setting.availability is None:
        return []
    taken = math.fsum(n * share for n, share in enumerate(setting.several, 1))
    needed = []
    for gpus in setting.gpus:
        nodes = nodes_of(setting, gpus)
        # failures whose nodes are in repair on average, by Little's law
        failures = (1.0 - setting.processes) * repair_of(setting).mean_s / often(setting, nodes)
        spares = closed.spares_for(setting.availability, failures, setting.several)
        needed.append(SparesNeeded(gpus=gpus, nodes=nodes, load=failures * taken, spares=spares))
    return needed


def _refuse(setting: Setting, costs: Mapping[str, RecoveryCost]) -> None:
    smallest = min(setting.gpus)
    nodes = nodes_of(setting, smallest)
    if SPARES in costs and setting.spares > nodes:
        raise ScenarioError(
            f"{setting.spares} spares for a job of {nodes} nodes ({smallest} GPUs)",
            hint="fewer --spares",
        )
    if setting.replica_nodes > nodes:
        raise ScenarioError(
            f"a copy of the model takes {setting.replica_nodes} nodes, the job has {nodes}"
            f" ({smallest} GPUs)",
            hint="fewer --replica-nodes, or larger --gpus",
        )
    if setting.interval_s is not None and setting.interval_s < setting.step_s:
        raise ScenarioError(
            f"checkpoints are {setting.interval_s:g} s apart, a step takes {setting.step_s:g} s",
            hint="a longer --interval, or a shorter --step",
        )


def _cautions(setting: Setting, costs: Mapping[str, RecoveryCost]) -> list[str]:
    """What is missing for the intervals to hold."""
    nodes = nodes_of(setting, max(setting.gpus))
    measured = {name: cost for name, cost in costs.items() if cost.kind == "measured"}
    few = [f"{n} ({c.incidents})" for n, c in measured.items() if c.incidents < LEAST_INCIDENTS]
    flat = [
        f"{name} at {cost.ranks:g} ranks"
        for name, cost in measured.items()
        if not cost.per_doubling_s and nodes > FARTHER * (cost.ranks or math.inf)
    ]
    others = [name for name, cost in costs.items() if cost.kind == "published"]
    cautions = {
        f"fewer than {LEAST_INCIDENTS} incidents were measured of {', '.join(few)}: how much"
        " recoveries vary is not known, and the intervals are too narrow": few,
        f"the trace has {len(setting.gaps) + 1} failures: their law and causes are hardly known,"
        " which is not in the intervals": 0 < len(setting.gaps) < FEW_GAPS,
        f"recoveries were measured of {', '.join(flat)}, and are taken to last as long at"
        f" {nodes:,} nodes: --growth adds seconds for each doubling": flat,
        f"{', '.join(others)}: not in the runs, of published costs of large clusters, which must"
        f" not be compared with what was measured of {', '.join(measured)}": measured and others,
    }
    return [text for text, holds in cautions.items() if holds]


def _notes(setting: Setting, costs: Mapping[str, RecoveryCost]) -> list[str]:
    """What the figures rest on."""
    known = f"known to ±{100 * setting.rate_unsure:.3g} %"
    if setting.rate_unsure >= 1.0:
        known = "hardly known, and taken to be between half and double of it"
    loading = f"loading takes {setting.load_s:g} s beside what was measured of checkpoint-restart"
    if setting.loads_measured:
        loading = "what was measured of checkpoint-restart has its loading in it; none is added"
    left = "for good"
    if setting.quarantine is not None:
        left = f"until {setting.quarantine} failures, when a plain node takes the place"
    slow = "never found"
    if setting.slow_found_s is not None:
        slow = f"found after {setting.slow_found_s:g} s of running and swapped with a stall"
    loads = any(cost.kind == "measured" and cost.rollback for cost in costs.values())
    notes = {
        _definitions(setting, costs): True,
        f"the rate of failures is {known} (95 %, gaps taken for independent), which is in all"
        " intervals but those of break-even points": setting.rate_unsure,
        f"{100 * setting.processes:.3g} % of the failures end processes only, and no node is"
        " repaired": setting.processes,
        loading: loads and setting.load_s,
        f"{setting.lemon_share:.4g} of the nodes fail {setting.lemon_times:g} times as often as the"
        f" rate says, {left}": setting.lemon_share,
        f"{setting.slow_rate:g} nodes in 1,000 become slow a day, make the job take"
        f" {setting.slow_factor:g} times as long, and are {slow}": setting.slow_rate,
    }
    return [text for text, holds in notes.items() if holds]


_WORDS = {
    "running": "failures come while the job runs or loads a checkpoint",
    "always": "failures come at any time, also during recoveries",
    "apart": "work done again is not useful",
    "recovery": "work done again is part of the recovery",
    "useful": "work done again counts as useful",
}
_MISSING = {
    "lost": "the work of nodes that are missing is not useful",
    "useful": "a step counts in full whatever nodes are missing",
}


def _definitions(setting: Setting, costs: Mapping[str, RecoveryCost]) -> str:
    words, copies = setting.definitions, setting.replica_nodes
    parts = [_WORDS[words.failures_while], _WORDS[words.rework]]
    if not all(cost.rollback for cost in costs.values()):
        parts.append(_MISSING[words.missing])
        parts.append(
            f"with a node leave the {copies} that hold its copy of the model"
            if copies > 1
            else "a node holds a whole copy of the model, so that the others go on without it"
        )
    counted = "counted" if words.spares_count else "not counted"
    return "; ".join([*parts, f"spare nodes are {counted} in the denominator"])


def said_from(preset: Preset | None, rate: float | None, gpus_per_node: int = GPUS_PER_NODE) -> str:
    """Where the rate of failures is from, for people."""
    if preset is None or rate is not None:
        return f"{rate:g} failures per 1,000 nodes and day, as given"
    note = f"; {preset.note}" if preset.note else ""
    said = f"{rate_of(preset, gpus_per_node):.3g} failures per 1,000 nodes and day"
    if gpus_per_node != GPUS_PER_NODE:
        note = f"{note}; scaled from nodes of {GPUS_PER_NODE} GPUs to nodes of {gpus_per_node}"
    return f"{said} ({preset.source}{note})"
