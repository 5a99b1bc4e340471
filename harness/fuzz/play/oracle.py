"""Decides which played scenarios show a defect: crashes, arms without an end, leftovers, verdicts
without a reason.

A verdict other than pass is not a defect if the scenario made success impossible and the judge says
exactly that (``harness.fuzz.play.excuses``); no other reason is excused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainchaos.harness.fuzz.play.excuses import EXCUSES
from trainchaos.harness.fuzz.play.play import PlayResult
from trainchaos.harness.fuzz.play.unlanded import Case
from trainchaos.harness.judge.results import Finding

MORE = re.compile(r"; and \d+ more$")


@dataclass(frozen=True, kw_only=True)
class Find:
    """A defect that a scenario shows. ``key``: equal for the same defect, as far as can be known;
    ``text``: for people.
    """

    key: str
    text: str


def headline(find: Find) -> str:
    """One line of its text."""
    lines = find.text.splitlines() or [find.key]
    return lines[-1] if find.text.startswith("Traceback") else lines[0]


def find_in(tree: Mapping[str, Any], played: PlayResult) -> Find | None:
    """The worst defect, or None."""
    if played.refused:
        return None
    if played.crash:
        return Find(key=f"crash: {played.place}", text=played.crash)
    if played.left:
        return Find(key="left behind", text="; ".join(played.left))
    case = Case(tree, played)
    wrong = [
        (finding.verdict != "fail", name, finding, parts)
        for name, finding in played.findings.items()
        if finding.verdict != "pass" and (parts := unexcused(case, name, finding))
    ]
    if not wrong:
        return None
    wrong.sort(key=lambda row: row[:2])
    _, name, finding, parts = wrong[0]
    return Find(
        key=f"{name} {finding.verdict}: {plain('; '.join(parts))}",
        text="\n".join(f"{name} {each.verdict}: {each.witness}" for _, name, each, _ in wrong),
    )


def unexcused(case: Case, name: str, finding: Finding) -> list[str]:
    """Parts of a checker's witness that no listed and true reason excuses."""
    checker = name.partition(": ")[2]
    known = [e for e in EXCUSES if (e.checker, e.verdict) == (checker, finding.verdict)]
    if any(excuse.whole and excuse.explains(finding.witness, case) for excuse in known):
        return []
    parts = MORE.sub("", finding.witness).split("; ")
    return [part for part in parts if not any(excuse.explains(part, case) for excuse in known)]


def unsteady(first: PlayResult, second: PlayResult) -> Find | None:
    """Whether one seed gave two logs."""
    if first.digest == second.digest and first.crash == second.crash:
        return None
    return Find(key="not the same twice", text="one scenario with one seed gave two different logs")


def plain(witness: str) -> str:
    """The witness without what differs between scenarios with the same defect: numbers, names,
    digests, repetitions.
    """
    parts = dict.fromkeys(_plain(part) for part in MORE.sub("", witness).split("; "))
    return "; ".join(parts)[:160]


def _plain(text: str) -> str:
    for pattern, word in ((r"\b[0-9a-f]{6,}\b", "#"), (r"\b[wsk]\d+\b", "P"), (r"\bf\d+\b", "F")):
        text = re.sub(pattern, word, text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text)
