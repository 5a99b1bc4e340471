"""The processes of a job as their supervisor knows them: started here, remembered for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from chaos.events import Kind
from recovery.detect import STOPPED, UNHEARD
from recovery.layout import Layout
from recovery.seating import brings, common_step
from recovery.strategy import Form, Health, ProcessView, StateFrom
from recovery.supervision import Hands
from recovery.wire import Abort, Stop


@dataclass(kw_only=True)
class Process:
    """One process. ``step``: last step it applied; ``valid``: state is whole; ``finished``: no step is left.

    ``expected_exit``: its end was asked for; ``deadline_s``: when it has to be ready; ``error``: why it says it ends;
    ``versions``: of its software; ``noticed``: it was told that it will be ended soon; ``shard``, ``pending``: see
    ``ProcessView``.
    """

    name: str
    role: str
    health: Health = Health.STARTING
    rank: int | None = None
    step: int = 0
    valid: bool = False
    finished: bool = False
    expected_exit: bool = False
    deadline_s: float = 0.0
    error: str = ""
    noticed: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    shard: int | None = None
    pending: int = 0


class Crew:
    """Every process the job ever had, in the order they were started, and who holds which rank now."""

    def __init__(self, hands: Hands, *, start_timeout_s: float) -> None:
        self.members: tuple[str, ...] = ()
        self._hands = hands
        self._start_timeout_s = start_timeout_s
        self._processes: dict[str, Process] = {}

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._processes.values()))

    def __getitem__(self, name: str) -> Process:
        return self._processes[name]

    def __contains__(self, name: str) -> bool:
        return name in self._processes

    def spawn(self, role: str, mode: str) -> str:
        """Start a process; returns its name."""
        name = self._hands.spawn(role, mode)
        deadline_s = self._hands.now_s() + self._start_timeout_s
        self._processes[name] = Process(name=name, role=role, deadline_s=deadline_s)
        return name

    def know(self, name: str, role: str) -> Process:
        """Remember a process that somebody else started."""
        deadline_s = self._hands.now_s() + self._start_timeout_s
        self._processes[name] = Process(name=name, role=role, deadline_s=deadline_s)
        return self._processes[name]

    def overdue(self, now_s: float) -> list[Process]:
        """Processes that should have been ready by now."""
        return [process for process in self.where(Health.STARTING) if now_s > process.deadline_s]

    def stopped(self, now_s: float, silence_s: float) -> list[Process]:
        """Members silent for so long that the kernel shows as stopped."""
        silent = [p for p in self.training() if now_s - self._hands.mark(p.name).time_ns / 1e9 > silence_s]
        return [process for process in silent if self._hands.os_state(process.name) in STOPPED]

    def unheard(self) -> list[Process]:
        """Members at work whose node is not heard of."""
        return [process for process in self.training() if self._hands.os_state(process.name) == UNHEARD]

    def kill(self, process: Process) -> None:
        """Kill it and count it dead from now on."""
        process.expected_exit = True
        if process.health is not Health.DEAD:
            process.health = Health.DEAD
            self._hands.kill(process.name)

    def fence(self, process: Process) -> None:
        """Let go of a process that must not write to the job again: killed, unless it is about to be ended anyway."""
        if not process.noticed:
            self.kill(process)
            return
        process.expected_exit, process.health = True, Health.DEAD
        self._hands.send(process.name, Stop())

    def abort(self, generation: int) -> None:
        """Have every survivor leave the generation."""
        told = [process.name for process in self.training()]
        for name in told:
            self._hands.send(name, Abort(generation=generation))
        self._hands.record(Kind.ABORT_SENT, processes=told)

    def dismiss(self, *, kill: bool) -> None:
        """Have every process end, by itself or at once; each stays alive here until its exit is reported."""
        for process in self.alive:
            process.expected_exit = True
            # Whoever is still starting has nothing to close.
            if kill or process.health is Health.STARTING:
                self._hands.kill(process.name)
            else:
                self._hands.send(process.name, Stop())

    def step_of(self, process: Process) -> int:
        """The step a process was at, by its mark."""
        mark = self._hands.mark(process.name)
        return max(mark.step, mark.committed)

    @property
    def alive(self) -> list[Process]:
        """Processes not known to be dead."""
        return [process for process in self if process.health is not Health.DEAD]

    def where(self, health: Health) -> list[Process]:
        """Processes of that health, oldest first."""
        return [process for process in self if process.health is health]

    def member_processes(self) -> list[Process]:
        """Members of the current generation by rank, the dead ones too."""
        return [self._processes[name] for name in self.members]

    def training(self) -> list[Process]:
        """Members that neither parked nor died."""
        return [process for process in self.member_processes() if process.health is Health.TRAINING]

    def rank_of(self, name: str) -> int | None:
        """Rank held in the current generation."""
        return self.members.index(name) if name in self.members else None

    def views(self) -> tuple[ProcessView, ...]:
        """All processes as a strategy sees them, oldest first, but last whoever waits on a node not heard of."""
        ready = [p.name for p in self.where(Health.READY)]
        unheard = {name for name in ready if self._hands.os_state(name) == UNHEARD}
        return tuple(
            ProcessView(
                name=p.name,
                role=p.role,
                health=p.health,
                step=p.step,
                valid=p.valid,
                rank=self.rank_of(p.name),
                noticed=p.noticed,
                shard=p.shard,
                pending=p.pending,
            )
            for p in sorted(self, key=lambda process: process.name in unheard)
        )

    def bench(self, process: Process) -> None:
        """Have a parked process wait outside the generation until its replica is whole again."""
        process.health, process.rank = Health.READY, None

    def plan_transfer(self, form: Form, shards: int) -> tuple[dict[int, int], int]:
        """How the members of a new generation come to one state: receiving ranks, each with the rank that sends it
        its part, and the step that some have to finish first (0: none).

        Survivors that had already applied the interrupted step are the sources, as are those who only have to be
        told the end of it; all others copy from them.
        """
        if form.state is StateFrom.INITIAL:
            return {}, 0
        layout = Layout(world=len(form.members), shards=shards)
        if form.state is StateFrom.CHECKPOINT:
            return {rank: layout.shard_of(rank) for rank in range(shards, layout.world)}, 0
        people = {p.name: p for p in self.views() if p.health in (Health.PARKED, Health.READY)}
        whole = {rank: people[name] for rank, name in enumerate(form.members) if name not in form.refill}
        step = common_step(whole.values(), shards)
        assert step is not None, "nobody decides on a generation that has no state"
        holding = {rank for rank, process in whole.items() if brings(process, step)}
        copies = {
            rank: min(holding.intersection(layout.holders(layout.shard_of(rank))))
            for rank in range(layout.world)
            if rank not in holding
        }
        return copies, step if any(whole[rank].step < step for rank in holding) else 0
