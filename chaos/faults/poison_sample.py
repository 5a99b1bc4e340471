"""A sample that nobody can compute."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event, Kind
from chaos.fault.base import Fault, Landed, Occurrence, Where
from chaos.fault.targets import RankTarget


class PoisonSample(Fault):
    """One sample's loss is NaN from now to the end of the run, whoever computes it: a damaged
    record, a label out of range, an input that overflows. All ranks are hit, whatever the target
    says, and those that join later. Real.

    ``sample``: its id; default: one of those due in the step, chosen with the seed. One that does
    not come up within the 15 seconds in which evidence is awaited has not landed. Redoing the step
    does not help; the stack has to find the sample and leave it out. Landed: the job itself refused
    a non-finite value of the step.
    """

    where: ClassVar[Where] = Where.RANK
    corrupts: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data",)
    everywhere: ClassVar[bool] = True

    sample: int | None = Field(default=None, ge=0)

    def point(self, phase: str) -> str:
        """Before the samples are computed."""
        return "data"

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Poison it in this rank."""
        due = target.due_samples()
        sample = self.sample if self.sample is not None else random.Random(target.seed).choice(due)
        target.poison_sample(sample)
        return {"sample": sample}

    def heal(self, target: RankTarget) -> None:
        """It is well again."""
        target.poison_sample(None)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """A refused step, in the log of a rank."""
        for event in events:
            if event.kind is Kind.NONFINITE_CAUGHT and event.time_ns > occurrence.time_ns:
                evidence = {"step": event.step, "blamed": event.data["blamed"]}
                return Landed(witness="job: a refused step", evidence=evidence)
        return None
