"""Plays a scenario that a benchmark has written, with real processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.loading.load import load
from trainchaos.harness.judge.results import Results
from trainchaos.harness.run.runner import run_scenario


def play(name: str, text: str, runs: Path) -> Results:
    """Write ``text`` to ``runs/name.yaml`` and run it below ``runs``. Raises KeyboardInterrupt if
    the run was interrupted: a benchmark ends then, instead of going on to its next arm.
    """
    path = runs / f"{name}.yaml"
    path.write_text(text)
    print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
    loaded = load(path, build_catalogue(), overrides=[], env={})
    results = run_scenario(loaded, runs=runs, seed=None, live=False, argv=["run", str(path)])
    if results.verdict == "interrupted":
        raise KeyboardInterrupt
    return results
