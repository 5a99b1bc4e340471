"""What the contract test of faults needs: events of a small log, and a fake target for each place a
fault acts in.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.aftermath import Occurrence
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.fault.targets import EMULATED, NO_DEVICE_MEMORY, LinkShape
from trainchaos.recovery.checkpoint.files import checkpoints

OCCURRENCE = Occurrence(
    fault="f",
    number=0,
    process="w1",
    processes=("w1",),
    rank=1,
    checkpoint="step-00000050",
    step=20,
    target={"process": "w1", "rank": 1},
    time_ns=20_500,
)


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """How one fault kind is tried; one module of ``faultcases`` has one as ``CASE``.

    ``required``: parameters without a default; ``variants``: parameters to try beside them;
    ``evidence``: a log it landed in; ``elsewhere``: logs it did not (somebody else, another time,
    too little); ``raises``: what its act raises in the rank; ``restores``: after the heal its
    target is as before (default: if it lasts); ``target``: makes the target to act on, default the
    fake of its place.
    """

    evidence: Sequence[Event]
    elsewhere: Sequence[Sequence[Event]]
    required: Mapping[str, Any] = field(default_factory=dict)
    variants: Sequence[Mapping[str, Any]] = ({},)
    occurrence: Occurrence = OCCURRENCE
    raises: str | None = None
    restores: bool | None = None
    target: Callable[[Path], Any] | None = None


# ---- events


def event(
    what: Kind, actor: str, time_ns: int, /, *, step: int | None = None, seq: int = 0, **data: Any
) -> Event:
    """Any event."""
    return Event(
        kind=what, actor=actor, seq=seq, time_ns=time_ns, generation=1, step=step, data=data
    )


def commit(
    step: int, *, collective_s: float = 0.001, compute_s: float = 0.01, data_s: float = 0.001
) -> Event:
    """Step n of the target committed at time n thousand."""
    seconds = {
        "data": data_s,
        "forward": compute_s,
        "backward": compute_s,
        "collective": collective_s,
        "optimizer": 0.001,
    }
    return event(
        Kind.STEP_COMMITTED,
        "w1",
        step * 1000,
        step=step,
        rank=1,
        world=4,
        samples=16,
        loss=1.0,
        lr=0.1,
        grad_norm=1.0,
        optimizer_step=step,
        scheduler_step=step,
        seconds=seconds,
        wire_bytes=1_000_000,
    )


def calm(**late: Any) -> list[Event]:
    """A run in which nothing happened: forty steps, then everybody ends well. ``late``: of the
    steps after 20.
    """
    steps = [commit(step, **(late if step > 20 else {})) for step in range(1, 41)]
    injected = event(
        Kind.FAULT_INJECTED, "orchestrator", 20_500, fault="f", kind="x", occurrence=0, target={}
    )
    ended = event(
        Kind.PROCESS_EXITED,
        "orchestrator",
        99_000,
        process="w1",
        pid=1,
        exit_code=0,
        signal=None,
        expected=True,
        last_seq=9,
    )
    return [injected, *steps, ended]


def exited(
    *,
    process: str = "w1",
    code: int | None = None,
    signum: int | None = None,
    asked_ns: int | None = None,
) -> Event:
    """A process is reaped. ``asked_ns``: when its supervisor first asked for its end, if it did."""
    return event(
        Kind.PROCESS_EXITED,
        "orchestrator",
        21_000,
        process=process,
        pid=1,
        exit_code=code,
        signal=signum,
        expected=asked_ns is not None,
        last_seq=1,
        asked_ns=asked_ns,
    )


def declared(cause: str, *, process: str = "w1", at_ns: int = 20_600) -> Event:
    """A failure is declared."""
    return event(
        Kind.FAILURE_DETECTED,
        "orchestrator",
        at_ns,
        failure=1,
        cause=cause,
        process=process,
        rank=1,
        detail="x",
    )


def effect(number: int = 0, fault: str = "f", actor: str = "w1", **evidence: Any) -> Event:
    """Something was seen of a fault."""
    return event(
        Kind.FAULT_EFFECT, actor, 20_600, fault=fault, occurrence=number, evidence=evidence
    )


def raised(actor: str = "w1", kind: str = "InjectedError", message: str = "x") -> Event:
    """A rank's last words."""
    return event(Kind.ERROR_RAISED, actor, 20_600, type=kind, message=message)


# ---- targets: ``look()`` is everything a fault may change


@dataclass
class FakeProcess:
    """A process that takes signals."""

    signals: list[int] = field(default_factory=list)
    later: list[tuple[int, float]] = field(default_factory=list)
    refused: bool = False

    def signal(self, signum: int) -> None:
        self.signals.append(signum)

    def signal_later(self, signum: int, delay_s: float) -> None:
        self.later.append((signum, delay_s))

    def refuse_device(self) -> str:
        self.refused = True
        return "cpu:1"

    def accept_device(self) -> None:
        self.refused = False

    def starve(self, spare_mib: int) -> None:
        self.signals.append(signal.SIGKILL)

    def release(self) -> None:
        self.later = []

    def state(self) -> str:
        stopped = self.signals and self.signals[-1] == signal.SIGSTOP
        return "X" if signal.SIGKILL in self.signals else "T" if stopped else "S"

    def look(self) -> tuple[Any, ...]:
        ends = [s for s in self.signals if s not in (signal.SIGSTOP, signal.SIGCONT)]
        return (self.state(), tuple(ends), tuple(self.later), self.refused)


