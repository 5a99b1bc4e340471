"""Base class of faults: a fault acts on a target, and decides from independent evidence whether it
landed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Occurrence


class Where(StrEnum):
    """Where a fault acts; this decides which protocol of ``chaos.fault.targets`` its target
    implements.
    """

    PROCESS = "process"  # the supervisor, on a process from outside
    NODE = "node"  # the supervisor, on all processes of a node
    RANK = "rank"  # an agent inside the rank, at a step and phase boundary
    CHECKPOINT = "checkpoint"  # the supervisor, on files of the run's own checkpoints
    # connections between ranks: through a proxy, or by the kernel between nodes
    LINK = "link"
    STORAGE = "storage"  # the file system that holds the checkpoints
    STORE = "store"  # the process that holds the key-value store
    COORDINATOR = "coordinator"  # the process that supervises the job
    HEALTH = "health"  # the health source that monitors read


class Fidelity(StrEnum):
    """Whether the real mechanism acts, or an imitation of its effect (reports say which)."""

    REAL = "real"
    EMULATED = "emulated"


class Need(StrEnum):
    """What a launcher must be able to do for some faults."""

    MOUNT = "mount"  # checkpoints on a separate, size-limited file system
    CGROUP = "cgroup"  # a rank can limit its own processor time
    MEMORY = (
        # a memory limit on a process, or on its node, that the kernel enforces by killing
        "memory"
    )
    QUOTA = "quota"  # a limit on the processor time of a node's processes
    # connections between ranks can be shaped: by a proxy, or by the kernel between nodes
    LINKS = "links"
    STORE_PROCESS = "store-process"  # the key-value store is a process of its own
    # the supervisor can be lost while the ranks live on
    COORDINATOR_PROCESS = "coordinator-process"
    NODES = "nodes"  # ranks are grouped into nodes that can be lost as a whole
    # a node is a machine or container, which can be cut off from its coordinator too
    MACHINES = "machines"


@dataclass(frozen=True, kw_only=True)
class Landed:
    """Independent evidence that a fault took effect."""

    witness: str
    evidence: Mapping[str, Any]


class Fault(BaseModel):
    """Base of a fault kind; its fields are the YAML ``params``. Class attributes say how it acts.

    ``fidelity``: on launchers that run real processes; ``on_cuda``: where CUDA devices make a
    difference. ``simulated``: it acts only through what ``chaos.fault.targets`` offers, which a
    simulator has too, and was tried there. ``needs``: what the launcher must offer; ``may_need``:
    what it must offer with some parameters. ``lasting``: needs a duration and a heal; ``may_last``:
    accepts a duration; other faults are over once they have acted. ``harmless``: leaves nothing to
    recover from. ``phases``: the phases at which it can act (empty: all). ``relentless``: fires
    again at every attempt, whatever ``retrigger`` says. ``role``: the only role it hits, whatever
    the target says. ``whole_racks``: a NODE fault that hits whole racks; ``separates``: a LINK or
    NODE fault that cuts its targets off from the rest. ``everywhere``: one occurrence acts in all
    ranks, including those that join later, until the run ends. ``corrupts``: training continues
    with wrong values; ``changes_state``: it can leave a rank with a state that differs from the
    others' without a non-finite value. ``beside_steps``: it cannot keep ranks from
    finishing a step: it acts on reports, on clocks, or on checkpoints, whose saves fail at once.
    ``on_saves``: a RANK fault on checkpoint saves, which rank 0 alone makes unless they are
    sharded. ``by_script``: a RANK fault that a script can do itself when ``beacon.point`` answers
    with this word. ``seems_still``: the target keeps working
    but appears hung, so another rank, or none, may be declared hung. ``gives_notice``: it tells the
    target to end, which a command may do well, with exit code 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: ClassVar[Where]
    simulated: ClassVar[bool] = False
    fidelity: ClassVar[Fidelity] = Fidelity.REAL
    on_cuda: ClassVar[Fidelity | None] = None
    needs: ClassVar[frozenset[Need]] = frozenset()
    may_need: ClassVar[frozenset[Need]] = frozenset()
    lasting: ClassVar[bool] = False
    may_last: ClassVar[bool] = False
    harmless: ClassVar[bool] = False
    phases: ClassVar[tuple[str, ...]] = ()
    relentless: ClassVar[bool] = False
    role: ClassVar[Literal["worker", "spare"] | None] = None
    whole_racks: ClassVar[bool] = False
    separates: ClassVar[bool] = False
    corrupts: ClassVar[bool] = False
    changes_state: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False
    on_saves: ClassVar[bool] = False
    beside_steps: ClassVar[bool] = False
    by_script: ClassVar[str] = ""
    seems_still: ClassVar[bool] = False
    gives_notice: ClassVar[bool] = False

    @property
    def hits_next_save(self) -> bool:
        """Whether, with its parameters, a CHECKPOINT fault acts in the saving rank on the next save
        instead of on existing files.
        """
        return False

    def wants(self) -> frozenset[Need]:
        """What the launcher must offer for this fault with its parameters; default: ``needs``."""
        return self.needs

    def acts(self, *, cuda: bool, real: frozenset[Need] = frozenset()) -> Fidelity:
        """Fidelity with its parameters, where ranks are processes. ``cuda``: on CUDA devices;
        ``real``: the needs that the launcher meets with the real mechanism (``Launcher.real``).
        """
        if self.wants() & real:
            return Fidelity.REAL
        return self.on_cuda if cuda and self.on_cuda is not None else self.fidelity

    @abstractmethod
    def act(self, target: Any) -> Mapping[str, Any]:
        """Act, and return what was done, for the log. ``target``: the protocol of
        ``chaos.fault.targets`` for ``where``.
        """

    def heal(self, target: Any) -> None:
        """Undo ``act``; safe to call twice, and when the target is gone."""

    def not_by_script(self) -> str | None:
        """Which parameters a script cannot handle, in words; None: the script can do all of it."""
        return None

    def changes(self) -> str | None:
        """The surface of a rank's tensors that it changes, as ``RankTarget.tensors`` names it;
        None: none. Digests of these tensors are taken before and after the act.
        """
        return None

    def for_script(self, step: int) -> str:
        """Arguments sent to the script after the word ``by_script``; ``step``: where the script
        holds.
        """
        return ""

    def point(self, phase: str) -> str:
        """The phase at which this fault, with its parameters, really acts when planned for
        ``phase``.
        """
        return phase

    def shows_after_s(self) -> float:
        """How long after the act its effect may stay invisible, in seconds."""
        return 0.0

    def follows(self) -> tuple[Consequence, ...]:
        """Consequences that the judge checks after the fault landed; the judge also calls
        ``landed`` again.
        """
        return ()

    @abstractmethod
    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Evidence from a witness other than the injector; None: no evidence yet.

        Pure. ``events``: the orchestrator's since the injection, followed by all events of the
        target processes.
        """
