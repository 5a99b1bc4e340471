"""Books of nodes stay as long as they are, however many processes there were, and so do the files
of an agent.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.recovery.nodes.test_nodes_fleet import MARK, Puppet, Stage
from tests.support.clusters.nodes import heard
from trainchaos.recovery.nodes.agent import agent_processes as module
from trainchaos.recovery.nodes.agent.agent_processes import AgentProcesses
from trainchaos.recovery.nodes.coordinator import remote_processes
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.link import Post
from trainchaos.recovery.nodes.link.protocol import Ended, Heard, Lines, Start, Started
from trainchaos.recovery.process.host import Exited, MessageReceived
from trainchaos.recovery.process.local import script_recipe
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import NEVER
from trainchaos.recovery.transport.stream import encoded
from trainchaos.recovery.transport.wire import Parked, Ready, Stop


def entries(thing: object, seen: set[int] | None = None) -> int:
    """How much is in all containers that can be reached from an object of ours."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, str | bytes | int | float | type):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(entries(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return len(thing) + sum(entries(value, seen) for value in thing)
    if type(thing).__module__.startswith(("recovery", "tests.")):
        return sum(entries(value, seen) for value in getattr(thing, "__dict__", {}).values())
    return 0


# ---- a coordinator


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.fleet.away()


def life(stage: Stage, puppet: Puppet, name: str) -> None:
    """A process begins, writes and ends."""
    puppet.say(Started(process=name, pid=4711))
    stage.fleet.spawn(name, 0, {"name": name}, mode="warm", log=f"{name}.jsonl")
    puppet.say(
        heard(name, Ready()),
        Lines(file=f"{name}.jsonl", offset=0, text="one\n"),
        Ended(process=name, exit_code=None, signal=9, time_ns=5, mark=MARK),
    )
    stage.until_kind(Exited)
    puppet.listen()  # so that it confirms what it has
    puppet.heard.clear()


def test_a_fleet_knows_no_more_after_many_replacements(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_processes, "KEPT_GONE", 20)
    puppet = stage.join()
    sizes = []
    for number in range(150):
        life(stage, puppet, f"w{number}")
        if number >= 49:
            sizes.append(entries(stage.fleet))
    assert max(sizes[50:]) <= max(sizes[:50])
    assert (tmp_path / "w149.jsonl").read_text() == "one\n"
    known, forgotten = stage.fleet.mark("w149"), stage.fleet.mark("w3")
    assert known.committed == 6 and forgotten == NEVER
    for name in ("w149", "w3"):
        assert not stage.fleet.alive(name) and stage.fleet.os_state(name) == "X"
        assert not stage.fleet.send(name, Stop()) and isinstance(stage.fleet.pulse(name), Pulse)
        stage.fleet.signal(name, 9)


def test_files_that_the_disk_did_not_take_are_forgotten_with_their_process(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_processes, "KEPT_GONE", 5)
    puppet = stage.join()
    for number in range(20):
        (tmp_path / f"w{number}.jsonl").mkdir()  # so that nothing can be written there
        life(stage, puppet, f"w{number}")
    assert 0 < len(stage.fleet._processes._unkept) <= 6


# ---- an agent


class Pretended:
    """Stands for the processes of a node."""

    def __init__(self, *_: object, **__: object) -> None:
        self.started = 0

    def start(
        self,
        name: str,
        config: bytes,
        *,
        mode: str,
        log: Path | None = None,
        waiting: object = None,
    ) -> int:
        self.started += 1
        told = json.loads(config)
        for path in (log, told.get("log")):
            if path is not None:
                Path(path).write_text(f"{name} writes\n")
        return self.started

    def mark(self, name: str) -> Any:
        return NEVER

    def os_state(self, name: str) -> str:
        return "S"

    def pulse(self, name: str) -> Pulse:
        return Pulse()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentProcesses:
    monkeypatch.setattr(module, "LocalHost", Pretended)
    monkeypatch.setattr(module, "KEPT_ENDED", 20)
    return AgentProcesses(None, script_recipe(), Post(limit=10_000), tmp_path)  # type: ignore[arg-type]


def begin(processes: AgentProcesses, name: str, scratch: Path) -> None:
    config = json.dumps({"log": str(scratch / "logs" / f"{name}.log")})
    (scratch / "logs").mkdir(exist_ok=True)
    processes.start(Start(process=name, mode="warm", config=config, log=f"{name}.jsonl"))
    processes.tell_of([MessageReceived(process=name, message=Ready())])


