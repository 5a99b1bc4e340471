"""When a rank saves and what training waits for: intervals, background saves, and the end of a
generation in one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint import save_writer as module
from trainchaos.recovery.checkpoint.checkpointer import Checkpointer
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.saving import RankHooks
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.policy.interval import Wanted
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.transport.wire import CheckpointNote

ALONE = Layout(world=1)


class Gate:
    """A disk that stands still at its first write until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, what: str, path: Path) -> None:
        if what == "write":
            self.reached.set()
            assert self.opened.wait(LIMIT_S)


class Rank:
    """One rank that saves: a clock that is set, and everything it says."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.now_s = 1000.0
        self.events: list[tuple[Kind, dict[str, Any]]] = []
        self.notes: list[CheckpointNote] = []
        self.touched = 0
        self.agreed = -1
        self.aborted = False
        self.saves: Callable[[], object] = lambda: None
        torch.manual_seed(3)
        model = nn.Linear(200, 100)
        self.state = TrainState(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None, seed=7
        )
        values: dict[str, Any] = {
            "process": "w0",
            "world": 1,
            "steps": 100,
            "global_batch": 4,
            "samples": 64,
            "seed": 7,
            "checkpoint_dir": directory,
            "checkpoint_every": 5,
            "checkpoint_keep": 2,
        }
        self.saver = Checkpointer(
            JobConfig(**(values | config)),
            self.state,
            RankHooks(
                write=self._write,
                send=self.notes.append,
                check=self._check,
                progress=self._touch,
                saves=lambda: self.saves(),
                agreed=lambda: self.agreed,
                clock_s=lambda: self.now_s,
            ),
        )

    def _write(self, kind: Kind, /, **data: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.events.append((kind, data))

    def _touch(self) -> None:
        self.touched += 1

    def _check(self) -> None:
        if self.aborted:
            raise GenerationLost("aborted")

    def step(
        self, *, seconds: float = 1.0, rank: int = 0, layout: Layout = ALONE, pausing: bool = False
    ) -> bool:
        """Train one step, and save if it is time; whether it was."""
        number = self.state.step + 1
        wants = self.saver.wants(number)
        asked = replace(wants, disk=wants.disk or pausing)
        with torch.no_grad():
            self.state.model.weight += number
        self.state.step = number
        self.now_s += seconds
        self.saver.after_commit(
            number, rank=rank, layout=layout, generation=1, asked=asked, pausing=pausing
        )
        return asked.disk

    def run(self, steps: int, **more: Any) -> list[int]:
        """The steps at which it saved."""
        first = self.state.step + 1
        return [number for number in range(first, first + steps) if self.step(**more)]

    def said(self, *kinds: Kind) -> list[int]:
        return [data["step"] for kind, data in self.events if kind in kinds]

    def weight_of(self, directory: Path) -> float:
        """The first weight in the newest checkpoint."""
        name = self.saver.restore(None, ALONE)  # type: ignore[arg-type]
        assert name is not None
        return float(self.state.model.weight[0, 0].detach())


def left(directory: Path) -> list[str]:
    """What a save has left behind, but for the right to save."""
    return [path.name for path in directory.iterdir() if "fence" not in path.name]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Open in the end, whatever happens."""
    made = Gate()
    yield made
    made.opened.set()


def test_steps_and_seconds_are_kept_to(tmp_path: Path) -> None:
    assert Rank(tmp_path / "a").run(12) == [5, 10]
    assert Rank(tmp_path / "b", checkpoint_every="7s").run(25, seconds=2.0) == [5, 10, 15, 20, 25]
    assert Rank(tmp_path / "c", checkpoint_every=0).run(12) == []
    assert Rank(tmp_path / "d", checkpoint_dir=None).run(12) == []


def test_auto_saves_at_once_to_learn_the_cost_and_then_seldom(tmp_path: Path) -> None:
    rank = Rank(tmp_path, checkpoint_every="auto", saves={"mtbf_s": 50.0})
    rank.saver.disk = lambda what, path: (
        setattr(rank, "now_s", rank.now_s + 0.25) if what == "mkdir" else None
    )
    # about sqrt(2 * 0.25 * 50) = 5 s of training between saves; it is looked at before each step of
    # 1 s
    assert rank.run(20) == [1, 7, 13, 19]


