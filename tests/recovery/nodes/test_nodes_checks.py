"""Agents find out whether places of their nodes are fit, when a coordinator asks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters.nodes import Yard
from trainchaos.harness.host.processes import with_descendants
from trainchaos.recovery.health.checks import PROGRAM
from trainchaos.recovery.nodes.coordinator.node_state import NodeChecked, NodeGone
from trainchaos.recovery.process.processes import start_time

pytestmark = pytest.mark.real


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """One node, with an arm begun."""
    yard = Yard(tmp_path)
    try:
        yard.start(0)
        yard.fleet.begin("arm", tmp_path)
        yield yard
    finally:
        yard.close()


def checks(yard: Yard) -> list[int]:
    """The processes of the agent that check, by their command lines."""
    agent = yard.agents[0].process.pid
    found = []
    for pid, _ in with_descendants([(agent, start_time(agent))]):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [pid] if PROGRAM.encode() in words else []
    return found


@pytest.mark.long
def test_an_agent_checks_a_place_while_its_processes_go_on(yard: Yard) -> None:
    yard.fleet.check(0, "cpu:1")
    yard.spawn("w0", 0)
    (said,) = [one for one in yard.until_kind(NodeChecked) if isinstance(one, NodeChecked)]
    assert (said.node, said.device, said.fit, said.said) == (0, "cpu:1", True, "")
    assert yard.fleet.alive("w0") and not checks(yard)


def test_a_check_ends_with_its_arm_and_with_its_agent(yard: Yard) -> None:
    yard.fleet.check(0, "cpu")
    yard.until(lambda _: bool(checks(yard)))
    held = [os.pidfd_open(pid) for pid in checks(yard)]
    yard.fleet.begin("next", yard.folder)
    assert not checks(yard)
    yard.fleet.check(0, "cpu")
    yard.until(lambda _: bool(checks(yard)))
    yard.fleet.close()
    assert yard.agents[0].wait() == 0 and not checks(yard)
    for fd in held:
        os.close(fd)


def test_what_is_no_device_is_not_sent_and_who_is_not_there_not_asked(yard: Yard) -> None:
    with pytest.raises(ValueError, match="device"):
        yard.fleet.check(0, "--seconds")
    with pytest.raises(NodeGone):
        yard.fleet.check(7, "cpu")
