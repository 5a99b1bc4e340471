"""A supervisor is lost at any moment, in simulation; another takes over from the log, and every
checker agrees.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.supervise.test_controller import FakeHands
from tests.support.arms import judged
from tests.support.portions import first_in_test, long_but
from tests.support.search import simulate
from tests.support.search.simulate import KILL, Played, cell_of, evidence, play
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.run.orchestrator import Orchestrator
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import StateFrom
from trainchaos.recovery.supervise.adoption import JobRecord, past
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.transport.wire import Abort, Inquiry, Join, Joined, Ready, Status

STRATEGIES = ("checkpoint-restart", "drop-replica", "hot-spare")
SEEDS, BLOCK = 50, 2


def problems(faulted: Played, control: Played, *ignored: str) -> dict[str, str]:
    """What did not pass."""
    findings = judged(evidence(faulted, control))
    return {
        n: f"{f.verdict}: {f.witness}"
        for n, f in findings.items()
        if f.verdict != "pass" and n not in ignored
    }


def adoptions(played: Played) -> list[Event]:
    """Takeovers."""
    return list(played.log.of(Kind.COORDINATOR_ADOPTED))


def cell(seed: int, *, time_s: float, down_s: float) -> Cell:
    """A rank is killed in step 33, and the coordinator at some time."""
    lost: dict[str, Any] = {
        "id": "lost",
        "kind": "coordinator-kill",
        "params": {"down_s": down_s},
        "at": {"time": time_s},
    }
    return cell_of(STRATEGIES[seed % 3], [KILL, lost])


@pytest.mark.slow
@pytest.mark.parametrize("block", first_in_test(SEEDS // BLOCK, 1))
def test_lost_at_any_time_of_a_run_with_a_killed_rank(block: int, memory: Path) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        rng = random.Random(f"adoption {seed}")
        near = rng.random() < 0.6  # close to the kill, which comes after about 1.3 s
        time_s = rng.uniform(1.25, 1.6) if near else rng.uniform(0.05, 2.0)
        faulted_cell = cell(seed, time_s=round(time_s, 4), down_s=round(rng.uniform(0.0, 0.5), 3))
        faulted = play(faulted_cell, memory / str(seed), seed=seed)
        control = play(faulted_cell, memory / str(seed), seed=seed, arm="control")
        assert faulted.outcome == "completed", f"seed {seed}: {faulted.log.events[-3:]}"
        assert len(adoptions(faulted)) == 1, f"seed {seed}"
        assert problems(faulted, control) == {}, f"seed {seed}"


def test_an_undisturbed_job_is_left_undisturbed(memory: Path) -> None:
    played = play(cell(2, time_s=0.5, down_s=0.4), memory, seed=1)
    (taken,) = adoptions(played)
    lost = next(
        e for e in played.log.of(Kind.FAULT_INJECTED) if e.data["kind"] == "coordinator-kill"
    )
    own = [
        e for e in played.log.of(Kind.STEP_COMMITTED) if lost.time_ns < e.time_ns < taken.time_ns
    ]
    assert len({e.step for e in own}) >= 5, "ranks trained while nobody watched"
    generations = list(played.log.of(Kind.GENERATION_STARTED))
    assert [g.data["cause"] for g in generations] == ["start", "failure"], (
        "no generation but for the killed rank"
    )
    assert not [p for p in played.log.problems], "the log has no gap"


def test_a_hang_while_nobody_supervised_is_found_by_the_pace_that_the_log_has(memory: Path) -> None:
    """Not within the minute that a first step has."""
    lost = {"id": "lost", "kind": "coordinator-kill", "params": {"down_s": 0.5}, "at": {"step": 20}}
    hang = {"id": "hang", "kind": "rank-hang", "target": {"rank": 1}, "at": {"step": 24}}
    played = play(cell_of("hot-spare", [lost, hang]), memory, seed=1)
    (taken,) = adoptions(played)
    (told,) = [e for e in played.log.of(Kind.PACE_LEARNED) if e.time_ns < taken.time_ns]
    assert 0.01 < told.data["step_s"] < 0.1
    (struck,) = [e for e in played.log.of(Kind.FAULT_INJECTED) if e.data["kind"] == "rank-hang"]
    assert struck.time_ns < taken.time_ns
    found = next(e for e in played.log.of(Kind.FAILURE_DETECTED) if e.data["cause"] == "hang")
    assert found.time_ns - taken.time_ns < 2e9 and played.outcome == "completed"


def test_a_divergence_after_a_takeover_goes_back_to_where_the_replicas_agreed(memory: Path) -> None:
    """Two replicas, so that no majority says who is right: only the log of the lost one knows of an
    agreement.
    """
    faults: list[dict[str, Any]] = [
        {"id": "lost", "kind": "coordinator-kill", "params": {"down_s": 0.05}, "at": {"step": 35}},
        {"id": "bad", "kind": "replica-desync", "target": {"rank": 1}, "at": {"step": 37}},
    ]
    played = play(cell_of("hot-spare", faults, ranks=2), memory, seed=3)
    assert (len(adoptions(played)), played.outcome) == (1, "completed")
    ready = [e for e in played.log.of(Kind.GENERATION_READY) if e.data["checkpoint"]]
    assert [e.step for e in ready] == [30]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [32, 50])
def test_a_divergence_while_nobody_supervised_is_answered_by_whoever_takes_over(
    step: int, memory: Path
) -> None:
    """The digests that show it wait for the next supervisor, which hears them before it knows where
    all are; in the last steps of the job nothing that would show it comes after them.
    """
    faults: list[dict[str, Any]] = [
        {"id": "lost", "kind": "coordinator-kill", "params": {"down_s": 5.0}, "at": {"step": step}},
        {"id": "bad", "kind": "replica-desync", "target": {"rank": 1}, "at": {"step": step + 2}},
    ]
    played = play(cell_of("drop-replica", faults), memory, seed=3)
    (taken,), failures = adoptions(played), list(played.log.of(Kind.FAILURE_DETECTED))
    assert [(f.data["cause"], f.data["process"]) for f in failures] == [("diverged", "w1")]
    assert failures[0].time_ns > taken.time_ns and played.outcome == "completed"


@pytest.mark.parametrize("strategy", ("drop-replica", "hot-spare"))
def test_a_state_refused_after_the_last_step_is_known_as_such_after_a_takeover(
    strategy: str, memory: Path
) -> None:
    # All hold it, so that a state from a peer would be refused again.
    spoilt = {
        "id": "spoilt",
        "kind": "tensor-corrupt",
        "at": {"step": 12},
        "params": {"surface": "optimizer_state"},
        "target": {"select": "all"},
    }
    lost = {"id": "lost", "kind": "coordinator-kill", "at": {"event": "recovery_started"}}
    played = play(cell_of(strategy, [spoilt, lost], steps=12), memory, seed=2)
    taken = adoptions(played)[0]
    formed = [e for e in played.log.of(Kind.GENERATION_STARTED) if e.time_ns >= taken.time_ns]
    assert [e.data["state"] for e in formed] == ["checkpoint"]
    assert played.outcome == "completed"


def test_a_notice_while_nobody_supervised_is_answered_by_whoever_takes_over(memory: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"id": "lost", "kind": "coordinator-kill", "params": {"down_s": 0.3}, "at": {"step": 32}},
        {
            "id": "told",
            "kind": "process-term",
            "target": {"rank": 1},
            "params": {"grace_s": 5.0},
            "at": {"step": 34},
        },
    ]
    played = play(cell_of("hot-spare", faults), memory, seed=3)
    (taken,), failures = adoptions(played), list(played.log.of(Kind.FAILURE_DETECTED))
    assert [(f.data["cause"], f.data["process"]) for f in failures] == [("notice", "w1")]
    decided = next(played.log.of(Kind.DECISION))
    assert decided.time_ns - taken.time_ns < 500_000_000 and played.outcome == "completed"


def test_the_past_says_when_the_replicas_agreed(memory: Path) -> None:
    played = play(cell_of("checkpoint-restart", [KILL]), memory, seed=2)
    events = played.log.actors["orchestrator"].events
    known = past(
        [e for e in events if e.time_ns < next(played.log.of(Kind.FAILURE_DETECTED)).time_ns]
    )
    assert (known.agreed, known.saved) == (30, 30)
    ready = [e for e in events if e.kind is Kind.GENERATION_READY]
    assert past([e for e in events if e.seq <= ready[0].seq]).agreed == 0
    assert past([e for e in events if e.seq <= ready[1].seq]).agreed == 30


def test_the_past_says_what_recoveries_cost(memory: Path) -> None:
    played = play(cell_of("checkpoint-restart", [KILL]), memory, seed=2)
    costs = past(played.log.actors["orchestrator"].events).meter.costs(
        now_s=played.log.events[-1].time_ns / 1e9, committed=60, steps=60
    )
    ready = list(played.log.of(Kind.PROCESS_READY))
    begun, done = (list(played.log.of(k)) for k in (Kind.GENERATION_STARTED, Kind.GENERATION_READY))
    first, second = ((b.time_ns - a.time_ns) / 1e9 for a, b in zip(begun, done, strict=True))
    assert costs.start_s.n == len(ready) == 8 and 0.01 < costs.start_s.value < 1
    assert (costs.failures, costs.rewound, costs.recalled) == (1, 1, 0)
    assert (costs.form_s.n, costs.restore_s.n) == (1, 1)
    assert costs.form_s.value == pytest.approx(first, rel=1e-6)
    assert costs.restore_s.value == pytest.approx(second - first, rel=1e-6)
    assert 0.01 < costs.step_s[4].value < 0.1 and 0 < costs.watched_s < 60


class Fragile(Orchestrator):
    """Loses its coordinator just before, or in the middle of, its ``at``-th act."""

    at = 0
    acts = 0

    def before_act(self, act: str) -> None:
        """Count."""
        Fragile.acts += 1
        if Fragile.acts == Fragile.at:
            self.scene.lose_coordinator(0.1)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keepers_of_checkpoints_are_nobodys_to_adopt(strategy: str, memory: Path) -> None:
    """They never answer where they are, are not stopped with the ranks, and a rank that is lost
    meanwhile is found what they hold.
    """
    lost: dict[str, Any] = {
        "id": "lost",
        "kind": "coordinator-kill",
        "params": {"down_s": 0.3},
        "at": {"step": 31},
    }
    kept = cell_of(
        strategy, [KILL, lost], every=25, memory={"every": 2}, launcher={"kind": "sim", "nodes": 2}
    )
    faulted, control = (play(kept, memory / arm, seed=4, arm=arm) for arm in ("faulted", "control"))
    assert len(adoptions(faulted)) == 1 and problems(faulted, control) == {}
    names = {
        e.data["process"]
        for e in faulted.log.of(Kind.PROCESS_SPAWNED)
        if e.data["role"] == "keeper"
    }
    assert names == {"k0", "k1"}, "none had to be followed"
    exits = [e for e in faulted.log.of(Kind.PROCESS_EXITED) if e.data["process"] in names]
    assert [e.data["expected"] for e in exits] == [True, True]
    known = past(faulted.log.actors["orchestrator"].events)
    assert not names & {*known.roles, *known.dead, *known.unnoticed}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", long_but(STRATEGIES, "hot-spare"))
def test_lost_in_the_middle_of_any_act(
    strategy: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the members told to join, one of two spares started, a decision written down and not
    begun ...
    """
    control = play(cell_of(strategy, []), memory / "control", seed=4, arm="control")
    monkeypatch.setattr(simulate, "Orchestrator", Fragile)
    taken = 0
    for at in range(1, 200):
        Fragile.at, Fragile.acts = at, 0
        played = play(cell_of(strategy, [KILL]), memory / str(at), seed=4)
        if not adoptions(played):
            break  # it never did so many acts
        taken += 1
        assert played.outcome == "completed", f"act {at}: {played.log.events[-2].data}"
        # Nobody planned this loss, so that no fault explains the failures it leads to.
        assert problems(played, control, "detection") == {}, f"act {at}"
    assert taken > 30


