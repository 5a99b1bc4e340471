"""The processes of a supervised job: where each is, and where the next one is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chaos.errors import InfrastructureError
from recovery.cli.home import Home, Spot, least_taken
from recovery.cli.takeover_log import Estate
from recovery.policy.backoff import Reputation
from recovery.process.logroom import LogRoom
from recovery.rank.script import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Started:
    """A process that was just started."""

    name: str
    pid: int
    spot: Spot


class JobProcesses:
    """Those that live, or whose exit is not recorded yet: ``pids``. ``estate``: of the supervisor
    whose job is taken over.
    """

    def __init__(
        self, home: Home, log_room: LogRoom, estate: Estate | None, *, now_s: Callable[[], float]
    ) -> None:
        self._home = home
        self._log_room = log_room
        self._now_s = now_s
        left = estate.processes if estate is not None else {}
        self.pids = {name: entry.pid for name, entry in left.items() if not entry.gone}
        self._spots = {name: (left[name].node, left[name].device) for name in self.pids}
        self._reputation = Reputation()
        self._count = estate.names if estate is not None else 0

    def start(
        self,
        role: str,
        mode: str,
        config: Callable[[str, Spot], ScriptConfig],
        *,
        stopped: Callable[[], bool],
    ) -> Started:
        """Start a process under the next free name: ``w<n>``, or ``s<n>`` for one that starts as
        spare.

        Tries node after node, and again while any may come back, unless the job is ``stopped``.
        Each try uses up a name: what could not be started may be there yet, and begin late. Raises
        InfrastructureError.
        """
        kind = "s" if role == "spare" else "w"
        taken = [self._spots[other] for other in self.pids]
        while True:
            why, failed = "no node is left", set[int]()
            for spot in least_taken(self._home.spots(), taken, self._avoids):
                if spot.node in failed:
                    continue
                name = f"{kind}{self._count}"
                self._count += 1
                self._log_room.begins(name)
                try:
                    pid = self._home.start(name, spot, config(name, spot), mode)
                except ConnectionError as error:
                    why = str(error)
                    failed.add(spot.node)
                else:
                    self.pids[name], self._spots[name] = pid, (spot.node, spot.device)
                    return Started(name=name, pid=pid, spot=spot)
            if stopped() or not self._home.may_return():
                raise InfrastructureError(
                    f"cannot start a process: {why}", hint="see what the nodes' agents say"
                )

    def failed(self, name: str | None) -> None:
        """A process failed where it is: its spot is avoided for a while."""
        if name is not None and name in self._spots:
            self._reputation.failed(self._spots[name], self._now_s())

    def exited(self, name: str) -> None:
        """Its exit was recorded: its place is free."""
        del self.pids[name]

    def forget(self, name: str) -> None:
        """Its exit was answered, too."""
        self._spots.pop(name, None)

    def _avoids(self, spot: tuple[int, str]) -> bool:
        return self._reputation.avoids(spot, self._now_s())
