"""The rank processes of a command, held by pidfd: found, named, signalled, and seen to end."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from harness.script import tree
from harness.script.tree import Found


@dataclass(kw_only=True)
class Rank:
    """A process that was found to be a rank. ``name``: in events; ``pidfd`` -1: gone and closed."""

    name: str
    found: Found
    pidfd: int


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A rank process that ended; exit code and signal are both None where nobody could tell."""

    name: str
    pid: int
    exit_code: int | None
    signal: int | None


class Ranks:
    """All rank processes of an arm, over all starts of its command."""

    def __init__(self) -> None:
        self._ranks: dict[str, Rank] = {}
        self._known: dict[tuple[int, int], str] = {}
        self._poll = select.poll()
        self.world: int | None = None

    def hold(self, found: Mapping[int, Found]) -> tuple[dict[int, str], list[Rank]]:
        """Take hold of what was found: rank -> process name for those that live, and those that are new."""
        members: dict[int, str] = {}
        new: list[Rank] = []
        for number, one in sorted(found.items()):
            key = (one.pid, one.started)
            if key not in self._known:
                rank = self._take(one)
                if rank is None:
                    continue
                new.append(rank)
            members[number] = self._known[key]
        worlds = [one.world for one in found.values() if one.world]
        self.world = max(worlds, default=None)
        return {rank: name for rank, name in members.items() if self._ranks[name].pidfd >= 0}, new

    def register(self, fd: int) -> None:
        """Also wake up for this descriptor."""
        self._poll.register(fd, select.POLLIN)

    def unregister(self, fd: int) -> None:
        """No longer."""
        self._poll.unregister(fd)

    def wait(self, timeout_s: float) -> list[Gone]:
        """Wait for an end or another descriptor; the processes that ended."""
        ready = {fd for fd, _ in self._poll.poll(max(0.0, timeout_s) * 1000)}
        return [self._end(rank) for rank in self._ranks.values() if rank.pidfd in ready and rank.pidfd >= 0]

    def signal(self, name: str, signum: int) -> None:
        """Signal through the held pidfd; one that is gone is no error."""
        rank = self._ranks.get(name)
        if rank is not None and rank.pidfd >= 0:
            try:
                signal.pidfd_send_signal(rank.pidfd, signum)
            except ProcessLookupError:
                pass

    def state(self, name: str) -> str:
        """The kernel's word on it, X when gone."""
        rank = self._ranks.get(name)
        row = tree.process(rank.found.pid) if rank is not None and rank.pidfd >= 0 else None
        return (
            row.state if row is not None and rank is not None and row.started == rank.found.started else "X"
        )

    def living(self) -> list[str]:
        """Names of those not seen to end."""
        return [rank.name for rank in self._ranks.values() if rank.pidfd >= 0]

    def close(self) -> None:
        """Let go of all."""
        for rank in self._ranks.values():
            if rank.pidfd >= 0:
                os.close(rank.pidfd)
                rank.pidfd = -1

    def _take(self, found: Found) -> Rank | None:
        try:
            pidfd = os.pidfd_open(found.pid)
        except OSError:
            return None
        row = tree.process(found.pid)
        if row is None or row.started != found.started:
            os.close(pidfd)
            return None
        rank = Rank(name=f"w{len(self._ranks)}", found=found, pidfd=pidfd)
        self._ranks[rank.name] = rank
        self._known[found.pid, found.started] = rank.name
        self._poll.register(pidfd, select.POLLIN)
        return rank

    def _end(self, rank: Rank) -> Gone:
        code, signum = tree.how(tree.wait_status(rank.found.pid, rank.found.started, rank.pidfd))
        self._poll.unregister(rank.pidfd)
        os.close(rank.pidfd)
        rank.pidfd = -1
        return Gone(name=rank.name, pid=rank.found.pid, exit_code=code, signal=signum)
