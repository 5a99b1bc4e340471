"""A supervised job as its supervisor knows it: processes, generation, failures, progress and
checkpoints. The parts of the controller share it; what happens next is decided elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.costs import CostMeter, Costs, Tried
from trainchaos.recovery.policy.fallback import CORRUPTIONS
from trainchaos.recovery.policy.rank_assignment import common_step, least_followed
from trainchaos.recovery.policy.strategy import Cause, ClusterView, Failure, Health, Strategy
from trainchaos.recovery.process.host import Hands
from trainchaos.recovery.standby.likely import MOST_RANKS, likely_groups
from trainchaos.recovery.supervise.divergence import DigestBook, Disagreement
from trainchaos.recovery.supervise.failures import NOTHING, ExcludedSamples, FailureBook
from trainchaos.recovery.supervise.formation import Formation
from trainchaos.recovery.supervise.process_table import Process, ProcessTable
from trainchaos.recovery.supervise.progress import AgreementLog, ProgressWatch
from trainchaos.recovery.supervise.supervision import Timing
from trainchaos.recovery.transport.wire import (
    Feed,
    Follow,
    Following,
    Parked,
    Settle,
    Settled,
    Status,
)

KILLED_FOR = (Cause.HANG, Cause.START_TIMEOUT, Cause.UNFIT)
"""A process that fails by one of these causes may still be running."""


class JobState:
    """``world``: ranks asked for; ``shards``: ranks that hold one copy of the model together;
    ``steps``: number after which the job is complete; ``live``: spares follow the job.
    """

    def __init__(
        self,
        hands: Hands,
        timing: Timing,
        *,
        world: int,
        steps: int,
        shards: int,
        store_port: int,
        live: bool = False,
    ) -> None:
        self.hands = hands
        self.timing = timing
        self.world = world
        self.steps = steps
        self.shards = shards
        self._live_parts = live and shards > 1
        self.table = ProcessTable(hands, start_timeout_s=timing.start_timeout_s)
        self.failures = FailureBook(hands, max_attempts=timing.max_attempts)
        self.progress = ProgressWatch(hands, timing.hang, shards=shards)
        self.formation = Formation(
            hands,
            self.table,
            shards=shards,
            store_port=store_port,
            join_timeout_s=timing.join_timeout_s,
        )
        self.excluded = ExcludedSamples(hands, self.failures)
        self.digests = DigestBook()
        self.meter = CostMeter()
        self.agreement = AgreementLog(hands, self.table, self.progress, self.digests)

    @property
    def members(self) -> tuple[str, ...]:
        """Processes of the current generation by rank."""
        return self.table.members

    @property
    def generation(self) -> int:
        """Number of the current generation, 0 before the first."""
        return self.formation.generation

    @property
    def ready_spares(self) -> tuple[str, ...]:
        """Processes waiting outside the generation, oldest first."""
        return tuple(p.name for p in self.table.where(Health.READY))

    def process_of(self, rank: int) -> str | None:
        """The process that holds a rank now, if it is alive."""
        name = self.members[rank] if rank < len(self.members) else ""
        return name if name and self.table[name].health is not Health.DEAD else None

    def exit_was_expected(self, process: str) -> bool:
        """Whether the supervisor asked for this process's end."""
        entry = self.table.get(process)
        return entry is not None and entry.expected_exit

    def error_of(self, process: str) -> str:
        """The reason that a process gave for ending; empty if it gave none."""
        entry = self.table.get(process)
        return entry.error if entry is not None else ""

    def has_place(self, process: Process) -> bool:
        """Whether a process holds a rank, or will hold one in the decided generation."""
        rank = self.table.rank_of(process.name)
        return rank is not None or self.formation.awaits(process.name)

    def parked(self, process: Process, message: Parked) -> bool:
        """A process has left a generation. Returns False where that is not the current one."""
        if message.generation != self.generation or self.table.rank_of(process.name) is None:
            return False
        process.health, process.step, process.valid = Health.PARKED, message.step, message.valid
        process.finished, process.pending = False, message.pending
        self.excluded.note(process.name, message.samples)
        return True

    def noticed(self, process: Process) -> bool:
        """A process will be ended soon. One without a place is released at once. Returns whether it
        has a place.
        """
        process.noticed = True
        return self._announced(process, Cause.NOTICE, "told by SIGTERM that it will be ended soon")

    def warned(self, process: Process, detail: str) -> bool:
        """The place of a process is about to fail. One without a rank is ended at once. Returns
        whether it has one.
        """
        process.warned = True
        return self._announced(process, Cause.WARNING, detail)

    def _announced(self, process: Process, cause: Cause, detail: str) -> bool:
        """The end of a process is announced: one without a place in the job is let go at once."""
        step = self.table.step_of(process)
        self.failures.history.append(self._declare(process, cause, detail, step))
        if self.has_place(process):
            return True
        self.table.fence(process)
        return False

    def failed(
        self, process: Process, cause: Cause, detail: str, measured: Mapping[str, Any] = NOTHING
    ) -> bool:
        """A process has failed; one that may still be running is killed. Returns whether it has a
        place, so that its failure has to be answered.
        """
        step = self.table.step_of(process)
        failure = self._declare(process, cause, detail, step, measured)
        if process.health is not Health.DEAD and cause in KILLED_FOR:
            self.table.kill(process)  # a hung process may take a while to die
        has_place = self.has_place(process)
        (self.failures.current if has_place else self.failures.history).append(failure)
        return has_place

    def blame(self, processes: Sequence[Process], cause: Cause, detail: str, step: int) -> None:
        """Declare failures of processes that keep running: of each of these, or of an unknown
        one.
        """
        blamed: Sequence[Process | None] = processes or [None]
        for process in blamed:
            self.failures.current.append(self._declare(process, cause, detail, step))

    def differ(self, found: Disagreement) -> None:
        """States of replicas differ: each process outside the majority is to blame."""
        odd = [self.table[name] for name in found.odd]
        self.blame(odd, Cause.DIVERGED, found.detail, found.step)

    def refused(self, message: Parked) -> None:
        """A rank has refused values that are not finite. After the last step they are in its
        state.
        """
        late = message.step >= self.steps
        ranks = [rank for rank in message.blamed if rank < len(self.members)]
        blamed = [self.table[self.members[rank]] for rank in ranks]
        if not late:
            detail = "non-finite loss or gradient, refused before the optimizer step"
            self.blame(blamed, Cause.NONFINITE, detail, message.step + 1)
            return
        detail = "non-finite state, refused after the last step"
        failure = self._declare(
            blamed[0], Cause.NONFINITE, detail, message.step, measured={"applied": True}
        )
        self.failures.current.append(replace(failure, applied=True))

    def _declare(
        self,
        process: Process | None,
        cause: Cause,
        detail: str,
        step: int,
        measured: Mapping[str, Any] = NOTHING,
    ) -> Failure:
        return self.failures.declare(
            process,
            cause,
            step=step,
            detail=detail,
            generation=self.generation,
            size=len(self.members),
            measured=measured,
        )

    def why_give_up(self) -> str:
        """Count one more decision. Returns why it cannot be made, or ""."""
        return self.failures.hopeless(
            self.progress.high_water, world=self.world, max_deaths=self.timing.max_deaths
        )

    def form(self, strategy: Strategy) -> None:
        """Order the members of the decided generation to join it."""
        costs = self._costs()
        self.formation.begin(
            tell=self.excluded.send_missing,
            examine=self.excluded.examine,
            word=self.digests.word,
            rewinds=strategy.rewinds(costs),
            save_s=costs.save_s.value,
        )
        self.digests.began(self.generation, self.members, shards=self.shards)

    def trains(self, step: int) -> None:
        """The generation is formed, and trains from this step on."""
        formation = self.formation
        formation.ready(step)
        if formation.rewound and self.failures.current:
            self.meter.rewound()
        if formation.recalled and self.failures.current:
            self.meter.recalled()
        self.failures.answered(formation.answer)
        self.agreement.formed(
            restored=step if formation.afresh else None, checkpoint=formation.restored
        )
        self.progress.resumed(self.generation, self.members, step)
        self.meter.formed(formation.how, self.hands.now_s() - formation.began_s)
        self.meter.trains()

    def feed_spares(self) -> None:
        """Have ranks keep the spares up to date that wait; of those that hold the same part the
        last rank first, as the first has checkpoints to save.
        """
        if self._live_parts:
            self._tell_parts()
        fed: Counter[int] = Counter()
        for spare in self.table.where(Health.READY):
            if not spare.live:
                continue
            shard = spare.shard or 0
            holders = self.members[shard :: self.shards]
            feeder = holders[-1 - fed[shard] % len(holders)]
            fed[shard] += 1
            self.hands.send(
                feeder, Feed(spare=spare.name, address=spare.live, anew=self.formation.refilled)
            )

    def _tell_parts(self) -> None:
        """Tell spares which part of the model to follow, before the job begins already. While the
        world is not full, new ones are left free to take any rank.
        """
        ready = self.table.where(Health.READY)
        waiting = [process for process in ready if not self.formation.awaits(process.name)]
        # one that holds a part and follows nobody takes a lost rank of it all the same
        followed = [process.shard for process in waiting if process.shard is not None]
        begun = bool(self.generation)
        full = len(self.members) == self.world or not begun
        for spare in waiting:
            if full and spare.shard is None and (begun or spare.role == "spare"):
                spare.shard, spare.follows = least_followed(followed, self.shards), True
                followed.append(spare.shard)
                self.hands.record(Kind.SPARE_PLACED, process=spare.name, shard=spare.shard)
                self.hands.send(spare.name, Follow(shard=spare.shard))

    def listens(self, process: Process, status: Status) -> None:
        """Note where a process is fed, unless it has had a rank, or was told of one since."""
        waits = process.health is Health.READY and not status.generation
        process.live = status.live if waits and status.place == "waiting" else ""

    def follows(self, process: Process, message: Following) -> bool:
        """A spare holds the part that it was told to follow. Returns whether it still waits."""
        waits = process.health is Health.READY and process.follows
        waits = waits and message.shard == process.shard
        process.live = message.live if waits else ""
        return waits

    def ask_spares(self) -> None:
        """Have the spares that follow the job say what they hold, where no rank holds a whole state
        and none is known to be wrong.
        """
        waiting = self.table.where(Health.READY)
        for spare in waiting:
            spare.settles = False  # who did not answer the last time is not waited for again
        if not any(spare.live for spare in waiting):
            return  # before the ranks are looked at: a job may have many thousands
        parked = [p for p in self.table.member_processes() if p.health is Health.PARKED]
        wrong = any(failure.cause in CORRUPTIONS for failure in self.failures.current)
        if wrong or common_step([*parked, *waiting], self.shards) is not None:
            return
        for spare in waiting:
            if spare.live:
                spare.settles = True
                self.hands.send(spare.name, Settle())

    @property
    def spares_settle(self) -> bool:
        """Whether one that was asked has still to say it."""
        return any(spare.settles for spare in self.table.where(Health.READY))

    def settled(self, process: Process, message: Settled) -> None:
        """A spare says what it holds: of use, unless a checkpoint is newer."""
        process.settles = False
        newer = message.step > 0 and message.step >= self.digests.newest
        if newer and process.health is Health.READY and process.live:
            process.step, process.valid = message.step, True
            process.shard = process.shard or 0

    def stand_by(self, strategy: Strategy, view: Callable[[], ClusterView]) -> None:
        """Have the groups formed, beside the job's, that the next failure will need. ``view``: of
        the job, which takes a while to make for a large one.
        """
        if len(self.members) <= MOST_RANKS:
            groups, formation = likely_groups(strategy, view()), self.formation
            formation.standby.ask(self.generation, groups, formation.store_port)

    def is_ready(self, process: Process) -> None:
        """A process is built, and waits for orders."""
        process.health = Health.READY
        if process.started_s is not None:
            self.meter.started(self.hands.now_s() - process.started_s)
        self.hands.record(Kind.PROCESS_READY, process=process.name)
        if self._live_parts and not self.generation:
            self._tell_parts()

    def view(
        self,
        *,
        spares: int,
        pause_saves: bool,
        tried: tuple[Tried, ...] = (),
        no_place: bool = False,
    ) -> ClusterView:
        """The job as a strategy sees it. ``spares``: wanted; for the others see ``ClusterView``."""
        return ClusterView(
            now_s=self.hands.now_s(),
            generation=self.generation,
            world=self.world,
            spares=spares,
            members=self.members,
            processes=self.table.views(),
            failures=self.excluded.with_samples(self.failures.current),
            skipped=self.excluded.lately,
            history=tuple(self.failures.history),
            rollbacks=self.formation.rollbacks,
            shards=self.shards,
            saved=self.digests.has_checkpoint,
            saved_step=self.digests.newest,
            pause_saves=pause_saves,
            costs=self._costs(),
            tried=tried,
            no_place=no_place,
        )

    def _costs(self) -> Costs:
        now_s, committed = self.hands.now_s(), self.progress.committed
        return self.meter.costs(now_s=now_s, committed=committed, steps=self.steps)
