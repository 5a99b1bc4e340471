"""One arm's history in order: generations, step executions, and which of them survived."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from operator import itemgetter
from statistics import fmean
from typing import Any, TypeVar, cast

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.recovery.data.permutation import samples_at

NS = 1e9
_T = TypeVar("_T")
COMMITS = (
    *("rank", "world", "samples", "loss", "lr", "grad_norm"),
    *("optimizer_step", "scheduler_step", "seconds"),
)
"""What is asked of commits."""
BATCHES = ("rank", "samples")
"""What is asked of batch records."""
AT_ONCE = 4096
"""Samples looked up together: by far less time for each, and no more memory than a few steps."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What ``run_started`` says about an arm. ``order_seed`` and ``order_samples`` define the
    reference sample order; ``observed``: a command, seen only from outside; ``monitored``: health
    detectors watched it; ``evaluate_every``: steps between evaluations by rank 0, each planned to
    take ``evaluate_s``.
    """

    arm: str
    cell: str
    repeat: int
    seed: int
    ranks: int
    spares: int
    steps: int
    global_batch: int
    strategy: str
    order_seed: int
    order_samples: int
    observed: bool = False
    monitored: bool = False
    evaluate_every: int | None = None
    evaluate_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One membership epoch. Times are ns; None where the event is missing. ``fenced_ns``: when the
    next one started; ``shards``: ranks that hold one copy of the model together (see
    ``recovery.policy.layout``).
    """

    number: int
    members: tuple[str, ...]
    shards: int = 1
    cause: str
    state: str
    started_ns: int
    ready_ns: int | None
    resume_step: int | None
    checkpoint: str | None
    grouped_ns: int | None
    stated_ns: int | None
    fenced_ns: int | None

    @property
    def world(self) -> int:
        """Number of members."""
        return len(self.members)

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Member -> its rank, the lowest if it has several."""
        return {name: rank for rank, name in reversed([*enumerate(self.members)])}

    def shard_of(self, rank: int) -> int:
        """The part of the model that a rank holds."""
        return rank % self.shards


class Lines:
    """Events of one kind and step, and what each says, in the same order: ``actors``, ``times`` in
    ns, and ``said``, by key.

    A dozen checkers ask for that. Events are far apart in memory, so it is taken out of them once,
    while the history is made of them.
    """

    def __init__(self, events: Sequence[Event], keys: Sequence[str]) -> None:
        self.events = tuple(events)
        self.actors = [event.actor for event in events]
        self.times = [event.time_ns for event in events]
        datas = [event.data for event in events]
        # a command's reports lack some keys
        known = [key for key in keys if not datas or key in datas[0]]
        self.said: Mapping[str, list[Any]] = {
            key: list(map(itemgetter(key), datas)) for key in known
        }

    def all_say(self, key: str, value: object) -> bool:
        """Whether all have this value."""
        return self.said[key].count(value) == len(self.events)


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """One execution of one step. ``committed_ns``: when the job committed it, None if it never did.

    ``start_ns``: end of the generation's previous step run, or the moment its members held their
    state. ``survives``: this run is the one of its step in the final lineage.
    """

    generation: int
    step: int
    start_ns: int
    end_ns: int
    committed_ns: int | None
    world: int
    done: Lines
    taken: Lines
    survives: bool

    @property
    def commits(self) -> tuple[Event, ...]:
        """The commits, by rank."""
        return self.done.events

    @property
    def batches(self) -> tuple[Event, ...]:
        """The batch records, in time order."""
        return self.taken.events

    @cached_property
    def data_s(self) -> float:
        """Mean seconds for which a rank waited for its batch."""
        return fmean([float(seconds.get("data", 0.0)) for seconds in self.done.said["seconds"]])

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return (self.end_ns - self.start_ns) / NS

    @property
    def samples(self) -> list[int]:
        """Ids of the samples all members took, dead ones included."""
        return [*chain.from_iterable(self.taken.said["samples"])]

    @property
    def loss(self) -> float:
        """Global loss as the lowest committing rank logged it; NaN when it logged none."""
        value = self.commits[0].data["loss"]
        return float("nan") if value is None else float(value)


@dataclass(frozen=True, kw_only=True)
class History:
    """One arm in order. ``foreign``: fenced commits and commits by non-members; ``unsure``: commits
    that may have been fenced, within the error of the clocks; ``end_ns``: the last known moment.
    """

    log: Log
    info: RunInfo
    start_ns: int
    end_ns: int
    finished: Event | None
    generations: tuple[Generation, ...]
    runs: tuple[StepRun, ...]
    foreign: tuple[Event, ...]
    unsure: tuple[Event, ...] = ()

    def once(self, make: Callable[[History], _T]) -> _T:
        """What ``make`` derives from this history, derived when first asked for and then kept."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return cast(_T, self._derived[make])

    @cached_property
    def _derived(self) -> dict[Callable[[History], Any], Any]:
        return {}

    @cached_property
    def lineage(self) -> Mapping[int, StepRun]:
        """Step -> the run of it that survived, in step order."""
        return {
            run.step: run for run in sorted(self.runs, key=lambda run: run.step) if run.survives
        }

    @cached_property
    def committed_step(self) -> int:
        """Highest step of the final lineage; 0 when nothing was committed."""
        return max((run.step for run in self.runs if run.survives), default=0)

    @property
    def outcome(self) -> str:
        """Outcome that the orchestrator logged; ``broken`` if it did not get that far."""
        return str(self.finished.data["outcome"]) if self.finished else "broken"

    @property
    def cut_short(self) -> bool:
        """Whether the arm was ended from outside, so that unfinished work proves nothing."""
        return self.outcome in ("broken", "interrupted")

    @property
    def unfinished(self) -> bool:
        """Whether the job itself did not finish, without being ended from outside."""
        return self.outcome in ("gave-up", "timed-out")

    @property
    def wall_s(self) -> float:
        """Seconds from ``run_started`` to ``run_finished``, or to the last event of a log without
        one.
        """
        return (self.end_ns - self.start_ns) / NS

    @cached_property
    def worked(self) -> tuple[Generation, ...]:
        """Generations that became ready (or, if the ready event is missing, committed a step)."""
        return tuple(g for g in self.generations if g.resume_step is not None)

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.generations[0].shards if self.generations else 1

    @property
    def found(self) -> int:
        """Members of the first generation: of a command, the ranks that were found."""
        return self.generations[0].world if self.generations else 0

    @cached_property
    def began_ns(self) -> int:
        """When the first generation was ready; the end of the arm where none was."""
        return min((g.ready_ns for g in self.generations if g.ready_ns), default=self.end_ns)

    @cached_property
    def exited_ns(self) -> Mapping[str, int]:
        """Process -> when it ended."""
        return {e.data["process"]: e.time_ns for e in self.log.of(Kind.PROCESS_EXITED)}

    @property
    def reports(self) -> list[Event]:
        """What a command reported of its steps."""
        return list(self.log.of(Kind.STEP_REPORTED))

    @cached_property
    def first_hit_ns(self) -> int | None:
        """When the first fault was injected; None: none was."""
        return min((e.time_ns for e in self.log.of(Kind.FAULT_INJECTED)), default=None)

    def generation(self, number: int) -> Generation | None:
        """The generation of that number, or None."""
        return self._numbered.get(number)

    @cached_property
    def _numbered(self) -> Mapping[int, Generation]:
        return {one.number: one for one in reversed(self.generations)}

    def generation_at(self, time_ns: int) -> Generation | None:
        """The newest generation started at or before a time."""
        return next((g for g in reversed(self.generations) if g.started_ns <= time_ns), None)

    def runs_of(self, generation: int) -> Sequence[StepRun]:
        """Step runs of one generation in step order."""
        return self._runs.get(generation, ())

    def run_of(self, generation: int, step: int) -> StepRun | None:
        """A generation's run of a step, or None."""
        return self._run_of.get((generation, step))

    @cached_property
    def _run_of(self) -> Mapping[tuple[int, int], StepRun]:
        return {(run.generation, run.step): run for run in self.runs}

    @cached_property
    def _runs(self) -> Mapping[int, Sequence[StepRun]]:
        found: dict[int, list[StepRun]] = {}
        for run in self.runs:
            found.setdefault(run.generation, []).append(run)
        return found

    @cached_property
    def _waters(self) -> tuple[Sequence[int], Sequence[int]]:
        """Generations that committed steps, and the highest step up to each."""
        numbers = sorted(self._runs)
        highest = (max(run.step for run in self._runs[number]) for number in numbers)
        return numbers, list(accumulate(highest, max))

    def high_water(self, last_generation: int) -> int:
        """Highest step that any member of any generation up to ``last_generation`` committed; 0
        when none.
        """
        numbers, highest = self._waters
        place = bisect_right(numbers, last_generation)
        return highest[place - 1] if place else 0


def owners(worked: Iterable[Generation], done: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Step -> number of the generation whose run of it no later generation discarded."""
    steps: dict[int, list[int]] = defaultdict(list)
    for number, step in done:
        steps[number].append(step)
    owner: dict[int, int] = {}
    for generation in worked:
        resume = generation.resume_step or 0
        owner = {step: number for step, number in owner.items() if step <= resume}
        owner.update((step, generation.number) for step in steps[generation.number])
    return owner


def due_in(info: RunInfo, step: int) -> Sequence[int]:
    """Sample ids of the global batch of ``step`` (from 1), in order; as
    ``recovery.data.order.batch``.
    """
    together = max(1, AT_ONCE // max(1, info.global_batch))
    place, number = divmod(step - 1, together)
    first = number * info.global_batch
    found = _stretch(place, together, info.global_batch, info.order_samples, info.order_seed)
    return found[first : first + info.global_batch]


@lru_cache(maxsize=4)
def _stretch(place: int, together: int, global_batch: int, samples: int, seed: int) -> list[int]:
    first = place * together * global_batch
    return samples_at(range(first, first + together * global_batch), samples, seed)
