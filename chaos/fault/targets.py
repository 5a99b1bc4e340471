"""What faults may touch: one protocol for each place a fault can act in.

A launcher (or the agent in a rank) implements these; a fault sees nothing else of the system under
test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

    def starve(self, spare_mib: int) -> None:
        """Let it have so much more memory than it has, and have it take more. Raises OSError or
        RuntimeError.
        """

    def release(self) -> None:
        """Take its limits away; safe to repeat."""

    def refuse_device(self) -> str:
        """Keep new processes off its device, and name the device. Raises RuntimeError where no
        other is left.
        """

    def accept_device(self) -> None:
        """Let processes start there again; safe to repeat."""


class NodeTarget(Protocol):
    """What a NODE fault may touch: all processes of one node, or of all nodes of one rack."""

    @property
    def nodes(self) -> Sequence[int]:
        """Their numbers."""

    @property
    def processes(self) -> Sequence[ProcessTarget]:
        """Everything that lives there now."""

    def kill(self) -> Mapping[str, Any]:
        """End the nodes, or all that lives there where they are only names; says how."""

    def pause(self) -> Mapping[str, Any]:
        """Let nothing there run; says how."""

    def resume(self) -> None:
        """Undo ``pause``; safe to repeat, and when they are gone."""

    def ration(self, cores: float) -> None:
        """Let each node have so much processor time. Raises OSError or RuntimeError."""

    def unration(self) -> None:
        """Undo ``ration``; safe to repeat, and when they are gone."""


@dataclass(frozen=True, kw_only=True)
class DiskTrouble:
    """What is wrong with the disk of a rank's saves. ``error``: name of the errno (None: none),
    ``probability``: of each operation to fail with it; ``delay_s``: added to each; ``operations``:
    which, of mkdir, write, fsync, rename and delete.
    """

    error: str | None = None
    probability: float = 1.0
    delay_s: float = 0.0
    operations: tuple[str, ...] = ("write", "fsync")


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

    def break_next_save(self, stage: str, *, lose_unsynced: bool) -> None:
        """Have whoever saves die in its next save: in the middle of the data (``data``), before the
        ``manifest``, before the ``rename``, or when just ``renamed``. What is not synced by then is
        lost, if so wanted.
        """


class Body(Protocol):
    """The process that a rank is, and its device, from inside. Calls are made on the training
    thread.
    """

    def segfault(self) -> None:
        """Die of a segmentation fault."""

    def hold_interpreter(self, seconds: float) -> None:
        """Let no thread of the process run for so long."""

    def block(self, seconds: float) -> None:
        """Keep the training thread, and it alone, from going on for so long, whatever it
        is told.
        """

    def hang(self, how: str, seconds: float) -> str:
        """Keep the training thread from going on for so long: ``sleep`` in a lock, ``spin`` on the
        host, or ``kernel``, waiting for one of a device; returns how that is done.
        """

    def leave_out_collective(self) -> None:
        """Do not enter the next collective of this step, but wait for its result."""

    def break_device(self) -> str:
        """From now on every operation on the device raises; returns how (``cuda`` or
        ``emulated``).
        """

    def exhaust_device(self) -> None:
        """Ask the device for more memory than it has. Raises OutOfMemoryError."""


class Signs(Protocol):
    """What the outside sees of a rank, and what the rank sees of the outside."""

    def drop_heartbeat(self, dropped: bool) -> None:
        """Let the supervisor see no more of the rank's progress marks, or see them again."""

    def set_wall_offset(self, seconds: float) -> None:
        """Shift the wall clock that the rank's code sees (0: not at all)."""

    def wall_ns(self) -> int:
        """That clock's time."""


