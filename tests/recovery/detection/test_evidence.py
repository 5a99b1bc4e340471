"""Who is asked for its stacks, when, and what is written down once a hang is declared."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from trainchaos.chaos.events.kinds import REQUIRED
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.detection.evidence import EVERY_S, LATE_S, MOST_ASKED, HangEvidence
from trainchaos.recovery.detection.hangs import SUSPECT_AT, Hang, HangDetector, HangLimits
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import CollectiveEntry, Message, Recall, Recalled

DUMP = 'Stack (most recent call first):\n  File "train.py", line 3 in step\n'
WORKING = Mark(
    generation=1, step=5, phase="backward", collective=1, time_ns=0, committed=4, last_seq=9
)
WAITING = WORKING._replace(phase="collective", collective=2)
MARKS = {"w0": WAITING, "w1": WORKING, "w2": WAITING}


class Hands:
    """What was asked and written; ``dumps``: what each process answers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[str] = []
        self.dumps: dict[str, tuple[str, str] | None] = {}
        self.events: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self.recalls: list[tuple[str, int]] = []
        self.hears = True
        self.pids: dict[str, int] = {}

    def now_s(self) -> float:
        return self.now

    def pid(self, process: str) -> int | None:
        return self.pids.get(process)

    def ask_stacks(self, process: str) -> None:
        self.asked.append(process)
        self.dumps.setdefault(process, (DUMP, f"{process}.stacks"))

    def stacks(self, process: str) -> tuple[str, str] | None:
        return self.dumps.get(process)

    def send(self, process: str, message: Message) -> bool:
        assert isinstance(message, Recall)
        self.recalls.append((process, message.number))
        return self.hears

    def record(self, kind: Kind, /, **data: Any) -> None:
        assert set(data) >= REQUIRED[kind]
        to = {Kind.STACKS_DUMPED: self.events, Kind.COLLECTIVES_DUMPED: self.records}
        to[kind].append(data)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(event["process"], event["role"]) for event in self.events]


def test_a_suspect_and_one_that_waits_are_asked_once() -> None:
    hands = Hands()
    evidence = HangEvidence(hands)
    for _ in range(5):
        evidence.suspect({"w1"}, MARKS)
        hands.now += 1
    assert hands.asked == ["w1", "w0"]


def test_nobody_is_asked_without_a_suspect() -> None:
    hands = Hands()
    HangEvidence(hands).suspect(set(), MARKS)
    assert hands.asked == []


def test_a_rank_that_is_often_late_is_not_asked_each_time() -> None:
    hands = Hands()
    evidence = HangEvidence(hands)
    for step in range(10):
        evidence.suspect({"w1"}, {**MARKS, "w1": WORKING._replace(step=step)})
        hands.now += EVERY_S / 4
    assert hands.asked.count("w1") == 3


def test_what_a_hung_rank_and_its_peer_say_is_written_down() -> None:
    hands = Hands()
    evidence = HangEvidence(hands)
    evidence.suspect({"w1"}, MARKS)
    assert hands.events == [], "it may be a false alarm"
    evidence.hung("w1", WORKING)
    assert hands.told == [("w1", "hung"), ("w0", "peer")]
    assert hands.events[0] == {
        "process": "w1",
        "role": "hung",
        "answered": True,
        "frames": ["train.py:3 in step"],
        "file": "w1.stacks",
    }
    evidence.hung("w1", WORKING)
    assert len(hands.events) == 2, "once"


def test_no_answer_is_evidence_too() -> None:
    hands = Hands()
    hands.dumps["w1"] = ("", "")
    evidence = HangEvidence(hands)
    evidence.suspect({"w1"}, MARKS)
    evidence.hung("w1", WORKING)
    assert hands.told == [("w0", "peer")], "one that is stopped is read from outside"
    hands.now += LATE_S
    evidence.look()
    assert hands.told == [("w0", "peer"), ("w1", "hung")]
    assert hands.events[1]["answered"] is False
    assert hands.events[1]["frames"] == []
    evidence.look()
    assert len(hands.events) == 2, "once"


