"""What a supervisor makes of a warning that the place of a process is about to fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recovery.supervise.test_controller import Rig
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategies.none import NoRecovery
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.supervise.adoption import past
from trainchaos.recovery.supervise.controller import Stage
from trainchaos.recovery.transport.wire import Abort, CheckpointNote, Notice, PauseRequest

WHY = "XID 48: an uncorrectable ECC error, on cpu:1"


def warned(strategy: Strategy, *processes: str, **more: Any) -> Rig:
    """A job of ten steps in which the places of these processes are about to fail."""
    rig = Rig(strategy, **more)
    rig.train()
    rig.control.on_warnings(dict.fromkeys(processes, WHY))
    return rig


def pauses(rig: Rig) -> list[bool]:
    """Whether each pause that was asked for saves a checkpoint."""
    return [message.save for _, message in rig.hands.sent if isinstance(message, PauseRequest)]


def test_a_rank_moves_to_a_spare_at_a_step_boundary() -> None:
    rig = warned(HotSpare(), "w1")
    assert rig.causes() == [("w1", "warning")]
    assert rig.stage is Stage.PAUSING and pauses(rig) == [False]
    assert not rig.hands.killed and not rig.got(Abort), "it works until the step is done"
    rig.park("w0", "w1", "w2", "w3", step=11, why="pause")
    assert rig.members == ("w0", "s4", "w2", "w3") and rig.hands.killed == ["w1"]
    assert rig.copies() == {1: 0}
    rig.join(*rig.members, step=11)
    assert rig.stage is Stage.TRAINING
    rig.go_on(12, first=12)
    assert rig.names("spare") == ["s4", "s5"], "the next failure finds a spare again"
    rig.die("w1")
    assert rig.causes() == [("w1", "warning")], "its end was asked for"


@pytest.mark.parametrize("strategy", [CheckpointRestart(), DropReplica(), HotSpare(spares=1)])
def test_without_a_spare_for_each_a_checkpoint_is_saved_and_all_go_on(strategy: Strategy) -> None:
    rig = warned(strategy, "w1", "w2")
    assert rig.causes() == [("w1", "warning"), ("w2", "warning")]
    assert rig.stage is Stage.PAUSING and pauses(rig) == [True]
    members = rig.members
    rig.park(*members, step=11, why="pause")
    assert rig.members == members and not rig.hands.killed
    rig.join(*members, step=11)
    assert rig.stage is Stage.TRAINING and pauses(rig) == [True], "they are not asked twice"


def test_who_could_not_move_at_once_moves_as_soon_as_a_spare_is_ready() -> None:
    rig = warned(HotSpare(), "w1", "w2")
    rig.park(*rig.members, step=11, why="pause")
    rig.join(*rig.members, step=11)
    rig.control.on_message("s4", CheckpointNote(state="committed", step=11, checkpoint="c"))
    rig.die("s4")
    rig.ready("s5")
    assert rig.stage is Stage.TRAINING, "one spare for two"
    rig = warned(HotSpare(spares=2), "w1", "w2", "s4")
    assert rig.stage is Stage.PAUSING and pauses(rig) == [True], "one spare is about to fail too"
    assert rig.hands.killed == ["s4"]
    rig.park(*rig.members, step=11, why="pause")
    rig.join(*rig.members, step=11)
    rig.go_on(12, first=12)
    rig.ready("s6")
    assert rig.stage is Stage.PAUSING and pauses(rig) == [True, False]
    rig.park(*rig.members, step=13, why="pause")
    assert rig.members == ("w0", "s5", "s6", "w3")


def test_the_last_holder_of_a_shard_leaves_a_checkpoint_behind() -> None:
    rig = warned(HotSpare(), "w1", shards=4)
    assert rig.stage is Stage.PAUSING and pauses(rig) == [True]
    rig.control.on_message("w0", CheckpointNote(state="committed", step=11, checkpoint="c"))
    rig.park("w0", "w1", "w2", "w3", step=11, why="pause")
    assert "w1" in rig.hands.killed and "w1" not in rig.members and "s4" in rig.members
    assert all(join.state.restore for join in rig.joins().values())


def test_a_job_without_recovery_goes_on() -> None:
    rig = warned(NoRecovery(), "w1")
    assert rig.stage is Stage.TRAINING and not pauses(rig) and not rig.hands.killed


def test_a_spare_at_a_place_that_fails_is_replaced_at_once() -> None:
    rig = warned(HotSpare(), "s4")
    assert rig.hands.killed == ["s4"] and rig.stage is Stage.TRAINING
    assert rig.names("spare") == ["s4", "s5"]


def test_a_second_warning_of_a_process_and_one_of_nobody_change_nothing() -> None:
    rig = warned(DropReplica(), "w1")
    rig.control.on_warnings({"w1": WHY, "w99": WHY})
    rig.park(*rig.members, step=11, why="pause")
    rig.join(*rig.members, step=11)
    rig.control.on_warnings({"w1": WHY})
    assert rig.causes() == [("w1", "warning")] and pauses(rig) == [True]
    rig.die("w1")
    rig.control.on_warnings({"w1": WHY})
    assert rig.causes() == [("w1", "warning"), ("w1", "exit")]


def test_a_warning_during_a_recovery_is_answered_when_it_is_over() -> None:
    rig = Rig(HotSpare(spares=2))
    rig.train()
    rig.die("w3")
    rig.control.on_warnings({"w1": WHY})
    assert not pauses(rig)
    rig.park("w0", "w1", "w2", step=10)
    assert rig.members == ("w0", "w1", "w2", "s4")
    rig.join(*rig.members, step=10)
    assert rig.stage is Stage.PAUSING and pauses(rig) == [False]


def test_a_warning_that_a_failure_overtakes_is_answered_when_it_is_over() -> None:
    """The checkpoint that it asked for was not saved."""
    rig = warned(DropReplica(), "w1")
    rig.die("w3")
    rig.park("w0", "w1", "w2", step=10)
    rig.join(*rig.members, step=10)
    assert rig.stage is Stage.PAUSING and pauses(rig) == [True, True]


def test_a_warning_beside_a_notice_is_not_forgotten() -> None:
    rig = Rig(HotSpare(spares=2))
    rig.train()
    rig.die("w3")
    rig.control.on_warnings({"w1": WHY})
    rig.control.on_message("w2", Notice())
    rig.park("w0", "w1", "w2", step=10)
    rig.join(*rig.members, step=10)
    rig.park(*rig.members, step=11, why="pause")
    assert "w2" not in rig.members and "w1" in rig.members, "one spare, for who leaves for sure"
    rig.join(*rig.members, step=11)
    assert rig.stage is Stage.PAUSING and pauses(rig)[-1], "a checkpoint, for who may fail"


def test_no_rank_moves_to_a_place_that_fails_too() -> None:
    rig = Rig(HotSpare())
    rig.train()
    rig.control.no_better_place(["s4", "w99"])
    rig.control.on_warnings({"w1": WHY})
    assert rig.causes() == [("w1", "warning")] and not rig.hands.killed
    assert pauses(rig) == [True], "a checkpoint is all that helps"
    rig.park(*rig.members, step=11, why="pause")
    rig.join(*rig.members, step=11)
    rig.go_on(12, first=12)
    assert rig.names("spare") == ["s4"], "nor is another one started"
    rig.die("w2")
    rig.park("w0", "w1", "w3", step=12)
    assert "s4" in rig.members, "it takes the place of one that has failed"


@pytest.mark.parametrize("process", ["w1", "s4"])
def test_a_warning_before_training_began_does_not_hold_up_the_job(process: str) -> None:
    rig = Rig(HotSpare())
    rig.ready("w0", "w1", "w2", "w3")
    rig.control.on_warnings({process: WHY})
    if process == "w1":
        rig.ready("s4")
    assert rig.stage is Stage.FORMING and rig.members == ("w0", "w1", "w2", "w3")
    rig.join(*rig.members, step=0)
    assert pauses(rig) == ([False] if process == "w1" else [])
    assert rig.hands.killed == ([] if process == "w1" else ["s4"])


def test_whoever_takes_over_knows_of_a_warning_and_does_not_take_it_for_a_failure() -> None:
    lines = [
        (Kind.PROCESS_SPAWNED, {"process": "w0", "pid": 1, "role": "worker", "mode": "warm"}),
        (
            Kind.FAILURE_DETECTED,
            {"failure": 1, "cause": "warning", "process": "w0", "rank": 0, "detail": WHY},
        ),
    ]
    found = past(
        [
            Event(kind=kind, actor=ORCHESTRATOR, seq=n, time_ns=n, generation=1, step=1, data=data)
            for n, (kind, data) in enumerate(lines)
        ]
    )
    assert found.warned == {"w0"} and not found.failures and not found.dead
