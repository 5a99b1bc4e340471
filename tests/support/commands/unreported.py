"""Command lines whose reports nobody reads: to draw them takes longer than a small simulation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainchaos import reports
from trainchaos.chaos.cli import invoke


def unreported(words: Sequence[str]) -> int:
    """The exit code of ``chaos WORDS``, which writes no reports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "render_all", lambda run, results: [])
        return invoke(words)
