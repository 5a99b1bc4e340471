"""A group that is abandoned in the middle of an operation: it goes once the operation has ended, by
itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from datetime import timedelta

import pytest
import torch

from tests.support.open_files import open_files
from tests.support.ranks import Self, ranks
from tests.support.running import LIMIT_S, until
from trainchaos.recovery.collectives import group as module
from trainchaos.recovery.collectives.group import ABANDONED, LEAVING, Group
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.storelink import StoreLink


class Stuck:
    """An operation whose end the test decides on."""

    ended = False

    def wait(self, *_: object) -> bool:
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.ended


class Made:
    """Stands for torch's process group."""


def waiting() -> int:
    return sum(thread.name in (ABANDONED, LEAVING) for thread in threading.enumerate())


def test_it_is_held_until_its_operation_has_ended_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ABANDONED_LOOK_S", 0.01)

    def lost() -> None:
        raise GenerationLost("aborted")

    group = Group(
        generation=1, rank=0, world=2, store_port=1, backend="gloo", timeout_s=LIMIT_S, check=lost
    )
    made, work = Made(), Stuck()
    group._made.append(made)
    held = weakref.ref(made)
    del made
    with pytest.raises(GenerationLost):
        group.wait(work)  # type: ignore[arg-type]
    group.leave()
    assert group.abandoned
    del group
    threading.Event().wait(0.1)
    assert held() is not None, "destroying it would join the thread that waits"
    work.ended = True
    until(lambda: held() is None and waiting() == 0, LIMIT_S)


def abandon(me: Self) -> list[tuple[int, int]]:
    """Descriptors and threads after each of two abandoned groups, once its operation has
    timed out.
    """
    module.shut_down = lambda wanted, **_: 0  # as if the wake-up were lost every time
    module.ABANDONED_LOOK_S = 0.05
    link, peers, held = StoreLink(), [], []
    for generation in (1, 2):
        me.say("about to form")
        me.hear()
        group = me.group(generation, link=link)
        group._patience = timedelta(seconds=2.0)
        group.form()
        if me.rank:
            peers.append(group)  # it never takes part, and keeps its connections
            continue
        me.settle()
        work = group.everyone.start_all_reduce(torch.ones(1000))
        me.aborted = generation
        try:
            group.everyone.wait(work)
        except GenerationLost:
            assert group.abandoned
        me.leave()
        del work, group
        me._group = None
        until(lambda: waiting() == 0, LIMIT_S)
        held.append((open_files(), len(os.listdir("/proc/self/task"))))
    if me.rank:
        me.hear()
    return held


@pytest.mark.real
def test_its_connections_and_threads_go_with_it() -> None:
    with ranks(abandon, 2) as started:
        for _ in range(2):
            for rank in started:
                rank.said()
            for rank in started:
                rank.tell("form")
        first, second = started[0].result()
        assert second == first
        started[1].tell("go")
        started[1].result()
