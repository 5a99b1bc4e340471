"""Finds the ranks of a command among its processes.

A rank is the topmost process with that rank in its environment, or the child of a wrapper that is;
rank 0 may be the program that started itself again for the others. What processes report of
themselves takes precedence. Where nothing names a rank,

- the only rank of a command is the process that trains: the command itself, or one that it started;
- several are processes that one parent has started alike, as ``torch.multiprocessing.spawn`` and
  Ray do, as many as there are ranks, each with TCP connections of its own, as ranks have that meet
  each other: the workers of a data loader have none, or share those of their parent. Who came first
  is rank 0.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.script.listen.progress import ProgressReport, group_number, rank_number
from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.command import Command
from trainchaos.harness.script.processes.environment import RANK_NAMES, WORLD_NAMES
from trainchaos.harness.script.processes.tree import PLUMBING, ProcessRow

LEAST = 2
_TITLE = 15  # characters of a title that the kernel keeps as the name
Rows = Mapping[int, ProcessRow]


@dataclass(frozen=True, kw_only=True)
class FoundRank:
    """A process that is a rank. ``world``: number of ranks in its environment; None if not given.

    ``top``: the wrapper in front of it that has its rank, or else the process itself. ``sure``: its
    environment or its reports name its rank; otherwise it is only the one rank of a command, or of
    a replica group. ``direct``: there is no wrapper, whose helpers could be mistaken for it.
    ``size``: ranks in its replica group, if there are groups; ``in_group``: its environment names
    its rank in that.
    """

    rank: int
    world: int | None
    pid: int
    started: int
    top: int = 0
    sure: bool = True
    direct: bool = True
    size: int = 1
    in_group: bool = False


@dataclass(frozen=True, kw_only=True)
class _Named:
    """What an environment says of a rank; fields as of ``FoundRank``."""

    rank: int | None = None
    world: int | None = None
    size: int = 1
    in_group: bool = False


_NO_RANK = _Named()


class RankFinder:
    """The ranks of one arm's command. ``output``: file with the command's output."""

    def __init__(self, spec: WorkloadSpec, output: Path) -> None:
        self._spec, self._output = spec, output
        self._trainer: ProcessRow | None = None
        self._launchers: set[tuple[int, int]] = set()  # of trainers
        self._alike: dict[tuple[int, int], int] = {}
        self._form = ""  # of processes alike
        self._ranks: dict[int, int] = {}  # by pid, for all processes found
        self._size, self._launched = 1, False

    def find(
        self, command: Command, hints: Mapping[int, int], *, spoken: bool
    ) -> dict[int, FoundRank]:
        """Rank -> its process. ``hints``: pid -> rank, from the processes' reports; ``spoken``:
        steps have been reported, so that all are there and have worked.
        """
        rows, group = tree.below(command.guard_pid), self._spec.group
        named = _all_named(rows, group, launched=self._launched)
        found = _by_environment(rows, named, group)
        if not found and self._spec.ranks == 1:
            tops = [row for row in rows.values() if row.pid == command.pid]
            found = self._only(tops[0].pid, rows, settled=spoken) if tops else {}
        elif not found and not hints:
            found = self.alike(rows, self._spec.ranks, settled=spoken)
        found |= _by_reports(found, hints, rows, named, group)
        self._launched = self._launched or any(one.in_group for one in found.values())
        self._ranks |= {one.pid: rank for rank, one in found.items()}
        self._size = max((one.size for one in found.values()), default=self._size)
        return found

    def whose(self, report: ProgressReport) -> ProgressReport:
        """The report with its process's rank in the whole job: the reported rank counts within its
        group, and a process may report before it knows its rank.
        """
        if self._spec.group is None and (
            report.rank is not None or report.pid is None or self._spec.ranks == 1
        ):
            return report
        if report.pid is not None:
            return replace(report, rank=self._ranks.get(report.pid))
        group = report.group
        rank = None if group is None else group * self._size + (report.rank or 0)
        return replace(report, rank=rank)

    # ---- where nothing names a rank

    def _only(self, top: int, rows: Rows, *, settled: bool) -> dict[int, FoundRank]:
        """The only rank of a command; ``top``: the process that it was started as."""
        front = tree.behind(top, rows)[0]
        trains = self._training(front, rows, settled=settled)
        if trains is None:
            return {}
        named = _Named(world=1)
        return {0: _found(0, named, rows[trains], top if trains == front else trains, sure=False)}

    def _training(self, top: int, rows: Rows, *, settled: bool) -> int | None:
        """The training process, ``top`` or a descendant; None while a launcher has none.
        ``settled``: steps are reported, so it is kept; after it has ended, the next one of its
        launcher is found.
        """
        known = self._trainer
        if known is not None and known.pid in rows and rows[known.pid].key == known.key:
            return known.pid
        try:
            printed = self._output.stat().st_size
        except OSError:
            printed = 0
        pid, path = top, list[tuple[int, int]]()
        while True:
            launches = rows[pid].key in self._launchers
            child = _trains_below(rows[pid], rows, printed, launches=launches)
            if child is None:
                break
            path.append(rows[pid].key)
            pid = child
        if launches:
            return None
        if settled:
            self._trainer = rows[pid]
            self._launchers.update(path)
        return pid

    def alike(self, rows: Rows, count: int, *, settled: bool) -> dict[int, FoundRank]:
        """Rank -> its process, of those started alike, each with its number for as long as it
        lives.
        """
        living = {row.key for row in rows.values()}
        known = {key: rank for key, rank in self._alike.items() if key in living}
        if len(known) < count and settled:
            group, _ = busiest(rows, count, self._form)
            keys = [row.key for row in group]
            if group:
                self._form = _form(group[0])
                known = {key: rank for key, rank in known.items() if key in keys}
                free = (rank for rank in range(count) if rank not in known.values())
                known |= {key: next(free) for key in keys if key not in known}
        self._alike = known
        return {
            rank: FoundRank(rank=rank, world=None, pid=pid, started=at, top=pid, sure=False)
            for (pid, at), rank in known.items()
        }


def find_named(
    root: int, hints: Mapping[int, int], *, group: str | None = None
) -> dict[int, FoundRank]:
    """Rank -> its process, of those below ``root`` that environments or reports name."""
    rows = tree.below(root)
    named = _all_named(rows, group, launched=False)
    found = _by_environment(rows, named, group)
    return found | _by_reports(found, hints, rows, named, group)


def _all_named(pids: Iterable[int], group: str | None, *, launched: bool) -> dict[int, _Named]:
    """What the environment of each process says. ``group``: variable with a process's replica
    group, if each group counts its ranks from 0: who names no rank is its only one, or its launcher
    if anyone in a group names one, or did (``launched``).
    """
    named = {pid: _named(tree.environment(pid), group) for pid in pids}
    if launched or any(one.in_group and not tree.is_helper(pid) for pid, one in named.items()):
        named = {pid: one for pid, one in named.items() if one.in_group}
    return named


def _named(env: Mapping[str, str], group: str | None) -> _Named:
    numbers = (
        (rank, rank_number(env.get(world_name)))
        for rank_name, world_name in zip(RANK_NAMES, WORLD_NAMES, strict=True)
        if (rank := rank_number(env.get(rank_name))) is not None
    )
    rank, world = next(numbers, (None, None))
    if group is None:
        return _Named(rank=rank, world=world)
    index, size = group_number(env.get(group)), world or 1
    if index is None:
        return _NO_RANK
    return _Named(rank=index * size + (rank or 0), size=size, in_group=rank is not None)


def _by_environment(
    rows: Rows, named: Mapping[int, _Named], group: str | None
) -> dict[int, FoundRank]:
    """The topmost process of each rank. Of two (an old one is exiting) the younger counts."""
    found: dict[int, FoundRank] = {}
    for row in rows.values():
        own = named.get(row.pid, _NO_RANK)
        if own.rank is None or own.rank == named.get(row.parent, _NO_RANK).rank:
            continue
        front = rows[tree.behind(row.pid, rows)[0]]
        if own.rank not in found or front.started >= found[own.rank].started:
            sure = group is None or own.in_group
            found[own.rank] = _found(own.rank, own, front, row.pid, sure=sure)
    parents = {rows[one.top].parent for one in found.values()}
    if 0 not in found and 1 in found and len(parents) == 1:
        # the process that started all others, each with its own command line, as Lightning does
        first = parents.pop()
        same = first in named and named[first].rank is None
        if same and all(_arguments(one.pid) == _arguments(first) for one in found.values()):
            found[0] = _found(0, _Named(world=found[1].world), rows[first], first)
    return found


def _by_reports(
    found: Mapping[int, FoundRank],
    hints: Mapping[int, int],
    rows: Rows,
    named: Mapping[int, _Named],
    group: str | None,
) -> dict[int, FoundRank]:
    spoken: dict[int, FoundRank] = {}
    for pid, reported in hints.items():
        rank = named.get(pid, _NO_RANK).rank if group is not None else reported
        if rank is None or pid not in rows:
            continue
        known, younger = found.get(rank), spoken.get(rank)
        if younger is not None and younger.started > rows[pid].started:
            continue
        if known is None or not known.sure or tree.is_below(pid, known.top, rows):
            own = _NO_RANK
            if known is not None:
                own = _Named(world=known.world, size=known.size, in_group=known.in_group)
            spoken[rank] = _found(rank, own, rows[pid], pid)
    return spoken


def _found(rank: int, named: _Named, row: ProcessRow, top: int, *, sure: bool = True) -> FoundRank:
    return FoundRank(
        rank=rank,
        world=named.world,
        pid=row.pid,
        started=row.started,
        top=top,
        sure=sure,
        direct=top == row.pid and not tree.is_wrapper(row),
        size=named.size,
        in_group=named.in_group,
    )


def _arguments(pid: int) -> list[str]:
    """A process's command line, whatever the place of its program and script, without flags of the
    interpreter.
    """
    words = tree.command_line(pid).split("\0")
    return [os.path.basename(word) for word in words[1:] if not re.fullmatch(r"-[A-Za-z]+", word)]


# ---- the process that trains


def _trains_below(row: ProcessRow, rows: Rows, printed: int, *, launches: bool) -> int | None:
    """The child that trains in place of a process; None if the process itself trains, or if a
    launcher has no training child.

    A process that has written less than was printed is a launcher: of the processes it started, the
    one that has written most trains. One that has written enough may still forward the output of
    another program through a pipe; then that program uses at least half as much processor time.
    Other children (a tracker, the workers of a data loader) neither print nor compute so much.
    """
    children = [
        child for child in rows.values() if child.parent == row.pid and child.name not in PLUMBING
    ]
    own = tree.written(row.pid)
    if not children or own is None:
        return None
    work = {child.pid: _work(child.pid, rows) for child in children}
    most = max(work, key=lambda pid: (*work[pid], -pid))
    written, ticks = work[most]
    if launches:
        return most if written else None
    if own < printed:
        return most if 2 * ticks >= row.ticks and written > own else None
    busy = (pid for pid in sorted(work, key=lambda p: -work[p][0]) if 2 * work[pid][1] >= row.ticks)
    return next((pid for pid in busy if _passes_on(row.pid, pid)), None)


def _work(top: int, rows: Rows) -> tuple[int, int]:
    """Bytes that a process and its descendants have written, and ticks of processor time."""
    family = [row for row in rows.values() if tree.is_below(row.pid, top, rows)]
    return sum(tree.written(row.pid) or 0 for row in family), sum(row.ticks for row in family)


def _passes_on(reader: int, writer: int) -> bool:
    """Whether a process forwards another program's output."""
    pipe = tree.link(f"/proc/{writer}/fd/1")
    same = tree.command_line(reader) == tree.command_line(writer)
    if not pipe.startswith("pipe:") or same or tree.is_helper(writer):
        return False
    try:
        ends = [path for path, target in tree.opened(reader).items() if target == pipe]
        return any(os.lstat(path).st_mode & stat.S_IRUSR for path in ends)
    except OSError:
        return False


# ---- processes alike


def busiest(rows: Rows, count: int | None = None, form: str = "") -> tuple[list[ProcessRow], int]:
    """The group of processes alike that has worked most, oldest first, and its ticks of processor
    time. ``count``: how many they are, ``form``: of what form, if that is known.
    """
    groups: dict[tuple[int, str], list[ProcessRow]] = {}
    for row in rows.values():
        if row.name not in PLUMBING:
            groups.setdefault((row.parent, _form(row)), []).append(row)
    best: tuple[list[ProcessRow], int] = ([], 0)
    for (parent, its), group in groups.items():
        if len(group) < LEAST or count not in (None, len(group)) or form not in ("", its):
            continue
        ticks = sum(row.ticks for row in group)
        shared = tree.connections(parent)
        if ticks > best[1] and all(tree.connections(row.pid) - shared for row in group):
            best = sorted(group, key=lambda row: (row.started, row.pid)), ticks
    return best


def _form(row: ProcessRow) -> str:
    """Its command line without numbers, or the title that it has given itself."""
    words = tree.command_line(row.pid).rstrip("\0")
    title = "\0" not in words and words.startswith(row.name)
    return words[:_TITLE] if title else re.sub(r"\d+", "#", words)
