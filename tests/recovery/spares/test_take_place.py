"""A spare is told which part of the model to follow: a real job in a process of its own, the test
plays the supervisor.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.ranks import Self, ranks
from tests.support.running import LIMIT_S, until
from trainchaos.chaos.events.log import EventWriter
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.rank.generation import Generations
from trainchaos.recovery.rank.job import Job
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import (
    Follow,
    Following,
    Inquiry,
    Message,
    Ready,
    Status,
    Stop,
)

pytestmark = pytest.mark.real


class Spare:
    """Of a job of two replicas of two shards, on a thread of its own."""

    def __init__(self, folder: Path, *, tensor: bool = False) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_S)
        self.channel = Channel(ours)
        self.heard: list[Any] = []
        config = JobConfig(
            process="s4",
            world=4,
            shards=2,
            mesh=Mesh(tensor=2) if tensor else Mesh(shard=2),
            steps=5,
            global_batch=4,
            samples=8,
            seed=5,
            sync="live",
            checkpoint_dir=None,
            checkpoint_every=0,
            checkpoint_keep=1,
        )
        writer = EventWriter(folder, "s4", lambda: 1)
        agent = RankAgent(Channel(theirs), orphaned=lambda: None)
        self.job = Job(config, agent, MarkPage(progress_counters.create()), writer)
        torch.manual_seed(1)
        model = nn.Linear(3, 4)
        self.cuts: list[tuple[int, int, int]] = []
        self.job.attach(
            model,
            lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
            parallelize=self._cut if tensor else None,
        )
        self.error = ""
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _cut(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.cuts.append((self.job.rank, self.job.world, mesh.get_local_rank("tensor")))
        return model

    def _train(self) -> None:
        try:
            while self.job.running():
                raise AssertionError("it has no generation to train in")
        except Exception as error:
            self.error = str(error)

    def tell(self, message: Message) -> None:
        assert self.channel.send(message)

    def hear(self, kind: type[Message]) -> Any:
        """The next message, of that type."""
        while not self.heard:
            self.heard += self.channel.receive() or [None]
        message = self.heard.pop(0)
        assert isinstance(message, kind), message
        return message

    def ask(self) -> Status:
        self.tell(Inquiry(number=1))
        answer: Status = self.hear(Status)
        return answer


def follow(me: Self) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        spare = Spare(Path(folder))
        assert spare.hear(Ready).live == "", "it holds no part to be fed with"
        assert (spare.ask().shard, spare.ask().live) == (-1, "")
        spare.tell(Follow(shard=1))
        first = spare.hear(Following)
        status, rows = spare.ask(), local(spare.job.state.trained["weight"]).shape[0]
        spare.tell(Follow(shard=1))
        again = spare.hear(Following)
        spare.tell(Stop())
        spare.thread.join(LIMIT_S)
        return (
            first == again,
            first.shard,
            first.live == status.live != "",
            status,
            rows,
            spare.error,
        )


def test_a_spare_holds_the_part_that_it_is_told_and_says_where_it_is_fed() -> None:
    with ranks(follow, 1) as (one,):
        same, shard, listens, status, rows, error = one.result()
    assert (same, shard, listens, rows, error) == (True, 1, True, 2, "")
    assert (status.place, status.shard, status.step, status.valid) == ("waiting", 1, 0, False)


def follow_a_cell(me: Self) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        spare = Spare(Path(folder), tensor=True)
        spare.hear(Ready)
        spare.tell(Follow(shard=1))
        spare.hear(Following)
        spare.tell(Stop())
        spare.thread.join(LIMIT_S)
        return spare.cuts, spare.error


def test_a_script_that_cuts_its_model_up_sees_the_rank_whose_part_it_is_to_be() -> None:
    with ranks(follow_a_cell, 1) as (one,):
        assert one.result() == ([(1, 4, 1)], "")


def follow_another(me: Self) -> str:
    with tempfile.TemporaryDirectory() as folder:
        spare = Spare(Path(folder))
        spare.hear(Ready)
        spare.tell(Follow(shard=1))
        spare.hear(Following)
        spare.tell(Follow(shard=0))
        until(lambda: bool(spare.error))
        return spare.error


def test_a_part_is_kept_for_life() -> None:
    with ranks(follow_another, 1) as (one,):
        assert one.result() == "this process holds shard 1, and is to be shard 0"


def test_a_rank_that_parks_sends_what_waits_and_feeds_nobody_any_more() -> None:
    job = MagicMock()
    Generations(job, MagicMock()).park("aborted")
    job.live.feeds.leaves.assert_called_once_with()
