"""An exam: questions drawn from a seed, played, and kept as a paper and its key.

A question is one run, of a kind of fault in one of its variants (``exam.toml``) or of nothing. The
paper has the log of each without its fault events; the key says what was done.
"""

from __future__ import annotations

import random
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.harness import Tree, play
from trainchaos.chaos import plugins
from trainchaos.chaos.errors import EXIT_USAGE, ChaosError
from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log, read_log
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.files import write_whole
from trainchaos.chaos.scenario.fault import PHASES
from trainchaos.harness.explain.diagnosis import CauseClass, Layer
from trainchaos.harness.explain.strip import strip
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.recovery.playbook.entry import Action

M = TypeVar("M", bound=BaseModel)

EARLIEST, LATEST = 22, 38
"""Steps at which a fault strikes: after the first checkpoint (step 20, or 10), and early enough
that it lasts and is recovered from before the end.
"""
SAVED_AT = 40
"""A step after which every job here saves, for faults that strike in a save."""
UNFAULTED = "unfaulted"
"""The kind of a question in which nothing happens."""
KILL = "kill"
"""The fault that makes another one show."""
STRATEGIES = ("hot-spare", "drop-replica", "checkpoint-restart")


class ExamError(ChaosError):
    """An exam that cannot be made, or a file that cannot be used. Exit code 2."""

    exit_code = EXIT_USAGE


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Truth(_Model):
    """What may be said of a fault; ``exam.toml`` says what each field means."""

    causes: tuple[CauseClass, ...]
    layers: tuple[Layer, ...]
    places: tuple[Literal["rank", "node", "member", "none", "any"], ...]
    actions: tuple[Action, ...]
    trace: Literal["events", "values", "none"] = "events"
    why: str = ""
    instead: dict[str, str] = Field(default={}, exclude=True)


class Variant(_Model):
    """One way to ask for a kind; ``exam.toml`` says what each field means."""

    truth: str
    params: Tree = {}
    target: Tree | None = None
    duration: Any = None
    at: Tree | None = None
    workload: Tree = {}
    launcher: Tree = {}
    recovery: Tree = {}
    kill: int | None = None
    strategies: tuple[str, ...] = STRATEGIES


class Catalogue(_Model):
    """``exam.toml``: truths by name, the job, variants by kind, and what ``nvrx`` says in ours."""

    truth: dict[str, Truth]
    job: Tree
    kind: dict[str, list[Variant]]
    nvrx: dict[str, tuple[CauseClass, Layer]]


CATALOGUE = Catalogue.model_validate(
    tomllib.loads(Path(__file__).with_name("exam.toml").read_text(encoding="utf-8"))
)


class Question(_Model):
    """One run of an exam. ``truth``: name of that of its fault; ``tree``: its scenario."""

    id: str
    kind: str
    strategy: str
    truth: str
    tree: Tree


class Incident(_Model):
    """One injected fault. ``at_s``: of its first hit, since the run began; ``members``: ranks of
    processes that were hit with their node.
    """

    fault: str
    kind: str
    at_s: float
    step: int | None
    phase: str | None
    truth: Truth
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    members: tuple[int, ...]


class Keyed(_Model):
    """What really happened in a question."""

    id: str
    kind: str
    strategy: str
    incidents: list[Incident]


class Key(_Model):
    """The key to a paper. ``left_out``: question -> why it does not count."""

    version: Literal[2] = 2
    launcher: str
    seed: int
    questions: list[Keyed]
    left_out: dict[str, str]


