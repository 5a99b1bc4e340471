"""The figures of a projection: definitions, how sure each is, what a second is worth."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.harness.projection.test_project_cli import TINY, Say, chaos
from trainchaos.harness.projection.costs import PUBLISHED, Cause, lasting
from trainchaos.harness.projection.figures import Part, projected
from trainchaos.harness.projection.job import formula, job_of, paid
from trainchaos.harness.projection.laws import Duration
from trainchaos.harness.projection.presets import DAY_S
from trainchaos.harness.projection.projection import project
from trainchaos.harness.projection.result import Definitions, Projected, Setting, t95
from trainchaos.harness.projection.simulate import simulate
from trainchaos.reports.projection import page, tables

__all__ = ["chaos"]  # the fixture

TRIALS = 200


def setting(**more: Any) -> Setting:
    """A large job that fails often, so that every class has time in it."""
    usual: dict[str, Any] = {"gpus": (32_768,), "rate": 6.5, "days": 10, "trials": TRIALS}
    return Setting(**{**usual, "repair_s": 20_000.0, "replica_nodes": 4, **more})


@cache
def plain(strategy: str) -> Projected:
    """Of the usual setting."""
    return row(strategy, trials=TRIALS)


def row(strategy: str, **more: Any) -> Projected:
    if not more:
        return plain(strategy)
    said = setting(**more)
    return projected(Part(said, said.gpus[0], PUBLISHED[strategy]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["checkpoint-restart", "drop-replica"])
def test_what_is_unknown_of_the_rate_is_in_all_that_failures_cost(strategy: str) -> None:
    """Each interval has what a rate at its end gives, by a simulation of its own."""
    sure, unsure = row(strategy, interval_s=600.0), row(strategy, interval_s=600.0, rate_unsure=0.1)
    more, fewer = (row(strategy, interval_s=600.0, rate=6.5 * times) for times in (1.1, 1 / 1.1))
    assert unsure.goodput == sure.goodput and unsure.high - unsure.low > sure.high - sure.low
    width = unsure.high - unsure.low
    assert unsure.low == pytest.approx(more.goodput, abs=0.15 * width)
    assert unsure.high == pytest.approx(fewer.goodput, abs=0.15 * width)
    for name in ("failures", "again", "short", "lost_gpu_hours", "ettr", "finish_days"):
        spread, ends = unsure.spreads[name], sorted((getattr(more, name), getattr(fewer, name)))
        width = spread.high - spread.low
        assert spread.low == pytest.approx(ends[0], abs=0.15 * width), name
        assert spread.high == pytest.approx(ends[1], abs=0.15 * width), name
    for name in ("stall", "saving"):
        spread = unsure.spreads[f"badput.{name}"]
        ends = sorted((more.badput[name], fewer.badput[name]))
        assert (spread.low, spread.high) == pytest.approx(ends, rel=0.02), name


def same(found: Projected) -> bool:
    """Whether the engines agree within four standard errors."""
    return found.apart is not None and found.apart < 4.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(PUBLISHED))
def test_each_definition_moves_time_from_one_class_to_another(strategy: str) -> None:
    """And the engines agree on each; nothing is lost on the way."""
    usual = row(strategy)
    recovery = row(strategy, definitions=Definitions(rework="recovery"))
    useful = row(strategy, definitions=Definitions(rework="useful"))
    whole = row(strategy, definitions=Definitions(missing="useful"))
    for found in (usual, recovery, useful, whole):
        assert same(found)
        assert found.goodput + sum(found.badput.values()) == pytest.approx(1.0)
        physical = ("again", "short", "finish_days")
        for name in physical:
            assert getattr(found, name) == getattr(usual, name), "what is lost is lost"
    assert usual.badput["rework"] > 0 and useful.badput["rework"] == recovery.badput["rework"] == 0
    assert recovery.goodput == usual.goodput
    moved = usual.badput["stall"] + usual.badput["rework"]
    assert recovery.badput["stall"] == pytest.approx(moved)
    assert recovery.recovery_s > usual.recovery_s > usual.stall_s * 0.99
    assert useful.goodput == pytest.approx(usual.goodput + usual.badput["rework"])
    assert whole.goodput == pytest.approx(usual.goodput + usual.badput["reduced"])
    assert (usual.badput["reduced"] > 0) == (strategy != "checkpoint-restart")


def test_a_job_without_a_node_waits_for_one() -> None:
    """It is not a job of fewer nodes, whatever a definition says of those."""
    said = setting(gpus=(16,), replica_nodes=1, rate=400.0, spares=0, repair_s=1e5)
    found = projected(Part(said, 16, PUBLISHED["drop-replica"]))
    lenient = said.model_copy(update={"definitions": Definitions(missing="useful")})
    assert found.badput["waiting"] > 0.1 and found.badput["reduced"] > 0.1
    other = projected(Part(lenient, 16, PUBLISHED["drop-replica"]))
    assert other.badput["waiting"] == found.badput["waiting"] and other.badput["reduced"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_failures_of_processes_take_no_node(share: float) -> None:
    """By the formula too; spares for an availability are for those that do."""
    found = row("drop-replica", processes=share)
    assert same(found)
    assert (found.badput["reduced"] == 0) == (share == 1.0)
    job = job_of(setting(processes=share), 32_768, PUBLISHED["drop-replica"])
    played = simulate(job, 10 * DAY_S, 50, np.random.default_rng(1))
    left = played.nodes_lost.sum() / played.failures.sum()
    assert left == pytest.approx(1 - share, abs=0.02)
    needs = project(
        setting(processes=share, availability=0.9, trials=2, days=1), PUBLISHED, "a test"
    ).spares[0]
    every = project(setting(availability=0.9, trials=2, days=1), PUBLISHED, "a test").spares[0]
    assert needs.load == pytest.approx((1 - share) * every.load)


@pytest.mark.slow
def test_each_figure_says_how_sure_it_is_and_how_much_jobs_differ() -> None:
    said = setting(price=2.0)
    for cost in PUBLISHED.values():
        found = projected(Part(said, 32_768, cost))
        job = job_of(said, 32_768, cost)
        random = np.random.default_rng([0, 32_768, *cost.strategy.encode()])
        played = simulate(job, 10 * DAY_S, TRIALS, random)
        share = paid(said, job)
        hours = 32_768 * share * 240
        error = np.std(played.goodput / share, ddof=1) / np.sqrt(TRIALS)
        goodput = played.goodput.mean() / share
        half = t95(TRIALS - 1) * error
        assert (found.goodput, found.error) == pytest.approx((goodput, error))
        assert (found.low, found.high) == pytest.approx((goodput - half, goodput + half))
        assert found.gpu_hours == pytest.approx(hours) and found.price == pytest.approx(2.0 * hours)
        trials = {
            "failures": played.failures,
            "ettr": played.goodput,
            "again": played.lost_s["rework"] / 20.0,
            "short": (job.segment_s / (job.segment_s + 5) * 10 * DAY_S - played.useful_s) / 20.0,
            "lost_gpu_hours": (1 - played.goodput / share) * hours,
            "lost_price": (1 - played.goodput / share) * hours * 2.0,
            "badput.rework": played.lost_s["rework"] / (10 * DAY_S) / share,
        }
        for name, values in trials.items():
            spread = found.spreads[name]
            half = t95(TRIALS - 1) * values.std(ddof=1) / np.sqrt(TRIALS)
            mean = values.mean()
            assert (spread.low, spread.high) == pytest.approx((mean - half, mean + half)), name
            assert (spread.least, spread.most) == pytest.approx(np.percentile(values, [5, 95]))
            shown = found.badput["rework"] if "." in name else getattr(found, name)
            assert shown == pytest.approx(mean), name
        finish = found.spreads["finish_days"]
        kept = played.useful_s / (job.segment_s / (job.segment_s + 5) * 10 * DAY_S)
        half = t95(TRIALS - 1) * kept.std(ddof=1) / np.sqrt(TRIALS)
        assert finish.low == pytest.approx(10 / (kept.mean() + half))
        assert finish.most == pytest.approx(10 / np.percentile(kept, 5))
        assert found.finish_days == pytest.approx(10 / kept.mean())


def test_an_interval_ends_where_the_figure_does() -> None:
    """A mean recovery that is known badly leaves no more than all of the time."""
    cost = replace(PUBLISHED["hot-spare"], stall=Duration(median_s=3000.0, sigma=3.0), incidents=5)
    found = projected(Part(setting(), 32_768, cost))
    stall = found.spreads["badput.stall"]
    assert found.high <= 1.0 and found.low == 0.0
    assert stall.high is not None and stall.high <= 1.0
    assert found.spreads["ettr"].high == pytest.approx(1.0)
    lost = found.spreads["lost_gpu_hours"]
    assert lost.low == pytest.approx(2 / 4098 * found.gpu_hours), "the spares are lost anyway"
    assert found.spreads["finish_days"].high is None, "it may take for ever"
    assert "never" in page.render(project(setting(trials=20), {"hot-spare": cost}, "a test"))


@pytest.mark.parametrize("strategy", list(PUBLISHED))
def test_a_second_costs_what_the_formulas_lose_for_one(strategy: str) -> None:
    """Also where many nodes are missing, and more of them the more often the job fails."""
    for more in ({}, {"replica_nodes": 200}, {"definitions": Definitions(rework="useful")}):
        found = row(strategy, price=3.0, **more)
        said = setting(**more)
        job = job_of(said, 32_768, PUBLISHED[strategy])
        later, sooner = (replace(job, stall=job.stall.longer(by_s)) for by_s in (1.0, -1.0))
        lost = (formula(said, sooner)[0] or 0.0) - (formula(said, later)[0] or 0.0)
        assert found.second_gpu_hours == pytest.approx(lost / 2 * found.gpu_hours, rel=1e-3)
        assert found.second_price == pytest.approx(3.0 * found.second_gpu_hours)
        spread = found.spreads["second_gpu_hours"]
        assert spread.low is not None and spread.low < found.second_gpu_hours < (spread.high or 0)


def test_failures_by_the_clock_that_come_during_a_stall_come_as_one() -> None:
    """So that a second costs more than as much of all time does, and less than as much of the time
    in which the job runs; against two simulations, with stalls of 0.8 times between failures.
    """
    clock = Definitions(failures_while="always")
    said = setting(gpus=(65_536,), trials=1500, days=3, save_s=0.0, definitions=clock)
    mean_s = 86_400_000 / (6.5 * 8192)
    cost = replace(
        PUBLISHED["hot-spare"], stall=Duration(median_s=0.8 * mean_s), per_doubling_s=0.0
    )
    costs = (cost, *(replace(cost, stall=cost.stall.longer(by)) for by in (-150.0, 150.0)))
    found, sooner, later = (projected(Part(said, 65_536, each)) for each in costs)
    lost = (sooner.goodput - later.goodput) * found.gpu_hours / 300
    error = np.hypot(sooner.error, later.error) * found.gpu_hours / 300
    assert found.second_gpu_hours == pytest.approx(lost, abs=4 * error + 0.02 * lost)
    assert error < 0.02 * lost
    spent = found.goodput * found.failures * found.gpu_hours / (3 * DAY_S)
    assert spent < 0.7 * found.second_gpu_hours, (
        "what is saved has not as many failures as the rest"
    )
    assert found.second_gpu_hours < 0.7 * spent / (1 - found.badput["stall"]), "nor none"
    several = setting(gpus=(4096,), several=(0.5, 0.5), trials=200)
    other = projected(Part(several, 4096, PUBLISHED["hot-spare"]))
    assert other.closed is None
    spent = other.goodput * other.failures * other.gpu_hours / (10 * DAY_S)
    assert other.second_gpu_hours == pytest.approx(spent, rel=0.01)


@pytest.mark.slow
def test_swaps_of_slow_nodes_are_no_failures() -> None:
    """They stall as failures do, which the mean recovery is not made longer by."""
    cost = replace(PUBLISHED["hot-spare"], per_doubling_s=0.0)
    said = setting(slow_rate=20.0, slow_found_s=600.0, replica_nodes=1)
    found = projected(Part(said, 32_768, cost))
    assert found.recovery_s == pytest.approx(46.0, rel=0.01)
    restart = row("checkpoint-restart")
    assert restart.recovery_s == pytest.approx(restart.stall_s + 120.0, rel=0.02)


def test_means_of_recoveries_are_within_their_interval_as_often_as_it_says() -> None:
    """Of lognormal ones, over their median and over what the mean has above it."""
    random = np.random.default_rng(1)
    for count, sigma in ((5, 0.3), (12, 1.0), (20, 1.0)):
        inside = 0
        for _ in range(500):
            logs = sigma * random.standard_normal(count)
            found = lasting(np.exp(logs))
            cost = replace(PUBLISHED["hot-spare"], stall=found, incidents=count)
            ratio = np.exp(sigma**2 / 2) / found.mean_s
            inside += 1 / (1 + cost.unsure) <= ratio <= 1 + cost.unsure
        assert 0.925 * 500 < inside < 0.985 * 500, (count, sigma)


def test_a_cause_with_a_time_of_its_own_leaves_the_rest_as_unsure_as_it_was() -> None:
    stall = Duration(median_s=46.0, sigma=0.5)
    cost = replace(PUBLISHED["hot-spare"], stall=stall, incidents=8, kind="measured", ranks=4)
    causes = [Cause(name="net", share=0.1, stall_s=90.0), Cause(name="else", share=0.9)]
    mixed = cost.by_cause(causes)
    assert mixed.unsure_s == pytest.approx(0.9 * cost.unsure_s)
    figures = {name: getattr(mixed.said, name) for name in ("median_s", "low_s", "high_s")}
    assert figures == {name: getattr(cost.said, name) for name in figures}


def test_whole_nodes_are_paid_for() -> None:
    assert row("checkpoint-restart", gpus=(12,), replica_nodes=1).gpu_hours == 16 * 240


@pytest.mark.slow
def test_a_checkpoint_takes_what_its_storage_gives(chaos: Say) -> None:
    more = ("--format", "json", "--checkpoint-size", "4TB", "--bandwidth", "80GB/s")
    said = json.loads(chaos(*TINY, *more)[1])["setting"]
    assert (said["save_s"], said["load_s"]) == (50.0, 50.0)
    assert (said["checkpoint_bytes"], said["bandwidth"]) == (4e12, 8e10)
    said = json.loads(chaos(*TINY, *more, "--save", "2s")[1])["setting"]
    assert (said["save_s"], said["load_s"]) == (2.0, 50.0), "asynchronous, say"


@pytest.mark.slow
def test_what_is_lost_is_counted_in_samples_where_a_step_has_some(chaos: Say) -> None:
    steps = project(setting(trials=20), PUBLISHED, "a test")
    samples = project(setting(trials=20, batch=2048), PUBLISHED, "a test")
    failures, of_samples = (tables.tables(one)["failures"].texts for one in (steps, samples))
    assert "steps lost" in failures[0] and "samples lost" in of_samples[0]
    column = failures[0].index("steps lost")
    assert failures[1][column] == f"{steps.rows[0].short:,.0f}"
    assert of_samples[1][column] == f"{steps.rows[0].short * 2048:,.0f}"
    assert json.loads(chaos(*TINY, "--batch", "7", "--format", "json")[1])["setting"]["batch"] == 7


def test_all_of_a_setting_is_on_the_page() -> None:
    assert {*tables.LABELS, "definitions", "gaps"} == set(Setting.model_fields)


@pytest.mark.slow
def test_a_job_of_few_repairs_has_no_formula_of_missing_nodes() -> None:
    """It begins with none missing, of which a formula of long jobs knows nothing."""
    short = setting(rate=20.0, days=2, repair_s=240 * 3600.0, gpus=(64,), trials=20)
    found = project(short, {name: PUBLISHED[name] for name in ("hot-spare",)}, "a test")
    assert all(row.closed is None and "30 repairs and more" in row.why for row in found.rows)
    assert {point.by for point in found.curve} == {"simulation"}
    rolled = projected(Part(short, 64, PUBLISHED["checkpoint-restart"]))
    assert rolled.closed is not None, "no node is missing there"


def test_where_a_row_shows_that_formulas_fail_none_is_taken_for_other_sizes() -> None:
    one_node = setting(gpus=(1024,), gpus_per_node=1024, spares=1, rate=2000.0, replica_nodes=1)
    found = project(one_node, {"drop-replica": PUBLISHED["drop-replica"]}, "a test")
    (row,) = found.rows
    assert row.differs and not found.curve
    assert row.second_gpu_hours >= 0.0
    second = row.spreads["second_gpu_hours"]
    assert second.least is not None and second.most is not None and second.least <= second.most


def test_growth_that_is_given_is_known() -> None:
    """What is unknown of a recovery is of what was measured, not of what options add to it."""
    stall = Duration(median_s=2.0, sigma=0.5)
    few = replace(PUBLISHED["hot-spare"], stall=stall, incidents=8, kind="measured", nodes=1.0)
    flat, grows = (replace(few, per_doubling_s=by_s) for by_s in (0.0, 10.0))
    assert flat.unsure_s == grows.unsure_s == pytest.approx(few.unsure * stall.mean_s)


def test_a_second_of_detection_with_failures_by_the_clock_of_any_law() -> None:
    """By simulations with stalls of two thirds of the time between failures, 20 minutes apart."""
    said = setting(
        weibull=0.7,
        rate=80.0,
        days=40,
        spares=0,
        repair_s=60.0,
        replica_nodes=1,
        definitions=Definitions(failures_while="always"),
    )
    shorter, usual, longer = (
        projected(Part(said, 1024, replace(PUBLISHED["hot-spare"], stall=Duration(median_s=s))))
        for s in (5400.0, 6000.0, 6600.0)
    )
    slope = (longer.lost_gpu_hours - shorter.lost_gpu_hours) / 1200.0
    assert usual.second_gpu_hours == pytest.approx(slope, rel=0.1)


def test_few_trials_have_wide_intervals() -> None:
    """Student's t of one degree of freedom is 12.7."""
    found = row("hot-spare", trials=2)
    half = 12.706205 * found.error
    assert found.low == pytest.approx(max(0.0, found.goodput - half))
