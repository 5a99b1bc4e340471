"""Policy apart from mechanism: a strategy is a pure function from a frozen view of the job to a
decision.

Nothing here performs anything: ``recovery.supervise.controller`` carries decisions out through a
launcher.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from trainchaos.recovery.policy.costs import NOTHING_MEASURED, Costs, Priced, Tried
from trainchaos.recovery.policy.interval import Rewinds
from trainchaos.recovery.policy.jobconfig import SpareSync

MOST_SHOWN = 32  # samples in a text for people
Nonfinite = Literal["retry", "skip", "rollback"]
"""What to do about a loss or gradient that is not finite. It is never applied.

``retry``: the rank to blame copies a peer's state and the step is redone; if that fails, samples
that are non-finite by themselves are found and left out; if there are none, all go back to a
checkpoint. ``skip``: the rank to blame copies a peer's state, and its share of the batch is left
out at once. ``rollback``: all go back to a checkpoint at once.
"""


class Health(StrEnum):
    """State of one process as the supervisor knows it."""

    STARTING = "starting"
    READY = "ready"  # built and waiting, member of no generation
    TRAINING = "training"
    PARKED = "parked"  # left its generation, holds state, waits to be told
    DEAD = "dead"


class Cause(StrEnum):
    """Why a failure was declared."""

    EXIT = "exit"
    HANG = "hang"
    ERROR = "error"
    NONFINITE = "nonfinite"
    START_TIMEOUT = "start-timeout"
    UNFIT = "unfit"  # its software is not that of the others
    DIVERGED = "diverged"  # its state differs from the others'; of no process: nobody can be named
    NOTICE = "notice"  # still there, but told that it will be ended soon
    WARNING = "warning"  # still there, but its device or node is about to fail


SAVED = "a checkpoint is saved: the same members go on"
ANNOUNCED = (Cause.NOTICE, Cause.WARNING)
"""Of a process that is still there, and works on until the job lets it go."""


class ProcessView(NamedTuple):
    """One process; a tuple, as a view of a large job has many thousands.

    ``rank``: its rank in the current generation; ``step``: last step it applied; ``valid``: state
    usable; ``noticed``: it was told that it will be ended soon; ``warned``: the place it runs on is
    about to fail; ``shard``: the part of the model it holds for life, None before it has one;
    ``pending``: the step whose reduced gradients it holds and has not applied (0: none);
    ``age_s``: seconds since it was started; ``live``: it follows the job's steps as a spare.
    """

    name: str
    role: str
    health: Health
    rank: int | None = None
    step: int = 0
    valid: bool = False
    noticed: bool = False
    warned: bool = False
    shard: int | None = None
    pending: int = 0
    age_s: float = 0.0
    live: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One declared failure. ``time_s``: supervisor clock; ``samples``: those found to be non-finite
    by themselves; ``generation``: in which it happened; ``answer``: what answered it, "" as long as
    nothing has: ``rollback`` where all went back to a checkpoint, else the ``cause`` of the
    ``Form``; ``applied``: non-finite values that the state holds already, so that redoing a step
    helps nobody.
    """

    process: str
    rank: int | None
    cause: Cause
    step: int
    time_s: float
    samples: tuple[int, ...] = ()
    generation: int = 0
    answer: str = ""
    applied: bool = False


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """Everything a strategy may look at.

    ``world``: ranks asked for; ``members``: processes of the current generation by rank;
    ``failures``: those this decision answers, newest last; ``history``: every earlier failure of
    the job; ``rollbacks``: checkpoint restores so far; ``skipped``: samples left out in the last
    ``fallback.SKIP_WINDOW_STEPS`` steps; ``shards``: ranks that hold one copy of the model
    together (see ``recovery.policy.layout``); ``saved``: a checkpoint of this job that can be
    trusted was acknowledged, the newest of step ``saved_step``; ``pause_saves``: the pause that was
    asked for last was to save one from the beginning; ``costs``: what the parts of a recovery
    cost in this job; ``tried``: answers of ``on_failure`` since the last new step, oldest first;
    ``no_place``: there is no place left to start a process in.
    """

    now_s: float
    generation: int
    world: int
    spares: int
    members: tuple[str, ...]
    processes: tuple[ProcessView, ...]
    failures: tuple[Failure, ...]
    history: tuple[Failure, ...] = ()
    rollbacks: int = 0
    skipped: int = 0
    shards: int = 1
    saved: bool = False
    saved_step: int = -1
    pause_saves: bool = False
    costs: Costs = NOTHING_MEASURED
    tried: tuple[Tried, ...] = ()
    no_place: bool = False

    def process(self, name: str) -> ProcessView:
        """The process of that name. Raises KeyError when there is none."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> Mapping[str, ProcessView]:
        return {process.name: process for process in self.processes}

    @cached_property
    def survivors(self) -> tuple[ProcessView, ...]:
        """Members that parked, in rank order."""
        views = (self.process(name) for name in self.members)
        return tuple(view for view in views if view.health is Health.PARKED)

    @property
    def replicas(self) -> int:
        """Copies of the model in the full world."""
        return self.world // self.shards

    @cached_property
    def ready(self) -> tuple[ProcessView, ...]:
        """Processes built and waiting outside the generation, oldest first."""
        return tuple(view for view in self.processes if view.health is Health.READY)

    @cached_property
    def benched(self) -> tuple[ProcessView, ...]:
        """Those of the ready that keep their shard: they held a rank, and left with a broken
        replica, or follow it as live spares.
        """
        return tuple(view for view in self.ready if view.shard is not None)

    @cached_property
    def fresh(self) -> tuple[ProcessView, ...]:
        """Those of the ready that hold no shard, and can take any rank: last those whose place is
        about to fail.
        """
        found = (view for view in self.ready if view.shard is None)
        return tuple(sorted(found, key=lambda view: view.warned))

    @cached_property
    def refuge(self) -> tuple[ProcessView, ...]:
        """Those of the fresh to whom a rank can move whose place is about to fail."""
        return tuple(view for view in self.fresh if not view.warned)

    @cached_property
    def leaving(self) -> tuple[str, ...]:
        """Members that were told they will be ended soon, in rank order."""
        return tuple(name for name in self.members if self.process(name).noticed)

    @cached_property
    def warned(self) -> tuple[str, ...]:
        """Members whose place is about to fail, in rank order."""
        return tuple(name for name in self.members if self.process(name).warned)

    @cached_property
    def starting(self) -> tuple[ProcessView, ...]:
        return tuple(view for view in self.processes if view.health is Health.STARTING)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End a process at once (SIGKILL on its pidfd)."""

    process: str


