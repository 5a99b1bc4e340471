"""Makes Markdown text and tables in which content cannot act as markup."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trainchaos.reports.content.figures import visible

MAX_ROWS = 200
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&@$])")


def escape(text: str) -> str:
    """Escape text: no markup, no HTML, no mention, one line."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _SPECIAL.sub(r"\\\1", flat)


def section(title: str) -> tuple[str, str, str]:
    """A heading with empty lines around it."""
    return "", f"### {title}", ""


def table(
    head: Sequence[str],
    body: Sequence[Sequence[str]],
    sides: str,
    *,
    most: int = MAX_ROWS,
    rest: str = "results.json",
) -> Iterator[str]:
    """A pipe table of at most ``most`` rows; ``sides`` has an l or r for each column."""
    yield "| " + " | ".join(escape(word) for word in head) + " |"
    yield "|" + "|".join("---:" if side == "r" else "---" for side in sides) + "|"
    for row in body[:most]:
        yield "| " + " | ".join(escape(cell) for cell in row) + " |"
    if len(body) > most:
        yield ""
        yield f"{len(body) - most} more in `{rest}`."


def code_lines(text: str) -> list[str]:
    """Lines for a fenced block, without fences that would end it early."""
    return [visible(line).replace("```", "'''") for line in text.splitlines()]
