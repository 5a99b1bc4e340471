"""Turns a request into a plan: which stacks are ready, their settings, and all arms."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError, ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.harness.compare import tuning
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.environments.stack import Stack
from trainchaos.harness.compare.environments.tuned import because
from trainchaos.harness.compare.plan.directory import (
    ComparisonPlan,
    Directory,
    PlannedFamily,
    PlannedStack,
    differences,
    provenance,
    refuse_other,
)
from trainchaos.harness.compare.plan.plan import (
    AGAIN,
    Entrant,
    Family,
    Wanted,
    arms_of,
    check_families,
    entrants,
    family_of,
    slug,
)
from trainchaos.harness.compare.play import now
from trainchaos.harness.compare.result import rules
from trainchaos.harness.launch.devices import versions


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of the command line. ``seed``: of the first repetition, counting up for the others;
    ``against``: label of the reference, empty for the first built-in one; ``deadline``: seconds;
    ``closed``, ``tune``, ``without``: as of ``ComparisonPlan``.
    """

    name: str
    scenarios: Sequence[Path]
    stacks: Sequence[str]
    settings: Wanted
    repeat: int
    seed: int
    deadline: float
    against: str
    same: bool
    price: float | None
    currency: str
    skip_missing: bool
    argv: Sequence[str]
    closed: bool = False
    tune: str = ""
    without: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A plan, with all that is needed to play it. ``pythons``: label -> interpreter."""

    plan: ComparisonPlan
    entrants: Mapping[str, Entrant]
    families: Mapping[str, Family]
    pythons: Mapping[str, Path]


def prepare(
    asked: CompareOptions, stacks: Mapping[str, type[Stack]], catalogue: Catalogue
) -> Prepared:
    """Work out the plan. Raises ScenarioError for what cannot be compared or is not installed."""
    wanted = _entrants(asked, stacks)
    families = [family_of(path, load(path, catalogue).cells) for path in asked.scenarios]
    chosen, pythons, missing = _ready(asked, wanted)
    reference = _reference(chosen, asked.against)
    if asked.same:
        twin = next(one for one in chosen if one.label == reference)
        again = Entrant(
            label=f"{reference} {AGAIN}", name=twin.name, settings=twin.settings, stack=twin.stack
        )
        chosen, pythons = [*chosen, again], {**pythons, again.label: pythons[reference]}
    check_families(families, chosen)
    _check_without(asked.without, chosen, families)
    plan = _plan(asked, chosen, families, reference=reference, missing=missing)
    if asked.closed and (broken := rules.broken(plan, families)):
        raise ScenarioError(
            f"--closed: {'; '.join(broken)}",
            hint="docs/benchmark-rules.md; without --closed it is the open division",
        )
    return Prepared(
        plan=plan,
        entrants={one.label: one for one in chosen},
        families={f.name: f for f in families},
        pythons=pythons,
    )


def _ready(
    asked: CompareOptions, wanted: Sequence[Entrant]
) -> tuple[list[Entrant], dict[str, Path], dict[str, str]]:
    """(entrants that can be played, label -> interpreter, label -> why it is left out)."""
    pythons, missing = _pythons(wanted)
    if missing and not asked.skip_missing:
        names = sorted({one.name for one in wanted if one.label in missing})
        raise ScenarioError(
            f"no environment for {', '.join(names)}",
            hint=(
                f"chaos stacks install {' '.join(names)} makes"
                f" {'it' if len(names) == 1 else 'them'}; --skip-missing compares the others"
            ),
        )
    chosen = [one for one in wanted if one.label not in missing]
    if not chosen:
        raise ScenarioError(
            "no stack is left to compare", hint="chaos stacks list shows what is ready"
        )
    return chosen, pythons, missing


def _plan(
    asked: CompareOptions,
    chosen: Sequence[Entrant],
    families: Sequence[Family],
    *,
    reference: str,
    missing: dict[str, str],
) -> ComparisonPlan:
    seeds = list(range(asked.seed, asked.seed + asked.repeat))
    return ComparisonPlan(
        name=asked.name,
        started=now(),
        argv=list(asked.argv),
        seeds=seeds,
        deadline=asked.deadline,
        reference=reference,
        same=asked.same,
        price=asked.price,
        currency=asked.currency,
        families=[
            PlannedFamily(
                name=f.name,
                path=str(f.path),
                digest=f.digest,
                about=f.about,
                workload=f.workload,
                script=f.script,
            )
            for f in families
        ],
        stacks=[_planned(one, families, chosen, reference) for one in chosen],
        skipped=missing,
        arms=arms_of(chosen, families, seeds, controls=not asked.tune, without=asked.without),
        provenance=provenance(),
        closed=asked.closed,
        tune=asked.tune,
        without=list(asked.without),
    )


def _entrants(asked: CompareOptions, stacks: Mapping[str, type[Stack]]) -> list[Entrant]:
    if not asked.tune:
        return entrants(asked.stacks, stacks, asked.settings)
    if asked.stacks or asked.same or asked.closed:
        raise ScenarioError(
            "--tune sweeps one stack by itself", hint="leave --stacks, --same and --closed out"
        )
    entrants([asked.tune], stacks, "tuned")  # that there is such a stack
    return tuning.candidates(asked.tune, stacks[asked.tune])


def _check_without(
    without: Sequence[tuple[str, str]], chosen: Sequence[Entrant], families: Sequence[Family]
) -> None:
    names, known = {one.name for one in chosen}, {family.name for family in families}
    for stack, family in without:
        if stack not in names or family not in known:
            raise ScenarioError(
                f"--without {stack}:{family}: {family if stack in names else stack} does not take"
                " part",
                hint=f"stacks: {', '.join(sorted(names))}; families: {', '.join(sorted(known))}",
            )


def _reference(chosen: Sequence[Entrant], against: str) -> str:
    labels = [one.label for one in chosen]
    if against:
        label = against.replace(":", " ")
        label = label if label in labels or f"{label} default" not in labels else f"{label} default"
        if label not in labels:
            raise ScenarioError(
                f"--against {against}: it does not take part",
                hint=f"those that do: {', '.join(labels)}",
            )
        return label
    return next((one.label for one in chosen if one.stack.ours), labels[0])


def _like(one: Entrant, chosen: Sequence[Entrant], reference: str) -> str:
    """Label of the stack to compare with: the built-in that continues in the same way, else the
    reference.
    """
    of_kind = [
        other.label
        for other in chosen
        if other.stack.ours and other.stack.way == one.stack.way and not other.label.endswith(AGAIN)
    ]
    alike = [label for label in of_kind if label != one.label]
    if one.stack.ours or one.label == reference or not alike or reference in of_kind:
        return reference
    same = [label for label in alike if label.endswith(f" {one.settings}")]
    return (same or alike)[0]


def _planned(
    one: Entrant, families: Sequence[Family], chosen: Sequence[Entrant], reference: str
) -> PlannedStack:
    refusals = {family.name: one.stack.not_offered(family.name) for family in families}
    return PlannedStack(
        label=one.label,
        name=one.name,
        settings=one.settings,
        ours=one.stack.ours,
        title=one.stack.title,
        chosen={name: _plain(value) for name, value in one.stack.chosen().items()},
        because=because(one.name, type(one.stack)) if one.settings == "tuned" else "",
        versions=_versions(one),
        fidelity=list(one.stack.fidelity()),
        ranks_beside=max(one.stack.provisioned(f.job(0, Path())) - f.workload[1] for f in families),
        not_offered={name: why for name, why in refusals.items() if why is not None},
        way=one.stack.way,
        against=_like(one, chosen, reference),
    )


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def _pythons(chosen: Sequence[Entrant]) -> tuple[dict[str, Path], dict[str, str]]:
    """(label -> interpreter, label -> why there is none)."""
    pythons, missing = {}, {}
    for one in chosen:
        if one.stack.requirements is None:
            pythons[one.label] = Path(sys.executable)
            continue
        python = environments.python_of(one.name, type(one.stack))
        if python is None:
            missing[one.label] = f"it is not installed: chaos stacks install {one.name}"
        else:
            pythons[one.label] = python
    return pythons, missing


def _versions(one: Entrant) -> dict[str, str]:
    if one.stack.requirements is None:
        return versions()
    return dict(environments.versions_of(one.name, type(one.stack)))


def as_planned(plan: ComparisonPlan, *, skip_missing: bool) -> CompareOptions:
    """The options from which a plan was made."""
    again = f"{plan.reference} {AGAIN}"
    return CompareOptions(
        name=plan.name,
        scenarios=[Path(family.path) for family in plan.families],
        stacks=[
            f"{stack.name}:{stack.settings}"
            for stack in plan.stacks
            if stack.label != again and not plan.tune
        ],
        settings="default",
        repeat=len(plan.seeds),
        seed=plan.seeds[0],
        deadline=plan.deadline,
        against="" if plan.tune else plan.reference.replace(" ", ":"),
        same=plan.same,
        price=plan.price,
        currency=plan.currency,
        skip_missing=skip_missing or bool(plan.skipped),
        argv=plan.argv,
        closed=plan.closed,
        tune=plan.tune,
        without=plan.without,
    )


def resumed(old: ComparisonPlan, new: ComparisonPlan, *, accepted: bool) -> ComparisonPlan:
    """The plan of a resumed comparison. Code, machine and versions must match those of the stored
    arms; ``accepted`` allows differences, which the report then states, as it states added seeds.
    Raises ScenarioError.
    """
    refuse_other(old, new)
    changes = differences(old.provenance, new.provenance)
    versions = {stack.label: stack.versions for stack in old.stacks}
    changes += [
        f"the versions of {stack.label}"
        for stack in new.stacks
        if versions.get(stack.label, stack.versions) != stack.versions
    ]
    if changes and not accepted:
        raise ScenarioError(
            f"not the same as when this comparison was begun: {'; '.join(changes)}",
            hint=(
                "--accept-changes goes on all the same and says so in the report; --anew begins"
                " again"
            ),
        )
    noted = [f"resumed {new.started} with a difference: {change}" for change in changes]
    if old.provenance.get("boot") != new.provenance.get("boot"):
        noted.append(f"resumed {new.started} after the machine was started again")
    if more := len(set(new.seeds) - set(old.seeds)):
        # nothing says what was seen before: an interval that holds at one look holds less often at
        # several
        noted.append(
            f"extended {new.started} by {more} seed{'' if more == 1 else 's'}: who extends a"
            " comparison after a look at it may take chance for a difference more often than the"
            " intervals say, each of which is of one look"
        )
    return new.model_copy(
        update={"started": old.started, "changes": [*old.changes, *noted], "skipped": new.skipped}
    )


def set_aside(directory: Directory) -> Path:
    """Rename a comparison's directory, adding its start time. Raises InfrastructureError."""
    began = slug(directory.read_plan().started)
    for number in range(100):
        place = directory.root.with_name(
            f"{directory.root.name}.{began}{f'.{number}' if number else ''}"
        )
        if not place.exists():
            break
    try:
        directory.root.rename(place)
    except OSError as error:
        raise InfrastructureError(
            f"cannot set {directory.root} aside: {error.strerror}", hint="give another --name"
        ) from error
    return place
