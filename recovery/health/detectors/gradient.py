"""The gradient norm jumps."""

from __future__ import annotations

from trainchaos.recovery.health.detectors.base import RATE, STEP_S
from trainchaos.recovery.health.detectors.spike import SpikeDetector


def gradient_spike(rate: float = RATE, step_s: float = STEP_S) -> SpikeDetector:
    """Null model and threshold: ``recovery.health.detectors.spike``. ``least`` 0.5: clipping is
    usual, and half as much again as the level is within it.
    """
    return SpikeDetector(
        what="gradient-spike", metric="gradient_norm", rate=rate, step_s=step_s, least=0.5
    )
