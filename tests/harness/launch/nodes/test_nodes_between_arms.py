"""Nodes are kept from arm to arm: what one did to them is over for the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.launch.nodes.test_nodes_session import SLEEPS, platform, until, wanted
from trainchaos.harness.launch.nodes.cluster import NodesSession
from trainchaos.harness.launch.nodes.loopback import LoopbackPlatform

__all__ = ["platform", "wanted"]  # fixtures
pytestmark = pytest.mark.real


@pytest.mark.long
def test_a_node_that_an_arm_left_standing_still_goes_on_for_the_next(
    platform: LoopbackPlatform,
) -> None:
    session: Any = SimpleNamespace(platform=platform, _played=False)
    platform.start(0, SLEEPS, {})
    platform.machines.pause(0)
    until(lambda: platform.machines.seen(0) == {"state": "paused"})
    # before the first arm nobody did anything, and nobody is asked
    NodesSession._resume(session, range(2))
    assert platform.machines.seen(0) == {"state": "paused"}
    NodesSession._resume(session, range(2))  # node 1 was never started
    until(lambda: platform.machines.seen(0) == {"state": "running"})
