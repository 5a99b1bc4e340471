"""One contract for every fault: it acts, its evidence is of its own effect only, it heals, and
healing twice is safe.

Each kind is tried by its module in ``tests/faultcases``; a kind without one fails here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.faultcases.link_throttle import probed
from tests.support.fault_fakes import (
    FAKES,
    OCCURRENCE,
    FakeCheckpoint,
    FakeRank,
    FaultCase,
    calm,
    effect,
)
from trainchaos.chaos import plugins
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.faults.link_throttle import LinkThrottle
from trainchaos.recovery.checkpoint.files import checkpoints

KINDS = plugins.load(plugins.FAULTS, Fault)
PLACE = Path(__file__).resolve().parents[2] / "faultcases"


def place_of(name: str) -> Path:
    """The module that tries a kind."""
    return PLACE / f"{name.replace('-', '_')}.py"


FAULTS = {name: kind for name, kind in KINDS.items() if place_of(name).is_file()}


def case_of(name: str) -> FaultCase:
    """How a kind is tried."""
    found: FaultCase = importlib.import_module(f"tests.faultcases.{name.replace('-', '_')}").CASE
    return found


CASES = [(name, params) for name in FAULTS for params in case_of(name).variants]
EVERY_FAULT = pytest.mark.parametrize(
    ("name", "params"),
    CASES,
    ids=["-".join([name, *map(str, params.values())]) for name, params in CASES],
)


def fault(name: str, params: Mapping[str, Any]) -> Fault:
    model: type[BaseModel] = FAULTS[name]
    made: Any = model(**case_of(name).required | params)
    return made


@pytest.mark.parametrize("name", KINDS)
def test_somebody_tries_it(name: str) -> None:
    assert place_of(name).is_file(), (
        f"write tests/faultcases/{place_of(name).name}: CONTRIBUTING.md"
    )


@EVERY_FAULT
def test_it_finds_no_evidence_where_nothing_happened(name: str, params: Mapping[str, Any]) -> None:
    """The check can fail: an empty log, a calm run, and one in which it did its act
    without effect.
    """
    tried, occurrence = fault(name, params), case_of(name).occurrence
    assert tried.landed(occurrence, []) is None
    assert tried.landed(occurrence, calm()) is None
    assert tried.landed(occurrence, [*calm(), effect(surface="gradient", op="nan")]) is None
    nothing = effect(before="aa", after="aa", verifier=None, os_state="S")
    assert tried.landed(occurrence, [*calm(), nothing]) is None


@pytest.mark.parametrize("name", FAULTS)
def test_it_lands_on_evidence_of_its_own_effect_only(name: str) -> None:
    case, tried = case_of(name), fault(name, {})
    found = tried.landed(case.occurrence, case.evidence)
    assert found is not None
    assert found.witness
    assert found.evidence
    assert tried.landed(case.occurrence, case.evidence) == found, "pure"
    assert case.elsewhere
    for other in case.elsewhere:
        assert tried.landed(case.occurrence, other) is None, other[-1:]


@EVERY_FAULT
def test_it_changes_its_target_and_a_second_heal_changes_nothing(
    name: str, params: Mapping[str, Any], tmp_path: Path
) -> None:
    case, tried = case_of(name), fault(name, params)
    target = (case.target or FAKES[tried.where])(tmp_path)
    before = target.look()
    if case.raises is not None:
        with pytest.raises(Exception, match=case.raises):
            tried.act(target)
        return
    assert tried.act(target), "it says what it did"
    assert target.look() != before
    tried.heal(target)
    healed = target.look()
    restores = tried.lasting or tried.may_last if case.restores is None else case.restores
    assert (healed == before) == restores
    tried.heal(target)
    assert target.look() == healed


@pytest.mark.parametrize("op", ["nan", "inf", "bitflip", "scale", "zero"])
@pytest.mark.parametrize("surface", ["gradient", "parameter", "optimizer_state", "activation"])
def test_the_same_seed_corrupts_the_same_elements(surface: str, op: str) -> None:
    params = {"surface": surface, "op": op}

    def hit(seed: int) -> tuple[Any, ...]:
        target = FakeRank()
        target.seed = seed
        fault("tensor-corrupt", params).act(target)
        return target.look()

    assert hit(1) == hit(1)
    assert len({hit(seed) for seed in range(20)}) > 1


def test_a_corrupt_checkpoint_leaves_an_older_good_one(tmp_path: Path) -> None:
    target = FakeCheckpoint(tmp_path)
    fault("checkpoint-corrupt", {"mode": "bitflip"}).act(target)
    assert checkpoints.newest_good(tmp_path, lambda *_: None)[0].step == 25  # type: ignore[index]


def test_a_stale_checkpoint_without_an_older_one_or_with_a_damaged_one(tmp_path: Path) -> None:
    for name, damage in (
        ("none", lambda p: None),
        ("manifest", lambda p: (p / "manifest.json").unlink()),
    ):
        target = FakeCheckpoint(tmp_path / name)
        assert target.older is not None
        damage(target.older)
        if name == "none":
            target.older = None
        assert fault("checkpoint-corrupt", {"mode": "stale"}).act(target)
        assert target.verify() is not None


def test_a_rank_with_throttled_links_may_use_several_at_once() -> None:
    """As an all-to-all does: each link keeps to the limit, the rank sends more."""
    fault = LinkThrottle(mbit_per_s=20.0, method="links")
    events = [*calm(collective_s=0.25), probed(19.0)]
    one, three = ({"links": [[1, peer] for peer in range(count)]} for count in (1, 3))
    assert fault.landed(replace(OCCURRENCE, target=one), events) is None
    assert fault.landed(replace(OCCURRENCE, target=three), events) is not None
