"""A rank is told that it will be ended soon: the controller and every strategy, and a job that
makes no progress.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.supervise.test_controller import KEEPING, Rig
from tests.support.arms import judged
from tests.support.running import LIMIT_S, ROOT
from tests.support.search.simulate import Played, cell_of, evidence, play
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategies.none import NoRecovery
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.supervise.controller import Stage
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.stream import packed
from trainchaos.recovery.transport.wire import (
    CheckpointNote,
    Message,
    Notice,
    PauseRequest,
    Ready,
    Stop,
)

ALL = ["checkpoint-restart", "drop-replica", "hot-spare"]
TERM = {
    "id": "term",
    "kind": "process-term",
    "target": {"rank": 2},
    "at": {"step": 33, "phase": "backward"},
}


def tell(rig: Rig, *names: str) -> None:
    """The processes say that SIGTERM came."""
    for name in names:
        rig.control.on_message(name, Notice())


def saved(rig: Rig, step: int) -> None:
    """The first rank says that a checkpoint is committed."""
    note = CheckpointNote(state="committed", checkpoint=f"step-{step:08d}", step=step)
    rig.control.on_message(rig.members[0], note)


# ---- the controller


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda s: type(s).__name__)
def test_a_noticed_member_leaves_at_the_next_step_boundary(strategy: Strategy) -> None:
    rig = Rig(strategy)
    rig.train(steps=56)
    tell(rig, "w1", "w1")
    assert rig.causes() == [("w1", "notice")], "once, however often it is told"
    assert (rig.stage, rig.got(PauseRequest)) == (Stage.PAUSING, ["w0"])
    rig.park("w0", "w1", "w2", "w3", step=57, why="pause")
    spare = isinstance(strategy, HotSpare)
    assert rig.members == (("w0", "s4", "w2", "w3") if spare else ("w0", "w2", "w3"))
    assert (rig.got(Stop), rig.hands.killed) == (["w1"], []), "it may end by itself"
    rig.die("w1", how="exit code 0")
    assert rig.causes() == [("w1", "notice")]
    rig.join(*rig.members, step=57)
    rig.go_on(58, first=58)
    assert rig.names()[-1] == ("s5" if spare else "w4"), "what is missing is started anew"


def test_a_restart_follows_a_last_checkpoint() -> None:
    rig = Rig(CheckpointRestart())
    rig.train(steps=56)
    tell(rig, "w1")
    assert [m.save for _, m in rig.hands.sent if isinstance(m, PauseRequest)] == [True]
    rig.park("w0", "w1", "w2", "w3", step=57, why="pause")
    assert sorted(rig.hands.killed) == ["w0", "w1", "w2", "w3"]
    rig.ready("w4", "w5", "w6", "w7")
    assert rig.joins()["w4"].state.restore


def test_without_recovery_a_notice_changes_nothing() -> None:
    rig = Rig(NoRecovery())
    rig.train(steps=56)
    tell(rig, "w1")
    assert (rig.stage, rig.got(PauseRequest)) == (Stage.TRAINING, [])
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    assert rig.control.outcome == "gave-up"


@pytest.mark.parametrize(
    "when", ["before it is ready", "as the last one ready", "while others start"]
)
def test_a_spare_that_is_noticed_before_training_began_holds_nobody_up(when: str) -> None:
    rig = Rig(HotSpare())
    before = {"before it is ready": 4, "as the last one ready": 3, "while others start": 1}[when]
    rig.ready(*["w0", "w1", "w2", "w3"][:before], *(["s4"] if before < 4 else []))
    tell(rig, "s4")
    rig.ready(*["w0", "w1", "w2", "w3"][before:])
    assert (rig.stage, rig.got(Stop)) == (Stage.FORMING, ["s4"])
    rig.join("w0", "w1", "w2", "w3", step=0)
    rig.die("s4", how="exit code 0")
    rig.go_on(1, first=1)
    assert (rig.stage, rig.names("spare")) == (Stage.TRAINING, ["s4", "s5"]), "and is replaced"


@pytest.mark.parametrize(
    "strategy", [HotSpare(), DropReplica(), CheckpointRestart()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("heard", [True, False], ids=["it heard of it", "it ends by the signal"])
@pytest.mark.parametrize(
    "first", [True, False], ids=["it goes first", "the others are ready first"]
)
def test_a_rank_to_be_that_is_noticed_and_goes_before_training_began_is_replaced(
    strategy: Strategy, first: bool, heard: bool
) -> None:
    rig = Rig(strategy)
    others = ["w0", "w2", "w3", *rig.names("spare")]
    if heard:
        tell(rig, "w1")
    if not first:
        rig.ready(*others)
    rig.die("w1", how="signal 9" if heard else "signal 15")
    if first:
        rig.ready(*others)
    new = rig.names()[-1]
    assert (rig.stage, rig.control.outcome) == (Stage.STARTING, "")
    rig.ready(new)
    assert rig.members == ("w0", new, "w2", "w3")
    rig.join(*rig.members, step=0)
    rig.go_on(1, first=1)
    assert rig.stage is Stage.TRAINING


def test_a_rank_to_be_that_is_noticed_and_lives_until_training_begins_leaves_then() -> None:
    rig = Rig(HotSpare())
    tell(rig, "w1")
    rig.ready("w0", "w1", "w2", "w3", "s4")
    rig.join("w0", "w1", "w2", "w3", step=0)
    assert (rig.stage, rig.got(PauseRequest)) == (Stage.PAUSING, ["w0"])


def test_a_job_that_cannot_begin_for_notices_ends() -> None:
    rig, tries = Rig(DropReplica()), 0
    while not rig.control.outcome:
        rig.die(rig.names()[-1], how="signal 15")
        tries += 1
    assert (rig.control.outcome, 4 < tries < 40) == ("broken", True)


def test_without_recovery_a_rank_to_be_that_goes_as_it_was_told_to_ends_the_job() -> None:
    rig = Rig(NoRecovery())
    tell(rig, "w1")
    rig.die("w1")
    assert rig.control.outcome == "broken"


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda s: type(s).__name__)
def test_a_replacement_that_is_noticed_while_it_is_waited_for_is_replaced_when_it_goes(
    strategy: Strategy,
) -> None:
    rig = Rig(strategy, world=2)
    rig.train(steps=10)
    if isinstance(strategy, HotSpare):
        rig.die("s2")
    rig.die("w1")
    rig.park("w0", step=10)
    waited = [name for name in rig.names() if name not in ("w0", "w1", "s2")]
    assert waited or rig.stage is Stage.FORMING
    tell(rig, *waited)
    rig.die(*waited)
    assert rig.control.outcome == ""


def test_a_noticed_spare_goes_at_once_and_is_replaced() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=10)
    tell(rig, "s4")
    assert (rig.got(Stop), rig.names("spare"), rig.stage) == (["s4"], ["s4", "s5"], Stage.TRAINING)
    assert rig.control.job.ready_spares == ()


@pytest.mark.parametrize("strategy", [DropReplica(), HotSpare()], ids=lambda s: type(s).__name__)
def test_a_deadline_that_comes_first_is_an_ordinary_exit(strategy: Strategy) -> None:
    rig = Rig(strategy)
    rig.train(steps=56)
    tell(rig, "w1")
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    assert rig.causes() == [("w1", "notice"), ("w1", "exit")]
    assert "w1" not in rig.members and rig.stage is Stage.FORMING


def test_when_all_must_go_a_checkpoint_keeps_the_state() -> None:
    rig = Rig(HotSpare(spares=2), world=2)
    rig.train(steps=56)
    tell(rig, "w0", "w1")
    assert [m.save for _, m in rig.hands.sent if isinstance(m, PauseRequest)] == [False, True]
    saved(rig, 57)
    rig.park("w0", "w1", step=57, why="pause")
    assert rig.members == ("s2", "s3")
    rig = Rig(HotSpare(spares=1), world=1)
    rig.train(steps=56)
    tell(rig, "w0")
    assert [m.save for _, m in rig.hands.sent if isinstance(m, PauseRequest)] == [True]
    rig.park("w0", step=57, why="pause")
    assert rig.members == ("s1",)
    assert rig.joins()["s1"].state.restore


@pytest.mark.parametrize("late", ["while they pause", "when they have parked"])
def test_a_last_notice_too_late_for_the_pause_costs_no_step_either(late: str) -> None:
    """Whether the pause saves is decided with the step's gradients: what comes after that is asked
    for again.
    """
    rig = Rig(HotSpare(spares=2), world=2)
    rig.train(steps=56)
    tell(rig, "w0")
    if late == "when they have parked":
        rig.park("w0", step=57, why="pause")
    tell(rig, "w1")
    rig.park("w0", "w1", step=57, why="pause")
    assert rig.members == ("w0", "w1"), "the same go on, as nothing is saved yet"
    rig.join("w0", "w1", step=57)
    assert rig.stage is Stage.PAUSING
    assert [m.save for _, m in rig.hands.sent if isinstance(m, PauseRequest)][-1]
    rig.park("w0", "w1", step=58, why="pause")
    assert rig.members == ("s2", "s3"), "a save that failed is not asked for for ever"


def test_a_notice_that_changes_nothing_is_not_asked_for_again() -> None:
    rig = Rig(HotSpare(spares=2))
    rig.train(steps=56)
    tell(rig, "w1", "w2")
    assert [m.save for _, m in rig.hands.sent if isinstance(m, PauseRequest)] == [False]


def test_a_notice_in_the_middle_of_a_recovery_is_answered_after_it() -> None:
    rig = Rig(HotSpare(spares=2))
    rig.train(steps=56)
    rig.die("w1")
    tell(rig, "w2")
    rig.park("w0", "w2", "w3", step=56)
    rig.join(*rig.members, step=56)
    assert rig.stage is Stage.PAUSING
    rig.park(*rig.members, step=57, why="pause")
    assert "w2" not in rig.members


def test_a_rank_that_dies_again_and_again_at_one_step_ends_the_job_with_a_clear_word() -> None:
    rig = Rig(HotSpare(spares=9))
    rig.train(steps=36)
    for _ in range(4):
        victim = rig.members[2]
        rig.at(*rig.members, step=37, committed=36)
        rig.die(victim)
        if rig.stage is Stage.STOPPING:
            rig.park(*(name for name in rig.members if name != victim), step=36)
            rig.join(*rig.members, step=36)
    assert rig.control.outcome == "gave-up"
    assert rig.control.reason.startswith("rank 2 died 4 times in a row at step 37: ")


def test_deaths_at_other_steps_are_no_loop() -> None:
    rig = Rig(HotSpare(spares=9))
    rig.train(steps=36)
    for step in (37, 38, 37, 38, 39):
        victim = rig.members[2]
        rig.at(*rig.members, step=step, committed=step - 1)
        rig.die(victim)
        rig.park(*(name for name in rig.members if name != victim), step=step - 1)
        rig.join(*rig.members, step=step - 1)
    assert rig.control.outcome == ""


# ---- the rank


def test_sigterm_reaches_the_supervisor_while_the_main_thread_computes() -> None:
    """In a process of its own, whose main thread never comes back to Python's own loop in time."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            from trainchaos.recovery.process.entry import tell_on_sigterm

            tell_on_sigterm(Channel(theirs))
            os.write(theirs.fileno(), packed(Ready()))
            # minutes in C, without the interpreter's lock
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
        finally:
            os._exit(1)
    try:
        ours.settimeout(LIMIT_S)
        channel, got = Channel(ours), list[Message]()
        got += channel.receive() or []
        os.kill(pid, signal.SIGTERM)
        got += channel.receive() or []
        assert [type(m).__name__ for m in got] == ["Ready", "Notice"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()
        theirs.close()


HELPERS = """
import multiprocessing, os, socket, sys
from trainchaos.recovery.process.entry import tell_on_sigterm
from trainchaos.recovery.process.stacks import answer_requests
from trainchaos.recovery.transport.channel import Channel

def helper():
    multiprocessing.Event().wait()

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    tell_on_sigterm(Channel(socket.socket(fileno=int(sys.argv[1]))))
    answer_requests()
    for _ in range(60):
        one = multiprocessing.Process(target=helper)
        one.start()
        one.terminate()
        one.join(60)
        if one.exitcode != -15:
            sys.exit(f"a helper that was ended lives on: {one.exitcode}")
    with multiprocessing.Pool(2) as pool:
        assert pool.map(abs, range(4)) == [0, 1, 2, 3]
"""


@pytest.mark.real
def test_a_helper_that_a_rank_ends_at_once_ends_and_is_no_notice(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    (tmp_path / "helpers.py").write_text(HELPERS)
    command = [sys.executable, str(tmp_path / "helpers.py"), str(theirs.fileno())]
    with ours:
        ran = subprocess.run(
            command,
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        theirs.close()
        ours.setblocking(False)
        assert (ran.returncode, ours.recv(1000)) == (0, b""), ran.stderr


# ---- whole arms


def arm(
    recovery: Any, root: Path, fault: dict[str, Any], **more: Any
) -> tuple[Played, dict[str, str]]:
    """A faulted arm, and what its checkers say that did not pass."""
    cell = cell_of(recovery, [fault], **more)
    faulted = play(cell, root, seed=3)
    control = play(cell, root, seed=3, arm="control")
    findings = judged(evidence(faulted, control))
    return faulted, {name: f.witness for name, f in findings.items() if f.verdict != "pass"}


def of(played: Played, kind: Kind) -> list[Event]:
    """Events of a kind."""
    return list(played.log.of(kind))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", ALL)
def test_a_heeded_notice_costs_no_step(recovery: str, memory: Path) -> None:
    expect = {"outcome": "recovered", "detected_by": "notice"}
    faulted, problems = arm(recovery, memory, {**TERM, "params": {"grace_s": 5}, "expect": expect})
    assert (faulted.outcome, problems) == ("completed", {})
    (incident,) = evidence(faulted, faulted).measures.incidents
    assert (incident.steps_lost, incident.detected_by, incident.blamed_rank) == (0, "notice", 2)
    assert incident.recovery_time is not None and incident.recovery_time < 1
    assert (
        of(faulted, Kind.GENERATION_STARTED)[1].time_ns
        < of(faulted, Kind.FAULT_INJECTED)[0].time_ns + 5e9
    )
    assert [e.data["cause"] for e in of(faulted, Kind.FAILURE_DETECTED)] == ["notice"]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", ALL)
def test_a_deadline_too_short_to_react_is_a_kill(recovery: str, memory: Path) -> None:
    faulted, problems = arm(recovery, memory, {**TERM, "params": {"grace_s": 0.001}})
    assert (faulted.outcome, problems) == ("completed", {})
    assert [e.data["cause"] for e in of(faulted, Kind.FAILURE_DETECTED)] == ["notice", "exit"]


@pytest.mark.slow
def test_a_job_that_ends_before_the_deadline_lost_nothing(memory: Path) -> None:
    fault = {**TERM, "params": {"grace_s": 60}, "expect": {"outcome": "masked"}}
    faulted, problems = arm("none", memory, fault)
    assert (faulted.outcome, problems) == ("completed", {})


@pytest.mark.parametrize("recovery", [{"strategy": "hot-spare", "spares": 4}, "drop-replica"])
@pytest.mark.parametrize("phase", ["forward", "backward", "collective", "optimizer"])
def test_when_all_are_noticed_one_after_the_other_no_step_is_lost(
    recovery: Any, phase: str, memory: Path
) -> None:
    """Wherever in the step the last of them hears of it."""
    terms = [
        {
            "id": f"term{rank}",
            "kind": "process-term",
            "target": {"rank": rank},
            "params": {"grace_s": 5},
            "at": {"step": 33, "phase": phase if rank == 3 else "data"},
        }
        for rank in range(4)
    ]
    played = play(cell_of(recovery, terms), memory, seed=3)
    assert played.outcome == "completed"
    committed = [
        (e.step or 0, e.generation) for e in of(played, Kind.STEP_COMMITTED) if e.data["rank"] == 0
    ]
    assert len({step for step, _ in committed}) == len(committed) == 60, "no step is done again"
