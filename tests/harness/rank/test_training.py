"""The training loop of the built-in workloads: what a rank does before it says that it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainchaos.harness.launch.workload import BuildContext
from trainchaos.harness.rank import training
from trainchaos.harness.workloads.gpt import Gpt
from trainchaos.recovery.collectives import buckets
from trainchaos.recovery.collectives.reduce import GradientReducer


class Job:
    """As much of a job as warming up needs."""

    def __init__(self, model: Any) -> None:
        self.reducer = GradientReducer(model, max_world=4, entering=lambda _: None)


def build(tmp_path: Path, text: bytes) -> Any:
    (tmp_path / "text").write_bytes(text)
    workload = Gpt(data=str(tmp_path / "text"))
    info = workload.prepare(tmp_path)
    return workload.build(BuildContext(data=info.path, device="cpu", seed=1, steps=10)), info


def test_a_model_of_several_buckets_warms_up_without_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 50_000)
    trainable, _ = build(tmp_path, b"to be or not to be " * 100)
    job: Any = Job(trainable.model)
    assert len(job.reducer._buckets) > 3
    before = [p.clone() for p in trainable.model.parameters()]
    training.warm_up(job, trainable)
    assert all(torch.equal(a, b) for a, b in zip(before, trainable.model.parameters(), strict=True))
    assert all(not p.grad.any() for p in trainable.model.parameters() if p.grad is not None)


def test_a_single_sample_is_enough_to_warm_up(tmp_path: Path) -> None:
    trainable, info = build(tmp_path, b"x" * 100)
    assert info.samples == 1
    job: Any = Job(trainable.model)
    training.warm_up(job, trainable)
