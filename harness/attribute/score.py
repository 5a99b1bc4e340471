"""Scores a diagnosis against the key of an exam. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.stats import clopper_pearson
from trainchaos.harness.attribute.key import KeyIncident
from trainchaos.harness.explain.diagnosis import DiagnosedIncident, Diagnosis, DiagnosisError

EARLY_S = 0.25
"""An answer may be so much earlier than the fault: a fault's ranks hold at their point before it
acts, and who counts back from a silence counts from there.
"""
ASPECTS = ("place", "cause", "exact cause", "layer", "action")
NOTHING = "nothing"
"""In the confusion matrix: no answer, or no incident."""


class Share(BaseModel):
    """``right`` of ``n``, and the Clopper-Pearson interval of 95 %."""

    model_config = ConfigDict(frozen=True)

    right: int
    n: int
    low: float
    high: float


class Answered(BaseModel):
    """One incident of the key, with the answer it was given."""

    model_config = ConfigDict(frozen=True)

    question: str
    strategy: str
    truth: KeyIncident
    answer: DiagnosedIncident | None
    right: dict[str, bool]


class Blamed(BaseModel):
    """An answer that is of no incident. ``innocent``: it names a rank or node that was not hit."""

    model_config = ConfigDict(frozen=True)

    question: str
    kind: str
    answer: DiagnosedIncident
    innocent: bool


class Score(BaseModel):
    """``overall``, ``kinds``: aspect -> share, of incidents that leave a trace; ``traceless``:
    questions whose fault leaves none, in which nothing else was said; ``unfaulted``: runs in which
    somebody was blamed, or anything was said, of those in which nothing happened.
    """

    model_config = ConfigDict(frozen=True)

    tool: str
    overall: dict[str, Share]
    kinds: dict[str, dict[str, Share]]
    traceless: dict[str, Share]
    confusion: dict[str, dict[str, int]]
    answered: list[Answered]
    extra: list[Blamed]
    unfaulted_said: Share
    unfaulted_blamed: Share
    missing: list[str]


class Keyed(BaseModel):
    """A question with its key."""

    model_config = ConfigDict(frozen=True)

    id: str
    kind: str
    strategy: str
    truths: list[KeyIncident]


def score(keys: Sequence[Keyed], diagnosis: Diagnosis) -> Score:
    """Score a tool's answers. A question without an answer is wrong in everything, and listed.
    Raises DiagnosisError for answers to questions that are not of this exam.
    """
    known = {key.id for key in keys}
    for name in diagnosis.runs:
        if name not in known:
            raise DiagnosisError(
                f"runs.{name}: the exam has no such question",
                hint=f"its questions are {keys[0].id} to {keys[-1].id}" if keys else "it is empty",
            )
    answered: list[Answered] = []
    extra: list[Blamed] = []
    for key in keys:
        pairs, rest = _matched(key.truths, diagnosis.runs.get(key.id, []))
        answered += [
            Answered(
                question=key.id,
                strategy=key.strategy,
                truth=truth,
                answer=answer,
                right=_right(truth, answer),
            )
            for truth, answer in pairs
        ]
        extra += [
            Blamed(question=key.id, kind=key.kind, answer=one, innocent=_innocent(key.truths, one))
            for one in rest
        ]
    return _summed(keys, diagnosis, answered, extra)


def _summed(
    keys: Sequence[Keyed],
    diagnosis: Diagnosis,
    answered: Sequence[Answered],
    extra: Sequence[Blamed],
) -> Score:
    traced = [one for one in answered if one.truth.trace == "events"]
    by_kind: dict[str, list[Answered]] = defaultdict(list)
    for one in traced:
        by_kind[one.truth.kind].append(one)
    quiet = [key for key in keys if not key.truths and key.kind == "unfaulted"]
    said = {one.question for one in extra}
    blamed = {one.question for one in extra if one.innocent}
    silent = [one for one in answered if one.truth.trace != "events"]
    return Score(
        tool=diagnosis.tool,
        overall=_shares(traced),
        kinds={kind: _shares(by_kind[kind]) for kind in sorted(by_kind)},
        traceless={
            kind: share(
                sum(one.answer is None and one.question not in said for one in of_kind),
                len(of_kind),
            )
            for kind in sorted({one.truth.kind for one in silent})
            if (of_kind := [one for one in silent if one.truth.kind == kind])
        },
        confusion=_confusion(traced, extra),
        answered=list(answered),
        extra=list(extra),
        unfaulted_said=share(sum(key.id in said for key in quiet), len(quiet)),
        unfaulted_blamed=share(sum(key.id in blamed for key in quiet), len(quiet)),
        missing=[key.id for key in keys if key.id not in diagnosis.runs],
    )


def _shares(answered: Sequence[Answered]) -> dict[str, Share]:
    return {
        name: share(sum(one.right[name] for one in answered), len(answered)) for name in ASPECTS
    }


def share(right: int, n: int) -> Share:
    """A share with its interval; of none, nothing is known: 0 to 1."""
    low, high = clopper_pearson(right, n) if n else (0.0, 1.0)
    return Share(right=right, n=n, low=low, high=high)


def _matched(
    truths: Sequence[KeyIncident], answers: Sequence[DiagnosedIncident]
) -> tuple[list[tuple[KeyIncident, DiagnosedIncident | None]], list[DiagnosedIncident]]:
    """Each truth with at most one answer: the pairs that agree most first, then the nearest in
    time. An answer to a fault that was not there yet is of no incident. Faults that leave no trace
    take what is left.
    """
    pairs = sorted(
        (
            (truth.trace != "events", -_agreement(truth, one), abs(one.at_s - truth.at_s), t, a)
            for t, truth in enumerate(truths)
            for a, one in enumerate(answers)
            if one.at_s >= truth.at_s - EARLY_S
        ),
    )
    of: dict[int, int] = {}
    for *_, t, a in pairs:
        if t not in of and a not in of.values():
            of[t] = a
    rest = [one for number, one in enumerate(answers) if number not in of.values()]
    return [(truth, answers[of[t]] if t in of else None) for t, truth in enumerate(truths)], rest


def _agreement(truth: KeyIncident, answer: DiagnosedIncident) -> int:
    right = _right(truth, answer)
    return 2 * right["cause"] + 2 * right["place"] + right["layer"] + right["action"]


def _right(truth: KeyIncident, answer: DiagnosedIncident | None) -> dict[str, bool]:
    if answer is None:
        return dict.fromkeys(ASPECTS, False)
    return {
        "place": _place(truth, answer),
        "cause": answer.cause in truth.causes,
        "exact cause": answer.cause is truth.causes[0],
        "layer": answer.layer in truth.layers,
        "action": answer.action in truth.actions,
    }


def _place(truth: KeyIncident, answer: DiagnosedIncident) -> bool:
    if truth.anybody:
        return True
    if answer.rank is not None:
        return answer.rank in truth.ranks
    if answer.node is not None:
        return answer.node in truth.nodes
    return truth.nobody


def _innocent(truths: Sequence[KeyIncident], answer: DiagnosedIncident) -> bool:
    """Whether an answer of no incident names somebody whom no fault hit."""
    if any(truth.anybody for truth in truths):
        return False
    if answer.rank is not None:
        return all(answer.rank not in (*truth.hit, *truth.ranks) for truth in truths)
    if answer.node is not None:
        return all(answer.node not in truth.hit_nodes for truth in truths)
    return False


def _confusion(answered: Sequence[Answered], extra: Sequence[Blamed]) -> dict[str, dict[str, int]]:
    """The most exact cause -> the answer -> how often. An accepted answer stands where it was
    given, so that what cannot be told apart is seen.
    """
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for one in answered:
        given = one.answer.cause.value if one.answer else NOTHING
        rows[one.truth.causes[0].value][given] += 1
    for left in extra:
        rows[NOTHING][left.answer.cause.value] += 1
    return {name: dict(sorted(rows[name].items())) for name in sorted(rows)}


def mistakes(found: Score) -> list[dict[str, Any]]:
    """Answers that are wrong in something, grouped: kind, what was said, and how often."""
    seen: Counter[tuple[str, str, str, str]] = Counter()
    for one in found.answered:
        wrong = ", ".join(name for name, right in one.right.items() if not right)
        wrong = wrong if wrong != "exact cause" else ""
        if one.truth.trace == "events" and wrong:
            said = one.answer.cause.value if one.answer else NOTHING
            why = one.answer.why if one.answer else "no answer"
            seen[one.truth.kind, said, wrong, why[:80]] += 1
    return [
        {"kind": kind, "said": said, "wrong": wrong, "why": why, "n": count}
        for (kind, said, wrong, why), count in sorted(seen.items(), key=lambda row: -row[1])
    ]


def by_strategy(found: Score) -> Mapping[str, Mapping[str, Share]]:
    """Shares by recovery strategy, of incidents that leave a trace."""
    rows: dict[str, list[Answered]] = defaultdict(list)
    for one in found.answered:
        if one.truth.trace == "events":
            rows[one.strategy].append(one)
    return {name: _shares(rows[name]) for name in sorted(rows)}