def test_the_past_of_a_log_is_what_it_says(memory: Path) -> None:
    played = play(cell_of("hot-spare", [KILL]), memory, seed=2)
    events = played.log.actors["orchestrator"].events
    started = [e for e in events if e.kind is Kind.GENERATION_STARTED]
    failed = next(e for e in events if e.kind is Kind.FAILURE_DETECTED)
    before = past([e for e in events if e.seq < failed.seq])
    assert before.generation == before.ready_generation == 1
    assert before.unnoticed == {"w2": "signal 9"}, "its exit is in the log, its failure is not"
    between = past([e for e in events if e.seq <= started[1].seq])
    assert (between.generation, between.ready_generation) == (2, 1)
    assert [f.process for f in between.failures] == ["w2"]
    assert "w2" in between.dead and not between.unnoticed
    after = past(events)
    assert not after.failures and [f.process for f in after.answered] == ["w2"]


def test_a_process_that_answers_before_it_says_that_it_is_ready_is_ready_once() -> None:
    """It was starting when the supervisor was lost: its answer to the next one may overtake its own
    word.
    """
    hands = FakeHands()
    lost = Controller(HotSpare(), hands, world=2, steps=100, store_port=1)
    lost.start(StateFrom.INITIAL)
    control = Controller(HotSpare(), hands, world=2, steps=100, store_port=1)
    names = [name for name, _, _ in hands.spawned]
    control.adopt(
        JobRecord(roles={name: role for name, role, _ in hands.spawned}), StateFrom.INITIAL
    )
    (number,) = {message.number for _, message in hands.sent if isinstance(message, Inquiry)}
    for name in names:
        answer = Status(place="waiting", generation=0, step=0, valid=False, number=number)
        control.on_message(name, answer)
    members = [name for name, message in hands.sent if isinstance(message, Join)]
    assert len(members) == 2
    for name in names:
        control.on_message(name, Ready())
    assert [data["process"] for kind, data in hands.events if kind is Kind.PROCESS_READY] == names
    for name in members:
        control.on_message(name, Joined(generation=control.generation, step=0, checkpoint=None))
    control.on_exit(members[0], "signal 9")
    assert [name for name, message in hands.sent if isinstance(message, Abort)] == members[1:], (
        "it is in the generation, and leaves it with the others"
    )


