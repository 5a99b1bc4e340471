"""A rank that says it is busy, and the marks of code between steps: what its supervisor sees, and
how it leaves.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recovery.rank.test_job import Rank
from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind, read_actor
from trainchaos.recovery import run as command
from trainchaos.recovery.cli.options import parser, timing_of
from trainchaos.recovery.rank.busy import BusyBlocks
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.progress_counters import Mark, MarkPage
from trainchaos.recovery.transport.wire import Abort, Finished, Joined, Parked

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evaluating(Rank):
    """Evaluates after step 2, in a way that a test chooses, and shows what its supervisor
    can see.
    """

    def __init__(self, directory: Path, how: str) -> None:
        self.how = how
        self.seen: queue.SimpleQueue[Mark | str] = queue.SimpleQueue()
        self.go: queue.SimpleQueue[None] = queue.SimpleQueue()
        super().__init__(directory)

    def _train(self) -> None:
        while self.job.running():
            with self.job.step() as step:
                if step.number == 3 and self.how == "inside":
                    self.evaluate()
                x = torch.ones(len(step.samples), 3) / 64
                loss = self.model(x).square().sum()
                if step.number == 3:
                    self.seen.put(self.page.read())
                step.backward(loss)
                step.commit()
            if step.number == 2 and self.how != "inside":
                self.evaluate()

    def evaluate(self) -> None:
        if self.how == "call":
            self.job.busy("evaluation", limit_s=90)
            self.pause()
        elif self.how == "undeclared":
            self.pause()
        else:
            with self.job.busy("evaluation", limit_s=89.5) as busy:
                self.model(torch.ones(1, 3))
                self.pause()
                self.seen.put("wanted" if busy.wanted else "not wanted")
            self.seen.put(self.page.read())

    def pause(self) -> None:
        self.seen.put(self.page.read())
        self.go.get(timeout=LIMIT_S)

    def saw(self) -> Mark:
        mark = self.seen.get(timeout=LIMIT_S)
        assert isinstance(mark, Mark)
        return mark


@pytest.fixture
def evaluating(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Evaluating]:
    rank = Evaluating(tmp_path, request.param)
    rank.join(1)
    rank.hear(Joined)
    yield rank
    rank.go.put(None)
    rank.channel.close()


@pytest.mark.parametrize("evaluating", ["context"], indirect=True)
def test_it_is_busy_within_the_block(evaluating: Evaluating) -> None:
    mark = evaluating.saw()
    assert (mark.phase, mark.busy_s, mark.committed) == ("between", 90, 2)
    evaluating.go.put(None)
    assert evaluating.seen.get(timeout=LIMIT_S) == "not wanted"
    assert evaluating.saw().busy_s == 0
    assert evaluating.saw().phase == "forward"
    evaluating.hear(Finished)
    evaluating.stop()


@pytest.mark.parametrize("evaluating", ["call"], indirect=True)
def test_a_call_holds_until_the_next_step(evaluating: Evaluating) -> None:
    assert evaluating.saw().busy_s == 90
    evaluating.go.put(None)
    mark = evaluating.saw()
    assert (mark.phase, mark.busy_s) == ("forward", 0)


@pytest.mark.parametrize("evaluating", ["undeclared"], indirect=True)
def test_code_between_steps_shows_as_that(evaluating: Evaluating) -> None:
    mark = evaluating.saw()
    assert (mark.phase, mark.busy_s) == ("between", 0)


@pytest.mark.parametrize("evaluating", ["inside"], indirect=True)
def test_an_evaluation_with_the_model_in_a_step_is_not_its_forward_pass(
    evaluating: Evaluating,
) -> None:
    mark = evaluating.saw()
    assert (mark.phase, mark.step, mark.busy_s) == ("data", 3, 90)
    evaluating.go.put(None)
    assert evaluating.seen.get(timeout=LIMIT_S) == "not wanted"
    assert evaluating.saw().phase == "data"
    assert evaluating.saw().phase == "forward"


@pytest.mark.parametrize("evaluating", ["context", "undeclared"], indirect=True)
def test_whoever_evaluates_while_another_fails_is_told_and_leaves_before_its_next_step(
    evaluating: Evaluating,
) -> None:
    evaluating.saw()
    evaluating.tell(Abort(generation=1))
    deadline = queue.SimpleQueue[None]()
    while not evaluating.job.agent.heard.aborted_generation:
        with pytest.raises(queue.Empty):
            deadline.get(timeout=0.01)
    evaluating.go.put(None)
    parked = evaluating.hear(Parked)
    assert (parked.step, parked.why, parked.valid) == (2, "aborted", True)
    if evaluating.how == "context":
        assert evaluating.seen.get(timeout=LIMIT_S) == "wanted"
    evaluating.stop()
    assert evaluating.page.read().step == 2, "no step was begun for a generation that is over"


def busy_lines(rank: Evaluating) -> list[dict[str, Any]]:
    """What its log says of it, as (kind, data)."""
    events = read_actor(rank.directory / "events" / "w0.jsonl").events
    return [
        {"kind": event.kind, "step": event.step, **event.data}
        for event in events
        if event.kind in (Kind.BUSY, Kind.BUSY_ENDED)
    ]


@pytest.mark.parametrize("evaluating", ["context", "call", "inside", "undeclared"], indirect=True)
def test_the_log_says_what_it_was_and_when_it_was_over(evaluating: Evaluating) -> None:
    evaluating.saw()
    begun = {"kind": Kind.BUSY, "step": None, "rank": 0, "what": "evaluation", "limit_s": 90}
    declared = [] if evaluating.how == "undeclared" else [begun]
    assert busy_lines(evaluating) == declared, "as soon as it begins: it may never end"
    evaluating.go.put(None)
    evaluating.hear(Finished)
    evaluating.stop()
    lines = busy_lines(evaluating)
    assert lines[:1] == declared and len(lines) == 2 * len(declared)
    for ended in lines[1:]:
        assert 0 <= ended.pop("seconds") < LIMIT_S
        assert ended == {"kind": Kind.BUSY_ENDED, "step": None, "rank": 0, "what": "evaluation"}


def test_blocks_within_blocks_and_calls_after_calls_each_end_once(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    job, said = rank.job, list[tuple[str, Any]]()
    job.blocks = BusyBlocks(
        note=rank.page.busy,
        write=lambda kind, /, **data: said.append((kind, data["what"])),
        rank=lambda: job.rank,
        wanted=lambda: False,
    )
    with job.busy("outer"):
        with job.busy("inner"):
            pass
        job.busy("call")
        job.busy("x" * 1000)
    job.blocks.training()
    job.blocks.training()
    begun, ended = Kind.BUSY, Kind.BUSY_ENDED
    assert said == [
        (begun, "outer"),
        (begun, "inner"),
        (ended, "inner"),
        (begun, "call"),
        (ended, "call"),
        (begun, "x" * 200),
        (ended, "outer"),
        (ended, "x" * 200),
    ]
    rank.channel.close()


def test_busy_for_ever_is_refused(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    for limit_s in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="say how long it may take"):
            rank.job.busy("evaluation", limit_s=limit_s)
    rank.channel.close()


def test_the_mark_is_one_word() -> None:
    page = MarkPage(progress_counters.create())
    page.busy(3600)
    assert page.read().busy_s == 3600 and page.read().time_ns > 0
    page.busy(0)
    assert page.read().busy_s == 0
    page.close()


def test_the_users_limits_are_taken() -> None:
    given = ["--hang-timeout", "45", "--park-timeout", "5", "--join-timeout", "600", "train.py"]
    timing = timing_of(parser("").parse_args(given))
    assert (timing.hang.given_s, timing.park_timeout_s, timing.join_timeout_s) == (45, 5, 600)
    usual = timing_of(parser("").parse_args(["train.py"]))
    assert (usual.hang.given_s, usual.park_timeout_s, usual.join_timeout_s) == (None, 1.0, 60.0)


def test_a_process_that_is_stopped_has_less_than_one_that_is_silent() -> None:
    short = timing_of(parser("").parse_args(["--hang-timeout", "0.05", "train.py"]))
    assert (short.hang.given_s, short.hang.stopped_s) == (0.05, pytest.approx(0.04))
    long = timing_of(parser("").parse_args(["--hang-timeout", "5", "train.py"]))
    assert long.hang.stopped_s == 0.08


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hang-timeout", "0"], "0 is no time to wait"),
        (
            ["--hang-timeout", "0.025"],
            "hang.stopped_s (0.025 s) must be less than hang.given_s (0.025 s)",
        ),
        (
            ["--join-timeout", "5"],
            "park_timeout_s * hang.disk_factor (10 s) must be less than join_timeout_s (5 s)",
        ),
        (["--park-timeout", "90"], "park_timeout_s (90 s) must be less than join_timeout_s (60 s)"),
    ],
)
def test_limits_that_clash_are_refused_before_anything_starts(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([*arguments, __file__])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
