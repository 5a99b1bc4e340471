"""The scenarios of places that are checked before a process rejoins: each passes because the place
was checked, and used or left alone by what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.loading.test_scenarios import FOLDER, loaded, simulate
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.loading.overrides import of_option
from trainchaos.harness.judge.checkers import PREFLIGHT
from trainchaos.harness.judge.checkers.faults.promised import rejoins
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.sim.cluster import SimChecks
from trainchaos.recovery.health.checks import Answer, Spot
from trainchaos.recovery.health.reputation import PlaceCare, Reputation

STEPS = 300
"""Fewer than the scenarios have: there is time enough for the checks."""


def played(name: str, memory: Path) -> Finding:
    """What becomes of the preflight that a scenario expects, simulated."""
    overrides = [
        of_option("--launcher", "launcher", "sim"),
        of_option("--set", "baseline", "none"),
        of_option("--set", "workload.steps", STEPS),
    ]
    path = FOLDER / "health" / f"rejoin-{name}.yaml"
    return simulate(loaded(path, overrides), memory).cells[0].invariants[PREFLIGHT]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fit", "cpu:2 of node 0 is fit, and s6 started there later"),
        ("unfit", "cpu:2 of node 0 is unfit, and no process started there later"),
    ],
)
@pytest.mark.sample(1)
def test_a_place_is_used_again_if_it_is_fit(name: str, said: str, memory: Path) -> None:
    found = played(name, memory)
    assert found.verdict == "pass" and said in found.witness


@pytest.mark.long
@pytest.mark.parametrize(("name", "blind"), [("fit", "heard"), ("unfit", "failed")])
def test_it_fails_if_nobody_is_suspect(
    name: str, blind: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlaceCare, blind, lambda *_: None)
    found = played(name, memory)
    assert found.verdict == "fail" and "was not checked" in found.witness


@pytest.mark.slow
def test_it_fails_if_processes_start_where_it_is_unfit(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reputation, "suspect", lambda *_: False)
    found = played("unfit", memory)
    assert (
        found.verdict == "fail"
        and "s5 started on cpu:2 of node 0 though it is unfit" in found.witness
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("fit", "verdict", "said"),
    [(False, "fail", "is unfit, should be fit: a word"), (None, "inconclusive", "a word differs")],
)
def test_what_is_found_has_to_be_what_is_expected(
    fit: bool | None, verdict: str, said: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SimChecks.take

    def take(self: SimChecks) -> Sequence[Answer]:
        return [Answer(one.spot, fit, "a word differs") for one in real(self)]

    monkeypatch.setattr(SimChecks, "take", take)
    found = played("fit", memory)
    assert found.verdict == verdict and said in found.witness


@pytest.mark.long
def test_it_fails_if_a_fit_place_stays_out_of_use(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[Spot]()

    def suspect(self: Reputation, spot: Spot) -> bool:
        if spot in self._doubted:
            seen.add(spot)
        return spot in seen

    monkeypatch.setattr(Reputation, "suspect", suspect)
    found = played("fit", memory)
    assert found.verdict == "fail" and "no process started there later" in found.witness


@pytest.mark.parametrize(
    ("workload", "at", "expect", "health", "said"),
    [
        ("{kind: mlp}", "{step: 9}", "{preflight: fit}", "{}", "no place is checked here"),
        ("{kind: mlp}", "{event: place_checked}", "{}", "{}", "no place is checked here"),
        ("{kind: mlp}", "{step: 9}", "{preflight: good}", "{}", "preflight"),
        ("{kind: mlp}", "{step: 9}", "{}", "{preflight_rejoin: true}", "preflight_rejoins"),
        ("{command: [sleep, '1'], ranks: 2}", "{step: 9}", "{}", "{taint_alarms: true}", "itself"),
    ],
)
def test_a_preflight_that_there_cannot_be_is_an_error(
    tmp_path: Path, workload: str, at: str, expect: str, health: str, said: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        f"version: 1\nname: x\nworkload: {workload}\nrecovery: hot-spare\nhealth: {health}\n"
        "faults:\n  - id: a\n    kind: process-kill\n    target: {rank: 1}\n"
        f"    at: {at}\n    expect: {expect}\n"
    )
    with pytest.raises(ScenarioError) as error:
        loaded(path)
    assert said in str(error.value)


def test_a_fault_that_hit_no_process_leaves_its_preflight_open() -> None:
    fault = SimpleNamespace(id="cut", expect=SimpleNamespace(preflight="fit"))
    episode = SimpleNamespace(fault="cut", injected=1, landed=1, processes=())
    evidence: Any = SimpleNamespace(
        measures=SimpleNamespace(episodes=[episode]),
        fault=lambda name: fault,
        log=SimpleNamespace(of=lambda *kinds: iter(())),
    )
    found = rejoins(evidence)
    assert found.verdict == "inconclusive" and "hit no process" in found.witness


def unfit_and_used(*others: str, device: str = "cpu", lost: bool = False) -> Finding:
    """Device 0 of node 0 failed, was found unfit, and a process started there all the same; what
    the ``others`` were: "free", "taken", "unfit" or "checked" (that is under way).
    """
    events: list[Any] = []

    def write(kind: Kind, second: float, **data: Any) -> None:
        events.append(SimpleNamespace(kind=kind, time_ns=round(second * 1e9), data=data))

    def check(number: int, second: float) -> None:
        place = {"node": 0 if number == 0 else 1, "device": f"{device}:{number}"}
        write(Kind.PLACE_CHECKED, second, **place, fit=False, said="bad", seconds=1.0)

    for number, what in enumerate(("failed", *others)):
        place = {"node": 0 if number == 0 else 1, "device": f"{device}:{number}"}
        write(Kind.PROCESS_SPAWNED, 1, process=f"w{number}", **place)
        if what != "taken":
            write(Kind.PROCESS_EXITED, 3, process=f"w{number}")
        if what in ("unfit", "checked"):
            check(number, {"unfit": 5, "checked": 10.5}[what])
    check(0, 5)
    if lost:
        write(Kind.NODE_JOINED, 0, node=1)
        write(Kind.NODE_LOST, 6, node=1)
    write(Kind.PROCESS_SPAWNED, 10, process="new", node=0, device=f"{device}:0")
    events.sort(key=lambda event: event.time_ns)
    episode = SimpleNamespace(
        fault="bad", injected=SimpleNamespace(time_ns=2e9), landed=1, processes=("w0",)
    )
    exited = {e.data["process"]: e.time_ns for e in events if e.kind is Kind.PROCESS_EXITED}
    evidence: Any = SimpleNamespace(
        measures=SimpleNamespace(episodes=[episode]),
        history=SimpleNamespace(exited_ns=exited),
        fault=lambda name: SimpleNamespace(id="bad", expect=SimpleNamespace(preflight="unfit")),
        log=SimpleNamespace(of=lambda *kinds: iter([e for e in events if e.kind in kinds])),
    )
    return rejoins(evidence)


@pytest.mark.parametrize(
    ("others", "device", "lost", "verdict"),
    [
        (("free",), "cpu", False, "fail"),
        (("taken",), "cpu", False, "fail"),  # which two processes can share
        (("unfit",), "cpu", False, "pass"),
        (("checked",), "cpu", False, "pass"),
        (("unfit", "free"), "cpu", False, "fail"),
        (("free",), "cpu", True, "pass"),
        ((), "cpu", False, "pass"),
        (("free",), "cuda", False, "fail"),
        (("taken",), "cuda", False, "pass"),
    ],
)
def test_an_unfit_place_is_used_only_if_there_is_no_other(
    others: tuple[str, ...], device: str, lost: bool, verdict: str
) -> None:
    assert unfit_and_used(*others, device=device, lost=lost).verdict == verdict
