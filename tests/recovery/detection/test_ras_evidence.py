"""NCCL's RAS in a hang: when it is asked, whom it names, and what is written of it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.recovery.detection.test_evidence import MARKS, WAITING, WORKING, Hands
from tests.support.fakes.ras_server import FIRST_PID, communicator, document, missing, rank
from tests.support.running import LIMIT_S, until
from trainchaos.recovery.detection.evidence import HangEvidence
from trainchaos.recovery.detection.hangs import Hang
from trainchaos.recovery.detection.ras import RasError, RasFinding, read_json
from trainchaos.recovery.detection.ras_watch import EVERY_S, RasWatch
from trainchaos.recovery.transport.progress_counters import Mark

PIDS = {"w0": FIRST_PID, "w1": FIRST_PID + 1, "w2": FIRST_PID + 2}
ALL_WAIT = dict.fromkeys(MARKS, WAITING)
LAGS = read_json(document(communicator([rank(0), rank(1, 40), rank(2)])))
SILENT = read_json(document(communicator([rank(0), rank(2)], [missing(1)])))
SAID = "rank 1 (process 4241 on 10.0.0.1) lags: it has launched AllReduce 40 times, others 41"
NOBODY = Hang(process="", phase="collective", step=5, collective=0, silent_s=2.0, deadline_s=1.0)


class Ras:
    """``answer``: given at once, or when ``go`` is set."""

    def __init__(self, answer: RasFinding | None = LAGS) -> None:
        self.answer = answer
        self.go = threading.Event()
        self.go.set()
        self.asked: list[str] = []
        self.watch = RasWatch(self._ask, lambda: "127.0.0.1:1")

    def _ask(self, address: str) -> RasFinding:
        self.asked.append(address)
        assert self.go.wait(LIMIT_S)
        if self.answer is None:
            raise RasError("refused")
        return self.answer

    def settle(self) -> None:
        """Wait for the answer."""
        until(lambda: not self.watch.under_way)


def hands_of(pids: dict[str, int]) -> Hands:
    hands = Hands()
    hands.pids = dict(pids)
    return hands


def suspected(ras: Ras, marks: dict[str, Mark] = ALL_WAIT) -> tuple[Hands, HangEvidence]:
    hands = hands_of(PIDS)
    evidence = HangEvidence(hands, ras.watch)
    evidence.suspect({*marks}, marks)
    ras.settle()
    return hands, evidence


def test_it_is_asked_once_for_all_and_not_too_often() -> None:
    ras, hands = Ras(), hands_of(PIDS)
    evidence = HangEvidence(hands, ras.watch)
    for step in range(8):
        evidence.suspect({"w1"}, {**MARKS, "w1": WORKING._replace(step=step)})
        ras.settle()
        hands.now += EVERY_S / 4
    assert len(ras.asked) == 2


def test_it_is_not_asked_about_processes_of_other_machines() -> None:
    ras = Ras()
    HangEvidence(hands_of({}), ras.watch).suspect({"w1"}, MARKS)
    assert ras.asked == []


def test_nobody_waits_for_it() -> None:
    ras, hands = Ras(), hands_of(PIDS)
    ras.go.clear()
    evidence = HangEvidence(hands, ras.watch)
    evidence.suspect({"w1"}, MARKS)
    assert evidence.named(NOBODY, MARKS) == NOBODY
    evidence.hung("w1", WORKING)
    assert [one["role"] for one in hands.records] == ["hung", "peer"]
    ras.go.set()
    ras.settle()
    evidence.look()
    (late,) = [one for one in hands.records if one["role"] == "ras"]
    assert late["process"] == "w1" and late["why"].startswith(SAID)
    evidence.look()
    assert len(hands.records) == 3, "once"


def test_who_lags_is_named_where_nobody_else_tells() -> None:
    hands, evidence = suspected(Ras())
    found = evidence.named(NOBODY, ALL_WAIT)
    assert (found.process, found.left_out) == ("w1", "AllReduce 41")
    assert found.measured["ras"] == found.ras and found.ras.startswith(SAID)
    assert "without entering AllReduce 41, in which others wait" in found.detail
    evidence.hung("w1", WAITING)
    assert next(one["process"] for one in hands.events) == "w1", "its stacks too"


def test_who_is_silent_is_named() -> None:
    _, evidence = suspected(Ras(SILENT))
    found = evidence.named(NOBODY, ALL_WAIT)
    assert (found.process, found.left_out) == ("w1", "")
    assert found.ras.endswith("does not answer NCCL's RAS")


@pytest.mark.parametrize(
    "answer",
    [None, RasFinding(communicators=1), replace(LAGS, behind=LAGS.behind * 2, unsure=True)],
)
def test_nobody_is_named_where_it_does_not_tell(answer: RasFinding | None) -> None:
    hands, evidence = suspected(Ras(answer))
    assert evidence.named(NOBODY, ALL_WAIT) == NOBODY
    evidence.stuck(ALL_WAIT)
    said = [one for one in hands.records if one["role"] == "ras"]
    assert bool(said) is bool(answer and answer.behind), "it is evidence all the same"


def test_who_has_moved_since_is_not_named() -> None:
    _, evidence = suspected(Ras())
    moved = {**ALL_WAIT, "w1": WAITING._replace(step=6)}
    assert evidence.named(NOBODY, moved) == NOBODY


def test_a_hang_that_has_a_name_keeps_it_and_has_a_witness() -> None:
    _, evidence = suspected(Ras(), MARKS)
    hang = replace(NOBODY, process="w1", phase="backward")
    assert evidence.named(hang, MARKS).ras.startswith(SAID)
    other = replace(NOBODY, process="w2")
    assert evidence.named(other, MARKS) == other


def test_what_was_said_of_an_earlier_silence_is_not_written() -> None:
    hands, evidence = suspected(Ras())
    evidence.hung("w1", WAITING._replace(step=6))
    evidence.stuck({name: WAITING._replace(step=6) for name in MARKS})
    assert not [one for one in hands.records if one["role"] == "ras"]


def test_another_jobs_processes_are_passed_over() -> None:
    others = read_json(document(communicator([rank(0, pid=7), rank(1, 40, pid=8)])))
    hands, evidence = suspected(Ras(others))
    assert evidence.named(NOBODY, ALL_WAIT) == NOBODY
    evidence.stuck(ALL_WAIT)
    assert not [one for one in hands.records if one["role"] == "ras"]


def test_a_later_request_forgets_the_answer_before() -> None:
    ras = Ras()
    hands, evidence = suspected(ras)
    ras.answer = None
    hands.now += EVERY_S
    later = {name: mark._replace(step=9) for name, mark in ALL_WAIT.items()}
    evidence.suspect({*later}, later)
    ras.settle()
    assert ras.watch.found is None and evidence.named(NOBODY, later) == NOBODY


def test_without_an_address_nobody_is_asked() -> None:
    watch = RasWatch(lambda _: LAGS, lambda: "")
    watch.ask({FIRST_PID: "w0"}, 1.0)
    assert not watch.under_way and watch.found is None and not watch.may_ask(1.0)
