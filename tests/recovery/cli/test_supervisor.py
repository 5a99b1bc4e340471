"""What a supervisor tells its controller of the job's options, over a host in which no process is
real.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.supervise.test_controller import BLANK
from trainchaos.chaos.events.log import ORCHESTRATOR, EventWriter, Kind, read_actor, read_log
from trainchaos.recovery.cli.console import JobListener
from trainchaos.recovery.cli.options import parser
from trainchaos.recovery.cli.script_job import LOG_RESERVE, JobSpec, ScriptJob
from trainchaos.recovery.cli.takeover_log import read_takeover_log
from trainchaos.recovery.detection.silence import PacedLook
from trainchaos.recovery.health.signs import HealthAlarm, HealthReport
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.policy.jobconfig import LOOPBACK, Exchange
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.process.host import Exited, MessageReceived, Report
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.run import _spec
from trainchaos.recovery.supervise.supervision import StopFlag, Timing
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import (
    Inquiry,
    Join,
    Joined,
    Message,
    Ready,
    Status,
)

STEPS = 100
REPORT = HealthReport(what="xid", code=79, node=0, device="cpu", source="nvml").model_dump()
ALARM = HealthAlarm(what="device-lost", node=0, device="cpu", value=1.0, threshold=0.0).model_dump()
READY = Ready(steps=STEPS, samples=64, global_batch=4)


class FakeHost:
    """Processes that are ready at once, say where they are when they are asked, and join when they
    are told to. ``lives``: called at every look, until it says that the job has lived long enough.
    """

    store_host = LOOPBACK
    configure: Any = None

    def __init__(self, stop: StopFlag, lives: Callable[[FakeHost], bool]) -> None:
        self._stop, self._lives = stop, lives
        self._news: list[Report] = []
        self._names: list[str] = []
        self.joins: dict[str, Join] = {}

    def await_ready(self, stopped: Callable[[], bool]) -> None:
        """It is."""

    def inherit(self, processes: Mapping[str, tuple[int, int]]) -> None:
        """``w1`` was not ready when its supervisor was lost, and is by now."""
        self._names += processes
        self._news.append(MessageReceived(process="w1", message=READY))

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def usable(self) -> Sequence[int]:
        return [0]

    def places_on(self, node: int) -> Sequence[str]:
        return ["cpu"]

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        self._names.append(name)
        self._news.append(MessageReceived(process=name, message=READY))
        return 1_000_000 + len(self._names)

    def news(self) -> Sequence[Any]:
        return ()

    hardware = news

    def pid(self, name: str) -> None:
        return None

    def stacks(self, name: str) -> None:
        return None

    def may_return(self) -> bool:
        return False

    def alive(self, name: str) -> bool:
        return name in self._names

    def send(self, name: str, message: Message) -> bool:
        answer: Message | None = None
        if isinstance(message, Inquiry):
            answer = Status(
                place="waiting", generation=0, step=0, valid=False, number=message.number
            )
        elif isinstance(message, Join):
            self.joins[name] = message
            answer = Joined(generation=message.generation, step=0, checkpoint=None)
        self._news += [MessageReceived(process=name, message=answer)] if answer else []
        return name in self._names

    def signal(self, name: str, signum: int) -> None:
        if name in self._names:
            self._names.remove(name)
            now_ns = time.monotonic_ns()
            self._news.append(Exited(process=name, exit_code=None, signal=signum, time_ns=now_ns))

    def mark(self, name: str) -> Mark:
        return BLANK

    def os_state(self, name: str) -> str:
        return "S"

    def pulse(self, name: str) -> Pulse:
        return Pulse(starved_s=0.0)

    def wait(self, timeout_s: float) -> Sequence[Any]:
        if not self._lives(self):
            self._stop.signum = signal.SIGTERM
        news, self._news = self._news, []
        return news

    def close(self) -> dict[int, str]:
        return {}


def spec_of(events: Path, **more: Any) -> JobSpec:
    given: dict[str, Any] = {
        "script": Path("train.py"),
        "args": (),
        "ranks": 2,
        "events": events,
        "exchange": Exchange("gloo"),
        "checkpoint_dir": None,
        "checkpoint_every": None,
        "checkpoint_keep": None,
    }
    return JobSpec(**given | more)


def lost_before_its_first_generation(events: Path, *more: tuple[Kind, Mapping[str, Any]]) -> None:
    """The log of a supervisor that was killed when one of its two ranks was ready."""
    writer = EventWriter(events, ORCHESTRATOR, time.monotonic_ns)
    writer.write(Kind.ACTOR_STARTED, pid=1, host="here", wall_ns=1, boot=boot_id())
    for pid, name in enumerate(("w0", "w1"), start=1_000_000):
        writer.write(
            Kind.PROCESS_SPAWNED,
            process=name,
            pid=pid,
            role="worker",
            mode="warm",
            node=0,
            device="cpu",
        )
    writer.write(
        Kind.RUN_STARTED,
        arm="job",
        cell="train.py",
        repeat=0,
        seed=0,
        ranks=2,
        spares=0,
        steps=STEPS,
        global_batch=4,
        strategy="drop-replica",
        order={"seed": 0, "samples": 64},
    )
    writer.write(Kind.PROCESS_READY, process="w0")
    for kind, data in more:
        writer.write(kind, **data)


def supervised(
    spec: JobSpec, lives: Callable[[FakeHost], bool], *, takes_over: bool = False
) -> FakeHost:
    """A job whose supervisor is ended once ``lives`` says so; its host."""
    stop = StopFlag()
    host = FakeHost(stop, lives)
    takeover = read_takeover_log(spec.events) if takes_over else None
    assert not isinstance(takeover, str)
    job = ScriptJob(
        spec,
        DropReplica(),
        Timing(),
        host=host,
        listener=JobListener(),
        stop=stop,
        takeover=takeover,
    )
    assert job.run() == "interrupted"
    return host


def turns(most: int, wanted: Callable[[FakeHost], bool]) -> Callable[[FakeHost], bool]:
    """Until it is so; ``most``: looks, and no more, whatever happens."""
    left: Iterator[int] = iter(range(most))
    return lambda host: not wanted(host) and next(left, None) is not None


@pytest.mark.parametrize("fresh", [False, True], ids=["from-a-checkpoint", "fresh"])
@pytest.mark.parametrize("takes_over", [False, True], ids=["begun", "taken-over"])
def test_the_first_generation_holds_what_the_user_asked_for(
    tmp_path: Path, takes_over: bool, fresh: bool
) -> None:
    """Initial values only where they were asked for, also when the supervisor was lost before there
    were any.
    """
    if takes_over:
        lost_before_its_first_generation(tmp_path)
    lives = turns(200, lambda host: len(host.joins) == 2)
    host = supervised(spec_of(tmp_path, fresh=fresh), lives, takes_over=takes_over)
    assert {name: join.state.restore for name, join in host.joins.items()} == dict.fromkeys(
        ("w0", "w1"), not fresh
    )
    events = read_actor(tmp_path / "orchestrator.jsonl").events
    assert len([e for e in events if e.kind is Kind.COORDINATOR_ADOPTED]) == takes_over
    exits = [e.data for e in events if e.kind is Kind.PROCESS_EXITED]
    assert len(exits) == 2 and all(e["expected"] and e["asked_ns"] for e in exits)


@pytest.mark.parametrize(
    ("kind", "data", "warned"),
    [
        (Kind.HEALTH_REPORTED, REPORT, {"w0", "w1"}),
        (Kind.HEALTH_REPORTED, REPORT | {"device": None}, {"w0", "w1"}),
        (Kind.HEALTH_REPORTED, REPORT | {"device": "cuda:7"}, set()),
        (Kind.HEALTH_REPORTED, REPORT | {"node": 3}, set()),
        (Kind.HEALTH_REPORTED, REPORT | {"rank": 0}, set()),
        (Kind.HEALTH_REPORTED, REPORT | {"code": "much"}, set()),
        (Kind.HEALTH_ALARM, ALARM, {"w0", "w1"}),
        (Kind.HEALTH_ALARM, ALARM | {"what": "idle-device"}, set()),
    ],
)
def test_a_place_that_a_lost_supervisor_knew_to_fail_is_known_to_the_next(
    tmp_path: Path, kind: Kind, data: dict[str, Any], warned: set[str]
) -> None:
    lost_before_its_first_generation(tmp_path, (kind, data))

    def told() -> set[str]:
        events = read_actor(tmp_path / "orchestrator.jsonl").events
        found = [e for e in events if e.kind is Kind.FAILURE_DETECTED]
        return {e.data["process"] for e in found if e.data["cause"] == "warning"}

    wanted = turns(200, lambda host: len(host.joins) == 2 and (told() == warned or not warned))
    supervised(spec_of(tmp_path), wanted, takes_over=True)
    assert told() == warned


def test_logs_are_kept_within_the_limit_that_the_user_gave(memory: Path) -> None:
    """Two times the limit is there when training begins."""
    limit = 2 * LOG_RESERVE
    logs = memory / "logs"
    logs.mkdir()

    def written(host: FakeHost) -> bool:
        for path in (memory / "w0.jsonl", logs / "w1.log"):
            if host.joins and not path.exists():
                path.write_bytes(b"x" * limit)
        return any(
            e.kind is Kind.FILES_DROPPED for e in read_actor(memory / "orchestrator.jsonl").events
        )

    options = [
        "--ranks",
        "2",
        "--spares",
        "0",
        "--logs",
        logs,
        "--log-limit",
        limit / 1e9,
        "train.py",
    ]
    supervised(
        _spec(parser(None).parse_args(list(map(str, options))), memory, Exchange("gloo")),
        turns(200, written),
    )
    dropped = [e for e in read_log(memory).events if e.kind is Kind.FILES_DROPPED]
    assert len(dropped) == 1 and dropped[0].data["bytes"] > limit // 2
    held = sum(
        path.stat().st_blocks * 512 for path in (*memory.glob("*.jsonl"), *logs.glob("*.log"))
    )
    assert held <= limit, "with the supervisor's own log, which nothing is taken from"


@pytest.mark.parametrize("option", ["--log-limit", "--memory-limit"])
@pytest.mark.parametrize("room", ["0", "-1", "nan", "inf", "much"])
def test_room_that_is_none_is_wrong_usage(
    option: str, room: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser(None).parse_args(["--ranks", "2", f"{option}={room}", "train.py"])
    assert ended.value.code == 2 and option in capsys.readouterr().err


def test_a_turn_in_which_no_look_is_due_asks_no_process_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn follows each message: what it asked of all ranks would grow with their square."""
    turn, asked, looked_at = [0], list[int](), set[int]()
    take = PacedLook.take

    def few_takes(self: PacedLook, look: Callable[[], None], ranks: int) -> None:
        looked_at.add(ranks)
        if turn[0] < 40:
            take(self, look, ranks)

    monkeypatch.setattr(PacedLook, "take", few_takes)
    monkeypatch.setattr(FakeHost, "mark", lambda self, name: asked.append(turn[0]) or BLANK)

    def lives(_: FakeHost) -> bool:
        turn[0] += 1
        if turn[0] == 80:
            assert asked and max(asked) < 40
        return turn[0] < 80

    supervised(spec_of(tmp_path), lives)
    assert turn[0] >= 80
    assert max(looked_at) == 2, "how far apart looks are depends on how many ranks there are"
