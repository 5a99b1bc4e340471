"""Poisons a sample so that no rank can compute it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Landed, Occurrence, Where
from trainchaos.chaos.fault.targets import RankTarget


class PoisonSample(Fault):
    """One sample's loss is NaN on every rank until the end of the run: a damaged record, a label
    out of range, an input that overflows. It hits all ranks, whatever the target says, including
    those that join later. Real.

    ``sample``: its id; default: one of the step's samples, chosen with the seed. A sample that is
    not computed within the 15 seconds allowed for evidence has not landed. Redoing the step does
    not help; the stack must find the sample and skip it. Landed: the job itself refused a
    non-finite value of the step.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    corrupts: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data",)
    everywhere: ClassVar[bool] = True

    sample: int | None = Field(default=None, ge=0)

    def point(self, phase: str) -> str:
        """The data phase, before samples are computed."""
        return "data"

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Poison the sample on this rank."""
        due = target.due_samples()
        sample = self.sample if self.sample is not None else random.Random(target.seed).choice(due)
        target.poison_sample(sample)
        return {"sample": sample}

    def heal(self, target: RankTarget) -> None:
        """Stop poisoning the sample."""
        target.poison_sample(None)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """A step refused in a rank's log."""
        for event in events:
            if event.kind is Kind.NONFINITE_CAUGHT and event.time_ns > occurrence.time_ns:
                evidence = {"step": event.step, "blamed": event.data["blamed"]}
                return Landed(witness="job: a refused step", evidence=evidence)
        return None
