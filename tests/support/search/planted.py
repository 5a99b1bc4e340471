"""Defects to be found by ``chaos fuzz``: each one line of the stack gone wrong, in code that ships
where that can be.

A defect replaces functions (``patches``: holder, name, and the wrong one made of the right one),
the behaviour of a simulated rank, or a strategy. ``strategy``: under which it is searched for;
``runs``: within how many scenarios it has to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from msgspec import structs

from tests.support.search import defects
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.harness.fuzz.draw.draw import Tree, World
from trainchaos.harness.fuzz.draw.stories import STORIES, Story
from trainchaos.harness.fuzz.play.oracle import find_in
from trainchaos.harness.fuzz.play.play import SimPlayer, kinds, strategies
from trainchaos.harness.fuzz.schedules import Schedules
from trainchaos.harness.fuzz.search import Search
from trainchaos.harness.run import orchestrator
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.rank.keepers import SimMemoryCheckpointer
from trainchaos.harness.sim.rank.rank import SimRank
from trainchaos.harness.sim.rank.state import Own, State
from trainchaos.harness.sim.rank.step import Attempt
from trainchaos.recovery.checkpoint.files import checkpoints, retention, saving
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint
from trainchaos.recovery.checkpoint.files.custody import CheckpointChooser, Custody
from trainchaos.recovery.checkpoint.files.retention import Agreement
from trainchaos.recovery.detection.hangs import HangDetector
from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.rank_assignment import CopyPlan
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import ClusterView, Decision, Form, Health, Strategy
from trainchaos.recovery.rank.membership import Membership
from trainchaos.recovery.supervise import divergence
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.supervise.divergence import DigestBook
from trainchaos.recovery.supervise.failures import ExcludedSamples, FailureBook
from trainchaos.recovery.supervise.formation import Formation
from trainchaos.recovery.supervise.process_table import ProcessTable
from trainchaos.recovery.supervise.recovery_cycle import RecoveryCycle, ReplacementDelay
from trainchaos.recovery.supervise.supervision import Stage

Wrong = Callable[..., Any]
Patch = tuple[Any, str, Callable[[Wrong], Any]]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """See the module."""

    strategy: str
    patches: Sequence[Patch] = ()
    behaviour: Callable[[], Behaviour] = Behaviour
    instead: type[Strategy] | None = None
    runs: int = 300

    @contextmanager
    def planted(self) -> Iterator[None]:
        """With the defect."""
        with ExitStack() as stack:
            for holder, name, wrong in self.patches:
                stack.enter_context(patch.object(holder, name, wrong(getattr(holder, name))))
            yield


def sought(
    planted: Planted, *, seed: str, runs: int | None = None, stories: Sequence[Story] = STORIES
) -> Search[Tree]:
    """A search that ends with the first find that is this defect's, which it leaves as it is, or
    after ``runs`` scenarios. What the same scenario shows without the defect is no find.
    ``stories``: those that it tells.
    """
    catalogue = build_catalogue()
    world = World(kinds=kinds(), strategies=strategies(), strategy=planted.strategy)
    good = SimPlayer(catalogue=catalogue)
    player = SimPlayer(catalogue=catalogue, behaviour=planted.behaviour, strategy=planted.instead)  # type: ignore[arg-type]
    search = Search(Schedules(world, player, seed, stories=stories), until_s=0.0)
    while search.runs < (runs or planted.runs):
        with planted.planted():
            found = search.step()
        if found is not None:
            if find_in(found.first, good.play(found.first)) is None:
                break
            del search.finds[found.find.key]
    return search


def never(value: Any = None) -> Callable[[Wrong], Wrong]:
    """Does nothing, and returns this."""
    return lambda right: lambda *args, **named: value


# ---- wrong functions


def _shorter_share(right: Wrong) -> Wrong:
    """In a smaller world the last rank leaves out the last sample of its share."""

    def share(self: Attempt) -> Any:
        found, job = right(self), self._job
        if job.world < job.config.world and job.rank == job.world - 1 and found[-1].count > 1:
            found[-1] = replace(found[-1], count=found[-1].count - 1)
        return found

    return share


def _from_another_part(right: Wrong) -> Wrong:
    def spread(self: CopyPlan) -> CopyPlan:
        plan = right(self)
        shards = plan.layout.shards
        copies = {
            rank: giver - giver % shards + (giver + 1) % shards
            for rank, giver in plan.copies.items()
        }
        return replace(plan, copies=copies) if plan.direct else plan

    return spread


def _twice_promoted(right: Wrong) -> Wrong:
    """The first fresh process is given to every gap."""

    def seat(
        view: ClusterView, people: Any, fresh: Sequence[str], *, replicas: int
    ) -> tuple[str, ...]:
        return right(view, people, [fresh[0]] * len(fresh) if fresh else fresh, replicas=replicas)

    return seat


def _deaf_to_the_last(right: Wrong) -> Wrong:
    """Whoever parks last is noted down, and nobody looks whether all have."""

    def parked(self: RecoveryCycle, entry: Any, message: Any) -> None:
        if self.stage is Stage.STOPPING and len(self._job.table.training()) == 1:
            entry.health, entry.step, entry.valid = Health.PARKED, message.step, message.valid
            return
        right(self, entry, message)

    return parked


def _abort_forgets(right: Wrong) -> Wrong:
    """The last member is not told of an abort."""

    def abort(self: ProcessTable, generation: int) -> None:
        whole = ProcessTable.training
        with patch.object(ProcessTable, "training", lambda table: whole(table)[:-1]):
            right(self, generation)

    return abort


def _blind_to_the_optimizer(right: Wrong) -> Wrong:
    """The digest says nothing of the optimizer."""
    return lambda self: {**right(self), "optimizer": "0" * 16}


def _agrees_with_itself(right: Wrong) -> Wrong:
    """Digests are compared over all ranks, whatever shard they hold."""
    return lambda members, digests, *, shards: right(members, digests, shards=1)


def _newest_only(right: Wrong) -> Wrong:
    """The checkpoint that the replicas agreed on is not kept."""

    def prune(directory: Any, keep: int, *, agreed: Agreement | None = None, **more: Any) -> Any:
        return right(directory, keep, agreed=None, **more)

    return prune


def _keeps_none(right: Wrong) -> Wrong:
    """All but the newest go, whether it is good or not."""

    def prune(directory: Any, keep: int, *, recorded: Any = (), **more: Any) -> Any:
        with patch.object(retention, "_is_good", lambda *args: True):
            return right(directory, 1, **{**more, "agreed": None})

    return prune


def _blames_who_waits(right: Wrong) -> Wrong:
    """Of a hang another process is named than the one that hangs."""

    def look(self: HangDetector, now_s: float, marks: Any, *args: Any, **named: Any) -> Any:
        found = right(self, now_s, marks, *args, **named)
        others = sorted(name for name in marks if found is not None and name != found.process)
        return (
            replace(found, process=others[0])
            if found is not None and found.process and others
            else found
        )

    return look


def _forgets_the_past(**forgotten: Any) -> Callable[[Wrong], Wrong]:
    """Whoever takes over reads less in the log than it says."""
    return lambda right: lambda events, asked=(): replace(right(events, asked), **forgotten)


def _ignores_torn(right: Wrong) -> Wrong:
    """A state that was being overwritten is taken for whole."""
    return lambda self, entry, message: right(self, entry, structs.replace(message, valid=True))


def _pauses_again(right: Wrong) -> Wrong:
    """Whoever was asked for a pause asks for it in the next generation too."""

    def joins(self: Membership, order: Any) -> None:
        wanted = self.heard.pause_wanted
        right(self, order)
        self.heard.pause_wanted = wanted

    return joins


def _older_memory(right: Wrong) -> Wrong:
    """Of the checkpoints in memory the one before the newest is taken, under the newest
    one's name.
    """

    def restored(self: SimMemoryCheckpointer, newer_than: int) -> Any:
        found = right(self, newer_than)
        if found is None:
            return None
        name, data, scalars = found
        return name, data, {**scalars, "optimizer_step": scalars["optimizer_step"] - 1}

    return restored


def _exclusions_not_sent(right: Wrong) -> Wrong:
    """A process that was not a member when a sample was left out is never told of it."""

    def send_missing(self: ExcludedSamples, process: Any) -> int:
        return right(self, process) if process.rank is not None else len(self._order)

    return send_missing


def _exits_unheard(right: Wrong) -> Wrong:
    """Who exits while a group forms is not missed."""

    def on_exit(self: Controller, process: str, how: str) -> None:
        if self.stage is not Stage.FORMING:
            right(self, process, how)

    return on_exit


def _stays_in_doubt(right: Wrong) -> Wrong:
    """What may hold a corrupted state is restored all the same."""
    return lambda self, checkpoint: False


def _same_generation(right: Wrong) -> Wrong:
    """The second generation after a failure has the number of the first."""

    def begin(self: Formation, **named: Any) -> None:
        if self.generation == 2:
            self.generation = 1
        right(self, **named)

    return begin


def _skips_from_later(right: Wrong) -> Wrong:
    """Samples are left out one step later than is said."""

    def take(self: ExcludedSamples, form: Form) -> None:
        right(self, form)
        self._since = {sample: since + 1 for sample, since in self._since.items()}

    return take


def _unverified(right: Wrong) -> Wrong:
    """The newest checkpoint is taken as good."""

    def newest_good(
        self: Behaviour, rank: SimRank, refused: Callable[[Checkpoint, str], None]
    ) -> Any:
        there = checkpoints.newest_first(rank.config.checkpoint_dir)
        whole = [
            checkpoint for checkpoint in there if (checkpoint.path / checkpoints.MANIFEST).exists()
        ]
        if not whole:
            return right(self, rank, refused)
        return defects.RestoresUnverified().restore(rank, refused)

    return newest_good


class ForgetsASample(Behaviour):
    """After a recovery the last sample of each batch is left out."""

    def batch(self, rank: SimRank, step: int) -> list[int]:
        """All but one."""
        whole = super().batch(rank, step)
        return whole[:-1] if rank.generation > 1 else whole


class CountsTwice(Behaviour):
    """What a lost attempt has changed in the buffers stays."""

    def put_back(self, rank: SimRank, own: Own) -> Own:
        """What was registered only."""
        return own._replace(buffers=rank.state.own.buffers)


class RegisteredTwice(Behaviour):
    """What it has changed in what was registered stays."""

    def put_back(self, rank: SimRank, own: Own) -> Own:
        """The buffers only."""
        return own._replace(seen=rank.state.own.seen)


class FirstRanksForAll(Behaviour):
    """A restore gives every rank what the first one has of its own."""

    def restored_own(self, rank: SimRank) -> Own:
        """Whoever it is."""
        return rank.state.owns[0] if rank.state.owns else rank.state.own


class NextBatch(Behaviour):
    """After a recovery every step trains on the batch of the next one."""

    def batch(self, rank: SimRank, step: int) -> list[int]:
        """Off by one."""
        return super().batch(rank, step + (rank.generation > 1))


class WakesAfterItsKill(Behaviour):
    """A process that is stopped when it is killed lives on."""

    def obeys(self, rank: SimRank, signum: int) -> bool:
        """But for the kill of a stopped one."""
        return signum != 9 or not rank.process.stopped


class NeverReplenishes(HotSpare):
    """Spares that were used are not replaced."""

    def on_spare_lost(self, view: ClusterView) -> Decision:
        """Nothing."""
        return Decision(actions=(), reason="somebody else's business")


class NeverGrows(DropReplica):
    """A replacement that is ready is not taken in."""

    def on_ready(self, view: ClusterView) -> Decision:
        """Nothing."""
        return Decision(actions=(), reason="there is time")


PLANTED: dict[str, Planted] = {
    # ---- data
    "a sample is dropped after a recovery": Planted(strategy="hot-spare", behaviour=ForgetsASample),
    "a sample is dropped from the share of a smaller world": Planted(
        strategy="drop-replica", patches=[(Attempt, "_share", _shorter_share)]
    ),
    "the batch of the next step": Planted(strategy="checkpoint-restart", behaviour=NextBatch),
    "samples are left out one step late": Planted(
        strategy="drop-replica", patches=[(ExcludedSamples, "take", _skips_from_later)]
    ),
    "a replacement is not told of samples left out": Planted(
        strategy="hot-spare", patches=[(ExcludedSamples, "send_missing", _exclusions_not_sent)]
    ),
    "a rank's gradient is left out": Planted(strategy="hot-spare", behaviour=defects.DropsShare),
    # ---- state
    "a state is copied one step late": Planted(strategy="hot-spare", behaviour=defects.StalePeer),
    "a copy comes from the holder of another part": Planted(
        strategy="hot-spare", patches=[(CopyPlan, "spread", _from_another_part)]
    ),
    "a torn state is taken for whole": Planted(
        strategy="drop-replica", patches=[(RecoveryCycle, "parked", _ignores_torn)]
    ),
    "random numbers begin anew": Planted(
        strategy="checkpoint-restart", behaviour=defects.ForgetsRandomness
    ),
    "a lost attempt's buffers stay": Planted(strategy="hot-spare", behaviour=CountsTwice),
    "what was registered is counted twice": Planted(
        strategy="hot-spare", behaviour=RegisteredTwice
    ),
    "all ranks get the first one's buffers": Planted(
        strategy="checkpoint-restart", behaviour=FirstRanksForAll
    ),
    "the learning rate follows the world": Planted(
        strategy="drop-replica", behaviour=defects.ScalesRate
    ),
    "a digest ignores the optimizer": Planted(
        strategy="drop-replica", patches=[(State, "digests", _blind_to_the_optimizer)]
    ),
    "a value that is not finite is committed": Planted(
        strategy="drop-replica", behaviour=defects.CommitsNan
    ),
    "a checkpoint in memory has the counters of a step before": Planted(
        strategy="checkpoint-restart", patches=[(SimMemoryCheckpointer, "restored", _older_memory)]
    ),
    # ---- checkpoints
    "a checkpoint is restored unverified": Planted(
        strategy="checkpoint-restart", patches=[(Behaviour, "restore", _unverified)]
    ),
    "an older checkpoint is restored": Planted(
        strategy="checkpoint-restart", behaviour=defects.RestoresOlder
    ),
    "the agreed checkpoint is pruned": Planted(
        strategy="drop-replica", patches=[(saving, "prune", _newest_only)]
    ),
    "the last good checkpoint is pruned": Planted(
        strategy="checkpoint-restart",
        patches=[(saving, "prune", _keeps_none)],
    ),
    "a doubtful checkpoint is restored": Planted(
        strategy="checkpoint-restart",
        patches=[(CheckpointChooser, "in_doubt", _stays_in_doubt)],
    ),
    "a job that lost its checkpoints begins anew": Planted(
        strategy="checkpoint-restart", patches=[(Custody, "nothing_left", never())]
    ),
    "nobody tells a rank which checkpoints are in doubt": Planted(
        strategy="checkpoint-restart", patches=[(Custody, "distrust", never())]
    ),
    "a save that fails ends the rank": Planted(
        strategy="checkpoint-restart", behaviour=defects.DiesOfFailedSave
    ),
    # ---- membership
    "a spare is promoted twice": Planted(
        strategy="hot-spare", patches=[(fallback, "seat", _twice_promoted)]
    ),
    "a generation number is used again": Planted(
        strategy="drop-replica", patches=[(Formation, "begin", _same_generation)]
    ),
    "a spare waits while the job shrinks": Planted(
        strategy="hot-spare", instead=defects.NeverSwaps
    ),
    "spares are not replaced": Planted(strategy="hot-spare", instead=NeverReplenishes),
    "a replacement is not taken in": Planted(strategy="drop-replica", instead=NeverGrows),
    "nobody looks again once a generation trains": Planted(
        strategy="drop-replica", patches=[(ReplacementDelay, "just_settled", never(False))]
    ),
    "a stopped process survives its kill": Planted(
        strategy="hot-spare", behaviour=WakesAfterItsKill
    ),
    # ---- failures
    "a wake-up is lost": Planted(
        strategy="hot-spare", patches=[(RecoveryCycle, "parked", _deaf_to_the_last)]
    ),
    "a pause is asked for again and again": Planted(
        strategy="drop-replica", patches=[(Membership, "joins", _pauses_again)]
    ),
    "an abort forgets one rank": Planted(
        strategy="drop-replica", patches=[(ProcessTable, "abort", _abort_forgets)]
    ),
    "an exit while a group forms is not heard": Planted(
        strategy="drop-replica", patches=[(Controller, "on_exit", _exits_unheard)]
    ),
    "a hang is blamed on another": Planted(
        strategy="hot-spare", patches=[(HangDetector, "look", _blames_who_waits)]
    ),
    "a hang is never seen": Planted(
        strategy="drop-replica", patches=[(HangDetector, "look", never())]
    ),
    "values that are not finite are blamed on the next rank": Planted(
        strategy="drop-replica", behaviour=defects.BlamesAnother
    ),
    "attempts are not counted": Planted(
        strategy="drop-replica",
        patches=[(FailureBook, "may_try", never(True)), (FailureBook, "loop", never(""))],
    ),
    "a strategy that waits and sees": Planted(strategy="drop-replica", instead=defects.DoesNothing),
    "replicas of other shards are compared": Planted(
        strategy="hot-spare",
        patches=[(divergence, "odd_ones", _agrees_with_itself)],
    ),
    "replicas that differ are not noticed": Planted(
        strategy="drop-replica", patches=[(DigestBook, "_compare", never())]
    ),
    # ---- taking over
    "whoever takes over forgets who failed": Planted(
        strategy="hot-spare",
        patches=[(orchestrator, "past", _forgets_the_past(failures=[], unnoticed={}))],
    ),
    "whoever takes over leaves the condemned alive": Planted(
        strategy="hot-spare",
        patches=[(orchestrator, "past", _forgets_the_past(condemned=set()))],
    ),
    "whoever takes over forgets the samples left out": Planted(
        strategy="drop-replica",
        patches=[(orchestrator, "past", _forgets_the_past(skipped={}))],
    ),
}
