"""A node hangs with everything on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, StandsStill
from chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from chaos.fault.targets import NodeTarget
from chaos.fault.witness import effects_of


class NodeStop(Fault):
    """Nothing on a node runs any more, its connections stay open: a machine that swaps, a
    hypervisor that stalls. Real.

    The machine is paused where there is one (``docker pause``, the kernel's freezer), its agent
    with it; where nodes are only names, all its processes get SIGSTOP. Without a ``duration`` it
    hangs until the end of the run. Landed: the platform says that it is paused, or the kernel shows
    all its processes stopped.
    """

    where: ClassVar[Where] = Where.NODE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})
    may_last: ClassVar[bool] = True

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Stop it."""
        return target.pause()

    def heal(self, target: NodeTarget) -> None:
        """Let it go on; whoever fenced it meanwhile has killed it."""
        target.resume()

    def follows(self) -> tuple[Consequence, ...]:
        """Nothing, until it is healed."""
        return (StandsStill(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The platform's word, or the kernel's."""
        for effect in effects_of(occurrence, events):
            states = effect.get("nodes", {})
            if states and all(seen.get("state") == "paused" for seen in states.values()):
                return Landed(witness="platform: state of the machine", evidence={"nodes": states})
            if effect.get("os_state") in ("T", "t"):
                return Landed(
                    witness="kernel: process state", evidence={"os_state": effect["os_state"]}
                )
        return None
