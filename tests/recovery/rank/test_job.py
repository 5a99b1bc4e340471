"""One rank's side of a supervised job, in this process: a world of one, the test plays the
supervisor.
"""

from __future__ import annotations

import math
import queue
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.recovery.checkpoint.test_checkpoints import flip
from tests.support.fakes.orders import join
from tests.support.running import LIMIT_S, until
from trainchaos.chaos.events.log import Event, EventWriter, Kind, read_actor
from trainchaos.recovery.checkpoint.checkpointer import NothingToRestore
from trainchaos.recovery.checkpoint.files.checkpoints import CorruptCheckpoint, newest_first, verify
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.rank.job import Job, JobConfig
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import (
    Abort,
    Agreed,
    CheckpointNote,
    Finished,
    Joined,
    Message,
    Parked,
    Ready,
    Stop,
    Unrecoverable,
)
from trainchaos.recovery.transport.wire import PauseRequest as Pause

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Probe:
    """Calls back at chosen points of training."""

    active = True

    def __init__(self) -> None:
        self.acts: dict[tuple[int, str], Callable[[], None]] = {}

    def at(self, step: int, phase: str) -> None:
        act = self.acts.pop((step, phase), None)
        if act:
            act()

    def ended(self, phase: str, seconds: float) -> None:
        """Nothing."""

    def committed(self, step: int) -> None:
        """Nothing."""