class FakeNode:
    """A node with two processes."""

    def __init__(self) -> None:
        self.nodes = (1,)
        self.processes = (FakeProcess(), FakeProcess())
        self.cores: float | None = None

    def kill(self) -> dict[str, Any]:
        return self._signal(signal.SIGKILL)

    def pause(self) -> dict[str, Any]:
        return self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def ration(self, cores: float) -> None:
        self.cores = cores

    def unration(self) -> None:
        self.cores = None

    def look(self) -> tuple[Any, ...]:
        return (self.cores, *(process.look() for process in self.processes))

    def _signal(self, signum: int) -> dict[str, Any]:
        for process in self.processes:
            process.signal(signum)
        return {"signal": signum}


class FakeBody:
    """The process and device of a rank: notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def segfault(self) -> None:
        self.done.append("segfault")

    def hold_interpreter(self, seconds: float) -> None:
        self.done.append(("held", seconds))

    def block(self, seconds: float) -> None:
        self.done.append(("blocked", seconds))

    def hang(self, how: str, seconds: float) -> str:
        self.done.append((how, seconds))
        return how

    def leave_out_collective(self) -> None:
        self.done.append("left out")

    def break_device(self) -> str:
        self.done.append("broken")
        return "emulated"

    def exhaust_device(self) -> None:
        raise torch.OutOfMemoryError(EMULATED + NO_DEVICE_MEMORY)


class FakeSigns:
    """A rank's marks and wall clock."""

    def __init__(self) -> None:
        self.dropped, self.offset_s = False, 0.0

    def drop_heartbeat(self, dropped: bool) -> None:
        self.dropped = dropped

    def set_wall_offset(self, seconds: float) -> None:
        self.offset_s = seconds

    def wall_ns(self) -> int:
        return int(self.offset_s * 1e9)

    def look(self) -> tuple[Any, ...]:
        return (self.dropped, self.offset_s)


class FakeRank:
    """The training objects of a rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model(torch.ones(1, 3)).sum().backward()
        self.rank, self.step, self.seed = 1, 20, 5
        self.slowdown = 1.0
        self.loss: Callable[[Any], Any] | None = None
        self.body = FakeBody()
        self.signs = FakeSigns()
        self.disk: Any = None
        self.optimizer.step()
        self.forward: dict[str, Any] = {}
        self.rng, self.samples, self.data_delay_s = 7, [1, 2, 3], 0.0
        self.poison: int | None = None
        self.pending: list[Callable[[], None]] = []

    def set_slowdown(self, factor: float, mode: str = "duty-cycle") -> str:
        self.slowdown = factor
        return mode

    def tensors(self, surface: str) -> dict[str, Any]:
        named = dict(self.model.named_parameters())
        if surface == "optimizer_state":
            slots = {n: self.optimizer.state[p].get("momentum_buffer") for n, p in named.items()}
            return {n: t for n, t in slots.items() if t is not None}
        return {n: p.data if surface == "parameter" else p.grad for n, p in named.items()}

    def change_forward(self, surface: str, change: Callable[[Any], None]) -> None:
        self.forward[surface] = torch.arange(1.0, 9.0)
        change(self.forward[surface])

    def change_rng(self, change: Callable[[int], int]) -> None:
        self.rng = change(self.rng)

    def shift_samples(self, by: int) -> None:
        self.samples = [sample + by for sample in self.samples]

    def due_samples(self) -> list[int]:
        return [3, 1, 4]

    def poison_sample(self, sample: int | None) -> None:
        self.poison = sample

    def set_data_delay(self, seconds: float) -> None:
        self.data_delay_s = seconds

    def next_step(self, action: Callable[[], None]) -> None:
        self.pending.append(action)

    def set_disk(self, trouble: Any) -> None:
        self.disk = trouble

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        self.loss = change

    def look(self) -> tuple[Any, ...]:
        values = [p.detach().numpy().tobytes() for p in self.model.parameters()]
        grads = [p.grad.numpy().tobytes() for p in self.model.parameters() if p.grad is not None]
        loss = (
            None
            if self.loss is None
            else float(self.loss(torch.tensor(2.5, requires_grad=True)).detach())
        )
        slots = [t.numpy().tobytes() for t in self.tensors("optimizer_state").values()]
        passing = {surface: flat.tolist() for surface, flat in self.forward.items()}
        others = (
            str(passing),
            self.rng,
            tuple(self.samples),
            self.data_delay_s,
            len(self.pending),
            self.poison,
        )
        return (
            *slots,
            *others,
            *values,
            *grads,
            *self.body.done,
            *self.signs.look(),
            self.slowdown,
            str(loss),
            self.disk,
        )


class FakeStore(FakeProcess):
    """The store's process."""

    latency_s = 0.0

    def set_latency(self, seconds: float) -> None:
        self.latency_s = seconds

    def round_trip_s(self) -> float | None:
        return self.latency_s

    def look(self) -> tuple[Any, ...]:
        return (*super().look(), self.latency_s)


