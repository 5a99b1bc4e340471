"""``chaos fuzz``: what it draws, what it takes for a defect, how it makes scenarios small, and that
it finds some.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import BaseModel, Field, model_validator
from ruamel.yaml import YAML

from tests.support.logs import Script
from tests.support.search.fuzzed import assert_all_drawn, refusals
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.base import Where
from trainchaos.chaos.loading.builtin import NO_SCENARIOS
from trainchaos.chaos.loading.load import load
from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.draw.shrink import shrunk, smaller_than
from trainchaos.harness.fuzz.draw.text import as_file, as_yaml
from trainchaos.harness.fuzz.draw.values import params_of
from trainchaos.harness.fuzz.play.coverage import Coverage
from trainchaos.harness.fuzz.play.oracle import find_in, plain, unsteady
from trainchaos.harness.fuzz.play.play import (
    PlayResult,
    SimPlayer,
    kinds,
    simulated,
    strategies,
)
from trainchaos.harness.fuzz.schedules import Schedules
from trainchaos.harness.fuzz.search import Search
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategy import ClusterView, Decision, GiveUp, Strategy

CATALOGUE = build_catalogue()
WORLD = World(kinds=kinds(), strategies=strategies())
MOST_REFUSED = 0.5
MOST_INCONCLUSIVE = 0.15
FOLDER = Path(__file__).resolve().parents[3] / "scenarios" / "regressions"
REGRESSIONS = [
    path for path in sorted(FOLDER.glob("*.yaml")) if not path.name.endswith(NO_SCENARIOS)
]


def dice(seed: int = 1) -> Dice:
    return Dice(rng=random.Random(seed))


def trees(count: int, seed: int = 1, world: World = WORLD) -> list[draw.Tree]:
    one = dice(seed)
    return [draw.scenario(one, world) for _ in range(count)]


# ---- drawing


@pytest.mark.parametrize("name", [*kinds(), *strategies()])
def test_parameters_are_those_that_a_plugin_allows(name: str) -> None:
    model = {**kinds(), **strategies()}[name]
    for seed in range(30):
        given = params_of(model, random.Random(seed))
        made = model(**given).model_dump(mode="json")
        assert {name: made[name] for name in given} == given


class Particular(BaseModel):
    """A plugin that hardly any values fit, but for its defaults."""

    named: int = Field(ge=3, le=5)
    factor: float = 10.0

    @model_validator(mode="after")
    def _makes_sense(self) -> Particular:
        if self.factor != type(self).model_fields["factor"].default:
            raise ValueError("factor is for another mode")
        return self


class Unfit(Random):
    """Dice that never leave an optional parameter out, unless that is certain."""

    def random(self) -> float:
        """The largest that there is."""
        return 1 - 2**-53


def test_a_plugin_that_hardly_any_values_fit_gets_its_defaults() -> None:
    assert params_of(Particular, Unfit(1)).keys() == {"named"}


def test_one_seed_draws_the_same_again() -> None:
    assert trees(20, seed=3) == trees(20, seed=3) != trees(20, seed=4)


@pytest.mark.slow
def test_most_of_what_is_drawn_can_be_played_and_the_rest_is_refused_in_words(
    tmp_path: Path,
) -> None:
    refused = refusals(trees(40), tmp_path)
    assert len(refused) < MOST_REFUSED * 40, refused[:5]


def test_every_kind_strategy_layout_and_trigger_is_drawn() -> None:
    assert_all_drawn(trees(600))


@pytest.mark.slow
def test_what_a_fault_waits_for_can_come_and_what_it_acts_on_is_there() -> None:
    for tree in trees(2000):
        workload, nodes = tree["workload"], tree["launcher"]["nodes"]
        ranks, shape = workload["ranks"], workload["parallelism"]
        for fault in tree["faults"]:
            at, target = fault["at"], fault.get("target", {})
            assert at.get("event") not in (*draw.NEEDS, draw.CHECKED) or at["nth"] == 1
            if at.get("event") == draw.CHECKED:
                copies = ranks if shape == "ddp" else draw.replicas_of(shape)
                assert copies > 2 and workload["steps"] > draw.CHECK
            if kinds()[fault["kind"]].where is Where.NODE and "node" in target:
                assert target["node"] * -(-ranks // nodes) < ranks
            if isinstance(target.get("checkpoint"), dict):
                assert target["checkpoint"]["step"] == workload["checkpoint"]["every"]


@pytest.mark.long
def test_most_unrelated_faults_come_to_a_verdict() -> None:
    player, verdicts = SimPlayer(catalogue=CATALOGUE), Counter[str]()
    for tree in trees(250):
        found = {finding.verdict for finding in player.play(tree).findings.values()}
        verdicts[next((one for one in ("fail", "inconclusive", "pass") if one in found), "")] += 1
    played = verdicts.total() - verdicts[""]
    assert played > 125 and verdicts["inconclusive"] <= MOST_INCONCLUSIVE * played, verdicts


def test_what_was_seldom_chosen_is_chosen_more_often() -> None:
    one = dice()
    one.seen["axis", "a"] = 1000
    drawn = [one.pick("axis", ("a", "b")) for _ in range(50)]
    assert drawn.count("b") > 40


def test_a_tree_is_written_as_yaml_that_reads_back(tmp_path: Path) -> None:
    for tree in trees(20):
        assert YAML(typ="safe", pure=True).load(as_yaml(tree)) == tree


# ---- judging


def tree_of(*faults: Mapping[str, Any], **more: Any) -> draw.Tree:
    workload = {
        "kind": "mlp",
        "ranks": 4,
        "steps": 30,
        "parallelism": "ddp",
        "global_batch": 12,
        "checkpoint": {"every": 6},
    }
    return {
        "version": 1,
        "name": "fuzz",
        "seed": 5,
        "launcher": {"kind": "sim", "nodes": 1},
        "workload": workload,
        "recovery": {"strategy": "drop-replica"},
        "faults": [dict(fault) for fault in faults],
        "stop_conditions": [{"when": "no_committed_step_for > 120s"}],
        **more,
    }


KILL = {"id": "f0", "kind": "process-kill", "at": {"step": 12}, "target": {"rank": 2}}


def said(verdict: str, witness: str, name: str = "faulted: membership") -> PlayResult:
    return PlayResult(findings={name: Finding(verdict=verdict, witness=witness)})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_good_run_is_no_find() -> None:
    tree = tree_of(KILL)
    played = SimPlayer(catalogue=CATALOGUE).play(tree)
    assert (played.refused, played.crash, find_in(tree, played)) == ("", "", None)
    assert dict(played.outcomes) == {"control": "completed", "faulted": "completed"}
    assert ("hit", "training", "process-kill", "data") in played.reached
    assert unsteady(played, SimPlayer(catalogue=CATALOGUE).play(tree)) is None


@pytest.mark.parametrize(
    ("played", "key"),
    [
        (PlayResult(refused="no such kind"), None),
        (
            PlayResult(crash="Traceback", place="KeyError in a/b.py c"),
            "crash: KeyError in a/b.py c",
        ),
        (PlayResult(left=("a cgroup",)), "left behind"),
        (said("fail", "w3 commits 12 twice"), "faulted: membership fail: P commits # twice"),
        (said("inconclusive", "who knows"), "faulted: membership inconclusive: who knows"),
        (
            said(
                "inconclusive",
                "f0 waited for data number 2, which never came: lower",
                "faulted: fault-landed",
            ),
            None,
        ),
        (
            said(
                "inconclusive",
                "f0 waited for data number 2, which never came; f1 is lost",
                "faulted: fault-landed",
            ),
            "faulted: fault-landed inconclusive: F is lost",
        ),
        (
            said("fail", "f0 was due at step 3, but was never injected", "faulted: fault-landed"),
            "faulted: fault-landed fail: F was due at step #, but was never injected",
        ),
    ],
)
def test_what_counts_as_a_defect(played: PlayResult, key: str | None) -> None:
    found = find_in(tree_of(KILL), played)
    assert (found.key if found else None) == key


def test_two_logs_of_one_seed_are_a_defect() -> None:
    assert unsteady(PlayResult(digest="a"), PlayResult(digest="b")) is not None
    assert unsteady(PlayResult(digest="a"), PlayResult(digest="a")) is None


@pytest.mark.parametrize(
    ("params", "found"), [({"sample": 5}, False), ({"sample": None}, True), ({}, True)]
)
def test_only_a_sample_that_was_named_may_come_up_too_late(
    params: Mapping[str, Any], found: bool
) -> None:
    tree = tree_of({"id": "f0", "kind": "poison-sample", "at": {"step": 1}, "params": params})
    unseen = "f0 (occurrence 0) could not be injected: no evidence within 15 s"
    assert (
        find_in(tree, said("inconclusive", unseen, "faulted: fault-landed")) is not None
    ) == found


class GivesUp(CheckpointRestart):
    """Ends the job at its first failure, whatever is left of it."""

    def on_failure(self, view: ClusterView) -> Decision:
        """Give up."""
        return Decision(actions=(GiveUp(),), reason="it is no use")


@pytest.mark.parametrize(
    ("step", "strategy", "found"), [(3, None, False), (21, None, False), (21, GivesUp, True)]
)
def test_giving_up_is_right_where_all_that_was_saved_is_in_doubt(
    step: int, strategy: type[Strategy] | None, found: bool
) -> None:
    desync = {"id": "f0", "kind": "replica-desync", "at": {"step": step}, "target": {"rank": 1}}
    tree = tree_of(desync, recovery={"strategy": "checkpoint-restart"})
    tree["workload"] |= {"ranks": 2, "verify_every": 5, "checkpoint": {"every": 2}}
    played = SimPlayer(catalogue=CATALOGUE, strategy=strategy).play(tree)
    assert (played.outcomes["faulted"] == "gave-up") == (step == 3 or found)
    assert (find_in(tree, played) is not None) == found


@pytest.mark.parametrize(
    ("steps", "silent_s", "found"), [(0, 60.0, False), (0, 20.0, True), (3, 60.0, True)]
)
def test_a_halted_job_is_no_find_only_where_hangs_took_its_time_before_the_first_step(
    steps: int, silent_s: float, found: bool
) -> None:
    script = Script("hot-spare", spares=1)
    script.train(steps)
    detail = f"silent for {silent_s:.2f} s in collective of step {steps + 1}"
    script.orchestrator(
        Kind.FAILURE_DETECTED, failure=1, cause="hang", process="w1", rank=1, detail=detail
    )
    halted = said(
        "fail", f"the job did not finish: halted at step {steps} of 4", "faulted: liveness"
    )
    played = replace(
        halted, logs={"faulted": script.finish().log()}, outcomes={"faulted": "halted"}
    )
    tree = tree_of({"id": "f0", "kind": "rank-hang", "at": {"step": 1}})
    tree["stop_conditions"] = [{"when": "no_committed_step_for > 100s"}]
    assert (find_in(tree, played) is not None) == found


@pytest.mark.parametrize(
    ("kind", "steps", "limit_s", "found"),
    [
        ("straggler", 1, 300, False),
        ("straggler", 2, 300, True),
        ("straggler", 1, 700, True),
        ("rank-hang", 1, 300, True),
    ],
)
def test_a_halted_job_is_no_find_where_a_rank_at_work_might_have_compiled(
    kind: str, steps: int, limit_s: int, found: bool
) -> None:
    script = Script("hot-spare", spares=1)
    script.train(steps)
    why = f"the job did not finish: halted at step {steps} of 4"
    played = replace(
        said("fail", why, "faulted: liveness"),
        logs={"faulted": script.finish().log()},
        outcomes={"faulted": "halted"},
    )
    tree = tree_of({"id": "f0", "kind": kind, "at": {"step": 1}})
    tree["stop_conditions"] = [{"when": f"no_committed_step_for > {limit_s}s"}]
    assert (find_in(tree, played) is not None) == found


def test_the_same_defect_has_the_same_words() -> None:
    assert plain("w12 committed step 31 of generation 2") == plain(
        "s1 committed step 7 of generation 10"
    )


class Explodes(Behaviour):
    """A rank whose code has a defect."""

    def learning_rate(self, rank: Any, lr: float) -> float:
        """None."""
        raise ZeroDivisionError("at the third step")


def test_a_traceback_is_a_find_with_its_place() -> None:
    tree = tree_of(KILL)
    found = find_in(tree, SimPlayer(catalogue=CATALOGUE, behaviour=Explodes).play(tree))
    assert (
        found is not None
        and found.key
        == "crash: ZeroDivisionError in tests/harness/fuzz/test_search.py learning_rate"
    )


# ---- making small


def made_small(
    tree: draw.Tree, shows: Callable[[draw.Tree], bool], most: int = 150
) -> tuple[draw.Tree, int]:
    return shrunk(tree, shows, smaller_than, most)


def test_a_scenario_is_made_as_small_as_what_it_shows_allows() -> None:
    second = {
        "id": "f1",
        "kind": "process-stop",
        "at": {"steps": [3, 9], "phase": "backward"},
        "duration": 1.234,
    }
    tree = tree_of(KILL, second, recovery={"strategy": "hot-spare", "spares": 3})
    small, plays = made_small(
        tree, lambda one: any(f["kind"] == "process-stop" for f in one["faults"])
    )
    (only,) = small["faults"]
    assert only["kind"] == "process-stop" and only["at"] == {"step": 1} and "duration" not in only
    assert small["recovery"] == {"strategy": "hot-spare"}
    assert (small["workload"]["ranks"], small["workload"]["steps"]) == (2, 4) and plays < 100


MESH = {"replicate": 1, "shard": 1, "pipeline": 1, "context": 1, "tensor": 1}


def test_a_mesh_is_made_smaller_by_dimension_and_then_goes() -> None:
    mesh = {**MESH, "replicate": 2, "pipeline": 2, "context": 2, "tensor": 2, "schedule": "gpipe"}
    tree = tree_of(KILL, health={"preflight_rejoins": True, "taint_alarms": True})
    tree["workload"] |= {"kind": "gpt", "ranks": 16, "global_batch": 16, "parallelism": mesh}

    def staged(one: draw.Tree) -> bool:
        shape = one["workload"]["parallelism"]
        return draw.is_mesh(shape) and shape["pipeline"] > 1

    small, _ = made_small(tree, staged)
    job = small["workload"]
    assert job["parallelism"] == MESH | {"pipeline": 2}
    assert job["ranks"] == 2 and "health" not in small
    plain, _ = made_small(tree, lambda one: True)
    assert (plain["workload"]["kind"], plain["workload"]["parallelism"]) == ("mlp", "ddp")


def test_it_stops_asking_after_so_many() -> None:
    asked = []
    made_small(trees(1)[0], lambda one: bool(asked.append(one)), most=7)
    assert len(asked) == 7


def test_smaller_ones_leave_the_scenario_they_are_of_alone() -> None:
    for tree in trees(20):
        before = copy.deepcopy(tree)
        assert all(smaller != tree for smaller in smaller_than(tree)) and tree == before


def test_a_find_is_written_as_a_scenario_that_loads(tmp_path: Path) -> None:
    name, text = as_file(tree_of(KILL), "faulted: membership fail", "w3 is member twice")
    path = tmp_path / name
    path.write_text(text)
    (cell,) = load(path, CATALOGUE).cells[:1]
    assert cell.scenario.name == path.stem
    assert cell.scenario.description == "Showed: w3 is member twice"


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if number % 10 == 0 else pytest.mark.long)
        for number, path in enumerate(REGRESSIONS)
    ],
)
def test_what_was_found_once_is_mended(path: Path) -> None:
    tree = YAML(typ="safe", pure=True).load(path)
    assert (tree["name"], tree["description"][:8]) == (path.stem, "Showed: ")
    twin = simulated(tree)  # what was found for real has to be whole there too
    played = SimPlayer(catalogue=CATALOGUE).play(twin)
    found = find_in(twin, played)
    assert (played.refused, found and found.text) == ("", None)


# ---- finding


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("block", range(15))
def test_what_is_right_shows_nothing(block: int) -> None:
    search = Search(Schedules(WORLD, SimPlayer(catalogue=CATALOGUE), f"right {block}"), until_s=0.0)
    while search.runs < 8:
        found = search.step()
        assert found is None, (found.find, found.case)


def test_what_was_reached_is_counted() -> None:
    coverage = Coverage()
    assert (
        coverage.add({("hit", "training", "exception", "data"), ("heard", "training", "Ready")})
        == 2
    )
    assert coverage.add({("heard", "training", "Ready")}) == 0
    assert dict((text, (many, once)) for text, many, once in coverage.rows())[
        "stage × message"
    ] == (1, 0)
