"""The processes of one simulated arm; implements ``harness.launch.launcher.Cluster``."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trainchaos.harness.launch import devices
from trainchaos.harness.launch.launcher import ArmSetup, Leftovers
from trainchaos.harness.launch.places.seats import UNTAINTED, Tainted
from trainchaos.harness.launch.rank_setup import job_of, strategy_for
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.rank.keepers import SimKeepers, SimMemoryCheckpointer
from trainchaos.harness.sim.rank.rank import SimRank
from trainchaos.harness.sim.world.clock import NS_PER_S, Clock
from trainchaos.harness.sim.world.group import Group
from trainchaos.harness.sim.world.links import SimLinks
from trainchaos.harness.sim.world.process import Process
from trainchaos.harness.sim.world.settings import MS, WALL_NS, RankConfig, Timings
from trainchaos.harness.sim.world.storage import SimStorage
from trainchaos.harness.sim.world.store import SimStore
from trainchaos.harness.undo.base import Undo
from trainchaos.recovery.health.checks import Answer, Spot
from trainchaos.recovery.health.signs import Sign
from trainchaos.recovery.process.host import Exited, MessageReceived, Report
from trainchaos.recovery.process.stacks import STACK_SIGNAL
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Message, Recall

PID = 1
FIRST_PID = 100
LATENCY_MS = (0.05, 0.3)
# from the closing of a process's connections to the supervisor's notice of its exit
REAP_MS = (0.0, 3.0)
REAP_LIMIT_S = 10.0
TAKES_S = 3.0
"""1 to 4 s were measured of a processor (docs/health.md)."""
ALLOCATION_MS_PER_MIB = 0.5


class SimCluster:
    """Processes that exist only in memory, except for their event logs and checkpoints."""

    simulated = True

    @property
    def store_port(self) -> int:
        """Port of the current store."""
        return self.store.port

    def __init__(self, setup: ArmSetup, timings: Timings, behaviour: Behaviour) -> None:
        self._clock = Clock()
        self.keepers = _keepers(setup, self._clock)
        self.store = SimStore()
        self.store.on_end = self._store_lost
        self.links = SimLinks(self._clock, f"{setup.seed}/{setup.arm}")
        self.storage = SimStorage(setup.checkpoints)
        scenario = setup.cell.scenario
        spec, memory = scenario.workload, scenario.workload.checkpoint.in_memory
        self._places = devices.slots(spec.ranks + strategy_for(setup.cell).spares_wanted)
        self._nodes = range(scenario.topology.nodes)
        self._config = RankConfig(
            process="",
            events=setup.run.events(setup.id),
            memory_every=memory.every if memory else 0,
            evaluate=spec.evaluate,
            timings=timings,
            disk=self.storage.disk,
            **job_of(setup, "worker"),
        )
        self._behaviour = behaviour
        self._seed = f"{setup.seed}/{setup.arm}"
        self._ranks: dict[str, SimRank] = {}
        self.groups = SimGroups(self._clock, self._ranks)
        self._groups: dict[int, Group] = {}
        self._reports: list[Report] = []
        self._last_report_ns: dict[str, int] = {}

    @property
    def machines(self) -> None:
        """None: simulated nodes are only names."""

    def places_on(self, node: int) -> Sequence[str]:
        """The arm's devices, whatever the node."""
        return self._places

    def usable(self) -> range:
        """All nodes."""
        return self._nodes

    def news(self) -> tuple[()]:
        """Nothing: nodes are neither added nor lost."""
        return ()

    def away(self) -> None:
        """Nothing to do: only the coordinator's own knowledge is lost."""

    def back(self) -> None:
        """See ``away``."""

    def identity(self) -> dict[str, Any]:
        """The same in every run."""
        return {"pid": PID, "host": "sim", "wall_ns": WALL_NS}

    def now_ns(self) -> int:
        """Simulated time."""
        return self._clock.read()

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        """Start a simulated process."""
        pid = FIRST_PID + len(self._ranks)
        process = Process(
            name=name, role=role, pid=pid, clock=self._clock, seed=f"{self._seed}/{name}"
        )
        rank = SimRank(
            self._config,
            process,
            behaviour=self._behaviour,
            group_of=self._group,
            spare_of=self._ranks.__getitem__,
            send=lambda message: self._report(
                process, MessageReceived(process=name, message=message)
            ),
        )
        if self.keepers is not None:
            rank.memory = SimMemoryCheckpointer(self.keepers, node, rank)
        process.on_end = partial(self._ended, rank)
        self._ranks[name] = rank
        process.start(rank.body(mode))
        return pid

    def undo(self, name: str, pid: int) -> Undo | None:
        """None: the process exists only in memory."""
        return None

    @property
    def tainted(self) -> Tainted:
        """Nothing: simulated places are no hardware."""
        return UNTAINTED

    def checker(self) -> SimChecks:
        """Every place is fit."""
        return SimChecks(self.now_ns)

    def taint_name(self, node: int) -> str:
        """Nothing is tainted: simulated places are no hardware."""
        return "sim"

    def hardware(self) -> Sequence[Sign]:
        """Nothing: there is no hardware."""
        return ()

    def send(self, name: str, message: Message) -> bool:
        """Send a message; simulated ranks have no flight recorder to look up."""
        if isinstance(message, Recall):
            return False
        process = self._ranks[name].process
        return process.deliver(message, process.rng.uniform(*LATENCY_MS) * MS)

    def signal(self, name: str, signum: int) -> None:
        """Signal a process; none has stacks to write down."""
        if signum != STACK_SIGNAL and self._behaviour.obeys(self._ranks[name], signum):
            self._ranks[name].process.signal(signum)

    def mark(self, name: str) -> Mark:
        """The progress mark."""
        return self._ranks[name].process.seen.read()

    def os_state(self, name: str) -> str:
        """S, T, Z or X."""
        return self._ranks[name].process.state

    def pid(self, name: str) -> int | None:
        """None: it is no process."""
        return None

    def stacks(self, name: str) -> str | None:
        """Nothing: simulated ranks have no stacks."""
        return None

    def pulse(self, name: str) -> Pulse:
        """Nothing: processors are never short here."""
        return Pulse()

    def wait(self, timeout_s: float) -> list[Report]:
        """Advance from event to event until there is a report, or the time is over."""
        until = self._clock.now_ns + int(max(0.0, timeout_s) * NS_PER_S)
        while not self._reports and self._clock.advance(until):
            pass
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> Leftovers:
        """Kill everything; processes that survive are reported as left."""
        for name in self._ranks:
            self.signal(name, 9)
        until = self._clock.now_ns + int(REAP_LIMIT_S * NS_PER_S)
        while any(not rank.process.reaped for rank in self._ranks.values()) and self._clock.advance(
            until
        ):
            pass
        left = [rank for rank in self._ranks.values() if not rank.process.reaped]
        for rank in left:
            rank.process.signal(9)  # close its log, whatever the test wants it to survive
        return Leftovers(
            processes=[{"pid": rank.process.pid, "process": rank.process.name} for rank in left],
            ports=[],
            shared_memory=[],
        )

    def _group(self, generation: int, size: int) -> Group:
        if generation not in self._groups:
            form_ns = self._config.timings.form_ms * MS
            self._groups[generation] = Group(
                generation=generation,
                size=size,
                form_ns=form_ns + self.store.forming_s(size) * NS_PER_S,
                spread_ns=self._config.timings.spread_ms * MS,
                links=self.links,
            )
        return self._groups[generation]

    def _store_lost(self) -> None:
        for group in self._groups.values():
            group.lose_store()

    def _report(self, process: Process, report: Report, extra_ms: float = 0.0) -> None:
        """Deliver a report to the supervisor, after all earlier reports of that process."""
        delay = (process.rng.uniform(*LATENCY_MS) + extra_ms) * MS
        due = max(self._last_report_ns.get(process.name, 0), self._clock.now_ns + int(delay))
        self._last_report_ns[process.name] = due
        self._clock.after(due - self._clock.now_ns, partial(self._arrive, process, report))

    def _arrive(self, process: Process, report: Report) -> None:
        if isinstance(report, Exited):
            process.reaped = True
        self._reports.append(report)

    def _ended(self, rank: SimRank, exit_code: int | None, signum: int | None) -> None:
        """The process has stopped executing: close its connections, then report its exit."""
        if rank.writer is not None:
            rank.writer.abandon()
        self._clock.after(
            rank.about(self._config.timings.teardown_ms * MS),
            partial(self._gone, rank, exit_code, signum),
        )

    def _gone(self, rank: SimRank, exit_code: int | None, signum: int | None) -> None:
        process = rank.process
        rank.disconnect()
        exited = Exited(
            process=process.name, exit_code=exit_code, signal=signum, time_ns=self._clock.now_ns
        )
        self._report(process, exited, process.rng.uniform(*REAP_MS))


