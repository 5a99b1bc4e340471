"""Detects silent corruption: ranks that should hold the same state send digests of it, and those
that differ are named. Pure.

After an all-reduce every holder of a shard applies the same gradients to the same state, bit for
bit, so that any difference is a corruption. A rank sends its digest with each checkpoint (or as
often as it is configured) and trains on; the supervisor compares once all have arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainchaos.recovery.policy.doubts import Doubt, together
from trainchaos.recovery.policy.layout import Layout

# ranks are at most a step apart; older ones were cut off and will never be complete
MAX_OPEN_STEPS = 16
MAX_SAVED_STEPS = 64  # checkpoints saved since the last agreement that are remembered


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Digests of one step differ. ``odd``: processes that differ from the majority of those that
    hold the same shard; empty when there is no majority.
    """

    step: int
    odd: tuple[str, ...]
    detail: str


@dataclass(frozen=True, kw_only=True)
class CheckpointAdvice:
    """What the members of a new generation learn about checkpoints. ``doubts``: which may hold a
    corrupted state, and are not known to be set aside; ``agreed``: the last step at which all
    replicas were the same (-1: not known); ``anew``: no checkpoint was ever saved, so that
    beginning with initial values loses nothing.
    """

    doubts: tuple[Doubt, ...] = ()
    agreed: int = -1
    anew: bool = True


class DigestBook:
    """``agreed``: the last step at which all digests were the same, or whose state all members took
    from one checkpoint; None: unknown to a supervisor that has just taken over from a log without
    it.
    """

    def __init__(self) -> None:
        self.agreed: int | None = 0
        self._generation = 0
        self._members: tuple[str, ...] = ()
        self._awaited: frozenset[str] = frozenset()
        self._layout = Layout(world=1)
        self._open: dict[int, dict[str, str]] = {}
        self._compared = 0
        self._saved: set[int] = set()
        self._ever_saved = False
        self._doubtful = False
        self._unsupervised = False  # steps of a time without a supervisor are not compared yet
        self._doubts: tuple[Doubt, ...] = ()

    @property
    def _in_doubt(self) -> bool:
        """Whether checkpoints since the last agreement may hold a corrupted state: replicas
        differed, or trained without a supervisor for a time and only some have repeated their
        digest, so that nobody has compared what they saved in that time.
        """
        return self._doubtful or (self._unsupervised and bool(self._open))

    @property
    def trust(self) -> int:
        """Checkpoints of later steps may hold a corrupted state; -1: no reason for doubt, or no
        step is known.
        """
        return self.agreed if self._in_doubt and self.agreed is not None else -1

    @property
    def word(self) -> CheckpointAdvice:
        """What the members of the next generation learn about checkpoints."""
        agreed = -1 if self.agreed is None else self.agreed
        return CheckpointAdvice(
            doubts=self._open_doubts(self._generation + 1), agreed=agreed, anew=not self._ever_saved
        )

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """Checkpoints that may hold a corrupted state and are not reported as set aside."""
        return self._doubts

    def _open_doubts(self, generation: int) -> tuple[Doubt, ...]:
        """The doubts as members of this generation learn of them."""
        return together([*self._doubts, *([(generation, self.trust)] if self.trust >= 0 else [])])

    def settled(self, doubts: Sequence[Doubt]) -> bool:
        """A rank has set aside everything in these doubts. Returns whether that is new."""
        left = tuple(doubt for doubt in self._doubts if doubt not in doubts)
        changed, self._doubts = left != self._doubts, left
        return changed

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint that can be trusted has been acknowledged."""
        return bool(self._trusted())

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint that can be trusted; -1: none."""
        return max(self._trusted(), default=-1)

    @property
    def agreed_checkpoint(self) -> int | None:
        """Step of the newest acknowledged checkpoint that the replicas have agreed on since."""
        return max(
            (step for step in self._saved if self.agreed is not None and step <= self.agreed),
            default=None,
        )

    def saved(self, step: int) -> None:
        """A checkpoint of that step is committed, or was restored."""
        self._saved.add(step)
        self._ever_saved = True
        newest = self.agreed_checkpoint
        later = sorted(step for step in self._saved if self.agreed is None or step > self.agreed)
        self._saved = {*later[-MAX_SAVED_STEPS:], *(() if newest is None else (newest,))}

    def began(self, generation: int, members: Sequence[str], *, shards: int) -> None:
        """A generation is about to form; its members have received ``word``."""
        self._doubts = self._open_doubts(generation)
        self._doubtful, self._unsupervised = self._in_doubt, False
        self._generation, self._members, self._open = generation, tuple(members), {}
        self._compared = 0
        self._awaited = frozenset(members)
        self._layout = Layout(world=len(members), shards=shards)

    def formed(self, *, restored: int | None, checkpoint: bool = False) -> None:
        """The generation trains. ``restored``: the step whose state all members took from one
        ``checkpoint``, or began with.
        """
        if self._doubtful:
            self._saved = self._trusted()
        self._doubtful = False
        if restored is not None:
            self.agreed = restored
            self._saved = {
                step for step in self._saved if step <= restored
            }  # the job no longer leads to the other checkpoints
            if checkpoint:
                self.saved(restored)

    def note(self, process: str, generation: int, step: int, digest: str) -> Disagreement | None:
        """Note a member's digest of a step; returns the disagreement, if any, once all have
        arrived. Members repeat their last digest to whoever takes over: the lost supervisor may
        have read those of some members only, or may have compared them all.
        """
        if generation != self._generation or process not in self._awaited:
            return None
        if step <= max(self._compared, self.agreed or 0):
            return None
        digests = self._open.setdefault(step, {})
        digests[process] = digest
        if len(digests) < len(self._members):
            while len(self._open) > MAX_OPEN_STEPS:
                del self._open[min(self._open)]
            return None
        self._open = {other: found for other, found in self._open.items() if other > step}
        self._compared = step
        found = self._compare(step, digests)
        self._unsupervised = False
        if found is None:
            self.agreed = max(self.agreed or 0, step)
        else:
            self._doubtful = True
        return found

    def adopted(
        self,
        generation: int,
        members: Sequence[str],
        *,
        shards: int,
        agreed: int | None = None,
        saved: int | None = None,
        doubtful: bool = False,
        doubts: Sequence[Doubt] = (),
    ) -> None:
        """Another supervisor has formed this generation. By its log the replicas were the same at
        step ``agreed``, it knew of a checkpoint of step ``saved`` from before that (None: of none),
        had a disagreement to answer (``doubtful``), and had not learned that the checkpoints in
        ``doubts`` are set aside.
        """
        self.agreed = agreed
        if saved is not None:
            self.saved(saved)
        self.began(generation, members, shards=shards)
        self._doubtful, self._doubts = doubtful, together(doubts)
        self._unsupervised = True

    def _trusted(self) -> set[int]:
        if not self._in_doubt:
            return self._saved
        return {step for step in self._saved if self.agreed is not None and step <= self.agreed}

    def _compare(self, step: int, digests: dict[str, str]) -> Disagreement | None:
        found = odd_ones(self._members, digests, shards=self._layout.shards)
        if found is None:
            return None
        odd, what = found
        if odd:
            parts = differing(self._members, digests, self._layout) or "state"
            what = f"{parts} of step {step} differ from those of most other replicas"
        else:
            what = what.replace("replicas", f"replicas at step {step}", 1)
        return Disagreement(step=step, odd=odd, detail=what)

    def joined(self, held: Mapping[str, tuple[int, str]]) -> Disagreement | None:
        """The disagreement, if any, between the states of a new generation's members, each a step
        and a digest ("": none was made).

        All were brought to one state, so a member that differs has received or kept another one:
        through a defect, a value that went wrong unnoticed, or a model that is not built alike on
        every rank.
        """
        steps = {name: str(step) for name, (step, _) in held.items()}
        step = min(step for step, _ in held.values())
        found = odd_ones(self._members, steps, shards=1)
        if found is None:
            digests = {name: digest for name, (_, digest) in held.items()}
            found = odd_ones(self._members, digests, shards=self._layout.shards)
        if found is None:
            return None
        odd, what = found
        self._doubtful = True
        if odd:
            told = ", ".join(f"{name} step {held[name][0]}" for name in odd)
            digests = {name: digest for name, (_, digest) in held.items()}
            parts = differing(self._members, digests, self._layout)
            what = f"joined with another {parts or 'state'} than most others ({told})"
        return Disagreement(
            step=step, odd=odd, detail=what if odd else f"at the start of a generation, {what}"
        )


