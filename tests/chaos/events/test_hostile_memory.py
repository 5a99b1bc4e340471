"""Whatever event logs hold, reading and judging them takes no more memory than is said, and soon
comes to an end.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.search.simulate import cell_of, play
from trainchaos import reports
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.budget import MOST_BYTES, VARIABLE, Budget
from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Kind, read_log

MIB = 1 << 20
ROOM = 16 * MIB  # for logs
MORE = 48 * MIB  # for one line, the shared names and numbers, and what else an interpreter does
FILE = 18 * MIB
LIMIT_S = 120  # of a processor: it only ends what never ends


def event(seq: int, data: str, actor: str = "w0") -> str:
    head = (
        f'{{"kind":"error_raised","actor":"{actor}","seq":{seq},"time_ns":{seq},'
        '"generation":1,"step":null,'
    )
    return f'{head}"data":{{"type":"t","message":"m","x":{data}}}}}\n'


def lines(data: Callable[[int], str]) -> Callable[[], Iterator[bytes]]:
    def made() -> Iterator[bytes]:
        written = seq = 0
        while written < FILE:
            line = event(seq, data(seq)).encode()
            yield line
            written, seq = written + len(line), seq + 1

    return made


SHAPES: dict[str, Callable[[], Iterator[bytes]]] = {
    "tiny events": lines(lambda n: "0"),
    "empty lists": lines(lambda n: "[" + "[]," * 20_000 + "0]"),
    "empty mappings": lines(lambda n: "[" + "{}," * 20_000 + "0]"),
    "a line of empty lists": lambda: iter([event(0, "[" + "[]," * (5 * MIB) + "0]").encode()]),
    "keys": lines(lambda n: "{" + ",".join(f'"k{n}.{i}":0' for i in range(100)) + "}"),
    "wide texts": lines(lambda n: '"' + "x" * 50_000 + '\U0001f600"'),
    "large numbers": lines(lambda n: "[" + "12345678," * 1_000 + "0]"),
    "deep": lines(lambda n: "[" * 200 + "]" * 200),
    "actors": lambda: (event(n, "0", f"a{n}").encode() for n in range(200_000)),
    "gaps": lambda: (event(2 * n, "0").encode() for n in range(200_000)),
    "dropped": lambda: (
        event(n, '0,"first":0,"last":"' + "x" * 500 + '","why":[0]')
        .replace("error_raised", "events_dropped")
        .encode()
        for n in range(40_000)
    ),
    "empty lines": lambda: iter([b"\n" * FILE]),
    "lines that are no events": lambda: iter([b"0\n" * (FILE // 2)]),
    "white space": lines(lambda n: " " * 100_000 + "0"),
}


def alone(said: Path, more: int, act: Callable[[], None]) -> str:
    """What a process of its own says, which may take so many bytes more than there are, and little
    time.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.stdout = sys.stderr = said.open("w")
            has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (has + more,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S,) * 2)
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = said.read_text()
    assert code == 0, f"exit {code}: {text[-2000:]}"
    return text


def put(path: Path, shape: str) -> None:
    with path.open("wb") as stream:
        stream.writelines(SHAPES[shape]())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_log_of_any_shape_stays_within_its_budget(shape: str, memory: Path) -> None:
    put(memory / "w0.jsonl", shape)

    def read() -> None:
        log = read_log(memory, Budget(ROOM))
        assert log.problems and len(log.problems) < 200 and max(map(len, log.problems)) < 1_000
        print(log.unread)

    said = alone(memory / "said", ROOM + MORE, read)
    if shape not in ("a line of empty lists",):
        assert "w0.jsonl: not read: it takes" in said


def test_logs_that_are_held_together_share_one_budget(memory: Path) -> None:
    for number in range(4):
        (memory / f"w{number}.jsonl").write_text(
            "".join(event(n, "0", f"w{number}") for n in range(1000))
        )
    budget = Budget(1 << 30)
    assert not read_log(memory, budget).unread and not budget.spent
    takes = budget.charged // 4
    log = read_log(memory, Budget(3 * takes + takes // 2))
    assert [name for name, one in sorted(log.actors.items()) if one.unread] == ["w3"]
    assert not log.by("w3") and len(log.by("w2")) == 1000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    scenario = root / "s.yaml"
    scenario.write_text(
        "version: 1\nname: s\nlauncher: sim\nworkload: {kind: mlp, ranks: 2, steps: 100,"
        " global_batch: 8}\nrecovery: drop-replica\nbaseline: paired\nsla: {recovery_time: ['median"
        " < 60s']}\nfaults: [{id: kill, kind: process-kill, at: {step: 40}}]\n"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reports, "render_all", lambda run, results: [])
        assert invoke(["run", str(scenario), "--runs", str(root), "-q"]) == 0
    (root / "s/latest/seal.json").unlink()  # what is done to it is to be judged
    return (root / "s" / "latest").resolve()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arm", "who"), [("faulted", "w1"), ("faulted", ORCHESTRATOR), ("control", "w0")]
)
def test_a_run_with_a_log_that_is_too_large_is_inconclusive_and_says_so(
    run: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, arm: str, who: str
) -> None:
    copy = memory / "r"
    shutil.copytree(run, copy)
    monkeypatch.setenv(VARIABLE, str(ROOM / (1 << 30)))
    path = copy / "events" / f"default.r0.{arm}" / f"{who}.jsonl"
    first = len(path.read_bytes().splitlines())
    with path.open("a") as stream:
        stream.writelines(event(first + n, "0", who) for n in range(FILE // 150))

    def judge() -> None:
        assert invoke(["analyze", str(copy)]) == 3

    said = alone(memory / "said", ROOM + MORE + 32 * MIB, judge)
    told, head = said.splitlines()[:2]
    assert told.startswith("judging ") and told.endswith(" MiB of logs ...")
    assert (
        head.startswith("verdict INCONCLUSIVE")
        and f"default.r0.{arm}: {who}.jsonl: not read: it takes" in head
    )
    assert VARIABLE in head and " FAIL" not in said
    reason = json.loads((copy / "results.json").read_text())["reason"]
    assert "GiB of memory for event logs" in reason


@pytest.mark.slow
def test_a_long_run_with_its_control_is_within_the_budget(memory: Path) -> None:
    """Of 8 ranks over 100,000 steps: by what a run takes more that is longer by some steps."""
    charged = []
    for steps in (40, 80):
        root = memory / str(steps)
        root.mkdir()
        play(cell_of("hot-spare", [], ranks=8, steps=steps), root, seed=1)
        (folder,) = {path.parent for path in root.rglob("orchestrator.jsonl")}
        budget = Budget()
        assert not read_log(folder, budget).unread
        charged.append(budget.charged)
    assert 2 * (charged[1] - charged[0]) / 40 * 100_000 < MOST_BYTES


def test_what_is_wrong_with_a_line_of_other_types_is_told(memory: Path) -> None:
    path = memory / "w0.jsonl"
    first = {
        "kind": "events_dropped",
        "actor": "w0",
        "seq": 0,
        "time_ns": 0,
        "generation": 0,
        "step": None,
        "data": {"first": 0, "last": "x", "why": None},
    }
    path.write_text(json.dumps(first) + "\n")
    log: ActorLog = read_log(memory).actors["w0"]
    assert (
        log.events[0].kind is Kind.EVENTS_DROPPED
        and "events 0 to x were dropped" in log.problems[0]
    )
