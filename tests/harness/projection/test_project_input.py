"""Traces, causes, spares for an availability, processes and memory of ``chaos project``."""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.harness.projection.test_project_cli import SMALL, TINY, Say, chaos
from tests.support.pages.sample_results import build
from tests.support.running import readable
from trainchaos.chaos.commands.project import project as command
from trainchaos.chaos.commands.shared import projection as options
from trainchaos.chaos.commands.shared.asked import usual
from trainchaos.chaos.errors import InfrastructureError, ScenarioError
from trainchaos.harness.projection import breakeven, closed, parallel, projection
from trainchaos.harness.projection.costs import PUBLISHED, Cause, causes_of, measured
from trainchaos.harness.projection.job import law_of
from trainchaos.harness.projection.laws import Mixture
from trainchaos.harness.projection.presets import PRESETS
from trainchaos.harness.projection.projection import project
from trainchaos.harness.projection.result import Setting
from trainchaos.harness.projection.traces import read_failures

__all__ = ["chaos"]  # the fixture

CSV = "time,nodes,cause\n0,1,gpu\n1h,1,gpu\n7200,2,net\n40000,,\n"


def write(tmp_path: Path, text: str, name: str = "seen.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_table_and_mappings_a_line_say_the_same(tmp_path: Path) -> None:
    lines = ['{"time": "1h", "cause": "gpu"}', "0", '{"time": 7200, "nodes": 2}', "", "40000"]
    table = read_failures(write(tmp_path, CSV))
    mappings = read_failures(write(tmp_path, "\n".join(lines), "seen.jsonl"))
    assert table.gaps_s == mappings.gaps_s == (3600.0, 3600.0, 32_800.0)
    assert table.several == mappings.several == (0.75, 0.25)
    assert dict(table.causes) == {"gpu": 2, "net": 1} and dict(mappings.causes) == {"gpu": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("when\n1\n", "seen.csv:1: the head has no column time"),
        ("time\n1\nsoon\n3\n", "seen.csv:3: time: 'soon' is no time"),
        ("time\n1\n-2\n3\n", "seen.csv:3: time: '-2' is no time"),
        ("time\n1\nnan\n3\n", "seen.csv:3: time: 'nan' is no time"),
        ("time,nodes\n1,1\n2,0\n3,1\n", "seen.csv:3: nodes: 0 is not between 1 and 64"),
        ("time,nodes\n1,1\n2,few\n3,1\n", "seen.csv:3: nodes: 'few' is no whole number"),
        ("time,nodes\n1,1\n2\n3,1\n", "seen.csv:3: not 2 values, as in the head"),
        ('time\n1\n"2\n', "seen.csv:3: unexpected end"),
        ("time\n1\n2\n", "2 failures, 3 are the fewest"),
        ("time\n5\n5\n5\n", "all 3 failures come at once"),
        ("", "the head has no column time"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(chaos: Say, tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path, text)
    code, _, error = chaos(*SMALL, "--trace", "seen.csv")
    assert code == 2 and says in error and "Traceback" not in error
    assert not (tmp_path / "projection").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1\n{\n3\n", "seen.jsonl:2: not JSON"),
        ('1\n{"time": null}\n3\n', "seen.jsonl:2: time: None is no time"),
        ("1\ntrue\n3\n", "seen.jsonl:2: time: True is no time"),
        ('1\n{"time": 2, "nodes": 1.5}\n3\n', "seen.jsonl:2: nodes: 1.5 is no whole number"),
    ],
)
def test_a_bad_mapping_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ScenarioError, match=says.replace(".", r"\.")) as raised:
        read_failures(write(tmp_path, text, "seen.jsonl"))
    assert raised.value.exit_code == 2


@pytest.mark.slow
def test_a_trace_gives_gaps_and_with_its_nodes_the_rate(chaos: Say, tmp_path: Path) -> None:
    write(tmp_path, CSV)
    more = ("--trace", "seen.csv", "--format", "json")
    shape = json.loads(chaos(*TINY, *more)[1])
    assert shape["setting"]["several"] == [0.75, 0.25]
    of_nodes = json.loads(chaos(*TINY, *more, "--trace-nodes", "100")[1])
    assert of_nodes["setting"]["rate"] == pytest.approx(86_400 * 1000 / (40_000 / 3 * 100))
    assert of_nodes["setting"]["rate_unsure"] == 1.0 > shape["setting"]["rate_unsure"] == 0.0
    assert any("taken to be between half and double of it" in note for note in of_nodes["notes"])
    spare = {"hot-spare": PUBLISHED["hot-spare"]}
    known = project(Setting(gpus=(64,), rate=3.0, days=9, trials=5, rate_unsure=0.2), spare, "")
    assert any("known to ±20 % (95 %" in note for note in known.notes)
    assert shape["setting"]["rate"] == pytest.approx(3.788, abs=0.001)
    law = law_of(Setting(gpus=(64,), rate=3.0, gaps=(1.0, 1.0, 7.0)), 8)
    assert law.mean_s == pytest.approx(86_400 * 1000 / 24)
    drawn = law.sample(np.random.default_rng(1), 1000) / law.mean_s
    assert sorted(set(np.round(drawn, 6))) == pytest.approx([1 / 3, 7 / 3])


def test_the_rate_of_a_trace_is_as_sure_as_its_gaps_are_many(tmp_path: Path) -> None:
    """By hand: gaps of 9, 10 and 14, a mean of 11, a deviation of sqrt(7), Student's t of 2."""
    write(tmp_path, "time\n0\n9\n19\n33\n")
    found = read_failures(tmp_path / "seen.csv")
    assert found.unsure == pytest.approx(4.302653 * math.sqrt(7) / math.sqrt(3) / 11)
    write(tmp_path, "time\n0\n1\n3\n9\n")
    assert read_failures(tmp_path / "seen.csv").unsure == 1.0, "2.19 times"


MANY_LEMONS = ("--strategy", "hot-spare", "--stall", "hot-spare=0s", "--lemons", "1:1e6")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--trace-nodes", "5"), "of how many nodes a --trace is"),
        (("--trace", "seen.csv", "--weibull", "0.7"), "both say how failures follow"),
        (("--trace", "seen.csv", "--trace-nodes", "5", "--rate", "2"), "gives the rate"),
        (("--trace", "nowhere.csv"), "cannot read nowhere.csv"),
        (("--trace", "seen.txt"), "neither .csv nor .jsonl"),
        (("--quarantine", "2"), "--quarantine is of --lemons"),
        (("--lemons", "0.1:nan"), "SHARE:TIMES"),
        (("--cause", "hardware"), "NAME=SHARE:DURATION"),
        (("--cause", "hardware=1:soon"), "not a duration"),
        (("--cause", "a=0.5", "--cause", "b=0.6"), "sum to 1.1, not to 1"),
        (("--cause", "a=0.5", "--cause", "a=0.5"), "cause a is given twice"),
        (("--cause", "a=0.5", "--cause", "b=:5m"), "some have none"),
        (("--cause", "net=:5m", "--preset", "low"), "cause net has no share"),
        (("--cause", "net=:5m", "--preset", "llama3"), "counted are faulty GPU"),
        (("--availability", "1"), "--availability"),
        (("--trace", "soon.csv", "--trace-nodes", "1"), "is the time in seconds?"),
        (MANY_LEMONS, "failures in 6 days"),
    ],
)
def test_what_cannot_be_is_refused(
    chaos: Say, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    write(tmp_path, CSV)
    write(tmp_path, CSV, "seen.txt")
    write(tmp_path, "time\n0\n1e-320\n2e-320\n", "soon.csv")
    write(tmp_path, "time\n0\n1e308\n1.5e308\n", "late.csv")
    code, _, error = chaos(*SMALL, *options)
    assert code == 2 and says in error and "Traceback" not in error


def test_several_that_is_given_counts_also_beside_a_trace(chaos: Say, tmp_path: Path) -> None:
    write(tmp_path, CSV)
    argv = ("--trace", "seen.csv", "--format", "json", "--several", "1")
    assert json.loads(chaos(*TINY, *argv)[1])["setting"]["several"] == [1.0]


def test_causes_take_their_own_time_the_measured_or_the_usual(tmp_path: Path) -> None:
    _, results = build(tmp_path / "run")
    kinds = ["rank-hang" if one.repeat else "process-kill" for one in results.faults]
    faults = [
        one.model_copy(update={"kind": kind})
        for one, kind in zip(results.faults, kinds, strict=True)
    ]
    cost = measured([results.model_copy(update={"faults": faults})])["hot-spare"]
    assert set(cost.kinds) == {"process-kill", "rank-hang"} and "rank-hang 0." in cost.source
    causes = [Cause(name="rank-hang", share=0.25), Cause(name="net", share=0.5, stall_s=9.0)]
    mixed = cost.by_cause([*causes, Cause(name="else", share=0.25)])
    stall = mixed.at(1024.0)
    assert isinstance(stall, Mixture)
    first, second, third = (one.median_s for _, one in stall.parts)
    assert first == cost.kinds["rank-hang"].median_s != cost.stall.median_s
    assert second == 9.0 and third == cost.stall.median_s
    for said in ("25.0% rank-hang", "as measured", "50.0% net 9 s, as given", "25.0% all else"):
        assert said in mixed.source
    given = [Cause(name="net", share=1.0, stall_s=9.0)]
    spare = PUBLISHED["hot-spare"]
    assert spare.by_cause(given).at(512).mean_s == 9.0, "the published growth is not of this time"
    assert spare.by_cause([replace(given[0], grows=True)]).at(512).mean_s == pytest.approx(
        9.0 + 19 / 3
    )
    plain = cost.by_cause([Cause(name="net", share=1.0)])
    assert plain == cost, "no cause has a time of its own"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "causes", "processes"),
    [
        (("--preset", "llama3"), 18, (54 + 7 + 2) / 419),
        # the causes that are given say nothing of it
        (("--preset", "llama3", "--cause", "a=1:6m"), 1, 0.0),
        (("--cause", "a=1", "--process-share", "0.5"), 1, 0.5),
        # of a trace its nodes were counted, which are not those of the preset's causes
        (("--trace", "seen.csv", "--cause", "gpu=:9s"), 2, 0.0),
        (("--trace", "plain.csv", "--preset", "llama3"), 0, 0.0),
    ],
)
def test_causes_are_those_given_or_of_the_trace_or_of_the_preset(
    chaos: Say, tmp_path: Path, options: tuple[str, ...], causes: int, processes: float
) -> None:
    write(tmp_path, CSV)
    write(tmp_path, "time\n0\n1h\n7200\n", "plain.csv")
    found = json.loads(chaos(*TINY, "--format", "json", *options)[1])
    assert len(found["setting"]["causes"]) == causes
    assert sum(found["setting"]["causes"].values()) == pytest.approx(min(causes, 1))
    assert found["setting"]["processes"] == pytest.approx(processes)
    few = any("failures: their law" in line for line in found["cautions"])
    assert few == ("--trace" in options)


