"""Plays one arm of a command: starts it, watches it, injects the planned faults, and writes down
what happens.

The counterpart of ``harness.run.orchestrator`` for a program that is not ours: nothing is asked of
it and it is told nothing, so that its own recovery is what is measured.
"""

from __future__ import annotations

import os
import signal as signals
import socket
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from chaos.events.log import ORCHESTRATOR, Event, EventWriter, Kind
from chaos.fault.base import Fault
from chaos.scenario.sla import parse_stop
from chaos.schedule import plan as schedule
from chaos.schedule.stops import Facts, Tally, to_stop
from harness.arm.in_force import InForce
from harness.arm.watching import StopFlag, Watcher
from harness.inject.injector import Injector
from harness.launch.launcher import ArmSetup
from harness.launch.storage import Storage, mount_for
from harness.script.agents import Agents
from harness.script.listen.listening import Listener
from harness.script.listen.observer import Observer
from harness.script.outside import Outside
from harness.script.processes.command import Command
from harness.script.processes.environment import prepare
from harness.script.processes.leavings import Leavings
from harness.script.processes.ranks import Gone, Ranks
from harness.script.rollcall import RollCall
from harness.script.words import Told, ending
from harness.undo.ledger import Ledger
from harness.undo.records import KillSession
from recovery.process.processes import become_subreaper
from recovery.transport.wire import Message

TICK_S = 0.02
SCAN_FORMING_S = 0.05  # between looks for ranks while some are missing
SCAN_STEADY_S = 0.5
TERM_GRACE_S = 3.0  # from the request to end to the kill
NS = 1e9


