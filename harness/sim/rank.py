"""A simulated rank: what ``recovery.job``, ``recovery.agent`` and ``harness.rank`` do, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

from chaos.events import EventWriter, Kind
from harness.sim.behaviour import Behaviour
from harness.sim.faults import SimFaultAgent, TrainingError
from harness.sim.group import Group, Lost
from harness.sim.process import Body, Process
from harness.sim.settings import MS, RankConfig
from harness.sim.state import State
from harness.sim.step import Attempt, NonFinite
from recovery import marks
from recovery.checkpoints import Checkpoint
from recovery.wire import (
    Abort,
    Extra,
    Finished,
    Inquiry,
    Join,
    Joined,
    Message,
    Notice,
    Parked,
    PauseRequest,
    Ready,
    Status,
    Stop,
)

EXIT_ERROR = 1
BOOT_MS = 2.0
Sleeping = Generator[float | None, Any, None]


class SimRank:
    """One rank. ``group_of``: the group of a generation and its size; ``send``: to the supervisor."""

    def __init__(
        self, config: RankConfig, process: Process, *, behaviour: Behaviour,
        group_of: Callable[[int, int], Group], send: Callable[[Message], None],
    ) -> None:  # fmt: skip
        self.config = config
        self.process = process
        self.mark = process.mark
        self.behaviour = behaviour
        self.send = send
        self.state = State.initial(config.seed)
        self.started_ns = 0  # when its log begins
        self.rank = -1
        self.world = 0
        self.generation = 0
        self.group: Group | None = None
        self.writer: EventWriter | None = None
        self.faults = SimFaultAgent(self)
        self.attempt: Attempt | None = None
        self.pause_wanted = self.save_wanted = False
        self.pausing = False
        self.collectives = 0
        self.skip: dict[int, int] = {}
        self.examine = 0
        self._group_of = group_of
        self._orders: deque[Join | Abort | Stop] = deque()
        self._awaiting: int | None = None
        self._aborted_generation = 0
        self._valid = self._announced = False
        self._retired: Group | None = None
        process.on_message = self._on_message
        process.on_term = lambda: self.send(Notice())

    # ---- the agent's side

    def _on_message(self, message: Any) -> None:
        match message:
            case Abort():
                self._aborted_generation = max(self._aborted_generation, message.generation)
                self._order(message)
                self.faults.aborted()
                if self.group is not None and self.group.generation <= message.generation:
                    self.group.abort(self.rank)
            case Join() | Stop():
                self._order(message)
            case PauseRequest():
                self.pause_wanted, self.save_wanted = True, message.save
            case Inquiry() if self._announced:
                place: Any = "joining" if self.mark.phase == "joining" else "training"
                place = "finished" if place == "training" and self.state.step >= self.config.steps else place
                place = "waiting" if self.group is None else place
                status = {"generation": self.generation, "step": self.state.step, "valid": self._valid}
                self.send(Status(place=place, **status))
            case Extra():
                self.faults.on_command(message.topic, message.payload)

    def _order(self, message: Join | Abort | Stop) -> None:
        self._orders.append(message)
        if self._awaiting is not None:
            self.process.wake(self._awaiting)

    # ---- the training thread's side

    def body(self, mode: str) -> Body:
        """Everything from birth to exit code."""
        yield self.about(BOOT_MS * MS)
        self.writer = self.behaviour.writer(self.config.events, self.process.name, self.process.clock.read)
        self.started_ns = self.process.clock.now_ns
        self.write(Kind.ACTOR_STARTED, pid=self.process.pid, host="sim", wall_ns=self.config.wall_ns)
        timings = self.config.timings
        yield self.about((timings.cold_spawn_ms if mode == "cold" else timings.spawn_ms) * MS)
        self._announced = True
        self.send(Ready())
        try:
            while (yield from self._running()):
                yield from self._step()
        except TrainingError as error:
            self.write(Kind.ERROR_RAISED, type=error.kind, message=str(error)[:500])
            return EXIT_ERROR
        self.writer.close()
        return 0

    def write(self, kind: Kind, /, *, step: int | None = None, **data: Any) -> None:
        """Write an event and note that in the mark."""
        assert self.writer is not None
        self.mark.wrote(self.writer.write(kind, step=step, **data).seq)

    def about(self, ns: float) -> float:
        """That long, give or take."""
        return ns * (1 + self.config.timings.jitter * self.process.rng.uniform(-1, 1))

    def check(self) -> None:
        """Raise Lost if the supervisor aborted this generation."""
        if self._aborted_generation >= self.generation > 0:
            raise Lost("aborted by the supervisor")

    def _running(self) -> Generator[float | None, Any, bool]:
        while True:
            if self.group is not None and self.state.step < self.config.steps:
                return True
            if self.group is not None:
                self.mark.enter(marks.IDLE)
                self.send(Finished(step=self.state.step))
            order = yield from self._next_order()
            if isinstance(order, Join):
                yield from self._join(order)
            elif isinstance(order, Abort):
                if self.group is not None and order.generation >= self.generation:
                    self._park("aborted")
            elif self.behaviour.stops(self):
                self.leave()
                return False

    def _next_order(self) -> Generator[float | None, Any, Join | Abort | Stop]:
        while not self._orders:
            self._awaiting = self.process.ticket
            yield None
            self._awaiting = None
        return self._orders.popleft()

    def _step(self) -> Sleeping:
        """One attempt at the next step; a lost generation or a refused step parks the rank."""
        self.attempt = Attempt(self)
        try:
            yield from self.attempt.run()
            if self.pausing and self.state.step < self.config.steps:
                self._park("pause")
        except Lost as error:
            self._park_lost(error)
        except NonFinite as error:
            blamed = self.behaviour.blamed(self, list(error.blamed))
            self.write(
                Kind.NONFINITE_CAUGHT,
                step=self.state.step + 1,
                rank=self.rank,
                blamed=blamed,
                what="loss or gradient",
            )
            samples = yield from self.attempt.examined(error.blamed)
            self._park("nonfinite", blamed=blamed, samples=samples)

    def _join(self, order: Join) -> Sleeping:
        self.leave()
        self.rank, self.world, self.generation = order.rank, len(order.members), order.generation
        assert self.writer is not None
        self.writer.generation = order.generation
        self.skip, self.examine = order.skip, order.examine
        self.mark.begin(order.generation, self.state.step)
        self.mark.collective(0)
        self.mark.enter(marks.JOINING)
        self.pausing = self.pause_wanted = self.save_wanted = False
        self.collectives = 0
        group = self.group = self._group_of(order.generation, self.world)
        clock = self.process.clock
        try:
            self.check()
            started = clock.now_ns
            group.form(self.rank, self.process)
            yield None
            seconds = round((clock.now_ns - started) / 1e9, 6)
            self.write(Kind.GROUP_FORMED, rank=self.rank, world=self.world, seconds=seconds)
            name = yield from self._take_state(order, group)
            self.check()
        except Lost as error:
            self._park_lost(error)
            return
        self.mark.commit(self.state.step)
        self.send(Joined(generation=self.generation, step=self.state.step, checkpoint=name))

    def _take_state(self, order: Join, group: Group) -> Generator[float | None, Any, str | None]:
        started = self.process.clock.now_ns
        name: str | None = None
        origin = "kept" if self.state.step else "initial"
        if order.restore and self.rank == 0:
            self._valid = False
            name = yield from self._restore()
            origin = "checkpoint" if name else "initial"
            self._valid = True
        receives = self.rank in order.receivers
        if receives:
            self._valid = False
            origin = "peer"
        if order.source is not None and order.receivers:
            yield from self._copy_state(group, order.source, receives=receives)
        self._valid = True
        self.write(
            Kind.STATE_READY, step=self.state.step, rank=self.rank, origin=origin,
            source=order.source if origin == "peer" else name,
            seconds=round((self.process.clock.now_ns - started) / 1e9, 6),
        )  # fmt: skip
        return name

    def _copy_state(self, group: Group, source: int, *, receives: bool) -> Sleeping:
        """A broadcast, in which every rank takes part; a receiver holds nothing whole until it is over."""
        sent = self.behaviour.snapshot(self) if self.rank == source else None
        if receives:
            self.state = self.state.torn()
        transfer_ns = self.about(self.config.timings.transfer_ms * MS)
        group.meet(self.rank, sent, lambda parts: parts[source], transfer_ns)
        received = yield None
        self.mark.touch()
        if receives:
            self.state = received

    def _restore(self) -> Generator[float | None, Any, str | None]:
        """Load the newest good checkpoint; without one, training begins anew, as in a fresh process."""
        yield self.about(self.config.timings.checkpoint_ms * MS)
        found = self.behaviour.restore(self, self._refused)
        if found is None:
            return None
        checkpoint, manifest = found
        self.state = State.restored((checkpoint.path / "state.bin").read_bytes(), manifest["scalars"])
        return checkpoint.name

    def _refused(self, bad: Checkpoint, reason: str) -> None:
        self.write(Kind.CHECKPOINT_REFUSED, step=bad.step, checkpoint=bad.name, reason=reason)

    def _park_lost(self, error: Lost) -> None:
        aborted = self._aborted_generation >= self.generation
        self._park("aborted" if aborted else "failed", error=str(error))

    def _park(
        self,
        why: Literal["aborted", "pause", "nonfinite", "failed"],
        *,
        error: str = "",
        blamed: list[int] | None = None,
        samples: Sequence[int] = (),
    ) -> None:
        generation = self.generation
        if why in ("pause", "nonfinite"):
            # All park after the same collective: breaking it now could cut off one still finishing.
            self._retired, self.group = self.group, None
            self.mark.enter(marks.IDLE)
        else:
            self.leave()
        self.write(Kind.PARKED, step=self.state.step, valid=self._valid, why=why)
        self.send(
            Parked(
                generation=generation,
                step=self.state.step,
                valid=self._valid,
                why=why,
                blamed=blamed or [],
                error=error,
                samples=list(samples),
            )
        )

    def leave(self) -> None:
        """Leave the group, if in one."""
        self.disconnect()
        self.group = self._retired = None
        self.mark.enter(marks.IDLE)

    def disconnect(self) -> None:
        """Close the connections of the group, as the kernel does too for a process that is gone."""
        for group in (self.group, self._retired):
            if group is not None:
                group.leave(self.rank)
