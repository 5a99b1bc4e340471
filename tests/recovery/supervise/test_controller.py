"""The supervisor's state machine, with a fake clock and fake processes, news coming in any
order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainchaos.chaos.errors import NoPlaceLeft
from trainchaos.chaos.events.log import Kind, require_keys
from trainchaos.recovery.detection.evidence import LATE_S
from trainchaos.recovery.detection.hangs import HangLimits
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategies.none import NoRecovery
from trainchaos.recovery.policy.strategy import Health, StateFrom, Strategy
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.supervise.controller import Controller, Stage, Timing
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import (
    Abort,
    Finished,
    Join,
    Joined,
    Message,
    Notice,
    Parked,
    PauseRequest,
    Ready,
    Stop,
)

TIMING = Timing(
    start_timeout_s=100.0,
    join_timeout_s=60.0,
    park_timeout_s=1.0,
    blame_grace_s=0.3,
    max_attempts=3,
    hang=HangLimits(floor_s=0.6, first_step_s=60.0),
)
BLANK = Mark(generation=0, step=0, phase="idle", collective=0, time_ns=0, committed=0, last_seq=-1)
KEEPING = [DropReplica(), HotSpare()]
ALL = [CheckpointRestart(), *KEEPING]


class FakeHands:
    """A world in which things happen only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.spawned: list[tuple[str, str, str]] = []
        self.sent: list[tuple[str, Message]] = []
        self.killed: list[str] = []
        self.distrusted: list[str] = []
        self.events: list[tuple[Kind, dict[str, Any]]] = []
        self.marks: dict[str, Mark] = {}
        self.states: dict[str, str] = {}
        self.starved: set[str] = set()
        self.full = False
        self.asked: list[str] = []
        self.dumps: dict[str, tuple[str, str]] = {}

    def now_s(self) -> float:
        return self.now

    def expect(self, role: str, mode: str, count: int) -> None:
        self.expected = (role, mode, count)

    def spawn(self, role: str, mode: str) -> str:
        if self.full:
            raise NoPlaceLeft("no node is left")
        name = f"{'s' if role == 'spare' else 'w'}{len(self.spawned)}"
        self.spawned.append((name, role, mode))
        self.marks[name] = BLANK
        return name

    def send(self, process: str, message: Message) -> bool:
        self.sent.append((process, message))
        return True

    def kill(self, process: str) -> None:
        self.killed.append(process)

    def distrust(self, process: str) -> None:
        self.distrusted.append(process)

    def mark(self, process: str) -> Mark:
        return self.marks[process]

    def os_state(self, process: str) -> str:
        return self.states.get(process, "S")

    def pulse(self, process: str) -> Pulse:
        return Pulse(starved_s=self.now if process in self.starved else 0.0)

    def pid(self, process: str) -> None:
        return None

    def ask_stacks(self, process: str) -> None:
        self.asked.append(process)

    def stacks(self, process: str) -> tuple[str, str] | None:
        return self.dumps.get(process)

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> None:
        require_keys(kind, data)
        self.events.append((kind, data))


