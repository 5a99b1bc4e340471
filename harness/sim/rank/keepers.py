"""Simulated keepers of in-memory checkpoints: they outlive ranks, but not their own node."""

from __future__ import annotations

import itertools
import signal as signals
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.sim.rank.state import State
from trainchaos.harness.sim.world.clock import NS_PER_S, Clock
from trainchaos.harness.sim.world.settings import MS
from trainchaos.recovery.checkpoint.memory.header import Key, Moment, complete, name_of, shards_at
from trainchaos.recovery.checkpoint.memory.keepers import HUNG_S, KeeperStarted
from trainchaos.recovery.policy.doubts import Doubt, in_doubt, together
from trainchaos.recovery.process.host import Exited

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank

FIRST_PID = 50
KEPT = 2  # complete checkpoints, as recovery.checkpoint.memory.keeper_store keeps
COPY_MS = 0.3  # training waits
KEEP_MS = 4.0  # checksums, and the copy on another node
END_MS = 3.0
WAIT_MS = 50.0
PLACE = "memory"

Copies = tuple[int, ...]


@dataclass(kw_only=True)
class _Keeper:
    process: str
    pid: int
    node: int
    held: dict[Key, State] = field(default_factory=dict)
    stopped: bool = False
    stops: int = 0


class SimKeepers:
    """Implements ``harness.launch.launcher.KeeperControl``. ``replicate``: the next node keeps a
    copy.
    """

    def __init__(self, clock: Clock, *, nodes: int, replicate: bool) -> None:
        self._clock = clock
        self._nodes = nodes
        self._replicate = replicate and nodes > 1
        self._numbers = itertools.count()
        self._keepers: dict[int, _Keeper] = {}
        self._gone: dict[str, _Keeper] = {}
        self._hung: set[str] = set()
        self._news: list[KeeperStarted | Exited] = []
        self._doubts: tuple[Doubt, ...] = ()
        for node in range(nodes):
            self._start(node)

    # ---- the supervisor's side

    def look(self) -> list[KeeperStarted | Exited]:
        """Starts and exits since the last look."""
        news, self._news = self._news, []
        return news

    def keeper_of(self, node: int) -> str:
        """Name of the node's current keeper."""
        return self._keepers[node].process

    def signal(self, process: str, signum: int) -> None:
        """SIGKILL, SIGSTOP or SIGCONT; other signals are ignored."""
        keeper = self._named(process)
        if keeper is None or process in self._gone:
            return
        if signum in (signals.SIGSTOP, signals.SIGCONT):
            keeper.stopped = signum == signals.SIGSTOP
            keeper.stops += keeper.stopped
            stop = keeper.stops
            if keeper.stopped:
                self._clock.after(round(HUNG_S * NS_PER_S), lambda: self._hangs(keeper, stop))
        if signum == signals.SIGKILL:
            self._kill(keeper)

    def hung_s(self, process: str) -> float | None:
        """Seconds without an answer, of a keeper that was ended for that."""
        return HUNG_S if process in self._hung else None

    def _hangs(self, keeper: _Keeper, stop: int) -> None:
        """Replace a keeper that has been stopped ever since."""
        if keeper.stopped and keeper.stops == stop and keeper.process not in self._gone:
            self._hung.add(keeper.process)
            self._kill(keeper)

    def _kill(self, keeper: _Keeper) -> None:
        self._gone[keeper.process] = keeper
        keeper.held.clear()
        self._clock.after(END_MS * MS, lambda: self._ended(keeper, follows=True))

    def os_state(self, process: str) -> str:
        """S, T or X."""
        keeper = self._named(process)
        if keeper is None or process in self._gone:
            return "X"
        return "T" if keeper.stopped else "S"

    def _named(self, process: str) -> _Keeper | None:
        return next((k for k in self._keepers.values() if k.process == process), None)

    def end(self) -> list[Exited]:
        """Kill all keepers."""
        for keeper in self._keepers.values():
            self._ended(keeper, follows=False)
        return [news for news in self.look() if isinstance(news, Exited)]

    def _start(self, node: int) -> None:
        number = next(self._numbers)
        keeper = self._keepers[node] = _Keeper(
            process=f"k{number}", pid=FIRST_PID + number, node=node
        )
        self._news.append(KeeperStarted(process=keeper.process, pid=keeper.pid, node=node))

    def _ended(self, keeper: _Keeper, *, follows: bool) -> None:
        now = self._clock.now_ns
        self._news.append(Exited(process=keeper.process, exit_code=None, signal=9, time_ns=now))
        if follows:
            self._start(keeper.node)

    # ---- the ranks' side

    def answers(self, node: int) -> bool:
        """Whether the node's own keeper does."""
        keeper = self._keepers[node]
        return not keeper.stopped and keeper.process not in self._gone

    def take(self, node: int, key: Key, state: State) -> Copies | None:
        """Keep a part, and a copy on the next node; returns the nodes with a copy. None: the part
        was to be forgotten and came too late.
        """
        if in_doubt(self._doubts, generation=key.generation, step=key.step):
            return None
        other = (node + 1) % self._nodes
        copies = (other,) if self._replicate and not self._keepers[other].stopped else ()
        for holder in (node, *copies):
            self._keepers[holder].held[key] = state
        whole = complete(self._keys())
        for keeper in self._keepers.values() if len(whole) > KEPT else ():
            keeper.held = {
                key: value for key, value in keeper.held.items() if key.moment >= whole[-KEPT]
            }
        return copies

    def newest(self) -> Moment | None:
        """The newest complete checkpoint that running keepers hold."""
        whole = complete([key for keeper in self._answering() for key in keeper.held])
        return whole[-1] if whole else None

    def states(self, moment: Moment) -> list[State]:
        """The states of all its shards, in order."""
        shards = shards_at(self._keys(), moment)
        held = {
            key.shard: state
            for k in self._answering()
            for key, state in k.held.items()
            if key.moment == moment
        }
        return [held[shard] for shard in range(shards)]

    def forget(self, step: int, before: int) -> list[int]:
        """Drop what generations ``before`` this one saved after ``step``, and refuse more of it;
        returns the dropped steps. A stopped keeper does so before it answers anything else.
        """
        self._doubts = together([*self._doubts, (before, step)])
        gone = {key for key in self._keys() if key.step > step and key.generation < before}
        for keeper in self._keepers.values():
            keeper.held = {key: state for key, state in keeper.held.items() if key not in gone}
        return sorted({key.step for key in gone})

    def _answering(self) -> list[_Keeper]:
        return [keeper for keeper in self._keepers.values() if not keeper.stopped]

    def _keys(self) -> list[Key]:
        return [key for keeper in self._keepers.values() for key in keeper.held]


