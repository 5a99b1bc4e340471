"""Freezes a node with everything on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Occurrence, StandsStill
from trainchaos.chaos.fault.base import Fault, Landed, Need, Where
from trainchaos.chaos.fault.targets import NodeTarget
from trainchaos.chaos.fault.witness import effects_of


class NodeStop(Fault):
    """Nothing on a node runs any more while its connections stay open: a swapping machine, a
    stalled hypervisor. Real.

    A node that is a machine is paused together with its agent (``docker pause``, the kernel's
    freezer); where nodes are only names, all its processes get SIGSTOP. Without a ``duration`` the
    node hangs until the end of the run. Landed: the platform reports the node paused, or the kernel
    shows all its processes stopped.
    """

    where: ClassVar[Where] = Where.NODE
    simulated: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})
    may_last: ClassVar[bool] = True

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Stop the node."""
        return target.pause()

    def heal(self, target: NodeTarget) -> None:
        """Resume the node. If it was fenced meanwhile, its processes were killed."""
        target.resume()

    def follows(self) -> tuple[Consequence, ...]:
        """Its processes do nothing until healed."""
        return (StandsStill(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The node's state as reported by the platform or the kernel."""
        for effect in effects_of(occurrence, events):
            states = effect.get("nodes", {})
            if states and all(seen.get("state") == "paused" for seen in states.values()):
                return Landed(witness="platform: state of the machine", evidence={"nodes": states})
            if effect.get("os_state") in ("T", "t"):
                return Landed(
                    witness="kernel: process state", evidence={"os_state": effect["os_state"]}
                )
        return None
