"""The common job as a script with ``recovery.join()`` in its loop, for ``python -m
trainchaos.recovery.run``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainchaos import recovery
from trainchaos.chaos.errors import ChaosError
from trainchaos.harness.peers.common import Training, point, poisoned

_STEP = re.compile(r"step-(\d+)")


def main() -> None:
    """Train to the last step; a spare waits until it is needed."""
    training = Training.from_environment()
    job = recovery.join(
        samples=training.samples,
        steps=training.job.steps,
        global_batch=training.job.global_batch,
        seed=training.job.seed,
    )
    job.attach(training.model, training.optimizer, training.scheduler, clip_norm=training.clip_norm)
    job.checkpoints.disk = _Writing()
    tried: recovery.Step | None = None
    told = 0

    def report_tried() -> None:
        """A step whose reduction was through when a failure broke the group is committed while the
        next one forms.
        """
        if tried is not None and told < tried.number == job.state.step:
            training.report(tried.number, job.state.last[1], tried.count)

    while job.running():
        report_tried()
        with job.step() as step:
            tried = step
            os.environ["RANK"] = str(job.rank)  # that of the report: it may change
            loss = training.loss(training.model, step.number, job.rank, step.samples)
            with poisoned(training.model, step.number):
                step.backward(loss)
            point("optimizer", step.number)
            step.commit()
            training.report(step.number, job.state.last[1], step.count)
            told = step.number
    report_tried()  # the last step too


class _Writing:
    """The point ``saving`` lies before the second half of a checkpoint's data is written, on
    whatever thread.
    """

    def __init__(self) -> None:
        self._begun: Path | None = None

    def __call__(self, what: str, path: Path) -> None:
        if what != "write" or path.suffix != ".bin":
            return
        step = _STEP.search(path.parent.name)
        if path == self._begun and step is not None:
            point("saving", int(step[1]))
        self._begun = path


if __name__ == "__main__":
    try:
        main()
    except ChaosError as error:
        raise SystemExit(str(error)) from error