class SimMemoryCheckpointer:
    """One rank's in-memory checkpoints, as in ``recovery.checkpoint.memory_checkpointer``."""

    def __init__(self, keepers: SimKeepers, node: int, job: SimRank) -> None:
        self._keepers = keepers
        self._node = node
        self._job = job
        self._done: list[Callable[[], None]] = []
        self._pending: Key | None = None

    def after_commit(self, number: int, *, asked: bool) -> Generator[float | None, Any, None]:
        """Save if ``asked`` for, and report the results of earlier saves. A save waits for the one
        before.
        """
        job = self._job
        for tell in self._done:
            tell()
        self._done = []
        if not asked or job.layout.replica_of(job.rank):
            return
        since = job.process.clock.now_ns
        shard, shards = job.layout.shard_of(job.rank), job.layout.shards
        part = {"checkpoint": name_of(number), "place": PLACE, "shard": shard, "shards": shards}
        job.write(Kind.CHECKPOINT_SAVING, step=number, **part)
        while self._pending is not None:
            yield WAIT_MS * MS
            job.mark.touch()
            job.check()
        key = Key(generation=job.generation, step=number, shard=shard, shards=shards)
        state, began = job.state, job.process.clock.now_ns
        yield job.about(COPY_MS * MS)
        if (timetable := job.checkpoints.schedules.memory) is not None:
            took = job.process.clock.now_ns - since
            timetable.saved(since / NS_PER_S, took / NS_PER_S)
        self._pending = key
        job.process.clock.after(
            job.about(KEEP_MS * MS), lambda: self._keep(key, state, began, part)
        )

    def restored(self, newer_than: int) -> tuple[str, bytes, dict[str, Any]] | None:
        """Name, data and scalars of the newest checkpoint, as for those on disk; None if the disk
        has a newer one.
        """
        moment = self._keepers.newest()
        if moment is None or moment[1] < newer_than:
            return None
        states = self._keepers.states(moment)
        return name_of(moment[1]), b"".join(state.data() for state in states), states[0].scalars()

    def distrust(self, step: int, before: int) -> None:
        """Make the keepers drop doubtful checkpoints."""
        for gone in self._keepers.forget(step, before):
            self._job.write(
                Kind.CHECKPOINT_DELETED, step=gone, checkpoint=name_of(gone), place=PLACE
            )

    def _keep(self, key: Key, state: State, began: int, part: dict[str, Any]) -> None:
        job = self._job
        if job.process.state in ("X", "Z"):
            return  # killed before its keeper had it
        if not self._keepers.answers(self._node):
            job.process.clock.after(WAIT_MS * MS, lambda: self._keep(key, state, began, part))
            return
        self._pending = None
        if not state.finite:
            error = "RuntimeError: the state is not finite, so it is not saved"
            self._done.append(lambda: self._tell(key, Kind.CHECKPOINT_FAILED, error=error, **part))
            return
        copies = self._keepers.take(self._node, key, state)
        if copies is None:
            error = "what this checkpoint holds is in doubt"
            self._done.append(lambda: self._tell(key, Kind.CHECKPOINT_FAILED, error=error, **part))
            return
        seconds = round((job.process.clock.now_ns - began) / NS_PER_S, 6)
        data = {"bytes": len(state.data()), "seconds": seconds, "copies": list(copies), **part}
        self._done.append(lambda: self._tell(key, Kind.CHECKPOINT_COMMITTED, **data))

    def _tell(self, key: Key, kind: Kind, **data: Any) -> None:
        """Report nothing for a generation that is over."""
        if key.generation == self._job.generation:
            self._job.write(kind, step=key.step, **data)
