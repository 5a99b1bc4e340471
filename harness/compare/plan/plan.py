"""Plans a comparison: stacks, fault families, seeds, and the order of its arms. Pure."""

from __future__ import annotations

import hashlib
import random
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.scenario.model import Cell
from trainchaos.chaos.source.diagnostics import unknown
from trainchaos.harness.compare.environments.stack import CommonJob, Settings, Stack
from trainchaos.harness.compare.environments.tuned import stack_of
from trainchaos.harness.judge.figures import Model

AGAIN = "again"
"""Suffix of the label of the A/A arm, which plays the reference a second time."""
COMMON = {"size", "data"}
"""Parameters of the workload that a fault family may set."""
CHANGES_VALUES = (
    "checkpoint-corrupt",
    "tensor-corrupt",
    "data-corrupt",
    "replica-desync",
    "poison-sample",
)
"""Kinds of faults after which the state or the data is wrong."""
Wanted = Literal["default", "tuned", "both"]
# time before the first step and after the last; measured on 2 cores with 4 ranks
GUESS_START_S = 15.0
GUESS_STEP_S = 0.12
GUESS_RECOVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A stack with its settings. ``label``: unique, such as ``torchft tuned``; ``name``: of the
    stack.
    """

    label: str
    name: str
    settings: Settings
    stack: Stack


class PlannedFamily(Model):
    """One kind of failure, as a plan keeps it. ``digest``: of what its file says; ``workload``:
    size, ranks, steps, global batch, steps between checkpoints; ``script``: it tests the training
    script rather than the stack, as its faults change values, which only a script's own checks can
    notice. It is shown separately, outside the headline.
    """

    name: str
    path: str
    digest: str
    about: str
    workload: tuple[str, int, int, int, int]
    script: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of failure, with the cell of its scenario file."""

    planned: PlannedFamily
    cell: Cell

    @property
    def name(self) -> str:
        """Of its scenario."""
        return self.planned.name

    @property
    def workload(self) -> tuple[str, int, int, int, int]:
        """As planned."""
        return self.planned.workload

    def job(self, seed: int, data: Path) -> CommonJob:
        """The common job with that seed on that corpus."""
        size, ranks, steps, batch, every = self.workload
        return CommonJob(
            size=size,
            ranks=ranks,
            steps=steps,
            global_batch=batch,
            every=every,
            seed=seed,
            data=data,
        )


class Arm(Model):
    """One run of training. ``family``: None for a control, without faults; ``like``: the family
    whose workload it trains.
    """

    label: str
    family: str | None
    like: str
    seed: int

    @property
    def id(self) -> str:
        """Unique in a comparison, and a file's name: ``torchft-tuned.kill.7``."""
        what = self.family or f"control-of-{self.like}"
        return f"{slug(self.label)}.{slug(what)}.{self.seed}"


def slug(text: str) -> str:
    """The text as part of a file name."""
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-") or "x"


def entrants(
    names: Sequence[str], stacks: Mapping[str, type[Stack]], settings: Wanted
) -> list[Entrant]:
    """Stacks named by ``--stacks a,b:tuned``, in that order. ``settings``: of stacks named without.
    If both settings are wanted and they are equal, only the default is used. Raises ScenarioError
    for an unknown name or setting.
    """
    found: dict[str, Entrant] = {}
    for word in names or sorted(stacks):
        name, colon, which = word.strip().partition(":")
        if name not in stacks:
            raise ScenarioError(
                f"--stacks: {unknown('stack', name, stacks)}",
                hint="chaos stacks list shows them all",
            )
        if colon and which not in ("default", "tuned", "both"):
            raise ScenarioError(
                f"--stacks: {word.strip()!r}:"
                f" {unknown('setting', which, ('default', 'tuned', 'both'))}",
                hint=f"write {name}, {name}:default, {name}:tuned or {name}:both",
            )
        for one in _settings(name, stacks[name], which or settings):
            entrant = Entrant(
                label=f"{name} {one}",
                name=name,
                settings=one,
                stack=stack_of(name, stacks[name], one),
            )
            found[entrant.label] = entrant
    return list(found.values())


def _settings(name: str, kind: type[Stack], wanted: str) -> list[Settings]:
    if wanted == "both":
        default, tuned = (stack_of(name, kind, one).chosen() for one in ("default", "tuned"))
        same = dict(default) == dict(tuned)
        return ["default"] if same else ["default", "tuned"]
    return ["tuned"] if wanted == "tuned" else ["default"]


