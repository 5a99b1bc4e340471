"""Lays tables and lines out in the width of a terminal.

Output that goes to no terminal is never folded: other programs read it line by line.
"""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from typing import IO

LEAST = 30
"""Columns; a terminal that says less is written to as if it had these."""
_READABLE = 24  # columns below which long text becomes a ladder of single words
NO_BREAK = "\u00a0"
"""Stands for a space at which ``fold`` breaks no line."""
_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|h|MiB|GiB|ranks?|steps?|arms?|cores?|rank-hours)(?!\w))")
"""The space between a number and its unit, at which no line is broken."""


def width_of(stream: IO[str]) -> int | None:
    """Columns of the terminal behind a stream (``COLUMNS`` if set); None if it is no terminal."""
    try:
        if not stream.isatty():
            return None
    except ValueError:  # closed
        return None
    return max(LEAST, shutil.get_terminal_size().columns)


def shown(text: str) -> int:
    """Columns that a text takes: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def fold(text: str, width: int | None, hang: str = "") -> list[str]:
    """One line as several of at most ``width`` columns, broken at spaces; all but the first begin
    with ``hang``. A longer word stays whole: a path or a number that was broken cannot be copied.
    """
    if width is None or shown(text) <= width:
        return [text]
    lines, line = [], ""
    for token in re.findall(r"[ \t]+|[^ \t]+", _UNIT.sub(NO_BREAK, text)):
        blank = token.isspace() and token[0] != NO_BREAK
        if not blank and line.strip() and shown(line) + shown(token) > width:
            lines.append(line.rstrip())
            line = hang
        if not (blank and line == hang and lines):
            line += token
    return [each.replace(NO_BREAK, " ") for each in (*lines, line.rstrip())]


def table(
    rows: Sequence[Sequence[str]],
    sides: str = "",
    *,
    width: int | None = None,
    indent: str = "",
    gap: int = 2,
    headed: bool = False,
) -> list[str]:
    """Rows in aligned columns. ``sides``: for each column ``l``, text, or ``r``, numbers, which are
    never broken; missing ones are text. ``headed``: the first row names the columns.

    Where ``width`` is too small, spaces between columns shrink, then text is folded, the widest
    column first, and so are heads. If that is not enough, each row becomes a block of lines.
    """
    laid = laid_out(rows, sides, width=width, indent=indent, gap=gap, headed=headed)
    return [line for block in laid for line in block]


def laid_out(
    rows: Sequence[Sequence[str]],
    sides: str = "",
    *,
    width: int | None = None,
    indent: str = "",
    gap: int = 2,
    headed: bool = False,
) -> list[list[str]]:
    """As ``table``, the lines of each row apart. In blocks, the heads have no lines."""
    if not rows:
        return []
    sides = sides.ljust(len(rows[0]), "l")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    total = len(indent) + sum(widths) + gap * (len(widths) - 1)
    if width is None or total <= width:
        return [[_line(row, widths, sides, indent, gap, len)] for row in rows]
    fitted = _fitted(rows, sides, width - len(indent), headed=headed)
    if fitted is None:
        return _blocks(rows, width, indent, headed=headed)
    return _folded(rows, sides, fitted, indent, headed=headed)


def _folded(
    rows: Sequence[Sequence[str]], sides: str, widths: Sequence[int], indent: str, *, headed: bool
) -> list[list[str]]:
    """Each row as the lines that its longest cell needs; heads stand on their columns."""
    laid = []
    for number, row in enumerate(rows):
        cells = [
            [part.strip(" ") for part in fold(text, most)]
            for text, most in zip(row, widths, strict=True)
        ]
        high, lines = max(map(len, cells)), []
        for at in range(high):
            first = [high - len(cell) if headed and number == 0 else 0 for cell in cells]
            part = [
                cell[at - less] if 0 <= at - less < len(cell) else ""
                for cell, less in zip(cells, first, strict=True)
            ]
            lines.append(_line(part, widths, sides, indent, 2, shown))
        laid.append(lines)
    return laid


def _line(
    cells: Sequence[str],
    widths: Sequence[int],
    sides: str,
    indent: str,
    gap: int,
    measure: Callable[[str], int],
) -> str:
    padded = []
    for cell, width, side in zip(cells, widths, sides, strict=True):
        blank = " " * (width - measure(cell))
        padded.append(blank + cell if side == "r" else cell + blank)
    return (indent + (" " * gap).join(padded)).rstrip()


def _fitted(
    rows: Sequence[Sequence[str]], sides: str, width: int, *, headed: bool
) -> list[int] | None:
    """Widths of the columns that fit together; None if there are none."""
    widths, least = [], []
    for column, side in zip(zip(*rows, strict=True), sides, strict=True):
        natural = max(map(shown, column))
        glued = [_UNIT.sub(NO_BREAK, cell).split(" ") for cell in column]
        words = max(shown(word) for cell in glued for word in cell)
        body = max((shown(cell) for cell in column[1 if headed else 0 :]), default=0)
        widths.append(natural)
        least.append(max(words, body) if side == "r" else max(words, min(natural, _READABLE)))
    room = width - 2 * (len(widths) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        shrinkable = (n for n in range(len(widths)) if widths[n] > least[n])
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def _blocks(
    rows: Sequence[Sequence[str]], width: int, indent: str, *, headed: bool
) -> list[list[str]]:
    """Each row as its first cell, and below it the others with their heads, which have no lines of
    their own.
    """
    heads, body = (rows[0], rows[1:]) if headed else ([""] * len(rows[0]), rows)
    laid: list[list[str]] = [[]] if headed else []
    for first, *cells in body:
        lines = fold(indent + first, width, indent + "  ")
        pairs = zip(heads[1:], cells, strict=True)
        named = [f"{head}: {cell}" if head else cell for head, cell in pairs if cell]
        rest = "   ".join(
            text.replace(" ", NO_BREAK) if shown(text) <= width // 2 else text for text in named
        )
        laid.append(lines + (fold(f"{indent}  {rest}", width, f"{indent}    ") if rest else []))
    return laid