class FakeCoordinator:
    """The job's supervisor."""

    down_s: float | None = None

    def kill(self, down_s: float) -> None:
        self.down_s = down_s

    def look(self) -> tuple[Any, ...]:
        return (self.down_s,)


class FakeLinks:
    """Two links, each with a way back."""

    def __init__(self) -> None:
        self.links = ((1, 0), (1, 2))
        self.shapes: dict[tuple[int, int], LinkShape] = {}
        self.paced: tuple[float | None, float] = (None, 0)
        self.cut = False

    def shape(self, shape: LinkShape, *, both_ways: bool = False) -> str:
        back = [(dst, src) for src, dst in self.links] if both_ways else []
        for link in [*self.links, *back]:
            self.shapes[link] = shape
        return "a fake"

    def pace(self, bytes_per_s: float | None, latency_s: float) -> None:
        self.paced = (bytes_per_s, latency_s)

    def cut_control(self, cut: bool) -> None:
        self.cut = cut

    def look(self) -> tuple[Any, ...]:
        shaped = sorted((link, str(s)) for link, s in self.shapes.items() if s != LinkShape())
        return (self.paced, self.cut, *shaped)


class FakeCheckpoint:
    """A real checkpoint of small files, and an older one."""

    def __init__(self, folder: Path) -> None:
        self.seed = 3
        self.folder = folder
        self.older: Path | None = self._put(folder, 25).path
        self._checkpoint = self._put(folder, 50)
        self.path = self._checkpoint.path

    broken: tuple[str, bool] | None = None

    def break_next_save(self, stage: str, *, lose_unsynced: bool) -> None:
        self.broken = (stage, lose_unsynced)

    @staticmethod
    def _put(folder: Path, step: int) -> checkpoints.Checkpoint:
        staging = folder / ".staging"
        staging.mkdir(parents=True)
        (staging / "big.bin").write_bytes(bytes((step,)) * 1000)
        (staging / "small.bin").write_bytes(b"x")
        return checkpoints.commit(staging, folder, step, {})[0]

    def verify(self) -> str | None:
        try:
            checkpoints.verify(self._checkpoint)
        except checkpoints.CorruptCheckpoint as error:
            return str(error)
        return None

    def look(self) -> tuple[Any, ...]:
        return (self.verify(), self.broken)


class FakeStorage:
    """The file system of the checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.full = ""
        self.read_only = False

    def fill(self, *, shrink: bool) -> None:
        self.full = "shrunk" if shrink else "ballast"

    def free(self) -> None:
        self.full = ""

    def set_read_only(self, read_only: bool) -> None:
        self.read_only = read_only

    def probe(self) -> str | None:
        return "EROFS" if self.read_only else "ENOSPC" if self.full else None

    def look(self) -> tuple[Any, ...]:
        return (self.full, self.read_only)


class FakeHealth:
    """A health source."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int]] = []

    def report(self, *, what: str, code: int) -> None:
        self.reports.append((what, code))

    def spoil(self) -> None:
        self.reports.append(("unfit", 0))

    def look(self) -> tuple[Any, ...]:
        return tuple(self.reports)


FAKES: dict[Where, Callable[[Path], Any]] = {
    Where.PROCESS: lambda folder: FakeProcess(),
    Where.NODE: lambda folder: FakeNode(),
    Where.RANK: lambda folder: FakeRank(),
    Where.CHECKPOINT: FakeCheckpoint,
    Where.HEALTH: lambda folder: FakeHealth(),
    Where.LINK: lambda folder: FakeLinks(),
    Where.STORE: lambda folder: FakeStore(),
    Where.COORDINATOR: lambda folder: FakeCoordinator(),
    Where.STORAGE: FakeStorage,
}
"""One for each place; whoever adds a place adds its fake."""


# ---- cases that several kinds have


KILLED = FaultCase(
    evidence=[exited(signum=9)],
    elsewhere=[
        [exited(process="w2", signum=9)],
        [exited(signum=11)],
        [exited(code=1)],
        [exited(signum=9, asked_ns=20_000)],
    ],
)
"""One process is killed."""
_PROBED = effect(actor="orchestrator", link=[1, 0], round_trip_s=None, mbit_per_s=None)
CUT = FaultCase(
    evidence=[_PROBED, declared("error", at_ns=21_000)],
    elsewhere=[
        [declared("error", at_ns=21_000)],
        [_PROBED, declared("error", at_ns=20_000)],
        [_PROBED, declared("exit", at_ns=21_000)],
        [*calm(collective_s=0.1), _PROBED],
    ],
)
"""Nothing passes between ranks."""


def kind_of(where: Where = Where.PROCESS, **traits: Any) -> type[Fault]:
    """A kind of fault of which a plan knows these traits."""
    return type("Kind", (Fault,), {"where": where, "__module__": __name__, **traits})
