"""Texts of which one is in whatever a regular expression finds: looking for them first is many
times faster than the expression.
"""

from __future__ import annotations

from collections.abc import Iterator

SHORTEST = 3
_SPECIAL = frozenset(".^$+)]}")
_OPENS = {"(": ")", "[": "]", "{": "}"}


def literals(pattern: str) -> tuple[str, ...]:
    """The longest literal of each alternative; empty if an alternative has none that is long
    enough, so that nothing can be said. Groups and classes are left out, so it may miss some.
    """
    longest = [max(_runs(branch), key=len, default="") for branch in _branches(pattern)]
    return tuple(longest) if all(len(one) >= SHORTEST for one in longest) else ()


def _branches(pattern: str) -> Iterator[str]:
    """The alternatives that are in no group."""
    start = place = 0
    while place < len(pattern):
        if pattern[place] == "|":
            yield pattern[start:place]
            start = place + 1
        place = _after(pattern, place)
    yield pattern[start:]


def _runs(branch: str) -> Iterator[str]:
    """Its literals: characters in a row, of which none is optional."""
    run, place = "", 0
    while place < len(branch):
        char, following = branch[place], _after(branch, place)
        if char in "?*{":  # the character before it may be absent
            yield run[:-1]
            run = ""
        elif char == "\\" or char in _SPECIAL or char in _OPENS:
            yield run
            run = ""
        else:
            run += char
        place = following
    yield run


def _after(pattern: str, place: int) -> int:
    """The place after the character, escape, group or class that begins there."""
    char = pattern[place]
    if char == "\\":
        return place + 2
    if char not in _OPENS:
        return place + 1
    closes, place = _OPENS[char], place + 1
    if char == "[" and pattern[place : place + 1] in ("]", "^"):
        place += 2 if pattern[place : place + 2] == "^]" else 1
    while place < len(pattern) and pattern[place] != closes:
        if char == "(":
            place = _after(pattern, place)
        else:
            place += 2 if pattern[place] == "\\" else 1
    return place + 1