def confirm(processes: AgentProcesses) -> None:
    """The coordinator has all that was told by now."""
    processes._post.confirmed(max((number for number, *_ in processes._post._kept), default=0))


def files(scratch: Path) -> set[str]:
    return {path.name for path in scratch.rglob("*") if path.is_file()}


def test_an_agent_deletes_what_an_ended_process_wrote_once_it_is_forwarded_and_no_sooner(
    processes: AgentProcesses, tmp_path: Path
) -> None:
    theirs = tmp_path / "w0.jsonl.kept"
    theirs.write_text("somebody else's")
    begin(processes, "w0", tmp_path)
    begin(processes, "w1", tmp_path)
    confirm(processes)
    processes.tell_of([Exited(process="w0", exit_code=1, signal=None, time_ns=1)])
    both = {"w0.jsonl", "w0.log", "w1.jsonl", "w1.log", theirs.name}
    assert files(tmp_path) == both, "nobody has it yet"
    processes._post.renumber()  # another coordinator
    told = [frame() if callable(frame) else frame for _, frame, _ in processes._post._kept]
    assert [frame.text for frame in told if isinstance(frame, Lines)] == ["w0 writes\n"] * 2
    processes._post.confirmed(len(told) - 1)
    assert files(tmp_path) == both, "its end is not confirmed"
    confirm(processes)
    assert files(tmp_path) == both - {"w0.jsonl", "w0.log"}
    assert [path.name for path in processes.files()] == ["w1.jsonl", "w1.log"]


@pytest.mark.slow
def test_an_agent_holds_no_more_after_many_replacements(
    processes: AgentProcesses, tmp_path: Path
) -> None:
    sizes = []
    for number in range(1000):
        begin(processes, f"w{number}", tmp_path)
        processes.tell_of([Exited(process=f"w{number}", exit_code=1, signal=None, time_ns=1)])
        confirm(processes)
        if number >= 100:
            sizes.append(entries(processes))
    assert max(sizes[100:]) <= max(sizes[:100])
    assert files(tmp_path) == set()
    assert [ended.process for ended in processes.ended][-2:] == ["w998", "w999"], (
        "for who takes over"
    )


def said(processes: AgentProcesses) -> list[tuple[str, ...]]:
    """What waits for the coordinator: the kind of each line, and the processes it is of."""
    frames = [frame for _, frame, _ in processes._post._kept if not callable(frame)]
    return [
        ("Heard", *(name for name, _ in frame.each))
        if isinstance(frame, Heard)
        else (type(frame).__name__, getattr(frame, "process", ""))
        for frame in frames
        if not isinstance(frame, Started)
    ]


def test_what_ranks_say_in_one_turn_is_one_line_and_an_exit_comes_after_it(
    processes: AgentProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("w0", "w1", "w2"):
        begin(processes, name, tmp_path)
    confirm(processes)
    parked = [
        MessageReceived(
            process=name, message=Parked(generation=1, step=7, valid=True, why="aborted")
        )
        for name in ("w0", "w1", "w2")
    ]
    processes.tell_of([*parked, Exited(process="w1", exit_code=1, signal=None, time_ns=1)])
    assert said(processes) == [("Heard", "w0", "w1", "w2"), ("Ended", "w1")]
    confirm(processes)
    monkeypatch.setattr(protocol, "TOGETHER", 2 * len(encoded(parked[0].message)))
    processes.tell_of(parked)
    assert said(processes) == [("Heard", "w0", "w1"), ("Heard", "w2")]
    confirm(processes)
    monkeypatch.setattr(protocol, "TOGETHER", 10)
    processes.tell_of(parked)
    assert said(processes) == [("Heard", "w0"), ("Heard", "w1"), ("Heard", "w2")]
    confirm(processes)
    text = "\N{SLIGHTLY SMILING FACE}" * 1000  # four bytes each, and a line has so many bytes
    wide = [
        MessageReceived(process=name, message=structs.replace(parked[0].message, error=text))
        for name in ("w0", "w1")
    ]
    monkeypatch.setattr(protocol, "TOGETHER", 5000)
    processes.tell_of(wide)
    assert said(processes) == [("Heard", "w0"), ("Heard", "w1")]
