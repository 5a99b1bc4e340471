"""Which checkpoints in memory a log says are still held."""

from __future__ import annotations

import pytest

from tests.support.logs import Script
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.record.kept_in_memory import held_in_memory
from trainchaos.harness.judge.record.lineage import history_of


def saved(steps: list[int], *, shards: int = 1, torn: int = 0) -> dict[str, int]:
    """What is held after checkpoints of these steps. ``torn``: a step of which the last shard is
    not acknowledged.
    """
    script = Script("hot-spare", spares=1)
    script.spawn("k0", role="keeper")
    for step in steps:
        for shard in range(shards - (step == torn)):
            script.write(
                "w0",
                Kind.CHECKPOINT_COMMITTED,
                step=step,
                checkpoint=f"memory-step-{step}",
                bytes=1,
                seconds=0.0,
                place="memory",
                shard=shard,
                shards=shards,
                copies=[],
            )
    until = script.now
    script.finish()
    history = history_of(script.log())
    return held_in_memory(history, since_ns=until, until_ns=until, before=2)


@pytest.mark.parametrize("shards", [1, 2])
def test_an_older_one_makes_room_for_two_complete_ones(shards: int) -> None:
    assert sorted(saved([3], shards=shards).values()) == [3]
    assert sorted(saved([3, 6], shards=shards).values()) == [3, 6]
    assert sorted(saved([3, 6, 9], shards=shards).values()) == [6, 9]


def test_one_that_is_not_complete_takes_no_room() -> None:
    assert sorted(saved([3, 6, 9], shards=2, torn=9).values()) == [3, 6]
