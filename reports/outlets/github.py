"""Writes GitHub Actions annotations on the scenario's lines, and the step summary.

Text from scenarios and logs is escaped, so that it cannot act as a workflow command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content.facts import went

MAX_EACH = 10
"""Annotations per level that GitHub shows for one step; it silently drops the rest."""
MAX_MESSAGE = 4000
SUMMARY_BYTES = 900 * 1024
"""GitHub refuses a step summary above 1 MiB."""
CUT = "\n\nCut here; everything is in the report of the run.\n"


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """A remark on a line of a file. ``file``: relative to the repository; ``line``: from 1, None:
    the file as a whole.
    """

    level: Literal["error", "warning"]
    title: str
    message: str
    file: str
    line: int | None

    def __str__(self) -> str:
        place = {"file": self.file, "line": self.line, "title": self.title}
        properties = ",".join(
            f"{key}={_property(str(value))}" for key, value in place.items() if value
        )
        return f"::{self.level} {properties}::{_data(self.message[:MAX_MESSAGE])}"


def remarks(results: Results, env: Mapping[str, str]) -> list[Annotation]:
    """Annotations for everything that did not pass, errors first; beyond MAX_EACH of a level, the
    last one gives the number of the rest.

    An SLA's annotation is on its clause's line, an invariant's or a run's on the file.
    """
    file = _in_repository(results.source, env)
    found = [*_of_slas(results, file), *_of_invariants(results, file)]
    if results.verdict not in ("pass", "skipped") and not found:
        level: Literal["error", "warning"] = (
            "warning" if results.verdict == "inconclusive" else "error"
        )
        title = f"{results.scenario}: {results.verdict}"
        found.append(
            Annotation(level=level, title=title, message=results.reason, file=file, line=None)
        )
    return [
        *_few([a for a in found if a.level == "error"]),
        *_few([a for a in found if a.level == "warning"]),
    ]


def append_summary(text: str, path: Path) -> None:
    """Append to the step summary, cut at a line end if it would exceed SUMMARY_BYTES.

    Raises InfrastructureError when it cannot be written.
    """
    try:
        room = SUMMARY_BYTES - (path.stat().st_size if path.exists() else 0)
        data = text.encode(errors="replace") + b"\n"
        if len(data) > room:
            kept = data[: max(0, room - len(CUT.encode()))]
            data = kept[: kept.rfind(b"\n") + 1] + CUT.encode() if room > len(CUT.encode()) else b""
        with path.open("ab") as stream:
            stream.write(data)
    except OSError as error:
        raise InfrastructureError(
            f"cannot write the step summary {path}: {error.strerror}",
            hint="say --no-github to leave it out",
        ) from error


def in_actions(env: Mapping[str, str]) -> bool:
    """Whether this is a step of a GitHub workflow."""
    return env.get("GITHUB_ACTIONS") == "true"


def _of_slas(results: Results, file: str) -> Iterator[Annotation]:
    for sla in results.slas:
        if sla.verdict == "pass":
            continue
        broken = sla.verdict == "fail" and sla.severity == "fail"
        phases = went(results, sla, "lower") if sla.verdict == "fail" else ""
        where = f"\nwhere it went, medians in seconds: {phases}" if phases else ""
        yield Annotation(
            level="error" if broken else "warning",
            title=f"{sla.metric} {sla.clause}: {sla.verdict}",
            message=f"{sla.cell}: {sla.detail}{where}",
            file=file,
            line=sla.line,
        )


def _of_invariants(results: Results, file: str) -> Iterator[Annotation]:
    for cell in results.cells:
        for name, finding in cell.invariants.items():
            if finding.verdict != "pass":
                yield Annotation(
                    level="error" if finding.verdict == "fail" else "warning",
                    title=f"{name}: {finding.verdict}",
                    message=f"{cell.id}: {finding.witness}",
                    file=file,
                    line=None,
                )


def _few(remarks: list[Annotation]) -> list[Annotation]:
    if len(remarks) <= MAX_EACH:
        return remarks
    more = len(remarks) - MAX_EACH + 1
    message = f"{more} more are in the summary and in the report"
    last = replace(remarks[0], title=f"{more} more", message=message, line=None)
    return [*remarks[: MAX_EACH - 1], last]


def _in_repository(source: str, env: Mapping[str, str]) -> str:
    root, full = env.get("GITHUB_WORKSPACE", ""), os.path.abspath(source)
    inside = bool(root) and os.path.commonpath([os.path.abspath(root), full]) == os.path.abspath(
        root
    )
    return os.path.relpath(full, root) if inside else source


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