def test_what_is_seen_of_a_stopped_rank_is_written_down_as_soon_as_it_is_there() -> None:
    hands = Hands()
    hands.dumps["w1"] = ("", "")
    evidence = HangEvidence(hands)
    evidence.suspect({"w1"}, MARKS)
    evidence.hung("w1", WORKING)
    hands.dumps["w1"] = (DUMP, "w1.stacks")
    evidence.look()
    assert hands.events[-1]["process"] == "w1" and hands.events[-1]["answered"] is True
    assert hands.events[-1]["frames"] == ["train.py:3 in step"]


def test_one_that_cannot_be_read_is_left_out() -> None:
    hands = Hands()
    hands.dumps["w1"] = None
    evidence = HangEvidence(hands)
    evidence.suspect({"w1"}, MARKS)
    evidence.hung("w1", WORKING)
    assert hands.told == [("w0", "peer")]


def test_an_answer_of_another_silence_does_not_count() -> None:
    hands = Hands()
    evidence = HangEvidence(hands)
    evidence.suspect({"w1"}, MARKS)
    evidence.hung("w1", WORKING._replace(step=6))
    evidence.hung("w2", WAITING)
    assert hands.events == []


def test_of_a_stall_without_culprit_those_tell_that_have_not_moved() -> None:
    hands = Hands()
    marks = {f"w{number}": WAITING for number in range(MOST_ASKED + 2)}
    evidence = HangEvidence(hands)
    evidence.suspect(set(marks), marks)
    assert hands.asked == [*marks][:MOST_ASKED]
    evidence.stuck({**marks, "w1": WAITING._replace(step=9)})
    assert hands.told == [("w0", "stuck"), ("w2", "stuck"), ("w3", "stuck")]
    evidence.stuck(marks)
    assert hands.told[3:] == [("w1", "stuck")], "each once"


def test_those_that_ended_are_forgotten() -> None:
    hands = Hands()
    evidence = HangEvidence(hands)
    for number in range(50):
        name = f"w{number}"
        evidence.suspect({name}, {name: WORKING, "p": WAITING})
        hands.now += EVERY_S
    assert len(evidence._asked_s) <= 2


def watched() -> tuple[HangDetector, float]:
    """A detector that has seen thirty steps, and the time by then."""
    detector = HangDetector(limits=HangLimits(given_s=1.0))
    detector.resumed(MARKS)
    for step in range(31):
        detector.observe(step * 0.05, step)
    return detector, 1.5


def test_a_rank_is_suspected_at_half_of_its_limit() -> None:
    detector, now_s = watched()
    first: float | None = None
    for _ in range(200):
        now_s += 0.01
        hang = detector.look(now_s, MARKS, lambda _: "S")
        assert detector.suspects <= {"w1"}
        if detector.suspects and first is None:
            first = now_s
        if hang is not None:
            assert hang.process == "w1"
            assert first is not None
            left_s = (1 - SUSPECT_AT) * hang.deadline_s
            assert abs(now_s - first - left_s) < 0.03, "the rest is left for the answer"
            return
    raise AssertionError("never declared")


def test_a_stopped_rank_is_suspected_at_once() -> None:
    detector, now_s = watched()
    suspected_s: list[float] = []
    for _ in range(200):
        now_s += 0.01
        hang = detector.look(now_s, MARKS, lambda name: "T" if name == "w1" else "S")
        suspected_s += [now_s] if detector.suspects == {"w1"} else []
        if hang is not None:
            assert hang.stopped and now_s - suspected_s[0] > 0.07, "to be read from outside"
            return
    raise AssertionError("never declared")


ENTRY = CollectiveEntry(group="generation-1", seq=41, op="all_reduce", sizes="", state="started")


def test_collectives_are_asked_for_with_the_stacks_and_written_down_with_them() -> None:
    hands = Hands()
    evidence = HangEvidence(hands)
    evidence.suspect({"w1"}, MARKS)
    (hung, first), (peer, second) = hands.recalls
    assert (hung, peer) == ("w1", "w0")
    evidence.recalled("w0", Recalled(number=second, rank=0, entries=[ENTRY]))
    assert hands.records == [], "it may be a false alarm"
    evidence.hung("w1", WORKING)
    mute, told = hands.records
    assert mute == {
        "process": "w1",
        "role": "hung",
        "rank": None,
        "entries": [],
        "why": "it did not answer",
    }
    assert told["entries"] == [structs.asdict(ENTRY)] and told["rank"] == 0 and told["why"] == ""
    assert first != second


