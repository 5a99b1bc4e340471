"""Baselines: a run's measurements in a small file, for comparison with later runs (``chaos gate
--baseline``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError, newer
from trainchaos.chaos.files import read_json, reason
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory, open_run, read_resolved
from trainchaos.harness.host.seal import digest_of_json
from trainchaos.harness.judge.figures import Metric, Model
from trainchaos.harness.judge.measure.measure import METRICS
from trainchaos.harness.judge.results import Results
from trainchaos.harness.judge.verdict import judge

SCHEMA_VERSION = 1
MACHINE = ("processor", "cores", "cuda_devices")
"""Facts of ``system.json`` that identify a machine; names and versions may differ."""
TEST = ("workload", "recovery", "faults", "launcher")
"""Parts of a scenario that make it the same test."""
MAX_SHOWN = 60
UNSEALED = "not sealed: it has no digest, and may have been changed since it was saved"
USABLE = ("pass", "fail", "inconclusive")


class BaselineError(ChaosError):
    """A baseline that cannot be read, or that a run cannot be compared with."""

    exit_code = EXIT_USAGE


class BaselineCell(Model):
    """A cell of the matrix. ``test``: the parts of its scenario named in ``TEST``; ``metrics``:
    every metric that has a better direction, with all its values.
    """

    strategy: str
    test: dict[str, Any]
    metrics: dict[str, Metric]


class Baseline(Model):
    """A baseline file. ``verdict``: of the run it was saved from; ``machine``, ``versions``: from
    that run's ``system.json``; ``root``: of that run's seal, if it has one; ``digest``: of all the
    rest, empty in older files.
    """

    kind: Literal["trainchaos baseline"] = "trainchaos baseline"
    schema_version: Literal[1] = 1
    scenario: str
    run_id: str
    started: str
    seed: int
    verdict: str
    machine: dict[str, Any] = Field(
        description="facts that identify the machine, and the host's name"
    )
    versions: dict[str, str]
    cells: dict[str, BaselineCell]
    simulated: bool = False
    root: str = ""
    digest: str = ""


def baseline_of(run: RunDirectory, results: Results) -> Baseline:
    """A judged run's measurements. Raises BaselineError for a run that did not finish or measured
    nothing.
    """
    if results.verdict not in USABLE:
        raise BaselineError(
            f"{run.root} is not a baseline: the run was {results.verdict}: {results.reason}",
            hint="save one of a run that came to its end",
        )
    scenarios = {cell.id: cell for cell in read_resolved(run).cells}
    cells = {}
    for cell in results.timed:
        kept = {n: m for n, m in cell.metrics.items() if m.values and _one_way(n)}
        test = test_of(scenarios[cell.id])
        cells[cell.id] = BaselineCell(strategy=cell.strategy, test=test, metrics=kept)
    if not any(cell.metrics for cell in cells.values()):
        raise BaselineError(f"{run.root} is not a baseline: it has no value of any metric")
    system = results.system
    same = ("scenario", "run_id", "started", "seed", "verdict", "simulated")
    made = Baseline(
        **{name: getattr(results, name) for name in same},
        machine={name: system.get(name) for name in ("host", *MACHINE)},
        versions={name: str(version) for name, version in dict(system.get("versions", {})).items()},
        cells=cells,
        root=results.seal.root,
    )
    return made.model_copy(update={"digest": _digest(made.model_dump(mode="json"))})


def test_of(cell: Cell) -> dict[str, Any]:
    """The parts of a cell's scenario in which a run and its baseline must agree."""
    whole = cell.scenario.model_dump(mode="json")
    return {name: whole[name] for name in TEST}


def load(path: Path) -> Baseline:
    """Load a baseline from its file, or from a run directory, which is judged again. Raises
    BaselineError for anything else, and whatever judging a run raises.
    """
    if path.is_dir():
        run = open_run(path)
        return baseline_of(run, judge.judge_whole(run))
    make, again = "make one with: chaos baseline save RUN", "save it again: chaos baseline save RUN"
    try:
        data = read_json(path, follow=True)
        if not isinstance(data, dict) or data.get("kind") != "trainchaos baseline":
            raise BaselineError(f"{path} is not a baseline", hint=make)
        version = data.get("schema_version")
        if type(version) is int and version > SCHEMA_VERSION:
            raise BaselineError(newer(f"the baseline {path}", version, SCHEMA_VERSION))
        if data.get("digest") and data["digest"] != _digest(data):
            why = f"{path} was changed after it was saved: its digest does not fit"
            raise BaselineError(why, hint=again)
        return Baseline.model_validate(data)
    except OSError as error:
        raise BaselineError(f"{path} cannot be read: {reason(error)}", hint=make) from error
    except ValidationError as error:
        raise BaselineError(f"{path} is damaged at {reason(error)}", hint=again) from error
    except ValueError as error:
        raise BaselineError(f"{path} is not a baseline: {reason(error)}", hint=again) from error


def differences(baseline: Baseline, current: Baseline) -> tuple[list[str], list[str]]:
    """Why two baselines are not comparable: by machine, and by test. One line per difference, with
    both values.
    """
    played = []
    for name in current.cells.keys() & baseline.cells.keys():
        then, now = baseline.cells[name].test, current.cells[name].test
        played += [
            f"{name}: {where}: {_short(a)} then, {_short(b)} now"
            for where, a, b in _differing(then, now)
        ]
    return other_machine(baseline, current.machine), sorted(played)


def other_machine(baseline: Baseline, system: Mapping[str, Any]) -> list[str]:
    """Facts of ``system.json`` in which a machine differs from the baseline's: one line each, with
    both values.
    """
    return [
        f"{name}: {baseline.machine.get(name)} then, {system.get(name)} now"
        for name in MACHINE
        if baseline.machine.get(name) != system.get(name)
    ]


def _digest(data: Mapping[str, Any]) -> str:
    return digest_of_json({name: value for name, value in data.items() if name != "digest"})


def _differing(then: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted({*then, *now}):
            yield from _differing(
                then.get(key), now.get(key), f"{place}.{key}" if place else str(key)
            )
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for at, (one, other) in enumerate(zip(then, now, strict=True)):
            yield from _differing(one, other, f"{place}.{at}")
    elif then != now:
        yield place, then, now


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _one_way(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].better != "neither"