def questions(
    names: Sequence[str],
    strategies: Sequence[str],
    *,
    runs: int,
    seed: int,
    launcher: str = "sim",
    unfaulted: int = 0,
) -> list[Question]:
    """Of each kind of ``names``, each variant and each strategy ``runs`` questions at places drawn
    from the seed; then ``unfaulted`` runs. In an order drawn from the seed, so that numbers tell
    nothing. Raises ExamError.
    """
    known = plugins.load(plugins.FAULTS, Fault)
    for what, asked, there in (
        ("kind", names, known.keys() & CATALOGUE.kind),
        ("strategy", strategies, STRATEGIES),
    ):
        if wrong := [name for name in asked if name not in there]:
            raise ExamError(
                f"unknown {what} {wrong[0]!r}", hint=f"one of {', '.join(sorted(there))}"
            )
    rng = random.Random(f"exam {seed}")
    made: list[tuple[str, str, str, Tree]] = []
    for name in names:
        for variant in CATALOGUE.kind[name]:
            for strategy in strategies:
                for _ in range(runs if strategy in variant.strategies else 0):
                    job = _job(variant, strategy, launcher, rng)
                    tree = _faulted(name, known[name], variant, job, rng)
                    made.append((name, strategy, variant.truth, tree))
    for number in range(unfaulted):
        strategy = strategies[number % len(strategies)]
        made.append((UNFAULTED, strategy, "", _job(Variant(truth=""), strategy, launcher, rng)))
    rng.shuffle(made)
    return [
        Question(id=f"q{number:04}", kind=kind, strategy=strategy, truth=truth, tree=tree)
        for number, (kind, strategy, truth, tree) in enumerate(made, start=1)
    ]


def _job(variant: Variant, strategy: str, launcher: str, rng: random.Random) -> Tree:
    return {
        **CATALOGUE.job,
        "seed": rng.randrange(1_000_000),
        "launcher": {"kind": launcher, "nodes": 2, **variant.launcher},
        "workload": {**CATALOGUE.job["workload"], **variant.workload},
        "recovery": {"strategy": strategy, **variant.recovery},
        "faults": [],
    }


def _faulted(name: str, kind: type[Fault], variant: Variant, job: Tree, rng: random.Random) -> Tree:
    """The job with its fault, and the kill that makes it show."""
    ranks: int = job["workload"]["ranks"]
    step, rank = rng.randint(EARLIEST, LATEST), rng.randrange(ranks)
    target = variant.target
    if target is None:
        target = _target(kind, rank, job["launcher"]["nodes"], rng)
    at: Tree = dict(variant.at or {"step": step})
    if "step" in at and kind.where in (Where.RANK, Where.PROCESS) and kind.role != "spare":
        at["phase"] = rng.choice(kind.phases or [one for one in PHASES if one != "any"])
        if at["phase"] == "checkpoint":
            at["step"] = SAVED_AT
    given = {"params": variant.params, "target": target, "duration": variant.duration, "at": at}
    given = {name: value for name, value in given.items() if value not in ({}, None)}
    faults: list[Tree] = [{"id": "asked", "kind": name, **given}]
    if variant.kill is not None:
        other = {"rank": (rank + 1 + rng.randrange(ranks - 1)) % ranks}
        later = {"step": (step if variant.at is None else 25) + variant.kill}
        faults.append({"id": KILL, "kind": "process-kill", "target": other, "at": later})
    return {**job, "faults": faults}


def _target(kind: type[Fault], rank: int, nodes: int, rng: random.Random) -> Tree:
    if kind.where is Where.NODE:
        return {"node": rng.randrange(nodes)}
    places = (Where.PROCESS, Where.RANK, Where.HEALTH, Where.LINK)
    if kind.where not in places or kind.role == "spare":
        return {}
    return {"role": "worker", "select": "all"} if kind.everywhere else {"rank": rank}


def sit(asked: Sequence[Question], paper: Path, *, launcher: str, seed: int) -> Key:
    """Play the questions and write the paper, a new directory, and its key beside it. A question
    that this machine cannot play, or whose fault never hit, does not count. Raises ExamError, and
    what ends a run.
    """
    try:
        paper.mkdir(parents=True)
    except OSError as error:
        hint = "name a directory that has no exam yet"
        raise ExamError(f"{paper}: cannot be made: {error.strerror}", hint=hint) from error
    keyed: list[Keyed] = []
    left_out: dict[str, str] = {}
    for question in asked:
        log, why = played(question)
        incidents = incidents_of(log, question) if log else []
        if log is None or len(incidents) < len(question.tree["faults"]):
            left_out[question.id] = f"{question.kind}: {why or 'never hit'}"
            continue
        write(strip(log), paper / question.id)
        about = {"id": question.id, "kind": question.kind, "strategy": question.strategy}
        keyed.append(Keyed(**about, incidents=incidents))
    key = Key(launcher=launcher, seed=seed, questions=keyed, left_out=left_out)
    write_whole(key_path(paper), key.model_dump_json(indent=1) + "\n")
    return key


