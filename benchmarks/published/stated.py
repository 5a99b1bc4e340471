"""Reads a documentation page's statements about recovery: its figures, and the measurements named
by its marks.

A page is read in blocks: a paragraph, an item of a list, a table, a fenced text. The mark ``<!--
figures: ID ... -->``, in a block or on the line above it, names the measurements behind the block's
figures; readers do not see it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MARK = re.compile(r"<!-- figures: ([^>]+?) -->")
BEGIN = "<!-- recovery times: made by python -m benchmarks.published -->"
END = "<!-- end of recovery times -->"

_SPEAKS = re.compile(
    r"\brecover|\bnew step\b|\bregroup|\bstood still\b|\bstandstill\b"
    r"|\b(?:back|restart(?:s|ed)?|replaced|goes? on|went on|takes? over|took over)"
    r" (?:after|in|within)\b",
    re.I,
)
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|\b[\w-]+\.md\b")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w|\.\d)")
_TIMED = re.compile(r"(?:(?:-| to )\d+(?:\.\d+)?)? (?:ms|s|milliseconds|seconds)\b", re.I)
_MULTIPLE = re.compile(r" (?:x|times)\b")
_INTERVAL = re.compile(r"\[[\d., to-]+\]")
_UNIT = re.compile(r"\b(?:ms|s|milliseconds|seconds)\b", re.I)
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, kw_only=True)
class Block:
    """``kind``: text, table or fence; ``marks``: ids of measurements; ``text``: on one line,
    without marks; ``above``: the text of the previous block, which describes a table.
    """

    line: int
    kind: str
    marks: tuple[str, ...]
    text: str
    above: str = ""

    def figures(self) -> list[str]:
        """Measured values: fractions, times, multiples, intervals, and numbers that fill a table
        cell.
        """
        inside = [found.span() for found in _INTERVAL.finditer(self.text)]
        return [
            found.group()
            for found in _NUMBER.finditer(self._plain())
            if "." in found.group()
            or _TIMED.match(self.text, found.end())
            or _MULTIPLE.match(self.text, found.end())
            or self.text.startswith(" [", found.end())
            or any(start <= found.start() < end for start, end in inside)
            or (self.kind == "table" and self._fills_its_cell(found))
        ]

    def speaks_of_recovery(self) -> bool:
        """Whether it states a recovery time in words known to this program."""
        plain = self._plain()
        if self.kind == "table":
            said = f"{_blanked(self.above)} {plain}"
            return bool(_SPEAKS.search(said) and _UNIT.search(said) and self.figures())
        timed = any(_TIMED.match(plain, found.end()) for found in _NUMBER.finditer(plain))
        return timed and bool(_SPEAKS.search(plain))

    def says(self, count: int) -> bool:
        """Whether it, or the block above it, states a number of trials: in digits, or as a word up
        to ten.
        """
        words = [str(count), *_WORDS[count - 1 : count], *(["single"] if count == 1 else [])]
        said = f"{self.above} {self.text}"
        return any(re.search(rf"(?<![\w.]){word}(?![\w]|\.\d)", said, re.I) for word in words)

    def _plain(self) -> str:
        """The text without inline code, with the same length; a fence, which is all
        code, is read.
        """
        return self.text if self.kind == "fence" else _blanked(self.text)

    def _fills_its_cell(self, found: re.Match[str]) -> bool:
        before, after = self.text[: found.start()].rstrip(" "), self.text[found.end() :].lstrip(" ")
        return before.endswith("|") and after.startswith("|")


def _blanked(text: str) -> str:
    return _CODE.sub(lambda found: "_" * len(found.group()), text)


def blocks(page: str, excused: Sequence[str] = ()) -> Iterator[Block]:
    """The blocks of a page, except the table generated from the register. ``excused``: phrases to
    skip, as they do not state measurements.
    """
    above, pending = "", []
    for first, kind, lines in _cut(_without_made(page)):
        raw = "\n".join(lines)
        marks = [word for found in MARK.findall(raw) for word in found.split()]
        text = " ".join(MARK.sub("", raw).split())
        if not text:
            pending += marks
            continue
        for phrase in excused:
            text = text.replace(phrase, "…")
        yield Block(line=first, kind=kind, marks=(*pending, *marks), text=text, above=above)
        above, pending = text, []


def flat(page: str) -> str:
    """The text of a page on one line, except the generated table, so that phrases are found across
    line ends.
    """
    return " ".join(_without_made(page).split())


def made(page: str) -> str | None:
    """Content between the two marks of the generated table; None if they are missing."""
    _, begun, rest = page.partition(BEGIN + "\n")
    inside, ended, _ = rest.partition("\n" + END)
    return inside if begun and ended else None


def with_made(page: str, table: str) -> str:
    """The page with another table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def _without_made(page: str) -> str:
    """The page with the lines of the generated table emptied."""
    inside = made(page)
    return page if inside is None else with_made(page, "\n" * inside.count("\n"))


def _cut(page: str) -> Iterator[tuple[int, str, list[str]]]:
    """(number of the first line, kind, lines) of each block."""
    lines: list[str] = []
    first, kind = 0, ""
    for number, line in enumerate([*page.splitlines(), ""], start=1):
        now = _kind(line, kind, lines)
        if now != kind or (now == "text" and _begins(line)):
            if lines:
                yield first, kind, lines
            first, kind, lines = number, now, []
        if now:
            lines.append(line)


def _kind(line: str, before: str, lines: Sequence[str]) -> str:
    """Kind of a line: fence, table, text, or "" for an empty line."""
    if before == "fence" and not (len(lines) > 1 and lines[-1].lstrip().startswith("```")):
        return "fence"
    words = line.strip()
    if words.startswith("```"):
        return "fence"
    return "table" if words.startswith("|") else "text" if words else ""


def _begins(line: str) -> bool:
    return bool(re.match(r"\s*([-*]|\d+\.) |#+ |<!--", line))
