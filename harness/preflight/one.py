"""``python -m trainchaos.harness.preflight.one --parent PID PLACE``: whether one place is fit. A
supervisor asks this before a process rejoins there.

Prints one line of JSON: ``fit`` (true, false; null: nothing could be measured) and ``said`` (what
is unfit, or why nothing was measured). Exit status: 0 fit, 1 unfit, 2 wrong usage, 7 not measured.
It ends with its parent, and its own processes with it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence

from trainchaos.chaos.errors import EXIT_FAIL, EXIT_PASS, EXIT_SKIPPED
from trainchaos.harness.preflight.check import Findings
from trainchaos.harness.preflight.preflight import fit
from trainchaos.recovery.process.processes import die_with

BESIDE_A_JOB_S = 55.0
"""For all: on a busy machine a start, which imports torch, took more than 20 s. The checks take a
few seconds each, however much is left.
"""


def main(argv: Sequence[str] | None = None, *, measure: Callable[..., Findings] = fit) -> int:
    """Measure, print, and return the exit status. ``measure``: as ``preflight.fit``."""
    usage = argparse.ArgumentParser(prog="python -m trainchaos.harness.preflight.one")
    usage.add_argument("place", help="cuda:0, cpu:2, or cpu")
    usage.add_argument("--parent", type=int, help="the process with which this one ends")
    usage.add_argument("--seconds", type=float, default=BESIDE_A_JOB_S, help="default %(default)g")
    given = usage.parse_args(argv)
    if not re.fullmatch(r"cpu|(cpu|cuda):\d{1,5}", given.place):
        usage.error(f"{given.place!r} is no place: cuda:0, cpu:2, or cpu")
    if given.parent is not None:
        die_with(given.parent)
    # a job's ranks share the processors of a machine without GPUs
    place = "cpu:0" if given.place == "cpu" else given.place
    try:
        found = measure(place, total_s=given.seconds)
    except ValueError as error:
        usage.error(str(error))
    said = [one.said for one in found.unfit]
    measured = bool(found.unfit) or found.fit
    if not measured:
        said = [one.said for one in found.findings if one.state == "unmeasured"]
    print(json.dumps({"fit": found.fit if measured else None, "said": said}))
    if not measured:
        return EXIT_SKIPPED
    return EXIT_PASS if found.fit else EXIT_FAIL


if __name__ == "__main__":
    sys.exit(main())
