"""The loss jumps."""

from __future__ import annotations

from trainchaos.recovery.health.detectors.base import RATE, STEP_S
from trainchaos.recovery.health.detectors.spike import SpikeDetector


def loss_spike(rate: float = RATE, step_s: float = STEP_S) -> SpikeDetector:
    """Null model and threshold: ``recovery.health.detectors.spike``. ``least`` 0.1: a tenth of a
    loss is weeks of training late in a job, and noise early in it. Six steps in a row, as a loss
    that has jumped takes many to come back, and a longer row needs a smaller jump.
    """
    return SpikeDetector(
        what="loss-spike", metric="loss", rate=rate, step_s=step_s, steps=6, least=0.1
    )
