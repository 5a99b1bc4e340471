"""A progress bar whose newest frame has no end of line: nothing follows once its process is
killed.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.script.test_script_observer import Job, S
from tests.harness.script.test_script_sustained import incident_of, inject
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.script.listen.listening import SETTLED_S, CommandListener
from trainchaos.harness.script.processes.ranks import ExitedRank
from trainchaos.harness.script.rank_watch import RankWatch

LOOK_NS = 20_000_000


class Bar:
    """A job of one rank that draws a bar, and a watch that follows it."""

    world = 1

    def __init__(self, folder: Path) -> None:
        self.job = Job(ranks=1)
        self.path = folder / "out"
        (folder / "beacon").touch()
        self.path.touch()
        spec: Any = SimpleNamespace(
            ranks=1,
            steps=100,
            group=None,
            progress=SimpleNamespace(
                regex=r"(?P<step>\d+)/100( loss (?P<loss>\S+))?",
                loss=None,
                epochs_from=0,
                steps_from=1,
                epoch_steps=None,
                skip=None,
            ),
        )
        self.listener = CommandListener(
            spec,
            output=self.path,
            reports=folder / "beacon",
            heard=None,
            now_ns=lambda: self.job.now,
        )
        self.exits: list[ExitedRank] = []
        self.alive = ["w0"]
        parts: dict[str, Any] = {
            "ranks": self,
            "finder": SimpleNamespace(whose=lambda said: said),
            "listener": self.listener,
            "broker": SimpleNamespace(forget=lambda: None),
            "injector": SimpleNamespace(
                arm=lambda *_: None, on_event=lambda _: None, on_training=lambda: None
            ),
            **dict.fromkeys(("prepared", "arm", "holds_launcher", "ledger", "leftovers")),
        }
        self.watch = RankWatch(
            spec=spec,
            observer=self.job.observer,
            record=self.job.record,
            now_ns=lambda: self.job.now,
            **parts,
        )
        self.watch._missing = False
        self.job.found("w0")

    def wait(self, timeout_s: float) -> list[ExitedRank]:
        exits, self.exits = self.exits, []
        return exits

    def living(self) -> list[str]:
        return self.alive

    def write(self, text: str) -> None:
        with self.path.open("a") as stream:
            stream.write(text)

    def turn(self, seconds: float = LOOK_NS / S) -> None:
        """As a turn of the arm."""
        self.job.now += round(seconds * S)
        self.watch.wait(0.0)
        self.watch.listen()
        self.watch.take_progress()
        self.watch.take_exits()

    def draw(self, *steps: int) -> None:
        for step in steps:
            self.job.now += S // 10
            self.write(f"\r{step:3}/100")
            self.turn()

    def die(self) -> None:
        self.alive = []
        self.exits = [ExitedRank(name="w0", pid=3, exit_code=None, signal=signal.SIGKILL)]

    def said(self) -> list[tuple[int, int | None]]:
        return [(e.generation, e.step) for e in self.job.events if e.kind is Kind.STEP_REPORTED]


@pytest.fixture
def bar(tmp_path: Path) -> Bar:
    return Bar(tmp_path)


@pytest.mark.parametrize("noticed", ["exit", "end"])
def test_the_last_frame_of_a_killed_process_is_no_step_of_the_next(bar: Bar, noticed: str) -> None:
    bar.draw(*range(1, 36))
    inject_at_once(bar.job)
    bar.write("\r 36/100")
    if noticed == "exit":
        bar.die()
        bar.turn()
    else:
        bar.watch.take_last_words(well=False)
        bar.die()
        bar.turn()
    bar.job.now += S
    bar.job.found("w1")
    bar.alive = ["w1"]
    bar.draw(*range(21, 101))
    bar.watch.take_last_words(well=True)
    incident = incident_of(bar.job)
    assert [step for number, step in bar.said() if number == 1][-2:] == [35, 36]
    assert next(step for number, step in bar.said() if number == 2) == 21
    assert (incident.first_new_step, incident.steps_lost) == (37, 16)
    assert bar.said()[-1] == (2, 100), "nor is the last one lost"


def inject_at_once(job: Job) -> None:
    job.observer.members = {1: "w0"}
    inject(job)
    job.observer.members = {0: "w0"}


def test_nor_is_it_glued_to_a_line_of_the_next(bar: Bar) -> None:
    bar.draw(*range(1, 36))
    bar.die()
    bar.turn()
    bar.job.found("w1")
    bar.write("21/100\n22/100\n")
    bar.turn()
    assert bar.said()[-3:] == [(1, 35), (2, 21), (2, 22)]
    assert list(bar.listener.output.last)[-3:] == [" 35/100", "21/100", "22/100"]


def test_half_a_line_of_a_killed_process_is_no_report(bar: Bar) -> None:
    for step in range(1, 12):
        bar.write(f"{step:3}/100 loss 0.25\n")
        bar.turn()
    bar.write(" 12/100 loss 0.2")
    bar.die()
    bar.turn()
    assert bar.said()[-1] == (1, 11)
    assert list(bar.listener.output.last)[-1] == " 12/100 loss 0.2", "but people see it"


def test_the_last_line_of_a_command_that_ended_well_needs_no_end(bar: Bar) -> None:
    bar.write("\n".join(f"{step}/100" for step in range(1, 101)))
    bar.turn()
    bar.watch.take_last_words(well=True)
    assert bar.said()[-1] == (1, 100)


def test_a_frame_is_read_before_the_next_one_and_once(bar: Bar) -> None:
    bar.draw(1, 2, 3, 4)
    written = bar.job.now
    assert bar.said()[-1] == (1, 3)
    bar.turn(SETTLED_S)
    assert bar.said()[-1] == (1, 4)
    assert bar.job.events[-1].data["reported_ns"] == written
    bar.turn(SETTLED_S)
    bar.draw(5)
    bar.turn(SETTLED_S)
    assert [step for _, step in bar.said()] == [1, 2, 3, 4, 5]


def test_what_follows_in_its_line_is_no_other_frame(bar: Bar) -> None:
    bar.draw(1, 2, 3, 4)
    bar.turn(SETTLED_S)
    bar.write(" 5/100 is near\n")
    bar.turn()
    assert [step for _, step in bar.said()] == [1, 2, 3, 4]
    assert list(bar.listener.output.last)[-1] == "  4/100 5/100 is near"


def test_a_line_that_a_buffer_cuts_is_waited_for(bar: Bar) -> None:
    for block in ("1/100\n2/100\n3", "/100\n4/100\n5/100\n1", "2/100\n13/100\n1"):
        bar.write(block)
        bar.turn(10 * SETTLED_S)
        bar.turn(10 * SETTLED_S)
    assert [step for _, step in bar.said()] == [1, 2, 3, 4, 5, 12, 13]


def test_a_survivor_may_go_on_with_its_line(bar: Bar) -> None:
    bar.job.observer.members = {0: "w0", 1: "w1"}
    bar.write("1/100\n2/100\n3")
    bar.turn()
    bar.exits, bar.alive = [ExitedRank(name="w1", pid=4, exit_code=1, signal=None)], ["w0"]
    bar.turn()
    bar.write("/100\n")
    bar.turn()
    assert [step for _, step in bar.said()] == [1, 2, 3]
