"""The time until a command's first step: what is known meanwhile, and whether it can be observed at
all.

In the first arm of a run this is a check. A command whose steps are printed and not read, or
reported by processes that are not found, is stopped at once: no arm of it would prove anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.script.listen.derive import derive
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


@dataclass(kw_only=True)
class Startup:
    """One arm's. ``check``: it is the first arm of its command in the run; ``miscounted``: why the
    ranks are others than those of the scenario, so that it was stopped; "" if it was not.
    """

    spec: WorkloadSpec
    ranks: Ranks
    listener: CommandListener
    observer: Observer
    now_ns: Callable[[], int]
    check: bool
    miscounted: str = ""

    def __post_init__(self) -> None:
        self._findings = Findings(spec=self.spec, observer=self.observer, listener=self.listener)
        self._began_ns = self.now_ns()
        self._judged_ns = self._unread_ns = self._unranked_ns = 0  # since when

    def known(self) -> str:
        """What is known while no step was seen, or no rank that made one, for people; empty
        afterwards.
        """
        spec, lines, seen = self.spec, self.listener.text.count, self.observer
        if seen.reports and seen.generation:
            return ""
        found = len(self.ranks.living())
        words = [f"{found} of {spec.ranks} ranks found"] if found or spec.ranks > 1 else []
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
        """Why the command cannot be observed as the scenario says, for people; empty: it can, or
        that is not known yet.
        """
        now = self.now_ns()
        if not self.check or (now - self._judged_ns) / NS < JUDGE_EVERY_S:
            return ""
        self._judged_ns = now
        seen = self.observer
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
            return keeps_ending(self._findings, seen.generation)
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
        short = len(members) < ranks and self.observer.generation == 1
        return (
            f"steps are reported, and {len(members)} of {ranks} ranks were found" if short else ""
        )

    def _unread(self, now: int) -> str:
        found = derive(self.listener.text.recent)
        wanted = min(UNREAD_STEPS, max(LEAST_UNREAD, self.spec.steps // 2))
        # certainly the steps, rather than some that come before training
        if found is None or not found.certain(self.spec.steps) or found.steps < wanted:
            self._unread_ns = 0
            return ""
        self._unread_ns = self._unread_ns or now
        late = self._seconds(self._unread_ns) >= UNREAD_S
        return unread_steps(self._findings, found) if late else ""

    def _seconds(self, since_ns: int) -> float:
        return (self.now_ns() - since_ns) / NS
