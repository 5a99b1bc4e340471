"""A step whose last collective ended on one simulated rank only: the other finishes it late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.orders import join
from tests.support.search.simulate import rank_config
from trainchaos.chaos.events.log import Event, Kind, read_actor
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.rank.rank import SimRank
from trainchaos.harness.sim.world.clock import NS_PER_S, Clock
from trainchaos.harness.sim.world.group import Group
from trainchaos.harness.sim.world.process import Process
from trainchaos.harness.sim.world.settings import MS
from trainchaos.recovery.transport.wire import (
    Abort,
    Joined,
    Message,
    Parked,
    PauseRequest,
    Ready,
)

STEPS = 8


class Pair:
    """Two ranks, each with one shard of the model; the test plays their supervisor."""

    def __init__(self, directory: Path) -> None:
        config = rank_config(directory, world=2, steps=STEPS)
        self._events = config.events
        self._clock = Clock()
        self.said: list[list[Any]] = [[], []]
        self._groups: dict[int, Group] = {}
        self.processes = [
            Process(name=f"w{rank}", role="worker", pid=rank, clock=self._clock, seed=str(rank))
            for rank in (0, 1)
        ]
        self.ranks = [
            SimRank(
                config,
                process,
                behaviour=Behaviour(),
                group_of=self._group,
                spare_of={}.__getitem__,
                send=said.append,
            )
            for process, said in zip(self.processes, self.said, strict=True)
        ]
        for process, rank in zip(self.processes, self.ranks, strict=True):
            process.start(rank.body("warm"))

    def _group(self, generation: int, size: int) -> Group:
        """In the first generation a collective ends on one rank long before it does on the
        other.
        """
        spread_ns = 20 * MS if generation == 1 else 0.0
        return self._groups.setdefault(
            generation, Group(generation=generation, size=size, form_ns=0.0, spread_ns=spread_ns)
        )

    def tell(self, message: Message) -> None:
        """Both, at once."""
        for process in self.processes:
            process.deliver(message, 0.0)

    def join(self, generation: int, **more: Any) -> None:
        """Order both into a generation."""
        for rank, process in enumerate(self.processes):
            process.deliver(join(generation, rank=rank, world=2, shards=2, **more), 0.0)

    def play(self) -> Iterator[None]:
        """One thing that happens after the other."""
        until = self._clock.now_ns + 100 * NS_PER_S
        while self._clock.advance(until):
            yield

    def hear(self, kind: type[Message]) -> list[Any]:
        """The next message of that type, from both."""
        for _ in self.play():
            found = [
                [message for message in said if isinstance(message, kind)] for said in self.said
            ]
            if all(found):
                for said in self.said:
                    said.clear()
                return [messages[0] for messages in found]
        raise AssertionError(f"they never said {kind.__name__}: {self.said}")

    def events(self, rank: int, kind: Kind) -> list[Event]:
        """Of one rank."""
        path = next(self._events.glob(f"w{rank}*"))
        return [event for event in read_actor(path).events if event.kind is kind]


@pytest.mark.parametrize(("step", "asked"), [(2, False), (2, True), (3, False)])
def test_a_step_that_is_finished_late_is_written_down_as_one_in_time(
    step: int, asked: bool, tmp_path: Path
) -> None:
    """The third is one at which all save: whoever is late with it has its digest in its log, and
    saves nothing. That a save was asked for is known only to those who were told in time.
    """
    pair = Pair(tmp_path)
    pair.hear(Ready)
    pair.join(1)
    pair.hear(Joined)
    for _ in pair.play():
        steps = [rank.state.step for rank in pair.ranks]
        if asked and min(steps) == step - 1:
            pair.tell(PauseRequest(save=True))
            asked = False
        if max(steps) == step:
            break
    assert sorted(steps) == [step - 1, step], (
        "the other has not heard yet that both hold their part"
    )
    late = steps.index(step - 1)
    pair.tell(Abort(generation=1))
    parked = pair.hear(Parked)
    assert [parked[late].step, parked[late].pending] == [step - 1, step]
    pair.join(2, finish=step)
    assert [joined.step for joined in pair.hear(Joined)] == [step, step]
    mine, other = (
        [e for e in pair.events(rank, Kind.STEP_COMMITTED) if e.step == step]
        for rank in (late, 1 - late)
    )
    assert len(mine) == len(other) == 1
    assert (mine[0].generation, other[0].generation) == (2, 1)
    same = ("world", "samples", "loss", "lr", "grad_norm", "optimizer_step", "scheduler_step")
    assert [mine[0].data[key] for key in same] == [other[0].data[key] for key in same]
    saves = step % 3 == 0
    assert [event.step for event in pair.events(late, Kind.STATE_DIGEST)] == [step] * saves
    assert pair.ranks[late].mark.read().committed == step