def test_a_process_that_was_not_told_of_its_rank_is_used_for_any() -> None:
    """The supervisor was lost between its record of a generation and the orders to join it."""
    hands = FakeHands()
    Controller(HotSpare(), hands, world=2, steps=100, store_port=1).start(StateFrom.INITIAL)
    names = [name for name, _, _ in hands.spawned]
    control = Controller(HotSpare(), hands, world=2, steps=100, store_port=1, shards=2)
    known = JobRecord(
        roles={name: role for name, role, _ in hands.spawned},
        ready=set(names),
        members=("w1", "w0"),
        shard={"w1": 0, "w0": 1},
        generation=1,
        unnoticed={"w1": "signal 9"},
    )
    control.adopt(known, StateFrom.INITIAL)
    (number,) = {message.number for _, message in hands.sent if isinstance(message, Inquiry)}
    spawned = len(hands.spawned)
    for name in ("w0", "s2"):
        answer = Status(place="waiting", generation=0, step=0, valid=False, number=number)
        control.on_message(name, answer)
    joined = {name for name, message in hands.sent if isinstance(message, Join)}
    assert joined == {"w0", "s2"} and len(hands.spawned) == spawned


@pytest.mark.parametrize(
    ("held", "committed"),
    [((7, 7, None), 7), ((7, 6, None), 6), ((None, None, None), 3), ((7, 7, 7), 7)],
)
def test_whoever_takes_over_knows_the_steps_of_those_whose_state_is_whole(
    held: tuple[int | None, ...], committed: int
) -> None:
    """The supervisor was lost as a generation formed, whose last member has no state yet."""
    hands = FakeHands()
    Controller(CheckpointRestart(), hands, world=3, steps=100, store_port=1).start(
        StateFrom.INITIAL
    )
    names = [name for name, _, _ in hands.spawned]
    control = Controller(CheckpointRestart(), hands, world=3, steps=100, store_port=1)
    known = JobRecord(
        roles={name: role for name, role, _ in hands.spawned},
        ready=set(names),
        members=tuple(names),
        shard=dict.fromkeys(names, 0),
        generation=2,
        ready_generation=1,
        resume_step=3,
    )
    control.adopt(known, StateFrom.INITIAL)
    (number,) = {message.number for _, message in hands.sent if isinstance(message, Inquiry)}
    for name, step in zip(names, held, strict=True):
        valid = step is not None
        answer = Status(place="joining", generation=2, step=step or 0, valid=valid, number=number)
        control.on_message(name, answer)
    assert control.committed == committed


