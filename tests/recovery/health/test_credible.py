"""Which reports of a driver are believed to announce a failure."""

from __future__ import annotations

import pytest

from trainchaos.recovery.health.credible import failing
from trainchaos.recovery.playbook.book import playbook


@pytest.mark.parametrize(
    ("what", "code", "part"),
    [
        ("xid", 48, "XID 48: An uncorrectable"),
        ("xid", 79, "XID 79: The GPU has fallen off the bus"),
        ("xid", 63, ""),
        ("xid", 92, ""),
        ("xid", 94, ""),
        ("xid", 13, ""),
        ("xid", 0, ""),
        ("xid", 99999, ""),
        ("ecc", 0, "ecc: An uncorrectable"),
        ("ecc", 3, "ecc: An uncorrectable"),
        ("thermal", 96, ""),
        ("nvlink", 48, ""),
        ("unheard-of", 48, ""),
    ],
)
def test_what_announces_a_failure(what: str, code: int, part: str) -> None:
    said = failing(what, code)
    assert said.startswith(part) if part else said == ""


def test_the_playbook_is_what_is_asked() -> None:
    book = playbook()
    moving = {number for number in book.xids if (entry := book.by_xid(number)) and entry.move}
    assert moving and {number for number in book.xids if failing("xid", number)} == moving
