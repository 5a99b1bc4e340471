"""Turns a request into a plan: which stacks are ready, their settings, and all arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    PlannedStack,
    differences,
    now,
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
from trainchaos.harness.compare.play import ComparisonPlayer
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


def prepare(
    asked: CompareOptions,
    stacks: Mapping[str, type[Stack]],
    catalogue: Catalogue,
    directory: Directory,
) -> ComparisonPlayer:
    """Work out the plan, and who plays it. Raises ScenarioError for what cannot be compared or is
    not installed.
    """
    wanted = _entrants(asked, stacks)
    families = [family_of(path, load(path, catalogue).cells) for path in asked.scenarios]
    chosen, pythons, missing = _ready(asked, wanted)
    reference = _reference(chosen, asked.against)
    if asked.same:
        twin = next(one for one in chosen if one.label == reference)
        again = replace(twin, label=f"{reference} {AGAIN}")
        chosen, pythons = [*chosen, again], {**pythons, again.label: pythons[reference]}
    check_families(families, chosen)
    _check_without(asked.without, chosen, families)
    seeds = list(range(asked.seed, asked.seed + asked.repeat))
    as_asked = ("name", "deadline", "same", "price", "currency", "closed", "tune")
    plan = ComparisonPlan(
        **{name: getattr(asked, name) for name in as_asked},
        started=now(),
        argv=list(asked.argv),
        seeds=seeds,
        reference=reference,
        families=[family.planned for family in families],
        stacks=[_planned(one, families, chosen, reference) for one in chosen],
        skipped=missing,
        arms=arms_of(chosen, families, seeds, controls=not asked.tune, without=asked.without),
        provenance=provenance(),
        without=list(asked.without),
    )
    if asked.closed and (broken := rules.broken(plan, families)):
        raise ScenarioError(
            f"--closed: {'; '.join(broken)}",
            hint="docs/benchmark-rules.md; without --closed it is the open division",
        )
    return ComparisonPlayer(
        directory=directory,
        plan=plan,
        entrants={one.label: one for one in chosen},
        families={family.name: family for family in families},
        pythons=pythons,
        catalogue=catalogue,
    )


def _ready(
    asked: CompareOptions, wanted: Sequence[Entrant]
) -> tuple[list[Entrant], dict[str, Path], dict[str, str]]:
    """(entrants that can be played, label -> interpreter, label -> why it is left out)."""
    known = {one.label: environments.of(one.name, type(one.stack)) for one in wanted}
    pythons = {label: one.python for label, one in known.items() if one.ready}
    missing = {
        label: f"it is not installed: chaos stacks install {one.name}"
        for label, one in known.items()
        if not one.ready
    }
    if missing and not asked.skip_missing:
        names = sorted({known[label].name for label in missing})
        raise ScenarioError(
            f"no environment for {', '.join(names)}",
            hint=(
                f"chaos stacks install {' '.join(names)} makes"
                f" {'it' if len(names) == 1 else 'them'}; --skip-missing compares the others"
            ),
        )
    if not pythons:
        raise ScenarioError(
            "no stack is left to compare", hint="chaos stacks list shows what is ready"
        )
    return [one for one in wanted if one.label in pythons], pythons, missing


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
    stack = one.stack
    refusals = {family.name: stack.not_offered(family.name) for family in families}
    installed = environments.of(one.name, type(stack)).versions
    return PlannedStack(
        label=one.label,
        name=one.name,
        settings=one.settings,
        ours=stack.ours,
        title=stack.title,
        chosen={name: _plain(value) for name, value in stack.chosen().items()},
        because=because(one.name, type(stack)) if one.settings == "tuned" else "",
        versions=versions() if stack.requirements is None else dict(installed),
        fidelity=list(stack.fidelity()),
        ranks_beside=max(stack.provisioned(f.job(0, Path())) - f.workload[1] for f in families),
        not_offered={name: why for name, why in refusals.items() if why is not None},
        way=stack.way,
        against=_like(one, chosen, reference),
    )


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def as_planned(plan: ComparisonPlan, *, skip_missing: bool) -> CompareOptions:
    """The options from which a plan was made."""
    again = f"{plan.reference} {AGAIN}"
    labels = [f"{s.name}:{s.settings}" for s in plan.stacks if s.label != again and not plan.tune]
    same = ("name", "deadline", "same", "price", "currency", "argv", "closed", "tune", "without")
    return CompareOptions(
        **{name: getattr(plan, name) for name in same},
        scenarios=[Path(family.path) for family in plan.families],
        stacks=labels,
        settings="default",
        repeat=len(plan.seeds),
        seed=plan.seeds[0],
        against="" if plan.tune else plan.reference.replace(" ", ":"),
        skip_missing=skip_missing or bool(plan.skipped),
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
    place = directory.root.with_name(f"{directory.root.name}.{slug(directory.read_plan().started)}")
    while place.exists():
        place = place.with_name(f"{place.name}.again")
    try:
        directory.root.rename(place)
    except OSError as error:
        raise InfrastructureError(
            f"cannot set {directory.root} aside: {error.strerror}", hint="give another --name"
        ) from error
    return place
