"""Reports: each module reads a finished run and its results, and writes one file into the run
directory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from pathlib import Path

from trainchaos.chaos import plugins
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results

_PAGE = "html"
__path__ = plugins.with_outside(__path__, "reports")


def names() -> list[str]:
    """Names of all reports: the modules of this package, and plugins from outside; subpackages
    hold shared code.
    """
    return [source.name for source in plugins.sources(plugins.REPORTS)]


def render(name: str, run: RunDirectory, results: Results) -> Path:
    """Write one report and return its path. Raises ModuleNotFoundError for a name not in
    ``names()``.
    """
    module = importlib.import_module(plugins.module_of(plugins.REPORTS, name))
    path: Path = module.render(run, results)
    return path


def render_all(run: RunDirectory, results: Results, but: Collection[str] = ()) -> list[Path]:
    """Write all reports ``but`` these, and return their paths, in order of their names, but the
    page last, which links to the others. A plugin from outside that fails is named on standard
    error, and keeps no other report from being written.
    """
    written = []
    wanted = [one for one in plugins.sources(plugins.REPORTS) if one.name not in but]
    for source in sorted(wanted, key=lambda one: one.name == _PAGE):
        try:
            written.append(render(source.name, run, results))
        except Exception as error:
            if not source.place:
                raise
            what = f"{type(error).__name__}: {error}"
            print(f"report {source.name} ({source.place}) was not written: {what}", file=sys.stderr)
    return written
