"""Ranks that hold for several faults at once, for what is no rank's, and that die where
they hold.
"""

from __future__ import annotations

import importlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.inject.test_injector import KINDS, SECOND, FakeScene
from tests.support.search.simulate import cell_of
from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.base import Where
from trainchaos.chaos.scenario.model import FaultSpec
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.plan import plan
from trainchaos.chaos.schedule.targeting import Scope
from trainchaos.chaos.schedule.trigger import PATIENCE_S, Trigger
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.inject.occurrences import LET_GO, NOT_HELD, NOT_THERE
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.rank_setup import rank_config
from trainchaos.harness.launch.recipe import recipe
from trainchaos.harness.launch.workload import DataInfo
from trainchaos.harness.rank.fault_agent import FaultAgent
from trainchaos.recovery.policy.jobconfig import Exchange
from trainchaos.recovery.transport.wire import Extra

ALL = ("w0", "w1", "w2", "w3")
EVERYBODY = {"select": "all"}


class Rig:
    """An injector with any faults, and ranks that come to points. ``storage``: what was done to the
    file system.
    """

    def __init__(self, folder: Path, *faults: dict[str, Any]) -> None:
        specs = [FaultSpec.model_validate(fault) for fault in faults]
        planned = plan(specs, KINDS, Scope(topology=Topology(ranks=4), spares=1), 1)
        self.scene: Any = FakeScene(folder)
        self.scene.scenario.topology = Topology(ranks=4)
        self.scene.scenario.workload = SimpleNamespace(ranks=4)
        self.storage: list[str] = []
        self.scene.storage = SimpleNamespace(
            path=Path("/x"),
            fill=lambda shrink: self.storage.append("full"),
            free=lambda: self.storage.append("free"),
            probe=lambda: "ENOSPC" if self.storage[-1:] == ["full"] else None,
        )
        self.injector = Injector(self.scene, planned, KINDS)
        self.scene.hear = self.injector.observe
        self.form()
        self.injector.on_training()

    def form(self) -> None:
        """A generation forms."""
        more = {
            "members": list(self.scene.members),
            "state": "kept",
            "source": None,
            "cause": "failure",
        }
        self.scene.record(Kind.GENERATION_STARTED, **more)
        for rank, process in enumerate(self.scene.members):
            self.injector.arm(process, rank)

    def hold(self, fault: str, step: int, phase: str, *processes: str) -> None:
        """These come to a point, one after the other."""
        for process in processes:
            said = Extra(topic="at_point", payload={"fault": fault, "step": step, "phase": phase})
            self.injector.on_said(process, self.scene.members.index(process), said)

    def armed(self, process: str) -> list[tuple[str, int, str]]:
        """Where it is to hold, by the last word."""
        last = [told for told in self.scene.told("arm") if told["process"] == process][-1]
        return [(point["fault"], point["step"], point["phase"]) for point in last["points"]]

    def answers(self) -> list[tuple[str, str, bool]]:
        """Process, fault, and whether it is to act."""
        return [(told["process"], told["fault"], told["act"]) for told in self.scene.told("go")]

    def died(self, process: str, by: int = signal.SIGKILL) -> None:
        """Its exit is noticed."""
        more = {"pid": 1, "exit_code": None, "signal": by, "expected": False, "last_seq": 0}
        self.scene.record(Kind.PROCESS_EXITED, process=process, **more)


POISON = {"id": "p", "kind": "poison-sample", "at": {"step": 20}, "retrigger": {"max": 3}}
SLOW = {
    "id": "s",
    "kind": "straggler",
    "params": {"factor": 2},
    "duration": {"steps": 5},
    "target": {"rank": 1},
}
FULL = {"id": "d", "kind": "disk-full", "at": {"step": 15}, "duration": {"steps": 20}}


# --- several faults


def test_a_rank_that_holds_for_one_fault_is_armed_for_another_and_still_holds(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, POISON, {**SLOW, "at": {"event": "recovered"}})
    rig.hold("p", 20, "data", "w0", "w1")
    rig.injector.on_event("recovered")
    assert ("s", 0, "data") in rig.armed("w1")
    rig.hold("p", 20, "data", "w2", "w3")
    assert rig.answers() == [(name, "p", True) for name in ALL], "nobody is left waiting"


