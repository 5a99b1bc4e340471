"""What faults may touch: one protocol for each place a fault can act in.

A launcher (or the agent in a rank) implements these; a fault sees nothing else of the system under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class ProcessTarget(Protocol):
    """What a PROCESS fault may touch: one child of this run."""

    def signal(self, signum: int) -> None:
        """Send a signal through the held pidfd; a process already gone is no error."""

    def signal_later(self, signum: int, delay_s: float) -> None:
        """Send a signal ``delay_s`` seconds from now, if the process still lives then."""

    def state(self) -> str:
        """The kernel's word on it: R, S, D, T (stopped), Z, or X when gone."""


class NodeTarget(Protocol):
    """What a NODE fault may touch: all processes of one node."""

    node: int
    processes: Sequence[ProcessTarget]


class CheckpointTarget(Protocol):
    """What a CHECKPOINT fault may touch. ``seed``: the occurrence's own."""

    seed: int

    @property
    def path(self) -> Path:
        """Its directory."""

    @property
    def older(self) -> Path | None:
        """The directory of the committed checkpoint before it."""

    def verify(self) -> str | None:
        """The verifier's complaint about the checkpoint, or None when it is good."""


class RankTarget(Protocol):
    """What a RANK fault may touch: the training objects and the communication path of its own rank."""

    model: Any
    optimizer: Any
    rank: int
    step: int
    seed: int

    def set_link(self, bytes_per_s: float | None, latency_s: float) -> None:
        """Limit the communication path of this rank (None: unlimited)."""

    def set_slowdown(self, factor: float) -> None:
        """Stretch this rank's compute phases to ``factor`` times their length (1: not at all)."""

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        """Have ``change`` applied to this rank's loss tensor of the current step before backward."""


class LinkTarget(Protocol):
    """What a LINK fault may touch: the directed links (source rank, destination rank) it was aimed at."""

    links: Sequence[tuple[int, int]]

    def shape(
        self,
        *,
        bytes_per_s: float | None = None,
        delay_s: float = 0.0,
        loss: float = 0.0,
        blocked: bool = False,
    ) -> None:
        """Shape the links from now on. ``loss``: share of segments lost (0 to 1); ``blocked``: nothing passes."""

    def measure(self) -> Mapping[str, float]:
        """Measured by a probe through the same path: ``mbit_per_s`` and ``round_trip_s``."""


class StorageTarget(Protocol):
    """What a STORAGE fault may touch: the size-limited file system that holds the arm's checkpoints."""

    path: Path

    def fill(self) -> None:
        """Leave no free byte for others."""

    def free(self) -> None:
        """Undo ``fill``; safe to call twice."""

    def set_read_only(self, read_only: bool) -> None:
        """Remount."""

    def probe(self) -> str | None:
        """What the kernel says to a small write from outside, such as ``ENOSPC``; None when it works."""


class StoreTarget(Protocol):
    """What a STORE fault may touch: the process that holds the job's key-value store."""

    def signal(self, signum: int) -> None:
        """Send a signal through the held pidfd."""

    def set_latency(self, seconds: float) -> None:
        """Delay every request by so much (0: not at all)."""

    def round_trip_s(self) -> float | None:
        """Measured time of one request of an uninvolved client; None when nobody answers."""


class CoordinatorTarget(Protocol):
    """What a COORDINATOR fault may touch: the process that supervises the job."""

    def kill(self, down_s: float) -> None:
        """SIGKILL it; whoever started it starts another one ``down_s`` seconds later."""


class HealthTarget(Protocol):
    """What a HEALTH fault may touch: the health source that monitors read."""

    def report(self, *, node: int | None, rank: int | None, event: Mapping[str, Any]) -> None:
        """Have the source report an event, as a driver would."""
