"""The processes of a job as their supervisor knows them: those alive, and the members of the last
generation.

Queries made for each message do not scan all processes: a job may have many thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.detection.hangs import STOPPED, UNHEARD
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.rank_assignment import CopyPlan, can_supply, common_step
from trainchaos.recovery.policy.strategy import Form, Health, ProcessView, StateFrom
from trainchaos.recovery.process.host import Hands
from trainchaos.recovery.transport.wire import Abort, Stop

_HOLDING = (Health.PARKED, Health.READY)
ByHealth = dict[Health, dict[str, "Process"]]


@dataclass(kw_only=True, eq=False)
class Process:
    """One process. ``number``: its place in the order of starts; ``step``: last step it applied;
    ``valid``: state is whole; ``finished``: no step is left.

    ``expected_exit``: its end was asked for; ``gone``: its exit is known; ``started_s``: when it
    was started, None: by another supervisor; ``deadline_s``: when it has to be ready; ``error``:
    the reason it gives for ending; ``versions``: of its software; ``noticed``: it has notice that
    it will be ended soon; ``warned``: its place is about to fail; ``shard``, ``pending``: see
    ``ProcessView``; ``exclusions_sent``: how many excluded samples it has been sent; ``stopped_s``:
    since when it is seen stopped during startup; ``leaving``: it counts as dead, and was asked to
    end by itself, which it may not do; ``live``: where it listens for a rank that keeps it up to
    date ("": nowhere); ``follows``: it was told to follow its shard, as a spare; ``settles``: it
    was asked what it holds, and has not said it yet. ``lists``: the processes by health, this one
    among them.
    """

    name: str
    role: str
    number: int
    lists: ByHealth = field(repr=False)
    rank: int | None = None
    step: int = 0
    valid: bool = False
    finished: bool = False
    expected_exit: bool = False
    gone: bool = False
    started_s: float | None = None
    deadline_s: float = 0.0
    error: str = ""
    noticed: bool = False
    warned: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    shard: int | None = None
    pending: int = 0
    exclusions_sent: int = 0
    stopped_s: float = math.inf
    leaving: bool = False
    live: str = ""
    follows: bool = False
    settles: bool = False

    def __post_init__(self) -> None:
        self._health = Health.STARTING
        self.lists[self._health][self.name] = self

    @property
    def health(self) -> Health:
        """Its health as the supervisor knows it."""
        return self._health

    @health.setter
    def health(self, health: Health) -> None:
        before = self.lists[self._health]
        del before[self.name]
        if not before:
            before.clear()  # else it keeps the place of each entry, and to read it takes as long
        self._health = health
        self.lists[health][self.name] = self


TERMINATED = "signal 15"


class ProcessTable:
    """All living processes, dead members of the last generation, and who holds which rank now."""

    def __init__(self, hands: Hands, *, start_timeout_s: float) -> None:
        self._members: tuple[str, ...] = ()
        self._ranks: dict[str, int] = {}
        self._unfinished = 0  # a rank that had a step left at the last check
        self._unparked = 0  # a rank that trained at the last check
        self._hands = hands
        self._start_timeout_s = start_timeout_s
        self._processes: dict[str, Process] = {}
        self._started = 0
        self._lists: ByHealth = {health: {} for health in Health}

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._processes.values()))

    def __getitem__(self, name: str) -> Process:
        return self._processes[name]

    def get(self, name: str) -> Process | None:
        """The process of that name, as long as it is remembered."""
        return self._processes.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._processes

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the last generation, by rank."""
        return self._members

    @members.setter
    def members(self, members: tuple[str, ...]) -> None:
        before, self._members = self._members, members
        self._ranks = {name: rank for rank, name in enumerate(members)}
        self._unfinished = self._unparked = 0
        for name in before:
            if name not in self._ranks and name in self._processes:
                self._processes[name].rank = None
        for process in list(self._lists[Health.DEAD].values()):
            self._forget(process)

    def exited(self, process: Process, how: str = "") -> None:
        """The process has exited; it is forgotten unless it was a member of the last generation. A
        notice ends a process that is still starting and cannot report it.
        """
        process.noticed = process.noticed or how == TERMINATED
        process.health, process.gone = Health.DEAD, True
        self._forget(process)

    def _forget(self, process: Process) -> None:
        if process.gone and self._members and process.name not in self._ranks:
            del self._processes[process.name], self._lists[Health.DEAD][process.name]

    def spawn(self, role: str, mode: str) -> str:
        """Start a process; returns its name."""
        process = self.know(self._hands.spawn(role, mode), role)
        process.started_s = self._hands.now_s()
        return process.name

    def know(self, name: str, role: str) -> Process:
        """Remember a process that was started."""
        deadline_s = self._hands.now_s() + self._start_timeout_s
        process = Process(
            name=name, role=role, number=self._started, lists=self._lists, deadline_s=deadline_s
        )
        self._started += 1
        self._processes[name] = process
        return process

    @property
    def started(self) -> int:
        return self._started

    def overdue(self, now_s: float) -> list[Process]:
        """Processes that should have been ready by now."""
        return [process for process in self.where(Health.STARTING) if now_s > process.deadline_s]

    def stopped(self, now_s: float, silence_s: float) -> list[Process]:
        """Members silent for that long that the kernel shows as stopped."""
        silent = [
            p for p in self.training() if now_s - self._hands.mark(p.name).time_ns / 1e9 > silence_s
        ]
        return [process for process in silent if self._hands.os_state(process.name) in STOPPED]

    def stopped_starting(self, now_s: float, since_s: float) -> list[Process]:
        """Starting processes that the kernel has shown as stopped for that long, at every check."""
        starting = self.where(Health.STARTING)
        for process in starting:
            if self._hands.os_state(process.name) not in STOPPED:
                process.stopped_s = math.inf
            else:
                process.stopped_s = min(process.stopped_s, now_s)
        return [process for process in starting if now_s - process.stopped_s > since_s]

    def unheard(self) -> list[Process]:
        """Members at work whose node is silent."""
        return [
            process for process in self.training() if self._hands.os_state(process.name) == UNHEARD
        ]

    def kill(self, process: Process) -> None:
        """Kill it and count it dead from now on."""
        process.expected_exit = True
        if process.health is not Health.DEAD:
            process.health = Health.DEAD
            self._hands.kill(process.name)

    def fence(self, process: Process) -> None:
        """Release a process that must not write to the job again: it is killed, unless it is about
        to be ended anyway.
        """
        if not process.noticed:
            self.kill(process)
            return
        process.expected_exit, process.leaving, process.health = True, True, Health.DEAD
        self._hands.send(process.name, Stop())

    def abort(self, generation: int) -> None:
        """Order every survivor to leave the generation."""
        told = [process.name for process in self.training()]
        order = Abort(generation=generation)
        for name in told:
            self._hands.send(name, order)
        self._hands.record(Kind.ABORT_SENT, processes=told)

    def dismiss(self, *, kill: bool) -> None:
        """End every process, by request or at once; each stays alive here until its exit is
        reported.
        """
        for process in self.alive:
            process.expected_exit = True
            # A process that is still starting has nothing to close.
            if kill or process.health is Health.STARTING:
                self._hands.kill(process.name)
            else:
                self._hands.send(process.name, Stop())
        for process in self._leaving if kill else ():
            self._hands.kill(process.name)

    @property
    def _leaving(self) -> list[Process]:
        """Processes that were asked to end and may still run, though they are counted dead."""
        return [
            process
            for process in self._lists[Health.DEAD].values()
            if process.leaving and not process.gone
        ]

    def step_of(self, process: Process) -> int:
        """The step a process was at, by its mark."""
        mark = self._hands.mark(process.name)
        return max(mark.step, mark.committed)

    @property
    def alive(self) -> list[Process]:
        """Processes not known to be dead, oldest first."""
        living = (
            process
            for health in Health
            if health is not Health.DEAD
            for process in self._lists[health].values()
        )
        return sorted(living, key=_number)

    @property
    def all_dead(self) -> bool:
        """Whether no process is alive, and each that was asked to end has exited."""
        return not self._leaving and not any(
            self._lists[health] for health in Health if health is not Health.DEAD
        )

    def where(self, health: Health) -> list[Process]:
        """Processes of that health, oldest first."""
        return sorted(self._lists[health].values(), key=_number)

    def only(self, *healths: Health) -> bool:
        """Whether every process has one of these healths."""
        return not any(self._lists[health] for health in Health if health not in healths)

    def other_versions(self, process: Process) -> Mapping[str, str]:
        """The software versions of another process that is built and alive; empty when there is
        none.
        """
        for health in (Health.TRAINING, Health.PARKED, Health.READY):
            for other in self._lists[health].values():
                if other is not process and other.versions:
                    return other.versions
        return {}

    def member_processes(self) -> list[Process]:
        """Members of the current generation by rank, including dead ones."""
        return [self._processes[name] for name in self._members]

    def training(self) -> list[Process]:
        """Members that neither parked nor died, by rank."""
        return [process for process in self.member_processes() if process.health is Health.TRAINING]

    @property
    def some_train(self) -> bool:
        """Whether some member has neither parked nor died."""
        if not self._lists[Health.TRAINING]:
            return False
        size = len(self._members)
        for rank in range(self._unparked, self._unparked + size):
            if self._processes[self._members[rank % size]].health is Health.TRAINING:
                # The next check begins here. To ask the list of those that train would take as long
                # as the list was: a dict keeps the places of what was taken from its front.
                self._unparked = rank % size
                return True
        return False

    @property
    def all_parked(self) -> bool:
        """Whether every member has parked, and none died."""
        parked = self._lists[Health.PARKED]
        return len(parked) >= len(self._members) and all(name in parked for name in self._members)

    @property
    def all_finished(self) -> bool:
        """Whether no member has a step left."""
        size = len(self._members)
        for rank in range(self._unfinished, self._unfinished + size):
            if not self._processes[self._members[rank % size]].finished:
                # the next check begins here: while that rank trains, no other is looked at
                self._unfinished = rank % size
                return False
        return True

    def rank_of(self, name: str) -> int | None:
        """Rank held in the current generation."""
        return self._ranks.get(name)

    def views(self) -> tuple[ProcessView, ...]:
        """All living processes and all members, as a strategy sees them: oldest first, but those
        that wait on a silent node last.
        """
        ready, now_s = self._lists[Health.READY], self._hands.now_s()
        unheard = {name for name in ready if self._hands.os_state(name) == UNHEARD}
        ranks, people = self._ranks, self._processes.values()
        seen = [p for p in people if p.health is not Health.DEAD or p.name in ranks]
        return tuple(
            ProcessView(
                name=p.name,
                role=p.role,
                health=p.health,
                step=p.step,
                valid=p.valid,
                rank=ranks.get(p.name),
                noticed=p.noticed,
                warned=p.warned,
                shard=p.shard,
                pending=p.pending,
                age_s=0.0 if p.started_s is None else now_s - p.started_s,
                live=bool(p.live),
            )
            for p in sorted(seen, key=lambda process: process.name in unheard)
        )

    def bench(self, process: Process) -> None:
        """Let a parked process wait outside the generation until its replica is whole again."""
        process.health, process.rank = Health.READY, None

    def reach_one_another(self, members: Sequence[str]) -> bool:
        """Whether each of them can send to a single other one, as gloo can. What is not known, of
        processes that this supervisor has adopted, they cannot.
        """
        return all(self._processes[name].versions.get("backend") == "gloo" for name in members)

    def plan_transfer(self, form: Form, shards: int) -> CopyPlan:
        """How the members of a new generation come to one state.

        Survivors that had already applied the interrupted step are the sources, as are those that
        lack only the end of it; all others copy from them.
        """
        layout = Layout(world=len(form.members), shards=shards)
        if form.state is StateFrom.INITIAL:
            return CopyPlan(layout=layout)
        if form.state is StateFrom.CHECKPOINT:
            return CopyPlan(
                layout=layout,
                copies={rank: layout.shard_of(rank) for rank in range(shards, layout.world)},
                holders={shard: (shard,) for shard in range(shards)},
            )
        untrusted = set(form.refill)
        able = [self._processes[name] for name in form.members]
        whole = {
            r: p for r, p in enumerate(able) if p.name not in untrusted and p.health in _HOLDING
        }
        step = common_step(whole.values(), shards)
        assert step is not None, "a generation that has no state is not decided on"
        holding = {rank for rank, process in whole.items() if can_supply(process, step)}
        holders: dict[int, list[int]] = {}
        for rank in sorted(holding):
            holders.setdefault(layout.shard_of(rank), []).append(rank)
        return CopyPlan(
            layout=layout,
            copies={
                rank: holders[layout.shard_of(rank)][0]
                for rank in range(layout.world)
                if rank not in holding
            },
            finish=step if any(whole[rank].step < step for rank in holding) else 0,
            holders=holders,
        )


def _number(process: Process) -> int:
    return process.number
