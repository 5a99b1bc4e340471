"""Runs that write no report: for tests of what a run does, not of what is told of it. Drawing the
pages takes longer than a simulated run.
"""

from __future__ import annotations

import pytest

from trainchaos import reports


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """``chaos run`` and ``chaos analyze`` write no reports."""
    monkeypatch.setattr(reports, "render_all", lambda run, results: [])
