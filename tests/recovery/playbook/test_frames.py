"""An exception with the frame that raised it."""

from __future__ import annotations

import pytest

from trainchaos.recovery.playbook.book import AT, MOST, framed, match_text

FULL = "OSError: [Errno 28] No space left on device"
BEGINS = "Traceback (most recent call last):"


@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "12: ", "(Worker pid=4, ip=10.0.0.1) "])
def test_the_innermost_frame_is_at_the_end_of_the_exception(prefix: str) -> None:
    lines = [BEGINS, '  File "a.py", line 1, in f', "    g()", '  File "b.py", line 2, in g']
    lines += ["    sl = SemLock(", FULL, "step 4 loss 2.3"]
    found = list(framed(f"{prefix}{line}" for line in lines))
    assert len(found) == len(lines) and found[-1] == f"{prefix}step 4 loss 2.3"
    assert found[5] == f'{prefix}{FULL}{AT}File "b.py", line 2, in g sl = SemLock('


def test_a_line_that_ends_no_traceback_is_as_it_was() -> None:
    lines = [FULL, "  indented", BEGINS, FULL, ""]
    assert list(framed(lines)) == lines


def test_a_long_frame_is_cut() -> None:
    (*_, last) = framed([BEGINS, f"  {'x' * 9000}", FULL])
    assert len(last) == len(FULL) + len(AT) + MOST


def test_the_words_are_read_in_their_frame_which_is_not_shown() -> None:
    frame = '  File "/usr/lib/python3.11/multiprocessing/shared_memory.py", line 104, in __init__'
    (match,) = match_text([BEGINS, frame, FULL])
    assert (match.entry.id, match.number, match.line) == ("shared-memory-full", 3, FULL)
    (match,) = match_text([BEGINS, frame.replace("shared_memory", "pool"), FULL])
    assert match.entry.id == "disk-full"
