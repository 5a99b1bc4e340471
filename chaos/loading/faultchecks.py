"""Checks one fault of a scenario: kind, parameters, trigger, target, duration, limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Fault, Need, Where
from trainchaos.chaos.loading.explain import valid, validate
from trainchaos.chaos.loading.placechecks import check_excluded, missing, possible
from trainchaos.chaos.scenario.fault import FaultSpec, StepsDuration, TargetSpec
from trainchaos.chaos.scenario.model import BlastRadius, LauncherSpec, WorkloadSpec
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.scenario.verify import complaint
from trainchaos.chaos.schedule import blast
from trainchaos.chaos.schedule.plan import PlannedFault, plan
from trainchaos.chaos.schedule.targeting import PLACELESS, Scope, TargetError, resolve
from trainchaos.chaos.source.diagnostics import Loc, Problem, unknown

_CHOOSING = ("role", "rank", "replica", "node", "rack", "link", "select", "exclude")
_ACTS_ON: Mapping[Where, str] = {
    Where.CHECKPOINT: "checkpoints",
    Where.STORAGE: "the storage of the checkpoints",
    Where.STORE: "the job's store",
    Where.COORDINATOR: "the coordinator",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What surrounds the faults of a cell. None: it has errors of its own, and is not checked
    against.
    """

    kinds: Mapping[str, type[Fault]]
    workload: WorkloadSpec | None
    strategy: BaseModel | None
    launcher: LauncherSpec | None
    offers: frozenset[Any] | None
    costs: Mapping[Any, blast.Privilege] = field(default_factory=lambda: blast.NO_COSTS)
    given: BlastRadius | None
    seed: int = 0

    @property
    def limits(self) -> BlastRadius | None:
        """The blast radius without limits that nothing could keep."""
        given, place = self.given, self.topology
        return given if given is None or place is None else possible(given, place)

    @property
    def spares(self) -> int:
        """Spares that the strategy keeps."""
        return int(getattr(self.strategy, "spares_wanted", 0))

    @property
    def topology(self) -> Topology | None:
        """Where its ranks are."""
        if self.workload is None or self.launcher is None:
            return None
        return self.launcher.topology(self.workload)

    @property
    def scope(self) -> Scope | None:
        """Possible targets."""
        place, limits = self.topology, self.given
        if place is None or self.strategy is None or limits is None:
            return None
        return Scope(
            topology=place,
            spares=self.spares,
            protected=frozenset(limits.protected_ranks),
            sheltered=frozenset(limits.protected_nodes),
        )


def check_fault(raw: Any, loc: Loc, setting: Setting) -> Iterator[Problem]:
    """All problems of one fault (its plain values) beyond those its model reports."""
    if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
        return
    name = raw["kind"]
    if name not in setting.kinds:
        yield Problem((*loc, "kind"), unknown("fault kind", name, setting.kinds))
        return
    kind = setting.kinds[name]
    params = raw.get("params", {})
    needs, made = kind.needs, None
    if isinstance(params, dict):
        made, problems = validate(kind, params, (*loc, "params"))
        yield from problems
        needs = made.wants() if made is not None else needs
    yield from _abilities(name, needs, loc, setting)
    spec = valid(FaultSpec, raw)
    if spec is not None:
        yield from _duration(spec, kind, loc)
        yield from _phase(spec, kind, loc, setting.workload)
        yield from _verify(spec, loc)
        next_save = made is not None and made.hits_next_save
        problems = [*_target_keys(spec, kind, loc, setting, next_save=next_save)]
        if next_save and spec.target.rank is not None:
            problems += _writer(spec, loc, setting)
        if setting.topology is not None:
            yield from check_excluded(
                spec.target.exclude, setting.topology, (*loc, "target", "exclude")
            )
        yield from problems or _target(spec, kind, loc, setting)


def _abilities(name: str, needs: frozenset[Need], loc: Loc, setting: Setting) -> Iterator[Problem]:
    """What the launcher must offer, and what the blast radius must allow."""
    if setting.offers is not None and setting.launcher is not None:
        for need in sorted(needs - setting.offers):
            message = (
                f"{name} needs {need.value}, which launcher {setting.launcher.kind} does not offer"
            )
            yield Problem((*loc, "kind"), message)
    if setting.limits is not None and not blast.may_need(setting.limits, needs, setting.costs):
        message = (
            f"{name} needs privilege {blast.privilege(needs, setting.costs)}, "
            f"and blast_radius allows {setting.limits.privileges}"
        )
        yield Problem((*loc, "kind"), message)


def _duration(spec: FaultSpec, kind: type[Fault], loc: Loc) -> Iterator[Problem]:
    if kind.lasting and spec.duration is None:
        yield Problem(
            (*loc, "kind"), f"{spec.kind} lasts, so it needs a duration: 2s or {{steps: 20}}"
        )
    if not (kind.lasting or kind.may_last) and spec.duration is not None:
        message = f"{spec.kind} is over once done, so it takes no duration"
        yield Problem((*loc, "duration"), message, on_key=True)
    if not isinstance(spec.duration, StepsDuration | None) and spec.duration <= 0:
        yield Problem((*loc, "duration"), "a duration must be longer than 0")


