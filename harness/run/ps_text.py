"""What ``chaos ps`` prints: a line for each process, or for a large run a line for each node, and
those of them first where something is unusual.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainchaos.harness.run.ps import STATES, LiveProcess, LiveRun

MOST_ROWS = 64
"""Processes of a run, and nodes, with a line each: a few screens."""
_USUAL = frozenset(STATES[letter] for letter in "RSDI")


def as_text(found: Sequence[LiveRun], runs: Path) -> str:
    """For people."""
    if not found:
        return f"no run is live below {runs}, and nothing is left of any"
    return "\n".join(line for run in found for line in _lines(run))


def _lines(run: LiveRun) -> list[str]:
    seconds = time.time() - datetime.fromisoformat(run.since).timestamp()
    what = {
        "live": f"live for {seconds:.0f} s, harness {run.pid}",
        "dead": f"dead (its harness was {run.pid})",
    }
    where = f", arm {run.arm}, step {run.step}" if run.arm else ""
    found = [f"{run.scenario}  {what.get(run.state, 'on another machine')}{where}", f"  {run.run}"]
    many = len(run.processes) > MOST_ROWS
    found += _by_node(run.processes) if many else _by_process(run.processes)
    found += [f"  container: {each}" for each in run.containers[:MOST_ROWS]]
    if len(run.containers) > MOST_ROWS:
        found.append(f"  and {len(run.containers) - MOST_ROWS} containers more")
    found += [f"  to undo: {what}" for what in run.to_undo]
    return found + ([f"  heal it: chaos heal {run.run}"] if run.state == "dead" else [])


def _by_process(rows: Sequence[LiveProcess]) -> list[str]:
    found = [f"  {'PID':>9}  {'RANK':>4}  {'MEMORY':>9}  {'STATE':<9} PROCESS"] if rows else []
    for row in rows:
        rank = "" if row.rank is None else str(row.rank)
        where = "" if row.node is None else f" on node {row.node}"
        found.append(
            f"  {row.pid:>9}  {rank:>4}  {row.memory_mib:>5} MiB  {row.state:<9} {row.name}{where}"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class NodeSummary:
    """The processes of a node. ``unusual``: states of those that neither run nor wait."""

    node: int | None
    ranks: tuple[int, ...]
    processes: int
    memory_mib: int
    unusual: tuple[tuple[str, int], ...]


def summaries(rows: Sequence[LiveProcess]) -> list[NodeSummary]:
    """One for each node, in the order in which to read them: those with unusual states first, then
    those that have another number of ranks than most, then the others by number. Processes that are
    on no node come last of their kind.
    """
    nodes: dict[int | None, list[LiveProcess]] = {}
    for row in rows:
        nodes.setdefault(row.node, []).append(row)
    found = [
        NodeSummary(
            node=node,
            ranks=tuple(sorted(row.rank for row in there if row.rank is not None)),
            processes=len(there),
            memory_mib=sum(row.memory_mib for row in there),
            unusual=tuple(
                sorted(Counter(row.state for row in there if row.state not in _USUAL).items())
            ),
        )
        for node, there in nodes.items()
    ]
    counts = Counter(len(one.ranks) for one in found if one.node is not None)
    usual = counts.most_common(1)[0][0] if counts else 0

    def turn(one: NodeSummary) -> tuple[bool, bool, bool, int]:
        return not one.unusual, len(one.ranks) == usual, one.node is None, one.node or 0

    return sorted(found, key=turn)


def _by_node(rows: Sequence[LiveProcess]) -> list[str]:
    each = summaries(rows)
    ranks = sum(len(one.ranks) for one in each)
    memory = sum(one.memory_mib for one in each)
    nodes = sum(one.node is not None for one in each)
    found = [
        f"  {len(rows)} processes with {ranks} ranks on {nodes or 1} nodes, {memory} MiB"
        " (each of them: --format json)",
        f"  {'NODE':>5}  {'RANKS':>5}  {'PROCESSES':>9}  {'MEMORY':>11}  STATE",
    ]
    for one in each[:MOST_ROWS]:
        said = ", ".join(f"{count} {state}" for state, count in one.unusual)
        node = "-" if one.node is None else one.node
        found.append(
            f"  {node:>5}  {len(one.ranks):>5}  {one.processes:>9}  {one.memory_mib:>7} MiB "
            f" {said or 'as usual'}"
        )
    if len(each) > MOST_ROWS:
        left = each[MOST_ROWS:]
        odd = sum(bool(one.unusual) for one in left)
        found.append(f"  and {len(left)} nodes more, {odd} of them with unusual states")
    return found
