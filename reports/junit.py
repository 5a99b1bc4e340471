"""``junit.xml`` for CI: one case per SLA clause, per invariant of a cell, and per fault."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainchaos.chaos.files import replacing
from trainchaos.chaos.units import flatten, number, pairs, quantity
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.measure import METRICS
from trainchaos.harness.judge.results import Finding, Results, SlaResult
from trainchaos.reports.content.facts import analyze_command, target_of, went

# XML 1.0 has no way to write these, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COUNTS = (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
Problem = Literal["failure", "error", "skipped"]
_PROBLEMS: Mapping[str, Problem] = {"fail": "failure", "inconclusive": "error"}
"""Of a verdict; a pass has none."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test case; ``problem`` is None when it passed, ``output`` is kept either way."""

    group: str
    name: str
    problem: Problem | None = None
    message: str = ""
    detail: str = ""
    output: str = ""
    line: int | None = None
    took_s: float | None = None
    """Seconds from the injection of a fault to recovery; None for what has no duration of its own.
    """


def render(run: RunDirectory, results: Results) -> Path:
    """Write ``junit.xml`` and return its path."""
    return write(run, results, run.root / "junit.xml")


def write(
    run: RunDirectory, results: Results, path: Path, *, allow_inconclusive: bool = False
) -> Path:
    """Write the file for given results, such as those judged by a gate; returns ``path``.

    ``allow_inconclusive``: what could not be judged is skipped, as the caller exits with 0 for it,
    and else an error, which makes CI red.
    """
    tree = ET.ElementTree(_suites(run, results, allow_inconclusive=allow_inconclusive))
    ET.indent(tree)
    with replacing(path) as stream:
        tree.write(stream, encoding="utf-8", xml_declaration=True)
    return path


def cases(results: Results) -> list[Case]:
    """All cases, with names unique within a group."""
    found = [_sla(results, sla) for sla in results.slas]
    for cell in results.cells:
        found += [_invariant(cell.id, name, finding) for name, finding in cell.invariants.items()]
    found += [_fault(incident) for incident in results.faults]
    found += [
        Case(group=skip.cell, name="cell", problem="skipped", message=skip.reason)
        for skip in results.skipped
    ]
    return _unique(found + _run_case(results, bool(found)))


def _sla(results: Results, sla: SlaResult) -> Case:
    problem, note = _PROBLEMS.get(sla.verdict), ""
    if sla.severity == "warn" and problem:
        problem, note = None, f"warning only: {sla.verdict}. "
    better = METRICS[sla.metric].better if sla.metric in METRICS else "neither"
    observed = sla.shown(better)
    values = ", ".join(quantity(v, sla.unit, better) for v in sla.values)
    phases = went(results, sla) if sla.verdict == "fail" else ""
    lost = f"\nwhere it went, medians in seconds: {phases}" if phases else ""
    return Case(
        group=f"{sla.cell}.sla",
        name=f"{sla.metric} {sla.clause}",
        problem=problem,
        line=sla.line,
        message=f"{sla.metric} {sla.clause}: observed {observed}, n={sla.counted}",
        detail=f"{sla.detail}\nvalues ({sla.unit}): {values}{lost}".strip(),
        output=f"{note}observed {observed}, values {values or 'none'}. {sla.detail}".strip(),
    )


def _invariant(cell: str, name: str, finding: Finding) -> Case:
    return Case(
        group=f"{cell}.invariant",
        name=name,
        problem=_PROBLEMS.get(finding.verdict),
        detail=finding.witness,
        message=f"{name}: {finding.verdict}",
        output=finding.witness,
    )


