"""Trains torchtitan's llama3 debug model in stages that its own ``pipeline_llm`` cuts, for 40 or
the given steps: ``python -m trainchaos.recovery.run --ranks 4 --mesh pipeline=2 --spares 1 --fresh
examples/torchtitan/pipeline_recoverable.py 40``.
"""

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from train_recoverable import (
    BATCH,
    LENGTH,
    SAMPLES,
    SPEC,
    STEPS,
    JobDims,
    fill,
    optimizer_of,
    options,
    sequences,
    values_of,
    whole_model,
)

from trainchaos import recovery


class Stage:
    """This rank's stage, and the passes of a step."""

    def cut_up(self, model, mesh):
        """See ``job.attach``."""
        stages = mesh["pipeline"].size()
        with torch.device("meta"):
            blank = model.config.build()
        _, (self.part,), self.first, self.last = SPEC.pipelining_fn(
            blank,
            parallel_dims=JobDims(mesh),
            device=torch.device(mesh.device_type),
            model_config=model.config,
            parallelize_fn=SPEC.parallelize_fn,
            loss_fn=None,  # of a schedule that is not used: it would exchange pickles
            **options(pipeline_parallel_degree=stages, pipeline_parallel_schedule="1F1B"),
        )
        fill(self.part, dict(values_of(model)), mesh.device_type)
        return self.part

    def passes(self, mesh, batch, as_loss):
        """Forward and backward; the summed loss of the batch on the last stage, else zero."""
        size, stages = len(batch), mesh["pipeline"].size()
        parts = next(n for n in range(min(size, stages), 0, -1) if size % n == 0)
        inputs, targets, losses = batch[:, :-1], batch[:, 1:], []
        shape, width, words = (size // parts, LENGTH), SPEC.model.dim, SPEC.model.vocab_size
        between = torch.empty(*shape, width, device="meta", requires_grad=True)
        logits = torch.empty(*shape, words, device="meta", requires_grad=True)
        stage = PipelineStage(
            self.part,
            mesh.get_local_rank("pipeline"),
            stages,
            batch.device,
            input_args=torch.empty(*shape, dtype=batch.dtype, device="meta")
            if self.first
            else between,
            output_args=logits if self.last else between,
            group=mesh.get_group("pipeline"),
        )

        def loss_of(logits, targets):
            mean = cross_entropy(logits.flatten(0, 1), targets.flatten())
            return as_loss(mean * len(logits))

        kind = Schedule1F1B if parts == stages else ScheduleGPipe
        schedule = kind(stage, parts, loss_fn=loss_of, scale_grads=False)
        given = [inputs] if self.first else []
        schedule.step(*given, **({"target": targets, "losses": losses} if self.last else {}))
        return torch.stack(losses).sum() if losses else torch.zeros(())


def main():
    """Build, train, print."""
    tokens = sequences()
    job = recovery.join(samples=SAMPLES, steps=STEPS, global_batch=BATCH, checkpoint_dir="saved")
    stage = Stage()
    job.attach(whole_model(job.seed), optimizer_of, clip_norm=1.0, parallelize=stage.cut_up)
    while job.running():
        with job.step() as step:
            batch, losses = tokens[step.samples], []

            def passes(batch=batch, losses=losses, step=step):
                losses.append(stage.passes(job.mesh, batch, step.as_loss))
                return losses[0]

            step.run(passes)
            step.commit()
            if stage.last and step.number % 10 == 0:
                print(f"step {step.number} loss {losses[0] / len(batch):.4f}", flush=True)


if __name__ == "__main__":
    main()
