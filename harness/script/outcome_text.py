"""What is said of a command, for people: what is known before its first step, whether it can be
observed at all, and the outcome and reason of its arm.

In the first arm of a run the start is a check. A command whose steps are printed and not read, or
reported by processes that are not found, is stopped at once: no arm of it would prove anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainchaos.chaos.scenario.progress import key_of
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.script.listen.derive import Derived, derive
from trainchaos.harness.script.listen.errors import telling_error
from trainchaos.harness.script.listen.listening import CommandListener
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.listen.trial import changed_form
from trainchaos.harness.script.processes.command import CommandEnded
from trainchaos.harness.script.processes.ranks import Ranks

BEACON = "beacon.step(...) (from trainchaos import beacon)"
"""What a script calls, for people."""
SHOWN_LINES = 6
SHOWN_WIDTH = 160
JUDGE_EVERY_S = 1.0
UNREAD_S = 5.0
UNREAD_STEPS = 50
LEAST_UNREAD = 10
ENDINGS = 4
"""How often ranks may end, and be started again, before a step was seen."""
UNRANKED_S = 8.0
"""How long steps may be reported while no rank is found, though ranks are looked for."""
NS = 1e9


@dataclass(kw_only=True)
class CommandFindings:
    """What is known of one arm's command. ``check``: it is the first arm of its command in the run;
    ``injected``: kind of the newest fault; ``starts``: how often the command was started;
    ``miscounted``: why the ranks are others than those of the scenario, so that it was stopped.
    """

    spec: WorkloadSpec
    ranks: Ranks
    listener: CommandListener
    observer: Observer
    now_ns: Callable[[], int]
    check: bool
    injected: str = ""
    starts: int = 1
    miscounted: str = ""

    def __post_init__(self) -> None:
        self._began_ns = self.now_ns()
        self._judged_ns = self._unread_ns = self._unranked_ns = 0  # since when

    # ---- until its first step

    def known(self) -> str:
        """What is known while no step was seen, or no rank that made one; empty afterwards."""
        spec, lines, seen = self.spec, self.listener.text.count, self.observer
        if seen.reports and seen.generation:
            return ""
        living = len(self.ranks.living())
        words = [f"{living} of {spec.ranks} ranks found"] if living or spec.ranks > 1 else []
        if seen.reports:
            words.append(f"steps up to {seen.committed} reported")
        elif not self.listener.waiting:
            printed = f"{lines} line{'s' if lines != 1 else ''} printed"
            words.append(printed if lines else "no output yet")
            if spec.progress == "beacon":
                words.append("no beacon heard yet")
            elif lines:
                words.append("no line matched yet")
        words.append(f"start-up {self._seconds(self._began_ns):.0f} s")
        return ", ".join(words)

    @property
    def observed(self) -> bool:
        """Whether its steps were read, and its ranks found, as many as the scenario counts."""
        return bool(self.observer.reports and self.observer.generation) and not self.miscounted

    def blind(self) -> str:
        """Why the command cannot be observed as the scenario says; empty: it can, or that is not
        known yet.
        """
        now, seen = self.now_ns(), self.observer
        if not self.check or (now - self._judged_ns) / NS < JUDGE_EVERY_S:
            return ""
        self._judged_ns = now
        if seen.reports and seen.generation:
            self.check = False  # its steps are read, and ranks were found
            self.miscounted = self._miscounted()
            return self.miscounted
        if seen.reports:
            self._unranked_ns = self._unranked_ns or now
            late = self._seconds(self._unranked_ns) >= UNRANKED_S
            why = f"steps up to {seen.committed} are reported, and no rank was found"
            return why if late else ""
        if seen.generation > ENDINGS:
            why = f"its ranks were started {seen.generation} times, and ended before a step was"
            return f"{why} seen{self._failed()}"
        return "" if self.listener.waiting else self._unread(now)

    def _miscounted(self) -> str:
        """That a process names itself a rank that the scenario does not count: then there are more,
        and one of those that it counts may not be found at all. Or that fewer ranks were found than
        there are: a run proves nothing with part of them; a later generation may have lost some.
        """
        members, ranks = self.observer.members, self.spec.ranks
        last = max(members, default=0)
        if last >= ranks:
            return (
                f"a process names itself rank {last}, so that there are {last + 1} ranks at least,"
                f" and workload.ranks is {ranks}: correct it, and have each rank name itself (RANK"
                " in its environment, or a beacon)"
            )
        if len(members) < ranks and self.observer.generation == 1:
            return f"steps are reported, and {len(members)} of {ranks} ranks were found"
        return ""

    def _unread(self, now: int) -> str:
        seen = derive(self.listener.text.recent)
        wanted = min(UNREAD_STEPS, max(LEAST_UNREAD, self.spec.steps // 2))
        # certainly the steps, rather than some that come before training
        if seen is None or not seen.certain(self.spec.steps) or seen.steps < wanted:
            self._unread_ns = 0
            return ""
        self._unread_ns = self._unread_ns or now
        return self._unread_steps(seen) if self._seconds(self._unread_ns) >= UNREAD_S else ""

    def _seconds(self, since_ns: int) -> float:
        return (self.now_ns() - since_ns) / NS

    # ---- its end

    def outcome(self, ended: CommandEnded | None) -> tuple[str, str]:
        """(outcome, reason). ``ended``: None if the command made no progress before the deadline
        instead of ending.
        """
        seen, steps = self.observer, self.spec.steps
        if ended is None:
            limit_s, name = self.spec.patience(begun=bool(seen.reports))
            deadline = f"{limit_s:g} s (workload.{name})"
            reason = f"no step for {deadline} after step {seen.committed}"
            if not seen.reports:
                reason = f"no progress within {deadline}: {self._why_none(late=True)}"
            elif seen.finished:
                reason = f"all {steps} steps were reported, but the command had not ended"
                reason += f" {deadline} later"
            return "timed-out", reason
        if seen.reports and seen.finished and ended.well:
            return "completed", ""
        reason = f"the command ended with {ended.how}"
        if not seen.reports and ended.well:
            return "gave-up", f"{reason} and no progress was seen: {self._why_none()}"
        if not seen.reports:
            return "gave-up", f"{reason} before any progress was seen{self._failed()}"
        reason += f" at step {seen.committed} of {steps}"
        return "gave-up", reason + (f": {self._why_short()}" if ended.well else self._failed())

    def changed(self) -> str:
        """That its lines changed their form, so that it may have gone on; "" if they did not."""
        seen = self.observer
        forms = changed_form(self.listener.reader.unread, seen.committed) if seen.reports else ()
        return next(iter(forms), "")

    def _why_short(self) -> str:
        """Why a command that ended well has not done all steps."""
        fault, seen = self.injected, self.observer
        why = self.changed()
        if why:
            pass
        elif seen.began_again:
            why = "its steps began again from the first without a fault, so they are those of an"
            why += " epoch: let progress find the step of the whole run"
        elif not (seen.generation and seen.members):
            why = "its steps were read, and no rank was found"
        elif seen.preempted:
            why = f"{fault} had told it to end; workload.restarts: {self.starts} starts it again,"
            why += " as a scheduler does"
        elif fault and self.starts > 1:
            why = f"it was started again after {fault}, and ended with exit code 0 without doing"
            why += " its remaining steps: have it go on until its last step"
        elif fault:
            why = f"{fault} had hit it, and an end with exit code 0 is started again by nobody:"
            why += " have it end with an error when it has not done all its steps"
        else:
            why = "set workload.steps to what it does"
        return why + self._shown()

    def _why_none(self, *, late: bool = False) -> str:
        """Why no step was seen. ``late``: it had not ended at a deadline."""
        reader, text, steps = self.listener.reader, self.listener.text, self.spec.steps
        beacon, key = self.spec.progress == "beacon", self._key
        unmatched = reader.other_total is None and not reader.refused
        seen = derive(text.recent) if unmatched else None
        if seen is not None and seen.certain(steps):
            return self._unread_steps(seen)
        if seen is not None and not late and not beacon:
            why = f"{self._none}, of which {seen.steps} may be steps: if they are, give"
            why += f" {seen.shown}"
        elif late and text.count and unmatched:
            why = f"it printed {text.count} lines, and none of them is surely a step: raise"
            why += " workload.start_deadline if it takes longer to start"
            why += f", or call {BEACON} after each step" if beacon else f"; else correct {key},"
            why += "" if beacon else " which matched none"
        elif beacon and reader.refused:
            return (
                f"{reader.refused} lines of the beacon were not understood: copy chaos/beacon.py"
                " again"
            )
        elif beacon:
            why = f"no beacon was heard: call {BEACON} after each step, or give progress:"
            why += " {regex: ...}"
        elif not text.count:
            return f"it printed nothing, so {key} found nothing"
        elif reader.other_total is not None:
            why = f"{key} matched, but the lines state {reader.other_total} steps and"
            why += f" workload.steps is {steps}: correct workload.steps"
        elif reader.refused:
            why = f"{key} matched, but group step was never a number"
        else:
            why = self._none
        return why + self._shown()

    def _unread_steps(self, seen: Derived) -> str:
        """What to change where lines are steps and none of them was read."""
        give = f"give {seen.shown}{self._shown()}"
        if self.spec.progress == "beacon":
            cure = f"call {BEACON} after each step, or, as {seen.steps} steps were printed,"
            return f"no beacon was heard: {cure} {give}"
        return f"{self._none}, of which {seen.steps} look like steps: {give}"

    @property
    def _key(self) -> str:
        progress = self.spec.progress
        return "workload.progress" if progress == "beacon" else key_of(progress)

    @property
    def _none(self) -> str:
        return f"{self._key} matched none of {self.listener.text.count} lines"

    def _failed(self) -> str:
        """The error that tells most, if the last lines do not show it, and the last lines."""
        return self._shown(*telling_error(list(self.listener.text.recent)))

    def _shown(self, error: Sequence[str] = (), times: int = 1) -> str:
        last = list(self.listener.output.last)[-SHOWN_LINES:]
        return "; " + (printed(last, error, times) if last else "it printed nothing")


def printed(last: Sequence[str], error: Sequence[str] = (), times: int = 1) -> str:
    """Lines of a command for people: the newest, and before them an error that was raised so many
    ``times``, if they do not show it.
    """
    text = f"its last lines:\n{_rows(last)}"
    if error and error[-1] not in last:
        which = f"its error, {times} times" if times > 1 else "its first error"
        return f"{which}:\n{_rows(error)}\n    {text}"
    return text


def _rows(lines: Sequence[str]) -> str:
    return "\n".join(f"    | {line[:SHOWN_WIDTH]}" for line in lines)
