"""The ways to answer the loss of ranks, each with its price in lost rank-seconds. Pure.

price = stall x world + steps to redo x step time x world + capacity that is missing x time until it
is back. This is the accounting of goodput (docs/metrics.md: useful time x ranks / wall time x
ranks), so that the cheapest option is the one that lowers goodput least. The interrupted step is
done again under every option and is left out; so is a further failure meanwhile. Times come from
``Costs``; nothing is assumed of the machine. The same terms for a restart from a checkpoint (stall,
rework) are those of J. T. Daly (2006, see ``recovery.policy.interval``), where capacity is never
missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.costs import Priced
from trainchaos.recovery.policy.strategy import (
    Action,
    Cause,
    ClusterView,
    Failure,
    Form,
    GiveUp,
    Health,
    Kill,
    ProcessView,
    Spawn,
    StateFrom,
)

SETTLE_S = 2.0
"""A replacement is started after the smaller generation's first step, but no later than this
(``recovery.supervise.supervision.Timing.settle_timeout_s``).
"""
SWAP, WAIT, DROP = "swap", "wait", "drop"
HERE, ANEW, SMALLER = "restart-here", "restart-anew", "restart-smaller"
INEXACT = (DROP, SMALLER)
"""Options with fewer ranks: floating-point sums come in another order."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """``actions``: that carry it out; ``why``: in words."""

    priced: Priced
    actions: tuple[Action, ...]
    why: str

    @property
    def name(self) -> str:
        """Of the option."""
        return self.priced.name


def cheapest_first(view: ClusterView, *, shrinks: bool) -> tuple[Option, ...]:
    """All that can be done about lost or distrusted members, cheapest first. ``shrinks``: the
    global batch follows the world (``batch: shrink``).

    Empty only where a step that was refused has been done again after rollbacks in vain: then
    ``fallback.restart`` says so.
    """
    found = [*_with_state(view, shrinks=shrinks), *_restarts(view, shrinks=shrinks)]
    if view.no_place:
        found = [each for each in found if not _starts(each)] or found
    return tuple(sorted(found, key=lambda option: option.priced.rank_s))


def _starts(option: Option) -> bool:
    return any(isinstance(action, Spawn) for action in option.actions)


def to_the_loss(view: ClusterView, names: Iterable[str], *, shrinks: bool) -> tuple[Option, ...]:
    """The answers to the loss of these members, if they died now, cheapest first."""
    gone = set(names)
    processes = tuple(_if_lost(process, gone, view.members) for process in view.processes)
    step = max((p.step for p in processes), default=0) + 1
    failures = tuple(
        Failure(process=p.name, rank=p.rank, cause=Cause.EXIT, step=step, time_s=view.now_s)
        for p in processes
        if p.name in gone
    )
    after = replace(view, processes=processes, failures=failures)
    return cheapest_first(after, shrinks=shrinks)


def _if_lost(process: ProcessView, gone: set[str], members: Sequence[str]) -> ProcessView:
    if process.name in gone:
        return process._replace(health=Health.DEAD)
    if process.name in members and process.health is Health.TRAINING:
        return process._replace(health=Health.PARKED, valid=True)
    return process


def joining(view: ClusterView) -> float:
    """Rank-seconds for which all ranks stand still when ready processes get a peer's state."""
    return view.world * (view.costs.form_s.value + view.costs.copy_s.value)


def missing(view: ClusterView, ranks: int, seconds: float, *, shrinks: bool) -> float:
    """Rank-seconds of work that a smaller world does not do in that time."""
    if shrinks:
        return (view.world - ranks) * seconds
    full, fewer = view.costs.step_with(view.world), view.costs.step_with(ranks)
    return view.world * seconds * max(0.0, 1 - full / fewer)


def _short(
    view: ClusterView,
    ranks: int,
    *,
    shrinks: bool,
    used: Sequence[str] = (),
    waited_s: float = 0.0,
) -> dict[str, float]:
    """Rank-seconds that are missing until the world is full again, and those of joining it; nothing
    where it is full.

    Whoever is on its way counts from now on, except those ``used`` already, ``waited_s`` of their
    time being over; another one is started once the smaller world has made a step. They join at a
    step boundary; a job that ends before goes on without them.
    """
    costs = view.costs
    if ranks >= view.world:
        return {}
    step_s = costs.step_with(ranks, shrinks=shrinks)
    coming = [p.name for p in view.starting if p.name not in used][: view.world - ranks]
    ready_s = min(step_s, SETTLE_S) + costs.start_s.value
    if len(coming) == view.world - ranks:
        ready_s = max(0.0, _until_ready(view, coming) - waited_s)
    steps = max(1, math.ceil(ready_s / step_s))
    left = costs.left()
    back = joining(view)
    if view.no_place or (left is not None and left <= steps):
        steps = max(1, left if left is not None else math.ceil(costs.mtbf_s / step_s))
        back = 0.0
    return {"missing": missing(view, ranks, steps * step_s, shrinks=shrinks), "join": back}


def _with_state(view: ClusterView, *, shrinks: bool) -> Iterable[Option]:
    """Options that keep a state some process holds: swap, wait, drop."""
    size, costs = len(view.members), view.costs
    lost = fallback.lost(view)
    fresh = tuple(p.name for p in view.fresh)
    form = fallback.fill(view, fresh)
    if form is None or not lost:
        return
    who = ", ".join(lost)
    stall = {"form": view.world * costs.form_s.value, "copy": view.world * costs.copy_s.value}
    if len(form.members) == size and form.members != view.members:
        parts = {**stall, **_short(view, size, shrinks=shrinks)}
        yield _option(SWAP, parts, (form,), f"ready processes take the places of {who}")
    elif len(form.members) < size:
        yield from _wait(view, fresh, stall, who, shrinks=shrinks)
    alone = form if len(form.members) < size else fallback.fill(view, ())
    if alone is not None and len(alone.members) < size:
        parts = {"form": stall["form"], **_short(view, len(alone.members), shrinks=shrinks)}
        why = f"{len(alone.members)} of {view.world} ranks go on without {who}"
        yield _option(DROP, parts, (alone,), why)