def played(question: Question) -> tuple[Log | None, str]:
    """The log of its faulted arm, with fault events; or None, and why this machine cannot play
    it. Raises what ends a run.
    """
    with tempfile.TemporaryDirectory(prefix="exam-") as folder:
        results = play(question.id, question.tree, Path(folder))
        run = RunDirectory(Path(folder) / results.scenario / results.run_id)
        for arm in results.arms:
            return read_log(run.events(arm.id)), ""
        return None, "; ".join(one.reason for one in results.skipped) or results.title


def write(log: Log, folder: Path) -> None:
    """As files that ``read_log`` reads, one for each actor."""
    folder.mkdir(parents=True)
    for name, actor in log.actors.items():
        write_whole(folder / f"{name}.jsonl", "".join(f"{e.to_line()}\n" for e in actor.events))


def key_path(paper: Path) -> Path:
    """Beside the paper's directory, so that who gets the paper has it not."""
    return paper.with_name(f"{paper.name}.key.json")


def read(path: Path, model: type[M]) -> M:
    """A JSON file of that form. Raises ExamError, which names the wrong entry."""
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        hint = "docs/attribution.md says what the files are"
        raise ExamError(f"{path}: cannot be used: {error}", hint=hint) from error


def incidents_of(log: Log, question: Question) -> list[Incident]:
    """The faults that were injected into the log of a question, one incident each."""
    started = log.first(Kind.RUN_STARTED)
    start_ns = started.time_ns if started else 0
    hits: dict[str, list[Event]] = {}
    for event in log.of(Kind.FAULT_INJECTED):
        hits.setdefault(event.data["fault"], []).append(event)
    planned = {event.data["fault"]: event for event in log.of(Kind.FAULT_PLANNED)}
    found = []
    for name, events in hits.items():
        first = events[0]
        act = [one for one in events if one.data.get("act") == first.data.get("act")]
        hit = _hit(log, act, planned.get(name))
        truth = CATALOGUE.truth["dead" if name == KILL else question.truth]
        for where in (first.data.get("phase"), question.strategy):
            if where in truth.instead:
                truth = CATALOGUE.truth[truth.instead[where]]
        found.append(
            Incident(
                fault=name,
                kind=first.data["kind"],
                at_s=round((first.time_ns - start_ns) / 1e9, 6),
                step=first.step,
                phase=first.data.get("phase"),
                truth=truth,
                **{what: tuple(sorted(places)) for what, places in hit.items()},
            )
        )
    return found


def _hit(log: Log, act: Sequence[Event], planned: Event | None) -> dict[str, set[int]]:
    """Ranks hit, nodes hit, and ranks of processes that were hit with a node."""
    targets = [event.data["target"] for event in act]
    ranks = {target["rank"] for target in targets if type(target.get("rank")) is int}
    nodes = {target["node"] for target in targets if type(target.get("node")) is int}
    nodes |= {node for target in targets for node in target.get("nodes") or ()}
    hit = {name for target in targets for name in target.get("processes") or ()}
    if planned is not None and not ranks:
        chosen = planned.data["target"]
        ranks |= {rank for rank in chosen.get("ranks") or () if type(rank) is int}
        nodes |= {node for node in chosen.get("nodes") or () if type(node) is int}
    before = [e for e in log.of(Kind.GENERATION_STARTED) if e.time_ns <= act[0].time_ns]
    on = {e.data["process"]: e.data.get("node") for e in log.of(Kind.PROCESS_SPAWNED)}
    members = {
        rank
        for rank, name in enumerate(before[-1].data["members"] if before else ())
        if name in hit or (nodes and on.get(name) in nodes)
    }
    return {"ranks": ranks, "nodes": nodes, "members": members}
