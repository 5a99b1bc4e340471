"""One exam over the whole catalogue, played once for all tests here."""

from __future__ import annotations

import pytest

from trainchaos.chaos.cli import build_catalogue
from trainchaos.harness.attribute.exam import questions
from trainchaos.harness.attribute.play import Sitting, play
from trainchaos.harness.fuzz.play.play import kinds


@pytest.fixture(scope="session")
def sittings() -> list[Sitting]:
    """Every kind of fault in every variant under one strategy, and three unfaulted runs."""
    known = kinds()
    asked = questions(
        known, names=sorted(known), strategies=["drop-replica"], runs=1, seed=5, unfaulted=3
    )
    asked += questions(
        known,
        names=["checkpoint-corrupt", "spare-kill"],
        strategies=["checkpoint-restart", "hot-spare"],
        runs=1,
        seed=5,
    )
    return list(play(asked, build_catalogue(), "sim"))
