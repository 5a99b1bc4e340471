"""A live spare of a simulated job: what ranks tell it of each step, and what it makes of that. The
counterpart of ``recovery.spares.feeds`` and ``recovery.spares.follower``: messages instead of
sockets, and what is under way when a feeder dies is lost in one of two cases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.sim.rank.state import Reduced, State, learning_rate
from trainchaos.harness.sim.world.settings import MS
from trainchaos.recovery.spares.standing import pause_steps
from trainchaos.recovery.transport import wire

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank

STEP_SHARE = 1 / 3  # of the time that a copy of the state takes: gradients are a part of it
LOST = 0.5


@dataclass(kw_only=True, eq=False)
class _Fed:
    """A spare that a rank feeds. ``waiting``: steps told and not applied yet; the others as in
    ``recovery.spares.feeds``.
    """

    feeder: SimRank
    spare: SimRank
    waiting: int = 0
    wants_state: bool = False
    differs: bool = False
    due: int = 0
    tries: int = 0

    def later(self, step: int) -> None:
        self.due = step + pause_steps(self.tries)
        self.tries += 1


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a feeder sends. ``lost``: if the feeder is gone when it arrives; ``rank``: its own."""

    fed: _Fed
    kind: Literal["base", "step", "state", "digest", "dropped"]
    step: int = 0
    digest: str = ""
    last: tuple[int, Reduced] | None = None
    state: State | None = None
    lost: bool = False
    rank: int = 0


def digest_of(state: State) -> str:
    """Of all of it that ranks have in common."""
    return state.voted()


def follow(job: SimRank, last: tuple[int, Reduced], feeder: int) -> None:
    """Apply a step that other ranks have applied; what rank ``feeder`` has of its own comes
    with it.
    """
    lr = job.behaviour.learning_rate(job, learning_rate(job.state.scheduler_step, job.config.steps))
    job.state = replace(job.state.applied(last[1], lr), own=last[1].owns[feeder])
    job.member.holding.fresh = False


class SimFeeds:
    """What one rank feeds. ``spare_of``: the simulated process of that name."""

    def __init__(self, job: SimRank, spare_of: Callable[[str], SimRank]) -> None:
        self._job = job
        self._spare_of = spare_of
        self._orders: deque[wire.Feed] = deque()
        self._fed: list[_Fed] = []

    def told(self, order: wire.Feed) -> None:
        """The supervisor wants this rank to feed a spare."""
        self._orders.append(order)

    def joins(self) -> None:
        """This rank is on its way into another generation."""
        self._orders.clear()
        self._fed = []

    def after(self) -> None:
        """A step is applied."""
        for fed in list(self._fed):
            self._tell(fed)
        while self._orders:
            self._begin(self._orders.popleft())

    def check(self, step: int) -> None:
        """Have spares compare their state of ``step`` with this rank's."""
        for fed in self._fed:
            if not fed.wants_state:
                self._send(fed, kind="digest", step=step, digest=digest_of(self._job.state))

    def _begin(self, order: wire.Feed) -> None:
        spare, state = self._spare_of(order.spare), self._job.state
        if any(fed.spare is spare for fed in self._fed):
            return
        fed = _Fed(feeder=self._job, spare=spare)
        self._fed.append(fed)
        digest, last = ("", None) if order.anew else (digest_of(state), self._job.last_applied)
        self._send(fed, kind="base", step=state.step, digest=digest, last=last)

    def _tell(self, fed: _Fed) -> None:
        job, step = self._job, self._job.state.step
        if not fed.spare.process.running:
            job.write(
                Kind.SPARE_DROPPED, step=step, spare=fed.spare.process.name, why="connection lost"
            )
            self._fed.remove(fed)
            return
        if fed.differs:
            fed.differs = False
            self._drop(fed, "its state differs")
        if fed.wants_state:
            if step >= fed.due:
                fed.later(step)
                fed.wants_state = False
                state = job.behaviour.snapshot(job)
                self._send(fed, kind="state", step=step, state=state, share=1.0)
        elif fed.waiting >= job.config.sync_lag:
            self._drop(fed, f"it lags by more than {job.config.sync_lag} steps")
            fed.later(step)
        else:
            fed.waiting += 1
            self._send(fed, kind="step", step=step, last=job.last_applied)

    def _drop(self, fed: _Fed, why: str) -> None:
        job = self._job
        job.write(Kind.SPARE_DROPPED, step=job.state.step, spare=fed.spare.process.name, why=why)
        fed.wants_state = True
        self._send(fed, kind="dropped")

    def _send(self, fed: _Fed, *, share: float = STEP_SHARE, **facts: Any) -> None:
        """``facts``: of a ``Told``."""
        job, follower = self._job, fed.spare.follower
        message = Told(fed=fed, lost=job.process.rng.random() < LOST, rank=job.rank, **facts)
        takes_ns = job.about(share * job.config.timings.transfer_ms * MS)
        if fed.spare.process.deliver(message, takes_ns) and follower is not None:
            follower.coming += 1


class SimFollower:
    """What a spare has followed. ``step``: as in ``recovery.spares.follower.Follower``; ``coming``:
    messages under way.
    """

    def __init__(self, job: SimRank) -> None:
        self._job = job
        self._synced = self._refuses = False
        self._feeder: _Fed | None = None
        self.coming = 0

    @property
    def step(self) -> int:
        """The step whose whole state this process holds; -1: none."""
        return self._job.state.step if self._synced else -1

    def take(self, told: Told) -> None:
        """A feeder said something."""
        self.coming -= 1
        if told.kind == "step":
            told.fed.waiting -= 1
        if told.lost and not told.fed.feeder.process.running:
            return
        if told.kind == "base":
            self._feeder, self._refuses = told.fed, False
        if told.fed is not self._feeder:
            return
        job = self._job
        match told.kind:
            case "state":
                assert told.state is not None
                job.state, job.member.holding.fresh = told.state, False
                self._refuses, self._synced = False, True
                job.write(Kind.SPARE_SYNCED, step=told.step, how="copy", bytes=1, seconds=0.0)
            case "dropped":
                self._refuses, self._synced = True, False
            case _ if self._refuses:
                pass
            case "step":
                self._step(told)
            case "base":
                self._step(told)
                self._compare(told, base=True)
            case "digest" if job.state.step == told.step:
                self._compare(told, base=False)

    def _step(self, told: Told) -> None:
        last = told.last
        if last is not None and last[0] == told.step == self._job.state.step + 1:
            follow(self._job, last, told.rank)

    def _compare(self, told: Told, *, base: bool) -> None:
        job = self._job
        if (job.state.step, digest_of(job.state)) == (told.step, told.digest):
            if base and not self._synced:
                self._synced = True
                job.write(Kind.SPARE_SYNCED, step=told.step, how="equal", bytes=0, seconds=0.0)
            return
        self._synced, self._refuses = False, True
        told.fed.differs = True
