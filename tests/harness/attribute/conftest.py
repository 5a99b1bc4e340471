"""One exam over the whole catalogue, played once for all tests here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from trainchaos.chaos.cli import build_catalogue
from trainchaos.harness.attribute.exam import questions
from trainchaos.harness.attribute.play import Sitting, play
from trainchaos.harness.fuzz.play.play import kinds

SOME = [
    "crash-loop",
    "exception",
    "gpu-error",
    "gpu-oom",
    "health-event",
    "node-stop",
    "process-kill",
    "rank-hang",
]
"""Kinds whose logs have every kind of event that is hidden, and every text that is replaced."""


@pytest.fixture(
    scope="session", params=["some", pytest.param("all", marks=pytest.mark.long)], ids=str
)
def sittings(request: pytest.FixtureRequest) -> list[Sitting]:
    """Some kinds of fault, or every kind, in every variant under one strategy; unfaulted runs."""
    if request.param == "some":
        return played(SOME, unfaulted=1)
    return whole_exam()


@cache
def whole_exam() -> list[Sitting]:
    """Every kind of fault in every variant under one strategy, and three unfaulted runs."""
    more = ["checkpoint-corrupt", "spare-kill"]
    return played(sorted(kinds()), unfaulted=3) + played(more, ["checkpoint-restart", "hot-spare"])


def played(
    names: list[str], strategies: Sequence[str] = ("drop-replica",), unfaulted: int = 0
) -> list[Sitting]:
    asked = questions(
        kinds(), names=names, strategies=strategies, runs=1, seed=5, unfaulted=unfaulted
    )
    return list(play(asked, build_catalogue(), "sim"))
