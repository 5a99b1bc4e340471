"""Silent corruption: ranks that should hold the same state compare digests of it, and whoever differs is named. Pure.

After an all-reduce every holder of a shard applies the same gradients to the same state, bit for bit, so that any
difference is a corruption. A rank sends its digest with each checkpoint (or as often as it is told) and goes on; the
supervisor compares when all have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from recovery.layout import Layout

MAX_OPEN_STEPS = 16  # ranks are at most a step apart; older ones were cut off and will never be complete


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Digests of one step differ. ``odd``: processes that differ from most others that hold the same; empty when there
    is no majority."""

    step: int
    odd: tuple[str, ...]
    detail: str


class DigestBook:
    """``agreed``: the last step of which all digests were the same, or that all took from one checkpoint; None: not
    known to a supervisor that has just taken over."""

    def __init__(self) -> None:
        self.agreed: int | None = 0
        self._generation = 0
        self._members: tuple[str, ...] = ()
        self._layout = Layout(world=1)
        self._open: dict[int, dict[str, str]] = {}
        self._saved: set[int] = set()
        self._doubtful = False

    @property
    def trust(self) -> int:
        """Checkpoints of later steps may hold a corrupted state; -1: no reason to think so, or none can be told."""
        return self.agreed if self._doubtful and self.agreed is not None else -1

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint that can be trusted was acknowledged."""
        return bool(self._trusted())

    def saved(self, step: int) -> None:
        """A checkpoint of that step is committed."""
        self._saved.add(step)

    def began(self, generation: int, members: Sequence[str], *, shards: int) -> None:
        """A generation is told to form."""
        self._generation, self._members, self._open = generation, tuple(members), {}
        self._layout = Layout(world=len(members), shards=shards)

    def formed(self, *, restored: int | None) -> None:
        """It trains. ``restored``: the step that all took from one checkpoint, or began with."""
        if self._doubtful:
            self._saved = self._trusted()
        self._doubtful = False
        if restored is not None:
            self.agreed = restored

    def note(self, process: str, generation: int, step: int, digest: str) -> Disagreement | None:
        """A member's digest of a step; what is wrong with it, once all have come."""
        if generation != self._generation or process not in self._members:
            return None
        digests = self._open.setdefault(step, {})
        digests[process] = digest
        if len(digests) < len(self._members):
            while len(self._open) > MAX_OPEN_STEPS:
                del self._open[min(self._open)]
            return None
        self._open = {other: found for other, found in self._open.items() if other > step}
        found = self._compare(step, digests)
        if found is None:
            self.agreed = max(self.agreed or 0, step)
        else:
            self._doubtful = True
        return found

    def adopted(self, generation: int, members: Sequence[str], *, shards: int) -> None:
        """Another supervisor has formed this generation."""
        self.agreed = None
        self.began(generation, members, shards=shards)

    def _trusted(self) -> set[int]:
        if not self._doubtful:
            return self._saved
        return {step for step in self._saved if self.agreed is not None and step <= self.agreed}

    def _compare(self, step: int, digests: dict[str, str]) -> Disagreement | None:
        odd: list[str] = []
        for shard in range(self._layout.shards):
            holders = [self._members[rank] for rank in self._layout.holders(shard)]
            counts = Counter(digests[name] for name in holders)
            if len(counts) == 1:
                continue
            common, times = counts.most_common(1)[0]
            if 2 * times <= len(holders):
                what = "" if self._layout.shards == 1 else f" of shard {shard}"
                detail = f"{len(counts)} different states{what} in {len(holders)} replicas at step {step}, no majority"
                return Disagreement(step=step, odd=(), detail=detail)
            odd.extend(name for name in holders if digests[name] != common)
        if not odd:
            return None
        detail = f"parameters or optimizer state of step {step} differ from those of most other replicas"
        return Disagreement(
            step=step, odd=tuple(name for name in self._members if name in odd), detail=detail
        )
