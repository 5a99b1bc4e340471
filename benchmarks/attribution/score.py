"""Scores of a tool's answers against the key of an exam, and their page. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.attribution.exam import UNFAULTED, ExamError, Incident, Keyed
from benchmarks.harness import markdown
from trainchaos.chaos.stats import clopper_pearson
from trainchaos.harness.explain.diagnosis import DiagnosedIncident

EARLY_S = 0.25
"""An answer may be so much earlier than the fault: a fault's ranks hold at their point before it
acts, and who counts back from a silence counts from there.
"""
ASPECTS = ("place", "cause", "exact cause", "layer", "action")
NOTHING = "nothing"
"""In the confusion matrix: no answer, or no incident."""


class Answers(BaseModel):
    """All that a tool says: question -> its incidents; an empty list: nothing happened."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    tool: str = Field(min_length=1, max_length=200)
    runs: dict[str, list[DiagnosedIncident]]


class Share(BaseModel):
    """``right`` of ``n``, and the Clopper-Pearson interval of 95 %; of none, nothing is known."""

    right: int
    n: int
    low: float
    high: float

    @property
    def percent(self) -> str:
        """Rounded downwards: what is not all of them is not 100 %."""
        return f"{math.floor(1000 * self.right / self.n + 1e-9) / 10:g}" if self.n else "-"

    @property
    def interval(self) -> str:
        """Rounded outwards, so that a rounded end never claims more than the interval does."""
        return f"{math.floor(1000 * self.low) / 10:g}, {math.ceil(1000 * self.high) / 10:g}"


class Row(BaseModel):
    """An incident with the answer it was given, or an answer that is of no incident. ``right``: by
    aspect; ``innocent``: an answer of no incident names a rank or node that was not hit.
    """

    question: str
    kind: str
    strategy: str
    incident: Incident | None
    answer: DiagnosedIncident | None
    right: dict[str, bool]
    innocent: bool = False

    @property
    def said(self) -> str:
        return self.answer.cause.value if self.answer else NOTHING


class Score(BaseModel):
    """Shares by aspect are of incidents that leave a trace. ``traceless``: of faults that leave
    none, those of which nothing was said; ``extra``: answers of no incident, ``innocent`` of them
    blame of one; ``confusion``: the most exact cause -> the answer -> how often; ``missing``:
    questions without an answer.
    """

    tool: str
    overall: dict[str, Share]
    kinds: dict[str, dict[str, Share]]
    traceless: dict[str, Share]
    unfaulted_said: Share
    unfaulted_blamed: Share
    extra: int
    innocent: int
    confusion: dict[str, dict[str, int]]
    mistakes: list[dict[str, Any]]
    missing: list[str]
    rows: list[Row]


def score(keys: Sequence[Keyed], answers: Answers) -> Score:
    """A question without an answer is wrong in everything, and listed. Raises ExamError for answers
    to questions that are not of this exam.
    """
    if strange := answers.runs.keys() - {key.id for key in keys}:
        raise ExamError(f"runs.{min(strange)}: the exam has no such question")
    rows = [row for key in keys for row in _rows(key, answers.runs.get(key.id, []))]
    traced: list[tuple[Incident, Row]] = []
    silent: dict[str, list[bool]] = defaultdict(list)
    extra = [row for row in rows if row.incident is None]
    said, blamed = {row.question for row in extra}, {row.question for row in extra if row.innocent}
    for row in rows:
        if row.incident is not None and row.incident.truth.trace == "events":
            traced.append((row.incident, row))
        elif row.incident is not None:
            silent[row.incident.kind].append(row.answer is None and row.question not in said)
    unfaulted = [key.id for key in keys if key.kind == UNFAULTED]
    by_kind: dict[str, list[Row]] = defaultdict(list)
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    for incident, row in traced:
        by_kind[incident.kind].append(row)
        # An accepted answer stands where it was given: what cannot be told apart is seen.
        confusion[incident.truth.causes[0].value][row.said] += 1
    for row in extra:
        confusion[NOTHING][row.said] += 1
    return Score(
        tool=answers.tool,
        overall=_shares([row for _, row in traced]),
        kinds={name: _shares(by_kind[name]) for name in sorted(by_kind)},
        traceless={kind: share(silent[kind]) for kind in sorted(silent)},
        unfaulted_said=share([name in said for name in unfaulted]),
        unfaulted_blamed=share([name in blamed for name in unfaulted]),
        extra=len(extra),
        innocent=sum(row.innocent for row in extra),
        confusion={name: dict(sorted(confusion[name].items())) for name in sorted(confusion)},
        mistakes=_mistakes(traced),
        missing=[key.id for key in keys if key.id not in answers.runs],
        rows=rows,
    )


def share(right: Sequence[bool]) -> Share:
    """How many of these are."""
    low, high = clopper_pearson(sum(right), len(right)) if right else (0.0, 1.0)
    return Share(right=sum(right), n=len(right), low=low, high=high)


def _shares(rows: Sequence[Row]) -> dict[str, Share]:
    return {name: share([row.right[name] for row in rows]) for name in ASPECTS}


