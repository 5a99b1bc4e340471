"""Supervises one training script, here or on nodes, without the harness."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import LOG_VERSION, ORCHESTRATOR, Event, EventWriter, Kind
from trainchaos.recovery.checkpoint.memory.keepers import Keepers, LocalKeeperHost
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.cli.console import JobListener, Outage
from trainchaos.recovery.cli.hosts import LocalScripts, ScriptHost, Surroundings
from trainchaos.recovery.cli.roster import ScriptRoster
from trainchaos.recovery.cli.takeover_log import TakeoverLog
from trainchaos.recovery.detection.silence import PacedLook
from trainchaos.recovery.health.job_watch import job_service
from trainchaos.recovery.health.reputation import NO_CARE, NOT_OF_A_PLACE, Care, PlaceCare
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.policy import strategies
from trainchaos.recovery.policy.jobconfig import Exchange, InMemory, NetworkAddresses, Saves
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.policy.strategy import ANNOUNCED, StateFrom, Strategy
from trainchaos.recovery.process.host import Exited, MessageReceived
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.process.logroom import LogRoom
from trainchaos.recovery.rank.joining import SupervisorSettings
from trainchaos.recovery.rank.script import ScriptConfig
from trainchaos.recovery.supervise.adoption import past
from trainchaos.recovery.supervise.controller import Controller, Stage, Timing
from trainchaos.recovery.supervise.job_health import JobHealth
from trainchaos.recovery.supervise.keeper_log import KeeperLog
from trainchaos.recovery.supervise.supervision import StopFlag
from trainchaos.recovery.supervise.supervisor import JobSize, Supervisor
from trainchaos.recovery.transport.wire import CheckpointNote, Ready

# bytes: a failure takes about 2,500, so that many can be written down on a full disk
LOG_RESERVE = 4 << 20
LOST = "unknown: it was killed"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to run. ``shards``: ranks that hold one copy of the model; ``mesh``: how they are
    arranged; ``checkpoint_*`` None: as the script says; ``memory_every``: between checkpoints in
    memory, 0: none, and ``memory_bytes`` for them; ``fresh``: begin with initial values, even if
    checkpoints exist; ``log_limit_bytes``: for event logs, and for the output of ranks (in
    ``logs``).
    """

    script: Path
    args: tuple[str, ...]
    ranks: int
    events: Path
    exchange: Exchange
    checkpoint_dir: Path | None
    checkpoint_every: int | str | None
    checkpoint_keep: int | None
    shards: int = 1
    mesh: Mesh | None = None
    saves: Saves | None = None
    verify_every: int | None = None
    log_limit_bytes: int = 10_000_000_000
    logs: Path | None = None
    memory_every: int | str = 0
    memory_bytes: int = 4_000_000_000
    fresh: bool = False


