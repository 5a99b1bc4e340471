"""Protocols of the targets that faults act on, one for each place a fault can act.

A launcher, or the agent in a rank, implements them; a fault has no other access to the system under
test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class ProcessTarget(Protocol):
    """Target of a PROCESS fault: one child process of this run."""

    def signal(self, signum: int) -> None:
        """Send a signal through the held pidfd; it is not an error if the process has ended."""

    def signal_later(self, signum: int, delay_s: float) -> None:
        """Send a signal ``delay_s`` seconds from now, if the process still lives then."""

    def state(self) -> str:
        """Its state in the kernel: R, S, D, T (stopped), Z, or X when it has ended."""

    def starve(self, spare_mib: int) -> None:
        """Cap memory at current usage plus ``spare_mib``, and make the process allocate more.
        Raises OSError or RuntimeError.
        """

    def release(self) -> None:
        """Remove its memory limit; safe to repeat."""

    def refuse_device(self) -> str:
        """Keep new processes off its device, and return the device's name. Raises RuntimeError if
        no other device is left.
        """

    def accept_device(self) -> None:
        """Let processes start on its device again; safe to repeat."""


class NodeTarget(Protocol):
    """Target of a NODE fault: all processes of one node, or of all nodes of one rack."""

    @property
    def nodes(self) -> Sequence[int]:
        """The node numbers."""

    @property
    def processes(self) -> Sequence[ProcessTarget]:
        """All processes running there now."""

    def kill(self) -> Mapping[str, Any]:
        """Kill the nodes, or all their processes where nodes are only names; returns how."""

    def pause(self) -> Mapping[str, Any]:
        """Freeze everything on the nodes; returns how."""

    def resume(self) -> None:
        """Undo ``pause``; safe to repeat, and when the nodes are gone."""

    def ration(self, cores: float) -> None:
        """Limit each node's processor time to ``cores``. Raises OSError or RuntimeError."""

    def unration(self) -> None:
        """Undo ``ration``; safe to repeat, and when the nodes are gone."""


@dataclass(frozen=True, kw_only=True)
class DiskTrouble:
    """Disk faults for a rank's saves. ``error``: name of the errno (None: no error);
    ``probability``: that an operation fails with it; ``delay_s``: added to each operation;
    ``operations``: the operations affected, of mkdir, write, fsync, rename and delete.
    """

    error: str | None = None
    probability: float = 1.0
    delay_s: float = 0.0
    operations: tuple[str, ...] = ("write", "fsync")


class CheckpointTarget(Protocol):
    """Target of a CHECKPOINT fault. ``seed``: of the occurrence."""

    seed: int

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""

    @property
    def older(self) -> Path | None:
        """The directory of the previous committed checkpoint; None: there is none."""

    def verify(self) -> str | None:
        """The verifier's complaint about the checkpoint; None: it is valid."""

    def break_next_save(self, stage: str, *, lose_unsynced: bool) -> None:
        """Kill the saving process during its next save: while writing ``data``, before the
        ``manifest``, before the ``rename``, or just after it (``renamed``). ``lose_unsynced``:
        unsynced data is lost as well.
        """


EMULATED = "emulated: "
"""Begins the text of an error that a real device would raise; what follows are the words of the
real one, which is all that a diagnosis is shown.
"""
BROKEN_DEVICE = "CUDA error: an illegal memory access was encountered"
NO_DEVICE_MEMORY = "CUDA out of memory"


class Body(Protocol):
    """A rank's own process and device, from inside. Calls are made on the training thread."""

    def segfault(self) -> None:
        """Crash with a segmentation fault."""

    def hold_interpreter(self, seconds: float) -> None:
        """Keep every thread of the process from running for ``seconds``."""

    def block(self, seconds: float) -> None:
        """Block only the training thread for ``seconds``, even if its generation is aborted."""

    def hang(self, how: str, seconds: float) -> str:
        """Block the training thread for ``seconds``: ``sleep`` in a lock, ``spin`` on the host, or
        wait for a device ``kernel``; returns the mechanism used.
        """

    def leave_out_collective(self) -> None:
        """Skip the next collective of this step, but wait for its result."""

    def break_device(self) -> str:
        """Make every later operation on the device raise; returns how (``cuda`` or
        ``emulated``).
        """

    def exhaust_device(self) -> None:
        """Allocate more memory than the device has. Raises OutOfMemoryError."""


class Signs(Protocol):
    """A rank's heartbeat as seen from outside, and the wall clock as seen from inside."""

    def drop_heartbeat(self, dropped: bool) -> None:
        """Hide the rank's progress marks from the supervisor, or show them again."""

    def set_wall_offset(self, seconds: float) -> None:
        """Shift the wall clock seen by the rank's code (0: no shift)."""

    def wall_ns(self) -> int:
        """Time of the shifted wall clock."""


