"""What becomes of suspect places: who hears of a fit one, and which are tainted, by which name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.health.care.place_care import Care, PlaceCare
from trainchaos.recovery.health.care.place_check import Answer, Spot
from trainchaos.recovery.health.readings.reports import HealthReport
from trainchaos.recovery.health.taints import TaintList

SPOTS: dict[str, Spot] = {"w0": (0, "cuda:0@n0"), "w1": (1, "cuda:0@n1"), "w2": (1, "cpu")}


class Checks:
    """Answers that a test gives."""

    def __init__(self) -> None:
        self.asked: list[Spot] = []
        self.answers: list[Answer] = []

    def begin(self, spot: Spot) -> None:
        self.asked.append(spot)

    def take(self) -> Sequence[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.answers = []


class Job:
    """Three processes on two nodes, and what is done about their places."""

    def __init__(self, taints: Path) -> None:
        self.checks, self.list = Checks(), TaintList(taints)
        self.events: list[tuple[Kind, dict[str, Any]]] = []
        self.fit: list[Spot] = []
        self.doubted: Callable[[Spot], bool] = lambda spot: False
        self.care = PlaceCare(
            Care(checker=self.checks, taints=self.list),
            self,
            lambda kind, **data: self.events.append((kind, data)),
            lambda: 0.0,
            lambda node: f"host-{node}",
        )
        self.care.when_fit(lambda node, device: self.fit.append((node, device)))

    def spot_of(self, name: str) -> Spot | None:
        return SPOTS.get(name)

    def spots_in_use(self) -> Collection[Spot]:
        return set(SPOTS.values())

    def doubt(self, doubted: Callable[[Spot], bool]) -> None:
        self.doubted = doubted

    def tainted(self) -> list[tuple[str, str]]:
        """Places and origins, once all is written."""
        self.care.close()
        return [(taint.place, taint.by) for taint in self.list.read()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "taints.yaml")


def test_a_place_that_is_unfit_is_tainted_by_its_own_name(job: Job) -> None:
    job.care.failed("w1", "diverged", "")
    job.care.failed("nobody", "diverged", "")
    assert job.checks.asked == [SPOTS["w1"]] and job.doubted(SPOTS["w1"])
    job.checks.answers = [Answer(SPOTS["w1"], False, "a word differs")]
    job.care.look()
    assert job.doubted(SPOTS["w1"]) and not job.fit
    assert job.tainted() == [("host-1/cuda:0", "preflight")]
    assert [kind for kind, _ in job.events] == [Kind.PLACE_CHECKED, Kind.PLACE_TAINTED]


def test_one_that_is_fit_is_told_of_and_one_that_nobody_knows_is_not(job: Job) -> None:
    for name in SPOTS:
        job.care.failed(name, "diverged", "")
    job.checks.answers = [Answer(SPOTS["w0"], True, ""), Answer(SPOTS["w1"], None, "gone")]
    job.care.look()
    assert job.fit == [SPOTS["w0"]]
    assert [job.doubted(spot) for spot in SPOTS.values()] == [False, False, True]
    assert job.tainted() == []


def test_a_place_that_a_fault_made_unfit_is_avoided_and_not_tainted(job: Job) -> None:
    job.care.failed("w0", "diverged", "")
    job.checks.answers = [Answer(SPOTS["w0"], False, "injected", emulated=True)]
    job.care.look()
    assert job.doubted(SPOTS["w0"]) and job.tainted() == []


@pytest.mark.parametrize(
    ("place", "holder", "source", "asked", "tainted"),
    [
        ({"node": 1, "device": "cuda:0@n1"}, None, "nvml", {"w1"}, [("host-1/cuda:0", "alarm")]),
        ({"node": 1}, None, "nvml", {"w1", "w2"}, [("host-1", "alarm")]),
        ({"rank": 2}, "w2", "nvml", {"w2"}, [("host-1", "alarm")]),
        ({"rank": 2}, None, "nvml", set(), []),
        ({"node": 1}, None, "injected", {"w1", "w2"}, []),
    ],
)
def test_what_announces_a_failure_is_checked_and_tainted(
    job: Job,
    place: dict[str, Any],
    holder: str | None,
    source: str,
    asked: set[str],
    tainted: list[tuple[str, str]],
) -> None:
    sign = HealthReport.model_validate({"what": "xid", "code": 48, "source": source, **place})
    job.care.heard(sign, holder)
    job.care.heard(sign.model_copy(update={"code": 94}), holder)
    assert set(job.checks.asked) == {SPOTS[name] for name in asked}
    assert job.tainted() == tainted