def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path, gate: Gate) -> None:
    rank = Rank(tmp_path, saves={"mode": "async"})
    rank.saver.disk = gate
    assert rank.run(5) == [5]
    saved, copied = float(rank.state.model.weight[0, 0].detach()), rank.touched
    assert gate.reached.wait(LIMIT_S)
    assert rank.run(3) == [], "and it does"
    assert checkpoints.newest_first(tmp_path) == []
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == []
    assert rank.touched == copied, "what goes on in the background is no sign that training does"
    gate.opened.set()
    rank.saver.close()
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == [5]
    assert [note.state for note in rank.notes] == ["saving", "committed"]
    assert rank.weight_of(tmp_path) == saved, "the snapshot, not what training has made of it since"
    assert rank.state.step == 5


def test_a_save_that_falls_due_in_the_meantime_is_made_afterwards(
    tmp_path: Path, gate: Gate
) -> None:
    rank = Rank(tmp_path, saves={"mode": "async"})
    rank.saver.disk = gate
    assert rank.run(12) == [5], "10 is due, but 5 is still being written"
    gate.opened.set()
    rank.saver._writer.settle()
    assert rank.run(2) == [13]
    rank.saver.close()
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == [5, 13]


def test_a_save_at_a_pause_is_on_disk_when_it_returns(tmp_path: Path, gate: Gate) -> None:
    rank = Rank(tmp_path, saves={"mode": "async"}, checkpoint_every=100)
    gate.opened.set()
    rank.saver.disk = gate
    rank.step(pausing=True)
    assert [c.step for c in checkpoints.newest_first(tmp_path)] == [1]
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == [1]


def test_a_background_save_that_fails_is_said_and_the_next_one_made(tmp_path: Path) -> None:
    rank = Rank(tmp_path, saves={"mode": "async"})

    def full(what: str, path: Path) -> None:
        raise OSError(28, "No space left on device")

    rank.saver.disk = full
    rank.run(5)
    rank.saver.close()
    assert rank.said(Kind.CHECKPOINT_FAILED) == [5]
    assert "No space left" in rank.events[-1][1]["error"]
    rank.saver.disk = None
    rank.run(5)
    rank.saver.close()
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == [10]


def test_a_restore_waits_for_the_save_under_way(tmp_path: Path, gate: Gate) -> None:
    rank = Rank(tmp_path, saves={"mode": "async"})
    rank.saver.disk = gate
    rank.run(7)
    # by this one alone it is finished all the same: all ranks had committed that step
    rank.saver.lost()
    threading.Timer(0.05, gate.opened.set).start()
    rank.weight_of(tmp_path)
    assert rank.state.step == 5
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == [5]


def test_a_save_by_several_is_given_up_with_the_generation(tmp_path: Path) -> None:
    rank = Rank(tmp_path, saves={"mode": "async", "sharded": True})
    rank.run(5, layout=Layout(world=2))  # the other rank's part never comes
    rank.saver.lost()
    rank.saver.close()
    assert rank.said(Kind.CHECKPOINT_FAILED) == [5]
    assert "given up" in rank.events[-1][1]["error"]
    assert left(tmp_path) == []


def test_a_save_that_waits_for_others_ends_with_an_abort(tmp_path: Path) -> None:
    rank = Rank(tmp_path, saves={"sharded": True}, checkpoint_every=1)
    rank.aborted = True
    with pytest.raises(GenerationLost):
        rank.step(layout=Layout(world=2))
    assert left(tmp_path) == []


def test_parts_of_a_generation_before_are_not_mixed_in(tmp_path: Path) -> None:
    pair, first, second = (
        Layout(world=2),
        Rank(tmp_path, saves={"sharded": True}),
        Rank(tmp_path, saves={"sharded": True}),
    )
    first.saver.joined(0, pair, 1)
    second.state.step = 4
    second.saver.wants(5)
    second.state.step = 5
    second.saver.after_commit(5, rank=1, layout=pair, generation=1, asked=Wanted(disk=True))
    assert len(list(tmp_path.glob(".staging*/part-0001.json"))) == 1
    first.saver.joined(0, pair, 2)
    assert left(tmp_path) == []


def test_a_save_that_never_ends_holds_the_end_up_only_so_long(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", 0.01)
    rank = Rank(tmp_path, saves={"mode": "async"})
    rank.saver.disk = gate
    rank.run(5)
    assert gate.reached.wait(LIMIT_S)
    rank.saver.close()
    gate.opened.set()
    assert rank.saver._writer.background.wait(LIMIT_S)
    assert checkpoints.newest_first(tmp_path) == [], "given up, so it must not appear later"
