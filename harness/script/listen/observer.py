"""Interprets a command's processes and reports: generations, failures, and progress.

An observer only observes; it controls nothing. A *generation* is an uninterrupted stretch of
progress by one set of rank processes. A new one starts when

- rank processes are found for the first time (``start``) or some are new (``restart``);
- steps are reported again after a hang, by the same processes (``resumed``);
- steps beyond the interrupted one are reported after a rank was lost: the others continue without
  it (``shrunk``);
- the same after a rank's script reported that it raised, or on any step of that rank, if all ranks
  are alive (``resumed``);
- a rank reports a step below its last one, which it had reported before: the script itself went
  back (``rollback``).

A failure must be visible from outside: a rank that exits with an error, or well after a fault told
it to end, a rank whose script reported at its point that it raises, or no step for longer than the
bound learned from the steps so far. Later failures in the same generation (peers that fail as well)
are not counted, except for ranks killed within ``SAME_BLOW_S`` of the first.
"""

from __future__ import annotations

import math
import signal
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.script.listen.numbers import in_json
from trainchaos.harness.script.listen.progress import ProgressReport
from trainchaos.recovery.process.host import RecordEvent

NS = 1e9
STALL_FLOOR_S = 5.0  # a shared machine may well pause for some seconds
STALL_MEDIANS = 20.0
STALL_LONGEST = 4.0
LEARNED_FROM = 3
SAME_BLOW_S = 2.0
LATE_LINES = 20  # of a rank, among which one may come after those of later steps
MOST_STEPS = 100  # multiple of the announced steps; larger numbers are not step counts
KILLED = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


