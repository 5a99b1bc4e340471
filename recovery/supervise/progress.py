"""How far a job got, from its members' progress marks, which also show whether one of them hangs,
and from the steps that its replicas agree on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.detection.evidence import HangEvidence
from trainchaos.recovery.detection.hangs import Hang, HangDetector, LeaveWatch
from trainchaos.recovery.detection.pace import HangLimits
from trainchaos.recovery.policy.doubts import Doubt
from trainchaos.recovery.process.host import Hands
from trainchaos.recovery.supervise.divergence import DigestBook
from trainchaos.recovery.supervise.process_table import ProcessTable
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Agreed


class ProgressWatch:
    """Reads the members' progress marks."""

    def __init__(self, hands: Hands, limits: HangLimits, *, shards: int = 1) -> None:
        self._shards = shards
        self._committed = self._high_water = 0
        self._generation = 0
        self._members: tuple[str, ...] = ()
        self.detector = HangDetector(limits=limits)
        self._leaving: LeaveWatch | None = None
        self._signs: dict[str, Mark] = {}
        self._hands = hands
        self.evidence = HangEvidence(hands)

    def resumed(self, generation: int, members: tuple[str, ...], step: int) -> None:
        """A generation starts training from ``step``, which may be an earlier one; from now on its
        marks say how far it is, if they can be read.
        """
        self._generation, self._members = generation, members
        self.reached(step)
        self.detector.resumed(members)

    def reached(self, step: int) -> None:
        """All members report that they have committed a step."""
        self._committed = step
        self._high_water = max(self._high_water, step)

    @property
    def committed(self) -> int:
        """Step committed by all members of the generation that trained last, by their current
        marks.

        Marks of dead members count too: they tell how far a generation had come when it broke.
        """
        mark_of, generation = self._hands.mark, self._generation
        marks = [mark_of(name) for name in self._members]
        if marks and {mark.generation for mark in marks} == {generation}:
            self.reached(max(self._committed, min([mark.committed for mark in marks])))
        return self._committed

    @property
    def high_water(self) -> int:
        """The highest value ``committed`` ever had; a rollback does not lower it."""
        return max(self.committed, self._high_water)

    def look(
        self, generation: int, names: Iterable[str], *, others_done: bool = False
    ) -> Hang | None:
        """Note the progress of the members still at work, and return the worst hang among them.

        The process ``""``: no single one can be blamed. ``others_done``: some members have finished
        their last step.
        """
        now, mark_of = self._hands.now_s(), self._hands.mark
        marks = {name: mark_of(name) for name in names}
        current = [mark for mark in marks.values() if mark.generation == generation]
        if not current:
            return None
        if len(current) == len(marks):
            # one after the other only where a step is done: a job may have many thousands
            moved_s = (mark.time_ns / 1e9 for mark in current)
            self.detector.observe(now, min([mark.committed for mark in current]), moved_s)
        else:
            # A member that has joined, and whose mark is still of an earlier generation, shows no
            # sign of life.
            marks = {
                n: m if m.generation == generation else m._replace(phase="idle")
                for n, m in marks.items()
            }
        replicas = {
            name: rank // self._shards
            for rank, name in enumerate(self._members)
            if self._shards > 1
        }
        hang = self.detector.look(
            now,
            marks,
            self._hands.os_state,
            replicas,
            pulse=self._hands.pulse,
            others_done=others_done,
        )
        self.evidence.suspect(self.detector.suspects, marks)
        return self.evidence.named(hang, marks) if hang is not None else None

    def aborted(self, least_s: float) -> None:
        """The members of a generation have to leave it; each has at least ``least_s`` seconds for
        that.
        """
        self._leaving = LeaveWatch(pace=self.detector.pace, least_s=least_s)

    def staying(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Which of these members should have left by now, and the measurements of each
        (``Hang.measured``).
        """
        hands, leaving = self._hands, self._leaving
        if leaving is None:
            return {}
        marks = {name: hands.mark(name) for name in names}
        late = leaving.late(hands.now_s(), marks, hands.os_state, hands.pulse)
        self.evidence.suspect(leaving.suspects, marks)
        return late

    def moved(self, names: Iterable[str]) -> bool:
        """Whether any of these members showed a sign of life since the last call."""
        signs = {name: self._hands.mark(name) for name in names}
        moved, self._signs = signs != self._signs, signs
        return moved


class AgreementLog:
    """Records the last step at which the replicas were the same, and the checkpoint that this
    vouches for: a supervisor that takes over needs both, and so does the rank that saves.
    """

    def __init__(
        self, hands: Hands, table: ProcessTable, progress: ProgressWatch, digests: DigestBook
    ) -> None:
        self._hands = hands
        self._table = table
        self._progress = progress
        self._digests = digests
        self._said: tuple[int | None, int | None] = (0, None)

    def note(self) -> None:
        """Record the agreed step, where it is new, and send it to the rank that saves, which must
        not delete that checkpoint.
        """
        agreed, saved = self._digests.agreed, self._digests.agreed_checkpoint
        if agreed is None or (agreed, saved) == self._said:
            return
        self._said = agreed, saved
        self._hands.record(Kind.REPLICAS_AGREED, step=agreed, saved=saved)
        self._hands.send(self._table.members[0], Agreed(step=agreed))
        # the members' marks may be unreadable
        self._progress.reached(max(self._progress.committed, agreed))

    def adopted(self) -> None:
        """What the digests hold now is in the lost supervisor's log, and is not written again."""
        self._said = self._digests.agreed, self._digests.agreed_checkpoint

    def formed(self, *, restored: int | None, checkpoint: bool) -> None:
        """A generation trains; its members learned about checkpoints as they joined. See
        ``DigestBook.formed``.
        """
        self._digests.formed(restored=restored, checkpoint=checkpoint)
        self._said = self._digests.agreed, self._digests.agreed_checkpoint

    def set_aside(self, doubts: Sequence[Doubt]) -> None:
        """Doubtful checkpoints have been set aside. Until this is recorded, every generation is
        warned of them, under any supervisor: the rename may fail, or the rank that does it may die.
        """
        if self._digests.settled(doubts):
            self._hands.record(Kind.DOUBTS_SETTLED, left=self._digests.doubts)
