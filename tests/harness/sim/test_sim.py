"""The simulated launcher: one seed gives one log, and hundreds of random scenarios recover and
pass.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.arms import judged
from tests.support.portions import first_in_test, long_but
from tests.support.search.simulate import KILL, Played, cell_of, control_of, evidence, play
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.launchers.sim import Sim

STRATEGIES = ("checkpoint-restart", "drop-replica", "hot-spare")
RESTART_ALL, DROP, SPARE = STRATEGIES
PARTS = 6
"""Of the moments of a recovery, each of which ``make test`` plays one."""
SLOW = Sim(teardown_ms=60, checkpoint_ms=90)


def files(played: Played) -> dict[str, bytes]:
    """Every log of an arm."""
    return {path.name: path.read_bytes() for path in sorted(played.directory.iterdir())}


def found(
    cell: Cell, root: Path, seed: int, control: Played | None = None, sim: Sim | None = None
) -> tuple[Played, dict[str, str]]:
    """A faulted arm, and what its checkers say that did not pass, compared with a control arm."""
    faulted = play(cell, root, seed=seed, sim=sim)
    control = control or control_of(cell, seed=seed, sim=sim)
    assert control.outcome == "completed"
    findings = {f"control {name}": f for name, f in judged(evidence(control, None)).items()}
    findings |= judged(evidence(faulted, control))
    return faulted, {
        name: f"{f.verdict}: {f.witness}" for name, f in findings.items() if f.verdict != "pass"
    }


def second(kind: str, target: dict[str, Any], **at: Any) -> dict[str, Any]:
    """Another fault."""
    return {"id": "second", "kind": kind, "target": target, "at": at}


CORRUPT = {
    "id": "c",
    "kind": "checkpoint-corrupt",
    "target": {"checkpoint": "latest"},
    "at": {"event": "checkpoint_committed", "nth": 3},
}


def of(played: Played, kind: Kind) -> list[Event]:
    """Events of a kind."""
    return list(played.log.of(kind))


# ---- determinism


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("recovery", STRATEGIES)
def test_the_same_seed_gives_the_same_log_byte_for_byte(recovery: str, memory: Path) -> None:
    cell = cell_of(recovery, [KILL])
    first, again = (files(play(cell, memory / name, seed=1)) for name in ("one", "two"))
    assert first == again
    assert len(first) > cell.scenario.workload.ranks
    assert first != files(play(cell, memory / "three", seed=2))


def test_no_log_tells_where_it_was_written(memory: Path) -> None:
    played = play(cell_of(RESTART_ALL, [CORRUPT, KILL]), memory, seed=1)
    assert of(played, Kind.CHECKPOINT_REFUSED)
    assert not [name for name, data in files(played).items() if str(memory).encode() in data]


@pytest.mark.slow
def test_the_simulator_does_without_torch() -> None:
    code = (
        "import sys, trainchaos.harness.launchers.sim, trainchaos.harness.run.orchestrator;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", STRATEGIES)
def test_what_a_rank_does_besides_training_is_in_the_log_and_no_checker_minds(
    recovery: str, memory: Path
) -> None:

    for number, step in enumerate((21, 33)):
        fault = {**KILL, "target": {"rank": 0}, "at": {"step": step, "phase": "backward"}}
        cell = cell_of(recovery, [fault], evaluate={"every": 20, "takes": 2.0})
        faulted, problems = found(cell, memory / str(number), 3)
        assert (faulted.outcome, problems) == ("completed", {})
        begun, ended = of(faulted, Kind.BUSY), of(faulted, Kind.BUSY_ENDED)
        assert len(begun) >= 2 and {event.data["what"] for event in begun} == {"evaluation"}
        assert {(event.data["rank"], event.data["seconds"]) for event in ended} == {(0, 2.0)}


@pytest.mark.slow
@pytest.mark.parametrize("recovery", long_but(STRATEGIES, SPARE))
@pytest.mark.parametrize("kind", long_but(["process-kill", "process-stop"], "process-kill"))
@pytest.mark.parametrize("part", first_in_test(PARTS, 1))
def test_a_second_fault_at_any_moment_of_a_recovery(
    recovery: str, kind: str, part: int, memory: Path
) -> None:
    """Source, joiner and bystanders are hit in every stage of it: abort, rendezvous, transfer,
    first step.
    """
    first = play(cell_of(recovery, [KILL]), memory / "first", seed=3)
    began, *_, ended = (event.time_ns for event in of(first, Kind.GENERATION_READY))
    start = of(first, Kind.FAULT_INJECTED)[0].time_ns
    moments = 12
    for rank in (0, 1, 2):
        for moment in range(part, moments, PARTS):
            if rank == 2 and moment == 0:  # it is dead already
                continue
            time = round((start + (ended - start) * 1.1 * moment / moments - began) / 1e9, 5)
            cell = cell_of(recovery, [KILL, second(kind, {"rank": rank}, time=time)])
            faulted, problems = found(cell, memory / f"{rank}-{moment}", 3)
            assert (faulted.outcome, problems) == ("completed", {}), f"rank {rank} at {time}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 20), marks=pytest.mark.long)], ids=str
)
def test_members_may_be_a_step_apart_when_one_dies_in_a_collective(
    seeds: range, memory: Path
) -> None:
    apart = 0
    for seed in seeds:
        fault = {**KILL, "at": {"time": 1.5 + seed * 0.0021}}
        faulted, problems = found(cell_of(DROP, [fault], ranks=6), memory / str(seed), seed)
        assert problems == {}, f"seed {seed}"
        parked = [e.data["processes"] for e in of(faulted, Kind.SURVIVORS_PARKED)]
        apart += any(len({held["step"] for held in processes.values()}) > 1 for processes in parked)
    assert apart, "no death fell into a collective: shift the times"


# ---- what random scenarios once found


def test_a_spare_that_never_got_the_state_is_no_source_of_it(memory: Path) -> None:
    first = {**KILL, "target": {"rank": 1}}
    cell = cell_of(SPARE, [first, second("process-kill", {"rank": 0}, event="regroup")], ranks=2)
    faulted, problems = found(cell, memory, 7)
    assert problems == {}
    generations = of(faulted, Kind.GENERATION_STARTED)
    assert generations[2].data["state"] == "checkpoint"
    assert of(faulted, Kind.GENERATION_READY)[-1].data["resume_step"] == 30


@pytest.mark.slow
def test_a_fault_in_time_waits_for_a_rank_that_is_being_replaced(memory: Path) -> None:
    first = play(
        cell_of({"strategy": RESTART_ALL, "restart": "cold"}, [KILL]), memory / "first", seed=3
    )
    began = of(first, Kind.GENERATION_READY)[0].time_ns
    time = (of(first, Kind.FAILURE_DETECTED)[0].time_ns - began) / 1e9 + 0.5
    faults = [KILL, second("process-kill", {"rank": 0}, time=round(time, 3))]
    faulted, problems = found(
        cell_of({"strategy": RESTART_ALL, "restart": "cold"}, faults), memory, 3
    )
    assert problems == {}
    hit = of(faulted, Kind.FAULT_INJECTED)[-1]
    assert (
        hit.data["target"]["process"] == of(faulted, Kind.GENERATION_STARTED)[1].data["members"][0]
    )


def test_a_fault_at_an_event_that_finds_nobody_says_so(memory: Path) -> None:
    stays_small = {"strategy": DROP, "rejoin": False}
    late = second("process-stop", {"rank": 3}, event="checkpoint_saving", nth=4)
    faulted, problems = found(cell_of(stays_small, [KILL, late]), memory, 3)
    assert [event.data["reason"] for event in of(faulted, Kind.FAULT_FAILED)] == [
        "no process holds rank 3"
    ]
    assert list(problems) == ["fault-landed"]


def test_a_stop_is_seen_even_if_everything_is_killed_the_next_moment(memory: Path) -> None:
    late = second("process-stop", {"rank": 0}, event="recovery_started")
    faulted, problems = found(cell_of(RESTART_ALL, [KILL, late]), memory, 3)
    assert (problems, len(of(faulted, Kind.FAULT_LANDED))) == ({}, 2)


def test_a_checkpoint_deleted_by_retention_is_not_missed(memory: Path) -> None:
    faulted, problems = found(cell_of(RESTART_ALL, [CORRUPT, KILL], keep=1), memory, 3)
    assert (list(problems), len(of(faulted, Kind.GENERATION_READY))) == (["liveness"], 1)
    reason = of(faulted, Kind.RUN_FINISHED)[0].data["reason"]
    assert reason == "nothing is left to restore: step-00000030 may not be used"


@pytest.mark.slow
def test_a_world_may_shrink_when_its_spare_died_before(memory: Path) -> None:
    recovery = {"strategy": SPARE, "replenish": False}
    faults = [second("process-kill", {"role": "spare"}, step=10), KILL]
    faulted, problems = found(cell_of(recovery, faults), memory, 3)
    assert (problems, len(of(faulted, Kind.GENERATION_READY)[-1].data["members"])) == ({}, 3)


def test_a_nan_that_dies_with_its_attempt_is_contained(memory: Path) -> None:
    nan = {
        "id": "nan",
        "kind": "tensor-corrupt",
        "params": {"surface": "loss"},
        "target": {"rank": 1},
    }
    at = {"step": 33, "phase": "backward"}
    faults = [{**nan, "at": {"step": 33}}, {**KILL, "target": {"rank": 0}, "at": at}]
    faulted, problems = found(cell_of(SPARE, faults), memory, 3)
    assert (problems, of(faulted, Kind.NONFINITE_CAUGHT)) == ({}, [])


@pytest.mark.slow
def test_a_nan_is_contained_too_if_the_one_that_ends_its_attempt_is_a_step_behind(
    memory: Path,
) -> None:
    nan = {
        "id": "nan",
        "kind": "tensor-corrupt",
        "params": {"surface": "loss"},
        "target": {"rank": 1},
    }
    late = {**KILL, "kind": "exception", "at": {"step": 33, "phase": "optimizer"}}
    faulted, problems = found(
        cell_of(DROP, [{**nan, "at": {"step": 34}}, late]), memory, 3, sim=SLOW
    )
    assert (problems, of(faulted, Kind.NONFINITE_CAUGHT)) == ({}, [])
    assert len(of(faulted, Kind.FAULT_LANDED)) == 2


@pytest.mark.slow
def test_frequent_slow_checkpoints_are_no_lack_of_liveness(memory: Path) -> None:
    last = {**KILL, "at": {"step": 53}}
    assert found(cell_of(SPARE, [last], every=1), memory, 3, sim=SLOW)[1] == {}


# ---- jobs that cannot go on


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("recovery", long_but(["none", *STRATEGIES], "none", RESTART_ALL))
@pytest.mark.parametrize("kind", ["process-kill", "process-stop", "exception", "tensor-corrupt"])
def test_a_fault_that_always_comes_back_ends_in_good_order(
    recovery: str, kind: str, memory: Path
) -> None:
    fault = {
        "id": "again",
        "kind": kind,
        "target": {"rank": 2},
        "at": {"step": 33},
        "retrigger": "every_attempt",
    }
    cell = cell_of(recovery, [{**fault, "expect": {"outcome": "fail-stop"}}])
    faulted, problems = found(cell, memory, 3)
    assert problems == {}
    # Strategies that leave the bad place out get past it; one that fills it again and again has to
    # give up.
    due = {"none": 1, RESTART_ALL: 11 if kind == "tensor-corrupt" else 4}.get(recovery)
    assert due in (None, len(of(faulted, Kind.FAULT_INJECTED)))
    assert faulted.outcome == "gave-up" if due else faulted.outcome in ("completed", "gave-up")


def test_the_end_claims_only_what_no_rollback_took_back(memory: Path) -> None:
    again = {**KILL, "at": {"time": 1.5}, "retrigger": "every_attempt"}
    cell = cell_of(RESTART_ALL, [{**again, "expect": {"outcome": "fail-stop"}}])
    faulted, problems = found(cell, memory, 3)
    assert (faulted.outcome, problems) == ("gave-up", {})
    assert of(faulted, Kind.RUN_FINISHED)[0].data["committed_step"] == 30


@pytest.mark.slow
def test_a_checkpoint_is_corrupted_anew_each_time_or_not_at_all(memory: Path) -> None:
    at = {"event": "checkpoint_committed", "nth": 3}
    fault = {"id": "c", "kind": "checkpoint-corrupt", "target": {"checkpoint": "latest"}, "at": at}
    twice = {**fault, "at": {"event": "recovery_started"}, "id": "d"}
    for mode, landed in (("bitflip", 3), ("missing", 2)):
        faults = [{**each, "params": {"mode": mode}} for each in (fault, twice)]
        faulted, problems = found(cell_of(RESTART_ALL, [*faults, KILL]), memory / mode, 3)
        assert len(of(faulted, Kind.FAULT_LANDED)) == landed
        assert of(faulted, Kind.GENERATION_READY)[-1].data["resume_step"] == 20
        assert set(problems) == (set() if mode == "bitflip" else {"fault-landed"})
        assert faulted.outcome == "completed"


@pytest.mark.slow
def test_simulated_time_is_free(memory: Path) -> None:
    hang = {
        **KILL,
        "kind": "gil-deadlock",
        "at": {"step": 1, "phase": "backward"},
        "params": {"hold_s": 300},
    }
    faulted, problems = found(cell_of(SPARE, [hang]), memory, 3)
    waited = (
        of(faulted, Kind.FAILURE_DETECTED)[0].time_ns - of(faulted, Kind.FAULT_INJECTED)[0].time_ns
    )
    assert not problems, (
        "its evidence is waited for as long as a hang before the first step may take to be seen"
    )
    assert waited > 59e9
