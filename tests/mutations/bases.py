"""Whole good arms, a pair of each kind of run: played on the simulator when first asked for, or
stored.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tests.mutations import recorded
from tests.mutations.tape import Mutation, Tape
from tests.support.arms import EXACT
from tests.support.search.simulate import IN_MEMORY, cell_of, play
from trainchaos.chaos.events.log import Event, Log, read_actor
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.harness.judge.checkers import Evidence, check_all
from trainchaos.harness.judge.evidence.expected import Expected, expected_of
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.launchers.sim import Sim

ARMS: tuple[Literal["faulted", "control"], ...] = ("faulted", "control")
SEED, STEPS = 17, 40
EVERY = 8
POINT = {"step": 21, "phase": "backward"}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A faulted arm and its control, as files hold them. ``alone``: the control is a run of its
    own, of another cell, which no checker sets against the faulted arm (a comparison does that
    later).
    """

    cell: Cell
    faulted: Mapping[str, tuple[Event, ...]]
    control: Mapping[str, tuple[Event, ...]]
    seed: int = SEED
    alone: Cell | None = None


def fault(kind: str, rank: int | None = 2, **more: Any) -> dict[str, Any]:
    """A fault on a rank in the middle of the run."""
    target = {} if rank is None else {"target": {"rank": rank}}
    return {"id": "fault", "kind": kind, "at": POINT, **target, **more}


def _simulated(
    recovery: Any, *faults: dict[str, Any], sim: Sim | None = None, **more: Any
) -> Callable[[], Base]:
    def make() -> Base:
        cell = cell_of(recovery, list(faults), steps=STEPS, every=EVERY, **more)
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            arms = [play(cell, Path(folder) / arm, seed=SEED, arm=arm, sim=sim) for arm in ARMS]
            faulted, control = (_files(arm.directory) for arm in arms)
        return Base(cell=cell, faulted=faulted, control=control)

    return make


def _files(directory: Path) -> dict[str, tuple[Event, ...]]:
    return {path.stem: read_actor(path).events for path in sorted(directory.glob("*.jsonl"))}


def _recorded(name: str) -> Callable[[], Base]:
    def make() -> Base:
        resolved, other = (recorded.resolved_of(name, arm) for arm in ARMS)
        (cell,), (control,) = resolved.cells, other.cells
        faulted, unfaulted = (recorded.events_of(name, arm) for arm in ARMS)
        return Base(
            cell=cell,
            faulted=faulted,
            control=unfaulted,
            seed=resolved.seed,
            alone=control if cell.scenario.baseline == "none" else None,
        )

    return make


