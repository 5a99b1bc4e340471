"""Nodes whose agents somebody else starts, such as pods; implements ``Platform``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainchaos.harness.launch.nodes.platform import Platform, PlatformNeeds


class RemotePlatform(Platform):
    """Agents that connect by themselves, and are started anew by whoever started them. ``host``:
    the numeric address of this machine that they and their ranks reach.
    """

    def __init__(self, wanted: PlatformNeeds, *, host: str) -> None:
        self.host = host

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Nothing: somebody else does."""

    def replaceable(self, node: int) -> bool:
        """Whether this machine can start it anew: no."""
        return False

    def gone(self, node: int) -> str | None:
        """None: only its silence shows that."""
        return None

    def close(self) -> Sequence[str]:
        """Agents end when they are told to, or when their lease expires."""
        return ()
