"""Tries progress expressions on a log: what they find in it, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.chaos.scenario.progress import PresetProgress, RegexProgress, expressions, key_of
from trainchaos.harness.script.listen.progress import GrowingFile, ProgressReport, RegexReader

SHOWN = 3
"""Lines shown of each sort."""
WIDTH = 120


@dataclass(kw_only=True)
class Trial:
    """What was found. ``steps``: in the order of their lines, counted as printed; ``losses``: those
    read; ``shown``: the first reports and the last, each with its line; ``odd``: what did not parse
    -> some of its lines; ``wrong``: why these cannot be the steps of the workload.
    """

    lines: int = 0
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    shown: list[tuple[ProgressReport, str]] = field(default_factory=list)
    odd: list[tuple[str, list[str]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def try_lines(log: Path, progress: RegexProgress | PresetProgress, steps: int) -> Trial:
    """Read a log as a run would. ``steps``: workload.steps. Raises OSError."""
    log.stat()  # a file that is missing is not made
    file = GrowingFile(log)
    reader = RegexReader(file, expressions(progress), steps)
    found = Trial()
    last: tuple[ProgressReport, str] | None = None
    kept: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for line in _lines(file):
        refused, total = reader.refused, reader.other_total
        reader.other_total = None
        reports = reader.parse(line)
        other, reader.other_total = reader.other_total, reader.other_total or total
        why = ""
        for report in reports:
            found.steps.append(report.step)
            if report.loss is not None:
                found.losses.append(report.loss)
            last = report, line.strip()[:WIDTH]
            if len(found.shown) < SHOWN:
                found.shown.append(last)
            if report.unread:
                why = f"group {next(iter(report.unread))} is no number"
        if reader.refused > refused:
            why = "group step is no number"
        elif other is not None:
            why = "other totals than workload.steps are stated, as by bars of an evaluation"
        elif not reports:
            why = "nothing matched"
        if why:
            counts[why] = counts.get(why, 0) + 1
            some = kept.setdefault(why, [])
            if len(some) < SHOWN:
                some.append(line.strip()[:WIDTH])
    file.close()
    found.lines = file.count
    if last is not None and last not in found.shown:
        found.shown.append(last)
    found.odd = [(f"{counts[why]} lines: {why}", some) for why, some in kept.items()]
    found.wrong = list(_wrong(found, reader, key_of(progress), steps))
    return found


def _lines(file: GrowingFile) -> Iterator[str]:
    """Every line, the last one too if it has no end: nobody writes to the file any more."""
    for _ in range(file.looks_left() + 1):
        yield from file.read()
    yield from file.unended(over=True, sure=True)


def _wrong(found: Trial, reader: RegexReader, key: str, steps: int) -> list[str]:
    if not found.steps:
        if reader.other_total is not None:
            return [
                f"the lines state {reader.other_total} steps and workload.steps is {steps}: correct"
                " workload.steps"
            ]
        return [f"{key} finds no step in {found.lines} lines"]
    wrong = []
    last = max(found.steps)
    if last > steps:
        wrong.append(f"step {last} is beyond workload.steps, which is {steps}")
    low = found.steps[0]
    back = next((n for n, step in enumerate(found.steps) if n and step < found.steps[n - 1]), None)
    if back is not None and found.steps[back] <= max(low, 1):
        wrong.append(
            f"step {found.steps[back]} comes again after step {found.steps[back - 1]}: is it the"
            " step of the epoch? groups epoch and of, or a group epoch and epoch_steps, make it the"
            " step of the run"
        )
    return wrong
