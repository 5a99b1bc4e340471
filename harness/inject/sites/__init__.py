"""Where faults act: one module per ``chaos.fault.base.Where``, which finds the targets of an
occurrence and gives access to them.

A site is a class ``<Where>Site`` in ``harness/inject/sites/<where>.py``, made once per arm. Faults
that act inside a rank have no site: the rank's own agent (``harness.rank.fault_agent``) does it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.schedule.plan import PlannedFault

if TYPE_CHECKING:
    from trainchaos.harness.arm.fault_context import Scene
    from trainchaos.harness.undo.records import Undo


@dataclass(frozen=True, kw_only=True)
class OccurrenceTarget:
    """One target of one occurrence.

    ``target``: the handle that the fault acts on, a protocol of ``chaos.fault.targets``; ``who``:
    the target as recorded; ``processes``: the processes hit, if any; ``look``: polled until it
    returns something, which is then logged as the fault's effect; ``undo``: records written to the
    ledger before the act.
    """

    target: Any
    who: Mapping[str, Any]
    processes: tuple[str, ...] = ()
    rank: int | None = None
    checkpoint: str | None = None
    step: int | None = None
    look: Callable[[], Mapping[str, Any] | None] | None = None
    undo: Sequence[Undo] = field(default=())


@dataclass(frozen=True, kw_only=True)
class MissingTarget:
    """A target that is not there: the occurrence fails for this reason."""

    who: Mapping[str, Any]
    reason: str


Aims = Sequence[OccurrenceTarget | MissingTarget]


class Site:
    """Finds the targets of faults of one ``Where``."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """All targets of an occurrence due now, in order. ``number``: number of the first of these
        occurrences.
        """
        raise NotImplementedError

    def reachable(self, planned: PlannedFault) -> bool:
        """Whether all targets are there; during a recovery a process may be about to be replaced.
        A target that is none of those fails its occurrence instead.
        """
        return True

    def _all_held(self, ranks: Iterable[int]) -> bool:
        """Whether a process holds each rank."""
        return all(self._scene.process_of(rank) for rank in ranks)


def miss_rank(rank: int) -> MissingTarget:
    """A rank that no process holds."""
    return MissingTarget(who={"rank": rank}, reason=f"no process holds rank {rank}")


def site(where: Where, scene: Scene) -> Site:
    """The site of a ``Where``. Raises KeyError for ``Where.RANK``, which has none."""
    if where is Where.RANK:
        raise KeyError(where)
    module = importlib.import_module(f"{__name__}.{where.value}")
    made: Site = getattr(module, f"{where.value.capitalize()}Site")(scene)
    return made
