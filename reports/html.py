"""``report.html``: a self-contained page that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainchaos.chaos.files import write_whole
from trainchaos.chaos.units import flatten
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content import artifacts
from trainchaos.reports.content.facts import analyze_command, busy, failing_slas, place, tallies
from trainchaos.reports.content.facts import labels as cell_labels
from trainchaos.reports.content.history import history as read_history
from trainchaos.reports.content.postmortems import postmortems
from trainchaos.reports.content.series import Pair, read_pairs
from trainchaos.reports.content.timeline import timelines as read_timelines
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
    write_whole(path, fill("report.html.j2", _context(run, results, gate)))
    return path


def _context(run: RunDirectory, results: Results, gate: Results | None) -> dict[str, Any]:
    labels = cell_labels(results)
    shown = {cell.id: labels[cell.id] for cell in results.cells[:MAX_PLOTTED_CELLS]}
    times, waterfall = plots.recoveries(results, shown)
    spent = plots.wall_seconds(results)
    named = {f"{labels.get(cell, cell)}, {kind}": row for (cell, kind), row in spent.items()}
    most = dict(list(named.items())[: 2 * MAX_PLOTTED_CELLS])
    pairs = read_pairs(run, results, MAX_PLOTTED_CELLS)
    return {
        "css": styles("report.css", "chart.css"),
        "results": results,
        "gate": gate,
        "marks": {"pass": "✓", "fail": "✗"},
        "tallies": tallies(results),
        "failures": _failures(results),
        "comparison": tables.comparison(results),
        **_judged(results),
        "labels": labels,
        "faults": tables.faults(results),
        "phases": tables.phases(results),
        "metrics": tables.metrics(results),
        "rates": tables.rates(results),
        "times": times,
        "waterfall": waterfall,
        "wall": tables.wall(spent, labels) if spent else None,
        "wall_plot": plots.wall_clock(most) if most else None,
        "series": _series(pairs, labels),
        "undrawn": _undrawn(results, pairs, labels),
        "nodes": tables.machines(results),
        "arms": tables.arms(results),
        **_files(run, results),
        **_history(run, results),
        "facts": [("machine", flatten(results.system)), ("workload", flatten(results.workload))],
        "analyze": analyze_command(run, results),
        "busy": busy(results),
    }


def _judged(results: Results) -> dict[str, Any]:
    """Clauses and invariants in groups: those that failed, those in doubt, those that hold."""
    invariants = tables.invariants(results)
    return {
        "slas": {verdict: tables.slas(results, verdict) for verdict in GROUPS},
        "invariants": {
            verdict: [row for row in invariants if row.verdict == verdict] for verdict in GROUPS
        },
    }


def _files(run: RunDirectory, results: Results) -> dict[str, Any]:
    """Timelines of the arms, post-mortems of the incidents, the files of the run, and the last
    output of arms that did not complete, each with the number left out.
    """
    lines, unshown = read_timelines(run, results)
    logs, unlinked = artifacts.logs(run, results)
    tails, untold = artifacts.tails(run, results)
    told, more = postmortems(run, results)
    return {
        "timelines": tables.timelines(lines),
        "unshown": unshown,
        "links": artifacts.of_the_run(run),
        "logs": logs,
        "unlinked": unlinked,
        "postmortems": tables.postmortems(told),
        "more_incidents": more,
        "tails": tails,
        "untold": untold,
    }


def _history(run: RunDirectory, results: Results) -> dict[str, Any]:
    past = read_history(run, results)
    return {
        "earlier": past.earlier,
        "past": tables.earlier_runs(past, results),
        "past_plots": tables.past_plots(past, results),
    }


def _failures(results: Results) -> list[tuple[str, str]]:
    """Place and description of every clause that failed."""
    labels = cell_labels(results)
    better = {(c.id, n): m.better for c in results.cells for n, m in c.metrics.items()}
    return [
        (
            place(results, sla),
            f"{labels.get(sla.cell, sla.cell)}: {sla.metric} {sla.clause}, observed "
            f"{sla.shown(better.get((sla.cell, sla.metric), 'neither'))},"
            f" n = {sla.counted}",
        )
        for sla in failing_slas(results)
    ]


def _series(pairs: list[Pair], labels: dict[str, str]) -> list[dict[str, Any]]:
    """One entry per plotted cell: its name, the arm shown, throughput and loss."""
    if not pairs:
        return []
    limits = plots.throughput_limits(pairs)
    return [
        {
            "label": labels[pair.cell],
            "arm": pair.faulted.arm.id,
            "throughput": plots.throughput(pair, index, limits),
            "loss": plots.loss(pair, index),
        }
        for index, pair in enumerate(pairs)
    ]


def _undrawn(results: Results, pairs: list[Pair], labels: dict[str, str]) -> list[str]:
    """Notes on what the plots leave out, and why."""
    notes = []
    beyond = len(results.cells) - MAX_PLOTTED_CELLS
    if beyond > 0:
        notes.append(
            f"Plots show the first {MAX_PLOTTED_CELLS} cells; {beyond} more are in the tables."
        )
    drawn = {pair.cell for pair in pairs}
    missing = [labels[c.id] for c in results.cells[:MAX_PLOTTED_CELLS] if c.id not in drawn]
    if missing:
        notes.append(
            f"No readable event log with a committed step, so no series: {', '.join(missing)}."
        )
    return notes