class RankTarget(Protocol):
    """What a RANK fault may touch: the training objects and the communication path of its
    own rank.
    """

    model: Any
    optimizer: Any
    rank: int
    step: int
    seed: int
    body: Body
    signs: Signs

    def set_slowdown(self, factor: float, mode: str = "duty-cycle") -> str:
        """Stretch this rank's compute phases to ``factor`` times their length (1: not at all); says
        how it is done.
        """

    def set_disk(self, trouble: DiskTrouble | None) -> None:
        """Have the disk make trouble for this rank's saves (None: no more)."""

    def tensors(self, surface: str) -> Mapping[str, Any]:
        """What is stored, by name: ``parameter``, ``gradient`` or ``optimizer_state``; flat views
        write through.
        """

    def change_forward(self, surface: str, change: Callable[[Any], None]) -> None:
        """Have ``change`` overwrite elements of the flat ``input`` or ``activation`` of this step's
        forward pass.
        """

    def change_rng(self, change: Callable[[int], int]) -> None:
        """Seed this step's random numbers otherwise."""

    def shift_samples(self, by: int) -> None:
        """Have this step compute the content of samples so many further on."""

    def due_samples(self) -> Sequence[int]:
        """Of the global batch of the step of the injection, the samples that are computed however
        many ranks are left, the same on every rank.
        """

    def poison_sample(self, sample: int | None) -> None:
        """Have the loss of a sample be NaN whenever this rank computes it (None: of no sample any
        more).
        """

    def set_data_delay(self, seconds: float) -> None:
        """Have the data phase of each step take so much longer (0: no more), without a sign of
        life.
        """

    def next_step(self, action: Callable[[], None]) -> None:
        """Have something more done at this point of the next step, measured as the act
        itself is.
        """

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        """Have ``change`` applied to this rank's loss tensor of the current step before
        backward.
        """


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """What a directed link does to bytes; the default: nothing.

    ``bytes_per_s``: most that pass (None: unlimited); ``delay_s``, with up to ``jitter_s`` more or
    less; ``loss``: share of segments that come a retransmission later (0 to 1); ``blocked``:
    nothing passes; ``down_s`` and ``up_s``: it is blocked and open in turn, beginning blocked (0:
    not).
    """

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    blocked: bool = False
    down_s: float = 0.0
    up_s: float = 0.0

    def over(self, other: LinkShape) -> LinkShape:
        """What a link does that is shaped so on top of another shape. Of two that come and go it is
        this one.
        """
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
    """What a LINK fault may touch: the directed links (source rank, destination rank) it was aimed
    at.
    """

    links: Sequence[tuple[int, int]]

    def shape(self, shape: LinkShape, *, both_ways: bool = False) -> str:
        """Shape the links from now on, and those back too if ``both_ways``; by what means. Raises
        RuntimeError.
        """

    def pace(self, bytes_per_s: float | None, latency_s: float) -> None:
        """Limit the collectives of the ranks at the sources of the links, by a token bucket in each
        (None: no more).
        """

    def cut_control(self, cut: bool) -> None:
        """Cut the nodes of these ranks off from their coordinator too, or no more. Raises
        RuntimeError.
        """


class StorageTarget(Protocol):
    """What a STORAGE fault may touch: the size-limited file system that holds the arm's
    checkpoints.
    """

    path: Path

    def fill(self, *, shrink: bool) -> None:
        """Leave no free byte for others: by a file, or by making the file system as small as what
        it holds.
        """

    def free(self) -> None:
        """Undo ``fill``; safe to call twice."""

    def set_read_only(self, read_only: bool) -> None:
        """Remount."""

    def probe(self) -> str | None:
        """What the kernel says to a small write from outside, such as ``ENOSPC``; None when it
        works.
        """


class StoreTarget(Protocol):
    """What a STORE fault may touch: the process that holds the job's key-value store."""

    def signal(self, signum: int) -> None:
        """Send a signal through the held pidfd."""

    def set_latency(self, seconds: float) -> None:
        """Delay every request by so much (0: not at all)."""

    def round_trip_s(self) -> float | None:
        """Measured time of one request of an uninvolved client; None without an answer."""


class CoordinatorTarget(Protocol):
    """What a COORDINATOR fault may touch: the process that supervises the job."""

    def kill(self, down_s: float) -> None:
        """SIGKILL it; its starter starts another one ``down_s`` seconds later."""


class HealthTarget(Protocol):
    """What a HEALTH fault may touch: the health source that monitors read, on behalf of one rank's
    device or a node.
    """

    def report(self, *, what: str, code: int) -> None:
        """Have the source report an event, as a driver would."""
