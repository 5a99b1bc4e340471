"""The loss jumps."""

from __future__ import annotations

from trainchaos.recovery.health.detectors.base import RATE, STEP_S
from trainchaos.recovery.health.detectors.spike import SpikeDetector


def loss_spike(rate: float = RATE, step_s: float = STEP_S) -> SpikeDetector:
    """Null model and threshold: ``recovery.health.detectors.spike``. ``least`` 0.1: a tenth of a
    loss is weeks of training late in a job, and noise early in it.
    """
    return SpikeDetector(what="loss-spike", metric="loss", rate=rate, step_s=step_s, least=0.1)
