"""What of a family of tests is played when: in ``make test``, ``make test-long`` or ``make
soak``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def first_in_test(count: int, first: int, more: int = 0) -> list[Any]:
    """Parameters 0 to ``count`` - 1: ``first`` for ``make test``, ``more`` after those for ``make
    test-long``, and the rest for ``make soak``.
    """
    later = [pytest.mark.long] * more + [pytest.mark.soak] * (count - first - more)
    return [*range(first), *(pytest.param(first + n, marks=mark) for n, mark in enumerate(later))]


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
