"""The results of an exam as text, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainchaos.harness.attribute.postmortem import Aftermath
from trainchaos.harness.attribute.score import (
    ASPECTS,
    NOTHING,
    Score,
    Share,
    by_strategy,
    mistakes,
)

VERSION = 1


def results_json(
    found: Score, about: Mapping[str, Any], aftermaths: Sequence[Aftermath]
) -> dict[str, Any]:
    """``results.json``: version 1. ``about``: how the exam was played; ``aftermaths``: of
    ``found.answered``, in its order (none: of a paper scored without its logs).
    """
    incidents = [one.model_dump(mode="json") for one in found.answered]
    for incident, after in zip(incidents, aftermaths, strict=False):
        incident["post_mortem"] = after.model_dump(mode="json")
        answer = incident["answer"]
        incident["post_mortem"]["recommended_action"] = answer["action"] if answer else None
    tree = found.model_dump(mode="json", exclude={"answered"})
    return {
        "version": VERSION,
        **about,
        **tree,
        "by_strategy": {
            name: {aspect: one.model_dump() for aspect, one in shares.items()}
            for name, shares in by_strategy(found).items()
        },
        "mistakes": mistakes(found),
        "incidents": incidents,
    }


def summary_lines(found: Score) -> list[str]:
    """What is printed: overall, unfaulted runs, and what was wrong."""
    lines = [f"{found.tool}: {_count(found)}"]
    lines += [f"  {name:12} {said(one)}" for name, one in found.overall.items()]
    lines += [
        f"  {'traceless':12} {kind}: nothing said in {one.right} of {one.n}"
        for kind, one in found.traceless.items()
    ]
    if found.unfaulted_said.n:
        lines.append(f"  {'unfaulted':12} {_unfaulted(found)}")
    lines.append(f"  {'extra':12} {_extra(found)}")
    for row in mistakes(found):
        lines.append(
            f"  {'wrong':12} {row['kind']}: {row['wrong']} ({row['n']} times: {row['said']})"
        )
    if found.missing:
        lines.append(f"  {'no answer':12} {', '.join(found.missing)}")
    return lines


def markdown(found: Score, about: Mapping[str, Any]) -> str:
    """A page: the shares by aspect, kind and strategy, the confusion matrix, and what was wrong."""
    return "\n".join(_page(found, about)) + "\n"


def said(one: Share) -> str:
    """``158 of 165, 95.8 % [91.5, 98.3]``; of none, only that."""
    if not one.n:
        return "none asked"
    return f"{one.right} of {one.n}, {_percent(one.right / one.n)} % [{_interval(one)}]"


def _interval(one: Share) -> str:
    """Outwards, so that a rounded end never claims more than the interval does."""
    low, high = math.floor(1000 * one.low) / 10, math.ceil(1000 * one.high) / 10
    return f"{low:g}, {high:g}"


def _percent(value: float) -> str:
    """Downwards: what is not all of them is not 100 %."""
    return f"{math.floor(1000 * value + 1e-9) / 10:g}"


def _count(found: Score) -> str:
    n = next(iter(found.overall.values())).n
    return f"{n} incidents that leave a trace, of {len(found.kinds)} kinds"


def _unfaulted(found: Score) -> str:
    blamed, spoke = found.unfaulted_blamed, found.unfaulted_said
    high = math.ceil(1000 * blamed.high) / 10
    return (
        f"{blamed.right} of {blamed.n} unfaulted runs in which somebody was blamed "
        f"(with 95 % below {high:g} %), {spoke.right} in which anything was said"
    )


def _extra(found: Score) -> str:
    """Answers beside those to incidents, as the second node of a rack."""
    innocent = sum(one.innocent for one in found.extra)
    return f"{len(found.extra)} answers of no incident, {innocent} of them blame of an innocent"


def _page(found: Score, about: Mapping[str, Any]) -> Iterator[str]:
    yield "# Attribution"
    yield ""
    yield ". ".join(f"{name}: {value}" for name, value in about.items()) + "."
    yield f"Tool: {found.tool}. {_count(found)}. Shares with Clopper-Pearson intervals of 95 %."
    yield ""
    yield "| aspect | right | of n | % | interval |"
    yield "| --- | --- | --- | --- | --- |"
    for name, one in found.overall.items():
        share = _percent(one.right / one.n) if one.n else "-"
        yield f"| {name} | {one.right} | {one.n} | {share} | {_interval(one)} |"
    yield ""
    if found.unfaulted_said.n:
        yield f"{_unfaulted(found)}."
        yield ""
    yield f"{_extra(found)}."
    yield ""
    if found.traceless:
        rows = (f"{kind} {one.right} of {one.n}" for kind, one in found.traceless.items())
        yield f"Faults that leave no trace, and nothing was said: {', '.join(rows)}."
        yield ""
    yield from _table("kind", found.kinds)
    yield from _table("strategy", by_strategy(found))
    yield from _matrix(found)
    wrong = mistakes(found)
    if wrong:
        yield "| kind | said | wrong in | times | why it said so |"
        yield "| --- | --- | --- | --- | --- |"
        for row in wrong:
            why = str(row["why"]).replace("|", "/")
            yield f"| {row['kind']} | {row['said']} | {row['wrong']} | {row['n']} | {why} |"
        yield ""
    if found.missing:
        yield f"Without an answer: {', '.join(found.missing)}."
        yield ""


def _table(first: str, rows: Mapping[str, Mapping[str, Share]]) -> Iterator[str]:
    yield f"| {first} | n | {' | '.join(ASPECTS)} |"
    yield f"| --- | --- | {' | '.join('---' for _ in ASPECTS)} |"
    for name, shares in rows.items():
        cells = " | ".join(
            f"{_percent(one.right / one.n)} [{_interval(one)}]" for one in shares.values()
        )
        yield f"| {name} | {shares[ASPECTS[0]].n} | {cells} |"
    yield ""


def _matrix(found: Score) -> Iterator[str]:
    """Rows: the most exact cause; columns: what was said."""
    columns = sorted({name for row in found.confusion.values() for name in row} - {NOTHING})
    columns.append(NOTHING)
    yield "Confusion matrix: the most exact cause (rows) and what was said (columns)."
    yield ""
    yield f"| cause | {' | '.join(columns)} |"
    yield f"| --- | {' | '.join('---' for _ in columns)} |"
    for name, row in found.confusion.items():
        yield f"| {name} | {' | '.join(str(row.get(one, '')) for one in columns)} |"
    yield ""
