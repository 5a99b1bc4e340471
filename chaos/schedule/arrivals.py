"""Arrival times of failures: seeded random gaps, or recorded traces. Pure except for reading a
trace.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.scenario.fault import DEFAULT_ARRIVALS, MAX_OCCURRENCES, TriggerSpec
from trainchaos.chaos.scenario.sla import ClauseError, parse_duration
from trainchaos.chaos.source.diagnostics import Loc, LocatedProblem, Problem, Span
from trainchaos.chaos.source.source import Document, parse, read_text

_BITS = 63
_COLUMNS = ("time", "time_s", "step")
MAX_TIME_S = 1e9
MAX_STEP = 10**9


def draw(*words: str | int) -> int:
    """63 pseudo-random bits, the same for the same words on every machine."""
    return int.from_bytes(hashlib.sha256(_text(words)).digest()[:8]) >> 1


def draws(words: Sequence[str | int], lasts: Iterable[Sequence[str | int]]) -> Iterator[int]:
    """``draw(*words, *last)`` for each last. The common words are digested once: a job has tens of
    thousands of ranks.
    """
    common = hashlib.sha256(_text(words) + b"\0")
    for last in lasts:
        one = common.copy()
        one.update(_text(last))
        yield int.from_bytes(one.digest()[:8]) >> 1


def _text(words: Sequence[str | int]) -> bytes:
    return "\0".join([f"{type(word).__name__}:{word}" for word in words]).encode()


def share(*words: str | int) -> float:
    """A number above 0 and below 1, the same for the same words on every machine."""
    return (draw(*words) + 0.5) / 2**_BITS


def arrival_times(at: TriggerSpec, seed: int, fault: str) -> tuple[float, ...]:
    """Times in seconds after the first step starts, in order; () if the trigger is not by time.

    Gaps are drawn by inversion: exponential for ``mtbf`` (a Poisson process), Weibull with scale
    ``mean / gamma(1 + 1 / shape)`` for ``weibull``.
    """
    if at.time is not None:
        return (at.time,)
    if at.trace is not None and not isinstance(at.trace, str):
        return tuple(sorted(at.trace.times))
    if at.mtbf is None and at.weibull is None:
        return ()
    times, now = [], 0.0
    for number in range(at.max or DEFAULT_ARRIVALS):
        exponential = -math.log(share(seed, fault, "arrival", number))
        if at.weibull is not None:
            scale = at.weibull.mean / math.gamma(1 + 1 / at.weibull.shape)
            now += scale * exponential ** (1 / at.weibull.shape)
        else:
            now += (at.mtbf or 0.0) * exponential
        if now > MAX_TIME_S:
            break
        times.append(round(now, 6))
    return tuple(times)


@dataclass(kw_only=True)
class TraceRead:
    """Content of a trace file, and its problems with their places in the file."""

    times: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    problems: list[LocatedProblem] = field(default_factory=list)


def read_trace(path: Path) -> TraceRead:
    """Read ``.csv`` (a column ``time`` or ``step``, others ignored) or ``.json`` (numbers of
    seconds, or mappings with ``time`` or ``step``). Times are seconds, or texts such as ``2.5s``.

    Raises ScenarioError when the file cannot be read at all.
    """
    if path.suffix not in (".csv", ".json"):
        raise ScenarioError(f"{path}: a trace is a .csv or .json file")
    text = read_text(path, what="trace")
    rows = _csv_rows(text, str(path)) if path.suffix == ".csv" else _json_rows(text, str(path))
    out = TraceRead()
    for key, value, span in rows:
        problem = value if key == "" else _take(out, key, value)
        if problem:
            out.problems.append(LocatedProblem(span, str(problem)))
    if not out.problems:
        whole = Span(source=str(path), line=1, column=1, width=1, text=text.split("\n", 1)[0])
        count = len(out.times) + len(out.steps)
        if not count:
            out.problems.append(LocatedProblem(whole, "the trace has no rows"))
        if count > MAX_OCCURRENCES:
            out.problems.append(
                LocatedProblem(whole, f"the trace has {count} rows, more than {MAX_OCCURRENCES}")
            )
        if out.times and out.steps:
            out.problems.append(LocatedProblem(whole, "a trace holds times or steps, not both"))
    return out


Row = tuple[str, Any, Span]
"""``time`` or ``step``, the value and its place; or "", a complaint and its place."""


def _take(out: TraceRead, key: str, value: Any) -> str:
    """Add one value; returns what is wrong with it, or ""."""
    if key == "step":
        text = str(value).strip()
        if isinstance(value, bool) or not text.isdecimal() or not 1 <= int(text[:12]) <= MAX_STEP:
            return f"a step is a whole number from 1, not {value!r}"
        out.steps.append(int(text))
        return ""
    text = value.strip() if isinstance(value, str) else value
    try:
        number = float(text) if isinstance(text, str) else None
    except ValueError:
        number = None
    try:
        seconds = parse_duration(text if number is None else number)
    except ClauseError:
        return f"a time is seconds, or a text such as 2.5s, not {value!r}"
    if seconds > MAX_TIME_S:
        return f"{value} is more than {MAX_TIME_S:g} s"
    out.times.append(seconds)
    return ""


def _csv_rows(text: str, source: str) -> Iterator[Row]:
    lines = text.splitlines()
    rows = csv.reader(io.StringIO(text), strict=True)
    try:
        head = [name.strip().lower() for name in next(rows, [])]
    except csv.Error as error:
        yield "", f"not valid CSV: {error}", _line(source, lines, 1)
        return
    chosen = [name for name in _COLUMNS if name in head]
    if len(chosen) != 1:
        yield (
            "",
            f"the first line names the columns, exactly one of them {', '.join(_COLUMNS)}",
            _line(source, lines, 1),
        )
        return
    index = head.index(chosen[0])
    try:
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            at = _line(source, lines, rows.line_num)
            if len(row) <= index:
                yield "", f"the row has no {chosen[0]}", at
            else:
                yield chosen[0].removesuffix("_s"), row[index], at.narrowed(row[index].strip())
    except csv.Error as error:
        yield "", f"not valid CSV: {error}", _line(source, lines, rows.line_num)


def _json_rows(text: str, source: str) -> Iterator[Row]:
    document: Document = parse(text, source)
    for problem in document.problems:
        yield "", problem.message, problem.span
    if document.problems:
        return
    if not isinstance(document.tree, list):
        yield (
            "",
            "a trace in JSON is a list of seconds, or of mappings with time or step",
            document.locate(()),
        )
        return
    for index, row in enumerate(document.tree):
        at = document.locate((index,))
        if not isinstance(row, dict):
            yield "time", row, at
            continue
        names = [name for name in _COLUMNS if name in row]
        if len(names) != 1:
            yield "", "a row needs time or step, and not both", at
        else:
            yield names[0].removesuffix("_s"), row[names[0]], document.locate((index, names[0]))


def _line(source: str, lines: list[str], number: int) -> Span:
    text = lines[number - 1] if 0 < number <= len(lines) else ""
    return Span(source=source, line=max(1, number), column=1, width=max(1, len(text)), text=text)


def fill_traces(
    tree: Mapping[str, Any], directory_of: Callable[[Loc], Path]
) -> tuple[list[Problem], list[LocatedProblem]]:
    """Replace the name of every trace file in the faults of ``tree`` by its content.
    ``directory_of``: directory of the file in which a value was written. Returns the problems in
    the scenario, and those in trace files.
    """
    problems: list[Problem] = []
    placed: list[LocatedProblem] = []
    faults = tree.get("faults")
    for index, fault in enumerate(faults if isinstance(faults, list) else ()):
        at = fault.get("at") if isinstance(fault, dict) else None
        name = at.get("trace") if isinstance(at, dict) else None
        if not isinstance(at, dict) or not isinstance(name, str):
            continue
        loc: Loc = ("faults", index, "at", "trace")
        try:
            read = read_trace(directory_of(loc) / name)
        except ScenarioError as error:
            problems.append(Problem(loc, _about_file(name, error)))
            read = TraceRead()
        placed += read.problems
        # after an error one step stands in for the trace, to avoid follow-up errors
        steps = read.steps or ([] if read.times and not read.problems else [1])
        at["trace"] = {"file": name, "times": [] if read.problems else read.times, "steps": steps}
    return problems, placed


def _about_file(name: str, error: ScenarioError) -> str:
    said = error.message.split("\n", 1)[0]
    return f"trace {name}: {said.split(': ', 1)[-1]}"