@dataclass
class Observer:
    """One arm's job as seen from outside. ``record``: writes events; ``state_of``: the kernel's
    state of a process. ``began_again``: steps went back to the first ones, with no failure to
    explain it.
    """

    record: RecordEvent
    state_of: Callable[[str], str]
    _: KW_ONLY
    steps: int
    deadline_s: float
    source: str
    generation: int = 0
    members: dict[int, str] = field(default_factory=dict)
    committed: int = 0
    reports: int = 0
    nonfinite: bool = False
    began_again: bool = False

    def __post_init__(self) -> None:
        self._lowest = 0  # of the steps reported
        self._lost: set[str] = set()
        self._noticed: set[str] = set()  # told to end since the command was started
        self._steps_of: dict[int, int] = {}  # by rank, in this generation
        self._newest: dict[int, deque[int]] = {}  # reports, by rank, in this generation
        self._first_step: int | None = None  # of this generation
        self._last_step: int | None = None
        self._reports_here = self._last_ns = 0
        self._stride = 1
        self._intervals: deque[float] = deque(maxlen=200)
        self._cause = ""  # of the first failure of this generation
        self._failed_ns = self._failed_step = self._failures = 0
        self._failed_rank: int | None = None
        # ranks that exited with an error after the last step
        self._late: list[tuple[str, int | None, int | None, int]] = []
        self._zero_based = False
        self._other = OtherWork(self.record)
        # a process was busy since the last step: the gap to the next step is not a step time
        self._paused = False

    @property
    def failing(self) -> bool:
        """Whether a failure was seen and no new generation has started since."""
        return bool(self._cause)

    @property
    def finished(self) -> bool:
        """Whether the last step was reported, as far as the reports' spacing shows."""
        return self.reports > 0 and self.committed + self._stride > self.steps

    @property
    def preempted(self) -> bool:
        """Whether a process was told to end before the last step."""
        return bool(self._noticed) and self.reports > 0 and not self.finished

    @property
    def first_of_generation(self) -> bool:
        """Whether exactly one step of this generation was reported."""
        return self._reports_here == 1

    @property
    def committed_here(self) -> int | None:
        """The last step that this generation reported; None before its first."""
        return self._last_step

    @property
    def last_said(self) -> int | None:
        """As ``committed_here``, in the command's own count: from 0 or 1."""
        return None if self._last_step is None else self._last_step - self._zero_based

    @property
    def resumed_after(self) -> int:
        """The step this generation began with, as far as the reports' spacing shows; 0 in the
        first.
        """
        known = self.generation > 1 and self._first_step is not None
        return (self._first_step or 0) - self._stride if known else 0

    def process_of(self, rank: int) -> str | None:
        """The live process of a rank, or None."""
        name = self.members.get(rank)
        return None if name in self._lost else name

    def rank_of(self, process: str) -> int | None:
        """The rank that a process holds in this generation."""
        return next((rank for rank, name in self.members.items() if name == process), None)

    def on_ranks(self, members: Mapping[int, str], now_ns: int) -> None:
        """All present ranks have been found; ``members``: rank -> process."""
        if set(members.values()) - set(self.members.values()):
            self._begin("start" if self.generation == 0 else "restart", members, now_ns)

    def on_start(self) -> None:
        """The command is started, for the first time or again."""
        self._noticed.clear()

    def on_notice(self, process: str) -> None:
        """A fault tells a process to end."""
        self._noticed.add(process)

    def on_exit(self, process: str, exit_code: int | None, signum: int | None, now_ns: int) -> None:
        """A rank has exited. With exit code 0 it has not failed, unless it was told to end."""
        if process not in self.members.values():
            return
        self._lost.add(process)
        if (rank := self.rank_of(process)) is not None:
            self._other.end(rank, now_ns)
        if exit_code == 0 and self.preempted and process in self._noticed and not self._cause:
            detail = f"it was told to end, and ended with exit code 0 after step {self.committed}"
            self._fail("notice", process, detail, now_ns)
        if exit_code == 0 or not self.reports:
            return  # before the first step there is nothing to recover
        if self.finished:  # the end of the command shows whether the rest needed it
            self._late.append((process, exit_code, signum, now_ns))
            return
        same_blow = (
            self._cause == "exit"
            and signum in KILLED
            and (now_ns - self._failed_ns) / NS <= SAME_BLOW_S
        )
        if not self._cause or same_blow:
            self._fail("exit", process, _how(exit_code, signum), now_ns)

    def on_error(self, process: str, detail: str, now_ns: int) -> None:
        """A rank's script reported that it raises: the step has failed, whatever happens to the
        process.
        """
        failed = self._cause or process not in self.members.values()
        if self.reports and not failed and not self.finished:
            self._fail("error", process, detail, now_ns)

    def on_command_failed(self, how: str, now_ns: int) -> None:
        """The command itself ended with an error; a failure unless a rank's failure was seen. After
        the last step it is attributed to the first rank that was killed, or else failed, if there
        is one.
        """
        if self._cause or not self.reports:
            return
        first = min(self._late, key=lambda one: (one[2] not in KILLED, one[3]), default=None)
        process, detail = None, f"the command ended with {how}"
        if first is not None:
            process, detail = first[0], f"{_how(*first[1:3])}, after the last step"
        self._fail("exit", process, detail, now_ns)

    def on_progress(self, progress: ProgressReport, now_ns: int) -> None:
        """A step was reported, or that a process is busy."""
        if progress.busy_s is not None:
            self._paused = True
            self._other.begin(progress.rank, progress.what, progress.busy_s, now_ns)
            return
        self._other.on_step(progress.rank, now_ns)
        if progress.alone and self.generation > 1 and self._first_step is None:
            return  # of a new process, whose step is not known yet
        if self.reports == 0 and progress.step == 0:
            self._zero_based = True
        step = progress.step + self._zero_based
        if not 1 <= step <= MOST_STEPS * self.steps:
            return
        self._note_return(step)
        self._turn_page(step, progress.rank, now_ns)
        started, loss, said = self._last_ns, progress.loss, progress.time_ns
        self.nonfinite = self.nonfinite or not (loss is None or math.isfinite(loss))
        when = said if said is not None and started <= said <= now_ns else now_ns
        self.reports += 1
        self._reports_here += 1
        odd: dict[str, Any] = {"unread": dict(progress.unread)} if progress.unread else {}
        odd |= {"spoilt": "gradient norm"} if progress.spoilt else {}
        self.record(
            Kind.STEP_REPORTED,
            step=step,
            rank=progress.rank,
            loss=in_json(loss),
            samples=progress.samples,
            reported_ns=when,
            source=self.source,
            **odd,
        )
        if self._first_step is None:
            self._first_step = step
        if progress.rank is not None:
            self._steps_of[progress.rank] = max(step, self._steps_of.get(progress.rank, 0))
            self._newest.setdefault(progress.rank, deque(maxlen=LATE_LINES)).append(step)
        if self._last_step is None or step > self._last_step:
            if self._last_step is not None:
                if not self._paused:
                    self._intervals.append((when - started) / NS)
                self._stride = min(
                    step - self._last_step, self._stride if self.reports > 2 else step
                )
            self._last_step, self._last_ns, self.committed = step, when, step
            self._paused = bool(self._other)

    def tick(self, now_ns: int) -> None:
        """Detect a hang."""
        if self._last_step is None or self._cause or self.finished or now_ns < self.busy_until_ns:
            return
        bound = self.stall_bound_s()
        waited = (now_ns - max(self._last_ns, self.busy_until_ns)) / NS
        if waited > bound:
            known = "not known"
            if self._intervals:
                known = f"{statistics.median(self._intervals):.3g} s"
            detail = f"no step reported for {waited:.1f} s (usual: {known})"
            silent = {"silent_s": round(waited, 6), "limit_s": round(bound, 6)}
            self._fail("hang", self._suspect(), detail, now_ns, **silent)

    @property
    def busy_until_ns(self) -> int:
        """Until when a process has announced work other than training; 0 if none has."""
        return self._other.until_ns

    def stall_bound_s(self) -> float:
        """How long without a step is a hang: learned from the gaps so far, at most the progress
        deadline.
        """
        if len(self._intervals) < LEARNED_FROM:
            return self.deadline_s
        learned = max(
            STALL_FLOOR_S,
            STALL_MEDIANS * statistics.median(self._intervals),
            STALL_LONGEST * max(self._intervals),
        )
        return min(learned, self.deadline_s)

    def _note_return(self, step: int) -> None:
        """Note a step that begins the count again: that of an epoch, as nothing has failed."""
        first, last = self._lowest or step, self.committed
        if not self._failures and step <= first and last - first >= LEARNED_FROM * self._stride:
            self.began_again = True
        self._lowest = min(first, step)

    def _turn_page(self, step: int, rank: int | None, now_ns: int) -> None:
        """Start a new generation if a report shows that one has started."""
        last = self._last_step
        if last is None:
            return
        own = None if rank is None else self._steps_of.get(rank)
        late = rank is not None and self._comes_late(rank, step)
        living = {r: name for r, name in self.members.items() if name not in self._lost}
        if own is not None and step < own and not late:
            self._begin("rollback", living, now_ns)
        elif self._cause == "hang" and step > last:
            self._begin("resumed", living, now_ns)
        elif self._cause in ("exit", "error", "notice") and living:
            beyond = step > self._failed_step + self._stride
            raised = self._cause == "error" and rank is not None and rank == self._failed_rank
            if beyond or (raised and rank in living and step > last):
                cause = "shrunk" if len(living) < len(self.members) else "resumed"
                self._begin(cause, living, now_ns)

    def _comes_late(self, rank: int, step: int) -> bool:
        """Whether a rank's lines come in another order: who goes back does steps once more."""
        own, newest = self._steps_of.get(rank, 0), self._newest.get(rank, ())
        return step not in newest and own - step < LATE_LINES // 2 * self._stride

    def _begin(self, cause: str, members: Mapping[int, str], now_ns: int) -> None:
        self.generation += 1
        self.members = dict(sorted(members.items()))
        self._steps_of, self._last_ns, self._reports_here = {}, now_ns, 0
        self._newest = {}
        self._first_step = self._last_step = None
        self._cause, self._late = "", []
        names = list(self.members.values())
        self.record(Kind.GENERATION_STARTED, members=names, state="own", source=None, cause=cause)

    def _fail(
        self, cause: str, process: str | None, detail: str, now_ns: int, **measured: Any
    ) -> None:
        self._cause, self._failed_ns, self._failed_step = cause, now_ns, self._last_step or 0
        self._failed_rank = None if process is None else self.rank_of(process)
        self._failures += 1
        self.record(
            Kind.FAILURE_DETECTED,
            failure=self._failures,
            cause=cause,
            process=process,
            rank=self._failed_rank,
            detail=detail,
            **measured,
        )

    def _suspect(self) -> str | None:
        """The process that hangs: the one stopped according to the kernel, or the one whose reports
        are behind all others.
        """
        stopped = [name for name in self.members.values() if self.state_of(name) in ("T", "t")]
        if stopped:
            return stopped[0] if len(stopped) == 1 else None
        if len(self._steps_of) == len(self.members) > 1:
            first, second = sorted(self._steps_of, key=lambda rank: self._steps_of[rank])[:2]
            if self._steps_of[first] < self._steps_of[second]:
                return self.members[first]
        return None