class Rig:
    """A controller with its fake world, and shorthand for what processes report."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        world: int = 4,
        steps: int = 100,
        timing: Timing = TIMING,
        shards: int = 1,
    ) -> None:
        self.hands = FakeHands()
        self.control = Controller(
            strategy,
            self.hands,
            world=world,
            steps=steps,
            store_port=4711,
            timing=timing,
            shards=shards,
        )
        self.control.start(StateFrom.INITIAL)

    # ---- what processes report

    def ready(self, *names: str) -> None:
        for name in names:
            self.control.on_message(name, Ready())

    def join(self, *names: str, step: int) -> None:
        for name in names:
            self.at(name, step=step, committed=step, phase="joining")
            message = Joined(generation=self.control.generation, step=step, checkpoint=None)
            self.control.on_message(name, message)

    def join_with(self, held: dict[str, tuple[int, str]]) -> None:
        """Each with a step and a digest of what it holds."""
        for name, (step, digest) in held.items():
            self.at(name, step=step, committed=step, phase="joining")
            message = Joined(
                generation=self.control.generation, step=step, checkpoint=None, digest=digest
            )
            self.control.on_message(name, message)

    def park(
        self, *names: str, step: int, why: Any = "aborted", valid: bool = True, **more: Any
    ) -> None:
        for name in names:
            more.setdefault("generation", self.control.generation)
            message = Parked(step=step, valid=valid, why=why, **more)
            self.control.on_message(name, message)

    def finish(self, *names: str, step: int = 100) -> None:
        for name in names:
            self.control.on_message(name, Finished(step=step))

    def die(self, *names: str, how: str = "signal 9") -> None:
        for name in names:
            self.control.on_exit(name, how)

    def at(
        self, *names: str, step: int, committed: int, phase: str = "forward", collective: int = 0
    ) -> None:
        for name in names:
            self.hands.marks[name] = Mark(
                generation=self.control.generation,
                step=step,
                phase=phase,
                collective=collective,
                time_ns=int(self.hands.now * 1e9),
                committed=committed,
                last_seq=0,
            )

    def wait(self, seconds: float, *, look_every_s: float = 0.05) -> None:
        """Let time pass; everybody who is told to stop or is killed stays as it is."""
        end = self.hands.now + seconds
        while self.hands.now < end:
            self.hands.now = min(end, self.hands.now + look_every_s)
            self.control.tick()

    # ---- what came of it

    @property
    def stage(self) -> Stage:
        return self.control.stage

    @property
    def members(self) -> tuple[str, ...]:
        return self.control.members

    def joins(self) -> dict[str, Join]:
        """The Join each member of the current generation got."""
        generation = self.control.generation
        found = {
            n: m for n, m in self.hands.sent if isinstance(m, Join) and m.generation == generation
        }
        assert tuple(found) == self.members
        return found

    def copies(self) -> dict[int, int]:
        """Who receives its part of the state from whom, in the current generation, by rank."""
        joins = self.joins().values()
        shards = {
            join.state.source % join.shards: join.state.source
            for join in joins
            if join.state.source >= 0
        }
        for join in joins:
            assert join.world == len(self.members)
            assert join.state.source == shards.get(join.rank % join.shards, -1), (
                "all holders of a shard know its source"
            )
        return {join.rank: join.state.source for join in joins if join.state.receives}

    def got(self, kind: type[Message]) -> list[str]:
        """Who was sent a message of this type, in order."""
        return [name for name, message in self.hands.sent if isinstance(message, kind)]

    def events(self, kind: Kind) -> list[dict[str, Any]]:
        return [data for one, data in self.hands.events if one is kind]

    def causes(self) -> list[tuple[str | None, str]]:
        return [(e["process"], e["cause"]) for e in self.events(Kind.FAILURE_DETECTED)]

    def names(self, role: str = "") -> list[str]:
        return [name for name, its_role, _ in self.hands.spawned if its_role == role or not role]

    def train(self, *, steps: int = 10) -> None:
        """Bring the job from nothing to so many committed steps."""
        self.ready(*self.names())
        self.join(*self.members, step=0)
        self.go_on(steps, first=1)

    def go_on(self, last: int, *, first: int) -> None:
        for step in range(first, last + 1):
            self.hands.now += 0.05
            self.at(*self.members, step=step, committed=step)
            self.control.tick()
        assert self.stage is Stage.TRAINING
        assert self.control.committed == last


def test_a_job_starts_trains_and_ends() -> None:
    rig = Rig(HotSpare())
    assert rig.names() == ["w0", "w1", "w2", "w3", "s4"]
    rig.ready("w0", "w1", "w2", "w3")
    assert rig.stage is Stage.STARTING, "a job starts with the spares it was promised"
    rig.ready("s4")
    assert rig.stage is Stage.FORMING
    assert rig.members == ("w0", "w1", "w2", "w3")
    assert [join.rank for join in rig.joins().values()] == [0, 1, 2, 3]
    assert not rig.copies() and not any(join.state.restore for join in rig.joins().values())
    rig.join("w0", "w1", "w2", step=0)
    assert rig.stage is Stage.FORMING
    rig.join("w3", step=0)
    assert rig.stage is Stage.TRAINING
    rig.finish("w0", "w1", "w3")
    assert rig.stage is Stage.TRAINING
    rig.finish("w2")
    assert (rig.stage, rig.control.outcome, rig.control.committed) == (
        Stage.ENDING,
        "completed",
        100,
    )
    assert sorted(rig.got(Stop)) == ["s4", "w0", "w1", "w2", "w3"]
    rig.die("w0", "w1", "w2", "w3", "s4", how="exit code 0")
    assert rig.control.done
    assert rig.causes() == []
    assert rig.hands.killed == []


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("victim", ["w0", "w1", "w3"])
@pytest.mark.parametrize("exit_first", [True, False])
def test_a_killed_rank_is_recovered_whatever_is_heard_first(
    strategy: Strategy, victim: str, exit_first: bool
) -> None:
    rig = Rig(strategy)
    rig.train(steps=56)
    others = [name for name in rig.members if name != victim]
    if exit_first:
        rig.die(victim)
        assert rig.got(Abort) == others
        rig.park(*others, step=56)
    else:
        rig.park(others[0], step=56, why="failed", error="Connection closed by peer")
        assert rig.got(Abort) == [name for name in rig.members if name != others[0]]
        rig.park(*others[1:], step=56)
        rig.die(victim)
    assert rig.causes() == [(victim, "exit")]
    assert rig.stage is Stage.FORMING
    if isinstance(strategy, HotSpare):
        assert rig.members == tuple(
            "s4" if name == victim else name for name in ("w0", "w1", "w2", "w3")
        )
    else:
        assert rig.members == tuple(others)
    before = rig.names()
    rig.join(*rig.members, step=56)
    rig.control.tick()
    assert rig.stage is Stage.TRAINING
    assert rig.names() == before, "starting a process would take the CPU that the first step needs"
    rig.go_on(57, first=57)
    assert rig.names() == [*before, "s5" if isinstance(strategy, HotSpare) else "w4"]
    assert rig.control.outcome == ""


def test_a_process_that_is_ending_is_answered_before_it_has_ended() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.control.on_dying("w1")
    assert rig.causes() == [("w1", "exit")]
    assert rig.got(Abort) == ["w0", "w2", "w3"]
    rig.park("w0", "w2", "w3", step=56)
    assert rig.members == ("w0", "w2", "w3")
    rig.die("w1")
    assert rig.causes() == [("w1", "exit")], "its end is no second failure"


def test_a_process_that_ends_as_it_was_told_is_no_failure() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=100)
    rig.finish("w0", "w1", "w2", "w3")
    rig.control.on_dying("w1")
    assert rig.causes() == []
    rig.die("w0", "w1", "w2", "w3", how="exit code 0")
    assert rig.control.done


def test_a_loss_is_replaced_even_if_no_step_is_made() -> None:
    rig = Rig(
        DropReplica(), timing=replace(TIMING, settle_timeout_s=2.0, hang=HangLimits(floor_s=4.0))
    )
    rig.train(steps=56)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    rig.join(*rig.members, step=56)
    rig.wait(1.9)
    assert rig.names()[-1] == "w3"
    rig.wait(0.2)
    assert rig.names()[-1] == "w4"


def test_survivors_ahead_are_the_source_and_those_behind_receive() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=56)
    rig.die("w1")
    rig.park("w0", step=56)
    rig.park("w2", "w3", step=57)
    assert rig.copies() == {0: 2, 1: 2}


def test_a_rank_whose_state_is_torn_is_no_source() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=10)
    rig.die("w3")
    rig.park("w0", step=57, valid=False)
    rig.park("w1", "w2", step=10)
    assert {rig.members[source] for source in rig.copies().values()} == {"w1"}


@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_checkpoint_restart_replaces_everybody_without_waiting(restart: Any) -> None:
    rig = Rig(CheckpointRestart(restart=restart))
    rig.train(steps=56)
    rig.die("w1")
    assert sorted(rig.hands.killed) == ["w0", "w2", "w3"]
    assert rig.got(Abort) == []
    assert [mode for _, _, mode in rig.hands.spawned] == [restart] * 8
    rig.die("w0", "w2", "w3")
    assert rig.causes() == [("w1", "exit")], "an end that was asked for is no failure"
    rig.ready("w4", "w5", "w7")
    assert rig.stage is Stage.WAITING
    rig.ready("w6")
    assert rig.members == ("w4", "w5", "w6", "w7")
    join = rig.joins()["w6"]
    assert (join.state.restore, rig.copies()) == (True, {1: 0, 2: 0, 3: 0})
    rig.join(*rig.members, step=40)
    assert rig.stage is Stage.TRAINING
    rig.go_on(57, first=57)


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: type(s).__name__)
def test_a_hung_rank_is_named_killed_and_replaced(strategy: Strategy) -> None:
    rig = Rig(strategy)
    rig.train(steps=56)
    rig.at("w0", "w1", "w3", step=57, committed=56, phase="collective", collective=1)
    rig.at("w2", step=57, committed=56, phase="backward")
    rig.wait(0.55)
    assert rig.causes() == []
    rig.wait(0.2)
    assert rig.causes() == [("w2", "hang")]
    assert "w2" in rig.hands.killed
    if strategy.keeps_survivors:
        assert rig.got(Abort) == ["w0", "w1", "w3"]
        rig.park("w0", "w1", "w3", step=56)
        assert rig.stage is Stage.FORMING
        assert "w2" not in rig.members
    rig.die("w2")  # the kill takes effect long after
    assert rig.causes() == [("w2", "hang")]


def test_a_starved_rank_is_not_killed_for_being_slow() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.at("w0", "w1", "w3", step=57, committed=56, phase="collective", collective=1)
    rig.at("w2", step=57, committed=56, phase="backward")
    rig.hands.starved.add("w2")
    rig.wait(60)
    assert rig.causes() == []
    rig.hands.starved.clear()
    rig.wait(0.6)
    assert rig.causes() == [("w2", "hang")]


def test_two_ranks_that_hang_are_both_found() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.at("w0", "w1", step=57, committed=56, phase="collective", collective=1)
    rig.at("w2", "w3", step=57, committed=56, phase="backward")
    rig.wait(0.7)
    rig.park("w0", "w1", step=56)
    rig.wait(1.1)
    assert rig.causes() == [("w2", "hang"), ("w3", "hang")]
    assert rig.members == ("w0", "w1")


def test_survivors_that_do_not_leave_are_hung_too_unless_starved() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.die("w1")
    rig.park("w0", step=56)
    rig.hands.starved.add("w2")
    rig.hands.states.update(w2="R", w3="T")
    rig.wait(1.5)
    assert rig.causes() == [("w1", "exit"), ("w3", "hang")]
    rig.wait(30.0)
    assert rig.stage is Stage.STOPPING, "w2 would leave if it could run"
    rig.park("w2", step=56)
    rig.wait(0.1)
    assert rig.causes() == [("w1", "exit"), ("w3", "hang")]
    assert rig.members == ("w0", "w2")


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda s: type(s).__name__)
def test_a_broken_connection_with_nobody_dead_forms_the_same_members_again(
    strategy: Strategy,
) -> None:
    rig = Rig(strategy)
    rig.train(steps=56)
    rig.park("w1", step=56, why="failed", error="Connection reset by peer")
    rig.park("w0", "w2", "w3", step=56)
    assert rig.stage is Stage.STOPPING, "the cause may be a death that is reported in a moment"
    rig.wait(0.4)
    assert rig.causes() == [(None, "error")]
    assert rig.events(Kind.FAILURE_DETECTED)[0]["detail"] == "Connection reset by peer"
    assert (rig.stage, rig.members, rig.control.generation) == (
        Stage.FORMING,
        ("w0", "w1", "w2", "w3"),
        2,
    )
    assert len(rig.names()) == 4 + strategy.spares_wanted


def test_all_waiting_in_one_collective_is_answered_like_a_broken_connection() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.at(*rig.members, step=57, committed=56, phase="collective", collective=1)
    rig.wait(1.3)
    assert rig.got(Abort) == ["w0", "w1", "w2", "w3"]
    rig.park(*rig.members, step=56)
    rig.wait(0.4)
    assert rig.causes() == [(None, "error")]
    assert rig.stage is Stage.FORMING


def blame(rig: Rig, *ranks: int, step: int) -> None:
    """All ranks see the same flags and park."""
    rig.park(*rig.members, step=step, why="nonfinite", blamed=list(ranks))


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda s: type(s).__name__)
def test_non_finite_values_are_answered_with_a_healthy_peers_state(strategy: Strategy) -> None:
    rig = Rig(strategy)
    rig.train(steps=36)
    blame(rig, 2, step=36)
    assert rig.causes() == [("w2", "nonfinite")]
    assert rig.got(Abort) == [], "all ranks park by themselves"
    assert rig.members == ("w0", "w1", "w2", "w3")
    assert rig.copies() == {2: 0}
    rig.join(*rig.members, step=36)
    rig.go_on(37, first=37)


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda s: type(s).__name__)
def test_a_rank_that_dies_while_the_next_group_forms(strategy: Strategy) -> None:
    rig = Rig(strategy)
    rig.train(steps=56)
    rig.ready(*rig.names("spare"))
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    assert rig.stage is Stage.FORMING
    rig.join(rig.members[0], step=56)
    dead = rig.members[-1]
    rig.die(dead)
    assert rig.stage is Stage.STOPPING
    left = [name for name in rig.members if name != dead]
    rig.park(*left, step=56, valid=True)
    assert rig.control.generation == 3 or rig.stage is Stage.WAITING
    assert dead not in rig.members or rig.stage is Stage.WAITING
    assert rig.causes() == [("w1", "exit"), (dead, "exit")]


def test_a_parked_rank_that_dies_while_others_are_awaited() -> None:
    rig = Rig(HotSpare(replenish=False))
    rig.train(steps=36)
    rig.die("s4", "w0")
    rig.park(
        "w1", "w2", "w3", step=36, valid=False
    )  # no whole state is left: the checkpoint, and a new process
    assert rig.stage is Stage.WAITING
    rig.die("w1")
    assert rig.stage is Stage.WAITING
    rig.ready(*[name for name in rig.names() if name not in ("w0", "w1", "w2", "w3", "s4")])
    assert rig.stage is Stage.FORMING
    assert "w1" not in rig.members
    assert len(rig.members) == 4


def test_a_new_process_that_dies_while_it_is_awaited() -> None:
    rig = Rig(CheckpointRestart())
    rig.train(steps=56)
    rig.die("w1")
    rig.ready("w4", "w5")
    rig.die("w6", how="exit code 1")
    assert rig.stage is Stage.WAITING
    assert [name for name, _, _ in rig.hands.spawned[8:]] == ["w8", "w9", "w10", "w11"]
    rig.ready("w8", "w9", "w10", "w11")
    assert rig.members == ("w8", "w9", "w10", "w11")


def test_a_job_whose_last_node_is_lost_gives_up() -> None:
    rig = Rig(CheckpointRestart())
    rig.train(steps=56)
    rig.hands.full = True
    rig.die("w1")
    assert rig.control.outcome == "gave-up"
    assert rig.control.reason == "no node is left"


def test_a_spare_that_can_start_nowhere_is_started_later_and_the_job_goes_on() -> None:
    rig = Rig(DropReplica(), timing=replace(TIMING, settle_timeout_s=2.0))
    rig.train(steps=56)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    rig.join(*rig.members, step=56)
    rig.hands.full = True
    rig.wait(2.5)
    assert rig.stage is Stage.TRAINING and rig.names()[-1] == "w3"
    rig.hands.full = False
    rig.wait(2.5)
    assert rig.stage is Stage.TRAINING and rig.names()[-1] == "w4"


def test_a_new_process_that_is_never_ready_is_given_up() -> None:
    rig = Rig(CheckpointRestart())
    rig.train(steps=56)
    rig.die("w1")
    rig.ready("w4", "w5", "w6")
    rig.wait(101.0, look_every_s=1.0)
    assert ("w7", "start-timeout") in rig.causes()
    assert "w7" in rig.hands.killed
    assert len(rig.names()) == 12


def test_a_new_process_that_is_stopped_while_it_starts_is_replaced_at_once() -> None:
    """Not after all the time that a process has to start."""
    rig = Rig(CheckpointRestart())
    rig.train(steps=56)
    rig.die("w1")
    rig.ready("w4", "w5", "w6")
    rig.hands.states["w7"] = "T"
    rig.wait(0.05, look_every_s=0.02)
    rig.hands.states["w7"] = "S"
    rig.wait(0.05, look_every_s=0.02)
    assert "w7" not in rig.hands.killed  # it went on
    rig.hands.states["w7"] = "T"
    rig.wait(0.2, look_every_s=0.02)
    assert rig.causes() == [("w1", "exit"), ("w7", "hang")]
    assert "w7" in rig.hands.killed
    assert len(rig.names()) == 12


@pytest.mark.parametrize("stopped", [True, False])
def test_of_several_that_never_start_whoever_is_killed_in_answer_to_the_first_is_no_failure(
    stopped: bool,
) -> None:
    rig = Rig(CheckpointRestart())
    rig.train(steps=56)
    rig.die("w1")
    rig.ready("w4", "w5")
    if stopped:
        rig.hands.states |= {"w6": "T", "w7": "T"}
    rig.wait(0.2 if stopped else 101.0, look_every_s=0.02)
    assert rig.causes() == [("w1", "exit"), ("w6", "hang" if stopped else "start-timeout")]


def test_a_job_with_a_process_stopped_before_it_ever_trained_waits_for_it() -> None:
    """Nobody takes its place then: the job would end by it."""
    rig = Rig(DropReplica())
    rig.hands.states["w3"] = "T"
    rig.ready("w0", "w1", "w2")
    rig.wait(50.0, look_every_s=0.5)
    rig.ready("w3")
    assert rig.stage is Stage.FORMING


def test_a_process_that_was_told_to_end_and_does_not_is_killed_when_the_job_ends() -> None:
    """A spare was told that its machine goes, and hangs; nobody else would end it."""
    rig = Rig(HotSpare())
    rig.train(steps=99)
    (spare,) = rig.names("spare")
    rig.control.on_message(spare, Notice())
    assert rig.got(Stop) == [spare]
    rig.finish(*rig.members)
    rig.die(*(name for name in rig.names() if name != spare), how="exit code 0")
    assert rig.stage is Stage.ENDING and spare not in rig.hands.killed
    rig.wait(6.0)
    assert rig.stage is Stage.ENDING and spare in rig.hands.killed
    rig.die(spare)
    assert rig.control.done and rig.control.outcome == "completed"


def test_a_job_that_cannot_start_is_broken_not_recovered() -> None:
    rig = Rig(DropReplica())
    rig.ready("w0", "w1")
    rig.die("w2", how="exit code 1")
    assert (rig.stage, rig.control.outcome) == (Stage.ENDING, "broken")
    assert "w2" in rig.control.reason and "exit code 1" in rig.control.reason
    assert sorted(rig.hands.killed) == ["w0", "w1", "w3"]
    rig.die("w0", "w1", "w3")
    assert rig.control.done


def test_a_job_whose_start_takes_too_long_is_broken() -> None:
    rig = Rig(DropReplica())
    rig.ready("w0", "w1", "w2")
    rig.wait(101.0, look_every_s=1.0)
    assert (rig.control.outcome, rig.causes()) == ("broken", [("w3", "start-timeout")])


def test_a_group_that_does_not_form_is_broken_up_and_who_stays_is_blamed() -> None:
    rig = Rig(DropReplica())
    rig.ready(*rig.names())
    rig.join("w0", "w1", "w2", step=0)
    rig.wait(61.0, look_every_s=0.5)
    assert rig.got(Abort) == ["w0", "w1", "w2", "w3"]
    rig.park("w0", "w1", "w2", step=0)
    rig.wait(1.5)
    assert rig.causes() == [("w3", "hang")]
    assert rig.members == ("w0", "w1", "w2")


def test_a_group_that_restores_for_minutes_is_waited_for_while_anybody_moves() -> None:
    """A state that takes longer than any limit could else never be resumed."""
    rig = Rig(DropReplica())
    rig.ready(*rig.names())
    rig.join("w1", "w2", "w3", step=0)
    for _ in range(20):
        rig.at("w0", step=0, committed=0, phase="joining")  # its time of the last change moves
        rig.wait(59.0, look_every_s=1.0)
    assert rig.stage is Stage.FORMING and rig.got(Abort) == []
    rig.wait(3.0, look_every_s=0.5)
    assert rig.got(Abort) == ["w0", "w1", "w2", "w3"]


def test_a_search_for_a_bad_sample_lasts_as_long_as_it_goes_on() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.park(*rig.members, step=56, why="nonfinite", blamed=[2])
    rig.join(*rig.members, step=56)
    rig.park("w0", "w1", "w3", step=56, why="nonfinite", blamed=[2])
    for _ in range(5):
        rig.at("w2", step=57, committed=56, phase="optimizer")
        rig.wait(59.0, look_every_s=1.0)
        assert rig.got(Abort) == [] and rig.stage is Stage.STOPPING
    rig.wait(3.0, look_every_s=0.5)
    assert rig.got(Abort) == ["w2"]


def test_a_survivor_that_evaluates_is_waited_for_and_a_short_one_found_in_its_time() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.at("w0", step=56, committed=56, phase="between")
    rig.at("w1", "w2", "w3", step=57, committed=56, phase="collective")
    rig.wait(60.0, look_every_s=0.2)
    rig.die("w1")
    rig.park("w2", "w3", step=56)
    rig.wait(60.0, look_every_s=0.2)
    assert rig.causes() == [("w1", "exit")] and rig.stage is Stage.STOPPING
    rig.park("w0", step=56)
    rig.wait(0.1)
    assert rig.members == ("w0", "w2", "w3") and rig.hands.killed == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_ends_once_what_was_seen_of_a_stopped_rank_is_written_down(answers: bool) -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.hands.dumps["w1"] = ("", "")  # it is read from outside
    rig.hands.states["w1"] = "T"
    rig.wait(TIMING.hang.stopped_s + 0.1, look_every_s=0.02)
    assert rig.causes() == [("w1", "hang")]
    rig.control.stop("interrupted", "by the user")
    rig.die(*rig.hands.marks)
    assert rig.stage is Stage.ENDING
    if answers:
        rig.hands.dumps["w1"] = ("Stack", "w1.stacks")
    rig.wait(0.01 if answers else LATE_S, look_every_s=0.01)
    assert rig.stage is Stage.DONE
    assert [data["answered"] for kind, data in rig.hands.events if kind is Kind.STACKS_DUMPED] == [
        answers
    ]


def test_a_rank_stopped_while_the_group_forms_is_found_at_once() -> None:
    rig = Rig(DropReplica())
    rig.ready(*rig.names())
    rig.join("w0", "w1", "w2", step=0)
    rig.hands.states["w3"] = "T"
    rig.wait(0.1)
    assert rig.causes() == [("w3", "hang")]
    assert rig.got(Abort) == ["w0", "w1", "w2"]


def test_the_word_of_an_earlier_generation_is_ignored() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    rig.join(*rig.members, step=56)
    assert rig.control.generation == 2
    rig.park("w0", step=12, generation=1, valid=False)
    assert rig.stage is Stage.TRAINING
    rig.die("w3")
    rig.park("w2", step=56, generation=1)
    assert rig.stage is Stage.STOPPING
    rig.control.on_message("w0", Joined(generation=1, step=3, checkpoint=None))
    rig.park("w0", "w2", step=57)
    assert rig.members == ("w0", "w2")
    assert rig.copies() == {}


@pytest.mark.parametrize("odd", [(56, "b"), (57, "a")], ids=["state", "step"])
def test_a_member_that_joins_with_something_else_is_named_and_does_not_train(
    odd: tuple[int, str],
) -> None:
    """Nobody hears that the generation is ready; the next one goes without it, as the loss of w1 is
    unanswered too.
    """
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=56)
    before = [kind for kind, _ in rig.hands.events].count(Kind.GENERATION_READY)
    rig.join_with({"w0": (56, "a"), "w2": odd, "w3": (56, "a")})
    assert rig.stage is Stage.STOPPING
    assert [kind for kind, _ in rig.hands.events].count(Kind.GENERATION_READY) == before
    (failure,) = [data for kind, data in rig.hands.events if data.get("cause") == "diverged"]
    assert failure["process"] == "w2"
    rig.park("w0", "w2", "w3", step=56)
    assert rig.members == ("w0", "w3") and not rig.copies()
    rig.join_with({name: (56, "a") for name in rig.members})
    assert rig.stage is Stage.TRAINING


def test_models_that_are_not_built_alike_end_the_job_before_its_first_step() -> None:
    rig = Rig(DropReplica(), world=2)
    rig.ready("w0", "w1")
    rig.join_with({"w0": (0, "a"), "w1": (0, "b")})
    rig.park("w0", "w1", step=0)
    assert rig.control.outcome == "gave-up"
    assert "seed the model alike on every rank" in rig.control.reason


def test_the_word_of_the_dead_is_ignored() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.at("w0", "w1", "w3", step=57, committed=56, phase="collective", collective=1)
    rig.at("w2", step=57, committed=56, phase="backward")
    rig.wait(0.7)
    assert rig.causes() == [("w2", "hang")]
    rig.park("w2", step=57)  # it woke up before the kill reached it
    rig.park("w0", "w1", "w3", step=56)
    assert rig.members == ("w0", "w1", "w3")
    assert rig.copies() == {}


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda s: type(s).__name__)
def test_recoveries_that_bring_no_new_step_end_in_giving_up(strategy: Strategy) -> None:
    rig = Rig(strategy)
    rig.train(steps=10)
    for _ in range(TIMING.max_attempts):
        rig.park(*rig.members, step=10, why="failed", error="refused")
        rig.wait(0.4)
        rig.join(*rig.members, step=10)
        assert rig.stage is Stage.TRAINING
    rig.park(*rig.members, step=10, why="failed", error="refused")
    rig.wait(0.4)
    assert (rig.stage, rig.control.outcome) == (Stage.ENDING, "gave-up")
    assert "brought no new step after 10" in rig.control.reason


def test_recoveries_that_bring_steps_do_not_count_against_the_job() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=10)
    for step in range(10, 10 + 2 * TIMING.max_attempts):
        rig.park(*rig.members, step=step, why="failed", error="refused")
        rig.wait(0.4)
        rig.join(*rig.members, step=step)
        rig.go_on(step + 1, first=step + 1)
        assert (rig.stage, rig.control.outcome) == (Stage.TRAINING, "")


def test_no_recovery_ends_at_the_first_failure() -> None:
    rig = Rig(NoRecovery())
    rig.train(steps=10)
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=10)
    assert (rig.control.outcome, rig.stage) == ("gave-up", Stage.ENDING)
    assert sorted(rig.hands.killed) == ["w0", "w2", "w3"]


def go_on_without_w1(rig: Rig, step: int, *, last: int) -> None:
    """Lose w1 after that step, and go on with three."""
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=step)
    rig.join(*rig.members, step=step)
    rig.go_on(last, first=step + 1)


def grown_back(rig: Rig) -> None:
    """Lose w1, go on with three, and have its replacement ready."""
    rig.train(steps=56)
    go_on_without_w1(rig, 56, last=60)
    rig.ready("w4")
    assert rig.stage is Stage.PAUSING
    assert rig.got(PauseRequest) == ["w0"]


def test_a_replacement_joins_at_a_step_boundary() -> None:
    rig = Rig(DropReplica())
    grown_back(rig)
    rig.park("w0", "w2", step=61, why="pause")
    assert rig.stage is Stage.PAUSING
    rig.park("w3", step=61, why="pause")
    assert (rig.stage, rig.members) == (Stage.FORMING, ("w0", "w2", "w3", "w4"))
    assert rig.copies() == {3: 0}
    assert rig.events(Kind.GENERATION_STARTED)[-1]["cause"] == "grow"
    assert rig.causes() == [("w1", "exit")]
    rig.join(*rig.members, step=61)
    rig.go_on(62, first=62)


def test_a_rank_that_dies_while_the_others_pause() -> None:
    rig = Rig(DropReplica())
    grown_back(rig)
    rig.park("w0", step=61, why="pause")
    rig.die("w2")
    assert rig.got(Abort)[-1] == "w3"
    rig.park("w3", step=61)
    assert rig.stage is Stage.FORMING
    assert rig.members == ("w0", "w3")
    rig.join(*rig.members, step=61)
    rig.go_on(62, first=62)
    assert rig.stage is Stage.TRAINING, (
        "the other replacement is on its way, so that one pause serves both"
    )
    rig.ready("w5")
    assert rig.stage is Stage.PAUSING
    rig.park("w0", "w3", step=63, why="pause")
    assert rig.members == ("w0", "w3", "w4", "w5")


def test_the_replacement_dies_while_the_others_pause_for_it() -> None:
    rig = Rig(DropReplica())
    grown_back(rig)
    rig.die("w4")
    rig.park("w0", "w2", "w3", step=61, why="pause")
    assert (rig.stage, rig.members) == (Stage.FORMING, ("w0", "w2", "w3"))
    rig.join(*rig.members, step=61)
    rig.go_on(62, first=62)
    assert rig.names()[-1] == "w5", "another replacement is started"


def test_a_job_is_complete_after_the_steps_that_its_script_has() -> None:
    """They are known only when its processes are ready."""
    rig = Rig(DropReplica(), steps=0)
    rig.control.steps = 320
    rig.train(steps=10)
    rig.finish(*rig.members, step=320)
    assert (rig.control.outcome, rig.control.reason) == ("completed", "320 steps committed")
    assert rig.control.committed == 320


def test_a_pause_asked_for_in_the_last_step_does_not_stop_the_end() -> None:
    rig = Rig(DropReplica())
    grown_back(rig)
    rig.finish("w0", "w2", "w3")
    assert rig.control.outcome == "completed"


def test_nobody_pauses_once_somebody_has_finished() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    go_on_without_w1(rig, 98, last=99)
    rig.finish("w0")
    rig.ready("w4")
    assert rig.got(PauseRequest) == []
    rig.finish("w2", "w3")
    assert rig.control.outcome == "completed"


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda s: type(s).__name__)
def test_a_rank_that_dies_in_the_last_step_after_others_finished(strategy: Strategy) -> None:
    rig = Rig(strategy)
    rig.train(steps=99)
    rig.finish("w0", "w2", "w3")
    rig.die("w1")
    rig.park("w0", "w2", "w3", step=100)
    assert rig.stage is Stage.FORMING
    rig.finish(rig.members[0])  # it joined and found nothing left to do, before the others joined
    rig.join(*rig.members, step=100)
    assert rig.stage is Stage.TRAINING
    rig.finish(*rig.members[1:])
    assert (rig.control.outcome, rig.stage) == ("completed", Stage.ENDING)


def test_a_rank_that_hangs_before_it_says_it_has_finished_is_found() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=99)
    rig.finish("w0", "w2", "w3")
    rig.at("w1", step=100, committed=100, phase="idle")
    rig.wait(1.0)
    assert rig.causes() == [("w1", "hang")]


def test_parked_ranks_are_not_taken_for_hung_while_they_pause() -> None:
    rig = Rig(DropReplica())
    grown_back(rig)
    rig.at("w0", "w2", step=61, committed=61, phase="idle")
    rig.park("w0", "w2", step=61, why="pause")
    for _ in range(20):
        rig.at("w3", step=61, committed=60, phase="backward")
        rig.wait(0.1)
    assert rig.causes() == [("w1", "exit")]


def test_a_spare_that_dies_is_replaced_and_training_goes_on() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=10)
    rig.die("s4")
    assert rig.stage is Stage.TRAINING
    assert rig.names("spare") == ["s4", "s5"]
    rig.ready("s5")
    assert rig.control.job.ready_spares == ("s5",)


@pytest.mark.parametrize("moment", ["stopping", "forming"])
def test_a_spare_that_dies_during_a_recovery_is_replaced_after_it(moment: str) -> None:
    rig = Rig(HotSpare(spares=2))
    rig.train(steps=10)
    rig.die("w1")
    if moment == "stopping":
        rig.die("s5")
    rig.park("w0", "w2", "w3", step=10)
    assert rig.members == ("w0", "s4", "w2", "w3")
    if moment == "forming":
        rig.die("s5")
    rig.join(*rig.members, step=10)
    rig.go_on(11, first=11)
    waiting = [name for name in rig.names("spare") if name not in ("s4", "s5")]
    assert len(waiting) == 2, "two spares were promised"


def test_a_replacement_that_dies_before_it_is_ready_is_replaced() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=10)
    go_on_without_w1(rig, 10, last=11)
    rig.die("w4", how="exit code 1")
    assert rig.names()[-1] == "w5"


def test_replacements_that_never_start_are_not_started_for_ever() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=10)
    go_on_without_w1(rig, 10, last=11)
    for _ in range(50):
        last = rig.names()[-1]
        if last in rig.members or len(rig.names()) > 40:
            break
        rig.die(last, how="exit code 1")
    assert 5 < len(rig.names()) < 20
    assert rig.stage is Stage.TRAINING, "the job itself is well"


def test_more_losses_than_spares_shrink_the_world_and_fill_it_again() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=10)
    rig.die("w1", "w2")
    rig.park("w0", "w3", step=10)
    assert rig.members == ("w0", "w3", "s4"), "the spare at hand joins at once"
    assert rig.copies() == {2: 0}
    rig.join(*rig.members, step=10)
    rig.go_on(11, first=11)
    rig.ready(*(name for name in rig.names() if name not in ("w0", "w1", "w2", "w3", "s4")))
    assert rig.stage is Stage.PAUSING
    rig.park("w0", "w3", "s4", step=11, why="pause")
    assert len(rig.members) == 4


@pytest.mark.parametrize("stage", ["starting", "training", "stopping", "forming"])
def test_stopping_early_kills_everybody_wherever_the_job_is(stage: str) -> None:
    rig = Rig(HotSpare())
    if stage != "starting":
        rig.train(steps=10)
    if stage in ("stopping", "forming"):
        rig.die("w1")
    if stage == "forming":
        rig.park("w0", "w2", "w3", step=10)
    alive = set(rig.names()) - ({"w1"} if stage in ("stopping", "forming") else set())
    rig.control.stop("interrupted", "SIGINT")
    assert set(rig.hands.killed) == alive
    rig.control.stop("halted", "too late")
    rig.park("w0", step=10)
    rig.ready("s4")
    rig.die(*sorted(alive))
    assert (rig.control.done, rig.control.outcome) == (True, "interrupted")


def test_who_does_not_end_when_asked_is_killed() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=99)
    rig.finish(*rig.members)
    rig.die("w0", "w1", "w2", how="exit code 0")
    rig.wait(4.0)
    assert rig.hands.killed == []
    rig.wait(1.5)
    assert set(rig.hands.killed) == {"w3"}
    rig.die("w3")
    assert (rig.control.done, rig.control.outcome) == (True, "completed")


def test_every_failure_event_names_its_generation_step_and_culprit() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=56)
    rig.at("w1", step=57, committed=56)
    rig.die("w1")
    event = rig.events(Kind.FAILURE_DETECTED)[0]
    assert (event["failure"], event["process"], event["rank"]) == (1, "w1", 1)
    assert event["detail"] == "signal 9"


STRATEGIES = [
    CheckpointRestart(),
    DropReplica(),
    DropReplica(rejoin=False),
    HotSpare(),
    HotSpare(spares=2, replenish=False),
    NoRecovery(),
]
SAYINGS = {
    Health.STARTING: ("ready", "die", "wait"),
    Health.READY: ("die", "wait"),
    Health.TRAINING: (
        "join",
        "park",
        "torn",
        "nonfinite",
        "failed",
        "pause",
        "finish",
        "die",
        "hang",
        "wait",
    ),
    Health.PARKED: ("die", "wait"),
    Health.DEAD: ("wait", "park", "ready"),
}
"""What a process of each health may be heard of."""


def hear(rig: Rig, name: str, saying: str) -> None:
    """Let a process say, or suffer, something."""
    step = rig.control.committed
    match saying:
        case "ready":
            rig.ready(name)
        case "join":
            rig.join(name, step=step)
        case "park" | "torn":
            rig.park(name, step=step, valid=saying == "park")
        case "nonfinite":
            rig.park(name, step=step, why="nonfinite", blamed=[step % 4])
        case "failed":
            rig.park(name, step=step, why="failed", error="x")
        case "pause":
            rig.park(name, step=step, why="pause")
        case "finish":
            rig.finish(name)
        case "die":
            rig.die(name)
        case "hang":
            rig.hands.states[name] = "T"
        case _:
            rig.wait(0.6, look_every_s=0.1)


@pytest.mark.slow
@given(
    strategy=st.sampled_from(STRATEGIES),
    choices=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=80),
)
def test_no_order_of_news_confuses_the_supervisor(
    strategy: Strategy, choices: list[tuple[int, int]]
) -> None:
    rig = Rig(strategy)
    rig.train(steps=10)
    for who, what in choices:
        name = rig.names()[who % len(rig.names())]
        # one that is gone is forgotten, and may still be heard of
        process = rig.control.job.table.get(name)
        sayings = SAYINGS[process.health if process is not None else Health.DEAD]
        hear(rig, name, sayings[what % len(sayings)])
        table = rig.control.job.table
        if rig.stage in (Stage.FORMING, Stage.TRAINING, Stage.PAUSING):
            assert 1 <= len(rig.members) <= rig.control.job.world
            assert len(set(rig.members)) == len(rig.members)
            assert all(
                table[name].health in (Health.TRAINING, Health.PARKED) for name in rig.members
            )
        if rig.stage is Stage.WAITING:
            assert any(
                table[name].health is Health.STARTING
                for name in rig.control.job.formation.pending.members
            )
    rig.control.stop("halted", "enough")
    rig.die(*rig.names())
    assert rig.control.done


def test_one_of_a_broken_replica_steps_in_while_the_others_still_form() -> None:
    rig = Rig(DropReplica(), shards=2)
    rig.train(steps=10)
    rig.die("w3")
    rig.park("w0", "w1", "w2", step=10)
    assert rig.members == ("w0", "w1")
    assert "w2" not in rig.hands.killed
    rig.die("w0")
    rig.park("w1", step=10)
    assert rig.members == ("w2", "w1"), "it holds the same shard at the same step"
    assert (rig.copies(), rig.joins()["w2"].shards) == ({}, 2)


def test_the_state_of_one_that_waits_is_worth_nothing_once_the_others_train() -> None:
    rig = Rig(DropReplica(rejoin=False), shards=2)
    rig.train(steps=10)
    rig.die("w3")
    rig.park("w0", "w1", "w2", step=10)
    rig.join("w0", "w1", step=10)
    rig.die("w0")
    rig.park("w1", step=10)
    form = rig.control.job.formation.pending
    assert form is not None and form.state is StateFrom.CHECKPOINT
    reason = rig.events(Kind.DECISION)[-1]["reason"]
    assert "nobody is left who holds shard 0: only a checkpoint or a memory copy can help" in reason


def test_ranks_that_lack_only_the_end_of_a_step_are_told_it() -> None:
    rig = Rig(HotSpare(), shards=2)
    rig.train(steps=10)
    rig.die("w3")
    rig.park("w0", step=11)
    rig.park("w1", "w2", step=10, pending=11)
    join = rig.joins()["w1"]
    assert rig.members == ("w0", "w1", "w2", "s4")
    assert (join.state.finish, rig.copies()) == (11, {3: 1})
