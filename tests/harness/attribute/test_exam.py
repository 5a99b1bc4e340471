"""A whole exam in simulation: right answers, the same for a seed, and nobody blamed for nothing."""

from __future__ import annotations

import pytest

from tests.harness.attribute.conftest import whole_exam
from trainchaos.chaos.cli import build_catalogue
from trainchaos.harness.attribute.exam import STRATEGIES, UNFAULTED, ExamError, questions
from trainchaos.harness.attribute.key import key_of
from trainchaos.harness.attribute.play import faults_of
from trainchaos.harness.attribute.score import Keyed, mistakes, score
from trainchaos.harness.attribute.sit import Exam, sit
from trainchaos.harness.explain.diagnose import diagnose
from trainchaos.harness.explain.diagnosis import Diagnosis
from trainchaos.harness.fuzz.play.play import kinds
from trainchaos.recovery.playbook.book import playbook

SOME = ["gpu-lost", "node-kill", "process-kill", "rank-hang", "straggler"]


def small(seed: int, names: list[str] = SOME) -> Exam:
    """A few kinds under one strategy."""
    asked = questions(
        kinds(), names=names, strategies=["hot-spare"], runs=1, seed=seed, unfaulted=1
    )
    return sit(asked, catalogue=build_catalogue(), launcher="sim", playbook=playbook())


@pytest.mark.long
def test_the_catalogue_is_told_from_its_logs() -> None:
    sittings = whole_exam()
    keys, answers = [], {}
    for number, sitting in enumerate(sittings):
        question, log = sitting.question, sitting.log
        assert log is not None
        name = f"{question.id}.{number}"
        truths = key_of(log, faults_of(question))
        assert len(truths) == len(question.tree["faults"]), question
        keys.append(Keyed(id=name, kind=question.kind, strategy=question.strategy, truths=truths))
        answers[name] = diagnose(log, playbook())
    found = score(keys, Diagnosis(tool="ours", runs=answers))
    assert set(found.kinds) | set(found.traceless) == set(kinds())
    place, cause = found.overall["place"], found.overall["cause"]
    assert place.right >= 0.95 * place.n, mistakes(found)
    assert cause.right >= 0.95 * cause.n, mistakes(found)
    assert not [one for one in found.extra if one.innocent]
    assert all(one.right == one.n for one in found.traceless.values()), found.extra
    assert found.unfaulted_said.n == 3
    assert found.unfaulted_said.right == 0


@pytest.mark.slow
def test_an_exam_is_the_same_for_the_same_seed() -> None:
    first, again, other = (small(seed, ["gpu-lost"]) for seed in (3, 3, 4))
    assert first == again
    assert first.diagnosis != other.diagnosis


@pytest.mark.slow
def test_an_exam_has_a_post_mortem_of_each_incident() -> None:
    exam = small(3)
    truths = [truth for key in exam.keys for truth in key.truths]
    assert len(exam.aftermaths) == len(truths) == 7
    for truth, after in zip(truths, exam.aftermaths, strict=True):
        assert [one.at_s for one in after.timeline] == sorted(one.at_s for one in after.timeline)
        assert after.timeline[0].what == truth.kind
        if truth.kind == "straggler":  # nobody declares it
            assert after.blamed is None
            assert after.first_signal is None
            assert after.steps_redone == 0
        else:
            assert after.first_signal is not None
            assert after.blamed_right is True
            assert after.cost_s is not None
            assert after.cost_s > 0


def test_questions_are_numbered_without_order() -> None:
    asked = questions(kinds(), names=SOME, strategies=STRATEGIES, runs=1, seed=1, unfaulted=4)
    assert [one.id for one in asked] == [f"q{n:04}" for n in range(1, len(asked) + 1)]
    assert [one.kind for one in asked] != sorted(one.kind for one in asked)
    assert sum(one.kind == UNFAULTED for one in asked) == 4


@pytest.mark.parametrize(
    ("names", "strategies"), [(["late-kill"], ["hot-spare"]), (["process-kill"], ["none"])]
)
def test_unknown_kinds_and_strategies_are_refused(names: list[str], strategies: list[str]) -> None:
    with pytest.raises(ExamError, match="unknown") as caught:
        questions(kinds(), names=names, strategies=strategies, runs=1, seed=1)
    assert caught.value.exit_code == 2
