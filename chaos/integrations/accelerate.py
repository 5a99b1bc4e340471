"""A loop with Hugging Face Accelerate: each step and its points are reported.

    from trainchaos.chaos.integrations.accelerate import watch

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watched = watch(accelerator, model, optimizer, done=first_step - 1)  # steps in the checkpoint
    for batch in watched.batches(loader):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            watched.loss(loss)  # before optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

Batches that ``accumulate`` sums up are one step. ``accelerator.save_state`` reports that it saves,
and is the point ``saving`` before it writes.
"""

from __future__ import annotations

from typing import Any

from trainchaos.chaos.integrations._report import StepReport
from trainchaos.chaos.integrations.plain import Watched


def watch(accelerator: Any, model: Any, optimizer: Any, *, done: int = 0) -> Watched:
    """Report the steps of a loop, after ``prepare``. ``done``: steps done before, as the checkpoint
    says.
    """
    report = StepReport(done=done, rank=accelerator.process_index)

    def before_save(*_: Any) -> None:
        report.busy("checkpoint")  # until the next step begins
        report.saving()

    accelerator.register_save_state_pre_hook(before_save)
    # The optimizer inside: it makes a step only with the last of the batches that are summed up.
    return Watched(model, getattr(optimizer, "optimizer", optimizer), report)
