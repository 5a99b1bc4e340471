"""What reports say of one run, drawn once for all tests: drawing a page takes a second."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.support.pages.html_page import Page
from tests.support.pages.sample_results import build
from trainchaos import reports
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results


@dataclass(frozen=True)
class Drawn:
    """A run with all of its reports, to be read only."""

    run: RunDirectory
    results: Results
    paths: list[Path]

    @cached_property
    def text(self) -> str:
        """Of the page."""
        return (self.run.root / "report.html").read_text(encoding="utf-8")

    @cached_property
    def page(self) -> Page:
        """As a browser reads it."""
        return Page(self.text)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """A run of three strategies, all reports rendered."""
    run, results = build(tmp_path_factory.mktemp("drawn") / "run")
    return Drawn(run, results, reports.render_all(run, results))
