"""The ways in which a rank hangs: in a script of one's own, in a built-in workload, and what bears
witness of each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hangs
from tests.harness.script.test_point_broker import Arm, planned
from tests.harness.script.test_points import at, done, heard, points  # noqa: F401 - a fixture
from tests.harness.script.test_script_points import play
from tests.support.decided import decided
from tests.support.fault_fakes import OCCURRENCE, declared
from tests.support.search.simulate import cell_of
from tests.support.search.simulate import play as simulate
from trainchaos import beacon
from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import Event, Kind, read_log
from trainchaos.chaos.fault.aftermath import Occurrence
from trainchaos.chaos.fault.base import Fault, Fidelity
from trainchaos.chaos.fault.witness import stuck
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.measure.pressure import TOO_BUSY
from trainchaos.harness.judge.results import Results
from trainchaos.harness.launchers.sim import Sim
from trainchaos.harness.script.points import PointDone, PointRequest, Points
from trainchaos.harness.script.processes.hang_witness import HangWitness
from trainchaos.recovery.process.starvation import ThreadReading

KIND = plugins.load(plugins.FAULTS, Fault)["rank-hang"]
S = 1_000_000_000
HANGS_S = 0.5
SCENARIO = Path(__file__).parents[3] / "scenarios/process/hang-families.yaml"


@pytest.mark.parametrize(("how", "busy"), [("sleep", False), ("spin", True), ("kernel", True)])
def test_a_hang_uses_a_processor_or_none(how: str, busy: bool) -> None:
    began, used = time.monotonic(), time.thread_time()
    beacon.hang(how, HANGS_S)
    assert time.monotonic() - began >= HANGS_S
    assert (time.thread_time() - used > 0.01) is busy


@pytest.mark.parametrize("word", ["hang sleep 0.01", "hang loudly 1", "hang", "hang sleep soon"])
def test_a_script_hangs_as_it_is_told_and_says_so_before(
    points: Points,  # noqa: F811
    word: str,
) -> None:
    points.arm([(7, "backward")])
    thread, result = at("backward", 7)
    (asked,) = heard(points)
    assert isinstance(asked, PointRequest)
    points.answer(asked.connection, asked.number, word)
    done(thread)
    assert result == [None]
    if word != "hang":
        (said,) = heard(points)
        assert said == PointDone(
            connection=asked.connection, step=7, what="hang", before=thread.native_id, after=None
        )


def test_a_script_is_told_how_and_for_how_long_and_watched_from_outside() -> None:
    arm = Arm(planned("rank-hang", (7, "forward"), how="spin", hold_s=90))
    arm.broker._standing = HangWitness(
        lambda pid: {pid: ThreadReading(ready=True, ran_s=arm.now / S, queued_s=0.0)}
    )
    arm.arm("w1", ("hit", 7, "forward"))
    arm.ask(1, 101, 7, "forward")
    arm.go("w1", act=True, fault="hit", occurrence=0, params={"how": "spin", "hold_s": 90.0})
    assert arm.wire.answers == [(1, "hang spin 90")]
    arm.wire.said.append(
        PointDone(connection=1, step=7, what="hang", before=float("inf"), after=None)
    )
    arm.hear()
    assert [seen["evidence"] for seen in arm.effects] == [{"script": "hang", "before": "inf"}]
    arm.now = S // 10
    arm.hear()
    assert len(arm.effects) == 1, "not long enough"
    arm.now = S // 4
    arm.hear()
    arm.hear()
    assert [seen["evidence"] for seen in arm.effects[1:]] == [
        {"watched_s": 0.25, "ran_s": 0.25, "queued_s": 0.0}
    ]


@pytest.mark.parametrize(
    ("how", "ran_s", "queued_s", "lands"),
    [
        ("spin", 0.2, 0.0, True),
        ("spin", 0.02, 0.17, True),
        ("spin", 0.02, 0.0, False),
        ("kernel", 0.15, 0.0, True),
        ("sleep", 0.0, 0.0, True),
        ("sleep", 0.01, 0.18, False),
    ],
)
def test_the_word_of_a_script_is_not_enough(
    how: str, ran_s: float, queued_s: float, lands: bool
) -> None:
    def seen(**evidence: object) -> Event:
        data = {"fault": "f", "occurrence": 0, "evidence": evidence}
        return Event(
            kind=Kind.FAULT_EFFECT,
            actor="orchestrator",
            seq=0,
            time_ns=9,
            generation=1,
            step=7,
            data=data,
        )

    where = Occurrence(fault="f", number=0, process="w1", rank=1, time_ns=5)
    fault, word = KIND(how=how), seen(script="hang", before=12.0)
    assert fault.landed(where, [word]) is None
    landed = fault.landed(where, [word, seen(watched_s=0.2, ran_s=ran_s, queued_s=queued_s)])
    assert (landed is not None) is lands
    assert landed is None or landed.witness == "kernel: processor time"


def test_a_thread_that_is_gone_says_nothing_and_one_of_another_namespace_is_the_main_one() -> None:
    threads: dict[int, ThreadReading] = {5: ThreadReading(ready=False, ran_s=1.0, queued_s=0.5)}

    def of(pid: int) -> Mapping[int, ThreadReading]:
        return threads

    standing = HangWitness(of)
    standing.watch(("f", 0, 7), pid=5, tid=77, now_ns=0)
    standing.watch(("g", 0, 7), pid=6, tid=77, now_ns=0)
    threads = {5: ThreadReading(ready=False, ran_s=1.1, queued_s=0.5)}
    assert standing.seen(S) == [(("f", 0, 7), {"watched_s": 1.0, "ran_s": 0.1, "queued_s": 0.0})]
    standing.watch(("f", 0, 8), pid=5, tid=5, now_ns=S)
    threads = {}
    assert standing.seen(2 * S) == []


def test_a_thread_that_is_killed_soon_was_seen_until_then() -> None:
    """A stack with a short hang timeout kills it before it was watched for the usual time."""
    ran = ThreadReading(ready=True, ran_s=1.0, queued_s=0.0)
    threads = {5: ran}
    standing = HangWitness(lambda pid: threads)
    standing.watch(("f", 0, 7), pid=5, tid=5, now_ns=0)
    threads = {5: ThreadReading(ready=True, ran_s=1.05, queued_s=0.01)}
    assert standing.seen(S // 20) == []
    threads = {}
    assert standing.seen(S // 10) == [
        (("f", 0, 7), {"watched_s": 0.05, "ran_s": 0.05, "queued_s": 0.01})
    ]
    assert standing.seen(S) == []


def test_only_a_kernel_without_a_device_is_emulated() -> None:
    emulated = {
        (how, cuda)
        for how in ("sleep", "spin", "kernel")
        for cuda in (False, True)
        if KIND(how=how).acts(cuda=cuda) is Fidelity.EMULATED
    }
    assert emulated == {("kernel", False)}


# ---- how fast

FAMILIES: Mapping[str, dict[str, Any]] = {
    "stopped": {"kind": "process-stop"},
    "sleep": {"kind": "rank-hang", "params": {"how": "sleep", "hold_s": 600}},
    "spin": {"kind": "rank-hang", "params": {"how": "spin", "hold_s": 600}},
    "kernel": {"kind": "rank-hang", "params": {"how": "kernel", "hold_s": 600}},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("step_s", [0.05, 0.089, 0.131, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_found_within_eight_steps_or_0_6_s(family: str, step_s: float, memory: Path) -> None:
    """On simulated time, with the detector itself: from the act on, whatever the others still had
    to do, however steps and looks fall together, and with nothing added.
    """
    fault = {
        "id": "hang",
        "target": {"rank": 2},
        "at": {"step": 21, "phase": "forward"},
        **FAMILIES[family],
    }
    cell = cell_of("hot-spare", [fault], steps=30)
    found = measure(simulate(cell, memory, seed=3, sim=Sim(step_ms=step_s * 1000)).log, None)
    (incident,) = found.incidents
    assert (incident.detected_by, incident.blamed_rank) == ("hang", 2)
    assert incident.detection_time is not None and found.step_time is not None
    assert incident.detection_time <= max(0.6, 8 * found.step_time)
    assert family == "stopped" or incident.detection_time > 0.9 * max(0.6, 8 * found.step_time), (
        "not sooner"
    )


# ---- for real


@pytest.mark.real
@pytest.mark.long
def test_every_family_of_hangs_is_found_and_blamed(tmp_path: Path) -> None:
    results = blamed_here(tmp_path, SCENARIO)
    assert {one.fault for one in results.faults} == {"stopped", "sleep", "spin", "kernel"}
    assert any(line.startswith("rank-hang: emulated") for line in results.fidelity)


def blamed_here(folder: Path, scenario: Path) -> Results:
    """Play it here, and skip where others took the processors. How soon each was found is measured
    by ``make bench-hangs``.
    """
    code = decided(scenario, folder)
    (run,) = folder.glob("*/latest")
    results = Results.model_validate_json((run / "results.json").read_text())
    (faulted,) = [arm for arm in results.arms if arm.arm == "faulted"]
    busy = {one.busy for one in hangs.found_in(read_log(run / faulted.events))} - {""}
    if busy and code:
        pytest.skip(TOO_BUSY + "; ".join(sorted(busy)))
    assert code == 0, results.reason
    blamed = [(incident.detected_by, incident.outcome) for incident in results.faults]
    assert blamed == [("hang", "recovered")] * len(FAMILIES)
    return results


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("how", ["sleep", "spin", "kernel"])
def test_a_script_hangs_and_the_kernel_bears_witness(how: str, tmp_path: Path) -> None:
    fault = (
        f"{{id: hit, kind: rank-hang, params: {{how: {how}, hold_s: 8}}, target: {{rank: 1}}, at:"
        " {step: 12}}"
    )
    incident = play(tmp_path, fault)["hit"]
    assert (incident.witness, incident.evidence["script"]) == ("kernel: processor time", "hang")


def test_nccls_ras_bears_witness_beside_the_marks() -> None:
    said = "rank 1 (process 7 on 10.0.0.1) lags"
    hang = declared("hang")
    seen = replace(hang, data={**hang.data, "ras": said})
    found = stuck(OCCURRENCE, [seen], None)
    assert found is not None and found.witness == "NCCL: RAS; supervisor: progress marks"
    assert found.evidence == {"seen": "x", "ras": said}
    alone = stuck(OCCURRENCE, [hang], None)
    assert alone is not None and alone.witness == "supervisor: progress marks"
    assert "ras" not in alone.evidence