class ScriptJob(Supervisor):
    """One job, from start to end, or from where another supervisor was lost (``takeover``).
    ``host`` is closed with it. ``avoided``: places that are tainted; ``care``: what is asked for
    beside avoiding suspect places.
    """

    host: ScriptHost
    roster: ScriptRoster

    def __init__(
        self,
        spec: JobSpec,
        strategy: Strategy,
        timing: Timing,
        *,
        host: ScriptHost,
        listener: JobListener,
        stop: StopFlag,
        takeover: TakeoverLog | None = None,
        avoided: AvoidedPlaces | None = None,
        care: Care = NO_CARE,
    ) -> None:
        self.late_failures: list[str] = []
        self.observer = self._listener = listener
        self._spec, self._takeover = spec, takeover
        self._avoided = avoided or AvoidedPlaces(())
        self._killed: set[str] = set()
        self._described = False
        self._outage = Outage(listener)
        self._memory: Keepers | None = None
        self._memory_job = f"{spec.script.name}-{os.getpid()}"
        folders = [spec.events, spec.events / "logs", *([spec.logs] if spec.logs else [])]
        # Created before our own log exists, so that our log counts as part of the job.
        self._log_room = LogRoom(
            folders, spec.log_limit_bytes, takeover.processes if takeover is not None else None
        )
        after = takeover.log.events if takeover is not None else None
        log = EventWriter(
            spec.events, ORCHESTRATOR, time.monotonic_ns, after=after, reserve=LOG_RESERVE
        )
        try:
            self._store, port = start_store(host.store_host)
            super().__init__(
                host,
                strategy,
                log,
                JobSize(world=spec.ranks, shards=spec.shards, steps=0),
                timing=timing,
                store_port=port,
                stop_flag=stop,
                outputs=spec.logs or spec.events,
            )
            self._paced = PacedLook(self.now_s)
            self._watch_places(care)
        except BaseException:
            host.close()
            raise
        host.configure = self._configure
        self._keep(None)

    def _watch_places(self, care: Care) -> None:
        spec, host = self._spec, self.host
        self.roster = ScriptRoster(
            host,
            self._log_room,
            self._takeover,
            self._avoided,
            self.record,
            lambda: bool(self.stop_flag.signum),
        )
        held, name_of = self.roster.reputation, self._avoided.name_of
        self._care = PlaceCare(care, self.roster, held, self.record, self.now_s, name_of)
        self._readings, self._detectors = job_service(
            spec.events, shards=spec.shards, clock_s=time.monotonic
        )
        self._health = JobHealth(
            self._care, self.record, self.process_of, [self._readings.take, host.hardware]
        )

    def _keep(self, memory: Keepers | None) -> None:
        self._memory = memory
        begins = self._log_room.begins
        self.keepers = KeeperLog(
            memory, self.record, self.host.now_ns, starts=lambda name, pid: begins(name)
        )

    # ---- the job

    def introduce(self) -> None:
        """Name the job by the first event of its log, which is the same for every supervisor."""
        host, boot = socket.gethostname(), boot_id()
        begun = self.record(
            Kind.ACTOR_STARTED, pid=os.getpid(), host=host, wall_ns=time.time_ns(), boot=boot
        )
        before = self._takeover.log.events if self._takeover is not None else ()
        first = (before or (begun,))[0].data
        self._job_id = f"{first['host']}-{first['pid']}-{first['wall_ns']:x}"

    def start(self) -> None:
        self._readings.start()
        if self._takeover is not None and self._takeover.steps:
            self._take_over(self._takeover)
            return
        self.host.await_ready(lambda: bool(self.stop_flag.signum))
        if self.stop_flag.signum:
            return
        self._note_taints()
        if self._spec.memory_every:
            assert isinstance(self.host, LocalScripts)
            self._keep(
                Keepers(
                    LocalKeeperHost(self.host.fork, log=self.host.logs),
                    job=self._memory_job,
                    nodes=1,
                    limit_bytes=self._spec.memory_bytes,
                    replicate=False,
                )
            )
        self.controller.start(self._first_state)

    def _note_taints(self) -> None:
        said = self._avoided.as_event()
        if said:
            self.record(Kind.TAINTS_HONOURED, **said)

    @property
    def _first_state(self) -> StateFrom:
        return StateFrom.INITIAL if self._spec.fresh else StateFrom.CHECKPOINT

    def _take_over(self, takeover: TakeoverLog) -> None:
        known = past(takeover.log.events)
        self._described, self.controller.steps = True, takeover.steps
        self._detectors.steps = takeover.steps
        self.host.inherit(takeover.living)
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

    def after_reports(self) -> None:
        """Look at the places of the job, and at the room that its logs take."""
        self._health.look(self.supervise)
        if self.controller.stage is not Stage.TRAINING or not self._log_room.due:
            return  # a check takes a while where there are many files
        cleared = self._log_room.look({*self.roster.pids, *self.keepers.names})
        if cleared is not None:
            limit = f"more than {self._spec.log_limit_bytes / 1e9:g} GB of event logs and outputs"
            self.record(
                Kind.FILES_DROPPED, files=list(cleared.files), bytes=cleared.bytes, why=limit
            )

    @property
    def look_in_s(self) -> float:
        return self._paced.in_s(self.controller.look_in_s)

    def look(self) -> None:
        self._paced.take(super().look, len(self.controller.members))

    def tick(self, controller: Controller) -> None:
        controller.tick()
        self._outage.look(self)

    def stop(self, outcome: str, reason: str) -> None:
        controller = self.controller
        controller.stop(outcome, reason)
        # the work after the loop goes on, and may take long
        if controller.outcome == "completed":
            controller.outcome, controller.reason = outcome, f"{reason} after the last step"
            for name in self.roster.pids:
                self.kill(name)

    def release(self) -> None:
        self._committed = self.committed  # read from the marks, which end with the host
        self._readings.close()
        self._care.close()
        self._left = self.host.close()
        if self._memory is not None:
            self._left |= self._memory.close()
        self._store = None

    def account(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        left = [{"pid": pid, "process": name} for pid, name in self._left.items()]
        leftovers = {"processes": left, "ports": [], "shared_memory": []}
        return leftovers, {"committed_step": self._committed}

    # ---- reports

    def on_message(self, report: MessageReceived) -> None:
        """Take note of what concerns the whole job, and pass it on."""
        message = report.message
        if isinstance(message, Ready):
            self._note_job(message)
        elif isinstance(message, CheckpointNote) and message.state == "failed":
            self._listener.on_failed_save(message.checkpoint, message.error)
        super().on_message(report)

    def _note_job(self, ready: Ready) -> None:
        """Record the job's facts from the first rank that is ready."""
        if self._described:
            return
        self._described = True
        self.controller.steps = self._detectors.steps = ready.steps
        self.record(
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

    def note_exit(self, report: Exited) -> None:
        """Record an exit, and what came to nothing after the last step."""
        name, controller = report.process, self.controller
        # it was killed, or had to be: what its script does after the loop may not be done
        lost = report.signal is not None and (
            name in controller.members or name not in self._killed
        )
        expected = controller.job.exit_was_expected(name)
        if expected and (report.exit_code or lost) and controller.outcome == "completed":
            self.late_failures.append(f"{name}: {controller.job.error_of(name) or report.how}")
        super().note_exit(report)
        self._killed.discard(name)
        self.asked_ns.pop(name, None)

    def kill(self, process: str) -> None:
        self._killed.add(process)
        super().kill(process)

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event; notes when a failure that stops training began."""
        if kind is Kind.FAILURE_DETECTED:
            if data["rank"] is not None and data["cause"] not in ANNOUNCED:
                self._outage.begins(self)
            if data["process"] is not None and data["cause"] not in NOT_OF_A_PLACE:
                self.roster.failed(data["process"])
                self._health.failed(data["process"], data["cause"], data["detail"])
        return super().record(kind, step=step, generation=generation, **data)

    # ---- the configuration of a process

    def _configure(self, name: str, role: str, there: Surroundings) -> ScriptConfig:
        spec, strategy = self._spec, self.strategy
        memory = None
        if self._memory is not None:
            memory = InMemory(
                socket=self._memory.socket_of(0), job=self._memory_job, every=spec.memory_every
            )
        seat = SupervisorSettings(
            supervisor="trainchaos.recovery.run",
            process=name,
            world=spec.ranks,
            shards=spec.shards,
            mesh=spec.mesh,
            batch=strategy.batch_policy,
            backend=spec.exchange.backend,
            shared_gpus=spec.exchange.shared_gpus,
            device=there.device,
            net=NetworkAddresses(store_host=self.host.store_host, address=there.address),
            restores=not strategy.keeps_survivors,
            checkpoint_dir=spec.checkpoint_dir,
            checkpoint_every=spec.checkpoint_every,
            checkpoint_keep=spec.checkpoint_keep,
            saves=spec.saves,
            memory=memory,
            verify_every=spec.verify_every,
            nonfinite=strategy.nonfinite_policy,
            sync=strategy.spare_sync.sync,
            sync_lag=strategy.spare_sync.lag,
            rehearse=strategy.spare_sync.rehearse and role == "spare",
            fresh=spec.fresh,
            job_id=self._job_id,
        )
        return ScriptConfig(
            name=name,
            parent=0,
            events=there.events,
            log=there.logs / f"{name}.log" if there.logs else None,
            path=spec.script,
            args=list(spec.args),
            seat=seat,
        )