def test_whoever_leaves_with_a_generation_holds_no_more(tmp_path: Path) -> None:
    rig = Rig(
        tmp_path, {"id": "k", "kind": "process-kill", "target": EVERYBODY, "at": {"step": 20}}
    )
    rig.hold("k", 20, "data", "w0", "w1")
    rig.scene.record(Kind.ABORT_SENT, processes=list(ALL))
    rig.form()
    rig.hold("k", 20, "data", "w2", "w3")
    assert not rig.scene.told("signal"), "two of four hold in this generation"
    rig.hold("k", 20, "data", "w0", "w1")
    assert len(rig.scene.told("signal")) == 4


def test_a_rank_that_nobody_answered_is_said(tmp_path: Path) -> None:
    rig = Rig(
        tmp_path, {"id": "k", "kind": "process-kill", "target": EVERYBODY, "at": {"step": 20}}
    )
    rig.hold("k", 20, "data", "w0")
    gone = Extra(topic="unanswered", payload={"fault": "k", "step": 20, "phase": "data"})
    rig.injector.on_said("w0", 0, gone)
    (failed,) = rig.scene.told("fault_failed")
    assert "w0 held for it, and nobody answered" in failed["reason"]
    rig.hold("k", 20, "data", "w1", "w2", "w3")
    assert not rig.scene.told("signal"), "it left the point"


class Job:
    """What an agent needs of a job to hold: answers come while it says where it is."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.said: list[Extra] = []
        self.touched = 0
        self.rank = 0
        self.config = SimpleNamespace(process="w0")
        self.marks = SimpleNamespace(touch=self._touch)
        self.state = SimpleNamespace(model=None)
        self.agent = SimpleNamespace(channel=SimpleNamespace(send=self._hear))
        self.faults = FaultAgent(self)  # type: ignore[arg-type]
        self.answers = list(answers)

    def check(self) -> None:
        """Nobody aborts."""

    def _touch(self) -> None:
        self.touched += 1
        if self.answers:
            self.faults.on_command("go", self.answers.pop(0))

    def _hear(self, message: Extra) -> None:
        self.said.append(message)


def test_an_answer_in_the_moment_in_which_the_hold_is_over_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The injector has the act on record: it is done, and not called unanswered."""
    monkeypatch.setattr("trainchaos.harness.rank.shims.agenda.HOLD_LIMIT_S", 0.0)
    monkeypatch.setattr("trainchaos.harness.rank.shims.agenda.LOOK_S", 0.001)
    go = {
        "act": True,
        "fault": "f",
        "occurrence": 0,
        "kind": "data-stall",
        "params": {"delay_s": 0.25},
    }
    # comes after the last look at the clock
    job = Job(go | {"duration_s": None, "duration_steps": 1})
    stalls: list[float] = []
    monkeypatch.setattr(job.faults, "set_data_delay", stalls.append)
    monkeypatch.setattr(job.faults, "log", lambda **_: None)
    job.faults.on_command(
        "arm", {"points": [{"fault": "f", "step": 4, "phase": "data", "seed": 1}], "standing": []}
    )
    job.faults.at(4, "data")
    assert stalls == [0.25] and [message.topic for message in job.said] == ["at_point"]


# --- what is no rank's


def test_all_ranks_hold_for_the_file_system_and_for_its_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FULL)
    assert all(rig.armed(name) == [("d", 15, "data")] for name in ALL)
    rig.injector.tick(13)
    rig.injector.tick(14)
    rig.hold("d", 15, "data", "w0", "w1", "w2")
    assert rig.storage == [] and not rig.answers()
    rig.hold("d", 15, "data", "w3")
    assert rig.storage == ["full"]
    assert rig.answers() == [(name, "d", False) for name in ALL]
    assert (
        rig.scene.told("fault_injected")[0]["step"] == 15
        and "late" not in rig.scene.told("fault_injected")[0]
    )
    assert all(rig.armed(name) == [("d", 35, "data")] for name in ALL), "from step 15 to 34"
    told = [
        what
        for what, data in rig.scene.story
        if what == "arm" or (what == "go" and data["process"] == "w0")
    ]
    assert told[-5:] == ["arm"] * 4 + ["go"], "they hear of it before they go on"
    rig.injector.tick(33)
    rig.hold("d", 35, "data", "w0", "w1", "w2")
    assert rig.storage == ["full"]
    rig.hold("d", 35, "data", "w3")
    assert rig.storage == ["full", "free"] and len(rig.answers()) == 8
    assert rig.scene.told("fault_healed")[0]["how"] == "its duration was over"


