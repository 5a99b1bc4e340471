"""Page and terminal of a projection, by value: each cell has the figure that its head says."""

from __future__ import annotations

from typing import Any

import pytest

from trainchaos.chaos.commands.project import HEAD, lines
from trainchaos.harness.projection.costs import PUBLISHED
from trainchaos.harness.projection.projection import project
from trainchaos.harness.projection.result import Projected, Projection, Setting, Spread
from trainchaos.harness.projection.simulate import CLASSES
from trainchaos.reports.projection import page, tables, words


def spread(first: float) -> Spread:
    return Spread(low=first, high=first + 1, least=first + 2, most=first + 3)


def row(strategy: str = "hot-spare", **more: Any) -> Projected:
    """Each figure is another number."""
    usual: dict[str, Any] = {
        "strategy": strategy,
        "gpus": 4096,
        "nodes": 512,
        "mtbf_s": 7200.0,
        "interval_s": 180.0,
        "stall_s": 46.0,
        "recovery_s": 47.0,
        "goodput": 0.91,
        "error": 0.001,
        "low": 0.9,
        "high": 0.92,
        "worst": 0.88,
        "best": 0.94,
        "closed": 0.911,
        "badput": {**dict.fromkeys(CLASSES, 0.0), "stall": 0.05, "spares": 0.02},
        "failures": 172.0,
        "ettr": 0.93,
        "finish_days": 95.0,
        "again": 21.0,
        "short": 31.0,
        "lost_gpu_hours": 41.0,
        "gpu_hours": 51.0,
        "price": 61.0,
        "lost_price": 71.0,
        "second_gpu_hours": 8.1,
        "second_price": 9.1,
        "spreads": {
            "finish_days": spread(101.0),
            "failures": spread(111.0),
            "short": spread(121.0),
            "lost_gpu_hours": spread(131.0),
            "lost_price": spread(141.0),
            "badput.stall": Spread(low=0.047, high=0.053, least=0.04, most=0.06),
        },
    }
    return Projected(**{**usual, **more})


def projection(*rows: Projected) -> Projection:
    setting = Setting(gpus=(4096,), rate=6.5, price=2.0, trials=5, days=90)
    some = project(setting, {one.strategy: PUBLISHED[one.strategy] for one in rows}, "a test")
    return some.model_copy(update={"rows": list(rows)})


def test_each_cell_is_the_figure_that_its_head_names() -> None:
    shown = {
        id: "; ".join(f"{head}: {cell}" for head, cell in [*zip(*one.texts, strict=True)][2:])
        for id, one in tables.tables(projection(row())).items()
    }
    assert shown == {
        "rows": "goodput: 0.9100; mean, 95 % interval: 0.9000 to 0.9200; 5 to 95 % of jobs: 0.8800"
        " to 0.9400; formula: 0.9110; ETTR: 0.9300; days to finish: 95.0; days, 5 to 95 % of jobs:"
        " 103.0 to 104.0",
        "classes": "stall: 0.05000 ±0.00300; spares: 0.02000",
        "failures": "failures: 172.0; failures, 5 to 95 % of jobs: 113 to 114; MTBF: 2.0 h;"
        " checkpoint each: 3.0 min; a recovery: 46 s; all in all: 47 s; steps done again: 21; steps"
        " lost: 31; steps lost, 5 to 95 % of jobs: 123 to 124",
        "paid": "GPU-hours paid: 51; lost: 41; mean, 95 % interval: 131 to 132; 5 to 95 % of jobs:"
        " 133 to 134; a second of detection: 8.1",
        "money": "price: 61; lost: 71; mean, 95 % interval: 141 to 142; 5 to 95 % of jobs: 143 to"
        " 144; a second of detection: 9.1",
    }
    for one in tables.tables(projection(row())).values():
        heads, cells = ([*texts][:2] for texts in one.texts)
        assert (heads, cells) == (["GPUs", "strategy"], ["4,096", "hot-spare"])


def test_the_terminal_has_a_part_of_them() -> None:
    said = lines(projection(row()))
    assert said[0].split() == " ".join(HEAD).split()
    cells = "4096 hot-spare 0.9100 0.9000 to 0.9200 0.9110 172.0 41 GPU-h 8.1 GPU-h"
    assert said[1].split() == cells.split()


@pytest.mark.slow
def test_the_headline_has_a_difference_only_where_there_is_one() -> None:
    best = row(lost_gpu_hours=100.0, closed=None)
    worst = row(
        "checkpoint-restart", goodput=0.5, low=0.45, high=0.55, lost_gpu_hours=900.0, closed=None
    )
    said = words.headline(projection(best, worst))
    assert said == (
        "At 4,096 GPUs hot-spare keeps 91.0\u00a0% of the time, checkpoint-restart 50.0\u00a0%:"
        " 800 GPU-hours in 90 days"
    )
    dear = best.model_copy(update={"lost_gpu_hours": 1000.0})
    assert words.headline(projection(dear, worst)).endswith("checkpoint-restart 50.0\u00a0%")
    close = worst.model_copy(update={"goodput": 0.909})
    alike = "At 4,096 GPUs checkpoint-restart and hot-spare keep 91.0\u00a0% of the time alike"
    assert words.headline(projection(best, close)) == alike
    exact = [one.model_copy(update={"closed": 0.911}) for one in (best, close)]
    assert words.headline(projection(*exact)) == alike
    apart = [exact[0], exact[1].model_copy(update={"closed": 0.9109})]
    assert words.headline(projection(*apart)) != alike, "by the formulas there is no chance in it"
    wrong = worst.model_copy(update={"closed": 0.911})
    assert words.headline(projection(exact[0], wrong)) == said, "where the formula does not hold"


def test_where_the_engines_differ_the_simulation_is_taken() -> None:
    far = row(closed=0.92)
    assert far.differs and not row(closed=0.9105).differs and not row(closed=None).differs
    assert not row(closed=0.9109, error=1e-9).differs, "too little to matter"
    assert any("take the simulation" in line for line in words.findings(projection(far)))
    assert not any("take the simulation" in line for line in words.findings(projection(row())))


@pytest.mark.slow
def test_what_lacks_is_said_before_anything_else() -> None:
    found = projection(row()).model_copy(update={"cautions": ["nothing was measured"]})
    text = page.render(found)
    assert text.index("nothing was measured") < text.index("Projected, not measured")
    assert lines(found)[0] == "caution: nothing was measured"
