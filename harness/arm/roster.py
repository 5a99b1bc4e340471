"""The processes of an arm: where each is placed, its undo record (written before it acts), and
which are alive.

Workers of the first generation are on the nodes of their ranks, spares on nodes without ranks
first, then on the last node (``chaos.scenario.topology``). A replacement goes to the first node
that has fewer processes than it began with, since the platform, where it can, replaces a lost
machine by another one of the same number. Until that machine is there, spare nodes are filled like
the others; after them, the node that exceeds its number by the least takes more. A node on which
processes keep failing is chosen last: otherwise it would be chosen first, as the node that lacks a
process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from trainchaos.chaos.errors import NoPlaceLeft
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.harness.launch.devices import DeviceBoard
from trainchaos.harness.launch.launcher import ArmSetup, Cluster, Leftovers
from trainchaos.harness.launch.places.seats import planned, rooms, seats
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.health.checks import Spot
from trainchaos.recovery.process.host import Exited
from trainchaos.recovery.supervise.supervisor import Roster, StartedProcess

NO_LIMITS: Mapping[int, int] = MappingProxyType({})


class Placement:
    """The nodes of an arm's processes. ``spares``: the number that the job starts with; ``room``:
    processes that a node takes, where taints limit that. If they leave too few seats, processes
    start where the topology says; launchers refuse such an arm (``harness.launch.places.seats``).
    """

    def __init__(
        self, topology: Topology, *, spares: int, room: Mapping[int, int] = NO_LIMITS
    ) -> None:
        first = seats(topology, spares=spares, room=room) or planned(topology, spares=spares)
        self._first = {"worker": list(first.workers), "spare": list(first.spares)}
        self._full = first.full
        most = rooms(topology, spares=spares)
        self._room = Counter({node: room.get(node, count) for node, count in most.items()})
        self._node_of: dict[str, int] = {}

    def place(
        self,
        process: str,
        role: str,
        living: Collection[str],
        usable: Collection[int],
        *,
        again: bool = False,
        avoid: Collection[int] = (),
    ) -> int:
        """The node of a process about to start. ``living``: processes that are neither gone nor
        asked to end; ``usable``: nodes that take processes now, at least one; ``again``: a retry
        after a failed start; ``avoid``: nodes on which processes keep failing, used when there are
        no others.
        """
        first = self._first.get(role, []) if not again else []
        node = first.pop(0) if first else None
        if node is None or node not in usable:
            there = Counter(self._node_of[n] for n in living if n in self._node_of)
            node = self._best(there, sorted(set(usable).difference(avoid) or usable))
        self._node_of[process] = node
        return node

    def _best(self, there: Counter[int], usable: list[int]) -> int:
        lacking = [node for node in usable if there[node] < self._full[node]]
        return (
            lacking[0]
            if lacking
            else min(usable, key=lambda node: (there[node] - self._room[node], node))
        )

    def on(self, node: int, living: Collection[str]) -> list[str]:
        """The living processes of a node, oldest first."""
        return [name for name, its in self._node_of.items() if its == node and name in living]


PATIENCE_S = (
    # with nodes that do not answer and are not given up: a busy machine takes seconds, a network
    # cut too
    30.0
)


class ArmRoster(Roster):
    """Every rank and spare that the arm ever had. ``asked_ns``: when each was first asked to
    end, if it was.
    """

    def __init__(
        self,
        setup: ArmSetup,
        cluster: Cluster,
        ledger: Ledger,
        asked_ns: Mapping[str, int],
        *,
        spares: int,
    ) -> None:
        super().__init__(lambda: cluster.now_ns() / 1e9)
        topology = setup.cell.scenario.topology
        self._arm, self._cluster, self._ledger = setup.id, cluster, ledger
        self._asked_ns = asked_ns
        self._undo: dict[str, str] = {}  # process -> its record in the ledger
        self._tainted = cluster.tainted
        self._board = DeviceBoard(
            cluster.places_on,
            range(topology.nodes),
            tainted=self._tainted.devices,
            reputation=self.reputation,
        )
        self._placement = Placement(topology, spares=spares, room=self._tainted.room)
        self._count = 0
        self.refuse_device, self.accept_device = self._board.refuse, self._board.accept

    def start(self, role: str, mode: str) -> StartedProcess:
        """If the chosen node is lost at that moment or does not answer, the process starts on
        another node under another name. Raises NoPlaceLeft when no node is left or none has
        answered for ``PATIENCE_S``.
        """
        name, pid, node, device = self._start(role, mode)
        self.will_undo(name, pid)
        return self.started(name, pid, (node, device))

    def expect(self, role: str, mode: str, count: int) -> None:
        """An arm has few: they are started one by one."""

    def will_undo(self, name: str, pid: int) -> None:
        """Write the record by which any process can remove this one."""
        undo = self._cluster.undo(name, pid)
        if undo is not None:
            self._undo[name] = self._ledger.will(undo, arm=self._arm, process=name)

    def undone(self, name: str) -> None:
        """A process of no rank has ended."""
        if name in self._undo:
            self._ledger.undone(self._undo.pop(name), f"{name} has ended")

    def _start(self, role: str, mode: str) -> tuple[str, int, int, str]:
        why = "no node has a device that it may use"
        failed: set[int] = set()
        now_ns = self._cluster.now_ns()
        first, until_ns = True, now_ns + int(PATIENCE_S * 1e9)
        spurns = self.reputation.spurns
        bad = {node for node in self._cluster.usable() if spurns(node, now_ns / 1e9)}
        while True:
            # A process that seemed not to start may still begin late: its name is not used again.
            name = f"{'s' if role == 'spare' else 'w'}{self._count}"
            able = [node for node in self._cluster.usable() if self._board.takes(node)]
            able = [node for node in able if node not in self._tainted.nodes] or able
            usable = [node for node in able if node not in failed]
            if not usable and able and self._cluster.now_ns() < until_ns:
                failed, usable = set(), able
            if not usable:
                break
            self._count += 1
            avoid = [each for each in usable if each in bad or self._board.distrusts(each)]
            node = self._placement.place(
                name, role, self.living(), usable, again=not first, avoid=avoid
            )
            device = self._board.assign(name, self.living(), node)
            try:
                return name, self._cluster.spawn(name, role, mode, device, node), node, device
            except ConnectionError as error:
                why, first = str(error), False
                failed.add(node)
        raise NoPlaceLeft(
            f"no node is left that {name} can start on: {why}",
            hint="give the run more nodes, or a spare one",
        )

    def distrust(self, name: str) -> None:
        """Its device is not to be trusted, by whichever node it is used."""
        if (device := self.device_of(name)) is not None:
            self.reputation.distrust((None, device))

    def forget(self, name: str) -> None:
        """Its place is remembered: an arm has few processes."""

    def exited(self, report: Exited) -> int:
        if report.process not in self._asked_ns and report.exit_code != 0:
            self.reputation.failed((self.node_of(report.process), None))
        return super().exited(report)

    def spots_in_use(self) -> set[Spot]:
        return {self._spots[name] for name in self.pids}

    def living(self) -> list[str]:
        return [name for name in self.pids if name not in self._asked_ns]

    def on_node(self, node: int) -> list[str]:
        """The living processes of a node."""
        return self._placement.on(node, self.living())

    def ended(self, leftovers: Leftovers) -> None:
        """The arm is over: close its undo records if nothing is left."""
        records: Mapping[str, str] = self._undo if not leftovers.processes else {}
        for process, record in records.items():
            self._ledger.undone(record, f"{process} and what it started ended with the arm")
