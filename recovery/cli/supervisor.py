"""Supervises one training script, here or on nodes: ``recovery.supervise.controller`` over
processes of a host, without the harness.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from functools import partial
from typing import Any

from trainchaos.chaos.events.log import LOG_VERSION, ORCHESTRATOR, Event, EventWriter, Kind
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.cli.console import JobListener, Outage
from trainchaos.recovery.cli.job_health import JobHealth
from trainchaos.recovery.cli.job_spec import JobSpec, script_config
from trainchaos.recovery.cli.keepers import JobKeepers
from trainchaos.recovery.cli.process_host import LocalProcessHost, ProcessHost, ProcessPlacement
from trainchaos.recovery.cli.processes import JobProcesses
from trainchaos.recovery.cli.takeover_log import TakeoverLog
from trainchaos.recovery.detection.paced_look import PacedLook
from trainchaos.recovery.health.reputation import NO_CARE, NOT_OF_A_PLACE, Care, PlaceCare
from trainchaos.recovery.health.service import HealthService
from trainchaos.recovery.nodes.coordinator.node_events import event_of
from trainchaos.recovery.nodes.coordinator.node_state import NodeFound
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.policy import strategies
from trainchaos.recovery.policy.strategy import ANNOUNCED, StateFrom, Strategy
from trainchaos.recovery.process.local import Dying, Exited, MessageReceived, start_store
from trainchaos.recovery.process.logroom import LogRoom
from trainchaos.recovery.process.stacks import STACK_SIGNAL, keep
from trainchaos.recovery.rank.script import ScriptConfig
from trainchaos.recovery.supervise.adoption import past
from trainchaos.recovery.supervise.controller import Controller, Stage, Timing
from trainchaos.recovery.supervise.supervision import StopFlag
from trainchaos.recovery.transport.wire import CheckpointNote, Failed, Ready

# bytes: a failure takes about 2,500, so that many can be written down on a full disk
LOG_RESERVE = 4 << 20
LOST = "unknown: it was killed"


class Supervisor:
    """One job, from start to end, or from where another supervisor was lost (``takeover``).
    ``host`` is closed with it. ``health``: of this machine, where the job runs on it; closed with
    it; ``avoided``: places that are tainted; ``care``: what is asked for beside
    avoiding suspect places. Implements ``recovery.supervise.supervision.Hands``.
    """

    def __init__(
        self,
        spec: JobSpec,
        strategy: Strategy,
        timing: Timing,
        *,
        host: ProcessHost,
        listener: JobListener,
        stop: StopFlag,
        takeover: TakeoverLog | None = None,
        health: HealthService | None = None,
        avoided: AvoidedPlaces | None = None,
        care: Care = NO_CARE,
    ) -> None:
        self.strategy = strategy
        self._stop = stop
        self.late_failures: list[str] = []
        self._killed: set[str] = set()
        self._spec = spec
        self._listener = listener
        self._host = host
        self.send = host.send
        self.mark, self.os_state, self.pulse = host.mark, host.os_state, host.pulse
        self._takeover = takeover
        self._avoided = avoided or AvoidedPlaces(())
        folders = [spec.events, spec.events / "logs", *([spec.logs] if spec.logs else [])]
        # Created before our own log exists, so that our log counts as part of the job.
        self._log_room = LogRoom(
            folders, spec.log_limit_bytes, takeover.processes if takeover is not None else None
        )
        after = takeover.log.events if takeover is not None else None
        self._writer = EventWriter(
            spec.events, ORCHESTRATOR, time.monotonic_ns, after=after, reserve=LOG_RESERVE
        )
        self._processes = JobProcesses(host, self._log_room, takeover, self.now_s, self._write)
        held, name_of = self._processes.reputation, self._avoided.name_of
        self._care = PlaceCare(care, self._processes, held, self._write, self.now_s, name_of)
        self._keepers = JobKeepers(spec, self._log_room, self._write)
        self._errors: dict[str, str] = {}
        self._look = PacedLook(self.now_s)
        self._described = False
        self._outage = Outage(listener)
        try:
            self._store, port = start_store(host.store_host)
            self.controller = Controller(
                strategy,
                self,
                world=spec.ranks,
                shards=spec.shards,
                steps=0,
                store_port=port,
                timing=timing,
            )
            self._health = JobHealth(self.controller, health, self._write, spec, self._care)
        except BaseException:
            host.close()
            raise

    def run(self) -> str:
        """Run the job to its end and return the outcome: completed, gave-up, broken or interrupted.

        It resumes from the newest checkpoint that verifies, if there is one. Every process has
        exited afterwards. Raises InfrastructureError.
        """
        controller = self.controller
        host, boot = socket.gethostname(), boot_id()
        begun = self._write(
            Kind.ACTOR_STARTED, pid=os.getpid(), host=host, wall_ns=time.time_ns(), boot=boot
        )
        self._name_job(begun)
        try:
            self._health.start()
            if self._takeover is not None and self._takeover.steps:
                self._take_over(self._takeover)
            else:
                self._begin()
            while not controller.done:
                self._turn()
        except BaseException as error:
            controller.outcome = controller.outcome or "broken"
            controller.reason = controller.reason or f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end()
        return controller.outcome

    def _begin(self) -> None:
        self._host.await_ready(lambda: bool(self._stop.signum))
        if self._stop.signum:
            self._interrupt(signal.Signals(self._stop.signum).name)
            return
        self._note_taints()
        if self._spec.memory_every:
            assert isinstance(self._host, LocalProcessHost)
            self._keepers.start(self._host)
        self.controller.start(self._first_state)

    def _note_taints(self) -> None:
        said = self._avoided.as_event()
        if said:
            self._write(Kind.TAINTS_HONOURED, **said)

    def _name_job(self, started: Event) -> None:
        """Name the job by the first event of its log, which is the same for every supervisor."""
        first = (
            self._takeover.log.events[0]
            if self._takeover is not None and self._takeover.log.events
            else started
        )
        self._job_id = f"{first.data['host']}-{first.data['pid']}-{first.data['wall_ns']:x}"

    @property
    def _first_state(self) -> StateFrom:
        return StateFrom.INITIAL if self._spec.fresh else StateFrom.CHECKPOINT

    def _take_over(self, takeover: TakeoverLog) -> None:
        known = past(takeover.log.events)
        self._described, self.controller.steps = True, takeover.steps
        self._host.inherit(takeover.living)
        self._note_taints()
        self.record(
            Kind.COORDINATOR_ADOPTED,
            generation=known.generation,
            members=list(known.members),
            stage=LOST,
            down_s=round(self.now_s() - takeover.since_ns / 1e9, 6),
            events=len(takeover.log.events),
        )
        self._care.recall(takeover.log.events)
        self.controller.adopt(known, self._first_state)

    def _turn(self) -> None:
        for report in self._host.wait(self._look.in_s(self.controller.look_in_s)):
            if isinstance(report, MessageReceived):
                if isinstance(report.message, Ready):
                    self._note_job(report.message)
                elif isinstance(report.message, Failed):
                    self._errors[report.process] = report.message.error
                elif (
                    isinstance(report.message, CheckpointNote) and report.message.state == "failed"
                ):
                    self._listener.on_failed_save(report.message.checkpoint, report.message.error)
                self.controller.on_message(report.process, report.message)
            elif isinstance(report, Dying):
                self.controller.on_dying(report.process)
            elif isinstance(report, Exited):
                self._on_exit(report)
            elif said := event_of(report):
                self._write(said[0], **said[1])
                if isinstance(report, NodeFound):
                    self._health.heard(report.sign)
        self._keepers.look()
        self._health.look()
        self._look.take(self._tick, len(self.controller.members))
        self._clear_logs()
        if self._stop.signum:
            self._interrupt(signal.Signals(self._stop.signum).name)

    def _tick(self) -> None:
        self.controller.tick()
        self._outage.look(self)

    def _clear_logs(self) -> None:
        if self.controller.stage is not Stage.TRAINING or not self._log_room.due:
            return  # a check takes a while where there are many files
        cleared = self._log_room.look({*self._processes.pids, *self._keepers.names})
        if cleared is not None:
            limit = f"more than {self._spec.log_limit_bytes / 1e9:g} GB of event logs and outputs"
            self._write(
                Kind.FILES_DROPPED, files=list(cleared.files), bytes=cleared.bytes, why=limit
            )

    def _interrupt(self, by: str) -> None:
        controller = self.controller
        controller.stop("interrupted", by)
        # the work after the loop goes on, and may take long
        if controller.outcome == "completed":
            controller.outcome, controller.reason = "interrupted", f"{by} after the last step"
            for name in self._processes.pids:
                self.kill(name)

    def _note_job(self, ready: Ready) -> None:
        """Record the job's facts from the first rank that is ready."""
        if self._described:
            return
        self._described = True
        self.controller.steps = ready.steps
        self._write(
            Kind.RUN_STARTED,
            log_version=LOG_VERSION,
            arm="job",
            cell=self._spec.script.name,
            repeat=0,
            seed=ready.seed,
            ranks=self._spec.ranks,
            spares=self.strategy.spares_wanted,
            steps=ready.steps,
            global_batch=ready.global_batch,
            strategy=strategies.name_of(self.strategy),
            order={"seed": ready.seed, "samples": ready.samples},
        )

    def _on_exit(self, report: Exited) -> None:
        name = report.process
        expected = self.controller.exit_was_expected(report.process)
        # it was killed, or had to be: what its script does after the loop may not be done
        lost = report.signal is not None and (
            name in self.controller.members or name not in self._killed
        )
        if expected and (report.exit_code or lost) and self.controller.outcome == "completed":
            self.late_failures.append(f"{name}: {self._errors.get(name, report.how)}")
        self.record(
            Kind.PROCESS_EXITED,
            process=name,
            pid=self._processes.pids[name],
            exit_code=report.exit_code,
            signal=report.signal,
            expected=expected,
            last_seq=self.mark(name).last_seq,
        )
        self._processes.exited(name)
        self.controller.on_exit(name, report.how)
        self._processes.forget(name)
        self._errors.pop(name, None)
        self._killed.discard(name)

    def _end(self) -> None:
        committed = self.controller.committed
        self._health.close()
        self._care.close()
        self._keepers.look()  # before anything is asked to end
        alive = self._host.close() | self._keepers.end()
        left = [{"pid": pid, "process": name} for pid, name in alive.items()]
        self._store = None
        self._write(Kind.LEFTOVERS, processes=left, ports=[], shared_memory=[])
        self._write(
            Kind.RUN_FINISHED,
            outcome=self.controller.outcome,
            reason=self.controller.reason,
            committed_step=committed,
        )
        self._writer.close()

    # ---- Hands

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def spawn(self, role: str, mode: str) -> str:
        """Start a process under the next free name; see ``JobProcesses.start``."""
        stop = self._stop
        config = partial(self._config, role)
        started = self._processes.start(role, mode, config, stopped=lambda: bool(stop.signum))
        self.record(
            Kind.PROCESS_SPAWNED,
            process=started.name,
            pid=started.pid,
            role=role,
            mode=mode,
            node=started.spot.node,
            device=started.spot.device,
        )
        return started.name

    def expect(self, role: str, mode: str, count: int) -> None:
        self._processes.expect(role, mode, count)

    def _config(self, role: str, name: str, spot: ProcessPlacement) -> ScriptConfig:
        return script_config(
            self._spec,
            self.strategy,
            name,
            role,
            spot,
            store_host=self._host.store_host,
            job_id=self._job_id,
            memory=self._keepers.memory,
        )

    def kill(self, process: str) -> None:
        """SIGKILL."""
        self._killed.add(process)
        self._host.signal(process, signal.SIGKILL)

    def distrust(self, process: str) -> None:
        """Avoid its spot."""
        self._processes.distrust(process)

    def pid(self, process: str) -> int | None:
        """Of a process of this machine, where the job runs on no other."""
        here = isinstance(self._host, LocalProcessHost)
        return self._processes.pids.get(process) if here else None

    def ask_stacks(self, process: str) -> None:
        """Ask for its stacks."""
        self._host.signal(process, STACK_SIGNAL)

    def stacks(self, process: str) -> tuple[str, str] | None:
        """Its answer, kept beside the outputs, or else the event logs."""
        text = self._host.stacks(process)
        folder = self._spec.logs or self._spec.events
        return None if text is None else (text, keep(folder, process, text))

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event; notes when a failure that stops training began."""
        failed = kind is Kind.FAILURE_DETECTED
        stops = failed and data["rank"] is not None and data["cause"] not in ANNOUNCED
        if failed and data["cause"] not in NOT_OF_A_PLACE:
            self._processes.failed(data["process"])
            if data["process"] is not None:
                said = f"{data['detail']}\n{self._errors.get(data['process'], '')}"
                self._care.failed(data["process"], data["cause"], said)
        if stops:
            self._outage.begins(self)
        return self._write(kind, step=step, generation=generation, **data)

    def _write(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        self._writer.generation = self.controller.generation
        event = self._writer.write(kind, step=step, generation=generation, **data)
        self._listener.on_event(event)
        return event