def _fault(i: Incident) -> Case:
    """A fault passes if it landed and was healed; SLAs and invariants judge how the
    system reacted.
    """
    problem: Problem | None = None
    what = ""
    if not i.fired:
        problem, what = "error", "never fired: nothing was tested"
    elif not i.healed:
        problem, what = "failure", "was not healed"
    elif not i.landed:
        problem, what = "error", "did not land: nothing was tested"
    story = (
        f"{i.kind} on {target_of(i.target)} at step {i.step}: outcome {i.outcome}, detected by"
        f" {i.detected_by} in {number(i.detection_time, 'lower')} s, recovered in"
        f" {number(i.recovery_time, 'lower')} s, at full rate in"
        f" {number(i.time_to_full_rate, 'lower')} s, redundant in"
        f" {number(i.time_to_redundancy, 'lower')} s,"
        f" {i.lost} steps lost. Witness {i.witness}:"
        f" {pairs(i.evidence)}. {i.decision}"
    )
    return Case(
        group=f"{i.cell}.fault",
        name=f"{i.fault} repeat {i.repeat} occurrence {i.occurrence}",
        problem=problem,
        message=f"{i.kind} {i.fault} {what}" if problem else "",
        detail=story,
        output=story,
        took_s=i.recovery_time,
    )


def _run_case(results: Results, tested: bool) -> list[Case]:
    """A separate case for a run that ended early or tested nothing, so that CI does not take it for
    a pass.
    """
    if tested and results.verdict in ("pass", "fail", "inconclusive"):
        return []
    problem: Problem = "skipped" if results.verdict == "skipped" else "error"
    message = f"{results.verdict}: {results.reason}"
    return [Case(group="run", name="run", problem=problem, message=message)]


def _unique(cases: list[Case]) -> list[Case]:
    counts: Counter[tuple[str, str]] = Counter()
    unique = []
    for case in cases:
        counts[case.group, case.name] += 1
        count = counts[case.group, case.name]
        unique.append(case if count == 1 else replace(case, name=f"{case.name} ({count})"))
    return unique


def _suites(run: RunDirectory, results: Results, *, allow_inconclusive: bool) -> ET.Element:
    found = cases(results)
    if allow_inconclusive and results.verdict in ("pass", "fail", "inconclusive"):
        found = [
            replace(case, problem="skipped") if case.problem == "error" else case for case in found
        ]
    tally = {kind: str(sum(c.problem == tag for c in found)) for kind, tag in _COUNTS}
    name = results.scenario + (" (simulated)" if results.simulated else "")
    head = {"name": _text(name), "tests": str(len(found)), **tally}
    root = ET.Element("testsuites", head)
    suite = ET.SubElement(root, "testsuite", {**head, "timestamp": _text(results.started)})
    wall_s = sum(arm.wall_s for arm in results.arms)
    for element in (root, suite):
        element.set("time", f"{wall_s:.3f}")
    properties = ET.SubElement(suite, "properties")
    facts = {
        "verdict": results.verdict,
        "simulated": results.simulated,
        "exit_code": results.exit_code,
        "reason": results.reason,
        "run": results.run_id,
        "seed": results.seed,
        "seal": results.seal.said,
        "reproduce": results.reproduce,
        "analyze": analyze_command(run, results),
        "system": results.system,
    }
    for name, value in flatten(facts):
        ET.SubElement(properties, "property", {"name": _text(name), "value": _text(value)})
    for case in found:
        suite.append(_element(results, case))
    return root


def _element(results: Results, case: Case) -> ET.Element:
    attributes = {
        "classname": _text(f"{results.scenario}.{case.group}"),
        "name": _text(case.name),
    }
    if case.took_s is not None:
        attributes["time"] = f"{case.took_s:.3f}"
    if case.line is not None:
        attributes |= {"file": _text(results.source), "line": str(case.line)}
    element = ET.Element("testcase", attributes)
    if case.problem:
        problem = ET.SubElement(element, case.problem, {"message": _text(case.message)})
        problem.text = _text(case.detail)
    elif case.output:
        ET.SubElement(element, "system-out").text = _text(case.output)
    return element


def _text(value: str) -> str:
    return _FORBIDDEN.sub("\ufffd", str(value))