def _rows(key: Keyed, answers: Sequence[DiagnosedIncident]) -> Iterator[Row]:
    """Each incident with at most one answer, then the answers that are left: the pairs that agree
    most first, then the nearest in time. An answer to a fault that was not there yet is of no
    incident. Faults that leave no trace take what is left.
    """
    about = {"question": key.id, "kind": key.kind, "strategy": key.strategy}
    pairs = []
    for (i, one), (a, answer) in product(enumerate(key.incidents), enumerate(answers)):
        if answer.at_s >= one.at_s - EARLY_S:
            right = _right(one, answer)
            agree = 2 * right["cause"] + 2 * right["place"] + right["layer"] + right["action"]
            pairs.append((one.truth.trace != "events", -agree, abs(answer.at_s - one.at_s), i, a))
    of: dict[int, int] = {}
    for *_, i, a in sorted(pairs):
        if i not in of and a not in of.values():
            of[i] = a
    for i, one in enumerate(key.incidents):
        given = answers[of[i]] if i in of else None
        yield Row(**about, incident=one, answer=given, right=_right(one, given))
    for a, answer in enumerate(answers):
        if a not in of.values():
            innocent = _innocent(key.incidents, answer)
            yield Row(**about, incident=None, answer=answer, right={}, innocent=innocent)


def _right(incident: Incident, answer: DiagnosedIncident | None) -> dict[str, bool]:
    if answer is None:
        return dict.fromkeys(ASPECTS, False)
    truth = incident.truth
    return {
        "place": "any" in truth.places or _place(incident, answer),
        "cause": answer.cause in truth.causes,
        "exact cause": answer.cause is truth.causes[0],
        "layer": answer.layer in truth.layers,
        "action": answer.action in truth.actions,
    }


def _place(incident: Incident, answer: DiagnosedIncident) -> bool:
    places = incident.truth.places
    if answer.rank is not None:
        return ("rank" in places and answer.rank in incident.ranks) or (
            "member" in places and answer.rank in incident.members
        )
    if answer.node is not None:
        return "node" in places and answer.node in incident.nodes
    return "none" in places


def _innocent(incidents: Sequence[Incident], answer: DiagnosedIncident) -> bool:
    if any("any" in one.truth.places for one in incidents):
        return False
    if answer.rank is not None:
        return all(answer.rank not in (*one.ranks, *one.members) for one in incidents)
    return answer.node is not None and all(answer.node not in one.nodes for one in incidents)


def _mistakes(traced: Sequence[tuple[Incident, Row]]) -> list[dict[str, Any]]:
    """Answers that are wrong in more than the exact cause, alike ones together."""
    seen: Counter[tuple[str, ...]] = Counter()
    for incident, row in traced:
        wrong = ", ".join(name for name, right in row.right.items() if not right)
        if wrong not in ("", "exact cause"):
            why = row.answer.why[:80] if row.answer else "no answer"
            seen[incident.kind, row.said, wrong, why] += 1
    names = ("kind", "said", "wrong in", "why it said so")
    return [{**dict(zip(names, row, strict=True)), "times": n} for row, n in seen.most_common()]


def page(found: Score, about: Mapping[str, Any]) -> str:
    """As Markdown: shares by aspect and kind, the confusion matrix, and mistakes."""
    facts = ", ".join(f"{name}: {value}" for name, value in about.items())
    tool = (
        f"Tool: {found.tool}. {found.overall['cause'].n} incidents that leave a trace, of"
        f" {len(found.kinds)} kinds. Shares with Clopper-Pearson intervals of 95 %."
    )
    shares = [[name, s.right, s.n, s.percent, s.interval] for name, s in found.overall.items()]
    parts = ["# Attribution", f"{facts}.", tool]
    parts.append(markdown(["aspect", "right", "of n", "%", "interval"], shares))
    blamed, said = found.unfaulted_blamed, found.unfaulted_said
    if said.n:
        parts.append(
            f"{blamed.right} of {blamed.n} unfaulted runs in which somebody was blamed (with 95 %"
            f" below {math.ceil(1000 * blamed.high) / 10:g} %), {said.right} in which anything was"
            " said."
        )
    innocent = f"{found.innocent} of them blame of an innocent"
    parts.append(f"{found.extra} answers of no incident, {innocent}.")
    if found.traceless:
        quiet = (f"{kind} {of.right} of {of.n}" for kind, of in found.traceless.items())
        parts.append(f"Traceless faults of which nothing was said: {', '.join(quiet)}.")
    kinds = [
        [kind, each["cause"].n, *(f"{s.percent} [{s.interval}]" for s in each.values())]
        for kind, each in found.kinds.items()
    ]
    parts.append(markdown(["kind", "n", *ASPECTS], kinds))
    parts.append("Confusion matrix: the most exact cause (rows) and what was said (columns).")
    causes = sorted({name for row in found.confusion.values() for name in row} - {NOTHING})
    causes.append(NOTHING)
    cells = [[of, *(row.get(name, "") for name in causes)] for of, row in found.confusion.items()]
    parts.append(markdown(["cause", *causes], cells))
    if found.mistakes:
        rows = [[str(cell).replace("|", "/") for cell in row.values()] for row in found.mistakes]
        parts.append(markdown(list(found.mistakes[0]), rows))
    if found.missing:
        parts.append(f"Without an answer: {', '.join(found.missing)}.")
    return "\n\n".join(parts) + "\n"
