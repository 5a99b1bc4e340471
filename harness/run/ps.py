"""Finds live runs with their processes, and what dead runs have left; for ``chaos ps``. A large run
has a line for each node, and those first where something is unusual.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.errors import InfrastructureError, LogError
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.chaos.files import open_regular
from trainchaos.harness.host import processes
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.undo import live
from trainchaos.harness.undo.containers import RemoveContainers
from trainchaos.harness.undo.ledger import read_open
from trainchaos.harness.undo.records import KillMarked

TAIL_BYTES = 1 << 16
WHOLE_BYTES = 32 << 20
MOST_LOGS = 32
"""Logs of ranks that are read for the step, the newest: ranks keep step with one another."""
NEEDED = (
    Kind.PROCESS_SPAWNED,
    Kind.GENERATION_STARTED,
    Kind.STEP_COMMITTED,
    Kind.STEP_REPORTED,
)
_HEADS = tuple(f'{{"kind":"{kind.value}",' for kind in NEEDED)
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "stopped",
    "I": "idle",
}


class LiveProcess(BaseModel):
    """A living process of a run. ``name``: its actor's, or its command; ``rank``: None for one that
    holds none; ``node``: None where there are no nodes, or the process is on none of them.
    """

    model_config = ConfigDict(frozen=True)

    pid: int
    name: str
    rank: int | None
    state: str
    memory_mib: int
    node: int | None = None


class LiveRun(BaseModel):
    """A run that is live, or dead with something that may be left. ``since``: ISO time;
    ``containers``: its nodes in a container engine, for people; ``to_undo``: of a dead run.
    """

    model_config = ConfigDict(frozen=True)

    run: Path
    scenario: str
    state: Literal["live", "dead", "elsewhere"]
    pid: int
    since: str
    arm: str
    step: int
    processes: tuple[LiveProcess, ...]
    containers: tuple[str, ...] = ()
    to_undo: tuple[str, ...]


def listing(runs: Path) -> list[LiveRun]:
    """Every run below ``runs`` that is not over, the oldest first."""
    return [found for found in map(_look, live.unfinished(runs)) if found is not None]


def _look(run: RunDirectory) -> LiveRun | None:
    try:
        holder = live.read_holder(run)
    except OSError:  # of another user
        return None
    if holder is None:
        return None
    state: Literal["live", "dead", "elsewhere"] = "live" if holder.alive else "dead"
    if not holder.here:
        state = "elsewhere"
    arm = _newest_arm(run)
    names, members, step, nodes = _progress(run, arm)
    ours = (
        KillMarked(marker=holder.marker, since=holder.start_time).members() if holder.here else []
    )
    ranks = {name: rank for rank, name in enumerate(members)}
    rows = [_process(pid, names.get(pid, ""), ranks, nodes) for pid, _ in ours]
    return LiveRun(
        run=run.root,
        scenario=run.root.parent.name,
        state=state,
        pid=holder.pid,
        since=datetime.fromtimestamp(holder.since_ns / 1e9, UTC).isoformat(timespec="seconds"),
        arm=arm,
        step=step,
        processes=tuple(sorted(rows, key=lambda row: (row.rank is None, row.rank, row.pid))),
        containers=_containers(run) if holder.here else (),
        to_undo=_to_undo(run) if state == "dead" else (),
    )


def _to_undo(run: RunDirectory) -> tuple[str, ...]:
    try:
        left = [e for e in read_open(run.ledger) if e.undo is None or not e.undo.idle()]
    except LogError as error:
        return (f"not known: {error.message}",)
    return tuple(e.undo.intent() if e.undo else f"record {e.id}, of another version" for e in left)


def _containers(run: RunDirectory) -> tuple[str, ...]:
    found: list[str] = []
    try:
        entries = read_open(run.ledger)
    except LogError:
        return ()  # said where what is to be undone is
    for entry in entries:
        if isinstance(entry.undo, RemoveContainers):
            try:
                found += entry.undo.living()
            except InfrastructureError as error:
                found.append(f"not known: {error.message}")
    return tuple(found)


def _process(pid: int, name: str, ranks: dict[str, int], nodes: dict[str, int]) -> LiveProcess:
    return LiveProcess(
        pid=pid,
        name=name or _command(pid),
        rank=ranks.get(name),
        state=STATES.get(processes.state(pid), "ending"),
        memory_mib=processes.memory_bytes(pid) >> 20,
        node=nodes.get(name),
    )


def _command(pid: int) -> str:
    """What a process runs, short: for Python the module, else the program with its arguments."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    if "-m" in words[1:-1]:
        return words[words.index("-m") + 1]
    words = [Path(words[0]).name, *words[1:]]
    return " ".join(word for word in words if word)[:60]


def _newest_arm(run: RunDirectory) -> str:
    logs = {arm: run.events(arm) / f"{ORCHESTRATOR}.jsonl" for arm in run.arms()}
    written = {arm: path.stat().st_mtime_ns for arm, path in logs.items() if path.exists()}
    return max(written, key=lambda arm: written[arm], default="")


def _progress(run: RunDirectory, arm: str) -> tuple[dict[int, str], list[str], int, dict[str, int]]:
    """Progress of an arm: process names by pid, the members of its current generation, the last
    committed step, and nodes by name where there is more than one.
    """
    names: dict[int, str] = {}
    members: list[str] = []
    nodes: dict[str, int] = {}
    step = 0
    for path in _logs(run.events(arm)) if arm else ():
        for event in _events(path, whole=path.stem == ORCHESTRATOR):
            data = event.data
            if event.kind is Kind.PROCESS_SPAWNED and isinstance(data["pid"], int):
                node = data.get("node")
                names[data["pid"]] = str(data["process"])
                nodes[str(data["process"])] = node if isinstance(node, int) else 0
            elif event.kind is Kind.GENERATION_STARTED and isinstance(data["members"], list):
                members = [str(member) for member in data["members"]]
            elif event.kind in (Kind.STEP_COMMITTED, Kind.STEP_REPORTED):
                step = max(step, event.step or 0)
    return names, members, step, nodes if len(set(nodes.values())) > 1 else {}


def _logs(folder: Path) -> list[Path]:
    """The supervisor's log, and those of MOST_LOGS ranks that were written last."""
    ours = folder / f"{ORCHESTRATOR}.jsonl"
    others: list[tuple[int, Path]] = []
    with suppress(OSError):
        for path in folder.glob("*.jsonl"):
            with suppress(OSError):  # it was deleted meanwhile
                others.append((path.stat().st_mtime_ns, path))
    newest = heapq.nlargest(MOST_LOGS, (each for each in others if each[1] != ours))
    return [ours, *sorted(path for _, path in newest)]


def _events(path: Path, *, whole: bool) -> list[Event]:
    """The last events of a log that is being written, of the kinds that are needed; lines that are
    not whole are left out.
    """
    try:
        with open_regular(path) as stream:
            read = WHOLE_BYTES if whole else TAIL_BYTES
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - read))
            lines = stream.read(read).decode(errors="replace").split("\n")
    except OSError:
        return []
    found = []
    for line in lines:
        if not line.startswith(_HEADS):  # to parse all lines of a large job takes seconds
            continue
        try:
            found.append(Event.from_line(line))
        except LogError:
            continue
    return found


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
