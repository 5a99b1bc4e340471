"""Plays the questions of an exam, in simulation or with real processes, and reads their logs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos import plugins
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.events.log import Log, read_log
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.schedule.plan import repeat_seed
from trainchaos.harness.attribute.exam import ExamError, Question
from trainchaos.harness.fuzz.draw.text import as_yaml
from trainchaos.harness.fuzz.play.play import LONGEST_S, SAMPLES, bounded, memory
from trainchaos.harness.host.rundir import RunDirectory, arm_id
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.launch.requirements import refuse_impossible
from trainchaos.harness.launchers.sim import Sim
from trainchaos.harness.run.runner import run_scenario
from trainchaos.harness.run.simulated_arm import simulated_arm

SIM = "sim"


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """A question that was played. ``log``: of its faulted arm, with fault events; None: it was
    not played; ``problem``: why.
    """

    question: Question
    log: Log | None
    problem: str = ""


def play(questions: Sequence[Question], catalogue: Catalogue, launcher: str) -> Iterator[Sitting]:
    """Play each question in turn. What this machine cannot play is a ``problem``. Raises ExamError
    for a question that no machine could play, and what ends a run with real processes.
    """
    for question in questions:
        with _scratch() as root:
            path = root / "scenario.yaml"
            path.write_text(as_yaml(question.tree), encoding="utf-8")
            try:
                loaded = load(path, catalogue)
            except ScenarioError as error:
                raise ExamError(f"{question.id}, {question.kind}: {error}") from error
            if launcher == SIM:
                yield Sitting(question=question, log=_simulated(question, path, catalogue, root))
                continue
            results = run_scenario(loaded, runs=root / "runs", seed=None, live=False, argv=["exam"])
            run = RunDirectory(root / "runs" / loaded.name / results.run_id)
            events = run.events(arm_id(loaded.cells[0].id, 0, "faulted"))
            if events.is_dir():
                yield Sitting(question=question, log=read_log(events))
            else:
                skipped = "; ".join(one.reason for one in results.skipped) or results.title
                yield Sitting(question=question, log=None, problem=skipped)


def _simulated(question: Question, path: Path, catalogue: Catalogue, root: Path) -> Log:
    """The log of the faulted arm in simulation."""
    (cell, *_) = load(path, catalogue).cells
    spec = cell.scenario.launcher
    launcher = plugins.load(plugins.LAUNCHERS, Launcher)[spec.kind](**spec.params)
    assert isinstance(launcher, Sim)
    try:
        refuse_impossible(cell, launcher)
    except ScenarioError as error:
        raise ExamError(f"{question.id}, {question.kind}: {error}") from error
    seed = repeat_seed(cell.scenario.seed, 0)
    arm, events = simulated_arm(cell, root / "run", seed=seed, samples=SAMPLES)
    with bounded(LONGEST_S, question.id):
        arm.run()
    return read_log(events)


@contextmanager
def _scratch() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="exam-", dir=memory()))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def faults_of(question: Question) -> Mapping[str, Mapping[str, object]]:
    """The faults of a question by their ids, as in its scenario."""
    return {str(fault["id"]): fault for fault in question.tree["faults"]}
