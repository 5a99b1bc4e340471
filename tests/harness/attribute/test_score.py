"""Scores: a perfect and a hopeless tool, what is missing, what is said of nothing."""

from __future__ import annotations

import random

import pytest

from trainchaos.harness.attribute.key import KeyIncident
from trainchaos.harness.attribute.page import markdown, said
from trainchaos.harness.attribute.score import ASPECTS, Keyed, score, share
from trainchaos.harness.attribute.truth import TRUTHS
from trainchaos.harness.explain.diagnosis import (
    CauseClass,
    DiagnosedIncident,
    Diagnosis,
    DiagnosisError,
    Layer,
)
from trainchaos.recovery.playbook.entry import Action

RANKS = 4


def keyed(number: int, name: str, rng: random.Random) -> Keyed:
    """A question about a kind with one incident at a rank."""
    truth, rank = TRUTHS[name], rng.randrange(RANKS)
    one = KeyIncident(
        fault="asked",
        kind=name.partition(":")[0],
        at_s=1.0,
        step=25,
        phase=None,
        causes=truth.causes,
        layers=truth.layers,
        actions=truth.actions,
        ranks=(rank,),
        hit=(rank,),
        trace="events",
    )
    return Keyed(id=f"q{number:04}", kind=one.kind, strategy="hot-spare", truths=[one])


def exam(n: int = 400) -> list[Keyed]:
    """Questions over all truths."""
    rng = random.Random(1)
    names = sorted(TRUTHS)
    return [keyed(number, names[number % len(names)], rng) for number in range(1, n + 1)]


def answer(truth: KeyIncident, at_s: float = 1.1) -> DiagnosedIncident:
    """The most exact answer."""
    return DiagnosedIncident(
        at_s=at_s,
        cause=truth.causes[0],
        rank=truth.ranks[0],
        layer=truth.layers[0],
        action=truth.actions[0],
    )


def test_a_perfect_tool_is_right_in_everything() -> None:
    keys = exam()
    runs = {key.id: [answer(key.truths[0])] for key in keys}
    found = score(keys, Diagnosis(tool="perfect", runs=runs))
    assert all((one.right, one.n) == (400, 400) for one in found.overall.values())
    assert set(found.overall) == set(ASPECTS)
    assert not found.extra
    assert not found.missing
    assert all(list(row) == [cause] for cause, row in found.confusion.items())


@pytest.mark.slow
def test_a_hopeless_tool_is_right_as_often_as_chance() -> None:
    keys, rng = exam(240), random.Random(2)
    runs = {
        key.id: [
            DiagnosedIncident(
                at_s=1.1,
                cause=rng.choice(list(CauseClass)),
                rank=rng.randrange(RANKS),
                layer=rng.choice(list(Layer)),
                action=rng.choice(list(Action)),
            )
        ]
        for key in keys
    }
    found = score(keys, Diagnosis(tool="dice", runs=runs))
    truths = [key.truths[0] for key in keys]
    chance = {
        "place": 1 / RANKS,
        "cause": sum(len(one.causes) for one in truths) / len(truths) / len(CauseClass),
        "exact cause": 1 / len(CauseClass),
        "layer": sum(len(one.layers) for one in truths) / len(truths) / len(Layer),
        "action": sum(len(one.actions) for one in truths) / len(truths) / len(Action),
    }
    for name, expected in chance.items():
        right = found.overall[name].right / len(keys)
        assert abs(right - expected) < 4 * (expected * (1 - expected) / len(keys)) ** 0.5, name


def test_no_answer_is_wrong_and_listed() -> None:
    keys = exam(3)
    runs = {keys[0].id: [answer(keys[0].truths[0])], keys[1].id: []}
    found = score(keys, Diagnosis(tool="lazy", runs=runs))
    assert (found.overall["cause"].right, found.overall["cause"].n) == (1, 3)
    assert found.missing == [keys[2].id]  # an empty list is an answer: nothing happened
    assert sum(row.get("nothing", 0) for row in found.confusion.values()) == 2


