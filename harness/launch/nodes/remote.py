"""Nodes whose agents somebody else starts, such as pods; implements ``Platform``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainchaos.harness.launch.launcher import LinkControl, MachineControl
from trainchaos.harness.launch.nodes.platform import PlatformNeeds


class RemotePlatform:
    """Agents that connect by themselves, and are started anew by whoever started them. ``host``:
    the numeric address of this machine that they and their ranks reach.
    """

    emulates = ""

    def __init__(self, wanted: PlatformNeeds, *, host: str) -> None:
        self.host = host

    @property
    def machines(self) -> MachineControl | None:
        """None: what starts the agents is not known here."""
        return None

    @property
    def links(self) -> LinkControl | None:
        """None."""
        return None

    def address(self, node: int) -> str:
        """ "": the agent's own address on its connection to this machine."""
        return ""

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Nothing: somebody else does."""

    def replaceable(self, node: int) -> bool:
        """Whether this machine can start it anew: no."""
        return False

    def gone(self, node: int) -> str | None:
        """None: only its silence shows that."""
        return None

    def drain(self, node: int, reason: str) -> str | None:
        return None

    def close(self) -> Sequence[str]:
        """Agents end when they are told to, or when their lease expires."""
        return ()