def _phase(
    spec: FaultSpec, kind: type[Fault], loc: Loc, workload: WorkloadSpec | None
) -> Iterator[Problem]:
    phase = spec.at.phase
    if phase not in (None, "any") and kind.phases and phase not in kind.phases:
        message = f"{spec.kind} cannot act in phase {phase!r}; it can in {', '.join(kind.phases)}"
        yield Problem((*loc, "at", "phase"), message)
    every = workload.checkpoint.steps if workload and workload.command is None else 1
    if phase == "checkpoint" and spec.at.all_steps() and every is None and workload is not None:
        message = (
            f"checkpoints are made every {workload.checkpoint.every} here, at steps not"
            " known beforehand: for phase checkpoint use a number of steps as"
            " workload.checkpoint.every"
        )
        yield Problem((*loc, "at", "phase"), message)
    elif phase == "checkpoint" and every and any(step % every for step in spec.at.all_steps()):
        message = (
            f"a checkpoint is saved each {every} steps, so phase checkpoint needs a multiple of"
            f" {every}"
        )
        yield Problem((*loc, "at", "phase"), message)


def _verify(spec: FaultSpec, loc: Loc) -> Iterator[Problem]:
    for name, wanted in spec.verify.items():
        if said := complaint(wanted):
            yield Problem((*loc, "verify", name), said)


def _target_keys(
    spec: FaultSpec, kind: type[Fault], loc: Loc, setting: Setting, *, next_save: bool
) -> Iterator[Problem]:
    """Keys of the target that the kind, or another key, rules out. ``next_save``: the fault acts on
    the next saving rank.
    """
    target, at = spec.target, (*loc, "target")
    given = target.model_fields_set
    where = kind.where
    if where in PLACELESS:
        if where == Where.CHECKPOINT and target.checkpoint is None:
            yield Problem(at, f"{spec.kind} acts on checkpoints: target {{checkpoint: latest}}")
        for name in _CHOOSING:
            named = (name == "role" and target.role == where.value) or (
                name == "rank" and next_save
            )
            if name in given and not named:
                message = f"{spec.kind} acts on {_ACTS_ON[where]}, so its target has no {name}"
                yield Problem((*at, name), message, on_key=True)
    if where != Where.CHECKPOINT and target.checkpoint is not None:
        message = f"{spec.kind} does not act on checkpoints; target a rank, or a role"
        yield Problem((*at, "checkpoint"), message, on_key=True)
    if where in PLACELESS:
        return
    if target.role == "launcher" and setting.strategy is not None:
        message = "only a command has a launcher: target a worker, or use coordinator-kill"
        yield Problem((*at, "role"), message)
    if target.role == "coordinator":
        message = f"{spec.kind} does not act on the coordinator; coordinator-kill does"
        yield Problem((*at, "role"), message)
    if target.link is not None and where != Where.LINK:
        yield Problem((*at, "link"), f"{spec.kind} does not act on links", on_key=True)
    yield from _names_one(target, at, setting.topology.shards if setting.topology else 1)
    if where in (Where.RANK, Where.LINK) and target.role == "spare":
        doing = (
            "acts inside a training rank" if where == Where.RANK else "acts on links between ranks"
        )
        yield Problem((*at, "role"), f"{spec.kind} {doing}, and a spare does not train")
    if target.role == "spare" and setting.strategy is not None and not setting.spares:
        yield Problem(
            (*at, "role"), "the recovery strategy has no spares: target a worker, or use hot-spare"
        )


def _names_one(target: TargetSpec, at: Loc, shards: int) -> Iterator[Problem]:
    named = [name for name in ("rank", "replica", "link") if getattr(target, name) is not None]
    for name in named[1:]:
        yield Problem((*at, name), f"give a {named[0]} or a {name}, not both", on_key=True)
    for name in named[:1]:
        for other in ("select", "node", "rack", "exclude"):
            if name == "replica" and shards > 1 and other in ("select", "exclude"):
                continue  # among its ranks
            if other in target.model_fields_set:
                what = "select" if other == "select" else f"narrow with {other}"
                message = f"{name} names one target, so there is nothing to {what}"
                yield Problem((*at, other), message, on_key=True)
        if target.role in ("spare", "launcher"):
            more = " with select" if target.role == "spare" else " alone"
            message = f"a {target.role} has no {name}; use role: {target.role}{more}"
            yield Problem((*at, name), message, on_key=True)


