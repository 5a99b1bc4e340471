"""The fault injector against a scene without processes: what is armed, asked for, acted, recorded,
and when.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.chaos import plugins
from trainchaos.chaos.events.kinds import REQUIRED
from trainchaos.chaos.events.log import Event, EventWriter, Kind, require_keys
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.scenario.model import BlastRadius, FaultSpec
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.plan import plan
from trainchaos.chaos.schedule.targeting import Scope
from trainchaos.harness.arm.in_force import ActiveEffects
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.transport.wire import Extra, Message

KINDS = plugins.load(plugins.FAULTS, Fault)
SECOND = 1_000_000_000


class FakeLedger(Ledger):
    """Adds its lines to the story."""

    def __init__(self, story: list[tuple[str, Any]]) -> None:
        self._story = story

    def _append(self, record: Mapping[str, Any], *, durable: bool) -> None:
        self._story.append(("ledger", record))


class FakeScene:
    """Four ranks w0 to w3, a spare s4, and everything that happens in order in ``story``."""

    def __init__(self, folder: Path) -> None:
        run = RunDirectory(folder)
        run.make_arm("arm")
        self.scenario = SimpleNamespace(blast_radius=BlastRadius(), topology=Topology(ranks=4))
        cell = SimpleNamespace(scenario=self.scenario)
        self.setup: Any = SimpleNamespace(
            id="arm", run=run, checkpoints=run.checkpoints("arm"), cell=cell
        )
        self.now = 0
        self.members = ["w0", "w1", "w2", "w3"]
        self.groups: Any = None
        self.machines: Any = None
        self.links: Any = None
        self.states: dict[str, str] = {}
        self.story: list[tuple[str, Any]] = []
        self.hear: Callable[[Event], None] = lambda event: None
        self.ledger = FakeLedger(self.story)
        self.in_force = ActiveEffects()

    def now_ns(self) -> int:
        return self.now

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        require_keys(kind, data)
        self.story.append((kind.value, data | {"step": step}))
        event = Event(
            kind=kind,
            actor="orchestrator",
            seq=0,
            time_ns=self.now,
            generation=1,
            step=step,
            data=data,
        )
        self.hear(event)
        return event

    def send(self, process: str, message: Message) -> bool:
        assert isinstance(message, Extra)
        self.story.append((message.topic, {"process": process} | message.payload))
        return True

    def signal(self, process: str, signum: int) -> None:
        self.story.append(("signal", {"process": process, "signum": signum}))

    def os_state(self, process: str) -> str:
        return self.states.get(process, "S")

    @property
    def surface(self) -> Any:
        """What faults touch is kept beside the rest."""
        return self

    def process_of(self, rank: int) -> str | None:
        return self.members[rank] if rank < len(self.members) else None

    def on_node(self, node: int) -> list[str]:
        return [self.members[rank] for rank in self.scenario.topology.ranks_on(node)]

    def spare(self, index: int) -> str | None:
        return "s4" if index == 0 else None

    def told(self, topic: str) -> list[dict[str, Any]]:
        return [data for what, data in self.story if what == topic]


class Rig:
    """An injector with one planned fault."""

    def __init__(
        self, folder: Path, kind: str, at: dict[str, Any], nodes: int = 1, **more: Any
    ) -> None:
        spec = FaultSpec.model_validate(
            {"id": "f", "kind": kind, "target": {"rank": 2}, "at": at} | more  # type: ignore[arg-type]
        )
        place = Topology(ranks=4, nodes=nodes)
        planned = plan([spec], KINDS, Scope(topology=place, spares=1), 1)
        self.planned = planned
        self.scene = FakeScene(folder)
        self.scene.scenario.topology = place
        self.injector = Injector(self.scene, planned, KINDS)
        self.scene.hear = self.injector.observe
        self.injector.announce()

    def train(self) -> None:
        for rank, process in enumerate(self.scene.members):
            self.injector.arm(process, rank)
        self.injector.on_training()

    def at_point(self, process: str, rank: int | None, step: int, phase: str) -> None:
        payload = {"fault": "f", "step": step, "phase": phase}
        self.injector.on_said(process, rank, Extra(topic="at_point", payload=payload))

    def armed(self, process: str) -> list[tuple[int, str]]:
        """What the process was told to hold at, last."""
        last = [told for told in self.scene.told("arm") if told["process"] == process][-1]
        return [(point["step"], point["phase"]) for point in last["points"]]


def test_a_step_fault_is_held_for_recorded_and_then_done(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-kill", {"step": 7, "phase": "backward"})
    rig.train()
    assert rig.armed("w2") == [(7, "backward")]
    assert rig.armed("w1") == []
    rig.at_point("w2", 2, 7, "backward")
    order = [
        what for what, _ in rig.scene.story if what in ("ledger", "fault_injected", "signal", "go")
    ]
    assert order == [
        "ledger",
        "fault_injected",
        "signal",
        "go",
    ], "undo record and event before the act"
    assert rig.scene.told("signal") == [{"process": "w2", "signum": signal.SIGKILL}]
    assert rig.scene.told("fault_injected")[0]["step"] == 7


def test_a_fault_fires_once_unless_told_otherwise(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "exception", {"step": 7})
    rig.train()
    rig.at_point("w2", 2, 7, "data")
    rig.scene.members[2] = "w9"
    rig.injector.arm("w9", 2)
    assert rig.armed("w9") == []
    rig.at_point("w9", 2, 7, "data")
    assert [told["act"] for told in rig.scene.told("go")] == [True, False]


def test_a_fault_that_retriggers_is_armed_again_after_a_rollback(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "exception", {"step": 7}, retrigger={"max": 2})
    rig.train()
    for name in ("w2", "w9"):
        rig.scene.members[2] = name
        rig.injector.arm(name, 2)
        assert rig.armed(name) == [(7, "data")]
        rig.at_point(name, 2, 7, "data")
    rig.injector.arm("w10", 2)
    assert rig.armed("w10") == []
    assert [told["occurrence"] for told in rig.scene.told("fault_injected")] == [0, 1]


@pytest.mark.parametrize("kind", ["exception", "straggler", "tensor-corrupt"])
@pytest.mark.parametrize("trigger", ["time", "event"])
def test_a_fault_inside_a_rank_waits_for_the_ranks_next_step_when_no_step_was_named(
    tmp_path: Path, kind: str, trigger: str
) -> None:
    params = {"straggler": {"factor": 2}}.get(kind, {})
    at = {"time": 1.5} if trigger == "time" else {"event": "checkpoint_committed", "nth": 2}
    rig = Rig(tmp_path, kind, at, params=params)
    rig.train()
    rig.injector.tick(3)
    rig.injector.on_event("checkpoint_committed")
    assert rig.armed("w2") == []
    rig.scene.now = 2 * SECOND
    rig.injector.tick(9)
    rig.injector.on_event("checkpoint_committed")
    ((step, phase),) = rig.armed("w2")
    assert step == 0, "the next one, whatever its number"
    assert phase == ("collective" if kind == "tensor-corrupt" else "data")
    assert rig.scene.told("fault_injected") == []
    rig.at_point("w2", 2, 11, phase)
    assert rig.scene.told("fault_injected")[0]["step"] == 11
    (command,) = rig.scene.told("go")
    assert command["act"] and command["kind"] == kind
    rig.injector.arm("w2", 2)
    assert rig.armed("w2") == []
    rig.injector.tick(12)
    assert len(rig.scene.told("fault_injected")) == 1


def test_whoever_takes_the_rank_over_gets_the_fault_that_waits_for_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "exception", {"time": 1})
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.injector.tick(3)
    rig.scene.members[2] = "s4"
    rig.injector.arm("s4", 2)
    assert rig.armed("s4") == [(0, "data")]
    rig.at_point("s4", 2, 5, "data")
    assert rig.scene.told("fault_injected")[0]["target"] == {"process": "s4", "rank": 2}


@pytest.mark.parametrize("trigger", [{"time": 1}, {"event": "checkpoint_committed"}])
def test_a_fault_from_outside_needs_nobody_to_hold(tmp_path: Path, trigger: dict[str, Any]) -> None:
    rig = Rig(tmp_path, "process-stop", trigger, duration=3.0)
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.injector.tick(3)
    rig.injector.on_event("checkpoint_committed")
    rig.injector.tick(3)
    assert rig.scene.told("signal") == [{"process": "w2", "signum": signal.SIGSTOP}]
    rig.scene.states["w2"] = "T"
    rig.injector.tick(3)
    assert len(rig.scene.told("fault_landed")) == 1
    rig.scene.now = 6 * SECOND
    rig.injector.tick(3)
    assert rig.scene.told("signal")[-1] == {"process": "w2", "signum": signal.SIGCONT}
    rig.injector.close()
    assert len(rig.scene.told("fault_healed")) == 1


def test_a_heal_says_when_its_undoing_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is free from then on, and the heal may be written much later."""
    rig = Rig(tmp_path, "process-stop", {"time": 1}, duration=3.0)
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.injector.tick(3)
    rig.scene.now = 6 * SECOND

    def slow(process: str, signum: int) -> None:
        rig.scene.now += SECOND

    monkeypatch.setattr(rig.scene, "signal", slow)
    rig.injector.tick(3)
    assert rig.scene.told("fault_healed")[0]["begun_ns"] == 6 * SECOND


