"""docs/metrics.md, from its template, the catalogue of metrics and the docstrings of what computes
them: ``python docs/site/metrics.py > docs/metrics.md``.
"""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trainchaos.chaos.scenario.sla import samples_needed
from trainchaos.harness.judge.measure import flops, measure
from trainchaos.harness.judge.measure.catalogue import METRICS
from trainchaos.harness.judge.results import LEAST_RANK_HOURS


def page(template: str = "metrics.md.j2") -> str:
    """A page, as Markdown; a metric without a formula is an error (jinja2.UndefinedError)."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template(template).render(
        **vars(flops),
        METRICS=METRICS,
        FULL_RATE=measure.FULL_RATE,
        FULL_RATE_STEPS=measure.FULL_RATE_STEPS,
        LEAST_RANK_HOURS=LEAST_RANK_HOURS,
        samples_needed=samples_needed,
        told=_told,
    )


def _told(name: str) -> str:
    """The docstring of a module or function."""
    return (inspect.getdoc(pkgutil.resolve_name(name)) or "").replace("``", "`")


if __name__ == "__main__":
    print(page(), end="")