def _wait(
    view: ClusterView,
    fresh: tuple[str, ...],
    stall: dict[str, float],
    who: str,
    *,
    shrinks: bool,
) -> Iterable[Option]:
    """All stand still until processes have started that take the lost places."""
    size = len(view.members)
    coming = tuple(p.name for p in view.starting if not p.noticed and not p.warned)
    new = () if view.no_place else tuple(f"new-{n}" for n in range(size))
    form = fallback.fill(view, (*fresh, *coming, *new))
    if form is None or len(form.members) < size:
        return
    used = [name for name in coming if name in form.members]
    spawns = tuple(Spawn(role="worker") for name in form.members if name.startswith("new-"))
    seconds = view.costs.start_s.value if spawns else _until_ready(view, used)
    rest = _short(view, size, shrinks=shrinks, used=used, waited_s=seconds)
    parts = {"start": view.world * seconds, **stall, **rest}
    awaited = f"{len(used)} on their way" if used else f"{len(spawns)} started now"
    why = f"all wait for processes in the places of {who}: {awaited}"
    yield _option(WAIT, parts, (*spawns, replace(form, refill=tuple(used))), why)


def joins_now(view: ClusterView, ranks: int, *, shrinks: bool) -> bool:
    """Whether ready processes, with whom there are ``ranks``, are let in before the ones that are
    on their way: if what they do meanwhile is more than joining once more costs.
    """
    if not view.starting:
        return True
    seconds = _until_ready(view, [p.name for p in view.starting])
    now, then = (
        missing(view, size, seconds, shrinks=shrinks) for size in (len(view.members), ranks)
    )
    return now - then > joining(view)


def _until_ready(view: ClusterView, names: Sequence[str]) -> float:
    """Seconds until the last of these starting processes is ready. One that is late already is
    given as long again as it has taken: of what takes longer than usual nothing else is known.
    """
    start_s, left_s = view.costs.start_s.value, 0.0
    for name in names:
        age_s = view.process(name).age_s
        left_s = max(left_s, start_s - age_s if age_s < start_s else age_s)
    return left_s


def _restarts(view: ClusterView, *, shrinks: bool) -> Iterable[Option]:
    """Options that go back to a checkpoint: in the processes that are left, in new ones, or in
    fewer.
    """
    costs, world = view.costs, view.world
    redo = max(0, costs.committed - max(0, view.saved_step)) * costs.step_with(world) * world
    stall = {"form": world * costs.form_s.value, "restore": world * costs.restore_s.value}
    decided = fallback.restart(view, why="", without=_unfit(view))
    origin = fallback.origin(view)
    if any(isinstance(action, GiveUp) for action in decided.actions):
        return
    form = next(action for action in decided.actions if isinstance(action, Form))
    spawns = any(isinstance(action, Spawn) for action in decided.actions)
    coming = [p.name for p in view.starting if p.name in form.members]
    start_s = costs.start_s.value if spawns else _until_ready(view, coming)
    parts = {"start": world * start_s, **stall, "redo": redo}
    yield _option(HERE, parts, decided.actions, origin)
    if not view.no_place:
        # the survivors end, and whatever is wrong with them or their places ends with them
        parts = {"start": world * costs.start_s.value, **stall, "redo": redo}
        yield _option(ANEW, parts, _anew(view), f"all in new processes: {origin}")
        return
    if not spawns:
        return
    unfit = _unfit(view)
    able = [p for p in view.survivors if not p.noticed and p.name not in unfit]
    fresh = [p.name for p in view.fresh]
    ranks = (len(able) + len(fresh)) // view.shards * view.shards
    if view.shards > 1 or not view.saved or not ranks > 0:
        return  # a process keeps its shard for life, and rank 0 of a job begun anew is a fresh one
    members = (*fresh, *(p.name for p in able))[:ranks]
    parts = {**stall, "redo": redo, **_short(view, ranks, shrinks=shrinks)}
    smaller = Form(members=members, state=StateFrom.CHECKPOINT)
    yield _option(SMALLER, parts, (smaller,), f"{ranks} of {world} ranks: {origin}")


def _unfit(view: ClusterView) -> tuple[str, ...]:
    """Survivors whose process a restart does not keep: those blamed for wrong values, if others are
    not. This is asked for only where a refill in the same process has not helped.
    """
    blamed = set(fallback.suspects(view))
    return tuple(blamed) if any(p.name not in blamed for p in view.survivors) else ()


def _anew(view: ClusterView) -> tuple[Action, ...]:
    """As ``checkpoint-restart``: end everything, start a world, restore."""
    kills = (Kill(process=p.name) for p in view.processes if p.health is not Health.DEAD)
    spawns = (Spawn(role="worker") for _ in range(view.world))
    members = tuple(f"new-{number}" for number in range(view.world))
    return (*kills, *spawns, Form(members=members, state=StateFrom.CHECKPOINT))


def _option(name: str, parts: dict[str, float], actions: tuple[Action, ...], why: str) -> Option:
    priced = Priced(name=name, rank_s=sum(parts.values()), parts=parts)
    return Option(priced=priced, actions=actions, why=why)