@dataclass(frozen=True, kw_only=True)
class Spawn:
    """Start a process outside the generation. ``role``: worker or spare; ``mode``: warm or cold."""

    role: str
    mode: str = "warm"


class StateFrom(StrEnum):
    """Where the members of a new generation take their state from."""

    INITIAL = "initial"
    PEER = "peer"
    SPARE = "spare"  # one that has followed the job: no rank is left that holds it
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form the next generation.

    ``members[r]`` takes rank r; a name not yet known stands for the next process spawned by this
    decision (``new-0``, ``new-1``, ...). ``refill``: members whose state must not be trusted;
    ``bench``: parked processes of broken replicas, which wait until theirs is complete again;
    ``skip``: samples to leave out from step ``skip_from`` on, for the rest of the job.
    """

    members: tuple[str, ...]
    state: StateFrom
    refill: tuple[str, ...] = ()
    bench: tuple[str, ...] = ()
    cause: str = "failure"
    skip: tuple[int, ...] = ()
    skip_from: int = 0


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Have the generation park after its next commit, to let somebody join or leave.

    ``save``: have it save a checkpoint of that step before it parks.
    """

    save: bool = False


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """End the job: nothing this strategy knows can help."""


Action = Kill | Spawn | Form | Pause | GiveUp


def in_words(samples: Sequence[int], separator: str) -> str:
    """Samples for people: the first MOST_SHOWN, and how many more there are. The log has all
    (``samples_skipped``).
    """
    more = [f"and {len(samples) - MOST_SHOWN} more"] if len(samples) > MOST_SHOWN else []
    return separator.join([*map(str, samples[:MOST_SHOWN]), *more])


