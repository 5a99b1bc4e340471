"""Faults of processes and devices in simulation: every strategy answers each, and every checker
agrees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.arms import judged
from tests.support.portions import long_but
from tests.support.search.simulate import Played, cell_of, control_of, evidence, play
from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.base import Fault, Fidelity
from trainchaos.harness.judge.incident import Incident

ALL = ["checkpoint-restart", "drop-replica", "hot-spare"]
DEATHS: dict[str, dict[str, Any]] = {
    "process-segv": {},
    "oom-kill": {},
    "gpu-error": {},
    "gpu-oom": {},
    "gpu-lost": {},
    "process-kill": {},
}
HANGS: dict[str, dict[str, Any]] = {
    "gil-deadlock": {"hold_s": 30},
    "gpu-hang": {"hold_s": 30},
    "collective-skip": {},
    "rank-hang": {"how": "spin", "hold_s": 30},
}
DEAF: dict[str, Any] = {
    "id": "deaf",
    "kind": "gil-deadlock",
    "params": {"hold_s": 30},
    "target": {"rank": 2},
    "at": {"step": 33},
}


def arm(
    recovery: Any, root: Path, kind: str, params: dict[str, Any], **fault: Any
) -> tuple[Played, list[Incident]]:
    """A faulted arm with which every checker agrees, and its incidents."""
    spec = {
        "id": "f",
        "kind": kind,
        "params": params,
        "target": {"rank": 2},
        "at": {"step": 33},
        **fault,
    }
    cell = cell_of(recovery, [spec])
    faulted, control = play(cell, root, seed=3), control_of(cell, seed=3)
    found = evidence(faulted, control)
    assert {n: f.witness for n, f in judged(found).items() if f.verdict != "pass"} == {}
    return faulted, list(found.measures.incidents)


@pytest.mark.sample(2)
@pytest.mark.parametrize("recovery", long_but(ALL, "hot-spare"))
@pytest.mark.parametrize("kind", DEATHS)
def test_a_death_of_any_kind_is_recovered_from(kind: str, recovery: str, memory: Path) -> None:
    faulted, (incident,) = arm(recovery, memory, kind, DEATHS[kind])
    assert faulted.outcome == "completed"
    assert (incident.outcome, incident.detected_by, incident.blamed_rank) == (
        "recovered",
        "exit",
        2,
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("recovery", long_but(ALL, "hot-spare"))
@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_of_any_kind_is_blamed_on_its_rank_and_recovered_from(
    kind: str, recovery: str, memory: Path
) -> None:
    faulted, (incident,) = arm(recovery, memory, kind, HANGS[kind])
    assert faulted.outcome == "completed"
    assert (incident.outcome, incident.detected_by, incident.blamed_rank) == (
        "recovered",
        "hang",
        2,
    )
    assert incident.recovery_time is not None and incident.recovery_time < 10, (
        "it is not waited for"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gil-deadlock", "gpu-hang"])
def test_a_short_hang_is_a_slow_step_and_no_failure(kind: str, memory: Path) -> None:
    _, (incident,) = arm("hot-spare", memory, kind, {"hold_s": 0.3}, expect={"outcome": "masked"})
    assert (incident.outcome, incident.witness) == ("masked", "job: phase times")


def test_a_rank_that_holds_its_interpreter_does_not_hear_the_abort(memory: Path) -> None:
    """Another rank dies while one is deaf: it does not park, and is killed for that."""
    kill = {"id": "kill", "kind": "process-kill", "target": {"rank": 0}, "at": {"step": 33}}
    played = play(cell_of({"strategy": "hot-spare", "spares": 2}, [DEAF, kill]), memory, seed=3)
    causes = [(e.data["process"], e.data["cause"]) for e in played.log.of(Kind.FAILURE_DETECTED)]
    assert (sorted(causes), played.outcome) == ([("w0", "exit"), ("w2", "hang")], "completed")


def test_a_rank_that_holds_its_interpreter_passes_no_notice_on(memory: Path) -> None:
    late = {
        "id": "term",
        "kind": "process-term",
        "params": {"grace_s": 60},
        "target": {"rank": 2},
        "at": {"time": 1.6},
    }
    played = play(cell_of("hot-spare", [DEAF, late]), memory, seed=3)
    injected = {e.data["fault"]: e.time_ns for e in played.log.of(Kind.FAULT_INJECTED)}
    (failure,) = played.log.of(Kind.FAILURE_DETECTED)
    assert injected["deaf"] < injected["term"] < failure.time_ns
    assert (failure.data["process"], failure.data["cause"]) == ("w2", "hang")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recovery", "outcome"),
    [
        ("none", "fail-stop"),
        ("checkpoint-restart", "fail-stop"),
        ("drop-replica", "recovered"),
        ("hot-spare", "recovered"),
        ({"strategy": "hot-spare", "spares": 4}, "fail-stop"),
    ],
    ids=str,
)
def test_a_crash_loop_is_left_behind_or_stopped_with_a_clear_word(
    recovery: Any, outcome: str, memory: Path
) -> None:
    faulted, incidents = arm(recovery, memory, "crash-loop", {}, expect={"outcome": outcome})
    assert {incident.outcome for incident in incidents} == {outcome}
    assert len(incidents) <= 4
    (finished,) = faulted.log.of(Kind.RUN_FINISHED)
    if outcome == "fail-stop" and recovery != "none":
        assert finished.data["reason"].startswith("rank 2 died 4 times in a row at step 33: ")


def test_a_broken_device_is_not_used_again(memory: Path) -> None:
    """Whoever survives with it must not train on: the process that held it never commits another
    step.
    """
    faulted, _ = arm("drop-replica", memory, "gpu-error", {})
    (hit,) = faulted.log.of(Kind.FAULT_INJECTED)
    later = [
        e
        for e in faulted.log.of(Kind.STEP_COMMITTED)
        if e.actor == hit.data["target"]["process"] and e.time_ns > hit.time_ns
    ]
    assert later == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", [{"rank": 1}, {"node": 0}], ids=str)
def test_a_health_event_reaches_its_reader_and_nothing_else(
    target: dict[str, Any], memory: Path
) -> None:
    faulted, (incident,) = arm("hot-spare", memory, "health-event", {"code": 94}, target=target)
    (reported,) = faulted.log.of(Kind.HEALTH_REPORTED)
    assert (reported.data["what"], reported.data["code"], reported.data["source"]) == (
        "xid",
        94,
        "injected",
    )
    assert reported.data["rank" if "rank" in target else "node"] == next(iter(target.values()))
    assert (incident.outcome, list(faulted.log.of(Kind.FAILURE_DETECTED))) == ("masked", [])


def test_what_is_real_depends_on_the_device_and_the_mode() -> None:
    kinds = plugins.load(plugins.FAULTS, Fault)
    real = Fidelity.REAL
    assert (kinds["gpu-oom"]().acts(cuda=True), kinds["gpu-oom"]().acts(cuda=False)) == (
        real,
        Fidelity.EMULATED,
    )
    assert kinds["process-kill"]().acts(cuda=False) is real
    modes = {
        mode: kinds["straggler"](factor=2, mode=mode).acts(cuda=False)
        for mode in ("duty-cycle", "cgroup-quota")
    }
    assert modes == {"duty-cycle": Fidelity.EMULATED, "cgroup-quota": real}
