"""How a supervisor answers values and states that are not what they should be."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from chaos.events.log import Kind
from recovery.policy.strategy import Cause, Failure
from recovery.supervise.adoption import Adopter
from recovery.supervise.divergence import Disagreement
from recovery.supervise.process_table import Process
from recovery.supervise.supervision import Stage
from recovery.transport.wire import Agreed, Digest, Parked, SetAside


class Corruptions(Adopter):
    """Part of the controller."""

    _abort_due: bool
    _agreement: tuple[int | None, int | None]
    _patience_s: float

    def _hears_refusal(self, message: Parked) -> bool:
        """Whether it says that values were refused that are to be answered; then they are."""
        late = self.stage is Stage.STOPPING and message.step >= self.steps  # each rank for itself
        if message.why != "nonfinite" or not (
            late or self.stage in (Stage.TRAINING, Stage.PAUSING)
        ):
            return False
        self._on_nonfinite(message)
        return True

    def _on_nonfinite(self, message: Parked) -> None:
        ranks = [rank for rank in message.blamed if rank < len(self.members)]
        blamed: list[Process | None] = [self._crew[self.members[rank]] for rank in ranks]
        if message.step >= self.steps:  # only whoever holds it parks
            detail = "non-finite state, refused after the last step"
            failure = self._declare(blamed[0], Cause.NONFINITE, message.step, detail)
            self._failures.current.append(replace(failure, applied=True))
            if self.stage is Stage.STOPPING:
                self._decide_if_parked()
            else:
                self._stop_generation()
            return
        detail = "non-finite loss or gradient, refused before the optimizer step"
        # the blamed look for the sample, and then park
        examined = self._skips.examine == message.step + 1
        for entry in blamed or [None]:
            self._failures.current.append(
                self._declare(entry, Cause.NONFINITE, message.step + 1, detail)
            )
        if not self.strategy.keeps_survivors and not examined:
            self._stop_generation()
            return
        # All ranks see the same flags and park by themselves; an abort now could cut one off.
        self.stage = Stage.STOPPING
        self._patience_s = (
            self.timing.examine_timeout_s if examined else self.timing.unforced_park_s
        )
        self._deadline_s = self.hands.now_s() + self._patience_s
        self._abort_due = True
        self._decide_if_parked()

    def _on_digest(self, entry: Process, message: Digest) -> None:
        """Whoever holds another state than most is named, and the generation stopped."""
        found = self._digests.note(entry.name, message.generation, message.step, message.digest)
        self._note_agreed()
        if found is not None and self.stage is Stage.ADOPTING:
            # sent to the lost supervisor; answered when it is known where all are, by the next one
            # if this is lost before that. Later steps show the same.
            if not any(one.cause is Cause.DIVERGED for one in self._failures.current):
                self._declare_diverged(found)
        elif found is not None and self.stage in (Stage.TRAINING, Stage.PAUSING, Stage.STOPPING):
            self._diverged(found)

    def _refuse_start(self, held: Mapping[str, tuple[int, str]]) -> bool:
        """Stop a generation whose members do not hold the same step and state: it must not train.
        Whether it was.
        """
        found = self._digests.joined(held)
        if found is not None:
            self._diverged(found)
        return found is not None

    def _diverged(self, found: Disagreement) -> None:
        self._declare_diverged(found)
        if self.stage is not Stage.STOPPING:
            self._stop_generation()

    def _declare_diverged(self, found: Disagreement) -> None:
        odd: list[Process | None] = [self._crew[name] for name in found.odd]
        for process in odd or [None]:
            self._failures.current.append(
                self._declare(process, Cause.DIVERGED, found.step, found.detail)
            )

    def _on_set_aside(self, message: SetAside) -> None:
        """Until then every generation is told of it, whoever supervises: renaming may fail, and
        whoever does it die.
        """
        if self._digests.settled(message.doubts):
            self.hands.record(Kind.DOUBTS_SETTLED, left=self._digests.doubts)

    def _note_agreed(self) -> None:
        """Write down at which step the replicas agreed and what checkpoint that vouches for, for
        whoever takes over, and tell the rank that saves, which must not delete it.
        """
        agreed, saved = self._digests.agreed, self._digests.agreed_checkpoint
        if agreed is None or (agreed, saved) == self._agreement:
            return
        self._agreement = agreed, saved
        self.hands.record(Kind.REPLICAS_AGREED, step=agreed, saved=saved)
        self.hands.send(self.members[0], Agreed(step=agreed))
        self._progress.reached(max(self._progress.committed, agreed))  # their marks may not be seen

    def _note_formed(self, restored: int | None) -> None:
        """A generation trains; its members were told what is known of checkpoints as they joined.
        ``restored``: see ``DigestBook.formed``.
        """
        self._digests.formed(restored=restored, checkpoint=self._formation.restored)
        self._agreement = self._digests.agreed, self._digests.agreed_checkpoint

    @abstractmethod
    def _declare(self, entry: Process | None, cause: Cause, step: int, detail: str) -> Failure: ...
    @abstractmethod
    def _decide_if_parked(self) -> None: ...
