"""What arms record of their machine's processors, and what it excuses: a busy machine, and never a
job that crawls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.arms import FAIL, KILL, OPEN, control, evidence_of, hot_spare, judged
from tests.support.costs import calls
from tests.support.fakes.readings import NS, Load, readings, steady, until
from tests.support.logs import ORCHESTRATOR, Line, Script
from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.arm.pressure import MOST_NODES, follow, follow_built_in, of_this_machine
from trainchaos.harness.judge.checkers import check_all
from trainchaos.harness.judge.checkers.job import world
from trainchaos.harness.judge.measure.pressure import TOO_BUSY, Pressure, pressures_of
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.judge.verdict.gates import judge_cell
from trainchaos.recovery.process.pressure import (
    EVERY_S,
    MOST_RANKS,
    PressureReader,
    PressureReading,
)
from trainchaos.recovery.supervise.supervision import Stage

MOST_CALLS = 500  # of Python and C; 350 today
QUIET = steady(0.5, 0.1)


def stretched(script: Script, by: float) -> None:
    """All of it takes so many times as long."""
    for line in script.lines:
        line.time_ns = int(line.time_ns * by)
    script.now = int(script.now * by)


def slowed(script: Script, by: float) -> int:
    """What comes after the recovery takes so many times as long; when that began."""
    ready = script.find(Kind.GENERATION_READY)[-1].time_ns
    for line in script.lines:
        if line.time_ns > ready:
            line.time_ns = int(ready + by * (line.time_ns - ready))
    script.now = int(ready + by * (script.now - ready))
    return ready


def read(script: Script, load: Load) -> None:
    """Have the arm record a load, generation by generation."""
    ready = script.find(Kind.GENERATION_READY)
    ends = [line.time_ns for line in ready[1:]] + [script.now]
    for begun, end in zip(ready, ends, strict=True):
        for time_ns, data in readings(begun.time_ns, end - 1, begun.data["members"], load):
            line = Line(ORCHESTRATOR, Kind.PRESSURE_READ, time_ns, begun.generation, None, data)
            script.lines.append(line)


def liveness(script: Script, paired: Script | None = None) -> Finding:
    """Of the arm of ``arms.hot_spare``, changed."""
    return judged(evidence_of(script, [KILL], paired))["liveness"]


def arm_and_control() -> tuple[Script, Script]:
    return hot_spare(), control("hot-spare", spares=1)


# ---- the checker


@pytest.mark.parametrize("load", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("why", ["sleeps", "computes"])
def test_a_job_that_crawls_is_red_at_any_load(load: float, why: str) -> None:
    """A machine as busy for both arms: steps take longer by what is waited for. After its recovery
    the job then takes three times as long: without a need of the processors, or with three times
    the need.
    """
    script, paired = arm_and_control()
    for each in (script, paired):
        stretched(each, 1 / (1 - load))
    ready = slowed(script, 3)
    busy = steady(0.8 * (1 - load), 0.8 * load)
    part = 3 if why == "sleeps" else 1
    after = steady(0.8 * (1 - load) / part, 0.8 * load / part)
    read(paired, busy)
    read(script, until(ready, busy, after))
    assert liveness(script, paired).verdict == FAIL


@pytest.mark.parametrize("load", [0.2, 0.4, 0.6])
def test_a_load_that_comes_with_the_recovery_hides_no_job_that_computes_too_much(
    load: float,
) -> None:
    script, paired = arm_and_control()
    ready = slowed(script, 3 / (1 - load))
    read(paired, steady(0.8, 0.0))
    read(script, until(ready, steady(0.8, 0.0), steady(0.8 * (1 - load), 0.8 * load)))
    assert liveness(script, paired).verdict == FAIL


@pytest.mark.parametrize(
    ("slower", "needed", "verdict"), [(3, 10, FAIL), (3, 20, OPEN), (1.2, 20, "pass")]
)
def test_beside_other_programs_more_steps_are_needed(
    slower: float, needed: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, and the arm says that other programs are the load. It has 13 healthy steps."""
    monkeypatch.setattr(world, "STARVED_STEPS", needed)
    script, paired = arm_and_control()
    for each in (script, paired):
        stretched(each, 10)
        each.orchestrator(Kind.MACHINE_BUSY, others=1.8, cpus=2)
    ready = slowed(script, slower)
    busy = steady(0.08, 0.72)
    read(paired, busy)
    read(script, until(ready, busy, steady(0.08 / 3, 0.72 / 3)))
    assert liveness(script, paired).verdict == verdict