def test_a_dead_rank_is_not_waited_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FULL)
    rig.hold("d", 15, "data", "w0", "w1", "w3")
    rig.scene.members[2] = None
    rig.injector.tick(14)
    assert rig.storage == ["full"]


def test_one_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FULL)
    rig.hold("d", 15, "data", "w0", "w1", "w3")
    rig.scene.now += int(0.9 * PATIENCE_S * SECOND)
    rig.injector.tick(14)
    assert rig.storage == [] and not rig.answers()
    rig.scene.now += int(0.2 * PATIENCE_S * SECOND)
    rig.injector.tick(14)
    (injected,) = rig.scene.told("fault_injected")
    assert rig.storage == ["full"] and injected["absent"] == ["w2"] and "late" not in injected
    assert rig.answers() == [(name, "d", False) for name in ("w0", "w1", "w3")]
    rig.hold("d", 15, "data", "w2")
    assert rig.answers()[-1] == ("w2", "d", False) and rig.storage == ["full"]


def test_one_that_is_stopped_keeps_nothing_waiting_that_is_no_ranks(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FULL)
    rig.scene.states = {"w2": "T"}
    rig.hold("d", 15, "data", "w0", "w1", "w3")
    assert rig.storage == ["full"]
    kill = {"id": "k", "kind": "process-kill", "target": EVERYBODY, "at": {"step": 20}}
    other = Rig(tmp_path / "other", kill)
    other.scene.states = {"w2": "T"}
    other.hold("k", 20, "data", "w0", "w1", "w3")
    assert not other.scene.told("signal"), "it is hit with the others, in the next generation"


def test_what_ranks_held_for_when_they_were_lost_is_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FULL)
    rig.hold("d", 15, "data", "w0", "w1", "w3")
    rig.scene.record(Kind.ABORT_SENT, processes=list(ALL))
    rig.form()
    rig.injector.close()
    (failed,) = rig.scene.told("fault_failed")
    assert failed["reason"] == f"not fired: {LET_GO}" and rig.storage == []
    late = Rig(tmp_path / "late", FULL)
    late.hold("d", 15, "data", "w0", "w1", "w3")
    late.scene.record(Kind.ABORT_SENT, processes=list(ALL))
    late.form()
    late.injector.tick(17)
    (injected,) = late.scene.told("fault_injected")
    assert (injected["late_steps"], injected["late"], injected["missed"]) == (3, LET_GO, False)


def test_a_step_that_nobody_held_at_is_said_to_be_late(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FULL)
    rig.injector.tick(15)
    assert rig.storage == [], "the last of them may only just be on its way there"
    rig.injector.tick(65)
    injected = rig.scene.told("fault_injected")[0]
    assert (injected["late_steps"], injected["late"], injected["missed"]) == (51, NOT_HELD, True)
    rig.injector.tick(90)
    assert rig.scene.told("fault_healed")[0]["how"] == "its duration was over, 5 steps late"
    rig.injector.tick(99)
    assert len(rig.scene.told("fault_injected")) == 1


def test_what_is_not_there_at_its_step_is_hit_when_it_is(tmp_path: Path) -> None:
    rig = Rig(tmp_path, {"id": "k", "kind": "spare-kill", "at": {"step": 15}})
    spare, rig.scene.spare = rig.scene.spare, lambda index: None
    rig.hold("k", 15, "data", *ALL)
    assert len(rig.answers()) == 4 and not rig.scene.told("fault_injected")
    rig.scene.spare = spare
    rig.injector.tick(14)
    (injected,) = rig.scene.told("fault_injected")
    assert "late" not in injected, "it was still that step"
    late = Rig(tmp_path / "late", {"id": "k", "kind": "spare-kill", "at": {"step": 15}})
    late.scene.spare = lambda index: None
    late.hold("k", 15, "data", *ALL)
    late.injector.tick(20)
    late.scene.spare = spare
    late.injector.tick(21)
    (injected,) = late.scene.told("fault_injected")
    assert (injected["late_steps"], injected["late"], injected["missed"]) == (7, NOT_THERE, False)


