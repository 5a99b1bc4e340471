"""``report.html`` and ``results.json`` of a projection: one file each, which need no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.files import write_whole
from trainchaos.harness.projection.result import Projection
from trainchaos.reports.page.fill import fill, styles
from trainchaos.reports.projection import plots, tables
from trainchaos.reports.projection.words import compared_said, findings, headline, spares_said

NAME, RESULTS = "report.html", "results.json"


def write(found: Projection, into: Path) -> None:
    """Write both files. Raises InfrastructureError where that is not possible."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        write_whole(into / RESULTS, found.model_dump_json(indent=1) + "\n")
        write_whole(into / NAME, render(found))
    except OSError as error:
        raise InfrastructureError(
            f"cannot write to {into}: {error.strerror}", hint="give another directory: --into DIR"
        ) from error


def render(found: Projection) -> str:
    """The text of the page."""
    sizes = [one.gpus for one in found.spares]  # the line of the largest; a table has all
    spares = [spares_said(found)[sizes.index(max(sizes))]] if sizes else []
    context: dict[str, Any] = {
        "css": styles("report.css", "chart.css", "compare.css"),
        "found": found,
        "days": f"{found.setting.days:g}",
        "headline": headline(found),
        "findings": [*findings(found), *spares],
        "goodput": plots.goodput(found) if found.rows else "",
        "seconds": plots.seconds(found) if found.rows else "",
        "badput": plots.badput(found) if found.rows else None,
        "beside": plots.beside(found.compared) if found.compared else None,
        "legend": plots.legend(found),
        "tables": tables.tables(found),
        "compared": tables.compared(found.compared) if found.compared else None,
        "compared_said": compared_said(found),
        "setting": tables.settings(found),
    }
    return fill("projection.html.j2", context)
