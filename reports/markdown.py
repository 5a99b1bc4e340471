"""``summary.md``: the run on one screen, for a CI step summary or a pull request comment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainchaos.chaos.files import write_whole
from trainchaos.chaos.units import MISSING
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content import metric_rows, postmortems
from trainchaos.reports.content.facts import (
    VERDICT_MARKS,
    StrategyFacts,
    analyze_command,
    busy,
    degraded,
    failing_slas,
    nodes,
    place,
    strategies,
    tallies,
    went,
)
from trainchaos.reports.content.tables import bullets, code_lines, pipes, plain, section

# GitHub refuses a step summary of 1 MiB; other steps share it.
MAX_BYTES = 900 * 1024 - 1024


def render(run: RunDirectory, results: Results) -> Path:
    """Write ``summary.md`` (below 900 KiB) and return its path."""
    return write(run, results, run.root / "summary.md")


def write(run: RunDirectory, results: Results, path: Path, notes: Sequence[str] = ()) -> Path:
    """Write the summary of given results, such as those judged by a gate; returns ``path``.
    ``notes``: on how they were judged.
    """
    write_whole(path, _bounded(_lines(run, results, notes)))
    return path


def _bounded(lines: Iterator[str]) -> str:
    """The lines that fit into the size limit, with a note if some were cut."""
    kept, size = [], 0
    for line in lines:
        size += len(line.encode(errors="replace")) + 1
        if size > MAX_BYTES:
            kept += ["", "Cut here; everything is in `results.json` and `report.html`."]
            break
        kept.append(line)
    return "\n".join(kept) + "\n"


def _lines(run: RunDirectory, results: Results, notes: Sequence[str] = ()) -> Iterator[str]:
    mark = VERDICT_MARKS.get(results.verdict, "?")
    yield (f"## {mark} {results.title} {plain(results.scenario)} (exit {results.exit_code})")
    yield ""
    yield plain(results.reason)
    facts = tallies(results)
    if facts:
        yield ""
        yield plain(" · ".join(facts))
    lines = [f"busy: {line}" for line in busy(results)]
    lines += [f"degraded: {line}" for line in degraded(results)]
    for note in (*notes, *metric_rows.to_see(results), *lines):
        yield ""
        yield plain(note)
    yield from _comparison(results)
    yield from _clauses(results)
    yield from _findings(results)
    if results.skipped:
        yield from section("Skipped")
        yield from pipes(("cell", "reason"), [(s.cell, s.reason) for s in results.skipped], "ll")
    if measured := list(metric_rows.rows(results)):
        yield from section("Metrics")
        yield from pipes(metric_rows.HEAD, measured, metric_rows.SIDES)
        for line in metric_rows.absent(results):
            yield ""
            yield plain(line)
    if rated := list(metric_rows.rates(results)):
        yield from section("Rates over all arms")
        yield from pipes(metric_rows.RATES, rated, metric_rows.RATE_SIDES)
    yield from _incidents(run, results)
    yield from _nodes(results)
    if results.fidelity:
        yield from section("Not real")
        yield from bullets(results.fidelity)
    yield from section("Reproduce")
    yield from (
        "```sh",
        *code_lines(results.reproduce),
        *code_lines(analyze_command(run, results)),
        "```",
        "",
        f"Seal of the record: {plain(results.seal.said)}",
    )


def _comparison(results: Results) -> Iterator[str]:
    entries = strategies(results)
    if not entries:
        return
    head = (
        "strategy",
        "verdict",
        "recovery, median (s)",
        "range (s)",
        "n",
        "full rate (s)",
        "redundant (s)",
        "cost (rank-hours a failure)",
        "lost steps",
        "lost samples",
        "goodput",
        "badput (s)",
        "same result as without the fault",
        "provisioned ranks",
    )
    yield from section("Strategies")
    yield from pipes(head, [_row(entry) for entry in entries], "llrlrrrrrrrrlr")
    for note in sorted({entry.note for entry in entries if entry.note}):
        yield ""  # or the note would be a row of the table
        yield f"\\* {plain(note)}"


def _row(e: StrategyFacts) -> tuple[str, ...]:
    ranks = MISSING if e.provisioned is None else str(e.provisioned)
    return (
        e.label,
        f"{VERDICT_MARKS[e.cell.verdict]} {e.cell.verdict}",
        *e.figures,
        ranks + ("*" if e.note else ""),
    )


def _clauses(results: Results) -> Iterator[str]:
    loud = failing_slas(results) + [s for s in results.slas if s.verdict == "inconclusive"]
    if not loud:
        return
    rows = []
    for sla in loud:
        phases = went(results, sla) if sla.verdict == "fail" else ""
        parts = (sla.detail, f"where it went (s): {phases}" if phases else "")
        detail = "; ".join(part for part in parts if part)
        rows.append(
            (
                place(results, sla),
                sla.cell,
                f"{sla.metric} {sla.clause}",
                sla.verdict,
                sla.shown(),
                sla.counted,
                detail,
            )
        )
    yield from section("Clauses that did not pass")
    yield from pipes(
        ("where", "cell", "clause", "verdict", "observed", "n", "detail"), rows, "llllrrl"
    )


def _findings(results: Results) -> Iterator[str]:
    rows = [
        (cell.id, name, finding.verdict, finding.witness)
        for cell in results.cells
        for name, finding in cell.invariants.items()
        if finding.verdict != "pass"
    ]
    if rows:
        yield from section("Invariants that did not pass")
        yield from pipes(("cell", "invariant", "verdict", "witness"), rows, "llll")
    missed = [
        (
            i.cell,
            f"{i.fault} ({i.kind})",
            str(i.repeat),
            "landed" if i.landed else "did not land",
            "healed" if i.healed else "NOT HEALED" if i.fired else "never fired",
        )
        for i in results.faults
        if not (i.landed and i.healed)
    ]
    if missed:
        yield from section("Faults that did not land or heal")
        yield from pipes(("cell", "fault", "repeat", "landed", "healed"), missed, "llrll")


def _incidents(run: RunDirectory, results: Results) -> Iterator[str]:
    rows, more = postmortems.lines(results)
    if rows:
        head = ("cell", "repeat", "fault", "outcome", "blamed", "cost", "lost steps", "decision")
        yield from section("Incidents")
        yield from pipes(head, rows, "lrlllrrl")
    if more:
        yield ""
        yield plain(f"{more} more are in results.json.")
    if waits := postmortems.stood(run, results):
        yield from section("Collectives in which ranks stood")
        yield from pipes(("incident", "who waits for whom"), waits, "ll")


def _nodes(results: Results) -> Iterator[str]:
    rows = [
        (
            str(n.number),
            n.host,
            n.address,
            n.processes,
            f"{n.clock_bound_s * 1e3:.3g}" if n.clock_bound_s else MISSING,
            "; ".join(n.lost),
        )
        for n in nodes(results)
    ]
    if rows:
        yield from section("Nodes")
        yield from pipes(
            ("node", "host", "address", "processes", "clock (±ms)", "lost"), rows, "rlllrl"
        )
