"""Stories: a few related faults, each drawn like any other fault except where the story constrains
it.

Unrelated faults rarely meet: losing a rank just while another is replaced takes many draws.
``STORIES`` contains known combinations of failures of large jobs. A story constrains each fault's
effect, time and target, and the job so that they matter; kinds, parameters and everything else are
drawn.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

from trainchaos.chaos.fault.aftermath import Ends, EndsWithin, HangsUntilDeclared, StandsStill
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.harness.fuzz.draw.draw import (
    Dice,
    Tree,
    World,
    checks_of_places,
    fault_of,
    job,
    long_enough,
    phase,
)
from trainchaos.harness.fuzz.draw.values import params_of

FAILURE = ("loss", "hang", "values", "apart")
"""Groups of faults that a job must recover from."""
SUPERVISOR = ("supervisor",)
SAVING = {"saving": "checkpoint_saving", "saved": "checkpoint_committed"}
MENDING = ("noticed", "noticed", "regroup", "restore", "recovered")
"""Moments of a recovery; every recovery has the first."""
AFTER = ("recovered", "soon", "later", "later")
TWO = 0.5
"""Share of jobs with a second story after the first."""
LONG_S = (10.0, 20.0)
"""Total duration of all evaluations of a long job, in seconds: long enough to start, build and wait
for a process.
"""
BRIEF = {"down_s": 1.0}
"""Limits, in seconds, so that lost parts come back while the job trains."""


@dataclass(frozen=True)
class StoryFault:
    """One fault of a story. ``what``: its groups (``groups``); ``when``: words of
    ``_Telling._when``; ``who``: "anyone", or relative to the fault before, "same", "another" or
    "same node"; ``share``: probability that the fault occurs. A repeated word is drawn more often.
    """

    what: tuple[str, ...] = FAILURE
    when: tuple[str, ...] = ("midway",)
    who: tuple[str, ...] = ("anyone",)
    share: float = 1.0


@dataclass(frozen=True)
class Story:
    """``needs``: requirements on the job, words of ``NEEDS``."""

    name: str
    faults: tuple[StoryFault, ...]
    needs: tuple[str, ...] = ()


STORIES: tuple[Story, ...] = (
    Story(
        "a second failure while the first is mended",
        (
            StoryFault(),
            StoryFault(when=MENDING, who=("same", "another")),
            StoryFault(when=MENDING, share=0.3),
        ),
    ),
    Story(
        "the same again on whoever took over",
        (
            StoryFault(),
            StoryFault(("same",), AFTER, who=("same",)),
            StoryFault(when=AFTER, share=0.3),
        ),
    ),
    Story(
        "one failure after the other",
        (StoryFault(), StoryFault(when=AFTER), StoryFault(when=("later",), share=0.5)),
    ),
    Story(
        "the supervisor is lost while it acts",
        (StoryFault(), StoryFault(SUPERVISOR, MENDING), StoryFault(when=("later",), share=0.3)),
    ),
    Story(
        "the supervisor is lost, and what it knew is needed",
        (
            StoryFault(("values", "values", "loss", "hang")),
            StoryFault(SUPERVISOR, AFTER),
            StoryFault(when=("later",)),
        ),
    ),
    Story(
        "a failure while nobody supervises",
        (
            StoryFault(SUPERVISOR),
            StoryFault(when=("soon",)),
            StoryFault(when=("later",), share=0.3),
        ),
    ),
    Story(
        "a checkpoint is bad, and is needed",
        (
            StoryFault(
                ("checkpoint", "checkpoint", "storage"), ("after a save", "after a save", "midway")
            ),
            StoryFault(when=("soon", "soon", "later")),
            StoryFault(when=MENDING, share=0.3),
        ),
        needs=("saves", "keeps few"),
    ),
    Story(
        "wrong values are saved before they are noticed",
        (
            StoryFault(("state", "state", "values")),
            StoryFault(when=("soon", "later"), share=0.3),
        ),
        needs=("saves often", "keeps few", "compares seldom"),
    ),
    Story(
        "a state goes wrong, and its source is lost",
        (
            StoryFault(("state", "values")),
            StoryFault(("loss", "hang"), ("soon", "noticed"), ("same",)),
        ),
    ),
    Story(
        "two failures at once",
        (StoryFault(), StoryFault(when=("at once",), who=("another", "same node"))),
    ),
    Story(
        "a failure in the first steps or the last",
        (
            StoryFault(when=("first", "last")),
            StoryFault(when=("at once", "soon", *MENDING), share=0.4),
        ),
    ),
    Story(
        "a failure around a save",
        (
            StoryFault(when=("saving", "saved", "after a save")),
            StoryFault(when=("soon", *MENDING), share=0.4),
        ),
        needs=("saves",),
    ),
    Story(
        "a failure while something is slow",
        (StoryFault(("slow",)), StoryFault(when=("soon",)), StoryFault(when=MENDING, share=0.3)),
    ),
    Story(
        "a job goes on for long after its failures",
        (StoryFault(), StoryFault(when=("soon", *MENDING), share=0.3)),
        needs=("lasts",),
    ),
)


def scenario_from_stories(dice: Dice, world: World, stories: Sequence[Story] = STORIES) -> Tree:
    """A scenario with one or two of these stories, among those with available kinds of fault; its
    description names them.
    """
    possible = {story.name: story for story in stories if _can_tell(story, world)}
    names = [dice.pick("story", list(possible)) for _ in range(2 if dice.chance(TWO) else 1)]
    made = {**job(dice, world), "description": "; ".join(dict.fromkeys(names))}
    long_enough(made, dice, world)
    scale = replace(world.scale, most={**BRIEF, **world.scale.most})
    telling = _Telling(dice, replace(world, scale=scale), made)
    for need in dict.fromkeys(need for name in names for need in possible[name].needs):
        NEEDS[need](made["workload"], dice, world)
    for name in names:
        telling.tell(possible[name])
    checks_of_places(made, dice)
    made["seed"] = dice.rng.randrange(10_000)
    return made


def related(dice: Dice, world: World, tree: Tree) -> None:
    """Add one fault that is related to those before it."""
    fault = StoryFault((*FAILURE, *SUPERVISOR), (*MENDING, *AFTER), ("same", "another"))
    _Telling(dice, world, tree).tell(Story("", (fault,)))


def _can_tell(story: Story, world: World) -> bool:
    there = {"same"}.union(*map(groups, world.kinds.values()))
    return all(there & set(spec.what) for spec in story.faults if spec.share == 1.0)


@functools.cache
def groups(kind: type[Fault]) -> frozenset[str]:
    """Groups of a kind, by its own declarations. "state": of "values", can leave one rank with
    another state; "apart": indistinguishable from a loss; "slow": it lasts and is harmless.
    """
    places = {
        Where.CHECKPOINT: "checkpoint",
        Where.STORAGE: "storage",
        Where.COORDINATOR: "supervisor",
    }
    if kind.where in places:
        return frozenset({places[kind.where]})
    if kind.harmless:
        return frozenset({"slow"} if kind.lasting else ())
    if kind.corrupts:
        return frozenset({"values", "state"} if kind.changes_state else {"values"})
    follows = kind(**params_of(kind, random.Random(0))).follows()
    if any(isinstance(one, (StandsStill, HangsUntilDeclared)) for one in follows):
        return frozenset({"hang"})
    if any(isinstance(one, (Ends, EndsWithin)) for one in follows):
        return frozenset({"loss"})
    return frozenset({"apart"})


# ---- requirements on the job


def _saves(job: Tree, dice: Dice, world: World) -> None:
    """A checkpoint before the middle of the job."""
    job["checkpoint"]["every"] = dice.rng.randint(1, max(1, job["steps"] // 4))


def _saves_often(job: Tree, dice: Dice, world: World) -> None:
    job["checkpoint"]["every"] = dice.rng.randint(1, 2)


def _keeps_few(job: Tree, dice: Dice, world: World) -> None:
    job["checkpoint"]["keep"] = dice.rng.choice((1, 1, 2, 3))


def _compares_seldom(job: Tree, dice: Dice, world: World) -> None:
    """Ranks hold the same state, and compare it after several checkpoints, while the job trains."""
    job["verify_every"] = dice.rng.randint(4, max(4, job["steps"] // 3))
    if job["parallelism"] == "fsdp":
        job["parallelism"] = "ddp"


def _lasts(job: Tree, dice: Dice, world: World) -> None:
    """Evaluations between the steps, so that a replacement arrives and the job continues with it.
    One rank evaluates, so it must have the whole model.
    """
    steps, every = world.scale.steps[1], dice.rng.randint(1, 5)
    takes = round(dice.rng.uniform(*LONG_S) * every / steps, 2)
    job |= {"steps": steps, "evaluate": {"every": every, "takes": takes}, "parallelism": "ddp"}


NEEDS: Mapping[str, Callable[[Tree, Dice, World], None]] = MappingProxyType(
    {
        "saves": _saves,
        "saves often": _saves_often,
        "keeps few": _keeps_few,
        "compares seldom": _compares_seldom,
        "lasts": _lasts,
    }
)


# ---- faults


class _Telling:
    """Adds the faults of stories one after the other. ``made``: the scenario to add them to."""

    def __init__(self, dice: Dice, world: World, made: Tree) -> None:
        self._dice, self._rng, self._world, self._made = dice, dice.rng, world, made
        self._job = made["workload"]
        steps = [fault["at"]["step"] for fault in made["faults"] if "step" in fault["at"]]
        self._step = steps[-1] if steps else 0
        """The step of the last fault with a step; 0: none yet."""

    def tell(self, story: Story) -> None:
        """Draw all faults of a story, but those of which there is no kind."""
        faults = self._made["faults"]
        for spec in story.faults:
            if spec.share == 1.0 or self._dice.chance(spec.share):
                before = faults[-1] if faults else None
                if (name := self._kind(spec, before)) is not None:
                    faults.append(self._fault(name, spec, before, len(faults)))

    def _fault(self, name: str, spec: StoryFault, before: Tree | None, number: int) -> Tree:
        made = fault_of(name, self._dice, self._world, self._made, number)
        made["at"] = self._when(self._rng.choice(spec.when), name, before)
        target = self._who(self._rng.choice(spec.who), made.get("target"), before)
        return {**made, "target": target} if target else made

    def _kind(self, spec: StoryFault, before: Tree | None) -> str | None:
        """A kind of a drawn group, or of any if that has none."""
        if spec.what == ("same",):
            return str(before["kind"]) if before else None
        there = {
            group: [
                name for name, kind in sorted(self._world.kinds.items()) if group in groups(kind)
            ]
            for group in spec.what
        }
        names = there[self._rng.choice(spec.what)] or list(chain(*there.values()))
        return str(self._dice.pick("kind", names)) if names else None

    def _when(self, word: str, name: str, before: Tree | None) -> Tree:
        """A trigger. Words: a part of the job ("first", "midway", "last"), its saves ("saving",
        "saved", "after a save"), a recovery (``MENDING``), or relative to the fault before ("at
        once", "soon", "later").
        """
        if word in SAVING:
            return {"event": SAVING[word], "nth": self._rng.randint(1, 3)}
        if word in MENDING:
            done = max(1, sum("step" in fault["at"] for fault in self._made["faults"]))
            event = "recovery_started" if word == "noticed" else word
            return {"event": event, "nth": self._rng.choice((1, done, done, done + 1))}
        if word == "at once" and before is not None:
            return dict(before["at"])
        steps = self._job["steps"]
        self._step = max(1, min(steps, self._step_of(word, steps)))
        return {"step": self._step, **phase(self._dice, name, self._world.kinds[name])}

    def _step_of(self, word: str, steps: int) -> int:
        rng, since = self._rng, self._step
        if word == "first":
            return since + rng.randint(1, 2)
        if word == "last":
            return steps - rng.randint(0, 1)
        if word == "soon":
            return since + rng.randint(0, 2)
        if word == "later":
            return since + rng.randint(2, max(2, steps // 3))
        step = since + rng.randint(max(1, steps // 8), max(1, steps // 3))
        every = self._job["checkpoint"]["every"]
        if word == "after a save" and isinstance(every, int):
            return max(1, step // every) * every + 1
        return step

    def _who(self, word: str, target: Tree | None, before: Tree | None) -> Tree | None:
        """A target, or None. The target before is known if it was a single rank."""
        rank, ranks = (before or {}).get("target", {}).get("rank"), self._job["ranks"]
        if target is None or "rank" not in target or rank is None or word == "anyone":
            return target
        if word == "another":
            return {"rank": (rank + self._rng.randint(1, ranks - 1)) % ranks}
        if word == "same node":
            per = -(-ranks // self._made["launcher"]["nodes"])
            return {"node": rank // per, "select": "one"}
        return {"rank": rank}
