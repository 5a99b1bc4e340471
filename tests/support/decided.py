"""``chaos run`` of real processes on a machine that other tests share: what only a quieter machine
would decide is left open, and fails no test. Whatever else is not a pass does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import EXIT_INCONCLUSIVE, EXIT_PASS
from trainchaos.harness.judge.measure.pressure import TOO_BUSY
from trainchaos.harness.judge.results import Results

NOISY = re.compile(f"{TOO_BUSY}|: run it on a quieter machine|, too short to tell: raise work")


def decided(scenario: Path | str, runs: Path | str, options: Sequence[str] = ("-q",)) -> int:
    """Exit code of ``chaos run`` in this process, as ``but_for_noise`` says."""
    return but_for_noise(invoke(["run", str(scenario), "--runs", str(runs), *options]), runs)


def but_for_noise(code: int, runs: Path | str) -> int:
    """The exit code of the run that ended last in a directory; 0 where noise alone left its verdict
    open.
    """
    if code != EXIT_INCONCLUSIVE:
        return code
    found = sorted(Path(runs).glob("*/latest/results.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        return code
    said = json.loads(found[-1].read_text())
    unsure = [one["detail"] for one in said["slas"] if one["verdict"] != "pass"]
    unsure += [
        one["witness"]
        for cell in said["cells"]
        for one in cell["invariants"].values()
        if one["verdict"] != "pass"
    ]
    return EXIT_PASS if unsure and all(map(NOISY.search, unsure)) else code


def unpassed(results: Results) -> dict[tuple[str, str], str]:
    """Cell and name of each invariant that did not pass, and its witness; not what noise left
    open.
    """
    return {
        (cell.id, name): one.witness
        for cell in results.cells
        for name, one in cell.invariants.items()
        if one.verdict == "fail" or (one.verdict != "pass" and not NOISY.search(one.witness))
    }
