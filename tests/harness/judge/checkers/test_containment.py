"""A NaN that changes nothing is judged for what it is, and a refusal is credited to what can have
caused it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.sim.test_sim import SPARE
from tests.mutations.tape import Tape
from tests.support.search.simulate import cell_of, changed, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import CHECKERS, check
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.sim.rank.step import Attempt

PLACEHOLDER: dict[str, Any] = {
    "id": "early",
    "kind": "tensor-corrupt",
    "params": {"surface": "optimizer_state", "op": "nan"},
    "target": {"rank": 2},
    "at": {"step": 1},
}


def beside(rank: int, step: int = 25) -> dict[str, Any]:
    """A NaN that is caught."""
    params = {"surface": "gradient", "op": "nan"}
    at = {"step": step, "phase": "backward"}
    return {
        "id": "late",
        "kind": "tensor-corrupt",
        "params": params,
        "target": {"rank": rank},
        "at": at,
    }


@pytest.fixture
def placeholder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer overwrites its slots in the first step, whatever is in them."""
    corrupted = Attempt.corrupted

    def first_overwrites(attempt: Attempt, surface: str, values: list[float]) -> None:
        if surface != "optimizer_state" or attempt.number > 1:
            corrupted(attempt, surface, values)

    monkeypatch.setattr(Attempt, "corrupted", first_overwrites)


def contained(root: Path, faults: list[dict[str, Any]], change: Any = None) -> Finding:
    """What is said of an arm with these faults; ``change``: of its log, before it is judged."""
    faulted, control = (
        play(cell_of(SPARE, faults), root, seed=3, arm=arm) for arm in ("faulted", "control")
    )
    made = evidence(faulted, control) if change is None else changed(faulted, control, change)
    return check(CHECKERS["nan-containment"], made)


@pytest.mark.slow
def test_what_changes_nothing_passes_and_is_said_to(placeholder: None, memory: Path) -> None:
    found = contained(memory, [PLACEHOLDER])
    assert found.verdict == "pass"
    assert "early changed nothing: after step 10 all is as in the control arm" in found.witness


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [1, 2], ids=["another rank", "the same rank"])
def test_beside_a_fault_that_is_caught_it_is_still_said_to_change_nothing(
    placeholder: None, memory: Path, rank: int
) -> None:
    found = contained(memory, [PLACEHOLDER, beside(rank)])
    assert found.verdict == "pass" and "early changed nothing" in found.witness
    assert "late changed nothing" not in found.witness


@pytest.mark.slow
def test_beside_a_kill_it_is_judged_alike(placeholder: None, memory: Path) -> None:
    kill = {"id": "kill", "kind": "process-kill", "target": {"rank": 2}, "at": {"step": 33}}
    assert "early changed nothing" in contained(memory, [PLACEHOLDER, kill]).witness


@pytest.mark.slow
def test_what_changes_the_state_and_is_not_caught_fails(memory: Path) -> None:
    """It has an effect: another one's refusal is no excuse for it, and digests that differ are no
    proof of none.
    """

    def silent(tape: Tape) -> None:
        for row in tape.find(Kind.NONFINITE_CAUGHT):
            row.data["blamed"] = [1]

    found = contained(memory, [{**PLACEHOLDER, "at": {"step": 3}}, beside(1)], silent)
    assert (
        found.verdict == "fail"
        and "early planted a non-finite value that was not caught" in found.witness
    )


@pytest.mark.slow
def test_a_digest_that_differs_is_no_proof(placeholder: None, memory: Path) -> None:
    def other(tape: Tape) -> None:
        for row in tape.find(Kind.STATE_DIGEST, rank=2):
            row.data["optimizer"] = "0" * 16

    found = contained(memory, [PLACEHOLDER], other)
    assert found.verdict == "fail" and "was not caught" in found.witness


@pytest.mark.slow
def test_what_is_caught_is_no_idle_fault(memory: Path) -> None:
    found = contained(memory, [beside(2)])
    assert found.verdict == "pass" and "changed nothing" not in found.witness


def test_the_last_step_is_lost_before_its_state_was_looked_at(tmp_path: Path) -> None:
    last = {**PLACEHOLDER, "target": {"rank": 1}, "at": {"step": 11}}
    slow = {
        "id": "slow",
        "kind": "io-slow",
        "params": {"delay_s": 1},
        "target": {"rank": 1},
        "at": {"step": 5},
    }
    stop = {"id": "stop", "kind": "process-stop", "target": {"rank": 1}, "at": {"time": 2.0}}
    faults = [last, {**slow, "duration": 0.4}, stop]
    cell = cell_of("drop-replica", faults, ranks=2, steps=11, every="0.3s", parallelism="fsdp")
    faulted = play(cell, tmp_path, seed=94)

    def verdict(change: Any) -> str:
        return check(CHECKERS["nan-containment"], changed(faulted, None, change)).verdict

    def never_again(tape: Tape) -> None:
        tape.drop(tape.find(Kind.STEP_COMMITTED, step=11, generation=2))

    def from_there(tape: Tape) -> None:
        tape.find(Kind.GENERATION_READY, generation=2)[0].data["resume_step"] = 11

    assert verdict(lambda tape: None) == "pass"
    assert verdict(never_again) == verdict(from_there) == "fail"


@pytest.mark.slow
def test_another_failure_comes_before_the_step_that_would_show_it(memory: Path) -> None:
    """That the state was gone by then is an excuse, and only where nobody went on with it."""
    spoilt = {**PLACEHOLDER, "at": {"step": 15}}
    at = {"step": 16, "phase": "data"}
    kill = {"id": "kill", "kind": "process-kill", "target": {"rank": 1}, "at": at}

    cell = cell_of("checkpoint-restart", [spoilt, kill])
    faulted, control = (play(cell, memory, seed=3, arm=arm) for arm in ("faulted", "control"))

    def verdict(change: Any) -> str:
        return check(CHECKERS["nan-containment"], changed(faulted, control, change)).verdict

    def a_later_step(tape: Tape) -> None:
        for row in tape.find(Kind.STEP_COMMITTED, step=15, generation=1, rank=0):
            tape.rows.append(replace(row, step=16, time_ns=row.time_ns + 1))

    def with_what_they_held(tape: Tape) -> None:
        (started,) = tape.find(Kind.GENERATION_STARTED, generation=2)
        started.data |= {"state": "kept", "members": ["w0", "w1", "w2", "w3"]}

    assert verdict(lambda tape: None) == "pass"
    assert verdict(a_later_step) == verdict(with_what_they_held) == "fail"
