"""Lightning: a callback that reports each step and its points; for ``lightning`` and for
``pytorch_lightning``, whichever the script has imported.

    from trainchaos.chaos.integrations.lightning import ChaosCallback

    trainer = Trainer(..., callbacks=[ChaosCallback()])

Steps are ``trainer.global_step``: of the whole run, also after ``fit(..., ckpt_path=...)``, one for
each step of the optimizer. Losses are those that ``training_step`` returns.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.integrations._hooks import ModuleHooks
from trainchaos.chaos.integrations._report import StepReport, loss_in, samples_in

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class ChaosCallback(Callback):
    """Points: ``forward`` (the batch is there), ``backward``, ``gradient`` before it is reduced,
    ``optimizer``, and ``saving`` (the checkpoint is collected, nothing is written yet; all ranks).
    """

    def __init__(self) -> None:
        self._report: StepReport | None = None
        self._hooks: ModuleHooks | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin after the step of the checkpoint."""
        self._report = StepReport(done=trainer.global_step, rank=trainer.global_rank)
        self._hooks = ModuleHooks(pl_module, self._report, names=("gradient",))

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """The point ``forward``."""
        if self._report is not None:
            self._report.done = trainer.global_step
            self._report.point("forward")

    def on_before_backward(self, *_: Any) -> None:
        """The point ``backward``."""
        if self._report is not None:
            self._report.point("backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        """The point ``optimizer``."""
        if self._report is not None and self._hooks is not None:
            self._hooks.fill()
            self._report.point("optimizer")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Report the step, if the optimizer has made one."""
        if self._report is None:
            return
        self._report.batch(loss=loss_in(outputs), samples=samples_in(batch))
        if trainer.global_step > self._report.done:
            self._report.step(trainer.global_step)

    def on_validation_start(self, *_: Any) -> None:
        """The rank evaluates."""
        if self._report is not None:
            self._report.busy("evaluation")

    def on_validation_end(self, *_: Any) -> None:
        """The rank trains again."""
        if self._report is not None:
            self._report.train()

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]
    ) -> None:
        """The rank saves, until its next step begins; the point ``saving``."""
        if self._report is not None:
            self._report.busy("checkpoint")
            self._report.saving()

    def on_train_end(self, *_: Any) -> None:
        """Remove what was added to the module."""
        if self._report is not None and self._hooks is not None:
            self._report.train()
            self._hooks.close()
