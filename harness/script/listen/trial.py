"""Tries progress expressions on a log: what they find in it, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from trainchaos.chaos.scenario.progress import PresetProgress, RegexProgress, expressions, key_of
from trainchaos.harness.script.listen.derive import derive
from trainchaos.harness.script.listen.progress import GrowingFile, ProgressReport, RegexReader

SHOWN = 3
"""Lines shown of each sort."""
WIDTH = 120


@dataclass(kw_only=True)
class Trial:
    """What was found. ``steps``: in the order of their lines, counted as printed, and ``at``: the
    number of each line, from 0; ``losses``: those
    read; ``shown``: the first reports and the last, each with its line; ``odd``: what did not parse
    -> some of its lines; ``notes``: of the log; ``wrong``: why these cannot be the steps of the
    workload.
    """

    lines: int = 0
    steps: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    shown: list[tuple[ProgressReport, str]] = field(default_factory=list)
    odd: list[tuple[str, list[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def try_lines(lines: Iterable[str], progress: RegexProgress | PresetProgress, steps: int) -> Trial:
    """Read lines as a run would. ``steps``: workload.steps."""
    reader = RegexReader(None, expressions(progress), steps)
    found = Trial()
    last: tuple[ProgressReport, str] | None = None
    odd: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}
    form = None
    for line in lines:
        found.lines += 1
        refused, total = reader.refused, reader.other_total
        reader.other_total = None
        reports = reader.parse(line)
        other, reader.other_total = reader.other_total, reader.other_total or total
        why = ""
        for report in reports:
            if form not in (None, reader.forms.last):
                found.notes.append(
                    f"the lines change their form at step {report.step}: {line.strip()[:WIDTH]}"
                )
            form = reader.forms.last
            found.steps.append(report.step)
            found.at.append(found.lines - 1)
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
            odd[why] += 1
            some = examples.setdefault(why, [])
            some += [line.strip()[:WIDTH]] * (len(some) < SHOWN)
    if last is not None and last not in found.shown:
        found.shown.append(last)
    found.odd = [(f"{odd[why]} lines: {why}", some) for why, some in examples.items()]
    found.notes = found.notes[:SHOWN]
    found.wrong = list(_wrong(found, reader, key_of(progress), steps))
    found.wrong += changed_form(reader.unread, max(found.steps)) if found.steps else ()
    return found


def changed_form(lines: Iterable[str], last: int) -> Iterator[str]:
    """That lines behind the last step that was read, which is ``last``, look like further steps of
    another form, if they do.
    """
    seen = derive(lines)
    if seen is not None and seen.sure and seen.last > last:
        yield (
            f"after step {last} the lines changed their form, and {seen.steps} that look like"
            f" steps, up to {seen.last}, are not read: {seen.shown}"
        )


def lines_of(log: Path) -> Iterator[str]:
    """Every line of a log, the last one too if it has no end: nobody writes to it any more. Raises
    OSError.
    """
    log.stat()  # a file that is missing is not made
    with closing(GrowingFile(log)) as file:
        for _ in range(file.looks_left() + 1):
            yield from file.read()
        yield from file.unended(over=True, sure=True)


def _wrong(found: Trial, reader: RegexReader, key: str, steps: int) -> Iterator[str]:
    if not found.steps:
        if reader.other_total is not None:
            yield (
                f"the lines state {reader.other_total} steps and workload.steps is {steps}: correct"
                " workload.steps"
            )
        else:
            yield f"{key} finds no step in {found.lines} lines"
        return
    last, low = max(found.steps), found.steps[0]
    if last > steps:
        yield f"step {last} is beyond workload.steps, which is {steps}"
    for before, step in pairwise(found.steps):
        if step < before and step <= max(low, 1):
            if reader.stated and last < steps:
                found.notes.append(
                    f"step {step} comes again after step {before} of {steps}: the log holds several"
                    " runs, or a restart"
                )
            else:
                yield (
                    f"step {step} comes again after step {before}: is it the step of the epoch?"
                    " groups epoch and of, or a group epoch and epoch_steps, make it the step of"
                    " the run"
                )
            return
        if step < before:
            return
