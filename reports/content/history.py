"""Earlier runs of the same test, from the directories beside the run.

Whatever else lies there is ignored: damaged or foreign files, and everything behind a symbolic
link. Only earlier runs are read, so that a report written again later stays the same.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainchaos.chaos.errors import NewerVersion
from trainchaos.chaos.files import parse_model, read_bytes
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content.artifacts import link_to

MAX_RUNS = 20
MAX_LOOKED_AT = 60
MAX_ENTRIES = 5000
MAX_RESULTS_BYTES = 4 << 20
MAX_RESOLVED_BYTES = 256 << 10
MAX_ALL_BYTES = 16 << 20
"""Of results, in all: reading a megabyte of them takes a seventh of a second."""
_RUN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}-[0-9]{2}-[0-9]{2}-[0-9]+(\.[0-9]+)?")
_SECTION = re.compile(r"    ([a-z_]+):")
_OF_THE_TEST = frozenset({"workload", "recovery", "faults", "launcher"})


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One run: when, its verdict, and the recovery time of each cell of the same test (by id)."""

    run_id: str
    started: str
    title: str
    verdict: str
    host: str
    recovery: dict[str, Metric]
    present: bool
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class History:
    """Runs of the same test, the oldest first and the present one last; ``beyond``: whether older
    ones may exist that were not read.
    """

    runs: tuple[PastRun, ...]
    beyond: bool

    @property
    def earlier(self) -> int:
        """Number of runs besides the present one."""
        return len(self.runs) - 1


def history(run: RunDirectory, results: Results) -> History:
    """The present run, and the last ``MAX_RUNS - 1`` before it with a cell of the same test."""
    mine = _tests_of(run.root)
    present = _past(results, set(mine), present=True)
    names = _before(run.root)
    found: list[PastRun] = []
    left = MAX_ALL_BYTES
    for number, name in enumerate(names):
        if len(found) == MAX_RUNS - 1 or number == MAX_LOOKED_AT or left <= 0:
            return History(runs=(*reversed(found), present), beyond=True)
        other = run.root.parent / name
        theirs = _tests_of(other)
        same = {cell for cell, test in mine.items() if theirs.get(cell) == test}
        if not same:
            continue
        read, size = _read(other, left)
        left -= size
        if read is None or not _comparable(read, results, name):
            continue
        address = f"../{name}/report.html" if link_to(other, "report.html") else ""
        found.append(_past(read, same, present=False, address=address))
    return History(runs=(*reversed(found), present), beyond=False)


def _before(root: Path) -> list[str]:
    """Names of the runs beside this one that began before it, the newest first."""
    if not _RUN.fullmatch(root.name):
        return []
    names: list[str] = []
    with suppress(OSError), os.scandir(root.parent) as entries:
        names += [
            entry.name
            for entry in islice(entries, MAX_ENTRIES)
            if _RUN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return sorted((name for name in names if name < root.name), reverse=True)


def _tests_of(root: Path) -> dict[str, str]:
    """Cell id -> what it tests, as written by the run itself. The text is only compared with the
    present run's, so it is not parsed as YAML, which would take a second for five runs.
    """
    try:
        text = read_bytes(root / "scenario.resolved.yaml", most=MAX_RESOLVED_BYTES).decode()
    except (OSError, ValueError):
        return {}
    found: dict[str, list[str]] = {}
    cell, section, lines = "", "", list[str]()
    for line in f"\n{text}".partition("\ncells:\n")[2].split("\n"):
        if line[:1] not in (" ", "-"):
            break  # the list of cells has ended
        if line.startswith("- "):
            section, lines = "", []
        if line.startswith("  id: "):
            cell = line[6:].strip("'\"")
            found[cell] = lines
        elif (key := _SECTION.match(line)) is not None:
            section = key[1]
        if section in _OF_THE_TEST:
            lines.append(line)
    return {cell: "\n".join(lines) for cell, lines in found.items() if cell and lines}


def _read(root: Path, left: int) -> tuple[Results | None, int]:
    """The results of a run, and their size."""
    try:
        data = read_bytes(root / "results.json", most=min(MAX_RESULTS_BYTES, left))
    except OSError:
        return None, 0
    try:
        return parse_model(data, Results), len(data)
    except (ValueError, RecursionError, NewerVersion):
        return None, len(data)


def _comparable(other: Results, results: Results, name: str) -> bool:
    """Whether a run is of the same scenario, as real, and in the directory of its name."""
    return (
        other.scenario == results.scenario
        and other.simulated == results.simulated
        and other.run_id == name
    )


def _past(results: Results, cells: set[str], *, present: bool, address: str = "") -> PastRun:
    known = {cell.id: cell.metrics.get("recovery_time") for cell in results.timed}
    return PastRun(
        run_id=results.run_id,
        started=results.started,
        title=results.title,
        verdict=results.verdict,
        host=str(results.system.get("host", ""))[:80],
        recovery={
            cell: metric
            for cell, metric in known.items()
            if metric is not None and metric.median is not None and (present or cell in cells)
        },
        present=present,
        address=address,
    )