def said(rig: Rig, topic: str, occurrence: int) -> None:
    """Rank 2's agent speaks of an occurrence."""
    rig.injector.on_said(
        "w2", 2, Extra(topic=topic, payload={"fault": "f", "occurrence": occurrence})
    )


def test_a_fault_whose_word_to_act_came_too_late_is_armed_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "exception", {"step": 20, "phase": "forward"})
    rig.train()
    rig.at_point("w2", 2, 20, "forward")
    said(rig, "missed", 0)
    (void,) = rig.scene.told("fault_failed")
    assert void["again"] and void["occurrence"] == 0
    assert [p["step"] for p in rig.scene.told("arm")[-1]["points"]] == [20]
    rig.at_point("w2", 2, 20, "forward")
    assert [told["occurrence"] for told in rig.scene.told("go") if told["act"]] == [0, 1]
    said(rig, "missed", 0)
    assert len(rig.scene.told("fault_failed")) == 1, "heard once"


def test_a_rank_that_is_no_member_any_more_is_not_kept_waiting(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "exception", {"step": 7})
    rig.train()
    rig.at_point("w2", None, 7, "data")
    assert [told["act"] for told in rig.scene.told("go")] == [False]
    assert rig.scene.told("fault_injected") == []


def test_a_fault_nobody_saw_land_has_failed_when_the_run_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-kill", {"step": 7})
    rig.train()
    rig.at_point("w2", 2, 7, "data")
    assert rig.injector.pending()
    rig.injector.close()
    assert len(rig.scene.told("fault_failed")) == 1
    assert rig.scene.told("fault_landed") == []