def odd_ones(
    members: Sequence[str], digests: Mapping[str, str], *, shards: int
) -> tuple[tuple[str, ...], str] | None:
    """Members whose digest differs from the majority of those that hold the same shard, in rank
    order; no member, and the reason, where there is no majority; None when all are the same.
    """
    layout, odd = Layout(world=len(members), shards=shards), set[str]()
    for shard in range(shards):
        holders = [members[rank] for rank in layout.holders(shard)]
        counts = Counter(digests[name] for name in holders)
        if len(counts) == 1:
            continue
        common, times = counts.most_common(1)[0]
        if 2 * times <= len(holders):
            what = "" if shards == 1 else f" of shard {shard}"
            parts = differing(members, digests, layout)
            what += f" in {len(holders)} replicas{f' (in {parts})' if parts else ''}"
            return (), f"{len(counts)} different states{what}, no majority"
        odd.update(name for name in holders if digests[name] != common)
    return (tuple(name for name in members if name in odd), "") if odd else None


def differing(members: Sequence[str], digests: Mapping[str, str], layout: Layout) -> str:
    """The names of the parts in which digests of holders of the same shard differ (see
    ``recovery.state.fingerprint.by_part``); "" where digests do not tell.
    """
    parts = dict[str, None]()
    for shard in range(layout.shards):
        held = [digests[members[rank]].split() for rank in layout.holders(shard)]
        for found in zip(*held, strict=False):
            names = {part.partition(":")[0] for part in found}
            if len({*found}) > 1 and len(names) == 1 and all(":" in part for part in found):
                parts[names.pop()] = None
    return " and ".join(parts)
