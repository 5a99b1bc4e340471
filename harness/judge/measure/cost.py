"""What a failure costs."""

from __future__ import annotations


def failure_cost(provisioned: int, recovery_s: float | None) -> float:
    """Rank-hours of one failure: everything provisioned, spares included, times the recovery time.
    0 where training did not stand still, infinity where the job never recovered. Ranks of a GPU
    each are GPU hours.
    """
    return provisioned * (recovery_s or 0.0) / 3600
