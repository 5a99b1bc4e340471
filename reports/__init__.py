"""Reports: each module reads a finished run and its results, and writes one file into the run
directory.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results


def names() -> list[str]:
    """Names of all reports: the modules of this package; its subpackages hold shared code."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg)


def render(name: str, run: RunDirectory, results: Results) -> Path:
    """Write one report and return its path. Raises ModuleNotFoundError for a name not in
    ``names()``.
    """
    path: Path = importlib.import_module(f"{__name__}.{name}").render(run, results)
    return path


def render_all(run: RunDirectory, results: Results) -> list[Path]:
    """Write all reports and return their paths, in order of their names."""
    return [render(name, run, results) for name in names()]