def test_an_answer_to_an_earlier_request_does_not_count() -> None:
    hands = Hands()
    evidence = HangEvidence(hands)
    evidence.suspect({"w1"}, MARKS)
    number = dict(hands.recalls)["w1"]
    evidence.recalled("w1", Recalled(number=number, rank=1, entries=[ENTRY]))
    hands.now += EVERY_S
    later = {**MARKS, "w1": WORKING._replace(step=6)}
    evidence.suspect({"w1"}, later)
    evidence.hung("w1", later["w1"])
    assert hands.records[0]["why"] == "it did not answer" and hands.records[0]["entries"] == []


def test_who_was_not_asked_is_not_listened_to_and_who_cannot_be_is_not_told_of() -> None:
    hands = Hands()
    hands.hears = False
    evidence = HangEvidence(hands)
    evidence.recalled("w1", Recalled(number=1, rank=1, entries=[ENTRY]))
    evidence.suspect({"w1"}, MARKS)
    evidence.hung("w1", WORKING)
    assert hands.told == [("w1", "hung"), ("w0", "peer")] and hands.records == []


# ---- all wait

OPEN = CollectiveEntry(group="generation-1/a", seq=7, op="all_reduce", sizes="", state="started")
STUCK = Hang(
    process="", phase="collective", step=5, collective=0, silent_s=2.0, deadline_s=1.9, last_seq=-1
)
STANDING = {name: WAITING for name in ("w0", "w1", "w2")}


def all_asked(hands: Hands, marks: dict[str, Mark] = STANDING) -> HangEvidence:
    """All wait, and all but ``w1`` in a collective that it has not begun."""
    evidence = HangEvidence(hands)
    evidence.suspect(set(marks), marks)
    for name, number in hands.recalls:
        entry, begun = (OPEN, 1) if name != "w1" else (structs.replace(OPEN, **LAST), 0)
        evidence.recalled(name, Recalled(number=number, rank=0, entries=[entry], begun=begun))
    return evidence


LAST = {"seq": 6, "state": "done"}


def test_of_all_that_wait_the_one_that_left_a_collective_out_is_named() -> None:
    hands = Hands()
    evidence = all_asked(hands)
    named = evidence.named(STUCK, STANDING)
    assert (named.process, named.last_seq) == ("w1", WAITING.last_seq)
    assert named.detail == (
        "silent for 2.00 s in collective of step 5 without entering all_reduce 7 of a, in which"
        " others wait, limit 1.90 s"
    )
    evidence.hung("w1", WAITING)
    assert hands.told == [("w1", "hung"), ("w0", "peer")], "and one that waits for it"
    assert [record["process"] for record in hands.records] == ["w1", "w0"]


def test_who_has_moved_since_it_was_asked_is_not_named() -> None:
    evidence = all_asked(Hands())
    assert evidence.named(STUCK, STANDING | {"w1": WAITING._replace(collective=3)}) == STUCK


def test_an_answer_to_an_earlier_request_names_nobody() -> None:
    hands = Hands()
    evidence = all_asked(hands)
    later = {name: WAITING._replace(step=6) for name in STANDING}
    hands.now += EVERY_S
    evidence.suspect(set(later), later)
    assert evidence.named(STUCK, later) == STUCK


def test_of_many_each_is_asked_for_its_collectives_and_a_few_for_their_stacks() -> None:
    hands = Hands()
    many = {f"w{n}": WAITING for n in range(3 * MOST_ASKED)}
    evidence = all_asked(hands, many)
    assert [name for name, _ in hands.recalls] == list(many)
    assert hands.asked == list(many)[:MOST_ASKED]
    assert evidence.named(STUCK, many).process == "w1"
    evidence.stuck(many)
    assert len(hands.events) == len(hands.records) == MOST_ASKED