def test_the_coordinator_alone_is_lost_while_nobody_waits_for_it(tmp_path: Path) -> None:
    targets = [{"id": kind, "kind": kind, "at": {"step": 5}} for kind in KINDS]
    for spec in targets:
        fault = KINDS[spec["kind"]]
        if fault.where in (Where.STORAGE, Where.STORE, Where.COORDINATOR):
            due = FaultSpec.model_validate({**spec, "duration": 1.0} if fault.lasting else spec)
            (planned,) = plan([due], KINDS, Scope(topology=Topology(ranks=4)), 1)
            params = {"latency_ms": 5} if spec["kind"] == "store-latency" else {}
            trigger = Trigger(planned=planned, fault=fault(**params))
            assert trigger.held_by_all == (fault.where is not Where.COORDINATOR)


# --- a target that dies where it holds


@pytest.mark.parametrize("kind", ["process-kill", "process-stop", "exception"])
def test_a_target_that_is_dead_when_its_turn_comes_is_not_hit_and_the_next_one_is(
    tmp_path: Path, kind: str
) -> None:
    rig = Rig(
        tmp_path,
        {"id": "f", "kind": kind, "target": {"rank": 2}, "at": {"step": 7, "phase": "backward"}},
    )
    rig.scene.states["w2"] = "Z"
    rig.hold("f", 7, "backward", "w2")
    rig.died("w2")
    assert not rig.scene.told("fault_injected") and not rig.scene.told("signal")
    rig.scene.members[2] = "s4"
    rig.form()
    assert rig.armed("s4") == [("f", 7, "backward")]
    rig.hold("f", 7, "backward", "s4")
    assert rig.scene.told("fault_injected")[0]["target"] == {"process": "s4", "rank": 2}


@pytest.mark.parametrize("kind", ["process-stop", "exception"])
def test_a_target_that_dies_of_something_else_at_that_very_moment_is_replaced_as_a_target_too(
    tmp_path: Path, kind: str
) -> None:
    rig = Rig(
        tmp_path,
        {"id": "f", "kind": kind, "target": {"rank": 2}, "at": {"step": 7, "phase": "backward"}},
    )
    rig.hold("f", 7, "backward", "w2")
    rig.died("w2")
    (void,) = rig.scene.told("fault_failed")
    assert void["again"] and "died where it held" in void["reason"]
    rig.scene.members[2] = "s4"
    rig.form()
    rig.hold("f", 7, "backward", "s4")
    assert [told["occurrence"] for told in rig.scene.told("fault_injected")] == [0, 1]
    rig.injector.close()
    assert len(rig.scene.told("fault_failed")) == 2, (
        "nobody saw the second one's effect, and that is said"
    )


def test_a_rank_of_a_command_that_said_it_acted_and_then_died_is_not_replaced_as_a_target(
    tmp_path: Path,
) -> None:
    rig = Rig(
        tmp_path,
        {
            "id": "f",
            "kind": "rank-hang",
            "target": {"rank": 2},
            "at": {"step": 7, "phase": "backward"},
        },
    )
    rig.hold("f", 7, "backward", "w2")
    rig.scene.now += SECOND // 50
    rig.scene.record(
        Kind.FAULT_EFFECT, step=7, fault="f", occurrence=0, evidence={"script": "hang"}
    )
    rig.scene.now += SECOND // 50
    rig.died("w2")
    assert not any(told["again"] for told in rig.scene.told("fault_failed") if "again" in told)
    rig.injector.close()
    (failed,) = rig.scene.told("fault_failed")
    assert "before an effect was seen" in failed["reason"]


def test_the_others_are_hit_without_the_one_that_died_waiting_for_them(tmp_path: Path) -> None:
    rig = Rig(
        tmp_path, {"id": "k", "kind": "process-kill", "target": EVERYBODY, "at": {"step": 20}}
    )
    rig.hold("k", 20, "data", "w0", "w1", "w2")
    rig.died("w1")
    rig.scene.members[1] = None
    rig.hold("k", 20, "data", "w3")
    assert [told["process"] for told in rig.scene.told("signal")] == ["w0", "w2", "w3"]
    assert not rig.scene.told("fault_failed")
    rig.scene.members[:] = ["w4", "w5", "w6", "w7"]
    rig.form()
    assert rig.armed("w5") == [("k", 20, "data")] and rig.armed("w4") == []


