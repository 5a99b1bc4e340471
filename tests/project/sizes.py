"""Lines of Python of each package, with the most that it may have: they only fall. ``python -m
tests.project.sizes`` prints the table, ``--write`` lowers what has fallen.

A ceiling is raised only by hand, for a feature that an issue names; the budget is what it is to
come to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.project.parsed import ROOT

CEILINGS = Path(__file__).with_name("ceilings.json")
BUDGETS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "chaos: commands, cli, columns": (3200, ("chaos/commands", "chaos/cli.py", "chaos/columns.py")),
    "chaos: scenario, source, loading, planning": (
        4600,
        ("chaos/scenario", "chaos/source", "chaos/loading", "chaos/planning"),
    ),
    "chaos: events, schedule": (2200, ("chaos/events", "chaos/schedule")),
    "chaos: fault, faults": (3700, ("chaos/fault", "chaos/faults")),
    "chaos: the rest": (1500, ("chaos",)),
    "recovery/checkpoint": (4300, ("recovery/checkpoint",)),
    "recovery/health": (3200, ("recovery/health",)),
    "recovery/nodes": (3200, ("recovery/nodes",)),
    "recovery/collectives": (3300, ("recovery/collectives",)),
    "recovery/rank, data, state": (5000, ("recovery/rank", "recovery/data", "recovery/state")),
    "recovery/supervise, policy": (5300, ("recovery/supervise", "recovery/policy")),
    "recovery/process, transport, detection": (
        3600,
        ("recovery/process", "recovery/transport", "recovery/detection"),
    ),
    "recovery: the rest": (3900, ("recovery",)),
    "harness/judge": (8000, ("harness/judge",)),
    "harness/launch, launchers": (6300, ("harness/launch", "harness/launchers")),
    "harness/compare, peers": (4500, ("harness/compare", "harness/peers")),
    "harness/fuzz": (3200, ("harness/fuzz",)),
    "harness/script, draft": (5500, ("harness/script", "harness/draft")),
    "harness/sim": (3000, ("harness/sim",)),
    "harness/projection": (2300, ("harness/projection",)),
    "harness/run, arm": (2800, ("harness/run", "harness/arm")),
    "harness/inject, rank": (3000, ("harness/inject", "harness/rank")),
    "harness/explain, attribute": (1900, ("harness/explain", "harness/attribute")),
    "harness/preflight, gating": (2400, ("harness/preflight", "harness/gating")),
    "harness/undo, host, workloads": (
        2500,
        ("harness/undo", "harness/host", "harness/workloads", "harness"),
    ),
    "reports": (5000, ("reports",)),
    "benchmarks": (5000, ("benchmarks",)),
    "tests": (65000, ("tests",)),
}
"""Row -> its budget, and the folders and files that it counts, without those of rows before it."""


def sizes() -> dict[str, int]:
    """Row -> lines of Python now."""
    left = {
        path.relative_to(ROOT): path
        for folder in ("chaos", "recovery", "harness", "reports", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    found = {}
    for row, (_, places) in BUDGETS.items():
        mine = [at for at in left if any(at.is_relative_to(place) for place in places)]
        found[row] = sum(left.pop(at).read_bytes().count(b"\n") for at in mine)
    return found


def ceilings() -> dict[str, int]:
    """Row -> the most lines that it may have."""
    found: dict[str, int] = json.loads(CEILINGS.read_text())
    return found


def table() -> str:
    """Lines, ceiling and budget of each row, and of the product in all."""
    now, most = sizes(), ceilings()
    rows = [(row, now[row], most.get(row, 0), BUDGETS[row][0]) for row in BUDGETS]
    product = [row[1:] for row in rows if row[0] not in ("benchmarks", "tests")]
    rows.append(("product", *map(sum, zip(*product, strict=True))))  # type: ignore[arg-type]
    lines = [f"{'package':46}{'lines':>9}{'ceiling':>9}{'budget':>9}"]
    lines += [f"{name:46}{one:>9,}{two:>9,}{three:>9,}" for name, one, two, three in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv:
        known = ceilings() if CEILINGS.exists() else {}
        fallen = {row: min(lines, known.get(row, lines)) for row, lines in sizes().items()}
        CEILINGS.write_text(json.dumps(fallen, indent=1) + "\n")
    print(table())
