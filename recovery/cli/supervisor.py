"""Supervises one training script, here or on nodes: ``recovery.supervise.controller`` over
processes of a home, no harness.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from chaos.errors import InfrastructureError
from chaos.events.log import ORCHESTRATOR, Event, EventWriter, Kind
from recovery.checkpoint.memory import ROLE as KEEPER
from recovery.checkpoint.memory.housing import Here
from recovery.checkpoint.memory.keepers import Keepers, Started
from recovery.cli.home import Home, Spot, ThisMachine, least_taken
from recovery.cli.takeover_log import Estate
from recovery.nodes.coordinator.node_events import event_of
from recovery.nodes.link.clock import boot_id
from recovery.policy import strategies
from recovery.policy.backoff import Reputation
from recovery.policy.jobconfig import InMemory, Net, Saves
from recovery.policy.strategy import Cause, StateFrom, Strategy
from recovery.process.local import Dying, Exited, Said, start_store
from recovery.process.logroom import LogRoom
from recovery.process.starvation import Pulse
from recovery.rank.joining import Seat
from recovery.rank.script import ScriptConfig
from recovery.supervise.adoption import past
from recovery.supervise.controller import Controller, Stage, Timing
from recovery.transport.progress_counters import Mark
from recovery.transport.wire import CheckpointNote, Failed, Message, Ready

# bytes: a failure takes about 2,500, so that many can be written down on a full disk
LOG_RESERVE = 4 << 20
LOST = "unknown: it was killed"
_NOT_OF_A_PLACE = (Cause.NOTICE, Cause.NONFINITE)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to run. ``shards``: ranks that hold one copy of the model; ``checkpoint_*`` None: as the
    script says; ``memory_every``: steps between checkpoints in memory, 0: none, and
    ``memory_bytes`` for them; ``fresh``: begin with initial values, whatever checkpoints there are;
    ``log_limit_bytes``: for event logs, and for what ranks print (in ``logs``).
    """

    script: Path
    args: tuple[str, ...]
    ranks: int
    events: Path
    backend: Literal["gloo", "nccl"]
    checkpoint_dir: Path | None
    checkpoint_every: int | str | None
    checkpoint_keep: int | None
    shards: int = 1
    saves: Saves | None = None
    verify_every: int | None = None
    log_limit_bytes: int = 10_000_000_000
    logs: Path | None = None
    memory_every: int = 0
    memory_bytes: int = 4_000_000_000
    fresh: bool = False


@dataclass(kw_only=True)
class StopFlag:
    """Set by a signal handler; the supervisor looks at it. ``signum`` 0: no signal came."""

    signum: int = 0


class Listener(Protocol):
    """Follows a job for a person."""

    def on_event(self, event: Event) -> None:
        """The supervisor wrote an event."""

    def on_recovered(self, seconds: float, step: int) -> None:
        """After a failure the first step beyond all earlier ones is committed; seconds since it was
        detected.
        """

    def on_failed_save(self, checkpoint: str, error: str) -> None:
        """A checkpoint could not be saved; training goes on."""


