"""What arms record of the processors of their machines: the counters that the kernel keeps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.costs import calls
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.arm.pressure import MOST_NODES, follow, follow_built_in, of_this_machine
from trainchaos.recovery.process.pressure import (
    EVERY_S,
    MOST_RANKS,
    PressureReader,
    PressureReading,
)
from trainchaos.recovery.supervise.supervision import Stage

MOST_CALLS = 500  # of Python and C; 350 today


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
