"""Signs of failure in a log: which there are, in which order, and what they are called."""

from __future__ import annotations

from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, Log, make_log
from trainchaos.harness.explain.signs import Sign, signs_between

SAVE = {"checkpoint": "step-00000030", "error": "OSError: [Errno 28] No space left on device"}
XID = {"what": "xid", "code": 79, "device": "cuda:1", "node": 0, "rank": 1, "source": "nvml"}

ALARM = {
    "what": "ecc-uncorrected",
    "device": "cuda:2",
    "node": None,
    "rank": None,
    "lasted_s": 1.0,
    "value": 3.0,
    "threshold": 2.0,
    "evidence": {},
}


def exited(process: str, *, code: int | None = None, signal: int | None = None) -> dict[str, Any]:
    """An end that nobody asked for."""
    ended = {"exit_code": code, "signal": signal, "expected": False}
    return {"process": process, "pid": 7, "last_seq": 1, **ended}


def failed(cause: str, process: str | None, detail: str) -> dict[str, Any]:
    """A failure that was declared."""
    return {"failure": 1, "cause": cause, "process": process, "rank": 0, "detail": detail}


def written(*rows: tuple[str, Kind, dict[str, Any]]) -> Log:
    """A log with these events, one each nanosecond from 1 on."""
    actors: dict[str, list[Event]] = {}
    for number, (actor, kind, data) in enumerate(rows, start=1):
        own = actors.setdefault(actor, [])
        event = Event(
            kind=kind,
            actor=actor,
            seq=len(own),
            time_ns=number,
            generation=1,
            step=None,
            data=data,
        )
        own.append(event)
    logs = [
        ActorLog(actor=actor, events=tuple(events), problems=(), ended=True)
        for actor, events in actors.items()
    ]
    return make_log(logs)


def named(found: tuple[Sign, ...]) -> list[tuple[str, str | None]]:
    """Words and entry of each."""
    return [(sign.what, sign.entry.id if sign.entry else None) for sign in found]


def test_each_kind_of_sign() -> None:
    log = written(
        (ORCHESTRATOR, Kind.HEALTH_REPORTED, XID),
        (ORCHESTRATOR, Kind.HEALTH_REPORTED, XID | {"what": "thermal", "code": 96, "rank": None}),
        (ORCHESTRATOR, Kind.HEALTH_ALARM, ALARM),
        ("w1", Kind.ERROR_RAISED, {"type": "RuntimeError", "message": "CUDA out of memory\nmore"}),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w1", code=1)),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w2", signal=7)),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w3", signal=63)),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w4", code=77)),
        ("w0", Kind.CHECKPOINT_FAILED, SAVE),
        (
            "w0",
            Kind.CHECKPOINT_REFUSED,
            {"checkpoint": "a", "reason": "failed finding central directory"},
        ),
        ("w5", Kind.NONFINITE_CAUGHT, {"rank": 5, "blamed": [5], "what": "loss or gradient"}),
        (
            ORCHESTRATOR,
            Kind.COMMAND_ENDED,
            {"attempt": 1, "exit_code": 143, "signal": None, "asked": False},
        ),
        (ORCHESTRATOR, Kind.FAILURE_DETECTED, failed("error", "w6", "Connection reset by peer")),
    )
    assert named(signs_between(log, 0, 99)) == [
        ("the health source reported XID 79 of rank 1", "xid-79"),
        ("w1 raised RuntimeError: CUDA out of memory", "cuda-oom"),
        ("w2 was ended by SIGBUS", "signal-bus"),
        ("w0 could not save: OSError: [Errno 28] No space left on device", "disk-full"),
        ("w0 refused a checkpoint: failed finding central directory", "checkpoint-damaged"),
        ("w5 caught non-finite values: loss or gradient", "nonfinite"),
        ("w1 ended with exit code 1", "exit-1"),
        ("the command ended with exit code 143", "signal-term"),
        ("w6 was declared failed: Connection reset by peer", "connection-reset"),
        ("the health source reported thermal 96 of device cuda:1, node 0", None),
        ("a health detector raised ecc-uncorrected of device cuda:2 (3 over 2)", None),
        ("w3 was ended by signal 63", None),
        ("w4 ended with exit code 77", None),
    ]


def test_what_is_no_sign() -> None:
    asked = exited("w1", signal=9) | {"expected": True}
    command = {"attempt": 1, "exit_code": 1, "signal": None, "asked": True}
    log = written(
        (ORCHESTRATOR, Kind.PROCESS_EXITED, asked),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w2", code=0)),
        (ORCHESTRATOR, Kind.COMMAND_ENDED, command),
        (ORCHESTRATOR, Kind.FAILURE_DETECTED, failed("exit", "w1", "signal 9")),
        (ORCHESTRATOR, Kind.FAILURE_DETECTED, failed("error", None, "all ranks wait")),
    )
    assert signs_between(log, 0, 99) == ()


def test_those_of_who_was_hit_come_first() -> None:
    log = written(
        ("w4", Kind.CHECKPOINT_FAILED, SAVE),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w0", signal=9)),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w1", signal=15)),
    )
    first = [what for what, _ in named(signs_between(log, 0, 99, {"w0"}))]
    assert first[0] == "w0 was ended by SIGKILL" and first[1].startswith("w4 could not save")
    assert named(signs_between(log, 0, 99))[0][1] == "disk-full", (
        "of nobody in particular, the cause"
    )


def test_only_those_of_the_time() -> None:
    log = written(
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w0", signal=9)),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w1", signal=9)),
        (ORCHESTRATOR, Kind.PROCESS_EXITED, exited("w2", signal=9)),
    )
    assert [what for what, _ in named(signs_between(log, 2, 2))] == ["w1 was ended by SIGKILL"]
    assert signs_between(log, 4, 99) == () and len(signs_between(log, 1, 3)) == 3


def test_a_long_error_is_cut_and_an_empty_one_said() -> None:
    log = written(
        ("w0", Kind.ERROR_RAISED, {"type": "ValueError", "message": "x" * 10_000}),
        ("w0", Kind.CHECKPOINT_FAILED, SAVE | {"error": " \n"}),
    )
    long, empty = sorted((what for what, _ in named(signs_between(log, 0, 99))), reverse=True)
    assert long.startswith("w0 raised ValueError: xxx") and len(long) < 200
    assert empty == "w0 could not save: nothing"
