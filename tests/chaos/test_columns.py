"""Tables and lines in the width of a terminal: nothing is lost, and no number is broken."""

from __future__ import annotations

import io
import re

import pytest

from trainchaos.chaos import columns

ROWS = [
    ("", "recovery", "lost steps", "same result as without the fault"),
    ("checkpoint-restart", "0.881 s", "16", "bit for bit"),
    ("drop-replica", "11.9 s (1 never)", "0", "within the control band"),
]


def words(lines: list[str]) -> list[str]:
    return sorted(re.findall(r"[^\s:]+", "\n".join(lines)))


def test_without_a_terminal_nothing_is_folded() -> None:
    assert columns.width_of(io.StringIO()) is None
    wide = columns.table(ROWS, "lrrl", gap=3, indent="  ", headed=True)
    assert wide[1] == "  checkpoint-restart            0.881 s           16   bit for bit"
    assert columns.table(ROWS, "lrrl", gap=3, indent="  ", headed=True, width=200) == wide
    assert columns.fold("a " * 500, None) == ["a " * 500]


@pytest.mark.parametrize("width", [100, 80, 70, 60, 50, 40, 30])
def test_a_table_fits_and_keeps_its_numbers(width: int) -> None:
    lines = columns.table(ROWS, "lrrl", gap=3, indent="  ", headed=True, width=width)
    assert max(map(columns.shown, lines)) <= width, "\n".join(lines)
    text = "\n".join(lines)
    for whole in ("0.881 s", "11.9 s (1 never)", "checkpoint-restart", "drop-replica"):
        assert whole in text, text
    for row in ROWS[1:]:
        assert set(words([*row])) <= set(words(lines))


def test_a_table_that_does_not_fit_becomes_blocks() -> None:
    rows = [("", *(f"metric {n}" for n in range(9))), *((f"cell-{c}", *"123456789") for c in "ab")]
    lines = columns.table(rows, "l" + "r" * 9, headed=True, width=44)
    assert lines[:2] == ["cell-a", "  metric 0: 1   metric 1: 2   metric 2: 3"]
    assert "cell-b" in lines and max(map(columns.shown, lines)) <= 44


def test_only_the_widest_text_is_folded() -> None:
    rows = [("kill", "ready  ", "a rank is killed " * 6), ("hang", "missing", "short")]
    lines = columns.table(rows, width=60)
    assert max(map(len, lines)) <= 60 and lines[0].startswith("kill  ready    a rank")
    assert lines[1].startswith(" " * 15 + "a rank") or lines[1].startswith(" " * 15 + "killed")


def test_a_long_word_stays_whole_and_a_unit_at_its_number() -> None:
    path = "/a/very/long/path/" + "x" * 60
    assert columns.fold(f"see {path} there", 40, "    ") == ["see", f"    {path}", "    there"]
    assert columns.fold("took at most 12.5 s", 17) == ["took at most", "12.5 s"]
    assert columns.fold("below 95 % of it", 8) == ["below", "95 % of", "it"]


def test_wide_characters_count_twice() -> None:
    assert columns.shown("東京e\u0301") == 5
    assert max(map(columns.shown, columns.fold("東京 " * 20, 31))) <= 31