class OtherWork:
    """Work other than training that ranks announced (``beacon.busy``): while one does it, no step
    is due. ``record``: writes events."""

    def __init__(self, record: RecordEvent) -> None:
        self._record = record
        self._until_ns: dict[int | None, int] = {}
        self._doing: dict[int | None, tuple[str, int]] = {}  # that work, and when it began

    def __bool__(self) -> bool:
        """Whether a rank announced some and has reported no step since."""
        return bool(self._until_ns)

    @property
    def until_ns(self) -> int:
        """Until when a rank has announced it; 0 if none has."""
        return max(self._until_ns.values(), default=0)

    def begin(self, rank: int | None, what: str, limit_s: float, now_ns: int) -> None:
        """A rank announced work that takes at most ``limit_s`` seconds; 0: it is over."""
        self._until_ns[rank] = now_ns + int(limit_s * NS)  # a step is expected from then on
        self.end(rank, now_ns)
        if limit_s:
            self._doing[rank] = what, now_ns
            self._record(Kind.BUSY, rank=rank, what=what, limit_s=limit_s)

    def on_step(self, rank: int | None, now_ns: int) -> None:
        """A rank reported a step."""
        self._until_ns.pop(rank, None)
        self.end(rank, now_ns)

    def end(self, rank: int | None, now_ns: int) -> None:
        """Record that the rank's other work, if any, is over."""
        if (doing := self._doing.pop(rank, None)) is not None:
            seconds = round((now_ns - doing[1]) / NS, 6)
            self._record(Kind.BUSY_ENDED, rank=rank, what=doing[0], seconds=seconds)


def _how(exit_code: int | None, signum: int | None) -> str:
    """How a process ended, for people."""
    if signum is not None:
        return f"signal {signum}"
    return "gone, with an unknown exit status" if exit_code is None else f"exit code {exit_code}"
