"""Two faults at once, or one in the middle of the recovery from another, over hundreds of seeds and
every layout.

Simulated: the real controller, strategies, injector and checkers, over simulated ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.arms import judged
from tests.support.search.simulate import Played, cell_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.launchers.sim import Sim

SEEDS, BLOCK, IN_TEST = 500, 50, 4
STEPS, EVERY = 18, 4
ARM_SEEDS = 5  # of data, jitter and races; the faults have 500 of their own
LAYOUTS: dict[str, tuple[int, int, Any]] = {
    "ddp": (4, 1, "ddp"),
    "hsdp": (4, 2, {"hsdp": {"replicas": 2, "shards": 2}}),
    "hsdp of 3": (6, 2, {"hsdp": {"replicas": 3, "shards": 2}}),
    "fsdp": (4, 4, "fsdp"),
}
RESTART, DROP, SPARE = "checkpoint-restart", "drop-replica", "hot-spare"


@dataclass(kw_only=True)
class Dice:
    """What a seed decides."""

    seed: int
    layout: str
    recovery: Any = SPARE
    spread_ms: float = 1.5

    @property
    def sim(self) -> Sim:
        """How long things take."""
        return Sim(transfer_ms=60, checkpoint_ms=15, spread_ms=self.spread_ms)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"double fault {self.seed}")
        self.ranks, self.shards, self.parallelism = LAYOUTS[self.layout]
        self.step = self.rng.randint(5, 9)
        self.victim = self.rng.randrange(self.ranks)
        self.phase = self.rng.choice(("data", "forward", "backward", "collective", "optimizer"))

    def kill(self, target: dict[str, Any], **at: Any) -> dict[str, Any]:
        """A kill of the step, or at another moment."""
        when = at or {"step": self.step, "phase": self.phase}
        return {
            "id": "second" if at else "first",
            "kind": "process-kill",
            "target": target,
            "at": when,
        }

    def cell(self, *faults: dict[str, Any]) -> Cell:
        """The scenario with these faults."""
        return cell_of(
            self.recovery,
            list(faults),
            ranks=self.ranks,
            parallelism=self.parallelism,
            steps=STEPS,
            every=EVERY,
        )

    def first(self) -> dict[str, Any]:
        """One rank is killed."""
        return self.kill({"rank": self.victim})


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Dice], Played]:
    """Control arms, each played once and judged."""

    @cache
    def arm(layout: str, seed: int, spread_ms: float) -> Played:
        dice = Dice(seed=seed, layout=layout, spread_ms=spread_ms)
        root = tmp_path_factory.mktemp("control")
        control = play(dice.cell(), root, seed=seed, arm="control", sim=dice.sim)
        assert {f.verdict for f in judged(evidence(control, None)).values()} == {"pass"}
        return control

    return lambda dice: arm(dice.layout, dice.seed % ARM_SEEDS, dice.spread_ms)


def recovered(cell: Cell, root: Path, dice: Dice, control: Played) -> Played:
    """Play it: the job completes, and every invariant holds."""
    faulted = play(cell, root / str(dice.seed), seed=dice.seed % ARM_SEEDS, sim=dice.sim)
    found = {
        name: f"{f.verdict}: {f.witness}"
        for name, f in judged(evidence(faulted, control)).items()
        if f.verdict != "pass"
    }
    assert (faulted.outcome, found) == ("completed", {}), (
        f"seed {dice.seed}, {dice.layout}, {dice.recovery}"
    )
    return faulted


def reasons(played: Played) -> str:
    """All that was decided, in words."""
    return "; ".join(event.data["reason"] for event in played.log.of(Kind.DECISION))


def blocks(*layouts: str) -> Any:
    """Every seed of a block has its layout. Of the first block ``make test`` plays a part, for
    what few seeds show.
    """
    names = layouts or tuple(LAYOUTS)
    dice = [Dice(seed=seed, layout=names[seed % len(names)]) for seed in range(SEEDS)]
    return pytest.mark.parametrize(
        "dice",
        [
            pytest.param(dice[:IN_TEST], id="0"),
            *(
                pytest.param(
                    dice[max(start, IN_TEST) : start + BLOCK],
                    id=f"from {start}",
                    marks=pytest.mark.long,
                )
                for start in range(0, SEEDS, BLOCK)
            ),
        ],
    )


Controls = Callable[[Dice], Played]
pytestmark = pytest.mark.slow


@blocks()
def test_two_at_once(dice: list[Dice], memory: Path, controls: Controls) -> None:
    for each in dice:
        each.recovery = each.rng.choice((RESTART, DROP, SPARE, {"strategy": SPARE, "spares": 2}))
        both = each.kill({"select": {"count": 2}})
        faulted = recovered(each.cell(both), memory, each, controls(each))
        assert len(list(faulted.log.of(Kind.FAULT_LANDED))) == 2


@blocks()
@pytest.mark.long
def test_another_while_the_group_forms(dice: list[Dice], memory: Path, controls: Controls) -> None:
    for each in dice:
        each.recovery = each.rng.choice((RESTART, DROP, SPARE, {"strategy": SPARE, "spares": 2}))
        second = each.kill({"rank": each.rng.randrange(each.shards)}, event="regroup")
        faulted = recovered(each.cell(each.first(), second), memory, each, controls(each))
        forming = faulted.log.of(Kind.GENERATION_STARTED)
        assert len(list(forming)) >= 3


@blocks()
@pytest.mark.long
def test_another_while_the_state_is_restored(
    dice: list[Dice], memory: Path, controls: Controls
) -> None:
    """A restart of all, or the loss of a shard that nobody else holds."""
    for each in dice:
        each.recovery = (
            each.rng.choice((RESTART, DROP, SPARE)) if each.layout == "fsdp" else RESTART
        )
        second = each.kill({"rank": each.rng.randrange(each.ranks)}, event="restore")
        faulted = recovered(each.cell(each.first(), second), memory, each, controls(each))
        restored = [
            e for e in faulted.log.of(Kind.GENERATION_STARTED) if e.data["state"] == "checkpoint"
        ]
        assert len(restored) >= 2
        assert ("a memory copy can help" in reasons(faulted)) == (each.recovery != RESTART)


def transfer(played: Played, generation: int) -> tuple[str, int, int]:
    """Who sends state in a generation, and from when to when."""
    (started,) = [e for e in played.log.of(Kind.GENERATION_STARTED) if e.generation == generation]
    receiver, source = sorted(started.data["sources"].items())[0]

    def at(kind: Kind, actor: str) -> int:
        return next(
            e.time_ns for e in played.log.of(kind) if (e.actor, e.generation) == (actor, generation)
        )

    return source, at(Kind.GROUP_FORMED, source), at(Kind.STATE_READY, receiver)


def in_transfer(dice: Dice, played: Played, generation: int) -> dict[str, Any] | None:
    """A kill of the source while it sends, the rest being as it was; None when nobody had
    to send.
    """
    (started,) = [e for e in played.log.of(Kind.GENERATION_STARTED) if e.generation == generation]
    if not started.data["sources"]:
        return None
    source, begins, ends = transfer(played, generation)
    trained = next(event.time_ns for event in played.log.of(Kind.GENERATION_READY))
    moment = (begins + dice.rng.uniform(0.1, 0.6) * (ends - begins) - trained) / 1e9
    return dice.kill({"rank": started.data["members"].index(source)}, time=round(moment, 6))


@blocks("ddp", "hsdp", "hsdp of 3")
def test_the_source_dies_while_it_sends(dice: list[Dice], memory: Path, controls: Controls) -> None:
    torn = 0
    for each in dice:
        each.recovery = {"strategy": SPARE, "spares": each.rng.choice((1, 2))}
        alone = play(
            each.cell(each.first()),
            memory / f"a{each.seed}",
            seed=each.seed % ARM_SEEDS,
            sim=each.sim,
        )
        second = in_transfer(each, alone, 2)
        assert second is not None
        faulted = recovered(each.cell(each.first(), second), memory, each, controls(each))
        parked = [e.data["processes"] for e in faulted.log.of(Kind.SURVIVORS_PARKED)]
        torn += any(not held["valid"] for processes in parked for held in processes.values())
    assert torn > 0.8 * len(dice), "the kills do not fall into the transfers"


@blocks("ddp", "hsdp", "hsdp of 3")
@pytest.mark.long
def test_the_spare_dies_while_it_is_promoted(
    dice: list[Dice], memory: Path, controls: Controls
) -> None:
    for each in dice:
        each.recovery = {"strategy": SPARE, "spares": each.rng.choice((1, 2))}
        # the spare holds that rank by now
        second = each.kill({"rank": each.victim}, event="regroup")
        faulted = recovered(each.cell(each.first(), second), memory, each, controls(each))
        promoted = list(faulted.log.of(Kind.GENERATION_STARTED))[1].data["members"][each.victim]
        hit = list(faulted.log.of(Kind.FAULT_INJECTED))[-1]
        assert hit.data["target"]["process"] == promoted.replace("w", "s")
        if each.recovery["spares"] == 1:
            assert "1 lost, 0 spares ready, what they cannot fill is dropped" in reasons(faulted)
        else:
            assert "dropped" not in reasons(faulted)


@blocks()
def test_more_faults_than_spares(dice: list[Dice], memory: Path, controls: Controls) -> None:
    """It falls back to dropping what cannot be filled, then to a checkpoint, and says so."""
    fell: Counter[str] = Counter()
    for each in dice:
        keep = each.rng.sample(range(each.ranks), each.rng.randint(0, each.ranks - 2))
        some = {"select": {"count": each.ranks - len(keep)}, "exclude": {"ranks": keep}}
        faulted = recovered(each.cell(each.kill(some)), memory, each, controls(each))
        left = {rank % each.shards for rank in keep} == set(range(each.shards))
        how = "what they cannot fill is dropped" if left else "back to the newest good checkpoint"
        assert how in reasons(faulted), f"seed {each.seed}"
        if not left and each.shards > 1:
            assert "only a checkpoint or a memory copy can help" in reasons(faulted)
        fell[how] += 1
    assert min(fell.values()) > len(dice) / 10, fell


@blocks("hsdp", "hsdp of 3", "fsdp")
@pytest.mark.long
def test_a_step_that_ended_on_some_ranks_only(
    dice: list[Dice], memory: Path, controls: Controls
) -> None:
    """A kill in the last collective of a step: some have applied it, others have all but the word
    to.
    """
    finished = 0
    for each in dice:
        each.spread_ms = 30
        each.recovery = each.rng.choice((DROP, SPARE))
        at = {"time": round(each.rng.uniform(0.3, 0.5), 4)}
        kills = [{**each.first(), "at": at}]
        if each.rng.random() < 0.5:
            kills.append(each.kill({"rank": each.rng.randrange(each.shards)}, event="regroup"))
        faulted = recovered(each.cell(*kills), memory, each, controls(each))
        finished += any(e.data["finish"] for e in faulted.log.of(Kind.GENERATION_STARTED))
    assert finished, "no kill fell into a last collective"


def test_digests_tell_how_far_ranks_came_whose_marks_are_hidden(tmp_path: Path) -> None:
    hidden = [
        {
            "id": f"f{rank}",
            "kind": "heartbeat-drop",
            "target": {"rank": rank},
            "at": {"step": 4},
            "duration": 60.0,
        }
        for rank in range(2)
    ]
    kill = {"id": "kill", "kind": "process-kill", "target": {"rank": 1}, "at": {"step": 9}}
    played = play(
        cell_of({"strategy": "none"}, [*hidden, kill], ranks=2, every=2), tmp_path, seed=1
    )
    (end,) = played.log.of(Kind.RUN_FINISHED)
    assert end.data["committed_step"] == 8
