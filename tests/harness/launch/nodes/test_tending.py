"""The agents of a session that plays no arm hear of their coordinator, and it of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.harness.launch.nodes.test_nodes_session import cell, until
from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.nodes.cluster import Tending, nodes_session
from trainchaos.harness.launch.nodes.loopback import LoopbackPlatform
from trainchaos.recovery.nodes.coordinator.node_state import ClockMeasured, NodeJoined

__all__ = ["cell"]  # a fixture
LIMIT_S = 60.0


def test_turns_are_made_between_arms_only_and_all_is_handed_over() -> None:
    turned = threading.Semaphore(0)
    made: list[int] = []

    def turn(timeout_s: float) -> list[int]:
        made.append(len(made))
        turned.release()
        return made[-1:]

    tending = Tending(turn)
    assert tending.end() == []
    tending.begin()
    tending.begin()  # it goes on
    for _ in range(3):
        assert turned.acquire(timeout=LIMIT_S)
    found = tending.end()
    assert found == made and len(found) >= 3
    assert not any(thread.name == "tend-nodes" for thread in threading.enumerate())
    assert tending.end() == [], "it was handed over"


def test_an_error_is_that_of_the_next_arm_and_the_one_after_has_none() -> None:
    failed = threading.Event()

    def turn(timeout_s: float) -> list[int]:
        failed.set()
        raise InfrastructureError("no more descriptors")

    tending = Tending(turn)
    tending.begin()
    assert failed.wait(LIMIT_S)
    with pytest.raises(InfrastructureError, match="no more descriptors"):
        tending.end()
    assert tending.end() == []


@pytest.mark.long
@pytest.mark.real
def test_agents_are_admitted_and_asked_while_other_cells_are_played(
    tmp_path: Path, cell: Cell
) -> None:
    """They would take the coordinator for lost, and end, after their lease."""
    with nodes_session([cell], RunDirectory(tmp_path), LoopbackPlatform) as session:
        happened = session._tending._happened
        until(lambda: {one.node for one in [*happened] if isinstance(one, NodeJoined)} == {0, 1})
        until(lambda: {one.node for one in [*happened] if isinstance(one, ClockMeasured)} == {0, 1})
