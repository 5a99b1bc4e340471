"""Runs that write no report: for tests of what a run does, not of what is told of it. Drawing the
pages takes longer than a simulated run.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainchaos import reports
from trainchaos.chaos.cli import invoke


@pytest.fixture
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """``chaos run`` and ``chaos analyze`` write no reports."""
    monkeypatch.setattr(reports, "render_all", lambda run, results: [])


def unreported(words: Sequence[str]) -> int:
    """The exit code of ``chaos WORDS``, which writes no reports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "render_all", lambda run, results: [])
        return invoke(words)
