"""The cost of a failure."""

from __future__ import annotations


def failure_cost(provisioned: int, recovery_s: float | None) -> float:
    """Rank-hours of one failure: everything provisioned, spares included, times the recovery time.
    0 if training did not stand still, infinity if the job never recovered. With one GPU per rank,
    these are GPU hours.
    """
    return provisioned * (recovery_s or 0.0) / 3600