def test_a_time_can_be_given_to_a_cause_that_a_preset_counts(chaos: Say, tmp_path: Path) -> None:
    slow = ("--preset", "llama3", "--cause", "faulty GPU=:30m", "--strategy", "hot-spare")
    found = json.loads(chaos(*SMALL, "--format", "json", *slow)[1])
    assert "35.3% faulty GPU 1800 s, as given" in found["costs"]["hot-spare"]["source"]
    named = [Cause(name="faulty GPU", share=None, stall_s=1800.0)]
    mixed = PUBLISHED["hot-spare"].by_cause(causes_of(named, PRESETS["llama3"].counts))
    assert mixed.at(8).mean_s == pytest.approx((148 * 1800.0 + 271 * 46.0) / 419)
    page = (tmp_path / "projection/report.html").read_text()
    assert "Failures in a day of running at 4,096 GPUs: 1.94, of them 0.685 faulty GPU" in page


def test_spares_for_an_availability_are_said_for_each_size(chaos: Say, tmp_path: Path) -> None:
    _, said, _ = chaos(*SMALL, "--availability", "0.99", "--strategy", "hot-spare")
    (small, large) = json.loads((tmp_path / "projection/results.json").read_text())["spares"]
    for one in (small, large):
        assert one["load"] == pytest.approx(one["nodes"] * 3.7886 / 1000 / 6, rel=1e-3)
        assert closed.spares_for(0.99, one["load"]) == one["spares"]
        assert f"{one['gpus']:,} GPUs: spare nodes that keep all {one['nodes']:,} nodes" in said
        assert f"of the time: {one['spares']} (" in said.replace("\n", " ")
    page = (tmp_path / "projection/report.html").read_text()
    assert page.count("spare nodes that keep all") == 1 and "spares for 0.99" in page
    nearly = chaos(*TINY, "--availability", "0.99999")[1]
    assert " nodes there 0.99999 of the time" in nearly.replace("\n", " ")
    doubled = Setting(gpus=(4096,), rate=3.7886, several=(0.0, 1.0), availability=0.99)
    (more,) = projection.spares_needed(doubled)
    assert more.load == pytest.approx(2 * large["load"], rel=1e-3)
    assert more.spares == 2 * closed.spares_for(0.99, more.load / 2), "they go in pairs"
    (never,) = projection.spares_needed(doubled.model_copy(update={"repair_s": 1e12}))
    assert never.spares is None


