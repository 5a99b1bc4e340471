"""The time until a command's first step: what is known meanwhile, and whether it can be observed at
all.

In the first arm of a run this is a check. A command whose steps are printed and not read, or
reported by processes that are not found, is stopped at once: no arm of it would prove anything.
"""

from __future__ import annotations

from collections.abc import Callable

from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.script.listen.derive import Derived, derive
from trainchaos.harness.script.listen.listening import CommandListener
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.outcome_text import Findings, keeps_ending, unread_steps
from trainchaos.harness.script.processes.ranks import Ranks

JUDGE_EVERY_S = 1.0
UNREAD_S = 5.0
UNREAD_STEPS = 50
LEAST_UNREAD = 10
ENDINGS = 4
"""How often ranks may end, and be started again, before a step was seen."""
UNRANKED_S = 8.0
"""How long steps may be reported while no rank is found, though ranks are looked for."""
NS = 1e9


class Startup:
    """One arm's. ``check``: it is the first arm of its command in the run; ``miscounted``: why the
    ranks are others than those of the scenario, so that it was stopped; "" if it was not.
    """

    def __init__(
        self,
        spec: WorkloadSpec,
        *,
        ranks: Ranks,
        listener: CommandListener,
        observer: Observer,
        now_ns: Callable[[], int],
        check: bool,
    ) -> None:
        self._spec = spec
        self._ranks = ranks
        self._listener = listener
        self._observer = observer
        self._now_ns = now_ns
        self._check = check
        self.miscounted = ""
        self._began_ns = now_ns()
        self._judged_ns = 0
        self._unread_ns = self._unranked_ns = 0  # since when

    def known(self) -> str:
        """What is known while no step was seen, or no rank that made one, for people; empty
        afterwards.
        """
        spec, lines, seen = self._spec, self._listener.lines, self._observer
        if seen.reports and seen.generation:
            return ""
        found = len(self._ranks.living())
        words = [f"{found} of {spec.ranks} ranks found"] if found or spec.ranks > 1 else []
        if seen.reports:
            words.append(f"steps up to {seen.committed} reported")
        elif not self._listener.waiting:
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
        return bool(self._observer.reports and self._observer.generation) and not self.miscounted

    def blind(self) -> str:
        """Why the command cannot be observed as the scenario says, for people; empty: it can, or
        that is not known yet.
        """
        now = self._now_ns()
        if not self._check or (now - self._judged_ns) / NS < JUDGE_EVERY_S:
            return ""
        self._judged_ns = now
        if self._observer.reports and self._observer.generation:
            self._check = False  # its steps are read, and ranks were found
            self.miscounted = self._beyond() or self._short()
            return self.miscounted
        if self._observer.reports:
            return self._unranked(now)
        if self._observer.generation > ENDINGS:
            return keeps_ending(
                Findings.of(self._spec, self._observer, self._listener), self._observer.generation
            )
        return "" if self._listener.waiting else self._unread(now)

    def _beyond(self) -> str:
        """That a process names itself a rank that the scenario does not count: then there are more,
        and one of those that it counts may not be found at all.
        """
        last = max(self._observer.members, default=0)
        if last < self._spec.ranks:
            return ""
        return (
            f"a process names itself rank {last}, so that there are {last + 1} ranks at least, and"
            f" workload.ranks is {self._spec.ranks}: correct it, and have each rank name itself"
            " (RANK in its environment, or a beacon)"
        )

    def _short(self) -> str:
        """That fewer ranks were found than there are: a run proves nothing with part of them. A
        later generation may have lost some.
        """
        found, spec = len(self._observer.members), self._spec
        if found >= spec.ranks or self._observer.generation > 1:
            return ""
        return f"steps are reported, and {found} of {spec.ranks} ranks were found"

    def _unranked(self, now: int) -> str:
        self._unranked_ns = self._unranked_ns or now
        if self._seconds(self._unranked_ns) < UNRANKED_S:
            return ""
        return f"steps up to {self._observer.committed} are reported, and no rank was found"

    def _unread(self, now: int) -> str:
        found = derive(self._listener.recent)
        if found is None or not self._plenty(found):
            self._unread_ns = 0
            return ""
        self._unread_ns = self._unread_ns or now
        if self._seconds(self._unread_ns) < UNREAD_S:
            return ""
        return unread_steps(Findings.of(self._spec, self._observer, self._listener), found)

    def _plenty(self, found: Derived) -> bool:
        """Whether these are certainly the steps, rather than some that come before training."""
        wanted = min(UNREAD_STEPS, max(LEAST_UNREAD, self._spec.steps // 2))
        return found.certain(self._spec.steps) and found.steps >= wanted

    def _seconds(self, since_ns: int) -> float:
        return (self._now_ns() - since_ns) / NS
