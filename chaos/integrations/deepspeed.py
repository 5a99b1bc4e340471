"""DeepSpeed: an engine that reports each step and its points.

    from trainchaos.chaos.integrations.deepspeed import watch

    engine, *_ = deepspeed.initialize(...)
    watch(engine)  # before or after engine.load_checkpoint(...)

Steps are ``engine.global_steps``: of the whole run, also after ``load_checkpoint``, one for each
step of the optimizer. Losses are those given to ``engine.backward``. For an engine with
``train_batch`` (pipelines), call ``beacon.step(engine.global_steps, ...)`` after it instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.integrations._hooks import ModuleHooks
from trainchaos.chaos.integrations._report import StepReport, before, samples_in


def watch(engine: Any) -> None:
    """Report the engine's steps. Points: ``forward``, ``backward``, ``gradient`` before it is
    reduced, ``optimizer``, and ``saving`` (nothing is written yet; all ranks).
    """
    report = StepReport(done=engine.global_steps, rank=engine.global_rank)

    def note(args: Any, kwargs: Mapping[str, Any], _: Any) -> None:
        report.done = engine.global_steps
        report.batch(samples=samples_in([*args, *kwargs.values()]))

    ModuleHooks(engine.module, report, on_output=note)
    step, save = engine.step, engine.save_checkpoint

    def watched_step(*args: Any, **kwargs: Any) -> Any:
        report.done = engine.global_steps
        if engine.is_gradient_accumulation_boundary():
            report.point("optimizer")
        result = step(*args, **kwargs)
        if engine.global_steps > report.done:
            report.step(engine.global_steps)
        return result

    def watched_save(*args: Any, **kwargs: Any) -> Any:
        report.done = engine.global_steps
        with report.during("checkpoint", saves=True):
            return save(*args, **kwargs)

    before(engine, "backward", lambda loss, *_, **__: report.batch(loss=loss))
    engine.step, engine.save_checkpoint = watched_step, watched_save
