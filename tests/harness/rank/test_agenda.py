"""What a rank does for the injector, and when: by itself, and gone through by a real rank and by a
simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.rank.fault_agent import FaultAgent
from trainchaos.harness.rank.shims import agenda
from trainchaos.harness.rank.shims.agenda import Acted, Agenda, HoldAnswer, Stall, Wait
from trainchaos.harness.sim.rank.faults import SimFaultAgent, TrainingError
from trainchaos.harness.sim.rank.state import ReduceInput, State
from trainchaos.harness.sim.world.clock import Clock
from trainchaos.harness.sim.world.process import Process
from trainchaos.recovery.transport.wire import Extra

Seen = list[tuple[Any, ...]]


def point(fault: str, step: int, phase: str = "data") -> dict[str, Any]:
    """Where to hold."""
    return {"fault": fault, "step": step, "phase": phase, "seed": 7}


def armed(*points: dict[str, Any], standing: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """What ``arm`` says."""
    return {"points": list(points), "standing": list(standing)}


def go(fault: str, kind: str = "data-stall", **more: Any) -> dict[str, Any]:
    """The word to act. ``more``: params besides ``duration_s`` and ``duration_steps``."""
    durations = {
        "duration_s": more.pop("duration_s", None),
        "duration_steps": more.pop("duration_steps", None),
    }
    params = more or ({"delay_s": 0.25} if kind == "data-stall" else {})
    about = {
        "act": True,
        "fault": fault,
        "occurrence": 0,
        "kind": kind,
        "params": params,
        "step": 4,
        "seed": 7,
    }
    return about | durations


def no(fault: str) -> dict[str, Any]:
    """The word to go on."""
    return {"act": False, "fault": fault}


class Recorder:
    """Hands that note what they are asked for. ``missing``: the next act finds nothing to
    act on.
    """

    def __init__(self) -> None:
        self.seen: Seen = []
        self.now = 0
        self.missing = False
        self.measures: dict[str, Any] | None = None
        self.later: list[Callable[[], None]] = []
        self.agenda = Agenda(self)

    def now_ns(self) -> int:
        """The present."""
        return self.now

    def say(self, topic: str, payload: dict[str, Any]) -> None:
        """Noted."""
        self.seen.append((topic, payload["fault"]))

    def log(self, *, step: int, fault: str, occurrence: int, evidence: dict[str, Any]) -> None:
        """Noted."""
        self.seen.append(("effect", step, fault, evidence))

    def do(self, action: Callable[[], None], surface: str | None, /) -> Mapping[str, Any] | None:
        """Done, unless there is nothing to do it to."""
        if self.missing:
            raise LookupError("no such tensor")
        action()
        return self.measures

    def set_data_delay(self, seconds: float) -> None:
        """As a data-stall wants it."""
        self.agenda.data_delay_s = seconds
        for action in self.later:
            self.agenda.next_step(action)

    def due_samples(self) -> list[int]:
        """Some."""
        return [3, 4]

    def poison_sample(self, sample: int | None) -> None:
        """Noted."""
        self.seen.append(("poison", self.agenda.rank, self.agenda.step, sample))

    def go_through(
        self, step: int, phase: str = "data", *answers: dict[str, Any], rank: int = 2
    ) -> list[Wait]:
        """Every hold is given the answers; the waits."""
        waits = []
        for wait in self.agenda.at(step, phase, rank=rank):
            waits.append(wait)
            for answer in answers if isinstance(wait, HoldAnswer) else ():
                self.agenda.hear("go", answer)
        return waits


@pytest.fixture
def hands() -> Recorder:
    """With nothing to do yet."""
    return Recorder()


def test_who_has_nothing_to_do_does_not_wait(hands: Recorder) -> None:
    assert not hands.agenda.active and hands.go_through(4) == []
    hands.agenda.hear("arm", armed(point("f", 5)))
    assert (
        hands.agenda.active and hands.go_through(4) == [] and hands.go_through(5, "forward") == []
    )


def test_it_holds_at_each_point_says_so_first_and_acts_when_it_is_told_to(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("b", 0), point("a", 4), point("c", 4)))
    answers = [no("a"), no("c"), go("b", duration_steps=1)]
    assert [type(wait) for wait in hands.go_through(4, "data", *answers)] == [
        HoldAnswer,
        HoldAnswer,
        HoldAnswer,
        Acted,
        Stall,
    ]
    assert [said[:2] for said in hands.seen if said[0] == "at_point"] == [
        ("at_point", "a"),
        ("at_point", "c"),
        ("at_point", "b"),
    ]
    assert hands.seen[-1] == ("effect", 4, "b", {"delay_s": 0.25})
    assert (hands.agenda.rank, hands.agenda.step, hands.agenda.seed) == (2, 4, 7)


def test_an_answer_to_another_fault_is_none_and_one_to_act_was_missed(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4)))
    hands.go_through(4, "data", no("other"), go("other"))
    assert hands.seen == [("at_point", "f"), ("missed", "other"), ("unanswered", "f")]


def test_an_answer_that_comes_when_nobody_holds_any_more_was_missed(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4)))
    hands.go_through(4)
    assert not hands.agenda.hear("go", no("f")) and not hands.agenda.hear("go", go("f"))
    assert hands.seen == [("at_point", "f"), ("unanswered", "f"), ("missed", "f")]


def test_what_it_was_told_as_its_generation_was_lost_was_missed(hands: Recorder) -> None:
    """The injector has the act on record, and nobody else would ever say that it did not happen."""
    hands.agenda.hear("arm", armed(point("f", 4)))
    waits = hands.agenda.at(4, "data", rank=2)
    assert isinstance(next(waits), HoldAnswer)
    assert hands.agenda.hear("go", go("f"))
    waits.close()
    assert hands.seen == [("at_point", "f"), ("missed", "f")]


def test_a_lost_generation_ends_a_hold_without_a_word(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4)))
    waits = hands.agenda.at(4, "data", rank=2)
    next(waits)
    waits.close()
    assert hands.seen == [("at_point", "f")] and not hands.agenda.answered


def test_a_new_word_replaces_what_was_armed(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4)))
    hands.agenda.hear("arm", armed(point("g", 5)))
    assert hands.go_through(4) == [] and len(hands.go_through(5)) == 1


def test_what_stands_acts_at_the_first_point_once_and_as_of_its_own_step(hands: Recorder) -> None:
    poison = go("p", "poison-sample", sample=3)
    hands.agenda.hear("arm", armed(standing=(poison,)))
    assert [type(wait) for wait in hands.go_through(9, "forward")] == [Acted]
    hands.agenda.hear("arm", armed(standing=(poison,)))
    assert hands.go_through(10) == [] and not hands.agenda.active
    assert [seen for seen in hands.seen if seen[0] == "poison"] == [("poison", 2, 4, 3)]


def test_what_stands_is_as_it_was_told(hands: Recorder) -> None:
    """What comes to stand later is told later."""
    told = armed()
    hands.agenda.hear("arm", told)
    told["standing"].append(go("p", "poison-sample", sample=3))
    assert hands.go_through(9) == []


def test_a_fault_ends_in_a_rank_that_waits_when_the_injector_says_so(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4), point("g", 4)))
    hands.go_through(4, "data", go("f", duration_s=1.0), go("g", duration_s=9.0))
    assert not hands.agenda.hear("over", {"fault": "f", "occurrence": 0})
    assert hands.seen[-1] == ("healed", "f") and hands.agenda.active
    said = list(hands.seen)
    assert not hands.agenda.hear("over", {"fault": "f", "occurrence": 0})
    hands.now = 1_000_000_000
    hands.agenda.committed(5)
    assert hands.seen == said, "it is over once"


@pytest.mark.parametrize(("more", "ends"), [({"duration_steps": 2}, 6), ({"duration_s": 1.0}, 5)])
def test_a_fault_ends_by_step_or_by_time(more: dict[str, Any], ends: int, hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4)))
    hands.go_through(4, "data", go("f", **more))
    for step in range(4, ends):
        hands.agenda.committed(step)
        assert ("healed", "f") not in hands.seen and hands.agenda.active
    hands.now = 1_000_000_000
    hands.agenda.committed(ends)
    assert hands.seen[-1] == ("healed", "f")
    assert not hands.agenda.active and hands.agenda.data_delay_s == 0.0


def test_the_end_of_one_fault_does_not_hide_what_is_still_to_be_done(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4)))
    hands.go_through(4, "data", go("f", duration_steps=1))
    hands.agenda.hear("arm", armed(standing=(go("p", "poison-sample", sample=3),)))
    hands.agenda.committed(5)
    assert hands.agenda.active, "nobody looks where there is nothing to do"
    hands.go_through(6)
    assert ("poison", 2, 4, 3) in hands.seen


def test_what_is_left_for_the_next_step_is_done_at_the_same_phase_of_it_and_measured(
    hands: Recorder,
) -> None:
    done: list[str] = []
    hands.later = [partial(done.append, "later")]
    hands.agenda.hear("arm", armed(point("f", 4)))
    hands.measures = {"before": "x", "after": "y"}
    hands.go_through(4, "data", go("f", duration_steps=1))
    with pytest.raises(RuntimeError, match="only an act"):
        hands.agenda.next_step(lambda: None)
    assert hands.seen[-1] == ("effect", 4, "f", {"delay_s": 0.25, "before": "x", "after": "y"})
    hands.go_through(4)
    hands.go_through(5, "forward")
    assert not done
    hands.go_through(5)
    assert done == ["later"] and hands.seen[-1] == ("effect", 5, "f", {"before": "x", "after": "y"})
    hands.go_through(6)
    assert done == ["later"]


def test_what_finds_nothing_to_act_on_says_so_and_is_not_in_force(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4)))
    hands.missing = True
    hands.go_through(4, "data", go("f", duration_steps=1))
    assert hands.seen[-1] == ("effect", 4, "f", {"nothing": "no such tensor"})
    assert not hands.agenda.active


def test_what_does_not_act_in_a_rank_does_not_act_here(hands: Recorder) -> None:
    hands.agenda.hear("arm", armed(point("f", 4)))
    hands.go_through(4, "data", go("f", "process-kill"))
    assert hands.seen == [("at_point", "f")]


# --- a real rank and a simulated one


class Real:
    """A real rank's agent whose body is a fake and whose time stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Seen = []
        self.answers: list[dict[str, Any]] = []
        self.rank = 2
        self.spoil: object = None
        self.config = SimpleNamespace(process="w2", global_batch=8, samples=64, seed=1)
        self.marks = SimpleNamespace(
            touch=self._touch, hide=lambda: None, show=lambda: None, wrote=lambda seq: None
        )
        self.state = SimpleNamespace(model=None, optimizer=None)
        self.writer = SimpleNamespace(write=self._write)
        self.agent = SimpleNamespace(channel=SimpleNamespace(send=self._hear))
        monkeypatch.setattr(
            FaultAgent, "_stall", lambda faults, seconds: self.seen.append(("stall", seconds))
        )
        self.faults = FaultAgent(self)  # type: ignore[arg-type]

    def check(self) -> None:
        """Nobody aborts."""

    def _touch(self) -> None:
        answers, self.answers = self.answers, []
        for answer in answers:
            self.faults.on_command("go", answer)

    def _hear(self, message: Extra) -> None:
        self.seen.append((message.topic, dict(message.payload)))

    def _write(self, kind: Kind, *, step: int, fault: str, occurrence: int, evidence: Any) -> Any:
        self.seen.append((kind, step, fault, occurrence, sorted(evidence)))
        return SimpleNamespace(seq=1)

    def play(self, script: list[tuple[Any, ...]]) -> Seen:
        """What it said and did."""
        for what, *more in script:
            if what == "arm":
                self.faults.on_command("arm", more[0])
            elif what == "committed":
                self.faults.committed(more[0])
            else:
                self.answers = list(more[2:])
                try:
                    self.faults.at(more[0], more[1])
                except Exception as error:
                    self.seen.append(("raised", type(error).__name__))
            self.seen.append(("active", self.faults.active))
        return self.seen


