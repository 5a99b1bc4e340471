"""The rank processes of a command, held by pidfd: named, signalled, and observed to exit."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.finding import FoundRank

WHOLE = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT})
"""Signals for a rank and all its descendants; other signals go only to the rank's own processes,
which may pass them on.
"""
BLINK_S = 0.2  # a process that lives shorter is a wrapper's helper, not a rank
ROUNDS = 10  # until no new process is found: a process may fork during the search


@dataclass(kw_only=True)
class Rank:
    """A process found to be a rank. ``name``: in events; ``pidfd`` -1: exited and closed;
    ``alone``: it is the launcher, which is hit without what it has started.
    """

    name: str
    found: FoundRank
    pidfd: int
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class ExitedRank:
    """A rank process that exited; exit code and signal are both None if unknown."""

    name: str
    pid: int
    exit_code: int | None
    signal: int | None


class Ranks:
    """All rank processes of an arm, over all starts of its command. ``leaves_children``: SIGKILL
    hits a rank's own processes only; ``world``: how many ranks there are by their environments.
    """

    def __init__(self, *, leaves_children: bool = False) -> None:
        self._whole = WHOLE - {signal.SIGKILL} if leaves_children else WHOLE
        self._ranks: dict[str, Rank] = {}
        self._known: dict[tuple[int, int], str] = {}
        # processes that are not held, by when they were first seen
        self._seen_s: dict[tuple[int, int], float] = {}
        self._poll = select.poll()
        self.world: int | None = None

    def hold(self, found: Mapping[int, FoundRank]) -> tuple[dict[int, str], list[Rank]]:
        """Open pidfds of the found processes. Returns rank -> process name for the living, and the
        new ones.
        """
        members: dict[int, str] = {}
        new: list[Rank] = []
        for number, one in sorted(found.items()):
            key = (one.pid, one.started)
            if key not in self._known:
                name = f"w{sum(not rank.alone for rank in self._ranks.values())}"
                rank = self._take(Rank(name=name, found=one, pidfd=_hold(*key)))
                if rank is None:
                    continue
                self._known[key] = name
                new.append(rank)
            members[number] = self._known[key]
        self.world = max((one.world for one in found.values() if one.world), default=None)
        return {rank: name for rank, name in members.items() if self._ranks[name].pidfd >= 0}, new

    def hold_launcher(self, name: str, pid: int) -> None:
        """Hold the process that a command was started as, too."""
        if row := tree.process(pid):
            found = FoundRank(rank=-1, world=None, pid=pid, started=row.started, top=pid)
            self._take(Rank(name=name, found=found, pidfd=_hold(*row.key), alone=True))

    def _take(self, rank: Rank) -> Rank | None:
        if rank.pidfd < 0:
            return None
        self._ranks[rank.name] = rank
        self._poll.register(rank.pidfd, select.POLLIN)
        return rank

    @property
    def launcher(self) -> str | None:
        """The name of the launcher that is held and has not exited."""
        return next((r.name for r in self._ranks.values() if r.alone and r.pidfd >= 0), None)

    def settled(
        self, found: Mapping[int, FoundRank], now_s: float, *, spoken: bool
    ) -> tuple[dict[int, FoundRank], bool]:
        """The found processes that are certainly ranks, and whether there are others.

        Known ones are certain. New ones behind a wrapper are once they have lived longer than
        BLINK_S; ones whose environment names no rank are once a step has been reported. ``spoken``:
        a step has been reported, so all present processes are ranks.
        """
        keys = {one: (one.pid, one.started) for one in found.values()}
        self._seen_s = {key: self._seen_s.get(key, now_s) for key in keys.values()}
        sure = {
            rank: one
            for rank, one in found.items()
            if spoken
            or keys[one] in self._known
            or (one.sure and (one.direct or now_s - self._seen_s[keys[one]] >= BLINK_S))
        }
        return sure, len(sure) < len(found)

    def register(self, fd: int) -> None:
        """Also wake up for this descriptor."""
        self._poll.register(fd, select.POLLIN)

    def unregister(self, fd: int) -> None:
        """Stop waking up for this descriptor."""
        self._poll.unregister(fd)

    def wait(self, timeout_s: float) -> list[ExitedRank]:
        """Wait for an exit or another descriptor; returns the processes that exited."""
        ready = {fd for fd, _ in self._poll.poll(max(0.0, timeout_s) * 1000)}
        ended = [rank for rank in self._ranks.values() if rank.pidfd in ready and rank.pidfd >= 0]
        return [self._end(rank) for rank in ended]

    def _end(self, rank: Rank) -> ExitedRank:
        one = rank.found
        code, signum = tree.how(tree.wait_status(one.pid, one.started, rank.pidfd))
        self._poll.unregister(rank.pidfd)
        os.close(rank.pidfd)
        rank.pidfd = -1
        return ExitedRank(name=rank.name, pid=one.pid, exit_code=code, signal=signum)

    def signal(self, name: str, signum: int) -> None:
        """Signal a rank, never only the wrapper in front of it; no error if it is gone.

        Processes to be killed are stopped first, so that none escapes by forking or losing its
        parent.
        """
        rank = self._living(name)
        if rank is None:
            return
        held: dict[int, int] = {}
        try:
            for _ in range(ROUNDS if signum in WHOLE else 1):
                hit = self._hit(rank, whole=signum in self._whole)
                new = [row for pid, row in hit.items() if pid not in held]
                if not new:
                    break
                for row in new:
                    if (fd := _hold(*row.key)) >= 0:
                        held[row.pid] = fd
                        _send(fd, signal.SIGSTOP if signum == signal.SIGKILL else signum)
            if signum == signal.SIGKILL:
                for fd in held.values():
                    _send(fd, signum)
        finally:
            for fd in held.values():
                os.close(fd)

    def state(self, name: str) -> str:
        """The kernel's state of it, X if gone; T once everything that is hit with it is stopped."""
        rank = self._living(name)
        row = tree.process(rank.found.pid) if rank is not None else None
        if rank is None or row is None or row.started != rank.found.started:
            return "X"
        if row.state not in "Tt":
            return row.state
        others = self._hit(rank, whole=True).values()
        return next((other.state for other in others if other.state not in "TtZX"), row.state)

    def _hit(self, rank: Rank, *, whole: bool) -> dict[int, tree.ProcessRow]:
        """The processes that are hit with a rank: all that its wrapper started, never only the
        wrapper, and of those below it none of another rank. ``whole``: with all their descendants.
        """
        own = rank.found
        if rank.alone:
            row = tree.process(own.pid)
            return {} if row is None else {own.pid: row}
        rows = _with_top(own.top)
        if own.pid in rows:
            fronts = {own.pid, *tree.behind(own.top, rows)}
        else:  # its wrapper is gone
            rows = _with_top(own.pid)
            fronts = {own.pid}
        hit = {
            pid: row
            for pid, row in rows.items()
            if pid in fronts or (whole and any(tree.is_below(pid, one, rows) for one in fronts))
        }
        others = {r.found.top for r in self._ranks.values() if r.pidfd >= 0 and r is not rank}
        for top in (others & hit.keys()) - {own.pid, own.top}:
            for pid in (top, *tree.below(top)):
                hit.pop(pid, None)
        return hit

    def pid_of(self, name: str) -> int:
        """Pid of a living rank, the process that is signalled first; 0 if there is none with that
        name.
        """
        rank = self._living(name)
        return rank.found.pid if rank is not None else 0

    def name_of(self, pid: int) -> str | None:
        """The rank that last had the pid ``pid``, or None."""
        return next(
            (rank.name for rank in reversed(self._ranks.values()) if rank.found.pid == pid), None
        )

    def ended(self, names: Iterable[str]) -> frozenset[int]:
        """Pids of those of the ranks that have exited."""
        known = (self._ranks[name] for name in names if name in self._ranks)
        return frozenset(rank.found.pid for rank in known if rank.pidfd < 0)

    def living(self) -> list[str]:
        """Names of the ranks that have not exited."""
        return [r.name for r in self._ranks.values() if r.pidfd >= 0 and not r.alone]

    def _living(self, name: str) -> Rank | None:
        rank = self._ranks.get(name)
        return rank if rank is not None and rank.pidfd >= 0 else None

    def close(self) -> None:
        """Close all pidfds."""
        for rank in self._ranks.values():
            if rank.pidfd >= 0:
                os.close(rank.pidfd)
                rank.pidfd = -1


def _with_top(top: int) -> dict[int, tree.ProcessRow]:
    row = tree.process(top)
    return {**tree.below(top), **({top: row} if row else {})}


def _hold(pid: int, started: int) -> int:
    """A pidfd of exactly that process, -1 if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    row = tree.process(pid)
    if row is None or row.started != started:
        os.close(pidfd)
        return -1
    return pidfd


def _send(pidfd: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signum)
