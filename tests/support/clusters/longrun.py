"""One job that fails again and again, on this machine or on nodes, and what its processes hold
while it does.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.clusters.cluster import Cluster
from tests.support.running import Running, kill
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.process import processes

JOB = Path(__file__).resolve().parent / "longrun_job.py"
RANKS = 3
SURVIVOR = "w0"
KINDS: Mapping[str, int] = {
    "kill": signal.SIGKILL,
    "exception": signal.SIGUSR1,
    "stop": signal.SIGSTOP,
    "notice": signal.SIGTERM,
    "nan": signal.SIGUSR2,
    "spare": signal.SIGKILL,
}
MAX_SPARES = 8
"""Of more than ten lost in a row each is replaced later than the one before
(``fallback.LOST_OUTSIDERS``).
"""

COSTS_NOBODY = ("nan",)

FAILURE_LIMIT_S = 120.0
SETTLE_LIMIT_S = 60.0


def telling(command: Sequence[str]) -> list[str]:
    """The command of a module, run by ``heap``."""
    python, option, *module = command
    return [python, option, "tests.support.clusters.heap", *module]


@dataclass(frozen=True, kw_only=True)
class Held:
    """What processes of one role hold together. ``memory_kib``: what they use of their heaps; of
    fork servers resident.
    """

    descriptors: int
    threads: int
    memory_kib: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """After so many failures. ``held``: role -> what it holds; ``keys``: in the store, -1: not
    asked.
    """

    failures: int
    lost: int
    seconds: float
    step: int
    keys: int
    held: Mapping[str, Held]


def held_by(pids: Sequence[int]) -> Held:
    """By the kernel's word."""
    each = [_held_by_one(pid) for pid in pids]
    return Held(
        descriptors=sum(held.descriptors for held in each),
        threads=sum(held.threads for held in each),
        memory_kib=sum(held.memory_kib for held in each),
    )


def _held_by_one(pid: int) -> Held:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Held(
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        memory_kib=int(status["VmRSS"].split()[0]),
    )


@dataclass(kw_only=True)
class Known:
    """What the supervisor's log says by now."""

    pids: dict[str, int] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    members: tuple[str, ...] = ()
    generation: int = 0
    settled: bool = False
    failures: int = 0

    def note(self, event: Event) -> None:
        """A line more."""
        name = event.data.get("process")
        match event.kind:
            case Kind.PROCESS_SPAWNED:
                self.pids[name] = event.data["pid"]
            case Kind.PROCESS_READY:
                self.ready.add(name)
            case Kind.PROCESS_EXITED:
                self.pids.pop(name, None)
                self.ready.discard(name)
            case Kind.FAILURE_DETECTED:
                self.failures += 1
                self.settled = self.settled and event.data["rank"] is None
                if event.data["cause"] != "nonfinite":
                    self.ready.discard(name)  # it leaves
            case Kind.GENERATION_READY:
                self.members, self.settled = tuple(event.data["members"]), True
                self.generation = event.generation

    @property
    def spares(self) -> list[str]:
        """Ready, and in no generation."""
        return sorted(self.ready - set(self.members))


def fork_server(parent: int, *, but: Collection[int]) -> int:
    """Pid of the one that a supervisor or an agent has. ``but``: of those that it has forked."""
    for pid, fields in processes.everybody():
        ours = fields[1] == str(parent) and pid not in but
        if (
            ours
            and b"trainchaos.recovery.process.forkserver"
            in Path(f"/proc/{pid}/cmdline").read_bytes()
        ):
            return pid
    raise AssertionError("no fork server")


class HeapRunning(Running):
    """One that tells what it uses of its heap."""

    command = telling(Running.command)


class HeapCluster(Cluster):
    """One whose agents and coordinators do."""

    running = HeapRunning

    def agent_command(self, node: int) -> list[str]:
        """See Cluster."""
        return telling(super().agent_command(node))