class Supervisor:
    """One job, from start to end, or from where another supervisor was lost (``estate``). ``home``
    is closed with it. Implements ``recovery.supervise.supervision.Hands``.
    """

    def __init__(
        self,
        spec: JobSpec,
        strategy: Strategy,
        timing: Timing,
        *,
        home: Home,
        listener: Listener,
        stop: StopFlag,
        estate: Estate | None = None,
    ) -> None:
        self.strategy = strategy
        self._stop = stop
        self.late_failures: list[str] = []
        self._spec = spec
        self._listener = listener
        self._home = home
        self._estate = estate
        left = estate.processes if estate is not None else {}
        folders = [spec.events, spec.events / "logs", *([spec.logs] if spec.logs else [])]
        # While our own log is not there, so that it counts.
        self._log_room = LogRoom(
            folders, spec.log_limit_bytes, left if estate is not None else None
        )
        log = estate.log if estate is not None else None
        self._writer = EventWriter(
            spec.events, ORCHESTRATOR, time.monotonic_ns, after=log, reserve=LOG_RESERVE
        )
        # Of processes that live, or whose end is still to be told.
        self._pids = {name: entry.pid for name, entry in left.items() if not entry.gone}
        self._spots = {name: (left[name].node, left[name].device) for name in self._pids}
        self._reputation = Reputation()
        self._started = estate.names if estate is not None else 0
        self._errors: dict[str, str] = {}
        self._described = False
        self._failed_s: float | None = None
        self._failed_step = 0
        self._keepers: Keepers | None = None
        try:
            self._store, port = start_store(home.store_host)
            self.controller = Controller(
                strategy,
                self,
                world=spec.ranks,
                shards=spec.shards,
                steps=0,
                store_port=port,
                timing=timing,
            )
        except BaseException:
            home.close()
            raise

    def run(self) -> str:
        """Run the job to its end and return the outcome: completed, gave-up, broken or interrupted.

        It resumes from the newest checkpoint that verifies, if there is one. Every process is gone
        afterwards. Raises InfrastructureError.
        """
        controller = self.controller
        host, boot = socket.gethostname(), boot_id()
        begun = self._write(
            Kind.ACTOR_STARTED, pid=os.getpid(), host=host, wall_ns=time.time_ns(), boot=boot
        )
        self._name_job(begun)
        try:
            if self._estate is not None and self._estate.steps:
                self._take_over(self._estate)
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
        self._home.await_ready(lambda: bool(self._stop.signum))
        if self._stop.signum:
            self._interrupt(signal.Signals(self._stop.signum).name)
            return
        if self._spec.memory_every:
            assert isinstance(self._home, ThisMachine)
            self._keepers = Keepers(
                Here(self._home.fork, log=self._home.logs),
                job=self._job,
                nodes=1,
                limit_bytes=self._spec.memory_bytes,
                replicate=False,
            )
        self.controller.start(self._first_state)

    def _name_job(self, started: Event) -> None:
        """By the first event of its log, whoever supervises it now."""
        first = (
            self._estate.log.events[0]
            if self._estate is not None and self._estate.log.events
            else started
        )
        self._job_id = f"{first.data['host']}-{first.data['pid']}-{first.data['wall_ns']:x}"

    @property
    def _first_state(self) -> StateFrom:
        return StateFrom.INITIAL if self._spec.fresh else StateFrom.CHECKPOINT

    def _take_over(self, estate: Estate) -> None:
        known = past(estate.log.events)
        self._described, self.controller.steps = True, estate.steps
        self._home.inherit(estate.living)
        self.record(
            Kind.COORDINATOR_ADOPTED,
            generation=known.generation,
            members=list(known.members),
            stage=LOST,
            down_s=round(self.now_s() - estate.since_ns / 1e9, 6),
            events=len(estate.log.events),
        )
        self.controller.adopt(known, self._first_state)

    def _turn(self) -> None:
        for report in self._home.wait(self.controller.look_in_s):
            if isinstance(report, Said):
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
        for news in self._keepers.look() if self._keepers is not None else ():
            self._note_keeper(news)
        self.controller.tick()
        self._clear_logs()
        if self._stop.signum:
            self._interrupt(signal.Signals(self._stop.signum).name)
        step = self.controller.committed
        if self._failed_s is not None and step > self._failed_step:
            self._listener.on_recovered(self.now_s() - self._failed_s, step)
            self._failed_s = None

    def _clear_logs(self) -> None:
        if self.controller.stage is not Stage.TRAINING:
            return  # looking takes a while where there are many files
        keepers = [self._keepers.keeper_of(0)] if self._keepers is not None else []
        cleared = self._log_room.look({*self._pids, *keepers})
        if cleared is not None:
            limit = f"more than {self._spec.log_limit_bytes / 1e9:g} GB of event logs and outputs"
            self._write(
                Kind.FILES_DROPPED, files=list(cleared.files), bytes=cleared.bytes, why=limit
            )

    def _interrupt(self, by: str) -> None:
        controller = self.controller
        controller.stop("interrupted", by)
        # what follows the loop is being done, and may take long
        if controller.outcome == "completed":
            controller.outcome, controller.reason = "interrupted", f"{by} after the last step"
            for name in self._pids:
                self.kill(name)

    def _note_job(self, ready: Ready) -> None:
        """The first rank to be ready says what the job is."""
        if self._described:
            return
        self._described = True
        self.controller.steps = ready.steps
        self._write(
            Kind.RUN_STARTED,
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
        if expected and report.exit_code and self.controller.outcome == "completed":
            self.late_failures.append(f"{name}: {self._errors.get(name, report.how)}")
        self.record(
            Kind.PROCESS_EXITED,
            process=name,
            pid=self._pids[name],
            exit_code=report.exit_code,
            signal=report.signal,
            expected=expected,
            last_seq=self.mark(name).last_seq,
        )
        del self._pids[name]
        self.controller.on_exit(name, report.how)
        for book in (self._spots, self._errors):
            book.pop(name, None)

    def _note_keeper(self, news: Started | Exited, *, expected: bool = False) -> None:
        if isinstance(news, Started):
            self._log_room.begins(news.process)
            self._write(
                Kind.PROCESS_SPAWNED,
                process=news.process,
                pid=news.pid,
                role=KEEPER,
                mode="warm",
                node=0,
            )
            return
        assert self._keepers is not None
        self._write(
            Kind.PROCESS_EXITED,
            process=news.process,
            pid=self._keepers.pid_of(news.process),
            exit_code=news.exit_code,
            signal=news.signal,
            expected=expected,
            last_seq=None,
            role=KEEPER,
        )

    def _end(self) -> None:
        committed = self.controller.committed
        for news in self._keepers.look() if self._keepers is not None else ():
            self._note_keeper(news)  # before anybody is asked to end
        alive = self._home.close()
        if self._keepers is not None:
            for news in self._keepers.end():
                self._note_keeper(news, expected=True)
            alive |= self._keepers.close()
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
        """Start a process under the next free name: ``w<n>``, or ``s<n>`` for one that starts as
        spare.
        """
        name, pid, spot = self._start("s" if role == "spare" else "w", mode)
        self._pids[name], self._spots[name] = pid, (spot.node, spot.device)
        self.record(
            Kind.PROCESS_SPAWNED,
            process=name,
            pid=pid,
            role=role,
            mode=mode,
            node=spot.node,
            device=spot.device,
        )
        return name

    def _avoids(self, spot: tuple[int, str]) -> bool:
        return self._reputation.avoids(spot, self.now_s())

    def _start(self, kind: str, mode: str) -> tuple[str, int, Spot]:
        """Try node after node, and again while any may come back. Each try uses up a name: what
        could not be started may be there yet, and begin late.
        """
        taken = [self._spots[other] for other in self._pids]
        while True:
            why, failed = "no node is left", set[int]()
            for spot in least_taken(self._home.spots(), taken, self._avoids):
                if spot.node in failed:
                    continue
                name = f"{kind}{self._started}"
                self._started += 1
                self._log_room.begins(name)
                try:
                    return name, self._home.start(name, spot, self._config(name, spot), mode), spot
                except ConnectionError as error:
                    why = str(error)
                    failed.add(spot.node)
            if self._stop.signum or not self._home.may_return():
                raise InfrastructureError(
                    f"cannot start a process: {why}", hint="see what the nodes' agents say"
                )

    def _config(self, name: str, spot: Spot) -> ScriptConfig:
        spec = self._spec
        seat = Seat(
            supervisor="recovery.run",
            process=name,
            world=spec.ranks,
            shards=spec.shards,
            batch=self.strategy.batch_policy,
            backend=spec.backend,
            device=spot.device,
            net=Net(store_host=self._home.store_host, address=spot.address),
            restores=not self.strategy.keeps_survivors,
            checkpoint_dir=spec.checkpoint_dir,
            checkpoint_every=spec.checkpoint_every,
            checkpoint_keep=spec.checkpoint_keep,
            saves=spec.saves,
            memory=self._memory(),
            verify_every=spec.verify_every,
            nonfinite=self.strategy.nonfinite_policy,
            fresh=spec.fresh,
            job_id=self._job_id,
        )
        return ScriptConfig(
            name=name,
            parent=0,
            events=spot.events,
            log=spot.logs / f"{name}.log" if spot.logs else None,
            path=spec.script,
            args=list(spec.args),
            seat=seat,
        )

    @property
    def _job(self) -> str:
        return f"{self._spec.script.name}-{os.getpid()}"

    def _memory(self) -> InMemory | None:
        if self._keepers is None:
            return None
        return InMemory(
            socket=self._keepers.socket_of(0), job=self._job, every=self._spec.memory_every
        )

    def send(self, process: str, message: Message) -> bool:
        """Send to a process; False when it is gone."""
        return self._home.send(process, message)

    def kill(self, process: str) -> None:
        """SIGKILL."""
        self._home.signal(process, signal.SIGKILL)

    def mark(self, process: str) -> Mark:
        """Progress mark."""
        return self._home.mark(process)

    def os_state(self, process: str) -> str:
        """The kernel's word on a process."""
        return self._home.os_state(process)

    def pulse(self, process: str) -> Pulse:
        """What it got of the processors."""
        return self._home.pulse(process)

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event; notes when a failure that stops training began."""
        stops = (
            kind is Kind.FAILURE_DETECTED
            and data["rank"] is not None
            and data["cause"] != Cause.NOTICE
        )
        if (
            kind is Kind.FAILURE_DETECTED
            and data["process"] in self._spots
            and data["cause"] not in _NOT_OF_A_PLACE
        ):
            self._reputation.failed(self._spots[data["process"]], self.now_s())
        if stops and self._failed_s is None:
            self._failed_s, self._failed_step = self.now_s(), self.controller.committed
        return self._write(kind, step=step, generation=generation, **data)

    def _write(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        self._writer.generation = self.controller.generation
        event = self._writer.write(kind, step=step, generation=generation, **data)
        self._listener.on_event(event)
        return event
