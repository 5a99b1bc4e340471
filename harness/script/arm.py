"""One arm of a user's command: starts it, watches it, and injects the planned faults.

The counterpart of ``harness.run.orchestrator`` for a program that is not ours. The harness sends
the program nothing and needs nothing from it, so that its own recovery is measured.
``recovery.supervise.loop`` has the loop around it; ``harness.script.scene`` is what faults see
of it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, EventWriter, Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.harness.arm.observer import ArmObserver, Timers, Vitals, Watcher, introduce, plan_of
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.script.listen.listening import CommandListener
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.outcome_text import CommandFindings
from trainchaos.harness.script.point_broker import PointBroker
from trainchaos.harness.script.points import Points
from trainchaos.harness.script.processes.command import Command
from trainchaos.harness.script.processes.environment import PreparedCommand, prepare
from trainchaos.harness.script.processes.finding import RankFinder
from trainchaos.harness.script.processes.leftovers import CommandLeftovers
from trainchaos.harness.script.processes.ranks import Ranks
from trainchaos.harness.script.rank_watch import TICK_S, RankWatch
from trainchaos.harness.script.scene import CommandScene
from trainchaos.recovery.process.processes import become_subreaper
from trainchaos.recovery.supervise.loop import Loop
from trainchaos.recovery.supervise.supervision import StopFlag

NS = 1e9


class ScriptArm(Loop):
    """One arm of a command."""

    def __init__(
        self,
        setup: ArmSetup,
        kinds: Mapping[str, type[Fault]],
        *,
        watcher: Watcher,
        stop: StopFlag,
        first: bool = False,
    ) -> None:
        """``first``: no arm of this command was played in this run yet, so its start is a check."""
        become_subreaper()
        now_ns = time.monotonic_ns
        super().__init__(EventWriter(setup.run.events(setup.id), ORCHESTRATOR, now_ns), stop)
        self._setup, self._kinds, self._watcher = setup, kinds, watcher
        self._spec = spec = setup.cell.scenario.workload
        self._outcome, self._reason = "", ""
        self._unkilled = 0  # processes of the command that could not be killed
        prepared, timers = prepare(setup), Timers(now_ns)
        plan = plan_of(setup, kinds, spares=0)
        self._leftovers = CommandLeftovers()
        self._ranks = Ranks(leaves_children=spec.children == "leave")
        self._listener = CommandListener(
            spec,
            output=prepared.output,
            reports=prepared.reports,
            heard=prepared.heard,
            now_ns=now_ns,
        )
        self.seen = Observer(
            self.record,
            self._ranks.state,
            steps=spec.steps,
            deadline_s=spec.progress_deadline,
            source=self._listener.reader.source,
        )
        self._findings = CommandFindings(
            spec=spec,
            ranks=self._ranks,
            listener=self._listener,
            observer=self.seen,
            now_ns=now_ns,
            check=first,
        )
        points = partial(Points, prepared.points) if spec.points else None
        self._broker = PointBroker(plan, kinds, points, printed=self._listener.raised)
        if (fd := self._broker.fileno()) is not None:
            self._ranks.register(fd)
        self.scene = CommandScene(
            setup,
            ranks=self._ranks,
            observer=self.seen,
            broker=self._broker,
            timers=timers,
            record=self.record,
        )
        self._injector = Injector(self.scene, plan, kinds)
        self.observer = ArmObserver(setup, self, self._injector, timers, watcher)
        self._watch = self._following(prepared)

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event, and fire the triggers that wait for it."""
        event = super().record(kind, step=step, generation=generation, **data)
        if kind is Kind.FAULT_INJECTED:
            self._findings.injected = kind_of_fault = str(event.data["kind"])
            self._broker.injected(event)
            if self._kinds[kind_of_fault].gives_notice:
                self.seen.on_notice(str(event.data["target"].get("process")))
        if kind is Kind.FAILURE_DETECTED:
            self._injector.on_event("recovery_started")
        return event

    def _following(self, prepared: PreparedCommand) -> RankWatch:
        """What starts the command and follows its ranks."""
        setup, spec = self._setup, self._spec
        return RankWatch(
            spec=spec,
            prepared=prepared,
            arm=setup.id,
            holds_launcher=any(one.target.role == "launcher" for one in setup.cell.scenario.faults),
            ledger=self.scene.ledger,
            ranks=self._ranks,
            finder=RankFinder(spec, prepared.output),
            listener=self._listener,
            observer=self.seen,
            broker=self._broker,
            injector=self._injector,
            leftovers=self._leftovers,
            record=self.record,
            now_ns=time.monotonic_ns,
        )

    # ---- the job

    @property
    def outcome(self) -> str:
        return self._outcome

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def generation(self) -> int:
        """The observer's generation."""
        return self.seen.generation

    @property
    def committed(self) -> int:
        """The last reported step."""
        return self.seen.committed

    @property
    def observed(self) -> bool:
        """Whether its steps were read, and its ranks found."""
        return self._findings.observed

    @property
    def ending(self) -> bool:
        """Whether the arm has an outcome."""
        return bool(self.outcome)

    over = ending  # processes that are left are ended after the last turn

    def introduce(self) -> None:
        """Describe the command by its scenario; its internals are unknown."""
        process = {"pid": os.getpid(), "host": socket.gethostname(), "wall_ns": time.time_ns()}
        introduce(
            self._setup,
            self.record,
            process,
            0,
            order={"seed": 0, "samples": 0},
            checkpoint_every=None,
            data="",
            data_digest="",
            observed=True,
            launcher=self._setup.cell.scenario.launcher.kind,
        )

    def start(self) -> None:
        """Mount the file system of the checkpoints, if a fault needs one, and start the command."""
        self.scene.mount()
        self.observer.before_start()
        self._start_command()

    def _start_command(self) -> None:
        """Start it, for the first time or again."""
        self.seen.on_start()
        error = self._watch.start()
        self._findings.starts = self._watch.starts
        if error:
            self.stop("gave-up", f"the command could not be started: {error}")

    def turn(self) -> None:
        """Process exits and reports in the order in which they must have happened; then let the
        injector act.
        """
        self._watch.wait(TICK_S)
        command = self._watch.command
        if command is not None:
            command.look()
        self._watch.listen()
        if command is not None and self._watch.find_ranks(command):
            self.scene.look_at_storage()
        self._watch.take_progress()  # reports that it made before its death count
        self._hear_points()
        self._watch.take_exits()
        self.seen.tick(time.monotonic_ns())
        self._watcher.on_waiting(self._setup, self._findings.known())
        self._watch.arm_generation()
        done = self.seen.committed_here
        self._injector.tick(done or 0)
        if done is not None:  # before its first report the step of a generation is unknown
            for process, message in self._broker.due(done, self.seen.resumed_after):
                self._injector.on_said(process, self.seen.rank_of(process), message)

    def settle(self) -> None:
        """Notice that the command has ended."""
        command = self._watch.command
        if command is not None and command.ended is not None and not self.outcome:
            self._on_command_ended(command)

    def vitals(self) -> Vitals:
        """Living ranks, once ranks have been found; each holds the whole model."""
        living = sum(1 for rank in range(self._spec.ranks) if self.seen.process_of(rank))
        return Vitals(
            progress_ns=self._watch.progress_ns,
            healthy=living if self.seen.generation else None,
            nonfinite=self.seen.nonfinite,
        )

    def out_of_patience(self) -> tuple[str, str] | None:
        """The outcome when there is no sign of life within the scenario's deadlines, or when what
        there is cannot be read.
        """
        if blind := self._findings.blind():
            return "gave-up", blind
        since_ns = max(self._watch.sign_ns, self.seen.busy_until_ns)
        limit_s = self._spec.patience(begun=bool(self.seen.reports))[0]
        if (time.monotonic_ns() - since_ns) / NS <= limit_s:
            return None
        return self._findings.outcome(None)

    def stop(self, outcome: str, reason: str) -> None:
        """Set the outcome, unless there is one; the command is ended after the last turn."""
        if not self.outcome:
            self._outcome, self._reason = outcome, reason

    fail = stop

    def end_processes(self) -> None:
        """Ask the command to end, and kill the remaining processes."""
        self._unkilled = self._watch.close(asked=self.outcome not in ("", "completed"))

    def release(self) -> None:
        """Unmount, and close the listeners."""
        self.scene.close()
        self._listener.close()
        self._broker.close()
        self._ranks.close()

    def account(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Processes that could not be killed, and shared memory that is no longer used."""
        left = self._unkilled
        leftovers = {
            "processes": [{"pid": 0, "process": f"{left} of the command"}] if left else [],
            "ports": [],
            "shared_memory": [],
            "of_command": self._leftovers.memory(),
        }
        finished = {
            "refused": self._listener.reader.refused,
            "drawn": self._listener.reader.drawn,
            "committed_step": self.seen.committed,
            "unused": self.scene.storage_unused,
            "miscounted": self._findings.miscounted,
            "changed": "" if self.outcome == "completed" else self._findings.changed(),
        }
        return leftovers, finished

    # ---- its end

    def _on_command_ended(self, command: Command) -> None:
        """Process all its output, then judge the arm or start the command again."""
        ended = command.ended
        assert ended is not None
        self._hear_points()
        self._watch.take_last_words(well=ended.well)
        if command.lost:
            self.stop("broken", "the command's guard process was killed")
            return
        attempt, most = self._watch.starts, self._spec.restarts
        # A scheduler starts a preempted job again, however well it ended.
        again = (not ended.well or self.seen.preempted) and attempt <= most
        if not ended.well and (again or not self.seen.finished):
            self.seen.on_command_failed(ended.how, time.monotonic_ns())
        self._watch.note_left(command, well=ended.well)
        self._watch.close(asked=False)
        if not again:
            self.stop(*self._findings.outcome(ended))
            return
        self._watch.take_last_words(well=False)  # of processes that were ended with it
        reason = f"the command ended with {ended.how}: started again ({attempt} of {most})"
        self.record(Kind.DECISION, actions=[{"start": "command"}], reason=reason)
        self._start_command()

    def _hear_points(self) -> None:
        """Serve processes that hold at a point of their script."""
        self._broker.hear(self._injector, self.seen, self._ranks, self.record, time.monotonic_ns())
