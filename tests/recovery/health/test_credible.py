"""Which reports of a driver are believed to announce a failure."""

from __future__ import annotations

import pytest

from trainchaos.recovery.health.credible import failing


@pytest.mark.parametrize(
    ("what", "code", "part"),
    [
        ("xid", 48, "XID 48: an uncorrectable"),
        ("xid", 79, "XID 79"),
        ("xid", 94, ""),
        ("xid", 13, ""),
        ("xid", 31, ""),
        ("xid", 0, ""),
        ("ecc", 0, ""),
        ("ecc", 1, "1 uncorrectable ECC error"),
        ("ecc", 3, "3 uncorrectable ECC errors"),
        ("thermal", 96, ""),
        ("nvlink", 48, ""),
        ("unheard-of", 48, ""),
    ],
)
def test_what_announces_a_failure(what: str, code: int, part: str) -> None:
    said = failing(what, code)
    assert said.startswith(part) if part else said == ""
