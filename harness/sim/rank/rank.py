"""A simulated rank: the counterpart of ``recovery.rank.job``, ``recovery.rank.agent`` and
``harness.rank.rank``, event by event. As for real ranks, ``recovery.rank.membership`` decides what
it sends to the supervisor, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.harness.sim.rank.acquire_state import LOOK_MS, SETTLE_LOOKS, StateAcquisition
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.rank.faults import SimFaultAgent, TrainingError
from trainchaos.harness.sim.rank.keepers import SimMemoryCheckpointer
from trainchaos.harness.sim.rank.live import SimFeeds, SimFollower, Told
from trainchaos.harness.sim.rank.saves import SimSaves
from trainchaos.harness.sim.rank.state import Reduced, State
from trainchaos.harness.sim.rank.step import Attempt, NonFinite
from trainchaos.harness.sim.world.clock import NS_PER_S
from trainchaos.harness.sim.world.group import Group, SimGenerationLost
from trainchaos.harness.sim.world.process import Body, Process
from trainchaos.harness.sim.world.settings import MS, WALL_NS, RankConfig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.rank.membership import (
    Membership,
    Order,
    SupervisorOrders,
    Why,
    stays_connected,
)
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.wire import (
    Abort,
    Digest,
    Extra,
    Feed,
    Follow,
    Following,
    Inquiry,
    Join,
    Joined,
    LeaveOut,
    Message,
    Notice,
    Ready,
    Settle,
    Settled,
    StandBy,
    StoodBy,
)

EXIT_ERROR = 1
BOOT_MS = 2.0
Sleeping = Generator[float | None, Any, None]


class SimRank:
    """One rank. ``group_of``: the group of a generation and its size; ``spare_of``: the simulated
    process of a name; ``send``: sends to the supervisor.
    """

    def __init__(
        self,
        config: RankConfig,
        process: Process,
        *,
        behaviour: Behaviour,
        group_of: Callable[[int, int], Group],
        spare_of: Callable[[str], SimRank],
        send: Callable[[Message], None],
    ) -> None:
        self.config = config
        self.process = process
        self.mark = process.mark
        self.behaviour = behaviour
        self.send = send
        self.state = State.initial(config.seed)
        self.started_ns = 0  # when its log starts
        self.rank = -1
        self.world = 0
        self.layout = Layout(world=1)
        self.member = Membership(SupervisorOrders(), steps=config.steps)
        # the last step applied, with its outcome, which other ranks may lack
        self.last_applied: tuple[int, Reduced] | None = None
        self.digest: Digest | None = None  # the last one sent
        self.group: Group | None = None
        self.writer: EventWriter | None = None
        self.faults = SimFaultAgent(self)
        self.attempt: Attempt | None = None
        self.checkpoints = SimSaves(self)
        self.pausing = False
        self.memory: SimMemoryCheckpointer | None = None
        self.collectives = self.examine = 0
        self.skip: Mapping[int, int] = {}
        live = config.sync == "live"
        self.feeds = SimFeeds(self, spare_of) if live else None
        self.follower = SimFollower(self) if live else None
        self._group_of = group_of
        self._orders: deque[Order] = deque()
        self.brings = False  # see recovery.spares.live.Live
        self._awaiting: int | None = None
        self._announced = False  # it listens from then on; earlier messages wait
        self._asked: list[int] = []
        self._shard: int | None = None
        self._retired: Group | None = None
        process.on_message = self._on_message
        process.on_term = lambda: self.send(Notice())

    # ---- called by the agent

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Told):
            if self.follower is not None:
                self.follower.take(message)
            return
        order = self.member.heard.take(message)
        if order is not None:
            self._order(order)
        match message:
            case Abort():
                self.faults.aborted()
                if self.group is not None and self.group.generation <= message.generation:
                    self.group.abort(self.rank)
            case Inquiry():
                self._asked.append(message.number)
                self._answer()
            case StandBy():
                delay_ns = self.config.timings.form_ms * MS
                self.process.clock.after(delay_ns, partial(self._stands_by, message))
            case Feed() if self.feeds is not None:
                self.feeds.told(message)
            case Extra():
                self.faults.on_command(message.topic, message.payload)

    def _stands_by(self, order: StandBy) -> None:
        """Its group would be formed by now, on a thread of its own."""
        if self.process.running and not self.process.stopped:
            self.send(StoodBy(generation=order.generation, group=order.group))

    def _answer(self) -> None:
        while self._announced and self._asked:
            if self.digest is not None:
                self.send(self.digest)
            self.send(self.member.status(self.state.step, self._asked.pop(0), self._live))

    @property
    def generation(self) -> int:
        """The current or last generation."""
        return self.member.generation

    @property
    def replica(self) -> range:
        """The ranks that together with this one hold one copy of the model."""
        return self.layout.replica(self.layout.replica_of(self.rank))

    def commit(self, number: int, reduced: Reduced, lr: float) -> None:
        """Apply the gradients of a step."""
        self.state = self.state.applied(reduced, lr)
        self.last_applied = (number, reduced)
        self.member.holding.applied()
        if self.feeds is not None:
            self.feeds.after()

    @property
    def _live(self) -> str:
        whole = self.config.shards == 1 or self._shard is not None
        return self.process.name if self.follower is not None and whole else ""

    def _order(self, message: Order) -> None:
        self._orders.append(message)
        if self._awaiting is not None:
            self.process.wake(self._awaiting)

    # ---- called by the training thread

    def body(self, mode: str) -> Body:
        """Everything from the start to the exit code."""
        yield self.about(BOOT_MS * MS)
        self.writer = self.behaviour.writer(
            self.config.events, self.process.name, self.process.clock.read
        )
        self.started_ns = self.process.clock.now_ns
        self.write(Kind.ACTOR_STARTED, pid=self.process.pid, host="sim", wall_ns=WALL_NS)
        timings = self.config.timings
        yield self.about((timings.cold_spawn_ms if mode == "cold" else timings.spawn_ms) * MS)
        self._announced = True
        self._answer()  # the agent may answer before the training thread sends anything
        self.send(Ready(versions=self.behaviour.versions(self), live=self._live))
        try:
            while (yield from self._running()):
                yield from self._step()
        except TrainingError as error:
            self.write(Kind.ERROR_RAISED, type=error.kind, message=str(error)[:500])
            return EXIT_ERROR
        self.writer.close()
        return 0

    def write(self, kind: Kind, /, *, step: int | None = None, **data: Any) -> None:
        """Write an event and record it in the mark."""
        assert self.writer is not None
        self.mark.wrote(self.writer.write(kind, step=step, **data).seq)

    def about(self, ns: float) -> float:
        """``ns`` with jitter."""
        return ns * (1 + self.config.timings.jitter * self.process.rng.uniform(-1, 1))

    def check(self) -> None:
        """Raise SimGenerationLost if the supervisor aborted this generation."""
        if self.member.lost:
            raise SimGenerationLost("aborted by the supervisor")

    def _running(self) -> Generator[float | None, Any, bool]:
        while True:
            if self.member.trains(self.state.step):
                return True
            if finished := self.member.finished(self.state.step):
                self.mark.enter(progress_counters.IDLE)
                if not self.state.finite:
                    self._refuse_end()
                else:
                    self.send(finished)
            order = yield from self._next_order()
            if isinstance(order, Join):
                yield from self._join(order)
            elif isinstance(order, Follow):
                yield from self._follow(order)
            elif isinstance(order, Settle):
                yield from self._settle()
            elif isinstance(order, LeaveOut):
                self.member.note_exclusions(order)
            elif isinstance(order, Abort):
                if self.member.must_park(order):
                    self._park("aborted")
            elif self.behaviour.stops(self):
                self.leave()
                return False

    def _refuse_end(self) -> None:
        """Refuse to finish, as ``recovery.rank.job`` does."""
        self.write(
            Kind.NONFINITE_CAUGHT,
            step=self.state.step,
            rank=self.rank,
            blamed=[self.rank],
            what="state",
        )
        self._park("nonfinite", blamed=[self.rank])

    def _next_order(self) -> Generator[float | None, Any, Order]:
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
            self.mark.enter(progress_counters.BETWEEN)
            if self.pausing and self.state.step < self.config.steps:
                self._park("pause")
            else:
                yield from self._evaluate()
        except SimGenerationLost as error:
            self._park_lost(error)
        except NonFinite as error:
            blamed = self.behaviour.blamed(self, list(error.blamed))
            step = self.state.step + 1
            self.write(
                Kind.NONFINITE_CAUGHT,
                step=step,
                rank=self.rank,
                blamed=blamed,
                what="loss or gradient",
            )
            samples = yield from self.attempt.examined(error.blamed)
            self._park("nonfinite", blamed=blamed, samples=samples)

    def _evaluate(self) -> Sleeping:
        """User code between steps; it is never cut short."""
        spec = self.config.evaluate
        if spec is None or self.rank or self.state.step % spec.every:
            return
        if spec.declared:
            self.mark.busy(limit_s := ceil(2 * spec.takes) + 1)
            self.write(Kind.BUSY, rank=self.rank, what="evaluation", limit_s=limit_s)
        yield spec.takes * NS_PER_S
        self.mark.busy(0)
        if spec.declared:
            self.write(Kind.BUSY_ENDED, rank=self.rank, what="evaluation", seconds=spec.takes)

    def _join(self, order: Join) -> Sleeping:
        self.leave()
        self.member.joins(order)
        if self.feeds is not None:
            self.feeds.joins()
            follower = self.follower
            self.brings = follower is not None and not order.state.receives and follower.step >= 0
            self.member.holding.valid |= self.brings
            self.follower = follower if order.state.live >= 0 else None
        self.rank, self.world = order.rank, order.world
        layout = Layout(world=self.world, shards=order.shards)
        self._hold(layout.shard_of(self.rank), layout)
        assert self.writer is not None
        self.writer.generation = order.generation
        self.skip, self.examine = self.member.left_out(order), order.resume.examine
        self.mark.begin(order.generation, self.state.step)
        self.mark.collective(0)
        self.mark.enter(progress_counters.JOINING)
        self.pausing = False
        self.collectives = 0
        self.checkpoints.joining(order)
        group = self.group = self._group_of(order.generation, self.world)
        clock = self.process.clock
        try:
            self.check()
            started = clock.now_ns
            group.form(self.rank, self.process, standby=bool(order.standby))
            yield None
            seconds = round((clock.now_ns - started) / 1e9, 6)
            how = {"standby": True} if order.standby else {}
            self.write(Kind.GROUP_FORMED, rank=self.rank, world=self.world, seconds=seconds, **how)
            name = yield from StateAcquisition(self, group, order).run()
            self.check()
        except SimGenerationLost as error:
            self._park_lost(error)
            return
        self.member.begins(self.state.step)
        self.checkpoints.since = self.state.step
        self.mark.commit(self.state.step)
        held = self.behaviour.held(self) if self.layout.replicas > 1 else ""
        self.send(
            Joined(generation=self.generation, step=self.state.step, checkpoint=name, digest=held)
        )
        self.member.joined()

    def _follow(self, order: Follow) -> Sleeping:
        """Hold the part that this spare is to follow, and say where it is fed."""
        if self._shard is None:
            yield self.about(self.config.timings.form_ms * MS)
        self._hold(order.shard, Layout(world=self.config.world, shards=self.config.shards))
        self.send(Following(shard=order.shard, live=self._live))

    def _settle(self) -> Sleeping:
        """Say what this spare holds, once nothing more of what it follows arrives."""
        follower = self.follower
        for _ in range(SETTLE_LOOKS if follower is not None else 0):
            if follower is None or not follower.coming:
                break
            yield LOOK_MS * MS
        self.send(Settled(step=-1 if follower is None else follower.step))

    def _hold(self, shard: int, layout: Layout) -> None:
        """A process gets its shard once, and keeps it for life."""
        if self._shard is None and layout.shards > 1:
            self.state = self.state.of_shard(shard)
        if self._shard not in (None, shard) or layout.shards != self.config.shards:
            raise AssertionError(
                f"{self.process.name} holds shard {self._shard}, and was asked for {shard}"
            )
        self.layout, self._shard = layout, shard

    def _park_lost(self, error: SimGenerationLost) -> None:
        self._park(self.member.why_lost(), error=str(error))

    def _park(
        self, why: Why, *, error: str = "", blamed: Sequence[int] = (), samples: Sequence[int] = ()
    ) -> None:
        if stays_connected(why):
            self._retired, self.group = self.group, None
            self._out()
        else:
            self.leave()
            self.checkpoints.schedules.lost()
        self.write(Kind.PARKED, step=self.state.step, valid=self.member.holding.valid, why=why)
        said = self.member.parked(
            why, step=self.state.step, error=error, blamed=blamed, samples=samples
        )
        self.send(said)

    def leave(self) -> None:
        """Leave the group, if in one."""
        self.disconnect()
        self.group = self._retired = None
        self._out()

    def _out(self) -> None:
        self.member.left()
        self.mark.enter(progress_counters.IDLE)

    def disconnect(self) -> None:
        """Close the connections of the group, as the kernel does for a dead process."""
        for group in (self.group, self._retired):
            if group is not None:
                group.leave(self.rank)