def _keepers(setup: ArmSetup, clock: Clock) -> SimKeepers | None:
    scenario = setup.cell.scenario
    spec = scenario.workload.checkpoint.in_memory
    if spec is None:
        return None
    return SimKeepers(clock, nodes=scenario.topology.nodes, replicate=spec.replicate)


class SimChecks:
    """One after the other. ``now_ns``: simulated time."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._due_ns: dict[Spot, int] = {}

    def begin(self, spot: Spot) -> None:
        begins_ns = max([self._now_ns(), *self._due_ns.values()])
        self._due_ns[spot] = begins_ns + int(TAKES_S * NS_PER_S)

    def take(self) -> Sequence[Answer]:
        now_ns = self._now_ns()
        over = [spot for spot, due_ns in self._due_ns.items() if due_ns <= now_ns]
        self._due_ns = {spot: due for spot, due in self._due_ns.items() if due > now_ns}
        return [Answer(spot, True, "") for spot in over]

    def close(self) -> None:
        self._due_ns = {}


class SimGroups:
    """Limits simulated processes. ``ranks``: the simulated ranks by name."""

    def __init__(self, clock: Clock, ranks: Mapping[str, SimRank]) -> None:
        self._clock = clock
        self._ranks = ranks
        self._limits: dict[str, int] = {}
        self._kills: Counter[str] = Counter()

    def undo(self, process: str) -> Sequence[Undo]:
        """Nothing: no change outside to undo."""
        return ()

    def limit_memory(self, process: str, mib: int) -> None:
        """The process, which is commanded to allocate at the same time, exceeds the limit after a
        while.
        """
        self._limits[process] = mib
        self._clock.after(mib * ALLOCATION_MS_PER_MIB * MS, partial(self._kill, process))

    def oom_kills(self, process: str) -> int:
        """The simulated kernel's count."""
        return self._kills[process]

    def limit_cores(self, processes: Sequence[str], cores: float) -> None:
        """Divide ``cores`` among the ranks. A rank would use one core, a keeper almost nothing."""
        ranks = [self._ranks[process] for process in processes if process in self._ranks]
        for rank in ranks:
            rank.faults.rationed = max(1.0, len(ranks) / cores)

    def throttled(self, process: str) -> int:
        """1 as soon as a limit slows it, otherwise 0."""
        return int(process in self._ranks and self._ranks[process].faults.rationed > 1)

    def release(self, process: str) -> None:
        """Lift all limits."""
        self._limits.pop(process, None)
        if process in self._ranks:
            self._ranks[process].faults.rationed = 1.0

    def _kill(self, process: str) -> None:
        one = self._ranks[process].process
        if process in self._limits and one.running and not one.stopped:
            self._kills[process] += 1
            one.signal(signal.SIGKILL)
