"""What excuses a verdict counts only where the log shows it; replicas that differ are no find only
where a fault made them so and nothing was due to compare them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.mutations.tape import Tape
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.fuzz.play import unlanded
from trainchaos.harness.fuzz.play.excuses import _no_node_left
from trainchaos.harness.fuzz.play.oracle import find_in
from trainchaos.harness.fuzz.play.play import PlayResult, SimPlayer, judged
from trainchaos.harness.fuzz.play.uncompared import uncompared
from trainchaos.harness.fuzz.play.unlanded import Case

FOLDER = Path(__file__).resolve().parents[3] / "scenarios" / "regressions"
COPIED = "changed-state-copied-from-the-last-survivor"
ALIKE = "a-majority-changed-alike"
LATER = "checkpoint-restart-tensor-corrupt-exception-df0813"
SLOW = "checkpoint-restart-collective-skip-gil-deadlock-gpu-hang-8d2b45"
DISCARDED = "changed-state-discarded-before-replicas-were-compared"


@cache
def played(name: str) -> tuple[dict[str, Any], PlayResult]:
    tree = YAML(typ="safe", pure=True).load(FOLDER / f"{name}.yaml")
    return tree, SimPlayer(catalogue=build_catalogue()).play(tree)


def altered(one: PlayResult, change: Callable[[Tape], object]) -> PlayResult:
    """The same play after a change of its log."""
    tape = Tape.of({actor: each.events for actor, each in one.logs["faulted"].actors.items()})
    change(tape)
    return replace(one, logs={**one.logs, "faulted": tape.log()})


def excused(name: str, change: Callable[[Tape], None] = lambda _: None, **workload: Any) -> bool:
    """What is said of an arm after a change of its log or of how its scenario compares."""
    tree, one = played(name)
    log = altered(one, change).logs["faulted"]
    return uncompared({**tree, "workload": tree["workload"] | workload}, log)


def test_a_real_run_names_its_logs_otherwise() -> None:
    tree, one = played(COPIED)
    assert find_in(tree, replace(one, logs={"default.r0.faulted": one.logs["faulted"]})) is None
    assert find_in(tree, replace(one, logs={})) is not None


@pytest.mark.parametrize("name", [COPIED, DISCARDED])
def test_what_nothing_was_due_to_compare_is_excused(name: str) -> None:
    assert excused(name)
    assert not excused(name, verify_every=1), "it was due after the step of the change"
    assert not excused(name, verify_every=None), "it was due with the checkpoint of that step"


def test_a_difference_before_its_fault_is_not() -> None:
    def before(tape: Tape) -> None:
        tape.find(Kind.STATE_DIGEST, step=3)[0].data["parameters"] = "0" * 16

    assert not excused(COPIED, before)


def test_a_difference_after_all_took_one_state_is_not() -> None:
    def after(tape: Tape) -> None:
        tape.find(Kind.STATE_DIGEST, step=4, generation=2)[0].data["optimizer"] = "0" * 16

    assert not excused(DISCARDED, after)


def test_a_value_that_misses_an_update_is_changed_in_the_step_after() -> None:
    def at_once(tape: Tape) -> None:
        for row in tape.find(Kind.FAULT_EFFECT, step=11):
            row.step = 10

    assert excused(LATER)
    assert not excused(LATER, at_once), "a comparison was due after that step"
    assert not excused(LATER, verify_every=1)


@pytest.mark.long
def test_patience_that_faults_taught_is_longer_than_the_time_limit_only_where_they_did() -> None:
    tree, one = played(SLOW)
    assert find_in(tree, one) is None
    rule = [{"when": "no_committed_step_for > 1000s"}]
    assert find_in({**tree, "stop_conditions": rule}, one) is not None, "it could have waited"

    def before(tape: Tape) -> None:
        for row in tape.find(Kind.FAULT_INJECTED):
            row.time_ns = 0

    assert find_in(tree, altered(one, before)) is not None, "the job is slow by itself"


def test_a_generation_that_holds_both_states_was_compared_as_it_formed() -> None:
    def kept(tape: Tape) -> None:
        tape.find(Kind.GENERATION_STARTED, generation=2)[0].data["sources"] = {}

    assert not excused(COPIED, kept)


def test_processes_that_were_changed_in_the_same_way_hold_the_same() -> None:
    def otherwise(tape: Tape) -> None:
        for row in tape.find(Kind.STATE_DIGEST, step=5, generation=1):
            if row.actor == "w1":
                row.data["optimizer"] = "0" * 16

    assert excused(ALIKE)
    assert not excused(ALIKE, otherwise), "a comparison was due as the next generation formed"


def test_a_fault_that_did_not_land_changed_nothing() -> None:
    def missing(tape: Tape) -> None:
        tape.drop(tape.find(Kind.FAULT_LANDED, fault="f0"))

    assert not excused(COPIED, missing)


def test_replicas_that_are_alike_need_no_excuse() -> None:
    def alike(tape: Tape) -> None:
        for row in tape.find(Kind.STATE_DIGEST):
            row.data |= dict.fromkeys(("parameters", "optimizer", "scheduler"), "0" * 16)

    assert not excused(COPIED, alike)


@pytest.mark.slow
def test_a_target_that_nothing_else_ended_is_not_excused() -> None:
    """A kill without an effect, of a process that died: the witness may be at fault."""
    tree, one = played("checkpoint-restart-process-segv-rack-kill-bb2cd5")
    assert unlanded.ended_otherwise(Case(tree, one))

    def by_itself(tape: Tape) -> None:
        for event in tape.find(Kind.FAULT_INJECTED, fault="f0"):
            event.data["target"] = {}
        tape.find(Kind.PROCESS_EXITED, process="w1")[0].data["expected"] = False

    spoilt = altered(one, by_itself)
    assert not unlanded.ended_otherwise(Case(tree, spoilt))
    assert find_in(tree, spoilt) is not None


@pytest.mark.long
def test_a_rank_held_in_a_step_that_another_fault_broke_is_excused_only_with_that_fault() -> None:
    tree, one = played("checkpoint-restart-partition-gpu-hang-1491b0")
    assert unlanded.thrown_away(Case(tree, one)) and find_in(tree, one) is None
    alone = altered(one, lambda tape: tape.drop(tape.find(Kind.FAULT_LANDED, fault="f0")))
    assert not unlanded.thrown_away(Case(tree, alone))


def test_giving_up_for_want_of_a_node_needs_the_loss_of_all_of_them() -> None:
    tree, one = played(COPIED)
    tree = {**tree, "launcher": {"kind": "agents", "nodes": 1}}
    assert not _no_node_left(Case(tree, one))

    def loses_one(tape: Tape) -> None:
        hit = tape.find(Kind.FAULT_INJECTED)[0]
        tape.add(hit, kind=Kind.NODE_LOST, data={"node": 0, "why": "its agent has ended"})

    lost = altered(one, loses_one)
    assert _no_node_left(Case(tree, lost))
    assert not _no_node_left(Case({**tree, "launcher": {"kind": "agents", "nodes": 2}}, lost))


def test_a_fault_that_waited_for_a_hidden_step_is_excused_only_if_one_was_hidden() -> None:
    tree, one = played("a-step-that-the-supervisor-never-saw")
    assert find_in(tree, one) is None
    seen = altered(one, lambda tape: tape.drop(tape.find(Kind.FAULT_LANDED, fault="f2")))
    assert find_in(tree, seen) is not None


def test_that_nobody_was_there_to_be_hit_is_a_reason_where_the_log_shows_it() -> None:
    tree, one = played("hit-where-others-had-left-nobody")

    def stays(tape: Tape) -> None:
        tape.drop(tape.find(Kind.PROCESS_EXITED, process="w2"))
        tape.drop(tape.find(Kind.FAULT_EFFECT))

    found = find_in(tree, altered(one, stays))
    assert found is not None and "no process is on node 1" in found.text


@pytest.mark.parametrize(
    ("name", "phase", "missed"),
    [
        ("lost-to-another-before-it-came-there", "optimizer", False),
        ("lost-to-another-before-it-came-there", "collective", True),
        ("lost-to-another-where-it-saves", "checkpoint", False),
        ("lost-to-another-where-it-saves", "optimizer", True),
    ],
)
def test_a_fault_that_was_due_before_another_took_its_target_is_missing(
    name: str, phase: str, missed: bool
) -> None:
    tree, one = played(name)

    def due(tape: Tape) -> None:
        (planned,) = tape.find(Kind.FAULT_PLANNED, fault="f1")
        planned.data["at"]["points"] = [[step, phase] for step, _ in planned.data["at"]["points"]]

    other = altered(one, due)
    assert other.cell is not None
    found = find_in(tree, replace(other, findings=dict(judged(other.cell, other.logs))))
    assert (found is not None and "but was never injected" in found.text) == missed
