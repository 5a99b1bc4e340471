"""What torch's flight recorder holds, shortened: true to its form, and whatever else it may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from trainchaos.recovery.detection.flight_recorder import (
    CALLS,
    MOST_OPEN,
    MOST_RECORDED,
    recalled,
    shortened,
)
from trainchaos.recovery.process.local import RECORDER_SIZES, rank_environment


def entry(seq: int, **changes: Any) -> dict[str, Any]:
    """As torch 2.13 writes it."""
    return {
        "collective_seq_id": seq,
        "input_dtypes": ["Float"],
        "input_sizes": [[3, 5]],
        "is_p2p": False,
        "op_id": seq,
        "output_dtypes": ["Float"],
        "output_sizes": [[3, 5]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["generation-2", ""],
        "profiling_name": "nccl:all_reduce",
        "record_id": seq - 1,
        "retired": False,
        "state": "completed",
        "thread_id": "139",
        "thread_name": "python",
        "time_created_ns": 1,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 10000,
        **changes,
    }


def dump_of(*entries: Any) -> bytes:
    return json.dumps({"version": "2.10", "pg_config": {}, "entries": entries}).encode()


def told(dump: bytes, generation: int = 2) -> list[tuple[str, int, str]]:
    return [(one.group, one.seq, one.state) for one in shortened(dump, generation)]


def test_the_last_that_is_done_and_the_first_that_are_not() -> None:
    done = [entry(number) for number in range(1, 40)]
    begun = [entry(40, state="started"), *(entry(n, state="scheduled") for n in range(41, 60))]
    found = told(dump_of(*done, *begun))
    assert [number for _, number, _ in found] == [39, *range(40, 40 + MOST_OPEN), 59]
    assert [state for *_, state in found[:3]] == ["done", "started", "scheduled"]
    assert shortened(dump_of(entry(1)), 2)[0].sizes == "3x5 Float"
    assert shortened(dump_of(entry(1)), 2)[0].op == "all_reduce"


def test_a_gloo_collective_is_done_when_it_is_retired_and_an_nccl_one_is_not() -> None:
    gloo = {"profiling_name": "gloo:all_reduce", "state": "scheduled", "retired": True}
    assert told(dump_of(entry(1, **gloo))) == [("generation-2", 1, "done")]
    given_up = entry(1, state="scheduled", retired=True)
    assert told(dump_of(given_up)) == [("generation-2", 1, "scheduled")]


def test_earlier_generations_and_point_to_point_do_not_count() -> None:
    old = entry(7, process_group=["generation-1", ""], state="started")
    alike = entry(8, process_group=["generation-20", ""], state="started")
    shard = entry(3, process_group=["generation-2/shard-1", ""])
    sent = entry(9, is_p2p=True)
    found = told(dump_of(old, alike, shard, sent, entry(5)))
    assert found == [("generation-2/shard-1", 3, "done"), ("generation-2", 5, "done")]


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        7,
        "text",
        [],
        {},
        {"collective_seq_id": True},
        {**entry(1), "collective_seq_id": 1 << 70},
        {**entry(1), "collective_seq_id": -1},
        {**entry(1), "process_group": []},
        {**entry(1), "process_group": [3]},
        {**entry(1), "state": None},
    ],
)
def test_entries_of_another_form_are_left_out(garbage: Any) -> None:
    assert told(dump_of(garbage, entry(5))) == [("generation-2", 5, "done")]


def test_odd_sizes_are_told_and_cut() -> None:
    odd = entry(1, input_sizes=[[], None, [1] * 500], input_dtypes=None, profiling_name=5)
    (found,) = shortened(dump_of(odd), 2)
    assert found.sizes.startswith("scalar, ?, 1x1x1")
    assert len(found.sizes) == 60 and found.op == "5"


def answer(
    *,
    backend: str = "nccl",
    dump: Callable[..., Any] | None = lambda **_: dump_of(entry(41, state="started")),
    **environment: str,
) -> Any:
    asked: list[str] = []

    def find(name: str) -> Callable[..., Any] | None:
        asked.append(name)
        return dump

    found = recalled(4, backend, 2, 1, find, environment=environment)
    assert (found.number, found.rank) == (4, 1)
    assert asked in ([], [CALLS.get(backend)])
    return found


def test_an_answer_has_what_is_recorded() -> None:
    assert [one.seq for one in answer().entries] == [41]
    assert answer().why == ""
    assert answer(TORCH_FR_BUFFER_SIZE="100").why == ""


def _raises(**_: Any) -> bytes:
    raise RuntimeError("driver gone")


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (lambda: answer(dump=None), "this torch has no _dump_nccl_trace_json"),
        (lambda: answer(backend="ucc"), "torch records no collectives of ucc"),
        (lambda: answer(TORCH_FR_BUFFER_SIZE="0"), "the recorder is off: TORCH_FR_BUFFER_SIZE=0"),
        (lambda: answer(TORCH_NCCL_TRACE_BUFFER_SIZE="0"), "the recorder is off"),
        (lambda: answer(TORCH_FR_BUFFER_SIZE="many"), "the recorder is off"),
        (lambda: answer(TORCH_FR_BUFFER_SIZE=str(MOST_RECORDED + 1)), "at most 4096 are read"),
        (lambda: answer(dump=_raises), "could not be read: RuntimeError: driver gone"),
        (lambda: answer(dump=lambda **_: b"\x80\x04nojson"), "could not be read"),
        (lambda: answer(dump=lambda **_: b"[1]"), "has no list of entries"),
        (lambda: answer(dump=lambda **_: b"{}"), "holds nothing of generation 2"),
        (lambda: answer(dump=lambda **_: 3), "could not be read"),
    ],
)
def test_without_a_record_the_answer_says_why(found: Callable[[], Any], why: str) -> None:
    one = found()
    assert one.entries == [] and why in one.why


def test_a_rank_gets_a_recorder_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new, old = RECORDER_SIZES
    monkeypatch.delenv(new, raising=False)
    monkeypatch.delenv(old, raising=False)
    assert rank_environment()[new] == "256"
    monkeypatch.setenv(old, "32")
    assert new not in rank_environment() and rank_environment()[old] == "32"
    monkeypatch.setenv(new, "0")
    assert rank_environment()[new] == "0"
