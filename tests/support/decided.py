"""``chaos run`` of real processes, run again where only a noisy machine left its verdict open.

Other tests share the processors. A pass and a fail stand at once, as does what is inconclusive for
any other reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import EXIT_INCONCLUSIVE
from trainchaos.harness.judge.measure.pressure import TOO_BUSY

Ran = TypeVar("Ran")
TRIES = 3
NOISY = re.compile(f"^{TOO_BUSY}|: run it on a quieter machine|, too short to tell: raise work")


def decided(scenario: Path | str, runs: Path | str, options: Sequence[str] = ("-q",)) -> int:
    """Exit code of ``chaos run`` in this process, as ``until_decided`` says."""
    return until_decided(
        lambda: invoke(["run", str(scenario), "--runs", str(runs), *options]),
        lambda code: code,
        runs,
    )


def until_decided(run: Callable[[], Ran], code_of: Callable[[Ran], int], runs: Path | str) -> Ran:
    """What ``run`` gave the first time that noise did not leave the verdict open, else the last of
    ``TRIES`` times; its run is the latest of the directory ``runs``.
    """
    for _ in range(TRIES - 1):
        ran = run()
        if code_of(ran) != EXIT_INCONCLUSIVE or not NOISY.search(_reason(runs)):
            return ran
    return run()


def _reason(runs: Path | str) -> str:
    """Why the run that ended last has its verdict; "" without one."""
    found = sorted(Path(runs).glob("*/latest/results.json"), key=lambda path: path.stat().st_mtime)
    return str(json.loads(found[-1].read_text())["reason"]) if found else ""
