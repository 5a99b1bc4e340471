"""A small catalogue of our own, so that tests of loading do not change when a plugin does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Occurrence
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Need, Where
from trainchaos.chaos.scenario.catalogue import Catalogue


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Fault(Fault):
    def act(self, target: Any) -> Mapping[str, Any]:
        return {}

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        return None


class Kill(_Fault):
    """Kills. At once."""

    where: ClassVar[Where] = Where.PROCESS
    simulated: ClassVar[bool] = True


class Slow(_Fault):
    """Slows a rank down."""

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    on_cuda: ClassVar[Fidelity | None] = Fidelity.REAL
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")

    factor: float = Field(default=3, gt=1)
    grace_s: float = 1.0


class BadDisk(Slow):
    """Fails the saves of a rank."""

    phases: ClassVar[tuple[str, ...]] = ()
    on_saves: ClassVar[bool] = True


class Damage(_Fault):
    """Damages a checkpoint."""

    where: ClassVar[Where] = Where.CHECKPOINT
    simulated: ClassVar[bool] = True

    mode: Literal["bitflip", "truncate"] = "bitflip"


class Full(_Fault):
    """Fills the disk."""

    where: ClassVar[Where] = Where.STORAGE
    simulated: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MOUNT})


class Isolate(_Fault):
    """Loses a node."""

    where: ClassVar[Where] = Where.NODE
    simulated: ClassVar[bool] = True


class Cut(_Fault):
    """Cuts links."""

    where: ClassVar[Where] = Where.LINK
    simulated: ClassVar[bool] = True
    may_last: ClassVar[bool] = True


class Here(_Model):
    """Runs ranks here."""

    simulates: ClassVar[bool] = False
    emulates: ClassVar[str] = ""
    offers: ClassVar[frozenset[Need]] = frozenset()
    real: ClassVar[frozenset[Need]] = frozenset()


class Pretend(Here):
    """Simulates."""

    offers: ClassVar[frozenset[Need]] = frozenset(Need)

    emulates: ClassVar[str] = "everything"
    simulates: ClassVar[bool] = True


class Restart(_Model):
    """Goes back to a checkpoint."""

    @property
    def spares_wanted(self) -> int:
        return 0


class Spare(_Model):
    """Has spares."""

    spares: int = Field(default=1, ge=1)

    @property
    def spares_wanted(self) -> int:
        return self.spares


class Gpt(_Model):
    """A model."""

    size: Literal["nano", "micro"] = "nano"


CATALOGUE = Catalogue(
    faults={
        "process-kill": Kill,
        "straggler": Slow,
        "checkpoint-corrupt": Damage,
        "disk-full": Full,
        "io-error": BadDisk,
        "node-kill": Isolate,
        "partition": Cut,
    },
    strategies={"checkpoint-restart": Restart, "drop-replica": Restart, "hot-spare": Spare},
    launchers={"local": Here, "sim": Pretend},
    workloads={"gpt": Gpt},
    metrics={
        "recovery_time": "s",
        "steps_lost": "steps",
        "goodput": "ratio",
        "samples_lost": "samples",
    },
    checkers=("fault-landed", "liveness", "membership"),
    per_arm=("goodput",),
)
