"""Which text must be in what an expression finds."""

from __future__ import annotations

import pytest

from trainchaos.recovery.playbook.book import literals


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("no space left", ("no space left",)),
        ("one two|three", ("one two", "three")),
        ("colou?r", ("colo",)),
        ("abc+def", ("abc",)),
        (r"abc\d{1,3}defg", ("defg",)),
        (r"abc\.defg", ("defg",)),
        ("(?:one|two) three", (" three",)),
        ("[a|b]cdef", ("cdef",)),
        (r"[]|x]cdef", ("cdef",)),
        (r"[^]|x]cdef", ("cdef",)),
        (r"a\|bcd", ("bcd",)),
        ("(a(b|c)d)efgh", ("efgh",)),
        ("ab|abcd", ()),
        ("(?:abcd)", ()),
        ("abcd{0,2}e", ("abc",)),
        ("a.*b", ()),
        (r"^Killed$", ("Killed",)),
        ("", ()),
    ],
)
def test_literals(pattern: str, found: tuple[str, ...]) -> None:
    assert literals(pattern) == found
