"""What the harness makes of processes that hold at their points: who is meant, who goes on, who is
believed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.fault.build import build_all
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.point_broker import STRANGER_S, PointBroker, places
from trainchaos.harness.script.points import Disconnected, PointDone, PointRequest, Points
from trainchaos.harness.script.processes.ranks import Ranks
from trainchaos.recovery.transport.wire import Extra

KINDS = plugins.load(plugins.FAULTS, Fault)
S = 1_000_000_000


class Wire(Points):
    """What processes say, as the test wants it, and what they are answered."""

    def __init__(self) -> None:
        self.said: list[PointRequest | PointDone | Disconnected] = []
        self.answers: list[tuple[int, str]] = []
        self.armed: set[tuple[int, str]] = set()

    def arm(self, armed: Any) -> None:
        self.armed = set(armed)

    def listen(self) -> list[PointRequest | PointDone | Disconnected]:
        said, self.said = self.said, []
        return said

    def answer(self, connection: int, number: int, word: str) -> None:
        self.answers.append((connection, word))


class Arm:
    """Agents between processes (rank 0 is w0 with pid 100, and so on) and an injector that keeps
    what it hears.
    """

    def __init__(self, *planned: PlannedFault) -> None:
        self.wire, self.now = Wire(), 0
        self.broker = PointBroker(planned, KINDS, lambda _: self.wire)
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.effects: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.reply: Callable[[str, Extra], None] = lambda process, message: None

    def on_said(self, process: str, rank: int | None, message: Extra) -> None:
        self.heard.append((message.topic, {"process": process, **message.payload}))
        self.reply(process, message)

    def rank_of(self, process: str) -> int | None:
        return int(process[1:])

    def on_error(self, process: str, detail: str, now_ns: int) -> None:
        self.errors.append(process)

    def name_of(self, pid: int) -> str | None:
        return f"w{pid - 100}" if 100 <= pid < 110 else None

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        self.effects.append(data)
        return Event(
            kind=kind, actor="orchestrator", seq=0, time_ns=0, generation=1, step=step, data=data
        )

    def arm(self, process: str, *rows: tuple[str, int, str]) -> None:
        points = [
            {"fault": fault, "step": step, "phase": phase, "seed": 1} for fault, step, phase in rows
        ]
        self.broker.take(process, Extra(topic="arm", payload={"points": points, "standing": []}))

    def go(self, process: str, act: bool = False, **payload: Any) -> None:
        self.broker.take(process, Extra(topic="go", payload={"act": act, **payload}))

    def ask(self, connection: int, pid: int, step: int, name: str) -> None:
        self.wire.said.append(
            PointRequest(connection=connection, number=1, pid=pid, step=step, name=name)
        )
        self.hear()

    def hear(self) -> None:
        whole = cast("Any", self)
        self.broker.hear(
            cast("Injector", whole),
            cast("Observer", whole),
            cast("Ranks", whole),
            self.record,
            self.now,
        )


def planned(
    kind: str, *points: tuple[int, str], ranks: tuple[int, ...] = (1,), **params: Any
) -> PlannedFault:
    return PlannedFault(
        id="hit",
        kind=kind,
        params=params,
        ranks=ranks,
        spares=(),
        checkpoint=None,
        points=points,
        event=None,
        nth=1,
        duration_s=None,
        duration_steps=None,
        max_fires=1,
        seed=1,
    )


def named(*plan: PlannedFault) -> dict[tuple[str, int], tuple[str, ...]]:
    return places(plan, build_all(plan, KINDS))


def test_names_of_points_follow_the_phases() -> None:
    saves = named(planned("process-kill", (7, "checkpoint")))
    assert saves == {("hit", 7): ("saving", "checkpoint")}
    assert named(planned("process-kill", (7, "data"))) == {}  # as for any script
    assert named(planned("exception", (7, "data"))) == {("hit", 7): ("data", "forward")}
    gradient = named(planned("tensor-corrupt", (7, "data")))
    assert gradient == {("hit", 7): ("gradient", "collective")}
    assert named(planned("exception")) == {("hit", 0): ("data", "forward")}


def test_only_who_is_meant_holds_and_only_for_what_is_left() -> None:
    arm = Arm(planned("process-kill", (7, "backward")))
    assert arm.wire.armed == {(7, "backward")}
    arm.arm("w0")
    arm.arm("w1", ("hit", 7, "backward"))
    arm.ask(1, 100, 7, "backward")
    assert arm.wire.answers == [(1, "go")] and not arm.heard
    arm.ask(2, 101, 7, "backward")
    assert arm.heard == [
        ("at_point", {"process": "w1", "fault": "hit", "step": 7, "phase": "backward"})
    ]
    assert arm.wire.answers == [(1, "go")]
    assert arm.broker.due(99, 0) == []  # it is not reached from outside as well
    arm.broker.injected(arm.record(Kind.FAULT_INJECTED, step=7, fault="hit"))
    assert arm.wire.armed == set()
    arm.go("w1")
    assert arm.wire.answers[-1] == (2, "go")
    arm.ask(3, 555, 7, "backward")  # whoever it is: nothing is left to hold for
    assert arm.wire.answers[-1] == (3, "go")


def test_two_ranks_hold_at_once_and_each_is_answered() -> None:
    arm = Arm(planned("process-stop", (7, "backward"), ranks=(0, 1)))
    for process in ("w0", "w1"):
        arm.arm(process, ("hit", 7, "backward"))
    arm.ask(1, 100, 7, "backward")
    arm.ask(2, 101, 7, "backward")
    assert [payload["process"] for _, payload in arm.heard] == ["w0", "w1"] and not arm.wire.answers
    arm.go("w1")
    arm.go("w0")
    assert arm.wire.answers == [(2, "go"), (1, "go")]


def test_a_process_that_is_no_rank_yet_waits_for_it_but_not_for_ever() -> None:
    arm = Arm(planned("process-kill", (7, "backward")))
    arm.ask(1, 101, 7, "backward")
    arm.ask(2, 555, 7, "backward")
    assert not arm.wire.answers and not arm.heard
    arm.arm("w1", ("hit", 7, "backward"))
    arm.hear()
    assert [payload["process"] for _, payload in arm.heard] == ["w1"]
    arm.now += round((STRANGER_S + 0.1) * S)
    arm.hear()
    assert arm.wire.answers == [(2, "go")]


def test_who_holds_when_a_new_generation_begins_is_asked_for_again() -> None:
    arm = Arm(planned("process-kill", (7, "backward")))
    arm.arm("w1", ("hit", 7, "backward"))
    arm.ask(1, 101, 7, "backward")
    arm.broker.forget()
    arm.arm("w1", ("hit", 7, "backward"))
    arm.hear()
    assert len(arm.heard) == 2
    arm.broker.forget()
    arm.arm("w1")  # it fired at somebody else meanwhile
    arm.hear()
    assert arm.wire.answers == [(1, "go")]


def test_an_order_that_comes_too_late_is_said_to_be_missed() -> None:
    arm = Arm(planned("exception", (7, "forward")))
    arm.arm("w1", ("hit", 7, "forward"))
    arm.ask(1, 101, 7, "forward")
    arm.wire.said.append(Disconnected(connection=1))
    arm.hear()
    arm.go("w1", act=True, fault="hit", occurrence=0, params={})
    arm.hear()
    assert arm.heard[-1] == ("missed", {"process": "w1", "fault": "hit", "occurrence": 0})


def test_a_script_is_believed_only_what_it_was_asked_for() -> None:
    arm = Arm(planned("tensor-corrupt", (7, "data")))
    arm.arm("w1", ("hit", 7, "collective"))
    did = PointDone(connection=1, step=7, what="nan", before=0.25, after=float("nan"))
    arm.wire.said.append(did)
    arm.ask(1, 101, 7, "gradient")
    assert not arm.effects
    arm.go("w1", act=True, fault="hit", occurrence=0, params={})
    assert arm.wire.answers == [(1, "nan")]
    wrong = PointDone(connection=1, step=8, what="nan", before=None, after=None)
    arm.wire.said += [
        wrong,
        PointDone(connection=2, step=7, what="nan", before=None, after=None),
        did,
        did,
    ]
    arm.hear()
    evidence = {"script": "nan", "before": 0.25, "after": "nan"}
    assert arm.effects == [{"fault": "hit", "occurrence": 0, "evidence": evidence}]


def test_a_fault_that_no_step_triggers_holds_whoever_comes_next() -> None:
    arm = Arm(planned("exception", message="no"))
    assert arm.wire.armed == set()
    arm.arm("w1", ("hit", 0, "data"))
    assert arm.wire.armed == {(0, "data"), (0, "forward")}
    arm.ask(1, 101, 63, "forward")
    assert arm.heard[0][1]["step"] == 63 and arm.wire.armed == set()
    arm.go("w1", act=True, fault="hit", occurrence=0, params={"message": "no"})
    assert arm.wire.answers == [(1, "raise no (step 63)")]
