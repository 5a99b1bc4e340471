"""The sweep of ``adaptive`` in small, and what it says of values."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks import adaptive
from benchmarks.adaptive import ADAPTIVE, COSTS, FIXED, MIXES, STRATEGIES, Arm
from tests.chaos.loading.test_scenarios import loaded

CHEAP, LONG = "all cheap, checkpoint old", "steps long, checkpoint fresh"


def values_of(**goodput: list[float]) -> adaptive.Values:
    """One cell, ``drop_replica`` and so on by strategy; the others 0.5."""
    given = {name.replace("_", "-"): each for name, each in goodput.items()}
    n = len(next(iter(given.values())))
    return {("a", "b"): {name: given.get(name, [0.5] * n) for name in STRATEGIES}}


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_can_be_loaded_with_all_costs_and_draws_its_faults_from_the_seed(
    mix: str, tmp_path: Path
) -> None:
    path, drawn = tmp_path / "scenario.yaml", set()
    for seed in range(1, 5):
        path.write_text(
            json.dumps(adaptive.scenario(Arm(mix=mix, costs=CHEAP, seed=seed, ranks=4)))
        )
        cells = loaded(path).cells
        assert {cell.scenario.recovery.strategy for cell in cells} == set(STRATEGIES)
        drawn.add(str([fault.model_dump() for fault in cells[0].scenario.faults]))
    assert len(drawn) > 1
    for costs in COSTS:
        path.write_text(json.dumps(adaptive.scenario(Arm(mix=mix, costs=costs, seed=1, ranks=4))))
        assert loaded(path).cells


@pytest.mark.parametrize(
    ("mix", "costs", "seeds"),
    [
        ("kills, frequent", CHEAP, (1,)),
        pytest.param("kills, frequent", CHEAP, (1, 2), marks=pytest.mark.long),
        pytest.param("hangs", LONG, (1, 2), marks=pytest.mark.long),
    ],
)
def test_in_small_adaptive_is_not_behind_and_the_same_again(
    mix: str, costs: str, seeds: tuple[int, ...], tmp_path: Path
) -> None:
    lines = [
        {"mix": mix, "costs": costs, "seed": seed, "goodput": goodput}
        for seed in seeds
        for goodput in [adaptive.play(Arm(mix=mix, costs=costs, seed=seed, ranks=4), tmp_path)]
    ]
    values = adaptive.gathered(lines)
    cell = values[mix, costs]
    assert all(0.1 < value < 1 for each in cell.values() for value in each)
    assert not [line for line in adaptive.too_far_behind(values) if "behind" in line]
    assert median(cell[ADAPTIVE]) > median(cell["checkpoint-restart"])
    again = adaptive.play(Arm(mix=mix, costs=costs, seed=1, ranks=4), tmp_path, (ADAPTIVE,))
    assert again == {ADAPTIVE: cell[ADAPTIVE][0]}


@pytest.mark.long
def test_where_starting_is_quick_and_steps_are_long_it_is_better_than_dropping(
    tmp_path: Path,
) -> None:
    arm = Arm(mix="kills, elastic sums", costs=LONG, seed=1, ranks=4)
    found = adaptive.play(arm, tmp_path, ("drop-replica", ADAPTIVE))
    assert found[ADAPTIVE] > found["drop-replica"] * 1.01


def test_more_than_five_percent_behind_the_best_is_said() -> None:
    far = list(adaptive.too_far_behind(values_of(drop_replica=[0.8] * 6, adaptive=[0.7] * 6)))
    assert far == ["a, b: 12.5% behind drop-replica", "drop-replica is better overall"]
    near = values_of(drop_replica=[0.8] * 6, adaptive=[0.79] * 6)
    assert list(adaptive.too_far_behind(near)) == ["drop-replica is better overall"]
    assert not list(adaptive.too_far_behind(values_of(adaptive=[0.79] * 6)))


def test_pairs_are_of_the_same_seed_whatever_the_order_of_the_lines() -> None:
    lines = [
        {"mix": "a", "costs": "b", "seed": seed, "goodput": dict.fromkeys(STRATEGIES, seed / 10)}
        for seed in (3, 1, 2)
    ]
    cell = adaptive.gathered(lines)["a", "b"]
    assert cell[ADAPTIVE] == [0.1, 0.2, 0.3]
    best, ratios = adaptive.behind(cell)
    assert best == FIXED[0] and ratios == [0.0, 0.0, 0.0]


def test_tables_have_n_medians_and_intervals() -> None:
    values = values_of(adaptive=[0.7, 0.8, 0.9, 0.7, 0.8, 0.9])
    text = adaptive.table(values)
    assert "| a | b | 6 |" in text and "0.800 (0.700-0.900)" in text
    assert "+60.0% (+40.0% to +80.0%)" in text
    assert "| adaptive | 6 | 0.800 | 0.800 |" in adaptive.overall(values)


def test_the_page_states_what_the_stored_values_say() -> None:
    root = Path(__file__).resolve().parents[2]
    stored = (root / "docs/results/adaptive-sweep.jsonl").read_text().splitlines()
    values = adaptive.gathered(json.loads(line) for line in stored)
    page = (root / "docs/adaptive.md").read_text()
    assert set(values) == {(mix, costs) for mix in MIXES for costs in COSTS}
    assert adaptive.overall(values) in page
    assert not list(adaptive.too_far_behind(values)), "the page says that there is none"
