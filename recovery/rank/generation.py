"""A rank's part in each generation: it joins, parks with the state it holds, and leaves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.storelink import StoreLink
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.rank.acquire_state import take_state
from trainchaos.recovery.rank.membership import Why, stays_connected
from trainchaos.recovery.rank.recipe import Attached
from trainchaos.recovery.rank.step import JobContext
from trainchaos.recovery.standby.aside import AsideGroup
from trainchaos.recovery.standby.groups import CONNECT_LIMIT_S, StandbyGroups
from trainchaos.recovery.state.fingerprint import sampled_digest
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.versions import versions
from trainchaos.recovery.transport.wire import (
    Finished,
    Follow,
    Following,
    Join,
    Joined,
    Ready,
    Settle,
    Settled,
    StandBy,
)

CHANGED_LATE = (
    "has changed a large tensor that no step had changed before, so that there is no copy of it:"
    " this rank takes the state of another, or of a checkpoint"
)


class Generations:
    """Joins and leaves the process groups that the rank trains in; a former one may be connected
    still. Used by the training thread.
    """

    def __init__(self, job: JobContext, attached: Attached) -> None:
        self._job = job
        self._attached = attached
        self._link = StoreLink()
        self._retired: Group | None = None
        self._standby = StandbyGroups(self._aside, job.agent.channel.send)
        if job.config.backend == "gloo":
            job.agent.on_stand_by = self._standby.ask

    def obey(self, order: Join | Follow | Settle) -> None:
        """Join a generation, or as a spare take a place, or say what is held."""
        if isinstance(order, Follow):
            self._follow(order)
        elif isinstance(order, Settle):
            live = self._job.live
            step = -1 if live is None else live.settled(self._job.check)
            self._job.agent.channel.send(Settled(step=step))
        else:
            self._join(order)

    def _follow(self, order: Follow) -> None:
        """Hold the part that this spare is to follow, as a rank of the first replica would, and say
        where it is fed. Raises RuntimeError where that cannot be.
        """
        job = self._job
        if job.live is None:
            return
        job.layout = Layout(world=job.config.world, shards=job.config.shards)
        before = job.rank, job.world
        job.rank, job.world = order.shard, job.config.world  # the script's cut may ask for them
        try:
            self._take_part(order.shard)
        finally:
            job.rank, job.world = before
        job.live.waits()
        job.agent.channel.send(Following(shard=order.shard, live=job.live.address))

    def _take_part(self, rank: int) -> None:
        """Hold the part of the model that this rank does, if it is not held yet. Raises
        RuntimeError where that cannot be.
        """
        job = self._job
        if self._attached.take_part(rank, job.layout) and job.live is not None:
            job.live.feeds.prepare(job.reducer)

    def _join(self, order: Join) -> None:
        """Join a generation once its ranks are connected and this one has its state; parks if the
        generation is lost meanwhile. Raises RuntimeError where this process cannot hold its part of
        the model, NothingToRestore, Fenced.
        """
        job = self._job
        self.leave()
        job.member.joins(order)
        if job.live is not None:
            job.live.joins(settles=order.state.live >= 0, receives=order.state.receives)
            job.member.holding.valid |= job.live.brings
        job.rank, job.world = order.rank, order.world
        job.layout = Layout(world=job.world, shards=order.shards)
        self._take_part(job.rank)
        job.writer.generation = order.generation
        job.examine = order.resume.examine
        job.marks.begin(order.generation, job.state.step)
        job.marks.collective(0)
        job.marks.enter(progress_counters.JOINING)
        job.pausing = False
        ready = self._standby.take(order.standby)
        group = job.group = ready or self._group_of(order)
        job.agent.entering(group)
        job.checkpoints.joined(job.rank, job.layout, order.generation)
        if order.resume.rewinds is not None:
            job.checkpoints.told(order.resume.rewinds)
        job.checkpoints.distrust(order.resume.doubts, deletes=job.rank == 0)
        try:
            if ready is not None:
                ready.adopt(order.generation, job.check)
            elif order.standby:  # the others have it, and must not wait for this one
                raise GenerationLost(f"no group stands by here as {order.standby}")
            checkpoint = self._enter(order, group)
        except GenerationLost as error:
            self.park(job.member.why_lost(), error=str(error))
            return
        job.member.begins(job.state.step)
        job.checkpoints.began(job.state.step)
        job.reducer.new_generation(group)
        if self._attached.groups is not None:
            self._attached.groups.join(group)
        job.marks.commit(job.state.step)
        tell_joined(job, checkpoint)
        job.member.joined()

    def _group_of(self, order: Join) -> Group:
        """The group of a generation, not connected yet."""
        timeout_s = max(self._job.config.form_timeout_s, 2 * order.timeout_s)
        return Group(**self._words(order, timeout_s), check=self._job.check, link=self._link)

    def _aside(self, order: StandBy, *, check: Callable[[], None], link: StoreLink) -> AsideGroup:
        """A group that may be that of the next generation, not connected yet."""
        words = self._words(order, CONNECT_LIMIT_S)
        return AsideGroup(**words, group=order.group, check=check, link=link)

    def _words(self, order: Join | StandBy, timeout_s: float) -> dict[str, Any]:
        job, config = self._job, self._job.config
        return {
            "generation": order.generation,
            "rank": order.rank,
            "world": order.world,
            "store_port": order.store_port,
            "backend": config.backend,
            "timeout_s": timeout_s,
            "collective_timeout_s": config.collective_timeout_s,
            "device": config.device,
            "mesh": config.arranged,
            "dial": job.dial,
            "name": config.process,
            "net": config.net,
        }

    def _enter(self, order: Join, group: Group) -> str | None:
        """Connect to the other ranks and get the state; returns the checkpoint that this rank
        restored.
        """
        job = self._job
        job.check()
        started = time.perf_counter()
        group.form()
        seconds = round(time.perf_counter() - started, 6)
        how = {"standby": True} if isinstance(group, AsideGroup) else {}
        job.write(Kind.GROUP_FORMED, rank=job.rank, world=job.world, seconds=seconds, **how)
        checkpoint = take_state(job, order, group)
        # a checkpoint may be older than a decision
        job.state.skip.add(job.member.left_out(order))
        job.check()
        return checkpoint

    def park(
        self, why: Why, *, error: str = "", blamed: Sequence[int] = (), samples: Sequence[int] = ()
    ) -> None:
        """Stop training in this generation, and report the reason and the state held here to the
        supervisor. ``error``: what broke the group; ``blamed``, ``samples``: ranks and samples
        whose values were not finite.
        """
        job, held, stays = self._job, self._job.member.holding, stays_connected(why)
        if job.progress.inside:
            left = job.reducer.broken_off() and not stays
            held.pending = job.progress.unfinished(job.state.step) if left else 0
        if not job.state.attempt.whole():
            print(f"step {job.state.step + 1} {CHANGED_LATE}", file=sys.stderr, flush=True)
            held.gives_up()
        if stays:
            self._retired, job.group = job.group, None
            self._out()
        else:
            self.leave()
        if job.live is not None:
            job.live.feeds.leaves()  # a spare that is promoted waits for what is under way
        job.checkpoints.parked(lost=not stays)
        job.write(Kind.PARKED, step=job.state.step, valid=held.valid, why=why)
        said = job.member.parked(
            why, step=job.state.step, error=error, blamed=blamed, samples=samples
        )
        job.agent.channel.send(said)

    def finish(self, finished: Finished, last_work: Callable[[], object] | None) -> None:
        """Report the end, once rank 0 has done the ``last_work``, or refuse to end the job with a
        bad state: no step follows whose loss or gradient would show it.
        """
        job, bad = self._job, self._job.state.not_finite()
        job.marks.enter(progress_counters.IDLE)
        if bad is None:
            if job.rank == 0 and last_work is not None:
                with job.busy("the end"):
                    last_work()
            job.agent.channel.send(finished)
            return
        text = f"after the last step {bad} is not finite: the state is refused"
        print(text, file=sys.stderr, flush=True)
        job.caught(job.state.step, [job.rank], "state")
        self.park("nonfinite", blamed=[job.rank])

    def end(self) -> None:
        """Leave the job."""
        job = self._job
        self.leave()
        self._standby.close()
        if self._attached.groups is not None:
            self._attached.groups.end()
        if job.live is not None:
            job.live.close()
        job.checkpoints.close()
        job.reducer.let_go()

    def leave(self) -> None:
        """Leave the generation and close the connections to all other ranks."""
        for group in (self._job.group, self._retired):
            if group is not None:
                group.leave()
        self._job.group = self._retired = None
        self._out()

    def _out(self) -> None:
        if self._attached.groups is not None:
            self._attached.groups.leave()
        self._job.member.left()
        self._job.agent.left()
        self._job.marks.enter(progress_counters.IDLE)


def starting_digest(job: JobContext) -> str:
    """Digest of this rank's state at the start of a generation, 16 hexadecimal digits; empty where
    no other rank holds the same state. Covers everything that is not a tensor, and some values of
    each tensor of at most SAMPLED parameters: two different states differ nearly everywhere, and
    reading each byte would delay the start.
    """
    return "" if job.layout.replicas == 1 else sampled_digest(job.state)


def tell_joined(job: JobContext, checkpoint: str | None) -> None:
    """Report to the supervisor that this rank is in the generation, and what it holds.
    ``checkpoint``: the one it restored.
    """
    step, digest = job.state.step, starting_digest(job)
    # The supervisor compares the step as well, and nothing is applied where it differs.
    job.reducer.starts_with(xxhash.xxh3_64_hexdigest(f"{step}/{digest}".encode()) if digest else "")
    message = Joined(generation=job.generation, step=step, checkpoint=checkpoint, digest=digest)
    job.agent.channel.send(message)


def announce(job: JobContext) -> None:
    """Tell the supervisor that this process is built."""
    config = job.config
    mine = versions(
        torch=torch.__version__, backend=config.backend, dtype=str(torch.get_default_dtype())
    )
    facts = config.model_dump(include={"steps", "samples", "global_batch", "seed"})
    job.agent.channel.send(Ready(**facts, versions=mine, live=job.fed_at))