def test_what_does_not_fit_is_found_though_it_answered_before() -> None:
    """An answer says nothing of versions."""
    hands = FakeHands()
    Controller(HotSpare(), hands, world=2, steps=100, store_port=1).start(StateFrom.INITIAL)
    control = Controller(HotSpare(), hands, world=2, steps=100, store_port=1)
    control.adopt(
        JobRecord(roles={name: role for name, role, _ in hands.spawned}), StateFrom.INITIAL
    )
    (number,) = {message.number for _, message in hands.sent if isinstance(message, Inquiry)}
    for name, torch in (("w0", "2.9"), ("w1", "2.8")):
        control.on_message(
            name, Status(place="waiting", generation=0, step=0, valid=False, number=number)
        )
        control.on_message(name, Ready(versions={"torch": torch}))
    causes = [data["cause"] for kind, data in hands.events if kind is Kind.FAILURE_DETECTED]
    assert causes == ["unfit"]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("time_s", [0.02, 0.1])
def test_whoever_starts_while_nobody_supervises_is_asked_when_it_listens(
    time_s: float, memory: Path
) -> None:
    lost: dict[str, Any] = {
        "id": "lost",
        "kind": "coordinator-kill",
        "params": {"down_s": 0.0},
        "at": {"time": 1.4 + time_s},
    }
    faulted_cell = cell_of("hot-spare", [KILL, lost], steps=100)
    faulted = play(faulted_cell, memory, seed=3)
    assert faulted.outcome == "completed"
    ready = [event.data["process"] for event in faulted.log.of(Kind.PROCESS_READY)]
    assert len(ready) == len(set(ready)) == len(list(faulted.log.of(Kind.PROCESS_SPAWNED)))