def test_a_machine_that_is_too_busy_after_the_recovery_proves_nothing() -> None:
    script, paired = arm_and_control()
    ready = slowed(script, 4)
    read(paired, steady(0.8, 0.0))
    read(script, until(ready, steady(0.8, 0.0), steady(0.2, 0.6)))
    finding = liveness(script, paired)
    assert finding.verdict == OPEN
    assert finding.witness.startswith(
        TOO_BUSY + "its ranks stood in a run queue for 3.0 s for each second"
    )


def test_a_control_arm_beside_others_is_not_blamed_for_them() -> None:
    """Its steps are compared with each other. No fault can have made them longer."""
    paired = control("hot-spare", spares=1)
    first = paired.find(Kind.STEP_COMMITTED, step=25)[0].time_ns
    for line in paired.lines:
        line.time_ns = max(line.time_ns, int(first + 4 * (line.time_ns - first)))
    paired.now = max(line.time_ns for line in paired.lines)
    alone = replace(evidence_of(paired, [KILL]), arm="control", control=None)
    finding = judged(alone)["liveness"]
    assert finding.verdict == OPEN and not finding.witness.startswith(TOO_BUSY)
    assert "of the rate of this arm as a whole, for their world" in finding.witness
    assert "but no fault came before it that could be to blame" in finding.witness
    read(paired, until(first, steady(0.8, 0.0), steady(0.2, 0.6)))
    alone = replace(evidence_of(paired, [KILL]), arm="control", control=None)
    finding = judged(alone)["liveness"]
    assert finding.verdict == OPEN and finding.witness.startswith(TOO_BUSY)


def starved(script: Script, after_step: int, seconds: float) -> tuple[int, int]:
    """One step takes so much longer, as a rank gets no processor; from when to when."""
    begun = script.find(Kind.STEP_COMMITTED, step=after_step)[-1].time_ns
    later = int(seconds * NS)
    for line in script.lines:
        line.time_ns += later if line.time_ns > begun else 0
    script.now += later
    return begun, begun + later


def test_a_step_that_waited_for_long_says_nothing_of_the_others() -> None:
    """The median step of the control arm is compared with, and what such steps waited for."""
    script, paired = arm_and_control()
    ready = slowed(script, 4)
    begun, ended = starved(paired, 10, 20.0)
    quiet, alone = steady(0.8, 0.0), steady(0.0, 0.9)
    read(paired, until(ended, until(begun, quiet, alone), quiet))
    read(script, until(ready, quiet, steady(0.2, 0.6)))
    finding = liveness(script, paired)
    assert (finding.verdict, finding.witness.startswith(TOO_BUSY)) == (OPEN, True)


@pytest.mark.parametrize("shift", range(6))
def test_a_wait_is_counted_when_it_ends_and_may_have_begun_before(shift: int) -> None:
    """Counts of a rank that stands in the queue stand still, and then grow by more than the time
    between readings.
    """
    script, paired = arm_and_control()
    ready = slowed(script, 4)
    read(paired, steady(0.8, 0.0))
    read(script, until(ready, steady(0.8, 0.0), steady(0.1, 0.8)))
    after = [line for line in script.find(Kind.PRESSURE_READ) if line.time_ns > ready]
    held: list[float] = after[0].data["ranks"]["w1"]
    for number, line in enumerate(after):
        held = line.data["ranks"]["w1"] if (number + shift) % 6 == 0 else held
        line.data["ranks"]["w1"] = held
    finding = liveness(script, paired)
    assert (finding.verdict, finding.witness.startswith(TOO_BUSY)) == (OPEN, True)


def test_what_little_was_waited_for_is_taken_off() -> None:
    script, paired = arm_and_control()
    ready = slowed(script, 2.2)
    read(paired, steady(0.8, 0.0))
    read(script, until(ready, steady(0.8, 0.0), steady(0.8 / 2.2, 0.19)))
    finding = liveness(script, paired)
    assert finding.verdict == "pass" and "net of" in finding.witness