class Simulated:
    """A simulated rank's agent in a process of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Seen = []
        self.answers: list[dict[str, Any]] = []
        self.rank, self.generation, self.started_ns = 2, 1, 0
        self.config = SimpleNamespace(global_batch=8, samples=64, seed=1, wall_ns=0)
        self.state = State.initial(1)
        part = ReduceInput(loss_sum=0.0, count=0, pause=False, gradient=b"", bad=False)
        self.attempt = SimpleNamespace(part=part, corrupted=lambda *_: None)
        self.clock = Clock()
        self.process = Process(name="w2", role="worker", pid=1, clock=self.clock, seed="1")
        self.mark = self.process.mark

        def stalled(faults: SimFaultAgent, ns: float) -> Generator[float, None, None]:
            self.seen.append(("stall", ns / 1e9))
            yield 0.0

        monkeypatch.setattr(SimFaultAgent, "_stall", stalled)
        self.faults = SimFaultAgent(self)  # type: ignore[arg-type]

    def check(self) -> None:
        """Nobody aborts."""

    def send(self, message: Extra) -> None:
        """To the supervisor, whose answers come while it holds."""
        self.seen.append((message.topic, dict(message.payload)))
        answers, self.answers = self.answers if message.topic == "at_point" else [], []
        for answer in answers:
            self.clock.after(0, partial(self.faults.on_command, "go", answer))

    def write(self, kind: Kind, *, step: int, fault: str, occurrence: int, evidence: Any) -> None:
        """Noted."""
        self.seen.append((kind, step, fault, occurrence, sorted(evidence)))

    def _body(self, script: list[tuple[Any, ...]]) -> Generator[float | None, Any, int]:
        for what, *more in script:
            if what == "arm":
                self.faults.on_command("arm", more[0])
            elif what == "committed":
                self.faults.committed(more[0])
            else:
                self.answers = list(more[2:])
                try:
                    yield from self.faults.at(more[0], more[1])
                except TrainingError as error:
                    self.seen.append(("raised", error.kind))
            self.seen.append(("active", self.faults.active))
        return 0

    def play(self, script: list[tuple[Any, ...]]) -> Seen:
        """What it said and did."""
        self.process.start(self._body(script))
        while self.process.running and self.clock.advance(self.clock.now_ns + 1_000_000_000):
            pass
        assert not self.process.running, "it still waits for something"
        return self.seen


SCRIPT: list[tuple[Any, ...]] = [
    ("at", 1, "data"),
    (
        "arm",
        armed(point("slow", 2), point("deaf", 2), point("later", 0, "forward"), point("alone", 3)),
    ),
    ("at", 2, "data", no("other"), go("other"), go("slow", duration_steps=2)),
    ("at", 2, "forward", go("later", "straggler", factor=2.0, duration_s=0.0)),
    ("committed", 2),
    ("at", 3, "data"),
    ("committed", 4),
    ("arm", armed(point("end", 6, "backward"), standing=(go("p", "poison-sample", sample=3),))),
    ("at", 5, "data"),
    ("at", 5, "backward"),
    ("at", 6, "backward", go("end", "heartbeat-drop", duration_steps=1)),
    ("arm", armed(point("crash", 7, "optimizer"), standing=(go("p", "poison-sample", sample=3),))),
    ("at", 7, "data"),
    ("at", 7, "optimizer", go("crash", "exception", message="no more")),
    ("committed", 7),
]


def test_a_real_rank_and_a_simulated_one_do_the_same_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agenda, "HOLD_LIMIT_S", 0.0)
    monkeypatch.setattr(agenda, "LOOK_S", 0.0)
    real, simulated = Real(monkeypatch).play(SCRIPT), Simulated(monkeypatch).play(SCRIPT)
    assert real == simulated
    said = {"at_point", "missed", "unanswered", "healed", "stall", "raised", Kind.FAULT_EFFECT}
    assert {entry[0] for entry in real} == said | {"active"}, "the script is of everything there is"