def test_a_fault_that_never_came_due_leaves_no_trace_but_its_plan(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-kill", {"step": 700})
    rig.train()
    rig.injector.tick(100)
    rig.injector.close()
    assert {what for what, _ in rig.scene.story} == {"fault_planned", "arm"}


# --- the blast radius and verify


def limited(rig: Rig, **limits: Any) -> None:
    rig.scene.scenario.blast_radius = BlastRadius.model_validate(limits)
    rig.injector = Injector(rig.scene, rig.planned, KINDS)


def failed(rig: Rig) -> list[str]:
    return [data["reason"] for data in rig.scene.told("fault_failed")]


def test_an_occurrence_the_blast_radius_forbids_is_not_fired(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-kill", {"time": 1})
    limited(rig, min_healthy_replicas=4)
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.injector.tick(5)
    assert failed(rig) == [
        "not fired: blast_radius keeps 4 replicas healthy, and of 4 this would leave 3"
    ]
    assert not rig.scene.told("signal") and not rig.scene.told("fault_injected")


def test_a_rank_that_holds_for_a_forbidden_fault_goes_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-kill", {"step": 3})
    limited(rig, protected_ranks=[2])
    rig.train()
    rig.at_point("w2", 2, 3, "data")
    assert failed(rig) == ["not fired: blast_radius protects rank 2"]
    assert rig.scene.told("go")[-1]["act"] is False and not rig.scene.told("fault_injected")


def test_no_more_nodes_are_lost_at_once_than_allowed(tmp_path: Path) -> None:
    target: Any = {"node": 1}
    rig = Rig(tmp_path, "node-kill", {"time": 1}, target=target, nodes=4)
    limited(rig, max_nodes_lost=0)
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.injector.tick(5)
    assert failed(rig) == [
        "not fired: blast_radius allows 0 nodes lost at once, and this would make 1"
    ]


def test_faults_count_as_active_until_the_job_trains_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-kill", {"trace": {"file": "t", "times": [1, 2, 3]}})
    limited(rig, max_concurrent_faults=1)
    rig.train()
    for seconds in (1, 2):
        rig.scene.now = seconds * SECOND
        rig.injector.tick(5)
        rig.injector.on_event("recovery_started")
    assert failed(rig) == ["not fired: blast_radius allows 1 at once, and 1 are active"]
    rig.injector._struck.live[0].healed = True
    rig.injector.on_training()
    rig.scene.now = 3 * SECOND
    rig.injector.tick(5)
    assert len(rig.scene.told("fault_injected")) == 2 and len(failed(rig)) == 1


def test_every_arrival_fires_even_in_one_generation(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-kill", {"trace": {"file": "t", "times": [1, 2, 3]}})
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.injector.tick(5)
    rig.injector.tick(5)
    assert len(rig.scene.told("fault_injected")) == 2


@pytest.mark.parametrize(("verify", "lands"), [({"signal": "< 0"}, False), ({"signal": 9}, True)])
def test_evidence_must_meet_verify(tmp_path: Path, verify: dict[str, Any], lands: bool) -> None:
    rig = Rig(tmp_path, "process-kill", {"time": 1}, verify=verify)
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.injector.tick(5)
    rig.scene.record(
        Kind.PROCESS_EXITED,
        process="w2",
        pid=1,
        exit_code=None,
        signal=9,
        expected=False,
        last_seq=0,
    )
    rig.injector.tick(5)
    assert bool(rig.scene.told("fault_landed")) == lands
    assert [
        r.startswith("it landed, but not as verify asks: signal is 9") for r in failed(rig)
    ] == [True] * (not lands)


def test_a_hang_without_a_duration_is_left_to_be_found(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-stop", {"time": 1})
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.scene.states["w2"] = "T"
    rig.injector.tick(5)
    rig.injector.tick(5)
    assert rig.scene.told("fault_landed")
    assert [data["signum"] for data in rig.scene.told("signal")] == [signal.SIGSTOP]


@pytest.mark.parametrize("ahead_ns", [0, 5_000_000_000_000, -5_000_000_000_000])
def test_evidence_of_a_rank_on_another_machine_is_read_by_the_coordinators_clock(
    tmp_path: Path, ahead_ns: int
) -> None:
    rig = Rig(tmp_path, "straggler", {"step": 7}, duration=30.0, params={"factor": 2.0})
    rig.scene.now = 100 * SECOND
    rig.scene.record(
        Kind.NODE_JOINED, node=1, host="far", boot="far", address="10.0.0.2", devices=[]
    )
    rig.scene.record(Kind.CLOCK_MEASURED, node=1, offset_ns=ahead_ns, bound_ns=1000)
    rig.scene.record(Kind.PROCESS_SPAWNED, process="w2", pid=1, role="worker", mode="warm", node=1)
    writer = EventWriter(tmp_path / "events" / "arm", "w2", lambda: rig.scene.now + ahead_ns)

    def commit(step: int, seconds: float) -> None:
        rig.scene.now += SECOND
        about = dict.fromkeys(REQUIRED[Kind.STEP_COMMITTED], 0)
        writer.write(
            Kind.STEP_COMMITTED,
            step=step,
            **(about | {"seconds": {"forward": seconds, "backward": seconds}}),
        )

    rig.train()
    for step in range(1, 7):
        commit(step, 1.0)
    rig.at_point("w2", 2, 7, "data")
    assert rig.scene.told("fault_landed") == []
    for step in range(7, 11):
        commit(step, 2.0)
    rig.injector.tick(10)
    writer.close()
    (landed,) = rig.scene.told("fault_landed")
    assert landed["evidence"]["measured_factor"] == 2.0


def test_what_an_act_did_before_it_failed_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links were cut for good, as the other half of the act could not be done."""
    undone: list[Any] = []

    def fails(fault: Fault, target: Any) -> dict[str, Any]:
        raise RuntimeError("half of it")

    monkeypatch.setattr(KINDS["process-stop"], "act", fails)
    monkeypatch.setattr(KINDS["process-stop"], "heal", lambda fault, target: undone.append(target))
    rig = Rig(tmp_path, "process-stop", {"step": 7}, duration=5.0)
    rig.train()
    rig.at_point("w2", 2, 7, "data")
    assert failed(rig) == ["it could not act: RuntimeError: half of it"] and len(undone) == 1
    assert rig.scene.told("fault_healed")[0]["how"] == "what it had done before it failed is undone"
