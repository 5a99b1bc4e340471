"""The processes of a supervised job: where each runs, and where the next one is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainchaos.chaos.errors import InfrastructureError, NoPlaceLeft
from trainchaos.recovery.cli.process_host import ProcessHost, ProcessPlacement, least_taken
from trainchaos.recovery.cli.takeover_log import TakeoverLog
from trainchaos.recovery.policy.backoff import Reputation
from trainchaos.recovery.process.logroom import LogRoom
from trainchaos.recovery.rank.script import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class StartedProcess:
    """A process that was just started."""

    name: str
    pid: int
    spot: ProcessPlacement


class JobProcesses:
    """Processes that live, or whose exit is not recorded yet: ``pids``. ``takeover``: log of the
    supervisor whose job is taken over.
    """

    def __init__(
        self,
        host: ProcessHost,
        log_room: LogRoom,
        takeover: TakeoverLog | None,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._host = host
        self._log_room = log_room
        self._now_s = now_s
        left = takeover.processes if takeover is not None else {}
        self.pids = {name: entry.pid for name, entry in left.items() if not entry.gone}
        self._spots = {name: (left[name].node, left[name].device) for name in self.pids}
        self._reputation = Reputation()
        self._fails: Callable[[int, str], bool] = lambda node, device: False
        self._distrusted: set[tuple[int, str]] = set()
        self._doubted: Callable[[tuple[int, str]], bool] = lambda spot: False
        self._count = takeover.names if takeover is not None else 0

    def start(
        self,
        role: str,
        mode: str,
        config: Callable[[str, ProcessPlacement], ScriptConfig],
        *,
        stopped: Callable[[], bool],
    ) -> StartedProcess:
        """Start a process under the next free name: ``w<n>``, or ``s<n>`` for one that starts as
        spare.

        Tries node after node, and again while any may come back, unless the job is ``stopped``.
        Each try uses up a name: a process that seemed not to start may exist, and begin late.
        Raises NoPlaceLeft when none may come back, and InfrastructureError when it is stopped.
        """
        kind = "s" if role == "spare" else "w"
        taken = [self._spots[other] for other in self.pids]
        while True:
            why, failed = "no node is left", set[int]()
            for spot in least_taken(self._host.spots(), taken, self._avoids):
                if spot.node in failed:
                    continue
                name = f"{kind}{self._count}"
                self._count += 1
                self._log_room.begins(name)
                try:
                    pid = self._host.start(name, spot, config(name, spot), mode)
                except ConnectionError as error:
                    why = str(error)
                    failed.add(spot.node)
                else:
                    self.pids[name], self._spots[name] = pid, (spot.node, spot.device)
                    return StartedProcess(name=name, pid=pid, spot=spot)
            if stopped() or not self._host.may_return():
                lacking = InfrastructureError if stopped() else NoPlaceLeft
                raise lacking(
                    f"cannot start a process: {why}", hint="see what the nodes' agents say"
                )

    def failed(self, name: str | None) -> None:
        """A process failed at its spot, which is avoided for a while."""
        if name is not None and name in self._spots:
            self._reputation.failed(self._spots[name], self._now_s())

    def spot_of(self, name: str) -> tuple[int, str] | None:
        """Node and device of a process whose exit is not answered yet."""
        return self._spots.get(name)

    def avoid(self, fails: Callable[[int, str], bool]) -> None:
        """Start processes only where there is no other place at spots that are about to fail.
        ``fails``: whether a node and device are.
        """
        self._fails = fails

    def doubt(self, doubted: Callable[[tuple[int, str]], bool]) -> None:
        """As ``avoid``, of spots (node and device) that are suspect."""
        self._doubted = doubted

    def distrust(self, name: str) -> None:
        """A process is replaced for its values: as ``avoid``, of its spot, from now on."""
        if name in self._spots:
            self._distrusted.add(self._spots[name])

    def spots_in_use(self) -> set[tuple[int, str]]:
        """Node and device of each process whose exit is not answered yet."""
        return set(self._spots.values())

    def exited(self, name: str) -> None:
        """Its exit was recorded: its place is free."""
        del self.pids[name]

    def forget(self, name: str) -> None:
        """Its exit was answered as well."""
        self._spots.pop(name, None)

    def _avoids(self, spot: tuple[int, str]) -> bool:
        known = self._fails(*spot) or self._doubted(spot) or spot in self._distrusted
        return known or self._reputation.avoids(spot, self._now_s())