def describe(action: Action) -> str:
    """An action in words, for the log."""
    match action:
        case Kill():
            return f"kill {action.process}"
        case Spawn():
            return f"spawn {action.mode} {action.role}"
        case Form():
            refill = f", refilling {' '.join(action.refill)}" if action.refill else ""
            bench = f", {' '.join(action.bench)} waiting" if action.bench else ""
            skip = f", without samples {in_words(action.skip, ' ')}" if action.skip else ""
            return (
                f"form {' '.join(action.members)} with state from"
                f" {action.state.value}{refill}{bench}{skip}"
            )
        case Pause():
            return f"{'save a checkpoint and ' if action.save else ''}pause after the next commit"
        case _:
            return "give up"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Actions in order, and the reason a person reads. No action means: wait. ``again_s``: when
    ``on_spare_lost`` is to be asked again even if nothing happens until then, on the clock of
    ``ClusterView.now_s``. ``options``: what was weighed, cheapest first, and ``chosen`` of them.
    """

    actions: tuple[Action, ...]
    reason: str
    again_s: float | None = None
    options: tuple[Priced, ...] = ()
    chosen: str = ""

    @property
    def starts_members(self) -> bool:
        """Whether the next generation has members that this decision starts."""
        forms = (action for action in self.actions if isinstance(action, Form))
        return any(name.startswith("new-") for form in forms for name in form.members)


class Strategy(BaseModel):
    """Base of a strategy; its fields are its YAML parameters.

    ``exact``: promises a result bit-identical to the unfaulted run. ``keeps_survivors``: survivors
    park and keep state. ``replaces``: one that leaves before training began, as it was told to, is
    replaced.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    exact: ClassVar[bool] = True
    keeps_survivors: ClassVar[bool] = True
    replaces: ClassVar[bool] = True

    @property
    def spares_wanted(self) -> int:
        """Warm processes to provision beside the ranks; they count as provisioned in goodput."""
        return 0

    @property
    def start_mode(self) -> str:
        """How processes of the first generation start: warm or cold."""
        return "warm"

    @property
    def batch_policy(self) -> str:
        """``constant``: the global batch never changes; ``shrink``: it follows the world size."""
        return "constant"

    @property
    def nonfinite_policy(self) -> Nonfinite:
        """What ranks have to know of it: with ``skip`` the one to blame names its share of the
        batch.
        """
        return "retry"

    def rewinds(self, costs: Costs) -> Rewinds | None:
        """The failures by which ``every: auto`` spaces checkpoints; None: all that a rank sees."""
        return None

    @property
    def spare_sync(self) -> SpareSync:
        """How spares are kept up to date."""
        return SpareSync()

    @abstractmethod
    def on_failure(self, view: ClusterView) -> Decision:
        """Decide after a failure, or after one that may come (``recovery.standby.likely``).

        Members are dead or parked (or still training if ``keeps_survivors`` is False).
        """

    def on_ready(self, view: ClusterView) -> Decision:
        """Decide when a process became ready while the job trains. Default: nothing."""
        return Decision(actions=(), reason="a full world needs nobody")

    def on_spare_lost(self, view: ClusterView) -> Decision:
        """Decide when fewer processes may wait outside the generation than should.

        Called while the job trains, when one of them died, and whenever a generation has made its
        first step: whoever was lost or used is replaced then. Default: nothing.
        """
        return Decision(actions=(), reason="the job does not depend on it")

    def on_notice(self, view: ClusterView) -> Decision:
        """Decide when a member was told that it will be ended soon (``view.leaving``), while the
        job trains.

        It is a member like any other until then. Default: nothing; its end is a failure like any
        other.
        """
        return Decision(actions=(), reason="its end is awaited")

    def on_warning(self, view: ClusterView) -> Decision:
        """Decide when the place of a member (``view.warned``) is about to fail, while the job
        trains. Default: save a checkpoint at the next step boundary, so that the failure costs the
        steps after it only.
        """
        reason = f"{', '.join(view.warned)} may fail soon: a checkpoint is saved before"
        return Decision(actions=(Pause(save=True),), reason=reason)

    def on_paused(self, view: ClusterView) -> Decision:
        """Decide when the generation parked because of an earlier ``Pause``.

        Default: go on with the same members.
        """
        members = tuple(view.members)
        return Decision(
            actions=(Form(members=members, state=StateFrom.PEER, cause="grow"),),
            reason=SAVED if view.pause_saves else "nothing to do",
        )