def test_a_stopped_process_that_is_killed_as_hung_has_been_hit(tmp_path: Path) -> None:
    rig = Rig(
        tmp_path, {"id": "f", "kind": "process-stop", "target": {"rank": 2}, "at": {"step": 7}}
    )
    rig.scene.states["w2"] = "T"
    rig.hold("f", 7, "data", "w2")
    rig.scene.now += SECOND
    rig.died("w2")
    assert rig.scene.told("fault_landed") and not rig.scene.told("fault_failed")


@pytest.mark.parametrize("at", [{"time": 1}, {"event": "recovered"}])
def test_a_dead_process_is_nobody_to_hit_at_a_time_or_an_event_either(
    tmp_path: Path, at: dict[str, Any]
) -> None:
    rig = Rig(tmp_path, {"id": "f", "kind": "process-kill", "target": {"rank": 2}, "at": at})
    rig.scene.states["w2"] = "Z"
    rig.scene.now = 2 * SECOND
    rig.injector.tick(5)
    rig.injector.on_event("recovered")
    rig.died("w2")
    rig.injector.tick(5)
    assert not rig.scene.told("signal") and not rig.scene.told("fault_landed"), (
        "it died of something else"
    )
    rig.scene.members[2] = "s4"
    rig.form()
    rig.injector.tick(5)
    hit = [told["process"] for told in rig.scene.told("signal")]
    assert hit == (["s4"] if "time" in at else []), (
        "an event comes once, and that it hit nobody is said"
    )
    reasons = [told["reason"] for told in rig.scene.told("fault_failed")]
    assert reasons == ([] if "time" in at else ["no process holds rank 2"])


# --- what an act needs is there before


def test_an_act_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    real = importlib.import_module

    def noted(name: str, package: str | None = None) -> Any:
        loaded.append(name)
        return real(name, package)

    monkeypatch.setattr("trainchaos.chaos.plugins.importlib.import_module", noted)
    plugins.forget()
    job = Job(
        {
            "act": True,
            "fault": "mine",
            "occurrence": 0,
            "kind": "data-stall",
            "params": {"delay_s": 0.25},
        }
    )
    job.faults = FaultAgent(job, kinds=["data-stall"])  # type: ignore[arg-type]
    assert loaded == ["trainchaos.chaos.faults.data_stall"], "what the plan needs, and nothing else"
    stalls: list[float] = []
    monkeypatch.setattr(job.faults, "set_data_delay", stalls.append)
    monkeypatch.setattr(job.faults, "log", lambda **_: None)
    job.answers[0] |= {"duration_s": 1.0, "duration_steps": None}
    job.faults.on_command(
        "arm",
        {"points": [{"fault": "mine", "step": 4, "phase": "data", "seed": 1}], "standing": []},
    )
    job.faults.at(4, "data")
    assert stalls == [0.25] and loaded == ["trainchaos.chaos.faults.data_stall"]


@pytest.mark.parametrize("arm", ["faulted", "control"])
def test_a_rank_is_told_at_its_birth_which_faults_may_act_in_it(arm: Any, tmp_path: Path) -> None:
    faults = [{"id": "s", **{k: v for k, v in SLOW.items() if k != "id"}, "at": {"step": 5}}, FULL]
    cell = cell_of("hot-spare", faults)
    data = DataInfo(path=tmp_path, samples=64, digest="", about="")
    setup = ArmSetup(
        id=arm, cell=cell, repeat=0, arm=arm, seed=1, run=RunDirectory(tmp_path), data=data
    )
    config = rank_config(
        setup,
        name="w0",
        role="worker",
        events=tmp_path,
        logs=tmp_path,
        device="cpu:0",
        exchange=Exchange("gloo"),
    )
    assert config.faults == (("disk-full", "straggler") if arm == "faulted" else ())
    assert {"trainchaos.chaos.faults.disk_full", "trainchaos.chaos.faults.straggler"} <= set(
        recipe([cell]).modules
    )
