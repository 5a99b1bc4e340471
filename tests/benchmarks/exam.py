"""Questions of the exam of diagnosers, played once in a process for all tests that ask."""

from __future__ import annotations

from functools import cache

from benchmarks.attribution.exam import CATALOGUE, Question, played, questions
from trainchaos.chaos.events.log import Log

SOME = ("crash-loop", "exception", "gpu-error", "gpu-oom", "health-event", "node-stop", "rank-hang")
"""Kinds whose logs have every kind of event that is hidden, and every text that is replaced."""
ALL = tuple(sorted(CATALOGUE.kind))
Played = list[tuple[Question, Log]]


@cache
def sat(
    names: tuple[str, ...] = SOME, strategy: str = "drop-replica", unfaulted: int = 1
) -> Played:
    """Each kind in every variant under one strategy, then unfaulted runs, with their logs."""
    asked = questions(names, [strategy], runs=1, seed=5, unfaulted=unfaulted)
    found = [(question, played(question)[0]) for question in asked]
    return [(question, log) for question, log in found if log is not None]
