"""``report.html``: a self-contained page that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainchaos.chaos.files import write_whole
from trainchaos.chaos.units import flatten
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content import artifacts, figures
from trainchaos.reports.content.facts import analyze_command, busy, failing_slas, place, tallies
from trainchaos.reports.content.figures import labels as cell_labels
from trainchaos.reports.content.history import history as read_history
from trainchaos.reports.content.postmortems import postmortems
from trainchaos.reports.content.series import read_pairs
from trainchaos.reports.content.tables import VERDICT_MARKS
from trainchaos.reports.content.timeline import timelines
from trainchaos.reports.page import plots, tables
from trainchaos.reports.page.fill import fill, styles

MAX_PLOTTED_CELLS = 12
GROUPS = ("fail", "inconclusive", "pass")


def render(run: RunDirectory, results: Results, gate: Results | None = None) -> Path:
    """Write ``report.html`` and return its path. Without an event log, only the plots that need it
    are missing.

    ``gate``: the results as a gate judges them, whose verdict then comes first.
    """
    path = run.root / "report.html"
    context = {"results": results, "gate": gate, **_judged(results), **_drawn(run, results)}
    write_whole(path, fill("report.html.j2", {**context, **_files(run, results)}))
    return path


def _judged(results: Results) -> dict[str, Any]:
    """Verdict, clauses, invariants, faults and figures, from the results alone. Clauses and
    invariants are in groups: those that failed, those in doubt, those that hold.
    """
    labels = cell_labels(results)
    better = {(c.id, n): m.better for c in results.cells for n, m in c.metrics.items()}
    failures = [
        (
            place(results, sla),
            f"{labels.get(sla.cell, sla.cell)}: {sla.metric} {sla.clause}, observed "
            f"{sla.shown(better.get((sla.cell, sla.metric), 'neither'))},"
            f" n = {sla.counted}",
        )
        for sla in failing_slas(results)
    ]
    invariants = tables.invariants(results)
    return {
        "css": styles("report.css", "chart.css"),
        "marks": {name: mark for name, mark in VERDICT_MARKS.items() if name != "inconclusive"},
        "tallies": tallies(results),
        "notes": [*(f"busy: {line}" for line in busy(results)), *figures.to_see(results)],
        "failures": failures,
        "comparison": tables.comparison(results),
        "slas": {verdict: tables.slas(results, verdict) for verdict in GROUPS},
        "invariants": {
            verdict: [row for row in invariants if row.verdict == verdict] for verdict in GROUPS
        },
        "labels": labels,
        "faults": tables.faults(results),
        "phases": tables.phases(results),
        "metrics": figures.metrics(results),
        "rates": figures.rates(results),
        "nodes": tables.machines(results),
        "arms": tables.arms(results),
        "facts": [("machine", flatten(results.system)), ("workload", flatten(results.workload))],
    }


def _drawn(run: RunDirectory, results: Results) -> dict[str, Any]:
    """Plots, and notes on what they leave out, and why."""
    labels = cell_labels(results)
    shown = {cell.id: labels[cell.id] for cell in results.cells[:MAX_PLOTTED_CELLS]}
    times, waterfall = plots.recoveries(results, shown)
    spent = plots.wall_seconds(results)
    named = {f"{labels.get(cell, cell)}, {kind}": row for (cell, kind), row in spent.items()}
    most = dict(list(named.items())[: 2 * MAX_PLOTTED_CELLS])
    pairs = read_pairs(run, results, MAX_PLOTTED_CELLS)
    limits = plots.throughput_limits(pairs) if pairs else (1.0, 1.0)
    notes = []
    if len(results.cells) > MAX_PLOTTED_CELLS:
        beyond = len(results.cells) - MAX_PLOTTED_CELLS
        notes.append(
            f"Plots show the first {MAX_PLOTTED_CELLS} cells; {beyond} more are in the tables."
        )
    drawn = {pair.cell for pair in pairs}
    if missing := [label for cell, label in shown.items() if cell not in drawn]:
        notes.append(
            f"No readable event log with a committed step, so no series: {', '.join(missing)}."
        )
    return {
        "times": times,
        "waterfall": waterfall,
        "wall": tables.wall(spent, labels) if spent else None,
        "wall_plot": plots.wall_clock(most) if most else None,
        "series": [
            {
                "label": labels[pair.cell],
                "arm": pair.faulted.arm.id,
                "throughput": plots.throughput(pair, limits),
                "loss": plots.loss(pair),
            }
            for pair in pairs
        ],
        "undrawn": notes,
    }


def _files(run: RunDirectory, results: Results) -> dict[str, Any]:
    """Timelines of the arms, post-mortems of the incidents, the files of the run, the last output
    of arms that did not complete, each with the number left out; and earlier runs.
    """
    lived, unshown = timelines(run, results)
    logs, unlinked = artifacts.logs(run, results)
    tails, untold = artifacts.tails(run, results)
    told, more = postmortems(run, results)
    past = read_history(run, results)
    return {
        "timelines": tables.timelines(lived),
        "unshown": unshown,
        "links": artifacts.of_the_run(run),
        "logs": logs,
        "unlinked": unlinked,
        "postmortems": [tables.postmortem(one) for one in told],
        "more_incidents": more,
        "tails": tails,
        "untold": untold,
        "earlier": past.earlier,
        "past": tables.earlier_runs(past, results),
        "past_plots": tables.past_plots(past, results),
        "analyze": analyze_command(run, results),
    }
