"""What an integration says of its rank: the steps it has done, with loss and samples, its points,
and when it does something else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainchaos import beacon


class StepReport:
    """The reports of one rank. ``done``: the last step of the whole run that is done; ``rank``: as
    in ``beacon.step``.
    """

    def __init__(self, *, done: int = 0, rank: int | None = None) -> None:
        self.done = done
        self.rank = rank
        self._loss: Any = None
        self._losses = 0
        self._samples: int | None = None
        self._doing: Any = None

    @property
    def observed(self) -> bool:
        """Whether a run listens."""
        return beacon.VARIABLE in os.environ

    @property
    def pointed(self) -> bool:
        """Whether the scenario declares points; hooks that only serve them can be left out."""
        return beacon.POINTS in os.environ

    def point(self, name: str) -> str | None:
        """``beacon.point`` of the step that is being done."""
        self.train()
        return beacon.point(name, self.done + 1)

    def saving(self) -> None:
        """``beacon.point`` in the save of the step that is done."""
        beacon.point("saving", self.done)

    def batch(self, *, loss: Any = None, samples: int | None = None, part: bool = False) -> None:
        """Note a batch of the step that is being done. A step of several batches has the mean of
        their losses; ``part``: the loss is a share already, and the step has their sum.
        """
        if not self.observed:
            return
        if loss is not None:
            value = loss.detach() if hasattr(loss, "detach") else loss
            self._loss = value if self._loss is None else self._loss + value
            self._losses = 1 if part else self._losses + 1
        if samples is not None:
            self._samples = (self._samples or 0) + samples

    def step(self, step: int | None = None) -> None:
        """Say that ``step``, by default the next one, is done."""
        self.done = self.done + 1 if step is None else step
        loss = self._loss / self._losses if self._losses > 1 else self._loss
        beacon.step(self.done, loss=loss, samples=self._samples, rank=self.rank)
        self._loss, self._losses, self._samples, self._doing = None, 0, None, None

    def busy(self, what: str) -> None:
        """Say that the rank does something else, until ``train`` or the next point or step."""
        self._doing = beacon.busy(what, rank=self.rank)

    @contextmanager
    def during(self, what: str, *, saves: bool = False) -> Iterator[None]:
        """Busy with it meanwhile; ``saves``: with the point ``saving`` first."""
        self.busy(what)
        try:
            if saves:
                self.saving()
            yield
        finally:
            self.train()

    def train(self) -> None:
        """Say that other work is over, if there was any."""
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.__exit__()


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Have ``act`` called before each call of a method, with the same arguments."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, watched)


def samples_in(batch: Any) -> int | None:
    """The length of the first tensor in a batch, however it is nested; None if there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((n for each in batch if (n := samples_in(each)) is not None), None)
    return None


def loss_in(output: Any) -> Any:
    """The loss in what a model or a training step returned: ``loss`` by attribute or by key, or a
    tensor of one number; None if there is none.
    """
    if isinstance(output, Mapping):
        return output.get("loss")
    if getattr(output, "shape", None) is not None:
        return output if output.numel() == 1 else None
    return getattr(output, "loss", None)
