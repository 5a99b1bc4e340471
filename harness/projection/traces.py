"""Failures that were seen, from a file: a table (CSV) or a mapping a line (JSONL)."""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.files import parse_json, read_bytes, reason
from trainchaos.chaos.scenario.sla import ClauseError, parse_duration
from trainchaos.harness.projection.result import t95

LEAST = 3
"""Failures; two gaps are the fewest that have a shape."""
MOST_BYTES = 16 << 20
MOST_NODES = 64
"""At once; more in one line is taken for a slip, such as the size of the cluster."""
HINT = "lines of time (seconds, or 4h), and if known nodes lost at once and cause"


@dataclass(frozen=True, kw_only=True)
class FailureTrace:
    """``gaps_s``: between failures in order, the first one's time not among them; ``several``:
    shares of failures that took 1, 2, ... nodes; ``causes``: how many of each, empty if not said.
    """

    gaps_s: tuple[float, ...]
    several: tuple[float, ...]
    causes: Mapping[str, int]

    @property
    def mean_s(self) -> float:
        """Mean time between two failures."""
        return math.fsum(self.gaps_s) / len(self.gaps_s)

    @property
    def unsure(self) -> float:
        """Half the 95 % interval of that mean, as a share of it, by Student's t: gaps are taken for
        independent. At most 1, which is that or more.
        """
        deviation_s = statistics.stdev(self.gaps_s)
        count = len(self.gaps_s)
        return min(1.0, t95(count - 1) * deviation_s / math.sqrt(count) / self.mean_s)


def read_failures(path: Path) -> FailureTrace:
    """Read ``.csv`` with a head, or ``.jsonl``: a number, or a mapping, on each line. ``time``:
    seconds since any moment, or such as ``4h``, in any order; ``nodes``: lost at once, default 1;
    ``cause``: any text. Other columns are ignored.

    Raises ScenarioError (exit code 2) with the line of what cannot be read, or where there are too
    few failures or all come at once.
    """
    try:
        text = read_bytes(path, most=MOST_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "no text"
        raise ScenarioError(f"cannot read {path}: {why}", hint=HINT) from error
    if path.suffix not in (".csv", ".jsonl"):
        raise ScenarioError(f"{path} is neither .csv nor .jsonl", hint=HINT)
    failures = []
    for number, line in _table(path, text) if path.suffix == ".csv" else _mappings(path, text):
        try:
            cause = "" if line.get("cause") is None else str(line["cause"]).strip()
            failures.append((_seconds(line.get("time")), _nodes(line.get("nodes")), cause))
        except ValueError as error:
            raise _bad(path, number, str(error)) from error
    if len(failures) < LEAST:
        raise ScenarioError(f"{path}: {len(failures)} failures, {LEAST} are the fewest", hint=HINT)
    times = sorted(time_s for time_s, _, _ in failures)
    gaps = tuple(late - early for early, late in itertools.pairwise(times))
    if not math.fsum(gaps) > 0:
        raise ScenarioError(f"{path}: all {len(failures)} failures come at once", hint=HINT)
    sizes = Counter(nodes for _, nodes, _ in failures)
    return FailureTrace(
        gaps_s=gaps,
        several=tuple(sizes[n] / len(failures) for n in range(1, max(sizes) + 1)),
        causes=Counter(cause for _, _, cause in failures if cause),
    )


def _bad(path: Path, number: int, what: str) -> ScenarioError:
    return ScenarioError(f"{path}:{number}: {what}", hint=HINT)


def _table(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        if "time" not in rows.fieldnames:
            raise _bad(path, 1, "the head has no column time")
        for row in rows:
            if None in row or None in row.values():
                raise _bad(
                    path, rows.line_num, f"not {len(rows.fieldnames)} values, as in the head"
                )
            yield rows.line_num, row
    except csv.Error as error:
        raise _bad(path, rows.reader.line_num, str(error)) from error


def _mappings(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = parse_json(line.encode())
            except (ValueError, RecursionError) as error:
                raise _bad(path, number, "not JSON") from error
            yield number, value if isinstance(value, dict) else {"time": value}


def _seconds(value: Any) -> float:
    seconds = math.nan
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except (ValueError, OverflowError):
            with suppress(ClauseError):
                seconds = parse_duration(str(value))
    if not 0 <= seconds < math.inf:
        raise ValueError(f"time: {value!r} is no time")
    return seconds


def _nodes(value: Any) -> int:
    if value is None or not str(value).strip():
        return 1
    try:
        nodes = int(str(value))
    except ValueError as error:
        raise ValueError(f"nodes: {value!r} is no whole number") from error
    if not 1 <= nodes <= MOST_NODES:
        raise ValueError(f"nodes: {nodes} is not between 1 and {MOST_NODES}")
    return nodes