class LongRun:
    """Plays failures in one job on this machine, one after the other. ``folder``: for its logs."""

    def __init__(self, folder: Path, *, seed: int, spares: int = 2) -> None:
        self._folder = folder
        self._job = self._begin(folder, "--ranks", str(RANKS), "--spares", str(spares))
        self._spares = spares
        self._random = random.Random(seed)
        self._tail = EventLogTail(self._job.events / "orchestrator.jsonl")
        self._survivor = EventLogTail(self._job.events / f"{SURVIVOR}.jsonl")
        self.known = Known()
        self.step = self.failures = self.lost = 0
        self._committed_generation = 0
        self._started_s = time.monotonic()
        self.count = {kind: 0 for kind in KINDS}

    def _begin(self, folder: Path, *options: str) -> Running:
        return HeapRunning(folder, *options, "--logs", folder / "logs", JOB, folder)

    def _who(self) -> Mapping[str, Sequence[int]]:
        """Pids of those whose holdings are looked at, by their roles."""
        supervisor = self._job.process.pid
        return {
            "supervisor": [supervisor],
            "survivor": [self.known.pids[SURVIVOR]],
            "fork server": [self._fork_server(supervisor)],
        }

    def _look(self) -> None:
        for event in self._tail.read():
            self.known.note(event)
        for event in self._survivor.read():
            if event.kind is Kind.STEP_COMMITTED:
                self.step, self._committed_generation = event.step or 0, event.generation

    def _until(self, enough: Callable[[], bool]) -> None:
        def so() -> bool:
            self._look()
            return enough()

        self._job.wait_for(so)

    def steady(self, spares: int = 1) -> None:
        """Wait until all train, have made a step, and so many spares are ready."""
        known = self.known
        self._until(
            lambda: (
                known.settled
                and len(known.members) == RANKS
                and len(known.spares) >= spares
                and self._committed_generation == known.generation
            )
        )

    def play(self, kinds: Iterable[str]) -> None:
        """Every one of these failures, each once the one before is mended."""
        for kind in kinds:
            self.steady()
            known, told = self.known, self.known.failures
            others = [name for name in known.members if name != SURVIVOR and name in known.pids]
            who = self._random.choice(known.spares if kind == "spare" else others)
            kill(known.pids[who], KINDS[kind])
            self.failures += 1
            self.lost += kind not in COSTS_NOBODY
            self.count[kind] += 1
            self._until_told_of(told + 1)

    def _until_told_of(self, failures: int) -> None:
        self._until(lambda: self.known.failures >= failures)

    def mixed(self, count: int, *, sparing: Collection[str] = ()) -> Iterator[str]:
        """Kinds by the seed, but for some, and every one of them once before any a second time."""
        while count > 0:
            spares_end = self.count["spare"] >= MAX_SPARES
            due = [
                kind
                for kind in KINDS
                if kind not in sparing and not (kind == "spare" and spares_end)
            ]
            kinds = self._random.sample(due, min(count, len(due)))
            yield from kinds
            count -= len(kinds)

    def sample(self, *, keys: Callable[[int], int] | None = None) -> Sample:
        """What is held now that all is steady again. ``keys``: counts those of the store
        at a port.
        """
        self.steady(self._spares)
        return Sample(
            failures=self.failures,
            lost=self.lost,
            seconds=time.monotonic() - self._started_s,
            step=self.step,
            keys=keys(self._port()) if keys else -1,
            held={
                role: held_by(pids)
                if role.startswith("fork server")
                else replace(held_by(pids), memory_kib=sum(map(self._heap_kib, pids)))
                for role, pids in self._who().items()
            },
        )

    def _heap_kib(self, pid: int) -> int:
        return int((self._folder / f"heap.{pid}").read_text()) >> 10

    def sample_once(
        self, enough: Callable[[Sample], bool], *, keys: Callable[[int], int] | None = None
    ) -> Sample:
        """What is held once it is ``enough``, or still at the deadline: a process that is just
        starting or ending is held for a moment, and so are the keys of a group that another takes
        the place of. ``keys``: as for ``sample``.
        """
        deadline_s = time.monotonic() + SETTLE_LIMIT_S
        found = self.sample(keys=keys)
        while not enough(found) and time.monotonic() < deadline_s:
            found = self.sample(keys=keys)
        return found

    def end(self) -> int:
        """Its exit status after SIGTERM."""
        self._job.process.send_signal(signal.SIGTERM)
        return self._job.end()

    def kill(self) -> None:
        """Whatever it does."""
        self._job.process.kill()
        self._job.process.communicate(timeout=FAILURE_LIMIT_S)

    def zombies(self) -> int:
        """Children of theirs that nobody has waited for."""
        ours = {str(pid) for pids in self._who().values() for pid in pids}
        return sum(fields[0] == "Z" and fields[1] in ours for _, fields in processes.everybody())

    def _fork_server(self, parent: int) -> int:
        return fork_server(parent, but=self.known.pids.values())

    def _door(self) -> int:
        """Where it listens for agents; 0: nowhere."""
        return 0

    def _port(self) -> int:
        """Where the supervisor's store listens, and nobody else does."""
        folder = Path(f"/proc/{self._job.process.pid}/fd")
        sockets = set[str]()
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(os.readlink(path))
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            port = int(words[1].split(":")[1], 16)
            if words[3] == "0A" and port != self._door() and f"socket:[{words[9]}]" in sockets:
                return port
        raise AssertionError("no store")


class NodesRun(LongRun):
    """The same on two nodes, each an agent of this machine. The survivor is on the first."""

    def _begin(self, folder: Path, *options: str) -> Running:
        self._cluster = HeapCluster(folder)
        return self._cluster.run(*options, JOB, folder)

    def _who(self) -> Mapping[str, Sequence[int]]:
        # An agent holds more for each process of its node, and those go from one node to the other.
        agents = [agent.pid for agent in self._cluster.agents]
        return {
            "coordinator": [self._job.process.pid],
            "survivor": [self.known.pids[SURVIVOR]],
            "agents": agents,
            "fork servers": [self._fork_server(agent) for agent in agents],
        }

    def _door(self) -> int:
        return int(self._cluster.at.rpartition(":")[2])

    def kill(self) -> None:
        self._cluster.close()


def curve(samples: list[Sample]) -> str:
    """For people."""
    head = f"{'failures':>8} {'lost':>5} {'s':>6} {'step':>8} {'keys':>5}"
    for role in samples[0].held:
        head += f" | {role}: fds threads MiB"
    rows = [head]
    for one in samples:
        row = f"{one.failures:8d} {one.lost:5d} {one.seconds:6.1f} {one.step:8d} {one.keys:5d}"
        for role, held in one.held.items():
            row += (
                f" | {' ' * len(role)} {held.descriptors:4d} {held.threads:7d}"
                f" {held.memory_kib / 1024:5.1f}"
            )
        rows.append(row)
    return "\n".join(rows)
