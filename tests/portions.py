"""Tests with many seeds: the first of them in ``make test``, all of them in ``make soak``."""

from __future__ import annotations

from typing import Any

import pytest


def first_in_test(count: int, first: int) -> list[Any]:
    """Parameters 0 to ``count`` - 1, of which those from ``first`` on are marked ``soak``."""
    return [pytest.param(n, marks=pytest.mark.soak if n >= first else ()) for n in range(count)]