class Rank:
    """A job on a thread of its own, and the supervisor's end of its channel."""

    def __init__(self, directory: Path, *, steps: int = 6, every: int = 3) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_S)
        self.channel = Channel(ours)
        self.store, self.store_port = start_store()
        (directory / "events").mkdir(exist_ok=True)
        self.directory = directory
        self.writer = EventWriter(directory / "events", "w0", lambda: 1)
        config = JobConfig(
            process="w0",
            world=1,
            steps=steps,
            global_batch=4,
            samples=64,
            seed=5,
            checkpoint_dir=directory / "checkpoints",
            checkpoint_every=every,
            checkpoint_keep=2,
        )
        (directory / "checkpoints").mkdir(exist_ok=True)
        self.page = MarkPage(progress_counters.create())
        self.job = Job(
            config, RankAgent(Channel(theirs), orphaned=lambda: None), self.page, self.writer
        )
        torch.manual_seed(1)
        self.model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.job.attach(self.model, optimizer)
        self.probe = Probe()
        self.job.probe = self.probe
        self.error: BaseException | None = None
        self._heard: list[Any] = []
        self.notes: list[CheckpointNote] = []
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self.hear(Ready)

    def _train(self) -> None:
        try:
            while self.job.running():
                with self.job.step() as step:
                    x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in step.samples])
                    step.backward(self.model(x).square().sum())
                    step.commit()
        except BaseException as error:
            self.error = error
            self.job.agent.channel.close()

    def tell(self, message: Message) -> None:
        assert self.channel.send(message)

    def join(self, generation: int, **more: Any) -> None:
        """Order it into the next generation."""
        self.tell(join(generation, store_port=self.store_port, timeout_s=LIMIT_S, **more))

    def hear(self, kind: type[Message]) -> Any:
        """The next message of that type; checkpoint notes in between go to ``notes``."""
        while True:
            if not self._heard:
                messages = self.channel.receive()
                if messages is None:
                    self.end()
                    raise AssertionError(f"the rank ended: {self.error!r}")
                self._heard.extend(messages)
            message = self._heard.pop(0)
            if isinstance(message, kind):
                return message
            assert isinstance(message, CheckpointNote), message
            self.notes.append(message)

    def end(self) -> None:
        """Wait for its thread."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.tell(Stop())
        self.end()
        assert self.error is None

    def events(self, *kinds: Kind) -> list[Event]:
        return [
            e for e in read_actor(self.directory / "events" / "w0.jsonl").events if e.kind in kinds
        ]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.channel.close()


def hold(
    rank: Rank, step: int, phase: str
) -> tuple[queue.SimpleQueue[None], queue.SimpleQueue[None]]:
    """Have the rank stop at a point: (told when there, told to go on)."""
    there: queue.SimpleQueue[None] = queue.SimpleQueue()
    go: queue.SimpleQueue[None] = queue.SimpleQueue()

    def act() -> None:
        there.put(None)
        go.get(timeout=LIMIT_S)
        rank.job.check()

    rank.probe.acts[step, phase] = act
    return there, go


def abort_while_held(rank: Rank, step: int, phase: str) -> Parked:
    """Abort generation 1 while the rank is held at a point of a step."""
    there, go = hold(rank, step, phase)
    rank.join(1)
    rank.hear(Joined)
    there.get(timeout=LIMIT_S)
    rank.tell(Abort(generation=1))
    until(lambda: rank.job.agent.heard.aborted_generation >= 1)
    go.put(None)
    return rank.hear(Parked)


def test_a_job_trains_to_its_end(rank: Rank) -> None:
    rank.join(1)
    assert rank.hear(Joined).step == 0
    assert rank.hear(Finished).step == 6
    rank.stop()
    assert [e.step for e in rank.events(Kind.STEP_COMMITTED)] == [1, 2, 3, 4, 5, 6]
    assert [c.step for c in newest_first(rank.directory / "checkpoints")] == [6, 3]
    assert [e.step for e in rank.events(Kind.STATE_DIGEST)] == [3, 6]
    assert rank.page.read().committed == 6
    assert rank.page.read().last_seq == rank.writer.last_seq


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "collective", "optimizer"])
def test_an_abort_anywhere_in_a_step_parks_with_the_state_of_the_last_one(
    rank: Rank, phase: str
) -> None:
    parked = abort_while_held(rank, 3, phase)
    assert (parked.generation, parked.step, parked.valid, parked.why) == (1, 2, True, "aborted")
    rank.join(2)
    assert rank.hear(Joined).step == 2
    assert rank.hear(Finished).step == 6
    rank.stop()
    assert [e.step for e in rank.events(Kind.STEP_COMMITTED)] == [1, 2, 3, 4, 5, 6]


def test_an_abort_before_a_checkpoint_parks_with_the_step_that_is_committed(rank: Rank) -> None:
    parked = abort_while_held(rank, 3, "checkpoint")
    assert (parked.step, parked.valid) == (3, True)


@pytest.mark.slow
def test_an_interrupted_step_is_redone_exactly(tmp_path: Path) -> None:
    digests = []
    for name, phase in (("whole", ""), ("broken", "backward")):
        (tmp_path / name).mkdir()
        rank = Rank(tmp_path / name)
        if phase:
            abort_while_held(rank, 3, phase)
            rank.join(2)
        else:
            rank.join(1)
        rank.hear(Joined)
        rank.hear(Finished)
        rank.stop()
        digests.append(rank.events(Kind.STATE_DIGEST)[-1].data)
    assert digests[0] == digests[1]


def test_an_abort_after_the_end_parks_and_the_job_can_go_on(rank: Rank) -> None:
    rank.join(1)
    rank.hear(Joined)
    rank.hear(Finished)
    rank.tell(Abort(generation=1))
    parked = rank.hear(Parked)
    assert (parked.step, parked.why) == (6, "aborted")
    rank.join(2)
    assert rank.hear(Joined).step == 6
    assert rank.hear(Finished).step == 6
    rank.stop()


def test_an_abort_of_an_earlier_generation_changes_nothing(rank: Rank) -> None:
    abort_while_held(rank, 2, "forward")
    there, go = hold(rank, 4, "forward")
    rank.join(2)
    rank.hear(Joined)
    there.get(timeout=LIMIT_S)
    rank.tell(Abort(generation=1))
    go.put(None)
    assert rank.hear(Finished).step == 6
    rank.stop()


def test_an_abort_of_a_generation_about_to_be_joined_is_obeyed(rank: Rank) -> None:
    rank.tell(Abort(generation=1))
    rank.join(1)
    parked = rank.hear(Parked)
    assert (parked.generation, parked.valid) == (1, False)
    rank.join(2)
    assert rank.hear(Joined).step == 0
    assert rank.hear(Finished).step == 6
    rank.stop()


def pause_in(rank: Rank, step: int) -> None:
    """Ask for a pause while it is in that step of its first generation."""
    there, go = hold(rank, step, "forward")
    rank.join(1)
    rank.hear(Joined)
    there.get(timeout=LIMIT_S)
    rank.tell(Pause())
    until(lambda: rank.job.agent.heard.pause_wanted)
    go.put(None)


def test_a_pause_parks_after_the_next_commit(rank: Rank) -> None:
    pause_in(rank, 2)
    parked = rank.hear(Parked)
    assert (parked.step, parked.why, parked.valid) == (2, "pause", True)
    rank.join(2)
    rank.hear(Joined)
    assert rank.hear(Finished).step == 6, "asked once, it pauses once"
    rank.stop()


def test_a_pause_in_the_last_step_does_not_keep_the_job_from_ending(rank: Rank) -> None:
    pause_in(rank, 6)
    assert rank.hear(Finished).step == 6
    rank.stop()


def test_non_finite_values_are_refused_before_they_touch_anything(rank: Rank) -> None:
    def poison() -> None:
        next(rank.model.parameters()).grad.view(-1)[0] = float("nan")

    rank.probe.acts[3, "collective"] = poison
    rank.join(1)
    rank.hear(Joined)
    parked = rank.hear(Parked)
    assert (parked.step, parked.why, parked.blamed, parked.valid) == (2, "nonfinite", [0], True)
    assert all(bool(torch.isfinite(p).all()) for p in rank.model.parameters())
    rank.join(2)
    rank.hear(Joined)
    assert rank.hear(Finished).step == 6
    rank.stop()


def test_a_state_that_is_not_finite_after_the_last_step_is_refused(rank: Rank) -> None:
    reached, go = hold(rank, 6, "optimizer")
    rank.join(1)
    reached.get(timeout=LIMIT_S)
    with torch.no_grad():
        rank.model.weight[0, 0] = math.nan
    go.put(None)
    rank.hear(Joined)
    parked = rank.hear(Parked)
    assert (parked.why, parked.step, parked.blamed) == ("nonfinite", 6, [0])
    (caught,) = rank.events(Kind.NONFINITE_CAUGHT)
    assert (caught.step, caught.data["what"], caught.data["blamed"]) == (6, "state", [0])
    rank.join(2, restore=True)  # the checkpoint of the last step was refused, too
    assert rank.hear(Joined).step == 3 and rank.hear(Finished).step == 6
    rank.stop()


def test_a_restore_takes_the_newest_good_checkpoint(rank: Rank) -> None:
    abort_while_held(rank, 5, "forward")
    rank.join(2, restore=True)
    joined = rank.hear(Joined)
    assert (joined.step, joined.checkpoint) == (3, "step-00000003")
    assert rank.hear(Finished).step == 6
    rank.stop()


def test_without_a_checkpoint_only_the_initial_state_will_do(rank: Rank) -> None:
    """A rank that has trained, or whose state is torn, must not pass for a fresh one."""
    abort_while_held(rank, 2, "forward")
    rank.join(2, restore=True)
    rank.end()
    assert isinstance(rank.error, NothingToRestore)
    assert "initial state" in str(rank.error)
    assert rank.hear(Unrecoverable).error == rank.error.message


def test_who_has_restored_a_checkpoint_is_not_fresh_any_more(rank: Rank, tmp_path: Path) -> None:
    """It has not trained yet, and its supervisor has heard of no checkpoint: an earlier job had
    saved it.
    """
    rank.join(1)
    rank.hear(Joined)
    rank.hear(Finished)
    rank.stop()
    (tmp_path / "later").mkdir()
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "later" / "checkpoints")
    later = Rank(tmp_path / "later", steps=12)
    there, go = hold(later, 7, "forward")
    later.join(1, restore=True)
    assert later.hear(Joined).step == 6
    there.get(timeout=LIMIT_S)
    later.tell(Abort(generation=1))
    until(lambda: later.job.agent.heard.aborted_generation >= 1)
    go.put(None)
    later.hear(Parked)
    shutil.rmtree(tmp_path / "later" / "checkpoints")
    later.join(2, restore=True)
    later.end()
    assert isinstance(later.error, NothingToRestore), "step 6 would pass for the beginning"
    later.channel.close()


def test_what_was_agreed_on_vouches_for_no_other_course(rank: Rank) -> None:
    rank.join(1)
    rank.hear(Joined)
    rank.hear(Finished)
    rank.tell(Agreed(step=6))
    rank.tell(Abort(generation=1))
    rank.hear(Parked)
    flip(rank.directory / "checkpoints" / "step-00000006" / "rank-0000.bin", 20)
    rank.join(2, restore=True)
    assert rank.hear(Joined).step == rank.job.agent.heard.agreed == 3
    rank.hear(Finished)
    rank.stop()


def test_without_a_checkpoint_a_fresh_rank_begins_anew(rank: Rank) -> None:
    rank.join(7, restore=True)
    joined = rank.hear(Joined)
    assert (joined.step, joined.checkpoint) == (0, None)
    assert rank.hear(Finished).step == 6
    rank.stop()


def test_a_full_disk_is_reported_and_training_goes_on(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainchaos.recovery.checkpoint.files.checkpoints.commit", full)
    rank.join(1)
    rank.hear(Joined)
    assert rank.hear(Finished).step == 6
    rank.stop()
    failed = rank.events(Kind.CHECKPOINT_FAILED)
    assert [e.step for e in failed] == [3, 6]
    assert "No space left" in failed[0].data["error"]


def test_a_rank_says_which_checkpoints_it_refuses(rank: Rank) -> None:
    abort_while_held(rank, 5, "forward")
    newest = newest_first(rank.directory / "checkpoints")[0]
    (newest.path / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint):
        verify(newest)
    rank.join(2, restore=True)
    rank.end()
    assert [e.data["checkpoint"] for e in rank.events(Kind.CHECKPOINT_REFUSED)] == ["step-00000003"]


@pytest.mark.slow
def test_a_compiled_model_is_compiled_in_one_graph(rank: Rank) -> None:
    rank.model = torch.compile(rank.model, backend="eager", fullgraph=True)  # type: ignore[assignment]
    rank.join(1)
    rank.hear(Joined)
    rank.hear(Finished)
    rank.stop()
    assert rank.job.state.step == rank.job.config.steps, (
        "every step went through the compiled graph"
    )
