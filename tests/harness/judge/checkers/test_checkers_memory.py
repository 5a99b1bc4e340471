"""What checkers make of checkpoints in memory: bound by them as long as a keeper that holds them
lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support import arms
from tests.support.arms import FAIL, KILL, evidence_of, red
from tests.support.logs import MS, Line, Script
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind
from trainchaos.recovery.checkpoint.memory.header import name_of

SAVED = 24  # in memory; the disk has step 20, and step 26 was the last


def job(
    resume: int,
    *,
    ends: tuple[str, ...] = (),
    copies: tuple[int, ...] = (1,),
    shards: tuple[int, ...] = (0,),
    of: int = 1,
    refused: bool = False,
    lost: bool = True,
) -> Script:
    """A restart after which training goes on at ``resume``. Rank 0 is on node 0 and saved step
    SAVED in memory; the keepers in ``ends`` die before the restart, ``lost``: as their nodes are.
    """
    script = arms.restart(resume=resume)
    first = script.lines[0].time_ns
    detected = script.find(Kind.FAILURE_DETECTED)[0].time_ns
    restored = script.find(Kind.GENERATION_READY)[-1]
    script.lines = [_placed(line) for line in script.lines]
    if resume == SAVED:
        script.lines[script.lines.index(restored)] = replace(
            restored, data={**restored.data, "checkpoint": name_of(SAVED)}
        )
    committed = script.find(Kind.STEP_COMMITTED, step=SAVED, actor="w0")[0]
    add = script.lines.append
    for number in (0, 1):
        early = f"k{number}" in ends
        when = detected + 5 if early else script.now - MS // 2
        script.lines += _keeper(number, first + 10 + number, when + number, early=early, lost=lost)
    for shard in shards:
        part = {"checkpoint": name_of(SAVED), "place": "memory", "shard": shard, "shards": of}
        when = committed.time_ns + 100 + shard
        add(Line("w0", Kind.CHECKPOINT_SAVING, when, 1, SAVED, part))
        more = {**part, "bytes": 9, "seconds": 0.001, "copies": list(copies)}
        add(Line("w0", Kind.CHECKPOINT_COMMITTED, when + 50, 1, SAVED, more))
    if refused:
        bad = {"checkpoint": name_of(SAVED), "place": "memory", "reason": "damaged"}
        add(Line("w4", Kind.CHECKPOINT_REFUSED, restored.time_ns - 10, 2, SAVED, bad))
    return script


def _keeper(
    number: int, begins_ns: int, ends_ns: int, *, early: bool, lost: bool
) -> Iterator[Line]:
    """Of one keeper. ``early``: it ends unasked, ``lost``: with its node."""
    own = {"process": f"k{number}", "pid": 90 + number}
    began = {**own, "role": "keeper", "mode": "warm", "node": number}
    yield Line(ORCHESTRATOR, Kind.PROCESS_SPAWNED, begins_ns, 0, None, began)
    if early and lost:
        gone = {"node": number, "why": "it ended"}
        yield Line(ORCHESTRATOR, Kind.NODE_LOST, ends_ns - 2, 1, None, gone)
    exited = {**own, "exit_code": None, "signal": 9, "expected": not early, "last_seq": None}
    yield Line(ORCHESTRATOR, Kind.PROCESS_EXITED, ends_ns, 1, None, exited)


def _placed(line: Line) -> Line:
    if line.kind is not Kind.PROCESS_SPAWNED:
        return line
    return replace(
        line, data={**line.data, "node": 0 if line.data["process"] in ("w0", "w1") else 1}
    )


def verdicts(script: Script) -> dict[str, str]:
    return red(evidence_of(script, [KILL]))


def test_what_a_living_keeper_holds_is_restored() -> None:
    assert verdicts(job(SAVED)) == {}
    assert verdicts(job(SAVED, ends=("k0",))) == {}, "from the copy"


def test_going_back_to_the_disk_though_a_keeper_holds_newer_is_a_lost_commit() -> None:
    assert verdicts(job(20)) == {"no-lost-commit": FAIL}
    assert verdicts(job(20, ends=("k0",))) == {"no-lost-commit": FAIL}, "the copy was there"
    assert verdicts(job(20, ends=("k1",))) == {"no-lost-commit": FAIL}


def test_what_died_with_all_its_keepers_is_not_asked_for() -> None:
    assert verdicts(job(20, ends=("k0", "k1"))) == {}
    assert verdicts(job(20, ends=("k0",), copies=())) == {}, "there was no copy"


def test_a_keeper_that_ends_and_nobody_knows_why_is_a_failure_as_a_ranks_end_is() -> None:
    script = job(SAVED, ends=("k0",), lost=False)
    assert verdicts(script) == {"detection": FAIL}
    finding = arms.judged(evidence_of(script, [KILL]))["detection"]
    assert (
        "k0, the keeper of node 0, ended by itself: signal 9, and no fault explains it"
        in finding.witness
    )


def test_a_part_is_not_a_checkpoint() -> None:
    assert verdicts(job(20, shards=(0,), of=2)) == {}
    assert verdicts(job(20, shards=(0, 1), of=2)) == {"no-lost-commit": FAIL}


def test_what_is_damaged_in_memory_is_not_asked_for() -> None:
    assert verdicts(job(20, refused=True)) == {}


def test_a_damaged_one_that_is_restored_all_the_same() -> None:
    assert verdicts(job(SAVED, refused=True)) == {"checkpoint-integrity": FAIL}


def test_the_last_good_one_on_disk_is_not_replaced_by_one_in_memory() -> None:
    script = job(SAVED)
    gone = script.find(Kind.GENERATION_READY)[-1].time_ns + MS
    for step in (10, 20):
        data = {"checkpoint": f"step-{step}"}
        script.lines.append(Line("w4", Kind.CHECKPOINT_DELETED, gone + step, 2, step, data))
    assert "checkpoint-integrity" in verdicts(script)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("seen", "evidence"),
    [
        (Kind.FAULT_LANDED, {"os_state": "T"}),
        (Kind.FAULT_EFFECT, {"signal": "SIGSTOP"}),  # the run may end before the kernel was asked
    ],
    ids=["kernel", "signal"],
)
@pytest.mark.parametrize(
    ("stopped", "how", "verdict"),
    [
        (["k0", "k1"], "over when done", None),
        (["k0"], "over when done", FAIL),  # the other has a copy
        ([], "over when done", FAIL),
        (["k0", "k1"], "its duration was over", FAIL),
    ],
)
def test_a_keeper_that_is_stopped_does_not_answer_until_it_goes_on(
    seen: Kind, evidence: dict[str, Any], stopped: list[str], how: str, verdict: str | None
) -> None:
    script = job(20)
    when = script.find(Kind.FAILURE_DETECTED)[0].time_ns
    about: dict[str, Any] = {"fault": "stop", "occurrence": 0}
    lines: list[tuple[Kind, dict[str, Any]]] = [
        (
            Kind.FAULT_INJECTED,
            {"kind": "node-stop", "target": {"nodes": [0], "processes": stopped}},
        ),
        (seen, {"witness": "kernel: process state", "evidence": evidence}),
        (Kind.FAULT_HEALED, {"how": how}),
    ]
    for number, (kind, data) in enumerate(lines):
        script.lines.append(Line(ORCHESTRATOR, kind, when + 1 + number, 1, None, {**about, **data}))
    script.lines.sort(key=lambda line: line.time_ns)
    assert verdicts(script).get("no-lost-commit") == verdict
