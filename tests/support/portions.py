"""Which members of a family of tests are in ``make test``; the others are in ``make test-all``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def first_in_test(count: int, first: int) -> list[Any]:
    """Parameters 0 to ``count`` - 1, of which all after the ``first`` ones are marked ``long``."""
    return [*range(first), *(pytest.param(n, marks=pytest.mark.long) for n in range(first, count))]


def long_but(values: Sequence[Any], *kept: Any) -> list[Any]:
    """These parameters, of which all but ``kept`` are marked ``long``."""
    assert all(any(one == value for value in values) for one in kept), (
        "a family without its representative"
    )
    found = [
        value if value in kept else pytest.param(value, marks=pytest.mark.long) for value in values
    ]
    assert len([one for one in found if one in kept]) == len(kept)
    return found