class ScriptArm(Outside):
    """One arm of a command. Implements ``harness.arm.fault_context.Scene``."""

    def __init__(
        self, setup: ArmSetup, kinds: Mapping[str, type[Fault]], *, watcher: Watcher, stop: StopFlag
    ) -> None:
        become_subreaper()
        self.setup = setup
        self.ledger, self.in_force = Ledger(setup.run.ledger), InForce()
        self.outcome, self.reason = "", ""
        self._watcher, self._stop = watcher, stop
        self._spec = spec = setup.cell.scenario.workload
        self._prepared = prepare(setup)
        self._writer = EventWriter(setup.run.events(setup.id), ORCHESTRATOR, self.now_ns)
        self._listener = Listener(spec, self._prepared, self.now_ns)
        self._ranks = Ranks()
        self._roll = RollCall(spec, self._prepared.output)
        self._leavings = Leavings()
        self._left: list[dict[str, Any]] = []
        self.observer = Observer(
            self.record,
            self.os_state,
            steps=spec.steps,
            deadline_s=spec.progress_deadline,
            source=self._listener.source,
        )
        plan: tuple[schedule.PlannedFault, ...] = ()
        if setup.arm == "faulted":
            plan = schedule.plan_scenario(setup.cell.scenario, kinds, seed=setup.seed, spares=0)
        self._agents = Agents.of(spec, self._prepared.points, plan, kinds, self._listener.raised)
        if (fd := self._agents.fileno()) is not None:
            self._ranks.register(fd)
        self.injector = Injector(self, plan, kinds)
        self._rules = [parse_stop(c.when) for c in setup.cell.scenario.stop_conditions]
        self._tally = Tally()
        self.storage: Storage | None = None
        self._stored = False  # whether anything was ever seen there
        self._command: Command | None = None
        self._record_of_command = ""
        self._attempt = 0
        self._scan_ns = self._sign_ns = self._step_ns = 0
        self._gone: list[Gone] = []  # noticed, and not told of yet
        self._members: dict[int, str] = {}
        self._missing = True
        self._generation = 0
        self._asked_ns = 0
        self._later: list[tuple[int, Callable[[], None]]] = []

    def run(self) -> str:
        """Play the arm to its end and return the outcome; nothing of it lives afterwards, however
        it ends.
        """
        self._begin()
        try:
            self.storage = mount_for(self.setup)
            self.injector.announce()
            self._start_command()
            while not self.outcome:
                self._turn()
        except BaseException as error:
            if not self.outcome:
                self.outcome = "interrupted" if isinstance(error, KeyboardInterrupt) else "broken"
                self.reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end()
        return self.outcome

    # ---- the loop

    def _turn(self) -> None:
        self._gone += self._ranks.wait(TICK_S)
        if self._command is not None:
            self._command.look()
        self._listener.listen()
        self._find_ranks()
        self._take_progress()  # what was said before it died counts
        self._agents.hear(self.injector, self.observer, self._ranks, self.record, self.now_ns())
        self._take_exits()
        self.observer.tick(self.now_ns())
        self._on_generation()
        done = self.observer.committed_here
        self.injector.tick(done or 0)
        if done is not None:  # before its first report nobody knows where a generation is
            for process, message in self._agents.due(done, self.observer.resumed_after):
                self.injector.on_said(process, self.observer.rank_of(process), message)
        self._do_what_is_due()
        if self._command is not None and self._command.ended is not None and not self.outcome:
            self._on_command_ended(self._command)
        self._check_bounds()
        self._watcher.on_progress(self.setup, self.observer.committed, self.now_ns())

    def _take_progress(self, pids: Set[int] | None = None) -> None:
        """``pids``: only what these processes said."""
        if self._missing and self._listener.overdue():
            if self._members and not self.observer.generation:
                self.observer.on_ranks(self._members, self.now_ns())  # with those that were found
            self._missing = False
        if self._missing:
            return
        before = (self.observer.generation, self.observer.committed)
        for progress in self._listener.take(
            pids, beyond=self.observer.last_said if self._gone else None
        ):
            reports = self.observer.reports
            self.observer.on_progress(self._roll.whose(progress), self.now_ns())
            self._on_generation()
            if self.observer.reports > reports and self.observer.first_of_generation:
                self.injector.on_training()
        if (self.observer.generation, self.observer.committed) != before:
            self._sign_ns = self._step_ns = self.now_ns()

    def _find_ranks(self) -> None:
        now = self.now_ns()
        changing, spoken = self._missing or self.observer.failing, self._listener.waiting
        every_s = SCAN_FORMING_S if changing else SCAN_STEADY_S
        early = (now - self._scan_ns) / NS < every_s
        if self._command is None or (early and not (changing and spoken)):
            return
        self._scan_ns = now
        self._stored = self._stored or (self.storage is not None and self.storage.used())
        command = self._command
        found = self._roll.find(command, self._listener.hints, spoken=spoken)
        sure, unsettled = self._ranks.settled(found, now / NS, spoken=spoken)
        members, new = self._ranks.hold(sure)
        self._leavings.look(command.guard_pid, self._ranks.name_of)
        for rank in new:
            self._sign_ns = now
            self.record(
                Kind.PROCESS_SPAWNED,
                process=rank.name,
                pid=rank.found.pid,
                role="worker",
                mode="script",
                rank=rank.found.rank,
            )
        strangers = set(members.values()) - set(self.observer.members.values())
        if not strangers and self.observer.generation:
            self._missing = unsettled
            return
        self._members = members
        self._missing = (
            unsettled or not members or len(members) < (self._ranks.world or self._spec.ranks)
        )
        if not self._missing:
            self._close_generation()
            self.observer.on_ranks(members, now)

    def _close_generation(self) -> None:
        """What its ranks had said before they ended, and their ends, come before those that take
        their place.
        """
        self._gone += self._ranks.wait(0.0)
        self._listener.listen()
        self._take_progress(self._ranks.ended(self.observer.members.values()))
        self._take_exits()

    def _take_exits(self, more: Sequence[Gone] = ()) -> None:
        self._gone += more
        while self._gone:
            self._on_gone(self._gone.pop(0))

    def _on_generation(self) -> None:
        """A new generation: its ranks hear of the faults that wait for them, as those of built-in
        workloads do.
        """
        if self.observer.generation == self._generation:
            return
        self._generation = self.observer.generation
        self._sign_ns = self.now_ns()
        self._agents.forget()
        for rank, process in self.observer.members.items():
            self.injector.arm(process, rank)
        if self._generation > 1:
            self.injector.on_event("regroup")

    def _on_gone(self, gone: Gone) -> None:
        """Who was asked to end, or killed with the command, has not failed."""
        asked = {"asked_ns": self._asked_ns} if self._asked_ns else {}
        self.record(
            Kind.PROCESS_EXITED,
            process=gone.name,
            pid=gone.pid,
            exit_code=gone.exit_code,
            signal=gone.signal,
            expected=bool(asked) or gone.exit_code == 0,
            last_seq=None,
            **asked,
        )
        if not asked:
            self.observer.on_exit(gone.name, gone.exit_code, gone.signal, self.now_ns())

    def _start_command(self) -> None:
        self._attempt += 1
        prepared = self._prepared
        self._command = command = Command.start(
            prepared.argv, directory=prepared.directory, env=prepared.env, output=prepared.output
        )
        self._sign_ns = self.now_ns()
        if command.error:
            self._finish("gave-up", f"the command could not be started: {command.error}")
            return
        undo = KillSession.of(command.guard_pid, "guard of the command")
        self._record_of_command = self.ledger.will(undo, arm=self.setup.id, process="command")
        self._ranks.register(command.fileno())
        self._missing = True
        self.record(
            Kind.COMMAND_STARTED,
            attempt=self._attempt,
            pid=command.pid,
            argv=list(self._prepared.argv),
        )

    def _on_command_ended(self, command: Command) -> None:
        """Everything it said is taken in before it is judged; then it is over, or started again."""
        ended = command.ended
        assert ended is not None
        self._agents.hear(self.injector, self.observer, self._ranks, self.record, self.now_ns())
        self._take_exits(self._ranks.wait(0.0))
        self._missing = False
        self._listener.listen(to_end=True)
        self._take_progress()
        if command.lost:
            self._finish("broken", "the process that holds the command was killed")
            return
        again = not ended.well and self._attempt <= self._spec.restarts
        if not ended.well and (again or not self.observer.finished):
            self.observer.on_command_failed(ended.how, self.now_ns())
        self._left = self._leavings.processes(command.guard_pid, command.pid) if ended.well else []
        self._close_command()
        if not again:
            self._finish(*ending(Told.of(self._spec, self.observer, self._listener), ended))
            return
        reason = (
            f"the command ended with {ended.how}: started again ({self._attempt} of"
            f" {self._spec.restarts})"
        )
        self.record(Kind.DECISION, actions=[{"start": "command"}], reason=reason)
        self._start_command()

    def _check_bounds(self) -> None:
        if self.outcome:
            return
        now = self.now_ns()
        if self._stop.signum:
            self._finish("interrupted", signals.Signals(self._stop.signum).name)
        facts = Facts(
            idle_s=(now - self._step_ns) / NS,
            wall_s=(now - self._started_ns) / NS,
            healthy=(
                sum(1 for rank in range(self._spec.ranks) if self.process_of(rank))
                if self._generation
                else None
            ),
            failures=self._tally.failures,
            nonfinite=self.observer.nonfinite,
        )
        if reason := to_stop(self._rules, facts):
            self._finish("halted", reason)
        waited_ns = now - max(self._sign_ns, self.observer.busy_until_ns)
        if waited_ns / NS > self._spec.patience(begun=bool(self.observer.reports))[0]:
            self._finish(*ending(Told.of(self._spec, self.observer, self._listener), None))

    def _finish(self, outcome: str, reason: str) -> None:
        if not self.outcome:
            self.outcome, self.reason = outcome, reason

    def _do_what_is_due(self) -> None:
        now, rows = self.now_ns(), self._later
        self._later = [row for row in rows if row[0] > now]
        for action in [row[1] for row in rows if row[0] <= now]:
            action()

    # ---- beginning and end

    def _begin(self) -> None:
        scenario, spec = self.setup.cell.scenario, self._spec
        self._started_ns = self._step_ns = self._sign_ns = self.now_ns()
        self._write(
            Kind.ACTOR_STARTED, pid=os.getpid(), host=socket.gethostname(), wall_ns=time.time_ns()
        )
        self._write(
            Kind.RUN_STARTED,
            arm=self.setup.arm,
            cell=self.setup.cell.id,
            repeat=self.setup.repeat,
            seed=self.setup.seed,
            ranks=spec.ranks,
            spares=0,
            steps=spec.steps,
            global_batch=spec.global_batch,
            strategy=scenario.recovery.strategy,
            order={"seed": 0, "samples": 0},
            checkpoint_every=None,
            data="",
            data_digest="",
            observed=True,
            launcher=scenario.launcher.kind,
        )

    def _end(self) -> None:
        """Ask it to end, kill what does not, heal, account."""
        left = 0
        try:
            left = self._close_command()
            self.injector.close()
        finally:
            if self.storage is not None:
                self._stored = self._stored or self.storage.used()
                self.storage.close()
            self._listener.close()
            self._agents.close()
            self._ranks.close()
        processes = [{"pid": 0, "process": f"{left} of the command"}] if left else []
        memory = self._leavings.memory()
        self._write(
            Kind.LEFTOVERS, processes=processes, ports=[], shared_memory=[], of_command=memory
        )
        self._write(
            Kind.RUN_FINISHED,
            outcome=self.outcome or "broken",
            reason=self.reason,
            refused=self._listener.refused,
            committed_step=self.observer.committed,
            unused=self.storage is not None and not self._stored,
        )
        self._writer.close()

    def _close_command(self) -> int:
        """End the command and all that came of it; returns how many processes could not be
        killed.
        """
        command, self._command = self._command, None
        if command is None:
            return 0
        self._take_exits(self._ranks.wait(0.0))  # who is gone by now was not asked to
        self._asked_ns = self.now_ns()
        if command.pid:
            self._ask_to_end(command)
            self._ranks.unregister(command.fileno())
        left = command.close(self._prepared.mark)
        self._reap_ranks()
        self._asked_ns = 0
        ended = command.ended
        if ended is not None:
            self.record(
                Kind.COMMAND_ENDED,
                attempt=self._attempt,
                exit_code=ended.exit_code,
                signal=ended.signal,
                asked=self.outcome not in ("", "completed"),
                killed=command.killed,
                left=self._left,
            )
        self._left = []
        if self._record_of_command and not left:
            self.ledger.undone(self._record_of_command, "ended")
        self._record_of_command = ""
        return left

    def _ask_to_end(self, command: Command) -> None:
        deadline = time.monotonic() + TERM_GRACE_S
        if command.ended is None:
            command.terminate()
        while command.ended is None and time.monotonic() < deadline:
            self._take_exits(self._ranks.wait(TICK_S))
            command.look()

    def _reap_ranks(self) -> None:
        deadline = time.monotonic() + TERM_GRACE_S
        while self._ranks.living() and time.monotonic() < deadline:
            self._take_exits(self._ranks.wait(TICK_S))

    # ---- Scene

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        return time.monotonic_ns()

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event; injector and watcher hear of it."""
        event = self._write(kind, step=step, generation=generation, **data)
        self.injector.observe(event)
        if kind is Kind.FAULT_INJECTED:
            self._agents.injected(event)
        self._tally.observe(event)
        if kind is Kind.FAILURE_DETECTED:
            self.injector.on_event("recovery_started")
        return event

    def _write(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        self._writer.generation = self.observer.generation if hasattr(self, "observer") else 0
        event = self._writer.write(kind, step=step, generation=generation, **data)
        self._watcher.on_event(self.setup, event)
        return event

    def send(self, process: str, message: Message) -> bool:
        """For the ranks' agents, which a command does not have: the arm keeps their points for
        them.
        """
        return self._agents.take(process, message)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later, if the arm still runs then."""
        self._later.append((self.now_ns() + int(delay_s * NS), action))
