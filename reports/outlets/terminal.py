"""Closing summary of a run in a terminal: verdict, failures with reasons, strategies,
next steps.
"""

from __future__ import annotations

import re

from trainchaos.chaos.columns import fold, table
from trainchaos.chaos.stats import median_ci95
from trainchaos.chaos.units import interval, visible
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.measure.samples import per_arm
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content import figures
from trainchaos.reports.content.facts import (
    StrategyFacts,
    analyze_command,
    busy,
    degraded,
    failing_slas,
    latest_or_own,
    nodes,
    place,
    shown_path,
    strategies,
    tallies,
    went,
)

MAX_FAILURES = 20
_HEAD = (
    "",
    "recovery",
    "full rate",
    "redundant",
    "lost steps",
    "lost samples",
    "goodput",
    "same result as without the fault",
)


def summary(
    results: Results, run: RunDirectory, *, gated: bool = False, width: int | None = None
) -> str:
    """The closing block as plain text, no newline at the end; control characters are made
    visible. Of a run that was interrupted, what is inconclusive for that reason is not listed.

    ``gated``: a gate has the verdict, and this is only what was measured. ``width``: columns of the
    terminal, into which all but paths and commands is folded; None: nothing is.
    """
    word = "measured" if gated else "verdict"
    if _unobserved(results):
        line = f"{word} {results.title} (exit {results.exit_code})   {results.reason}"
        blocks = [line, *_skipped(results), *_kept(results, run), _next(results, run)]
        return "\n".join(visible(line) for line in blocks)
    if results.verdict == "interrupted" and all(a.outcome != "completed" for a in results.arms):
        blocks = [_verdict(results, word), *_failures(results), *_skipped(results)]
        middle, after = list[str](), list[str]()
    else:
        blocks = [_verdict(results, word), *_failures(results), *_doubts(results)]
        middle = _table(results, width)
        after = [
            *figures.short(results),
            *(f"busy      {line}" for line in busy(results)),
            *(f"degraded  {line}" for line in degraded(results)),
            *_lost_nodes(results),
            *(f"not real  {line}" for line in results.fidelity),
        ]
    lines = [
        *(line for block in blocks for line in _folded(block, width)),
        *middle,
        *(line for block in after for line in _folded(block, width)),
        *_kept(results, run),
        _next(results, run),
    ]
    return "\n".join(visible(line) for line in lines)


def _folded(block: str, width: int | None) -> list[str]:
    return [
        part
        for line in visible(block).split("\n")
        for part in fold(line, width, " " * (4 + len(line) - len(line.lstrip())))
    ]


def _unobserved(results: Results) -> bool:
    """Whether the run stopped at its first arm, as its command could not be observed: all else that
    is inconclusive follows from that.
    """
    if results.verdict != "inconclusive" or not results.workload.get("command"):
        return False
    found = [arm.invariants.get("progress") for arm in results.arms]
    return (
        len(found) == 1
        and found[0] is not None
        and found[0].verdict == "inconclusive"
        and found[0].witness in results.reason
        and not any(incident.landed for incident in results.faults)
    )


def _verdict(results: Results, word: str) -> str:
    code = "" if results.exit_code == 0 else f" (exit {results.exit_code})"
    line = f"{word} {results.title}{code}"
    facts = ", ".join(tallies(results))
    # Failing clauses are spelt out below; the reason would say them twice.
    tail = "" if results.verdict == "pass" or failing_slas(results) else results.reason
    witnesses = [finding.witness for cell in results.cells for finding in cell.invariants.values()]
    if any(witness in tail for witness in witnesses if witness):
        # the lines quoted follow below
        tail = re.sub(
            r"; its (?:first error|error, \d+ times|last lines):$", "", tail.split("\n")[0]
        )
    return "   ".join(part for part in (line, facts, tail) if part)


def _failures(results: Results) -> list[str]:
    """Two lines for each failing clause: which one and what was seen, then where the time went."""
    lines: list[str] = []
    failing = failing_slas(results)
    for sla in failing[:MAX_FAILURES]:
        metric = next((c.metrics.get(sla.metric) for c in results.cells if c.id == sla.cell), None)
        better = metric.better if metric else "neither"
        between = interval(median_ci95(per_arm(sla.values, sla.arms)))
        ci = f" {between}" if between else ""
        lines.append(
            f"  {place(results, sla)}  {sla.cell}  {sla.metric}  {sla.clause}   "
            f"observed {sla.shown(better)}{ci}, n={sla.counted}"
        )
        if phases := went(results, sla):
            lines.append(f"    where it went (s): {phases}")
    if len(failing) > MAX_FAILURES:
        lines.append(f"  and {len(failing) - MAX_FAILURES} more failing clauses, in the report")
    return lines + _invariants(results, "fail", "failed")


def _doubts(results: Results) -> list[str]:
    """What could not be judged, and what was missing."""
    if results.verdict == "interrupted":
        return _skipped(results)
    lines = [
        f"  {s.cell}  {s.metric}  {s.clause}  inconclusive: {s.detail}"
        for s in results.slas
        if s.verdict == "inconclusive"
    ]
    lines += _invariants(results, "inconclusive", "inconclusive")
    return [*lines, *(f"  {line}" for line in figures.to_see(results)), *_skipped(results)]


def _invariants(results: Results, verdict: str, word: str) -> list[str]:
    return [
        f"  {cell.id}  {name}  {word}: {finding.witness}"
        for cell in results.cells
        for name, finding in cell.invariants.items()
        if finding.verdict == verdict
    ]


def _skipped(results: Results) -> list[str]:
    return [f"  {skip.cell}  skipped: {skip.reason}" for skip in results.skipped]


def _table(results: Results, width: int | None) -> list[str]:
    if not results.cells:
        return []
    entries = strategies(results)
    rows = [_HEAD, *([visible(cell) for cell in _row(entry)] for entry in entries)]
    lines = table(rows, "lrrrrrrl", width=width, indent="  ", gap=3, headed=True)
    notes = sorted({entry.note for entry in entries if entry.note})
    return [*lines, *(part for note in notes for part in fold(f"  * {note}", width, "    "))]


def _row(entry: StrategyFacts) -> tuple[str, ...]:
    recovery = entry.metric("recovery_time", unit=True)
    return (
        entry.label,
        recovery + (f" ({entry.never} never)" if entry.never else ""),
        entry.metric("time_to_full_rate", unit=True),
        entry.metric("time_to_redundancy", unit=True),
        entry.metric("steps_lost"),
        entry.metric("samples_lost"),
        entry.metric("goodput") + ("*" if entry.note else ""),
        entry.cell.exactness,
    )


def _lost_nodes(results: Results) -> list[str]:
    """A line for each node that an incident took, or that went of itself."""
    return [
        f"  node {n.number} ({n.host}) was lost in {why}" for n in nodes(results) for why in n.lost
    ]


def _kept(results: Results, run: RunDirectory) -> list[str]:
    """Where the scratch directories of commands are that did not end well."""
    if not results.workload.get("command"):
        return []
    failed = [arm for arm in results.arms if arm.outcome not in ("completed", "interrupted")]
    left = [path for arm in failed if (path := run.checkpoints(arm.id)).is_dir()]
    return [f"kept    {shown_path(path)}: what the command of this arm left" for path in left]


def _next(results: Results, run: RunDirectory) -> str:
    report = shown_path(latest_or_own(run) / "report.html")
    return (
        f"report  {report}\nagain   {results.reproduce}\njudge   {analyze_command(run, results)}"
        f"\nseal    {results.seal.said}"
    )