def family_of(path: Path, cells: Sequence[Cell]) -> Family:
    """The fault family of a loaded scenario file. Raises ScenarioError if the file
    cannot be one.
    """

    def wrong(what: str, hint: str) -> ScenarioError:
        return ScenarioError(f"{path}: {what}", hint=hint)

    cells = [cell for cell in cells if cell.exact_for is None]
    if len(cells) != 1:
        raise wrong(
            f"it has {len(cells)} cells", "a fault family is one cell: leave the matrix out"
        )
    scenario = cells[0].scenario
    if scenario.workload.kind != "gpt":
        raise wrong(
            f"its workload is {scenario.workload.title!r}",
            "every stack trains the workload gpt: write workload: {kind: gpt, ...}; see"
            " scenarios/compare",
        )
    others = sorted(set(scenario.workload.params) - COMMON)
    if others:
        raise wrong(
            f"its workload sets {', '.join(others)}",
            "every stack trains the workload gpt as it is: leave that out; size and data can be"
            " chosen",
        )
    if not scenario.faults:
        raise wrong("it has no faults", "a fault family says what is done to the job")
    if not scenario.workload.checkpoint.steps:
        raise wrong(
            f"its checkpoints come every {scenario.workload.checkpoint.every}",
            "stacks save every so many steps: workload.checkpoint.every is a number",
        )
    faults = [fault.model_dump(mode="json") for fault in scenario.faults]
    said = repr((scenario.workload.model_dump(mode="json"), faults))
    spec, kinds = scenario.workload, [fault.kind for fault in scenario.faults]
    size = str(spec.params.get("size", "nano"))
    planned = PlannedFamily(
        name=scenario.name,
        path=str(path),
        digest=hashlib.sha256(said.encode()).hexdigest()[:16],
        about=scenario.description or ", ".join(kinds),
        workload=(size, spec.ranks, spec.steps, spec.global_batch, spec.checkpoint.steps or 0),
        script=not set(kinds).isdisjoint(CHANGES_VALUES),
    )
    return Family(planned=planned, cell=cells[0])


def check_families(families: Sequence[Family], chosen: Sequence[Entrant]) -> None:
    """Raise ScenarioError if two families have the same name or different data, or if no stack can
    take part in one.
    """
    data = {
        str(family.cell.scenario.workload.params.get("data") or "the default"): family.planned.path
        for family in families
    }
    if len(data) > 1:
        raise ScenarioError(
            "fault families on different data:"
            f" {', '.join(f'{path} on {what}' for what, path in data.items())}",
            hint=(
                "all arms train on one corpus: name one in workload.params.data of all, or in none"
            ),
        )
    for family in families:
        paths = [one.planned.path for one in families if one.name == family.name]
        if len(paths) > 1:
            raise ScenarioError(
                f"two fault families are called {family.name!r}: {', '.join(paths)}",
                hint="give each a name",
            )
        refusals = {one.label: one.stack.not_offered(family.name) for one in chosen}
        if all(refusals.values()):
            why = "; ".join(f"{label}: {reason}" for label, reason in refusals.items())
            raise ScenarioError(
                f"{family.planned.path}: no stack can be put under {family.name} ({why})",
                hint="leave it out",
            )


def arms_of(
    chosen: Sequence[Entrant],
    families: Sequence[Family],
    seeds: Iterable[int],
    *,
    controls: bool = True,
    without: Collection[tuple[str, str]] = (),
) -> list[Arm]:
    """All arms, seed by seed, in seeded random order within each, so that other activity on the
    machine affects all stacks alike.

    Every stack has one control per seed and workload, shared by its families, unless ``controls``
    is False. ``without``: (name of a stack, family) pairs to leave out.
    """
    arms: list[Arm] = []
    for seed in seeds:
        block: dict[str, Arm] = {}
        for one in chosen:
            first: dict[Any, str] = {}
            for family in families:
                if (
                    one.stack.not_offered(family.name) is not None
                    or (one.name, family.name) in without
                ):
                    continue
                like = first.setdefault(family.workload, family.name)
                for name in (None, family.name) if controls else (family.name,):
                    arm = Arm(
                        label=one.label,
                        family=name,
                        like=like if name is None else family.name,
                        seed=seed,
                    )
                    block[arm.id] = arm
        shuffled = [block[key] for key in sorted(block)]
        random.Random(seed).shuffle(shuffled)
        arms += shuffled
    return arms


def control_of(
    arm: Arm, arms: Sequence[Arm], families: Mapping[str, tuple[Any, ...]]
) -> Arm | None:
    """The control that an arm is compared with. ``families``: name -> workload."""
    key = (None, arm.label, arm.seed, families[arm.family or arm.like])
    alike = (one for one in arms if (one.family, one.label, one.seed, families[one.like]) == key)
    return next(alike, None) if arm.family is not None else None


def seconds_left(
    arms: Sequence[Arm], took: Mapping[Arm, float], workloads: Mapping[str, tuple[Any, ...]]
) -> tuple[float, int]:
    """(expected seconds of these arms, number of arms whose time is a guess). ``took``: seconds of
    arms already played.
    """
    total, guessed = 0.0, 0
    alike: dict[tuple[str, str | None], list[float]] = {}
    mine: dict[str, list[float]] = {}
    for arm, seconds in took.items():
        alike.setdefault((arm.label, arm.family), []).append(seconds)
        mine.setdefault(arm.label, []).append(seconds)
    for arm in arms:
        known = alike.get((arm.label, arm.family)) or mine.get(arm.label)
        if known is None:
            guessed += 1
            steps = int(workloads[arm.like][2])
            total += (
                GUESS_START_S + steps * GUESS_STEP_S + (GUESS_RECOVERY_S if arm.family else 0.0)
            )
        else:
            total += statistics.fmean(known)
    return total, guessed
