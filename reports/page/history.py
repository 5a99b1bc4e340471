"""Earlier runs of the same test beside the present one: a small plot for each cell, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content.facts import VERDICT_MARKS, labels
from trainchaos.reports.content.figures import MISSING, few, number, plural, range_of, with_unit
from trainchaos.reports.content.history import History, PastRun
from trainchaos.reports.page.table import PageColumn, PageTable, mark, numeric, table, two_lines

MAX_CELLS = 6
WIDTH, HEIGHT, PAD, FOOT = 260.0, 84.0, 10.0, 18.0


def cells_of(past: History, results: Results) -> list[str]:
    """Ids of the cells that are shown: the first of those with a recovery time in any run."""
    known = {cell for run in past.runs for cell in run.recovery}
    return [cell.id for cell in results.timed if cell.id in known][:MAX_CELLS]


def runs_table(past: History, results: Results) -> PageTable:
    """One row for each run, the newest first, and the median recovery time of each cell."""
    names, cells = labels(results), cells_of(past, results)
    hosts = {run.host for run in past.runs}
    columns = [
        PageColumn(name="run"),
        PageColumn(name="verdict", about="of the whole run, all its cells and clauses"),
        *(numeric(names[cell], "recovery, s, median") for cell in cells),
        *([PageColumn(name="machine")] if len(hosts) > 1 else []),
    ]
    rows = [
        [
            _named(run),
            _verdict(run),
            *(_figure(run.recovery.get(cell)) for cell in cells),
            *([run.host or MISSING] if len(hosts) > 1 else []),
        ]
        for run in reversed(past.runs)
    ]
    notes = []
    left = sum(c.id not in cells for c in results.timed)
    if cells and left:
        notes.append(f"{plural(left, 'more cell')} of this run not shown here.")
    if past.beyond:
        notes.append(f"The last {len(past.runs)} runs; older ones were not read.")
    return table(columns, rows, notes)


def _named(run: PastRun) -> Markup:
    """Its name, with a link to its own report; below it when it began."""
    name = Markup('<span class="whole">{}</span>').format(run.run_id)
    if run.address:
        name = Markup('<a href="{}">{}</a>').format(run.address, name)
    return two_lines(name, f"this run, {run.started}" if run.present else run.started)


def _verdict(run: PastRun) -> Markup:
    known = run.verdict if run.verdict in VERDICT_MARKS else "inconclusive"
    return mark(known, run.title)


def _figure(metric: Metric | None) -> str:
    if metric is None or metric.median is None:
        return MISSING
    shown = number(metric.median, metric.better) + few(metric)
    return two_lines(shown, range_of(metric)) if metric.n > 1 else shown


def plots(past: History, results: Results) -> list[tuple[str, Markup]]:
    """Label and plot of each cell that has a recovery time in more than one run."""
    names = labels(results)
    return [
        (names[cell], _plot(past.runs, cell, names[cell]))
        for cell in cells_of(past, results)
        if sum(cell in run.recovery for run in past.runs) > 1
    ]


def _plot(runs: Sequence[PastRun], cell: str, name: str) -> Markup:
    """Medians from the oldest run to this one, from zero up; one that never recovered is an arrow
    at the top. The points of failed runs are crossed, that of this run is filled.
    """
    medians = [run.recovery[cell].median for run in runs if cell in run.recovery]
    known = [m for m in medians if m is not None and math.isfinite(m)]
    top = max(known, default=0.0) * 1.15 or 1.0
    step = (WIDTH - 2 * PAD) / max(1, len(runs) - 1)
    bottom = HEIGHT - FOOT
    parts, line = [], []
    for at, run in enumerate(runs):
        metric = run.recovery.get(cell)
        if metric is None or metric.median is None:
            continue
        x, never = PAD + at * step, math.isinf(metric.median)
        y = PAD if never else bottom - metric.median / top * (bottom - PAD)
        line.append(f"{_n(x)},{_n(y)}")
        parts.append(_point(run, metric, x, y, never=never))
    label = f"Median recovery time of {name} over {plural(len(line), 'run')}, up to {number(top)} s"
    return Markup(
        '<svg class="past" viewBox="0 0 {w} {h}" role="img" aria-label="{label}"><title>{label}'
        '</title><line class="axis" x1="{p}" x2="{r}" y1="{b}" y2="{b}"/>'
        '<polyline class="way" points="{line}"/>{parts}'
        '<text class="tick" x="{p}" y="{t}">{first}</text>'
        '<text class="tick" x="{r}" y="{t}" text-anchor="end">this run: {last}</text></svg>'
    ).format(
        w=_n(WIDTH),
        h=_n(HEIGHT),
        label=label,
        p=_n(PAD),
        r=_n(WIDTH - PAD),
        b=_n(bottom),
        line=" ".join(line),
        parts=Markup("").join(parts),
        t=_n(HEIGHT - 4),
        first=runs[0].started[:10],
        last=_last(runs[-1].recovery.get(cell)),
    )


def _last(metric: Metric | None) -> str:
    return MISSING if metric is None else with_unit(metric.median, metric.unit, metric.better)


def _point(run: PastRun, metric: Metric, x: float, y: float, *, never: bool) -> Markup:
    said = (
        f"{run.started}, {run.title}: median {with_unit(metric.median, metric.unit)},"
        f" n = {metric.counted}"
    )
    kind = "point now" if run.present else "point"
    shape = (
        Markup('<path class="{}" d="M{} {}l5 8h-10z"/>').format(kind, _n(x), _n(y - 5))
        if never
        else Markup('<circle class="{}" cx="{}" cy="{}" r="4"/>').format(kind, _n(x), _n(y))
    )
    cross = (
        Markup('<path class="cross" d="M{} {}l10 10m0 -10l-10 10"/>').format(_n(x - 5), _n(y - 5))
        if run.verdict == "fail"
        else Markup("")
    )
    return Markup("<g><title>{}</title>{}{}</g>").format(said, shape, cross)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
