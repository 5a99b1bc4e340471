"""A job with the models and objects of ``tests.support.zoo`` that are named in the arguments, in
which one thing goes wrong once: ``STRIKE=rank:step:phase:what``, ``what`` being kill, hang or nan.
``ELASTIC``: the sums are the same for any number of ranks.
Each rank leaves what it ends with in ``end-<rank>.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from tests.support.zoo import WIDTH, Zoo
from trainchaos import recovery
from trainchaos.recovery.rank.job import Job
from trainchaos.recovery.state.digest import bytes_of

STEPS = 12


class Strike:
    """Acts once in the whole job."""

    active = True

    def __init__(self, job: Job) -> None:
        rank, step, phase, self.what = os.environ["STRIKE"].split(":")
        self._job, self._when = job, (int(rank), int(step), phase)

    def due(self, step: int, phase: str) -> bool:
        """Whether it is time, and the first time."""
        if (self._job.rank, step, phase) != self._when:
            return False
        try:
            Path("struck").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def at(self, step: int, phase: str) -> None:
        """See StepProbe."""
        if self.what != "nan" and self.due(step, phase):
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()

    def ended(self, phase: str, seconds: float) -> None:
        """See StepProbe."""

    def committed(self, step: int) -> None:
        """See StepProbe."""


def main() -> None:
    """Train."""
    job = recovery.join(
        samples=96,
        steps=STEPS,
        global_batch=8,
        checkpoint_dir="saved",
        determinism="elastic" if "ELASTIC" in os.environ else "default",
    )
    torch.manual_seed(job.seed)
    model = Zoo(sys.argv[1:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.attach(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99))
    for name, (thing, update) in model.registered().items():
        job.register(name, thing, update=update)
    data = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(7))
    strike = job.probe = Strike(job) if "STRIKE" in os.environ else None
    joined = 0
    while job.running():
        joined = joined or job.generation
        with job.step() as step:
            for samples in step.batches():
                loss = model(data[samples])
                if strike is not None and strike.what == "nan" and strike.due(step.number, "nan"):
                    loss = loss * float("nan")
                step.backward(loss)
            step.commit()
    if job.rank < 0:
        return
    state = job.state
    values = {
        name: hashlib.blake2b(bytes_of(tensor), digest_size=8).hexdigest()
        for name, tensor in (state.tensors() | dict(model.named_buffers())).items()
    }
    model.eval()
    for name, member in model.members.items():
        state.seed_step(0, 0)
        values[f"output.{name}"] = float(member(torch.ones(4, WIDTH)).detach()).hex()
    scalars = state.scalars()
    values["rest"] = json.dumps([scalars["optimizer"], scalars["scheduler"]], sort_keys=True)
    values |= {f"rest.{name}": json.dumps(one) for name, one in scalars["registered"].items()}
    end = {"joined": joined, "values": values}
    Path(f"end-{job.rank}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
