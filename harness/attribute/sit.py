"""A whole exam: played, diagnosed by the built-in diagnosis, and keyed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.harness.attribute import paper
from trainchaos.harness.attribute.exam import Question
from trainchaos.harness.attribute.key import key_of
from trainchaos.harness.attribute.play import faults_of, play
from trainchaos.harness.attribute.postmortem import Aftermath, aftermath_of, with_cheaper
from trainchaos.harness.attribute.score import Keyed
from trainchaos.harness.explain.diagnose import diagnose
from trainchaos.harness.explain.diagnosis import DiagnosedIncident, Diagnosis
from trainchaos.recovery.playbook.book import Playbook

TOOL = "trainchaos"


@dataclass(frozen=True, kw_only=True)
class Exam:
    """What was played. ``aftermaths``: of each incident of ``keys``, in order; ``skipped``:
    question -> why this machine could not play it; ``silent``: questions whose fault never hit.
    """

    keys: list[Keyed]
    diagnosis: Diagnosis
    aftermaths: list[Aftermath]
    skipped: dict[str, str]
    silent: list[str]


def sit(
    questions: Sequence[Question],
    *,
    catalogue: Catalogue,
    launcher: str,
    playbook: Playbook,
    export: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Exam:
    """Play all questions. ``export``: directory of a paper, which must exist; ``tell``: hears of
    each question that was played. Raises as ``play``, and PaperError.
    """
    keys: list[Keyed] = []
    answers: dict[str, list[DiagnosedIncident]] = {}
    after: list[tuple[str, str, Aftermath]] = []
    skipped: dict[str, str] = {}
    silent: list[str] = []
    for number, sitting in enumerate(play(questions, catalogue, launcher), start=1):
        question, log = sitting.question, sitting.log
        if log is None:
            skipped[question.id] = f"{question.kind}: {sitting.problem}"
            continue
        truths = key_of(log, faults_of(question))
        if len(truths) < len(question.tree["faults"]):
            silent.append(f"{question.id} ({question.kind})")
            continue
        keys.append(
            Keyed(id=question.id, kind=question.kind, strategy=question.strategy, truths=truths)
        )
        answers[question.id] = diagnose(log, playbook)
        after += [(one.kind, question.strategy, aftermath_of(log, one)) for one in truths]
        if export is not None:
            paper.add(export, question.id, log)
        tell(f"{number} of {len(questions)}: {question.id}, {question.kind}, {question.strategy}")
    return Exam(
        keys=keys,
        diagnosis=Diagnosis(tool=TOOL, runs=answers),
        aftermaths=with_cheaper(after),
        skipped=skipped,
        silent=silent,
    )
