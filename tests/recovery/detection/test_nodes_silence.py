"""Ranks whose node is not heard of: nobody judges them by what was known before; with a clock of
the test's own.
"""

from __future__ import annotations

from tests.recovery.detection.test_hangs import mark, trained, watch
from tests.recovery.supervise.test_controller import Rig
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.detection.hangs import UNHEARD
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.supervise.controller import Stage
from trainchaos.recovery.transport.wire import Abort

AWAY = {"w2": UNHEARD, "w3": UNHEARD}


# ---- hangs


def test_a_rank_that_is_not_heard_of_hangs_for_nobody() -> None:
    at_work = {"w0": mark("forward", moves=1), "w1": mark("forward"), "w2": mark("forward")}
    found = watch(
        trained(), at_work, for_s=60.0, states={"w0": UNHEARD, "w1": UNHEARD, "w2": UNHEARD}
    )
    assert found is None


def test_one_that_hangs_is_found_while_others_are_not_heard_of() -> None:
    marks = {"w0": mark("forward"), "w1": mark("collective"), "w2": mark("collective")}
    found = watch(trained(), marks, for_s=2.0, states={"w2": UNHEARD})
    assert found is not None and found.process == "w0"


def test_a_rank_is_not_late_at_once_when_it_is_heard_of_again() -> None:
    detector, away = trained(), {"w0": UNHEARD, "w1": UNHEARD}
    marks = {"w0": mark("forward"), "w1": mark("collective")}
    assert watch(detector, marks, for_s=0.3) is None
    assert watch(detector, marks, for_s=60.0, states=away) is None
    assert watch(detector, marks, for_s=0.2) is None, "only what was seen counts"
    late = watch(detector, marks, for_s=0.6)
    assert late is not None and late.process == "w0" and late.silent_s < 1.0


def test_all_that_are_heard_of_wait_for_others_and_nobody_is_to_blame() -> None:
    for heard in (["w0"], ["w0", "w1"]):
        marks = {name: mark("collective") for name in heard} | {
            "w2": mark("backward", collective=0)
        }
        found = watch(trained(), marks, for_s=5.0, states=AWAY)
        assert found is not None and found.process == "", heard
        assert watch(trained(), marks, for_s=1.1, states=AWAY) is None


# ---- the controller


def test_steps_go_on_behind_a_cut_and_nobody_is_touched() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=20)
    rig.hands.states.update(AWAY)
    for step in range(21, 400):
        rig.hands.now += 0.05
        rig.at("w0", "w1", step=step, committed=step)
        rig.control.tick()
    rig.hands.states.clear()
    rig.go_on(400, first=400)
    assert not rig.hands.killed and not rig.causes() and not rig.got(Abort)


def parted(strategy: DropReplica | HotSpare) -> Rig:
    """A rank dies while two others are not heard of; the last has parked."""
    rig = Rig(strategy)
    rig.train(steps=20)
    rig.hands.states.update(AWAY)
    rig.die("w1")
    rig.park("w0", step=20)
    return rig


def test_survivors_that_are_not_heard_of_are_waited_for() -> None:
    rig = parted(HotSpare())
    rig.wait(14.0)
    assert rig.stage is Stage.STOPPING and rig.hands.killed == []
    rig.hands.states.clear()
    rig.wait(0.9)
    assert rig.hands.killed == [], "they have as long to park as if they had been told just now"
    rig.park("w2", "w3", step=20)
    assert rig.stage is Stage.FORMING and rig.members == ("w0", "s4", "w2", "w3")


def test_one_that_is_heard_of_again_and_does_not_park_hangs() -> None:
    rig = parted(HotSpare())
    rig.wait(5.0)
    del rig.hands.states["w2"]
    rig.wait(1.5)
    assert rig.hands.killed == ["w2"]
    assert rig.causes()[-1] == ("w2", "hang")


def test_one_that_is_heard_of_all_along_hangs_as_early_as_ever() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=20)
    rig.hands.states["w3"] = UNHEARD
    rig.die("w1")
    rig.park("w0", step=20)
    rig.wait(1.2)
    assert rig.hands.killed == ["w2"]


def test_when_their_node_is_given_up_the_others_go_on() -> None:
    rig = parted(DropReplica())
    rig.wait(15.0)
    rig.die("w2", "w3", how="signal 9")
    assert rig.stage is Stage.FORMING and rig.members == ("w0",)


def test_a_spare_that_is_heard_of_is_taken_before_one_that_is_not() -> None:
    rig = Rig(HotSpare(spares=2))
    rig.train(steps=20)
    rig.hands.states["s4"] = UNHEARD
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=20)
    assert rig.members == ("w0", "s5", "w2", "w3")
    assert rig.events(Kind.GENERATION_STARTED)[-1]["members"] == list(rig.members)