def test_a_stolen_processor_is_no_fault_of_the_job() -> None:
    script, paired = arm_and_control()
    ready = slowed(script, 3)
    read(paired, QUIET)
    read(script, QUIET)
    for line in script.find(Kind.PRESSURE_READ):
        line.data["steal_s"] = max(0.0, (line.time_ns - ready) / NS * 0.6 * 4)
    finding = liveness(script, paired)
    assert finding.verdict == OPEN and "60 % of the processors were stolen" in finding.witness


BUSY = steady(0.2, 0.7)


def _lines(script: Script) -> list[dict[str, Any]]:
    return [line.data for line in script.find(Kind.PRESSURE_READ)]


def _without(script: Script, paired: Script) -> None:
    script.drop(Kind.PRESSURE_READ)


def _without_control(script: Script, paired: Script) -> None:
    paired.drop(Kind.PRESSURE_READ)


def _back(script: Script, paired: Script) -> None:
    for data, other in zip(_lines(script), reversed(_lines(script)), strict=True):
        data["ranks"] = {name: [-ran, 0.0] for name, (ran, _) in other["ranks"].items()}


def _no_sense(script: Script, paired: Script) -> None:
    values: tuple[Any, ...] = (
        "all",
        [],
        {"w0": 3},
        {"w0": [1, float("nan")]},
        None,
        {"w0": ["a", "b"]},
    )
    for data, value in zip(_lines(script), values * 20, strict=False):
        data["ranks"] = value


@pytest.mark.parametrize(
    "doctored",
    [_without, _without_control, _back, _no_sense],
    ids=lambda change: change.__name__.strip("_"),
)
def test_readings_that_are_not_there_or_no_numbers_excuse_nothing(
    doctored: Callable[[Script, Script], None],
) -> None:
    """A stored log without readings is judged as it was before there were any."""
    script, paired = arm_and_control()
    ready = slowed(script, 4)
    read(paired, steady(0.8, 0.0))
    read(script, until(ready, steady(0.8, 0.0), BUSY))
    assert liveness(script, paired).verdict == OPEN
    doctored(script, paired)
    assert liveness(script, paired).verdict == FAIL


