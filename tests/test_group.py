"""The process group that can be left at any moment: waits, aborts, regrouping. Real gloo groups in real processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from recovery.mechanisms.group import GenerationLost, Group


class LateWork:
    """An operation that ends just after a timed wait for it has given up."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Times out the first time, tells the truth afterwards."""
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        """It ended meanwhile."""
        return True


def make_group(check: Callable[[], None] = lambda: None) -> Group:
    """A group that nobody has formed."""
    return Group(generation=1, rank=0, world=2, store_port=1, backend="gloo", timeout_s=1.0, check=check)


def test_work_that_completes_as_its_timed_wait_ends_is_not_a_failure() -> None:
    make_group().wait(LateWork())  # type: ignore[arg-type]


def test_work_that_fails_as_its_timed_wait_ends_is_one() -> None:
    with pytest.raises(GenerationLost, match="closed by peer"):
        make_group().wait(LateWork("Connection closed by peer"))  # type: ignore[arg-type]
