"""What benchmarks share: scenarios written and played with real processes, arms measured in turns,
and what was found as Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.stats import median_ci95
from trainchaos.harness.judge.results import Results
from trainchaos.harness.launch.devices import processor
from trainchaos.harness.run.runner import run_scenario

ROOT = Path(__file__).resolve().parents[1]
RANKS, BATCH, EVERY = 4, 16, 10
"""Of the job that most of them train; ``EVERY``: steps between checkpoints."""
Tree = dict[str, Any]


def options(doc: str | None, *, runs: str = "") -> argparse.ArgumentParser:
    """A parser of the command line, with ``--runs`` where scenarios are played."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    if runs:
        parser.add_argument("--runs", type=_directory, default=runs, help="where runs are kept")
    return parser


def _directory(text: str) -> Path:
    Path(text).mkdir(parents=True, exist_ok=True)
    return Path(text)


# ---- scenarios


def job(name: str, seed: int, *, steps: int, recovery: Any, **more: Any) -> Tree:
    """A scenario of gpt nano without a control arm. ``more``: other keys of it; those of
    ``workload`` are added.
    """
    workload = {
        "kind": "gpt",
        "size": "nano",
        "ranks": RANKS,
        "steps": steps,
        "global_batch": BATCH,
        "checkpoint": {"every": EVERY},
        **more.pop("workload", {}),
    }
    stops = [{"when": "no_committed_step_for > 60s"}]
    about = {"version": 1, "name": name, "seed": seed, "baseline": "none", "stop_conditions": stops}
    return {**about, "workload": workload, "recovery": recovery, **more}


def matrix(scenario: Tree, recoveries: Sequence[str]) -> Tree:
    """The scenario once for each of these strategies."""
    return {**scenario, "recovery": "${matrix.recovery}", "matrix": {"recovery": [*recoveries]}}


def play(name: str, scenario: Tree, runs: Path) -> Results:
    """Write a scenario to ``runs/name.yaml`` and run it below ``runs``. Raises KeyboardInterrupt if
    the run was interrupted: a benchmark ends then, instead of going on to its next arm.
    """
    path = runs / f"{name}.yaml"
    path.write_text(json.dumps(scenario))
    print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
    loaded = load(path, build_catalogue(), overrides=[], env={})
    results = run_scenario(loaded, runs=runs, seed=None, live=False, argv=["run", str(path)])
    if results.verdict == "interrupted":
        raise KeyboardInterrupt
    return results


def _lists() -> dict[Any, list[float]]:
    return defaultdict(list)


@dataclass(kw_only=True)
class Measured:
    """Seconds of incidents, by row of a table. ``steps``: median step of each arm; ``verdicts``: of
    all arms.
    """

    recovery: dict[Any, list[float]] = field(default_factory=_lists)
    detection: dict[Any, list[float]] = field(default_factory=_lists)
    phases: dict[Any, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(_lists))
    steps: dict[Any, list[float]] = field(default_factory=_lists)
    verdicts: list[str] = field(default_factory=list)

    def add(self, results: Results, row_of: Callable[[str], Any]) -> None:
        """Add a run. ``row_of``: the row of a strategy."""
        for cell in results.cells:
            row = row_of(cell.strategy)
            self.recovery[row] += cell.metrics["recovery_time"].values
            self.detection[row] += cell.metrics["detection_time"].values
            self.steps[row] += cell.metrics["step_time"].values
            self.verdicts.append(f"{row}: {cell.verdict}")
            for incident in results.faults:
                for span in incident.phases if incident.cell == cell.id else ():
                    self.phases[row][span.name].append(span.seconds)

    def phase_table(self, names: Mapping[Any, str] | None = None) -> str:
        """Medians of the phases of a recovery, milliseconds."""
        phases = list(dict.fromkeys(name for spans in self.phases.values() for name in spans))
        rows = [
            [(names or {}).get(row, row), *(in_ms(spans.get(phase, ())) for phase in phases)]
            for row, spans in self.phases.items()
        ]
        return markdown(["median ms (max)", *phases], rows)

    def verdict_line(self) -> str:
        """How many arms were played, and those that did not pass."""
        bad = [verdict for verdict in self.verdicts if not verdict.lower().endswith("pass")]
        return f"{len(self.verdicts)} arms; verdicts other than pass: {', '.join(bad) or 'none'}"


# ---- arms in turns


def seconds(act: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def in_turns(
    acts: Mapping[str, Callable[[], float | None]],
    rounds: int,
    *,
    warm: int = 0,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Each act once a round, the first in turn, so that values of one round are pairs: what an act
    returns, or else the seconds that it takes. ``warm``: rounds that do not count; ``before``: each
    round, not timed.
    """
    found: dict[str, list[float]] = {name: [] for name in acts}
    names = list(acts)
    for number in range(-warm, rounds):
        before()
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            value = acts[name]()
            took = time.perf_counter() - began if value is None else value
            found[name] += [took] if number >= 0 else []
    return found


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """Pair by pair."""
    return [one / other for one, other in zip(of, to, strict=True)]


def ranks_of(commands: Sequence[Sequence[str]], limit_s: float) -> list[Any]:
    """What each process of a job prints last, as JSON; all are killed in the end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE)
        for command in commands
    ]
    try:
        return [json.loads(rank.communicate(timeout=limit_s)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


# ---- in words


def spread(values: Sequence[float], digits: int = 3, unit: float = 1.0) -> str:
    """Median and range."""
    if not values:
        return "-"
    low, high = min(values) * unit, max(values) * unit
    return f"{median(values) * unit:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def with_interval(values: Sequence[float], form: str = ".3f") -> str:
    """The median, and its 95 % interval where there are values enough."""
    interval, text = median_ci95(values), format(median(values), form)
    return f"{text} ({interval[0]:{form}} to {interval[1]:{form}})" if interval else text


def in_s(value: float | None) -> str:
    """Seconds; infinity is never."""
    return "-" if value is None else "never" if math.isinf(value) else f"{value:.3f}"


def in_ms(values: Sequence[float]) -> str:
    """Median and maximum of seconds."""
    return f"{median(values) * 1e3:.1f} ({max(values) * 1e3:.0f})" if values else "-"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def placed(text: str, there: str, begin: str, end: str) -> str:
    """A page with a text between two marks. Raises ScenarioError where it lacks them."""
    before, opened, rest = there.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ScenarioError(f"the page lacks the lines {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{text}{end}{after}"


def machine() -> str:
    """In words that name nobody: processor, cores that may be used, kernel, load."""
    cores, busy = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"{processor()}, {cores} cores, Linux {platform.release()}, load {busy:.1f} before"


def commit_of(root: Path = ROOT) -> str:
    """The commit of a checkout, short, and whether it was changed since; "unknown" elsewhere."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=8"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