def test_the_figures_do_not_depend_on_the_processes() -> None:
    setting = Setting(gpus=(64, 512), rate=6.5, days=5, trials=10, spares=1, lemon_share=0.1)
    shares: list[float] = []
    alone = project(setting, PUBLISHED, "a test")
    several = project(setting, PUBLISHED, "a test", shares.append, jobs=2)
    assert several == alone
    assert shares == sorted(shares) and shares[-1] == 1.0


def _ends(item: int) -> None:
    os._exit(9)


def test_a_process_that_is_killed_is_an_error() -> None:
    with pytest.raises(InfrastructureError, match="was killed"):
        parallel.in_processes([1, 2], _ends, lambda share: None, 2)


def _stays_or_fails(said: tuple[bool, int, int]) -> None:
    """The one that stays says so, and again if it is left alone; the other fails meanwhile."""
    stays, reader, writer = said
    if not stays:
        os.read(reader, 1)
        raise ScenarioError("too much")
    os.write(writer, b"1")
    select.select([], [], [], 60.0)
    os.write(writer, b"2")


def test_where_one_fails_what_the_others_are_at_ends() -> None:
    reader, writer = os.pipe()
    items = [(True, reader, writer), (False, reader, writer)]
    with pytest.raises(ScenarioError, match="too much"):
        parallel.in_processes(items, _stays_or_fails, lambda share: None, 2)
    os.close(writer)
    with open(reader, "rb") as stream:
        assert stream.read() == b"", "ends here only where no worker is left that may write"


