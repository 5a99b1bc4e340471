"""How a simulated rank gets its state when it joins a generation: it keeps, restores or copies it.
The counterpart of ``recovery.rank.acquire_state``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.sim.rank.faults import TrainingError
from trainchaos.harness.sim.rank.live import follow
from trainchaos.harness.sim.rank.state import State
from trainchaos.harness.sim.world.group import Group
from trainchaos.harness.sim.world.settings import MS
from trainchaos.recovery.spares.standing import Standing, in_want, number_of, one_behind
from trainchaos.recovery.transport.wire import Join

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank

Sleeping = Generator[float | None, Any, None]
LOOK_MS = 1.0
SETTLE_LOOKS = 250


class StateAcquisition:
    """State acquisition of one join. ``group``: already formed."""

    def __init__(self, job: SimRank, group: Group, order: Join) -> None:
        self._job = job
        self._group = group
        self._order, self._anew = order.state, order.resume.anew

    def run(self) -> Generator[float | None, Any, str | None]:
        """Acquire the state; returns the checkpoint that it comes from, if any. Raises
        SimGenerationLost, TrainingError.
        """
        job = self._job
        if self._order.finish:
            yield from self._finish()
        if job.attempt is not None and job.attempt.open:
            job.attempt.open = False
            job.state = replace(job.state, own=job.behaviour.put_back(job, job.attempt.own))
        return (yield from self._take())

    def _finish(self) -> Sleeping:
        """A rank that has applied the step sends its outcome to all others; those that lack only
        that apply the step too.
        """
        job, finish = self._job, self._order.finish
        mine = (
            job.last_applied
            if job.last_applied and job.last_applied[0] == finish == job.state.step
            else None
        )
        self._group.meet(job.rank, mine, lambda parts: next(filter(None, parts.values()), None), 0)
        outcome = yield None
        job.check()
        if outcome is None:
            raise AssertionError(f"no rank knows the outcome of step {finish}")
        if job.member.holding.pending == finish and job.state.step == finish - 1:
            assert job.attempt is not None and job.attempt.number == finish
            # the ranks that send it have already parked and saved for it
            done = replace(outcome[1], pause=False, save=False, save_memory=False)
            job.attempt.commit(done)
        job.last_applied = outcome

    def _take(self) -> Generator[float | None, Any, str | None]:
        job, order = self._job, self._order
        started, held = job.process.clock.now_ns, job.member.holding
        name: str | None = None
        origin = "live" if job.brings else "kept" if job.state.step else "initial"
        if order.restore and job.layout.replica_of(job.rank) == 0:
            held.restores()
            name = yield from self._restore()
            origin = "checkpoint" if name else "initial"
            held.restored(found=name is not None)
        kept = job.state.own if held.retries and not order.restore else None
        step = job.state.step
        if order.restore and (job.rank == 0 or job.layout.shards > 1):
            job.checkpoints.restored()
        extra: dict[str, Any] = {}
        if order.live >= 0:
            origin = yield from self._complete(origin)
            extra = {"bytes": int(origin == "peer")} if order.receives else {}
        else:
            if order.receives:
                held.receives()
                origin = "peer"
            if order.source >= 0:
                yield from self._copy(receives=order.receives)
        if order.restore:
            job.state = replace(job.state, own=job.behaviour.restored_own(job))
            extra |= {"own": True} if origin == "peer" else {}
        elif kept is not None and order.receives and job.state.step == step:
            job.state = replace(job.state, own=kept)
            extra["own"] = True
        held.valid = True
        job.write(
            Kind.STATE_READY,
            step=job.state.step,
            rank=job.rank,
            origin=origin,
            source=order.source if order.receives else name,
            seconds=round((job.process.clock.now_ns - started) / 1e9, 6),
            **extra,
        )
        return name

    def _complete(self, origin: str) -> Generator[float | None, Any, str]:
        """As ``recovery.rank.acquire_state.wanting``; returns where the state comes from."""
        job, order, follower = self._job, self._order, self._job.follower
        claims = job.member.holding.valid
        if follower is not None:
            for _ in range(SETTLE_LOOKS):
                if not follower.coming or not -1 < follower.step < order.live:
                    break
                yield LOOK_MS * MS
                job.check()
            claims = follower.step >= 0 if order.receives else claims
            job.follower = None
        if order.source < 0:  # nobody who holds the same part receives
            return origin
        standings, last = yield from self._compared(claims=claims)
        late = one_behind(standings, order.source)
        if late:
            if job.rank in late:
                job.member.holding.receives()
                follow(job, last, order.source)
                job.last_applied = last
            standings, _ = yield from self._compared(claims=claims)
        copies = in_want(standings, order.source)
        if job.rank in copies:
            job.member.holding.receives()
        if copies:
            yield from self._copy(receives=job.rank in copies)
        if not order.receives:
            return origin
        return "peer" if job.rank in copies else "live"

    def _compared(
        self, *, claims: bool
    ) -> Generator[float | None, Any, tuple[dict[int, Standing], Any]]:
        """What each rank brings, and the last step of the one that sends its state."""
        job, order, last = self._job, self._order, self._job.last_applied
        mine = Standing(
            receives=order.receives,
            step=job.state.step if claims else -1,
            digest=number_of(job.behaviour.held(job)),
            retained=last[0] if last is not None and last[0] == job.state.step else -1,
        )
        job.check()
        takes_ns = job.config.timings.phase_ns("collective") / 4
        holders = job.layout.holders(job.layout.shard_of(job.rank))
        self._group.meet(job.rank, (mine, last), dict, takes_ns, among=holders)
        rows = yield None
        job.check()
        return {rank: row[0] for rank, row in rows.items()}, rows[order.source][1]

    def _copy(self, *, receives: bool) -> Sleeping:
        """A broadcast among the holders of a shard, or a copy from one of them; until it is
        complete, a receiver has no valid state.
        """
        job, order = self._job, self._order
        shard = job.layout.shard_of(job.rank)
        sent = job.behaviour.snapshot(job) if job.rank == order.source else None
        if receives:
            job.state = job.state.torn()
            # of a step whose outcome may differ on other ranks
            job.last_applied = job.last_applied if order.finish else None
        transfer_ns = job.about(job.config.timings.transfer_ms * MS)
        job.check()
        circles: list[Sequence[int]] = [job.layout.holders(shard)]
        if order.direct:
            circles = [(job.rank, other) for other in order.feeds or [order.source]]
        received: dict[int, State] = {}
        for among in circles:
            self._group.meet(job.rank, sent, dict, transfer_ns, among=among)
            received = yield None
            job.mark.touch()
        if receives:
            job.state = received[order.source]

    def _restore(self) -> Generator[float | None, Any, str | None]:
        """Load the newest good checkpoint, the same on all ranks of a replica. Without one,
        training starts anew, as in new processes.
        """
        job = self._job
        found = job.last_applied = None
        if job.rank == 0:
            yield job.about(job.config.timings.checkpoint_ms * MS)
            newest = job.checkpoints.newest()
            if newest is not None:
                data = (newest[0].path / "state.bin").read_bytes()
                found = newest[0].name, data, newest[1]["scalars"]
            if job.memory is not None:
                found = job.memory.restored(newest[0].step if newest else 0) or found
        if job.layout.shards > 1:
            job.check()
            self._group.meet(job.rank, found, dict, 0, among=job.replica)
            found = (yield None)[0]
            job.check()
        if found is None:
            try:
                job.checkpoints.require(anew=self._anew)
            except RuntimeError as error:
                raise TrainingError(error) from error
            return None
        name, data, scalars = found
        job.state = State.restored(data, scalars, job.layout.shard_of(job.rank))
        return name
