"""Lines for people: whoever reads along may go away."""

from __future__ import annotations

import io
import os
import sys

import pytest

from trainchaos.recovery.process.output import say


def test_a_line_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    say("one")
    say("two", who="keeper of node 3")
    assert capsys.readouterr().err == "recovery: one\nkeeper of node 3: two\n"


class Gone(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_nothing_ends_because_the_reader_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        say("to nobody")
    monkeypatch.undo()
    say("to somebody")
    assert capsys.readouterr().err == "recovery: to somebody\n"


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_empties_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb", buffering=0) as read:
        monkeypatch.setattr(sys, "stderr", stream)
        for number in range(5000):
            say(f"line {number} {'x' * 100}")
        seen = read.read(1 << 20).decode().splitlines()
        assert 0 < len(seen) < 5000
        say("again")
        unshown = 5000 - len(seen)
        assert (
            read.read(1 << 20).decode() == f"recovery: ({unshown} lines could not be shown) again\n"
        )
        monkeypatch.undo()
