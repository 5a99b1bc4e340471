"""A keeper that does not answer its supervisor is ended and replaced; one that cannot be reached,
or whose supervisor was itself paused, is not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.arm.test_roster import FakeKeeperHost, keepers_of
from tests.recovery.checkpoint.memory.test_memory_real import ONLY_MEMORY
from tests.recovery.checkpoint.memory.test_memory_sim import arm
from tests.recovery.test_run import EPOCHS, RECOVERABLE, Running, start, unharmed
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.memory.keeper import PULSE_TOPIC
from trainchaos.recovery.checkpoint.memory.pulse import HUNG_S, REST_S, TURN_S, Pulse
from trainchaos.recovery.process.host import MessageReceived
from trainchaos.recovery.transport.wire import Extra

__all__ = ["start", "unharmed"]  # fixtures
TICK_S = TURN_S / 2


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    made = Pulse(30.0, clock)
    made.started("k0")
    made.heard("k0")
    return made


def pass_s(
    clock: Clock, pulse: Pulse, seconds: float, *, reachable: bool = True
) -> tuple[list[str], dict[str, float]]:
    """So many seconds of a supervisor that looks often."""
    asked: list[str] = []
    hung: dict[str, float] = {}
    for _ in range(round(seconds / TICK_S)):
        clock.now_s += TICK_S
        one, two = pulse.turn(lambda process: reachable)
        asked += one
        hung |= two
    return asked, hung


def test_one_that_answers_is_asked_again_and_again(clock: Clock, pulse: Pulse) -> None:
    for _ in range(20):
        assert pass_s(clock, pulse, REST_S) == (["k0"], {})
        pulse.heard("k0")


def test_one_that_does_not_hangs(clock: Clock, pulse: Pulse) -> None:
    assert pass_s(clock, pulse, REST_S + HUNG_S) == (["k0"], {})
    _, hung = pass_s(clock, pulse, 2 * TICK_S)
    assert list(hung) == ["k0"] and HUNG_S < hung["k0"] <= HUNG_S + 2 * TICK_S
    assert pass_s(clock, pulse, 60) == ([], {}), "once"


def test_nor_does_one_that_never_says_it_has_started(clock: Clock, pulse: Pulse) -> None:
    pulse.started("k1")
    pulse.ended("k0")
    assert pass_s(clock, pulse, 30.0) == ([], {})
    assert list(pass_s(clock, pulse, 2 * TICK_S)[1]) == ["k1"]


def test_one_that_cannot_be_reached_is_not_waited_for(clock: Clock, pulse: Pulse) -> None:
    assert pass_s(clock, pulse, REST_S) == (["k0"], {})
    assert pass_s(clock, pulse, 100, reachable=False) == ([], {})
    assert pass_s(clock, pulse, HUNG_S)[1] == {}, "it has all of its time again"
    assert list(pass_s(clock, pulse, 2 * TICK_S)[1]) == ["k0"]


def test_the_pause_of_a_supervisor_is_nobodys_silence(clock: Clock, pulse: Pulse) -> None:
    assert pass_s(clock, pulse, REST_S) == (["k0"], {})
    clock.now_s += 100
    assert pulse.turn(lambda process: True) == ([], {})


def test_the_supervisor_asks_and_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, host = Clock(), FakeKeeperHost()
    killed: list[tuple[str, int]] = []
    monkeypatch.setattr(host, "signal", lambda process, signum: killed.append((process, signum)))
    keepers = keepers_of(host)
    keepers._pulse = Pulse(30.0, clock)
    for name in ("k0", "k1"):
        keepers._pulse.started(name)
        keepers._pulse.heard(name)
    for _ in range(round((REST_S + HUNG_S + 1) / TICK_S)):
        clock.now_s += TICK_S
        asked = [
            name
            for name, message in host.told
            if isinstance(message, Extra) and message.topic == PULSE_TOPIC and name == "k1"
        ]
        host.reports += [
            MessageReceived(process=name, message=Extra(topic=PULSE_TOPIC, payload={}))
            for name in asked
        ]
        host.told.clear()
        keepers.look()
    assert killed == [("k0", signal.SIGKILL)] and keepers.hung_s("k1") is None
    assert (keepers.hung_s("k0") or 0.0) > HUNG_S


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
