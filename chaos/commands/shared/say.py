"""Prints text without terminal control sequences, whatever the names in it contain."""

from __future__ import annotations

import unicodedata

import click


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text, on standard error if ``err``. Unprintable characters (escapes, bidirectional
    controls) are shown as JSON escapes.
    """
    click.echo(plain(text), err=err, nl=nl)


def plain(text: str) -> str:
    """The text with unprintable characters as ``\\u001b`` and the like."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or _is_space(one) else _number(one) for one in text)


def _is_space(one: str) -> bool:
    return one in "\n\t" or unicodedata.category(one) == "Zs"


def _number(one: str) -> str:
    code = ord(one)
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code - 0x10000 & 0x3FF):04x}"
