"""Wall time by class, as a data frame and as a table."""

from __future__ import annotations

import pandas as pd

from trainchaos.harness.judge.results import Results
from trainchaos.reports.content.figures import (
    number,
)
from trainchaos.reports.page.table import PageColumn, PageTable, numeric, table

WALL_FINEST_S = 1e-3


# In order of an arm's life: start, steady work, fault and repair, rest.
WALL_CLASSES = (
    "useful",
    "initialisation",
    "data",
    "checkpoint save",
    "detection",
    "regroup",
    "restore",
    "recomputation",
    "degraded world",
    "straggling",
    "spare idle",
    "shutdown",
    "other",
)


def wall_seconds(results: Results) -> pd.DataFrame:
    """Mean seconds of each class, one row per (cell, arm kind); a row sums to the wall clock."""
    rows = [
        {"cell": arm.cell, "arm": arm.arm, "useful": arm.useful_s, "unexplained": arm.residual_s}
        | {name.replace("_", " "): seconds for name, seconds in arm.badput.items()}
        for arm in results.arms
    ]
    if not rows:
        return pd.DataFrame()
    frame = pd.DataFrame(rows).fillna(0.0).groupby(["cell", "arm"], sort=False).mean()
    known = {cell.id: n for n, cell in enumerate(results.cells)}
    order = sorted(
        frame.index, key=lambda key: (known.get(key[0], len(known)), key[0], key[1] != "faulted")
    )
    others = [c for c in frame.columns if c not in WALL_CLASSES and c != "unexplained"]
    columns = [*(c for c in WALL_CLASSES if c in frame.columns), *others, "unexplained"]
    return frame.loc[order, columns]


def wall_table(frame: pd.DataFrame, names: dict[str, str]) -> PageTable:
    """One column for each cell and arm kind, one row for each class, and the sum."""
    columns = [
        PageColumn(name="class"),
        *(numeric(names.get(cell, cell), f"{kind}, s") for cell, kind in frame.index),
    ]
    rows = [
        [str(name), *(number(float(v), finest=WALL_FINEST_S) for v in frame[name])]
        for name in frame.columns
        if frame[name].any()
    ]
    total = ["wall clock", *(number(float(v), finest=WALL_FINEST_S) for v in frame.sum(axis=1))]
    return table(columns, [*rows, total])