PLAYS = r"""
import os, sys, time
from trainchaos.harness.projection import parallel

def work(item):
    os.write(1, b"%d\n" % os.getpid())
    time.sleep(600)

parallel.in_processes([1, 2], work, lambda share: None, 2)
"""


@pytest.mark.slow
def test_the_processes_end_with_the_one_that_began_them() -> None:
    """However it ends: here by a signal that it cannot handle."""
    with subprocess.Popen([sys.executable, "-c", PLAYS], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        workers = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(2)]
        parent.kill()
        try:
            for worker in workers:
                assert readable(worker), "it has ended"
        finally:
            for worker in workers:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker, signal.SIGKILL)
                os.close(worker)


@pytest.mark.parametrize("name", ["step", "save", "load", "slow_factor"])
def test_help_names_the_default_that_counts(name: str) -> None:
    """Options that must be told from those not given have no default of their own."""
    (option,) = [one for one in command.params if one.name == name]
    said = re.search(r"\[default: ([0-9.]+)s?\]", option.help)
    assert said and float(said[1]) == usual(name if name == "slow_factor" else f"{name}_s")


def test_help_knows_the_sizes_and_presets_that_there_are() -> None:
    """It is said without the modules that make a projection, which take long to load."""
    assert options.LARGEST == breakeven.LARGEST
    assert tuple(PRESETS) == options.PRESETS
