"""Fills a template of ``reports/templates``: the one setup of Jinja for every page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainchaos.chaos.units import plural, visible
from trainchaos.reports.content.tables import mark
from trainchaos.reports.page.charts import HATCHES, patterns

TEMPLATES = Path(__file__).parent.parent / "templates"


def fill(template: str, context: Mapping[str, Any]) -> str:
    """The text of a page: values are escaped, control characters spelt out, and a name that the
    context lacks is an error (jinja2.UndefinedError).
    """
    return visible(_environment().get_template(template).render(context))


def styles(*names: str) -> Markup:
    """Files of ``templates`` as they are, one after the other."""
    return Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names))


@cache
def _environment() -> Environment:
    """Of all pages, so that a template is compiled once a process."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"HATCHES": HATCHES, "patterns": patterns, "mark": mark, "plural": plural}
    return made