def test_answers_to_no_question_are_refused() -> None:
    with pytest.raises(DiagnosisError, match=r"runs\.q9999"):
        score(exam(2), Diagnosis(tool="x", runs={"q9999": []}))


def test_an_answer_before_the_fault_is_of_no_incident() -> None:
    (key,) = exam(1)
    early = answer(key.truths[0], at_s=0.5)
    found = score([key], Diagnosis(tool="x", runs={key.id: [early]}))
    assert found.overall["cause"].right == 0
    assert [one.innocent for one in found.extra] == [False]
    just = answer(key.truths[0], at_s=0.8)
    assert score([key], Diagnosis(tool="x", runs={key.id: [just]})).overall["cause"].right == 1


def test_blame_of_an_innocent_is_counted() -> None:
    (key,) = exam(1)
    truth = key.truths[0]
    other = answer(truth).model_copy(update={"rank": truth.ranks[0] + 1})
    runs = {key.id: [answer(truth), other]}
    found = score([key], Diagnosis(tool="x", runs=runs))
    assert [one.innocent for one in found.extra] == [True]
    assert found.overall["place"].right == 1


def test_unfaulted_runs_count_what_is_said_and_who_is_blamed() -> None:
    keys = [Keyed(id=f"q{n}", kind="unfaulted", strategy="none", truths=[]) for n in range(100)]
    blames = answer(exam(1)[0].truths[0])
    vague = blames.model_copy(update={"rank": None})
    runs = {"q1": [blames], "q2": [vague], **{f"q{n}": [] for n in range(3, 100)}}
    found = score(keys, Diagnosis(tool="x", runs=runs))
    assert (found.unfaulted_blamed.right, found.unfaulted_blamed.n) == (1, 100)
    assert found.unfaulted_said.right == 2
    assert 0.05 < found.unfaulted_blamed.high < 0.06  # Clopper-Pearson of 1 of 100: 5.45 %


def test_a_fault_without_a_trace_is_right_when_nothing_is_said() -> None:
    (key,) = exam(1)
    silent = key.model_copy(update={"truths": [key.truths[0].model_copy(update={"trace": "none"})]})
    quiet = score([silent], Diagnosis(tool="x", runs={silent.id: []}))
    loud = score([silent], Diagnosis(tool="x", runs={silent.id: [answer(silent.truths[0])]}))
    kind = silent.truths[0].kind
    assert quiet.overall["cause"].n == loud.overall["cause"].n == 0
    assert (quiet.traceless[kind].right, loud.traceless[kind].right) == (1, 0)


def test_the_truth_is_a_set_and_the_exact_cause_its_first() -> None:
    rng = random.Random(3)
    key = keyed(1, "oom-kill", rng)
    second = answer(key.truths[0]).model_copy(update={"cause": CauseClass.PROCESS_DEATH})
    found = score([key], Diagnosis(tool="x", runs={key.id: [second]}))
    assert found.overall["cause"].right == 1
    assert found.overall["exact cause"].right == 0
    assert found.confusion == {"memory": {"process-death": 1}}


def test_intervals_of_many_agree_with_those_of_fewer() -> None:
    few, many = share(990, 1000), share(991, 1001)  # by coefficients, and by logarithms
    assert abs(few.low - many.low) < 2e-5
    assert abs(few.high - many.high) < 2e-5


def test_figures_are_rounded_away_from_what_was_not_shown() -> None:
    assert said(share(999, 1000)) == "999 of 1000, 99.9 % [99.4, 100]"
    assert said(share(899, 900)).startswith("899 of 900, 99.8 %")
    assert said(share(0, 0)) == "none asked"
    keys = exam(10)
    runs = {key.id: [answer(key.truths[0])] for key in keys}
    page = markdown(score(keys, Diagnosis(tool="perfect", runs=runs)), {"date": "2026-01-01"})
    assert "| cause | 10 | 10 | 100 | 69.1, 100 |" in page
