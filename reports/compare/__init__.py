"""The pages of a comparison of stacks: ``compare.html``, ``compare.md`` and ``compare.json``."""

from __future__ import annotations

from pathlib import Path

from trainchaos.chaos.files import read_model, write_whole
from trainchaos.harness.compare.result.model import Comparison


def write_all(comparison: Comparison, directory: Path) -> list[Path]:
    """Write the three files into ``directory``, which exists, and return their paths. Raises
    OSError.
    """
    from trainchaos.reports.compare.pages import html, markdown

    pages = {"compare.html": html, "compare.md": markdown, "compare.json": _json}
    written = []
    for name, page in pages.items():
        path = directory / name
        write_whole(path, page(comparison))
        written.append(path)
    return written


def _json(comparison: Comparison) -> str:
    return comparison.model_dump_json(indent=1) + "\n"


def load(path: Path) -> Comparison:
    """Read ``compare.json`` back. Raises OSError, and ValueError for a file of another form."""
    return read_model(path, Comparison, follow=True)
