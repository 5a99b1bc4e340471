"""The part of a controller that looks at clocks and progress marks: who is late, who hangs, who is
to be replaced.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from recovery.policy.replacement_delay import Settling
from recovery.policy.strategy import Cause, ClusterView, Decision, Health
from recovery.supervise.adoption import Adopter
from recovery.supervise.failures import NOTHING
from recovery.supervise.process_table import EARLY_TRIES, Process
from recovery.supervise.progress import ProgressWatch
from recovery.supervise.supervision import Stage

SOONEST_S = 0.005
"""Between two looks at least, however soon somebody is late: one that is kept from running may be
so for long.
"""


class Lookout(Adopter):
    """What ``tick`` does; ``recovery.supervise.controller`` has the rest."""

    _progress: ProgressWatch
    _settling: Settling
    _abort_due: bool
    _again_s: float
    _patience_s: float

    def tick(self) -> None:
        """Look at clocks and marks; call every few milliseconds to tens of milliseconds."""
        now = self.hands.now_s()
        if self.stage is Stage.ADOPTING:
            self._go_on_if_known()
        elif self.stage in (Stage.TRAINING, Stage.PAUSING):
            self._look_at_marks()
            self._replace_lost(now)
        elif self.stage is Stage.STOPPING:
            self._look_at_leaving(now)
        elif self.stage is Stage.FORMING:
            self._look_at_forming(now)
        self._look_at_starting(now)
        if self.stage is Stage.ENDING and now > self._deadline_s + self.timing.kill_timeout_s:
            self.stage = Stage.DONE  # what no signal ends is for whoever started it to report
        elif self.stage is Stage.ENDING and now > self._deadline_s:
            self._crew.dismiss(kill=True)

    @property
    def look_in_s(self) -> float:
        """In how long to call ``tick`` again at the latest: in ``tick_s``, sooner where somebody is
        late by then.
        """
        if self.stage not in (Stage.TRAINING, Stage.PAUSING):
            return self.timing.tick_s
        return min(self.timing.tick_s, max(SOONEST_S, self._progress.detector.due_s))

    def _look_at_starting(self, now: float) -> None:
        if self.stage not in (Stage.STARTING, Stage.WAITING, Stage.TRAINING):
            return
        late = self._crew.overdue(now)
        stopped = self._crew.stopped_starting(now, self.timing.hang.stopped_s)
        if self.stage is Stage.STARTING:
            # nobody takes its place, so that the job would end by it: it may go on in time
            stopped = []
        for entry in (*late, *stopped):
            if entry.health is not Health.STARTING:
                continue  # what the one before was answered by has ended it
            if entry in late:
                self._fail(
                    entry,
                    Cause.START_TIMEOUT,
                    f"not ready after {self.timing.start_timeout_s:.0f} s",
                )
            else:
                self._fail(entry, Cause.HANG, "stopped while it starts")

    def _look_at_forming(self, now: float) -> None:
        # All wait for each other here, so that marks tell nothing of a single one; but a stopped
        # process will not join, and while anybody reads, restores or copies there is progress. Of a
        # node that is silent it is not known.
        stopped = self._crew.stopped(now, self.timing.hang.stopped_s)
        if self._progress.moved(self.members) or self._crew.unheard():
            self._deadline_s = now + self.timing.join_timeout_s
        if stopped:
            self._fail(stopped[0], Cause.HANG, "stopped while the group forms")
        elif now > self._deadline_s:
            self._suspect(
                f"the group did not form: no progress for {self.timing.join_timeout_s:g} s"
            )

    def _look_at_leaving(self, now: float) -> None:
        """Survivors that stay in an aborted generation hang. If all left and nobody died, the
        connection failed.
        """
        if self._abort_due:
            if self._progress.moved(self.members):  # they look for a sample that nobody can compute
                self._deadline_s = max(self._deadline_s, now + self._patience_s)
            elif now > self._deadline_s:
                self._abort()
            return
        staying = self._crew.training()
        for name, measured in self._progress.staying([entry.name for entry in staying]).items():
            self._fail(
                self._crew[name], Cause.HANG, "did not leave an aborted generation", measured
            )
        if not staying and not self._failures.current and now > self._deadline_s:
            self._decide_if_parked()

    def _replace_lost(self, now: float) -> None:
        if self.stage is not Stage.TRAINING:
            return
        settled = self._settling.just_settled(self.committed, now)
        if settled or now >= self._again_s:
            self._again_s = math.inf
            self._act(self.strategy.on_spare_lost(self._view()))
        if settled and self.ready_spares and len(self.members) < self.world:
            self._act(self.strategy.on_ready(self._view()))

    def _look_at_marks(self) -> None:
        training = self._crew.training()
        at_work = [member.name for member in training if not member.finished]
        hang = self._progress.look(
            self.generation, at_work, others_done=len(at_work) < len(training)
        )
        if hang is None:
            return
        if hang.process:
            self._fail(self._crew[hang.process], Cause.HANG, hang.detail, hang.measured)
        else:
            self._suspect(hang.detail)

    def _left_early(self, entry: Process) -> bool:
        """Whether it went before training began because its machine goes, and another may take its
        place.
        """
        wanted = self.world + self.strategy.spares_wanted
        return (
            self.strategy.replaces and entry.noticed and self._crew.started < EARLY_TRIES * wanted
        )

    def _begin_without(self, entry: Process) -> None:
        """Nothing of the job is lost with it."""
        if self._formation.awaits(entry.name):
            self._failures.current.clear()  # nobody's generation broke
            self._formation.exchange(
                entry.name, self._crew.spawn("worker", self.strategy.start_mode)
            )
        self._form_if_ready()

    @abstractmethod
    def _fail(
        self, entry: Process, cause: Cause, detail: str, measured: Mapping[str, Any] = NOTHING
    ) -> None: ...
    @abstractmethod
    def _abort(self) -> None: ...
    @abstractmethod
    def _decide_if_parked(self) -> None: ...
    @abstractmethod
    def _act(self, decision: Decision) -> None: ...
    @abstractmethod
    def _view(self) -> ClusterView: ...