def read_on(node: int, script: Script, load: Load) -> None:
    """Have a node's agent read a load, a moment before it is written down."""
    known = len(script.find(Kind.PRESSURE_READ))
    read(script, load)
    for line in script.find(Kind.PRESSURE_READ)[known:]:
        line.data |= {"node": node, "read_ns": line.time_ns - NS // 50}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("busy", [0, 3])
def test_of_nodes_the_one_that_is_worst_off_excuses(busy: int) -> None:
    script, paired = arm_and_control()
    ready = slowed(script, 4)
    for node in (0, 3):
        read_on(node, paired, steady(0.8, 0.0))
        read_on(
            node, script, until(ready, steady(0.8, 0.0), BUSY if node == busy else steady(0.2, 0.0))
        )
    assert liveness(script, paired).verdict == OPEN
    for line in script.find(Kind.PRESSURE_READ):
        if line.data["node"] == busy:
            line.data["node"] = 7  # of which nothing is known in the control arm
    assert liveness(script, paired).verdict == FAIL


@pytest.mark.parametrize(
    "change",
    [{"node": "two"}, {"node": None}, {"read_ns": 1}, {"read_ns": "now"}, {"node": 1e400}],
    ids=str,
)
def test_readings_of_a_node_that_make_no_sense_excuse_nothing(change: dict[str, Any]) -> None:
    script, paired = arm_and_control()
    ready = slowed(script, 4)
    read_on(1, paired, steady(0.8, 0.0))
    read_on(1, script, until(ready, steady(0.8, 0.0), BUSY))
    for data in _lines(script):
        data |= change
    assert liveness(script, paired).verdict == FAIL


def test_the_first_line_says_that_the_machine_was_too_busy() -> None:
    script, paired = arm_and_control()
    ready = slowed(script, 4)
    read(paired, steady(0.8, 0.0))
    read(script, until(ready, steady(0.8, 0.0), BUSY))
    found = check_all(evidence_of(script, [KILL], paired))
    verdict, reason = judge_cell("default", [], found, 2, 2, "x.yaml")
    assert verdict == OPEN and reason.startswith(
        "the machine was too busy: liveness: its ranks stood"
    )
    torn = {**found, "fault-landed": Finding(verdict=OPEN, witness="nobody saw it")}
    assert judge_cell("default", [], torn, 2, 2, "x.yaml")[1] == "fault-landed: nobody saw it"
    worse = {**found, "detection": Finding(verdict=FAIL, witness="nobody")}
    assert judge_cell("default", [], worse, 2, 2, "x.yaml") == (FAIL, "detection: nobody")


def here(log: Log, start_ns: int, end_ns: int) -> Pressure | None:
    """Of the harness's own machine."""
    return pressures_of(log, start_ns, end_ns).get(0)


def test_too_few_readings_say_nothing() -> None:
    script, _ = arm_and_control()
    read(script, QUIET)
    log = evidence_of(script, [KILL]).log
    times = [event.time_ns for event in log.of(Kind.PRESSURE_READ)]
    whole = here(log, times[0], times[-1])
    assert whole is not None and (whole.ran, whole.queued) == (
        pytest.approx(2.0, rel=0.01),
        pytest.approx(0.4, rel=0.01),
    )
    assert here(log, times[-1] + 10 * NS, times[-1] + 12 * NS) is None
    assert here(log, times[0], times[0] + NS // 10) is not None, "readings on both sides will do"
    assert here(log, times[-1] - NS, times[-1] + 9 * NS) is None


# ---- the readings


def proc(root: Path, **files: str) -> Path:
    """A /proc of our own; ``_`` in a name is ``/``."""
    for name, text in files.items():
        path = root / name.strip("p").replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


PSI = (
    "some avg10=37.48 avg60=45.08 avg300=28.84 total=132920012\nfull avg10=0.00 avg60=0.00"
    " avg300=0.00 total=0\n"
)


def test_a_reader_reads_what_there_is(tmp_path: Path) -> None:
    root = proc(
        tmp_path,
        p7_schedstat="1500000000 250000000 99\n",
        p9_schedstat="gone\n",
        stat="cpu  1 2 3 4 5 6 7 80 0 0\n",
    )
    reader = PressureReader(root=root, ticks=100, cpus=3, used_s=lambda: 0.0)
    assert reader.read({"w0": 7, "w1": 9, "w2": 11}) == PressureReading(
        cpus=3, some_s=None, steal_s=0.8, ranks={"w0": (1.5, 0.25)}
    )
    (root / "pressure").mkdir()
    (root / "pressure/cpu").write_text(PSI)
    found = reader.read({})
    assert found is not None and found.some_s == pytest.approx(132.920012)
    assert PressureReader(root=tmp_path / "nowhere").read({"w0": 7}) is None


def test_a_table_of_many_processors_is_read_seldom(tmp_path: Path) -> None:
    root = proc(tmp_path, p7_schedstat="1 2 3\n", stat="cpu  1 2 3 4 5 6 7 80 0 0\n")
    used = iter(range(1000))
    reader = PressureReader(root=root, used_s=lambda: float(next(used)))
    found = [reader.read({"w0": 7}) for _ in range(21)]
    assert [n for n, one in enumerate(found) if one and one.steal_s is not None] == [0, 10, 20]


def test_of_many_ranks_some_are_read(tmp_path: Path) -> None:
    root = proc(tmp_path, p7_schedstat="1 2 3\n")
    found = PressureReader(root=root).read({f"w{n}": 7 for n in range(100)})
    assert found is not None and len(found.ranks) == MOST_RANKS


class Scene:
    """An arm, or its supervisor."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Callable[[], None]]] = []
        self.events: list[dict[str, Any]] = []
        self.stage, self.members, self.generation = Stage.STARTING, ("w0", "w1"), 1
        self.controller = self

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.waiting.append((delay_s, action))

    def record(self, kind: Kind, /, **data: Any) -> Event:
        self.events.append({"kind": kind, **data})
        return Event(
            kind=kind, actor="orchestrator", seq=0, time_ns=0, generation=1, step=None, data=data
        )

    def turn(self) -> float:
        ((delay_s, action),) = self.waiting
        self.waiting = []
        action()
        return delay_s


class Here:
    """A cluster of this machine."""

    simulated = False

    def pid(self, name: str) -> int:
        return 1


def test_nothing_is_read_in_a_recovery(tmp_path: Path) -> None:
    scene, root = Scene(), proc(tmp_path, p7_schedstat="1 2 3\n", p8_schedstat="1 2 3\n")
    there: dict[str, int] = {}
    follow(scene.record, scene.later, of_this_machine(lambda: there, PressureReader(root=root)))
    scene.turn()
    assert scene.events == []
    there = {"w0": 7, "w1": 8}
    assert scene.turn() == EVERY_S
    assert [(e["kind"], list(e["ranks"])) for e in scene.events] == [
        (Kind.PRESSURE_READ, ["w0", "w1"])
    ]
    there = {}
    scene.turn()
    assert len(scene.events) == 1 and len(scene.waiting) == 1


def test_only_ranks_that_train_on_this_machine_are_read() -> None:
    elsewhere = Scene()
    follow_built_in(elsewhere, SimpleNamespace(simulated=True))
    assert elsewhere.waiting == [], "a simulator's"
    scene = Scene()
    follow_built_in(scene, Here())
    for stage in Stage:
        scene.stage = stage
        scene.turn()
    assert [list(event["ranks"]) for event in scene.events if event["ranks"]] in (
        [["w0", "w1"]],
        [],
    )
    assert len(scene.events) <= 1


class Nodes:
    """A cluster of nodes that read for themselves."""

    simulated = False

    def __init__(self) -> None:
        self.now = 100
        self.said: dict[int, tuple[int, PressureReading]] = {}

    def now_ns(self) -> int:
        return self.now

    def pressures(self) -> Mapping[int, tuple[int, PressureReading]]:
        return self.said

    def say(self, node: int, read_ns: int, *ranks: str) -> None:
        counts = dict.fromkeys(ranks, (1.0, 0.5))
        self.said[node] = (read_ns, PressureReading(cpus=2, some_s=1.0, steal_s=None, ranks=counts))


def test_what_nodes_read_is_written_down_once_and_of_their_ranks_alone() -> None:
    scene, nodes = Scene(), Nodes()
    follow_built_in(scene, nodes)
    nodes.say(0, 90, "w0", "s0")
    scene.turn()
    assert scene.events == [], "nothing trains yet"
    scene.stage = Stage.TRAINING
    scene.turn()
    assert scene.events == [], "it was read before the generation trained"
    nodes.say(0, 110, "w0", "s0")
    nodes.say(1, 111, "s1")
    scene.turn()
    scene.turn()
    (event,) = scene.events
    assert event == {
        "kind": Kind.PRESSURE_READ,
        "cpus": 2,
        "some_s": 1.0,
        "steal_s": None,
        "ranks": {"w0": (1.0, 0.5)},
        "node": 0,
        "read_ns": 110,
    }
    scene.generation, nodes.now = 2, 200
    nodes.say(0, 150, "w0")
    nodes.say(1, 151, "w1")
    scene.turn()
    nodes.say(1, 210, "w1")
    scene.turn()
    assert [(e["node"], e["read_ns"]) for e in scene.events] == [(0, 110), (1, 210)]


def test_of_many_nodes_the_readings_of_some_are_written_down() -> None:
    scene, nodes = Scene(), Nodes()
    scene.stage = Stage.TRAINING
    follow_built_in(scene, nodes)
    scene.turn()
    for node in range(100):
        nodes.say(node, 101, "w0")
    scene.turn()
    assert [event["node"] for event in scene.events] == list(range(MOST_NODES))


def test_a_reading_looks_at_a_bounded_number_of_files_and_at_their_heads() -> None:
    """What it takes is measured by ``benchmarks.calls``."""
    reader, pids = PressureReader(), {f"w{n}": os.getpid() for n in range(20 * MOST_RANKS)}
    looked: list[str] = []
    head = reader._head
    reader._head = lambda name: looked.append(name) or head(name)  # type: ignore[func-returns-value, method-assign]
    assert calls(lambda: reader.read(pids)) < MOST_CALLS
    assert len(looked) <= MOST_RANKS + 2


def test_a_healthy_arm_on_a_machine_that_leaves_it_next_to_nothing_is_not_blamed() -> None:
    """As seen at a load of 20 on two processors: the ranks waited 6.6 s for each second that they
    ran, and 5.9 s in the steps compared with, and the last steps took 2.4 times as long.
    """
    script, paired = arm_and_control()
    for each in (script, paired):
        stretched(each, 5)
    ready = slowed(script, 2.4)
    read(paired, steady(0.12, 0.12 * 5.9))
    read(script, until(ready, steady(0.12, 0.12 * 5.9), steady(0.05, 0.05 * 6.6)))
    assert liveness(script, paired).verdict == OPEN
