"""The part of a rank's fault agent that a real and a simulated rank share: the operations of
``chaos.fault.targets.RankTarget`` that need only the agenda, the disk shim and the sample order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trainchaos.chaos.fault.targets import DiskTrouble
from trainchaos.harness.rank.shims.agenda import Agenda, AgendaRank
from trainchaos.harness.rank.shims.disk import DiskShim
from trainchaos.recovery.data import order

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import JobConfig


class Breakable(Protocol):
    """A body whose device may be broken."""

    broken: bool


class AgentCore(AgendaRank):
    """Base of both fault agents. ``sleep``: let time pass in a save, in seconds; ``die``: end this
    process at once; ``lock``: needed if one thread receives and another trains.
    """

    body: Breakable

    def __init__(
        self,
        config: JobConfig,
        *,
        sleep: Callable[[float], None],
        die: Callable[[], None],
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._config = config
        self._agenda = Agenda(self, lock=lock)
        self.disk = DiskShim(sleep=sleep, die=die, say=self._agenda.effect)
        self.poisoned: frozenset[int] = frozenset()

    @property
    def active(self) -> bool:
        """Whether anything may be due at a point, or must be checked in each phase."""
        return self._agenda.active or self.body.broken

    @property
    def rank(self) -> int:
        return self._agenda.rank

    @property
    def step(self) -> int:
        return self._agenda.step

    @property
    def seed(self) -> int:
        return self._agenda.seed

    def committed(self, step: int) -> None:
        """End faults whose duration is over."""
        self._agenda.committed(step)

    def set_disk(self, trouble: DiskTrouble | None) -> None:
        self.disk.set_troubles(self._agenda.wanted("disk", trouble and (trouble, self.seed)))

    def due_samples(self) -> Sequence[int]:
        config = self._config
        step = min(self._agenda.command.get("due_step", self.step), config.steps)
        batch = order.batch(step, config.global_batch, config.samples, config.seed)
        shrink = config.batch == "shrink"
        return order.computed_by_any(batch, full=config.world, shrink=shrink)

    def poison_sample(self, sample: int | None) -> None:
        self.poisoned = frozenset(self._agenda.wanted("poison", sample))

    def set_data_delay(self, seconds: float) -> None:
        # It applies from this step on: the act comes first.
        self._agenda.data_delay_s = sum(self._agenda.wanted("data delay", seconds or None))

    def next_step(self, action: Callable[[], None]) -> None:
        self._agenda.next_step(action)

    def _say(self) -> Callable[[Mapping[str, Any]], None]:
        """Logs evidence of the current act, whenever it is found."""
        return partial(self._agenda.effect, self._agenda.command)