def _target(spec: FaultSpec, kind: type[Fault], loc: Loc, setting: Setting) -> Iterator[Problem]:
    """Whether the target has at least one candidate, and whether the blast radius allows it."""
    scope = setting.scope
    if scope is None or isinstance(spec.at.trace, str):
        return
    at = (*loc, "target")
    try:
        resolve(spec, kind, scope, setting.seed)
    except TargetError as error:
        yield Problem((*at, *error.part), _in_words(spec.target, error, scope))
        return
    if kind.on_saves:
        yield from _saver(spec, kind, at, scope, setting)
    limits = setting.limits
    if limits is None or scope is None:
        return
    (planned,) = plan([spec], setting.kinds, scope, setting.seed)
    hit = blast.ranks_hit(planned, kind.where, scope.topology)
    healthy = blast.Damage(active=0, healthy=scope.topology.replicas)
    disables = not kind.harmless and kind.where != Where.LINK
    if reason := blast.refusal(
        limits,
        healthy,
        ranks=hit,
        disables=disables,
        shards=scope.topology.shards,
        nodes=blast.nodes_hit(planned, kind.where, scope.topology),
        whole=planned.nodes,
    ):
        yield Problem((*at, "select"), f"{spec.kind} would hit {len(hit)} at once: {reason}")


def _saver(
    spec: FaultSpec, kind: type[Fault], at: Loc, scope: Scope, setting: Setting
) -> Iterator[Problem]:
    """A fault of saves must hit a saving rank; a random target would mostly hit another."""
    savers = set(range(setting.workload.savers if setting.workload else 1))
    everybody = spec.model_copy(update={"target": spec.target.model_copy(update={"select": "all"})})
    hit, all_of_them = (
        set(resolve(each, kind, scope, setting.seed).ranks) for each in (spec, everybody)
    )
    if all_of_them <= savers or (hit == all_of_them and hit & savers):
        return
    named = next(
        (key for key in ("rank", "replica") if getattr(spec.target, key) is not None), None
    )
    yield Problem(
        (*at, *([named] if named else [])), f"{spec.kind} acts on saves, and {_who(savers)}"
    )


def _writer(spec: FaultSpec, loc: Loc, setting: Setting) -> Iterator[Problem]:
    """A rank whose next save is broken must write a part; only rank 0 renames the checkpoint."""
    rank, savers = spec.target.rank, set(range(setting.workload.savers if setting.workload else 1))
    if rank not in savers:
        yield Problem((*loc, "target", "rank"), f"{spec.kind} acts on saves, and {_who(savers)}")
    elif rank and spec.params.get("stage") == "renamed":
        message = (
            f"rank {rank} writes a part, which rank 0 gives its name: use stage rename, or rank: 0"
        )
        yield Problem((*loc, "params", "stage"), message)


def _who(savers: set[int]) -> str:
    if len(savers) == 1:
        return "rank 0 alone saves: target {rank: 0}"
    return f"ranks 0 to {max(savers)} alone save: target one of them"


def _in_words(target: TargetSpec, error: TargetError, scope: Scope) -> str:
    """The error's text; for an unknown rank or replica it says which exist."""
    for name in ("rank", "replica"):
        if error.part == (name,):
            place = scope.topology
            return missing(
                name, getattr(target, name), place.ranks if name == "rank" else place.replicas
            )
    return str(error)


def check_together(faults: Sequence[Any], setting: Setting) -> Iterator[Problem]:
    """Faults that are due at the same step, and together break the blast radius."""
    scope, limits = setting.scope, setting.limits
    specs = [valid(FaultSpec, raw) for raw in faults]
    usable = [s for s in specs if s and s.kind in setting.kinds and not isinstance(s.at.trace, str)]
    if scope is None or limits is None or len(usable) != len(specs):
        return
    try:
        planned = plan(usable, setting.kinds, scope, setting.seed)
    except ScenarioError:
        return  # an empty target is reported at its own place
    places = {fault.id: index for index, fault in enumerate(usable)}
    said: set[str] = set()
    for step, active in blast.together(planned):
        last = active[-1]
        reason = _too_much(active, setting, scope)
        if reason and last.id not in said:
            said.add(last.id)
            names = ", ".join(fault.id for fault in active)
            message = f"at step {step} {len(active)} faults are active ({names}): {reason}"
            yield Problem(("faults", places[last.id], "at"), message)


def _too_much(active: Sequence[PlannedFault], setting: Setting, scope: Scope) -> str | None:
    assert setting.limits is not None
    hit: set[int] = set()
    whole: set[int] = set()
    for fault in active:
        kind = setting.kinds[fault.kind]
        if not kind.harmless and kind.where in (Where.PROCESS, Where.RANK, Where.NODE):
            hit |= blast.ranks_hit(fault, kind.where, scope.topology)
            whole |= set(fault.nodes)
    before = blast.Damage(active=len(active) - 1, healthy=scope.topology.replicas)
    shards = scope.topology.shards
    return blast.refusal(
        setting.limits, before, ranks=hit, disables=bool(hit or whole), shards=shards, whole=whole
    )
