"""``summary.md``: the run on one screen, for a CI step summary or a pull request comment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainchaos.chaos.files import write_whole
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content import figures, postmortems
from trainchaos.reports.content.facts import (
    analyze_command,
    busy,
    degraded,
    failing_slas,
    place,
    tallies,
    went,
)
from trainchaos.reports.content.tables import (
    VERDICT_MARKS,
    Table,
    bullets,
    code_lines,
    numeric,
    plain,
    section,
    table,
    titled,
)
from trainchaos.reports.page import tables

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
    yield f"## {mark} {results.title} {plain(results.scenario)} (exit {results.exit_code})"
    facts = " · ".join(tallies(results))
    lines = [*notes, *figures.to_see(results), *(f"busy: {line}" for line in busy(results))]
    lines += [f"degraded: {line}" for line in degraded(results)]
    for note in (results.reason, *([facts] if facts else []), *lines):
        yield from ("", plain(note))
    yield from titled("Strategies", tables.comparison(results))
    yield from titled("Clauses that did not pass", _clauses(results))
    yield from titled("Invariants that did not pass", _findings(results))
    yield from titled("Faults that did not land or heal", _missed(results))
    skipped = [(skip.cell, skip.reason) for skip in results.skipped]
    yield from titled("Skipped", table(("cell", "reason"), skipped))
    yield from titled("Metrics", figures.metrics(results))
    yield from titled("Rates over all arms", figures.rates(results))
    incidents, more = postmortems.lines(results)
    notes = [f"{more} more are in results.json."] if more else []
    yield from titled("Incidents", table(_INCIDENT, incidents, notes))
    waits = postmortems.stood(run, results)
    said = table(("incident", "who waits for whom"), waits)
    yield from titled("Collectives in which ranks stood", said)
    yield from titled("Nodes", tables.machines(results))
    if results.fidelity:
        yield from section("Not real")
        yield from bullets(results.fidelity)
    yield from section("Reproduce")
    again = [*code_lines(results.reproduce), *code_lines(analyze_command(run, results))]
    yield from ("```sh", *again, "```", "", f"Seal of the record: {plain(results.seal.said)}")


_INCIDENT = (
    "cell",
    numeric("repeat"),
    "fault",
    "outcome",
    "blamed",
    numeric("cost"),
    numeric("lost steps"),
    "decision",
)


def _clauses(results: Results) -> Table:
    rows = []
    for sla in failing_slas(results) + [s for s in results.slas if s.verdict == "inconclusive"]:
        phases = went(results, sla) if sla.verdict == "fail" else ""
        detail = filter(None, (sla.detail, phases and f"where it went (s): {phases}"))
        clause = f"{sla.metric} {sla.clause}"
        seen = (sla.verdict, sla.shown(), sla.counted, "; ".join(detail))
        rows.append((place(results, sla), sla.cell, clause, *seen))
    observed = (numeric("observed"), numeric("n"), "detail")
    return table(("where", "cell", "clause", "verdict", *observed), rows)


def _findings(results: Results) -> Table:
    rows = [
        (cell.id, name, finding.verdict, finding.witness)
        for cell in results.cells
        for name, finding in cell.invariants.items()
        if finding.verdict != "pass"
    ]
    return table(("cell", "invariant", "verdict", "witness"), rows)


def _missed(results: Results) -> Table:
    rows = [
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
    return table(("cell", "fault", numeric("repeat"), "landed", "healed"), rows)
