"""What an arm of a command makes of things that happen at once."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.script.test_script_observer import begun
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.arm.command_checkpoints import newest
from trainchaos.harness.script.listen.listening import CommandListener
from trainchaos.harness.script.listen.progress import ProgressReport
from trainchaos.harness.script.processes.ranks import ExitedRank
from trainchaos.harness.script.rank_watch import RankWatch

LOST = ExitedRank(name="w1", pid=11, exit_code=None, signal=signal.SIGKILL)


class Replaced:
    """Ranks of which w1 was replaced by w2 between two looks: both are news at once."""

    world = 2

    def __init__(self, unseen: list[ExitedRank]) -> None:
        self.unseen = unseen

    def wait(self, timeout_s: float) -> list[ExitedRank]:
        return self.unseen

    name_of = None

    def settled(self, found: Any, now_s: float, *, spoken: bool) -> tuple[Any, bool]:
        return found, False

    def hold(self, found: Any) -> tuple[Mapping[int, str], list[Any]]:
        return {0: "w0", 1: "w2"}, []

    def ended(self, names: Iterable[str]) -> Set[int]:
        return {11}

    def living(self) -> list[str]:
        return ["w0", "w2"]


class Said:
    """The dead rank had reported a step, and so has the new one."""

    waiting = True
    hints: Mapping[int, int] = {}

    def __init__(self) -> None:
        self.pending = [
            ProgressReport(step=31, rank=1, pid=11),
            ProgressReport(step=21, rank=1, pid=12),
        ]

    def listen(self) -> None:
        pass

    def hear_out(self, *, over: bool) -> None:
        assert not over, "w0 lives"

    def overdue(self) -> bool:
        return False

    def take(self, pids: Set[int], *, beyond: int | None) -> list[ProgressReport]:
        taken = [one for one in self.pending if one.pid in pids]
        self.pending = [one for one in self.pending if one.pid not in pids]
        return taken


@pytest.mark.parametrize("noticed", ["by the look for ranks", "at the beginning of the turn"])
def test_what_was_lost_is_lost_before_it_is_replaced(noticed: str) -> None:
    job = begun()
    for step in range(1, 31):
        job.train(step, rank=0)
        job.train(step, rank=1)
    unseen = [] if "turn" in noticed else [LOST]
    listener: Any = Said()
    parts: dict[str, Any] = {
        "ranks": Replaced(unseen),
        "finder": SimpleNamespace(find=lambda *_, **__: {}, whose=lambda said: said),
        "listener": listener,
        "broker": SimpleNamespace(forget=lambda: None),
        "injector": SimpleNamespace(
            arm=lambda *_: None, on_event=lambda _: None, on_training=lambda: None
        ),
        "leftovers": SimpleNamespace(look=lambda *_: None),
        **dict.fromkeys(("prepared", "arm", "holds_launcher", "ledger")),
    }
    spec: Any = SimpleNamespace(ranks=2)
    watch = RankWatch(
        spec=spec, observer=job.observer, record=job.record, now_ns=lambda: job.now, **parts
    )
    watch.arm_generation()
    if "turn" in noticed:
        parts["ranks"].unseen = [LOST]
        watch.wait(0.0)
        parts["ranks"].unseen = []
    command: Any = SimpleNamespace(guard_pid=1, pid=2)
    assert watch.find_ranks(command)
    told = [
        (event.kind, event.generation)
        for event in job.events[-4:]
        if event.kind is not Kind.PROCESS_SPAWNED
    ]
    assert told == [
        (Kind.STEP_REPORTED, 1),
        (Kind.PROCESS_EXITED, 1),
        (Kind.FAILURE_DETECTED, 1),
        (Kind.GENERATION_STARTED, 2),
    ]
    assert job.failures() == [("exit", "w1")]
    assert [one.step for one in listener.pending] == [21]


@pytest.mark.parametrize(
    ("beyond", "taken"),
    [(11, [(12, None), (30, 7), (13, None)]), (12, [(30, 7)]), (None, [(30, 7)])],
)
def test_last_words_that_say_not_whose_they_are_go_on_from_the_step_before(
    beyond: int | None, taken: list[tuple[int, int | None]]
) -> None:
    # then another began at 11
    said = [(12, None), (30, 7), (13, None), (31, 8), (11, None), (14, None)]
    listener: Any = object.__new__(CommandListener)
    listener._pending = [ProgressReport(step=step, pid=pid) for step, pid in said]
    assert [(one.step, one.pid) for one in listener.take({7}, beyond=beyond)] == taken
    assert [(one.step, one.pid) for one in listener.take()] == [
        one for one in said if one not in taken
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"20/rank_0.pt": 100, "30/rank_0.pt": 100, "latest.txt": 2}, "30"),  # DLRover, DeepSpeed
        ({"step-20.pt": 100, "step-30.pt": 100, "logs/events": 10}, "step-30.pt"),
        ({"20/a.pt": 100, "20/b.pt": 100}, "20"),
        ({".hidden": 9, "x.tmp": 9}, None),
        ({}, None),
    ],
)
def test_what_lies_beside_checkpoints_is_none(
    tmp_path: Path, sizes: Mapping[str, int], expected: str | None
) -> None:
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    found = newest(tmp_path, 1)
    assert (found.path.name if found else None) == expected
