"""torchtitan: a trainer that reports each step and its points.

    from trainchaos.chaos.integrations.torchtitan import install
    from torchtitan.train import main

    install()  # every Trainer of this process, once it trains; or watch(trainer)
    main()

Steps are ``trainer.step``: of the whole run, also from a checkpoint. Losses are those that
torchtitan logs, the mean of all ranks, in the steps in which it logs (``metrics.log_freq``).
"""

from __future__ import annotations

from typing import Any

from trainchaos.chaos.integrations._hooks import ModuleHooks
from trainchaos.chaos.integrations._report import StepReport, before


def install() -> None:
    """Watch every trainer when its ``train`` is called."""
    from torchtitan.trainer import Trainer

    before(Trainer, "train", lambda trainer, *_, **__: watch(trainer))


def watch(trainer: Any) -> None:
    """Report the trainer's steps. Points: ``data``, ``forward``, ``backward`` (without CUDA
    graphs), ``gradient`` and ``optimizer`` at one place after the backward pass, and ``saving``
    (nothing is written yet; all ranks). The gradients that are filled with NaN are this rank's, or
    its shard.
    """
    report = StepReport(done=trainer.step)
    # A hook would run once, while the graph is captured.
    plain = getattr(trainer.config.training, "disable_cuda_graphs", True)
    names = ("backward", "gradient") if plain else ("gradient",)
    hooks = ModuleHooks(trainer.model_parts[0], report, names=names, early=False)
    _watch_steps(trainer, report, hooks)
    _watch_saves(trainer, report)


def _watch_steps(trainer: Any, report: StepReport, hooks: ModuleHooks) -> None:
    """Each step, its parts, and the loss that is logged in it."""
    train_step = trainer.train_step

    def watched_step(*args: Any, **kwargs: Any) -> None:
        report.done = trainer.step - 1
        report.point("data")
        train_step(*args, **kwargs)
        batches = trainer.config.training.local_batch_size * trainer.gradient_accumulation_steps
        report.batch(samples=batches)
        report.step(trainer.step)

    def before_optimizer(*_: Any, **__: Any) -> None:
        hooks.fill()
        report.point("optimizer")

    trainer.train_step = watched_step
    before(trainer.metrics_processor, "log", lambda _, loss, *__, **___: report.batch(loss=loss))
    before(trainer, "forward_backward_step", lambda *_, **__: report.point("forward"))
    before(trainer.optimizers, "step", before_optimizer)


def _watch_saves(trainer: Any, report: StepReport) -> None:
    """Saves and evaluations."""
    manager, save = trainer.checkpointer, trainer.checkpointer.save

    def watched_save(curr_step: int, last_step: bool = False) -> Any:
        due = getattr(manager, "_should_save", None)  # save() is called in each step
        if due is None or not due(curr_step, last_step):
            return save(curr_step, last_step)
        with report.during("checkpoint", saves=True):
            return save(curr_step, last_step)

    manager.save = watched_save
    validator = getattr(trainer, "validator", None)
    if validator is not None:
        validate = report.during("evaluation")
        validator.validate = validate(validator.validate)