class RankTarget(Protocol):
    """Target of a RANK fault: the training objects and the communication path of its own rank."""

    model: Any
    optimizer: Any
    rank: int
    step: int
    seed: int
    body: Body
    signs: Signs

    def set_slowdown(self, factor: float, mode: str = "duty-cycle") -> str:
        """Stretch this rank's compute phases to ``factor`` times their length (1: no change);
        returns the mechanism used.
        """

    def set_disk(self, trouble: DiskTrouble | None) -> None:
        """Install disk faults for this rank's saves (None: remove them)."""

    def tensors(self, surface: str) -> Mapping[str, Any]:
        """Stored tensors by name, for surface ``parameter``, ``gradient`` or ``optimizer_state``;
        writes to flat views change the originals.
        """

    def change_forward(self, surface: str, change: Callable[[Any], None]) -> None:
        """Let ``change`` overwrite elements of the flat ``input`` or ``activation`` of this step's
        forward pass.
        """

    def change_rng(self, change: Callable[[int], int]) -> None:
        """Change the seed of this step's random numbers."""

    def shift_samples(self, by: int) -> None:
        """In this step, compute the content of the samples ``by`` ids later."""

    def due_samples(self) -> Sequence[int]:
        """Samples of the injected step's global batch that are computed regardless of how many
        ranks remain; the same list on every rank.
        """

    def poison_sample(self, sample: int | None) -> None:
        """Make the loss NaN whenever this rank computes the sample (None: stop)."""

    def set_data_delay(self, seconds: float) -> None:
        """Delay the data phase of each step by ``seconds`` (0: stop), without heartbeats."""

    def next_step(self, action: Callable[[], None]) -> None:
        """Run ``action`` at this point of the next step, measured like the act itself."""

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        """Apply ``change`` to this rank's loss tensor of the current step before backward."""


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """Effect of a directed link on the bytes it carries; by default none.

    ``bytes_per_s``: maximum rate (None: unlimited); ``delay_s``: latency, plus or minus up to
    ``jitter_s``; ``loss``: share of segments that arrive one retransmission later (0 to 1);
    ``blocked``: nothing passes; ``down_s`` and ``up_s``: alternately blocked and open, starting
    blocked (0: off).
    """

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    blocked: bool = False
    down_s: float = 0.0
    up_s: float = 0.0

    def over(self, other: LinkShape) -> LinkShape:
        """This shape on top of another one. If both flap, this one's times apply."""
        rates = [rate for rate in (self.bytes_per_s, other.bytes_per_s) if rate is not None]
        flaps = self if self.down_s else other
        return LinkShape(
            bytes_per_s=min(rates, default=None),
            delay_s=self.delay_s + other.delay_s,
            jitter_s=self.jitter_s + other.jitter_s,
            loss=1 - (1 - self.loss) * (1 - other.loss),
            blocked=self.blocked or other.blocked,
            down_s=flaps.down_s,
            up_s=flaps.up_s,
        )


class LinkTarget(Protocol):
    """Target of a LINK fault: its directed links (source rank, destination rank)."""

    links: Sequence[tuple[int, int]]

    def shape(self, shape: LinkShape, *, both_ways: bool = False) -> str:
        """Shape the links, with ``both_ways`` also in the other direction; returns the means.
        Raises RuntimeError.
        """

    def pace(self, bytes_per_s: float | None, latency_s: float) -> None:
        """Limit the collectives of the links' source ranks by a token bucket in each (None: no
        limit).
        """

    def cut_control(self, cut: bool) -> None:
        """Cut the nodes of these ranks off from their coordinator too, or reconnect them. Raises
        RuntimeError.
        """


class StorageTarget(Protocol):
    """Target of a STORAGE fault: the size-limited file system that holds the arm's checkpoints."""

    path: Path

    def fill(self, *, shrink: bool) -> None:
        """Leave no free byte: by a ballast file, or with ``shrink`` by shrinking the file system to
        its current content.
        """

    def free(self) -> None:
        """Undo ``fill``; safe to call twice."""

    def set_read_only(self, read_only: bool) -> None:
        """Remount the file system read-only or writable."""

    def probe(self) -> str | None:
        """The error of a small write from outside, such as ``ENOSPC``; None: the write works."""


class StoreTarget(Protocol):
    """Target of a STORE fault: the process that holds the job's key-value store."""

    def signal(self, signum: int) -> None:
        """Send a signal through the held pidfd."""

    def set_latency(self, seconds: float) -> None:
        """Delay every request by ``seconds`` (0: no delay)."""

    def round_trip_s(self) -> float | None:
        """Measured time of one request by an independent client; None: no answer."""


class CoordinatorTarget(Protocol):
    """Target of a COORDINATOR fault: the process that supervises the job."""

    def kill(self, down_s: float) -> None:
        """Kill the coordinator with SIGKILL; its parent starts another one ``down_s`` seconds
        later.
        """


class HealthTarget(Protocol):
    """Target of a HEALTH fault: the health source that monitors read, for one rank's device or a
    node.
    """

    def report(self, *, what: str, code: int) -> None:
        """Make the source report an event, as a driver would."""

    def spoil(self) -> None:
        """Make every preflight of the place find it unfit."""