SPARE = {"strategy": "hot-spare", "spares": 1}
KILL = fault("process-kill")
ROT = fault("checkpoint-corrupt", None, id="rot", target={"checkpoint": "latest"})
SLOW = fault(
    "straggler",
    params={"factor": 3.0},
    duration={"steps": 6},
    expect={"outcome": "masked", "blame": "none"},
)
EARLY = {**KILL, "at": {"step": 9, "phase": "backward"}}
SLOW_STEPS, SLOW_TO_START = Sim(step_ms=300), Sim(step_ms=300, spawn_ms=60_000)
TWO_REPLICAS = {"hsdp": {"replicas": 2, "shards": 2}}
MAKERS: Mapping[str, Callable[[], Base]] = {
    "drop-replica": _simulated("drop-replica", KILL),
    "hot-spare": _simulated(SPARE, KILL),
    "checkpoint-restart": _simulated("checkpoint-restart", KILL),
    "memory": _simulated("checkpoint-restart", KILL, memory=True),
    "takeover": _simulated(
        SPARE, fault("coordinator-kill", None, id="lost"), {**KILL, "at": {"step": 30}}
    ),
    "steady": _simulated(SPARE, KILL, steady_state=[{"check": "committed_steps >= 5"}]),
    "hang": _simulated(SPARE, fault("process-stop")),
    "notice": _simulated(SPARE, fault("process-term", params={"grace_s": 5})),
    "nan": _simulated(SPARE, fault("tensor-corrupt", params={"op": "nan"})),
    "straggler": _simulated("drop-replica", SLOW),
    "rot": _simulated("checkpoint-restart", ROT, {**KILL, "at": {"step": 23}}),
    "node": _simulated(
        "drop-replica",
        fault("node-kill", None, target={"node": 1}),
        launcher={"kind": "sim", "nodes": 2},
    ),
    "exception": _simulated(SPARE, fault("exception")),
    "full disk": _simulated(
        "drop-replica", fault("read-only", None, duration={"steps": 8}, at={"step": 14})
    ),
    "deadlock": _simulated(SPARE, fault("gil-deadlock")),
    "two kills": _simulated(
        "drop-replica", KILL, fault("process-kill", 1, id="second", at={"step": 31})
    ),
    "ends small": _simulated("drop-replica", EARLY, sim=SLOW_TO_START),
    "spare used": _simulated(SPARE, EARLY, sim=SLOW_STEPS),
    "stays small": _simulated({"strategy": "drop-replica", "rejoin": False}, EARLY, sim=SLOW_STEPS),
    "ends a replica short": _simulated(
        "drop-replica", EARLY, sim=SLOW_TO_START, parallelism=TWO_REPLICAS
    ),
    "two acts": _simulated(
        "checkpoint-restart",
        fault("process-kill", None, target={"select": {"count": 2}}, at={"steps": [14, 30]}),
    ),
    "few checks": _simulated("drop-replica", KILL, invariants=["full-strength"]),
    "unheld": _simulated(
        SPARE,
        {**KILL, "at": {"event": "checkpoint_committed", "nth": 2}},
        fault("process-kill", 1, id="second", at={"time": 1.2}),
    ),
    "live parts": _simulated(
        {"strategy": "hot-spare", "sync": "live", "spares": 2},
        fault("process-kill", 0, at={"step": 9, "phase": "backward"}),
        fault("process-kill", 1, id="second", at={"step": 25, "phase": "forward"}),
        parallelism=TWO_REPLICAS,
    ),
    "script": _recorded("script"),
    "agents": _recorded("agents"),
    "compare": _recorded("compare"),
}
"""``ends small``: whoever is started in place of the lost is not ready before the end, ``stays
small``: nobody is; ``spare used``: another is started in its place; ``live parts``: each spare
follows a part of the model, as in ``scenarios/parallel/hsdp-live.yaml``; ``few checks``: a scenario
that lists its invariants; ``script``: a command that is started again after a kill, whose ranks
report through a beacon; ``agents``: nodes with agents, one of which is lost while a third has a
spare; ``compare``: two runs of a comparison, of torchrun.
"""


@cache
def base(name: str) -> Base:
    """One of them."""
    return MAKERS[name]()


def evidence_of(name: str, arm: str, log: Log | None = None) -> Evidence:
    """What a checker gets of one arm of a base. ``log``: instead of its own."""
    made = base(name)
    own = log or Tape.of(getattr(made, arm)).log()
    if arm == "control":
        return _control(made, own)
    paired = () if made.alone else (Tape.of(made.control).log(),)
    return Evidence(
        arm="faulted",
        cell=made.cell,
        log=own,
        control=next(iter(paired), None),
        controls=paired,
        exact=EXACT,
        expected=_expected(made, made.cell, "faulted"),
    )


@cache
def _controls_findings(name: str) -> dict[str, Finding]:
    made = base(name)
    return check_all(_control(made, Tape.of(made.control).log()))


def _control(made: Base, log: Log) -> Evidence:
    if made.alone is not None:
        expected = _expected(made, made.alone, "faulted")
        return Evidence(arm="faulted", cell=made.alone, log=log, exact=EXACT, expected=expected)
    return Evidence(
        arm="control",
        cell=made.cell,
        log=log,
        controls=(log,),
        exact=EXACT,
        expected=_expected(made, made.cell, "control"),
    )


def _expected(made: Base, cell: Cell, arm: str) -> Expected:
    resolved = ResolvedRun(
        run_id="", source="", started="", reproduce="", seed=made.seed, cells=[cell]
    )
    return expected_of(resolved, cell, 0, arm)


def judged(name: str, mutation: Mutation | None = None) -> dict[str, Finding]:
    """What all checkers say of both arms of a base, changed by a mutation: the worst word
    of each.
    """
    made = base(name)
    control = Tape.of(made.control)
    faulted = Tape.of(made.faulted, control)
    before = copy.deepcopy(control.rows)
    if mutation is not None:
        mutation.change(faulted)
    paired = control.log()
    found = check_all(
        Evidence(
            arm="faulted",
            cell=made.cell,
            log=faulted.log(),
            control=None if made.alone else paired,
            controls=() if made.alone else (paired,),
            exact=EXACT,
            expected=_expected(made, made.cell, "faulted"),
        )
    )
    others = (
        _controls_findings(name) if control.rows == before else check_all(_control(made, paired))
    )
    for checker, finding in others.items():
        mine = found.get(checker)
        if mine is None or _RANK[finding.verdict] > _RANK[mine.verdict]:
            found[checker] = finding
    return found


_RANK = {"pass": 0, "inconclusive": 1, "fail": 2}
