"""The samples that each step of a job had to take, many steps at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from trainchaos.harness.judge.record.history import RunInfo
from trainchaos.recovery.data.permutation import samples_at

AT_ONCE = 4096
"""Samples looked up together: by far less time for each, and no more memory than a few steps."""


def due_in(info: RunInfo, step: int) -> Sequence[int]:
    """Sample ids of the global batch of ``step`` (from 1), in order; as
    ``recovery.data.order.batch``.
    """
    together = max(1, AT_ONCE // max(1, info.global_batch))
    place, number = divmod(step - 1, together)
    first = number * info.global_batch
    found = _stretch(place, together, info.global_batch, info.order_samples, info.order_seed)
    return found[first : first + info.global_batch]


@lru_cache(maxsize=4)
def _stretch(place: int, together: int, global_batch: int, samples: int, seed: int) -> list[int]:
    first = place * together * global_batch
    return samples_at(range(first, first + together * global_batch), samples, seed)
