"""A plain PyTorch loop: hooks on the model and its optimizer report each step and its points.

    from trainchaos.chaos.integrations.plain import watch

    watched = watch(model, optimizer, done=first_step - 1)  # steps in the checkpoint, else 0
    for batch in watched.batches(loader):  # or the loader itself: then without samples and `data`
        loss = loss_of(model, batch)
        loss.backward()
        watched.loss(loss)  # before optimizer.step()
        optimizer.step()
        optimizer.zero_grad()

A step is one call of ``optimizer.step()``, however many batches it sums up. ``model``: also in
DistributedDataParallel or FullyShardedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from trainchaos.chaos.integrations._hooks import ModuleHooks
from trainchaos.chaos.integrations._report import StepReport, loss_in, samples_in

Batch = TypeVar("Batch")


class Watched:
    """A model and an optimizer whose steps are reported, until ``close``."""

    def __init__(self, model: Any, optimizer: Any, report: StepReport) -> None:
        self._report = report
        self._said = False  # the loop gives its losses itself
        self._hooks = ModuleHooks(model, report, on_output=self._on_output)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def done(self) -> int:
        """The last step that is done."""
        return self._report.done

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loader, with the point ``data`` before each, and their samples."""
        each = iter(loader)
        while True:
            self._report.point("data")
            try:
                batch = next(each)
            except StopIteration:
                return
            self._report.batch(samples=samples_in(batch))
            yield batch

    def loss(self, loss: Any, *, samples: int | None = None) -> None:
        """The loss of a batch, before its ``optimizer.step()``. A model that returns a loss needs
        no call.
        """
        self._said = True
        self._report.batch(loss=loss, samples=samples)

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """While the loop evaluates, or does something else that takes long."""
        with self._report.during(what):
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While a checkpoint is written."""
        with self.busy("checkpoint"):
            yield

    def written(self) -> None:
        """The point ``saving``: bytes of the checkpoint are written, and nothing is renamed yet."""
        self._report.saving()

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
        while self._handles:
            self._handles.pop().remove()

    def _on_output(self, _: Any, __: Mapping[str, Any], output: Any) -> None:
        if not self._said:
            self._report.batch(loss=loss_in(output))

    def _before_step(self, *_: Any) -> None:
        self._hooks.fill()
        self._report.point("optimizer")

    def _after_step(self, *_: Any) -> None:
        self._report.step()


def watch(model: Any, optimizer: Any, *, done: int = 0, rank: int | None = None) -> Watched:
    """Report the steps of a loop. ``done``: steps done before, as the checkpoint says."""
    return Watched(model, optimizer, StepReport(done=done, rank=rank))
