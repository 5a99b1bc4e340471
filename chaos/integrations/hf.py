"""Hugging Face Trainer: a callback that reports each step and its points.

    from trainchaos.chaos.integrations.hf import ChaosCallback

    trainer = Trainer(..., callbacks=[ChaosCallback()])

Steps are ``state.global_step``: of the whole run, also after ``resume_from_checkpoint``, one for
each step of the optimizer. Losses are those that the model returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from trainchaos.chaos.integrations._hooks import ModuleHooks
from trainchaos.chaos.integrations._report import StepReport, loss_in, samples_in


class ChaosCallback(TrainerCallback, ExportableState):
    """Points: ``forward``, ``backward``, ``gradient`` before it is reduced, ``optimizer``, and
    ``saving`` (weights and optimizer are written, ``trainer_state.json`` is not; the rank that
    writes it).
    """

    def __init__(self) -> None:
        self._report: StepReport | None = None
        self._hooks: ModuleHooks | None = None
        self._saves = False
        self._scale = 1

    def state(self) -> dict[str, Any]:
        """Empty. The Trainer asks for it in the midst of a save, which makes it the point
        ``saving``.
        """
        if self._report is not None and self._saves:
            self._report.saving()
        return {"args": {}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin after the step of the checkpoint."""
        # A checkpoint of a run without this callback lacks it, and the next save would miss it.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self._report = StepReport(done=state.global_step, rank=args.process_index)
        self._scale = args.world_size if args.average_tokens_across_devices else 1
        self._hooks = ModuleHooks(kwargs["model"], self._report, on_output=self._on_output)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step to come."""
        if self._report is not None:
            self._report.done = state.global_step

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The point ``optimizer``."""
        if self._report is not None and self._hooks is not None:
            self._hooks.fill()
            self._report.point("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step."""
        if self._report is not None:
            self._report.step(state.global_step)
            self._look_ahead(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After an epoch the Trainer may evaluate and save."""
        self._look_ahead(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The evaluation is over; a save may follow."""
        self._look_ahead(control, evaluated=True)

    def on_save(self, *_: Any, **__: Any) -> None:
        """The save is over."""
        self._saves = False
        if self._report is not None:
            self._report.train()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Remove what was added to the model."""
        if self._report is not None and self._hooks is not None:
            self._report.train()
            self._hooks.close()

    def _look_ahead(self, control: Any, *, evaluated: bool = False) -> None:
        """The Trainer's own callback, which comes first, has said what is next."""
        if self._report is None:
            return
        self._saves = control.should_save
        if control.should_evaluate and not evaluated:
            self._report.busy("evaluation")
        elif control.should_save:
            self._report.busy("checkpoint")
        else:
            self._report.train()

    def _on_output(self, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """A batch. With ``num_items_in_batch`` its loss is a share of the step's."""
        assert self._report is not None
        loss, shared = loss_in(output), kwargs.get("num_items_in_batch") is not None
        if loss is not None and shared:
            loss = loss.detach() * self._scale
        samples = samples_in([*args, *kwargs.values()])
        self._report.batch(loss=loss, samples=samples, part=shared)
