"""Lines for people: whoever reads along may go away."""

from __future__ import annotations

import io
import sys

import pytest

from recovery.shown import say


def test_a_line_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    say("one")
    say("two", who="keeper of node 3")
    assert capsys.readouterr().err == "recovery: one\nkeeper of node 3: two\n"


class Gone(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_nothing_ends_because_the_reader_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        say("to nobody")
