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
from trainchaos.harness.judge.results import Finding

Tree = Mapping[str, Any]
MORE = re.compile(r"; and \d+ more$")


@dataclass(frozen=True, kw_only=True)
class Find:
    """A defect that a scenario shows. ``key``: equal for the same defect, as far as can be known;
    ``text``: for people.
    """

    key: str
    text: str


def find_in(tree: Tree, played: PlayResult) -> Find | None:
    """The worst defect, or None."""
    if played.refused:
        return None
    if played.crash:
        return Find(key=f"crash: {played.place}", text=played.crash)
    if played.left:
        return Find(key="left behind", text="; ".join(played.left))
    open_ones = {
        name: parts
        for name, finding in played.findings.items()
        if finding.verdict != "pass" and (parts := unexcused(tree, played, name, finding))
    }
    if not open_ones:
        return None
    worst = sorted(open_ones, key=lambda name: (played.findings[name].verdict != "fail", name))
    said = [
        f"{name} {played.findings[name].verdict}: {played.findings[name].witness}" for name in worst
    ]
    first = worst[0]
    key = f"{first} {played.findings[first].verdict}: {plain('; '.join(open_ones[first]))}"
    return Find(key=key, text="\n".join(said))


def unexcused(tree: Tree, played: PlayResult, name: str, finding: Finding) -> list[str]:
    """Parts of a checker's witness that no listed and true reason excuses."""
    checker = name.partition(": ")[2]
    known = [
        one for one in EXCUSES if re.fullmatch(one.name, checker) and one.verdict == finding.verdict
    ]
    true = [one for one in known if one.when(tree, played)]
    if any(one.whole and re.search(one.says, finding.witness) for one in true):
        return []
    parts = MORE.sub("", finding.witness).split("; ")
    return [part for part in parts if not any(re.search(one.says, part) for one in true)]


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
