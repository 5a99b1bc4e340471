"""A keeper that does not answer its supervisor is ended and replaced; one that cannot be reached,
or whose supervisor was itself paused, is not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.arm.test_roster import FakeKeeperHost, lose
from tests.recovery.checkpoint.memory.test_memory_real import ONLY_MEMORY
from tests.recovery.checkpoint.memory.test_memory_sim import arm
from tests.recovery.test_run import EPOCHS, RECOVERABLE, Running, start, unharmed
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.memory.keeper import PULSE_TOPIC
from trainchaos.recovery.checkpoint.memory.keepers import (
    HUNG_S,
    REST_S,
    START_LIMIT_S,
    TURN_S,
    Keepers,
)
from trainchaos.recovery.process.host import MessageReceived
from trainchaos.recovery.transport.wire import Extra

__all__ = ["start", "unharmed"]  # fixtures
TICK_S = TURN_S / 2


class Rig:
    """Two keepers of which one answers, and a supervisor that looks often."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.host = FakeKeeperHost()
        self.killed: list[str] = []
        self.host.signal = lambda process, signum: self.killed.append(process)  # type: ignore[method-assign]
        self.keepers = Keepers(
            self.host,
            job="job",
            nodes=2,
            limit_bytes=1,
            replicate=True,
            clock_s=lambda: self.now_s,
        )
        self.asked = 0

    def pass_s(self, seconds: float, *answer: str) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for name, message in self.host.told:
                if isinstance(message, Extra) and message.topic == PULSE_TOPIC:
                    self.asked += name == "k0"
                    if name in answer:
                        self.host.reports.append(MessageReceived(process=name, message=message))
            self.host.told.clear()
            self.keepers.look()


def test_one_that_answers_is_asked_again_and_again_and_one_that_does_not_is_ended() -> None:
    rig = Rig()
    rig.pass_s(20 * REST_S, "k0", "k1")
    assert rig.asked >= 10 and not rig.killed
    rig.pass_s(REST_S + HUNG_S + 4 * TICK_S, "k1")
    assert rig.killed == ["k0"] and rig.keepers.hung_s("k1") is None
    assert HUNG_S < (rig.keepers.hung_s("k0") or 0.0) <= HUNG_S + 2 * TICK_S
    rig.pass_s(60, "k1")
    assert rig.killed == ["k0"], "once"


def test_nor_does_one_live_on_that_never_says_it_has_started() -> None:
    rig = Rig()
    lose(rig.host, "k0")
    rig.keepers.look()
    rig.host.reports.clear()  # k2 says nothing
    rig.pass_s(START_LIMIT_S, "k1")
    assert not rig.killed
    rig.pass_s(2 * TICK_S, "k1")
    assert rig.killed == ["k2"]


def test_one_that_cannot_be_reached_is_not_waited_for() -> None:
    rig = Rig()
    rig.pass_s(REST_S + TICK_S, "k1")
    rig.host.lost = {0}
    rig.pass_s(100, "k1")
    rig.host.lost = set()
    rig.pass_s(HUNG_S - TICK_S, "k1")
    assert not rig.killed, "it has all of its time again"
    rig.pass_s(3 * TICK_S, "k1")
    assert rig.killed == ["k0"]


def test_the_pause_of_a_supervisor_is_nobodys_silence() -> None:
    rig = Rig()
    rig.pass_s(REST_S + TICK_S, "k0", "k1")
    rig.now_s += 100
    rig.keepers.look()
    assert not rig.killed


@pytest.mark.long
@pytest.mark.real
def test_a_stopped_keeper_is_followed_and_training_goes_on(
    start: Callable[..., Running], unharmed: dict[str, object]
) -> None:
    job = start("--ranks", "4", *ONLY_MEMORY, "2", RECOVERABLE, EPOCHS)
    job.wait_for(lambda: job.trained(20))
    os.kill(job.pid_of("k0"), signal.SIGSTOP)
    job.wait_for(
        lambda: any(e.data["process"] == "k1" for e in job.of("orchestrator", Kind.PROCESS_SPAWNED))
    )
    assert job.end() == 0, job.said
    assert job.digest() == unharmed
    (ended,) = [e for e in job.of("orchestrator", Kind.PROCESS_EXITED) if e.data["process"] == "k0"]
    assert ended.data["hung_s"] > HUNG_S and ended.data["signal"] == signal.SIGKILL
    assert not list(job.of("orchestrator", Kind.FAILURE_DETECTED)), "the ranks only waited"


@pytest.mark.slow
def test_a_stopped_node_stops_its_keeper_in_simulation_too(memory: Path) -> None:
    played = arm(
        memory,
        {"kind": "node-stop", "target": {"node": 0}},
        recovery="checkpoint-restart",
        memory={"every": 1},
    )
    ends = [
        e
        for e in played.log.of(Kind.PROCESS_EXITED)
        if e.data.get("role") == "keeper" and not e.data["expected"]
    ]
    assert [e.data["hung_s"] for e in ends] == [HUNG_S]
