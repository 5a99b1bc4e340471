"""Each check of one place: faults of hardware go in where it touches the hardware, and it names
them.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainchaos.harness.preflight import checks
from trainchaos.harness.preflight.check import Finding, Measured, Task, nearest
from trainchaos.harness.preflight.checks import (
    DISK_BLOCK,
    PATTERNS,
    PLACE_CHECKS,
    WORD,
    TemporaryFile,
    excess,
    factors,
    gamma,
    kept,
)

WORDS = 1 << 10
BAD = (2, 77)
"""Block and word that are faulty."""
CHECKS = {check.name: check for check in PLACE_CHECKS}


def measured(name: str, place: str = "cpu:1", budget_s: float = 30.0, **task: Any) -> Measured:
    """What a check measures."""
    return CHECKS[name].measure(Task(place=place, budget_s=budget_s, seed=3, **task))


def said(name: str, place: str, *rounds: Measured) -> Finding:
    """Its judgement alone."""
    return replace(CHECKS[name].judge(place, rounds)[0], place=place)


def judged(name: str, place: str = "cpu:1", **task: Any) -> Finding:
    """What a check says of what it measures."""
    return said(name, place, measured(name, place, **task))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], int]], None]:
    """Makes memory of four blocks, of which one word is changed by what is done to it."""

    def make(fault: Callable[[int], int]) -> None:
        blocks = [torch.empty(WORDS, dtype=torch.int64) for _ in range(4)]

        def write(block: Any, words: Any) -> None:
            block.copy_(words)
            if block is blocks[BAD[0]]:
                block[BAD[1]].fill_(fault(int(block[BAD[1]])))

        monkeypatch.setattr(checks, "blocks_of", lambda device: blocks)
        monkeypatch.setattr(checks, "write", write)

    return make


Memory = Callable[[Callable[[int], int]], None]


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (lambda word: word | 1 << 5, "0x00"),
        (lambda word: word & ~(1 << 62), "0xff"),
        (lambda word: word ^ 2 if word == 0x5555_5555_5555_5555 else word, "0x55"),
        (lambda word: word ^ 2 if word == -0x5555_5555_5555_5556 else word, "0xaa"),
        (lambda word: word ^ 8 if word == (2 * WORDS + 77) * WORD else word, "address"),
    ],
)
def test_a_bit_that_does_not_hold_is_found_with_its_address(
    memory: Memory, fault: Callable[[int], int], first: str
) -> None:
    memory(fault)
    found = judged("memory")
    assert (found.state, found.place) == ("unfit", "cpu:1")
    wrong = found.evidence["wrong"][0]
    assert wrong["pattern"] == first
    assert wrong["address"] == (BAD[0] * WORDS + BAD[1]) * WORD
    assert len(wrong["bits"]) == 1
    assert f"at byte {wrong['address']:#x}" in found.said and "memtest86+" in found.todo


def test_what_only_random_words_show_is_found(memory: Memory) -> None:
    seen: list[int] = []

    def fault(word: int) -> int:
        seen.append(word)
        return word ^ 1 if len(seen) == len(PATTERNS) else word

    memory(fault)
    assert [one["pattern"] for one in judged("memory").evidence["wrong"]] == ["random"]


def test_an_address_line_that_is_stuck_is_seen_by_addresses_and_no_constant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = torch.empty(WORDS, dtype=torch.int64)
    monkeypatch.setattr(checks, "blocks_of", lambda device: [block, block])
    found = judged("memory")
    assert found.state == "unfit"
    assert {one["pattern"] for one in found.evidence["wrong"]} == {"address"}
    assert found.measured is not None and found.measured >= WORDS


def test_memory_that_works_is_read_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CPU_BYTES", 1 << 22)
    done = measured("memory")
    assert done["wrong_words"] == 0 and done["patterns"] == list(PATTERNS)
    assert done["verified_bytes"] == done["bytes"] * len(PATTERNS) == 6 << 22


def test_without_time_one_pattern_is_tried_and_the_others_are_named(memory: Memory) -> None:
    memory(lambda word: word)
    found = judged("memory", budget_s=0.0)
    assert found.state == "fit" and "1 of 6 patterns" in found.said
    assert "no time for 0xff, 0xaa, 0x55, address, random" in found.said


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """What is said of a device that multiplies so."""

    def judge(multiply: Callable[[Any, Any], Any], size: int = 64, most: int = 8) -> Finding:
        monkeypatch.setattr(checks, "multiply", multiply)
        monkeypatch.setattr(checks, "CPU_SIZE", size)
        monkeypatch.setattr(checks, "MOST_REPEATS", most)
        return judged("product")

    return judge


@pytest.mark.parametrize(("by", "wrong"), [(0.5, 1), (1e-6, 0), (float("nan"), 1)])
def test_a_product_that_is_wrong_once_is_seen(
    product: Callable[..., Finding], by: float, wrong: int
) -> None:
    turn = itertools.count(1)

    def multiply(a: Any, b: Any) -> Any:
        made = a @ b
        if next(turn) == 37:
            made[3, 5] += by
        return made

    found = product(multiply, most=50)
    assert found.state == "unfit"
    assert (found.evidence["different"], found.evidence["wrong"]) == (1, wrong)
    assert "50 products of 64 x 64" in found.said and found.place == "cpu:1"


def test_a_product_that_is_always_wrong_is_seen_though_all_are_alike(
    product: Callable[..., Finding],
) -> None:
    found = product(lambda a, b: a @ b * 1.0001)
    assert (found.state, found.evidence["different"], found.evidence["wrong"]) == ("unfit", 0, 1)
    assert found.measured is not None and found.measured > 1.0 == found.bound


def test_a_sum_in_another_order_is_within_the_bound(product: Callable[..., Finding]) -> None:
    def backwards(a: Any, b: Any) -> Any:
        return a.flip(1).contiguous() @ b.flip(0).contiguous()

    assert product(backwards, size=128).state == "fit"
    assert gamma(256) == pytest.approx(256 * 2.0**-24, rel=1e-4)


def test_a_wrong_row_that_is_not_computed_again_is_seen_by_its_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "ROWS", 8)
    a, b = factors(64, "cpu", 1)
    right = a @ b
    assert excess(a, b, right) < 1.0
    right[1, 0] += 0.1  # rows 0, 8, 16 ... are computed again
    assert excess(a, b, right) > 1.0


class Plate(TemporaryFile):
    """A disk in memory. ``fault``: changes what is read, from the number of the block."""

    def __init__(self, fault: Callable[[int, bytes], bytes]) -> None:
        self._held: dict[int, bytes] = {}
        self._fault = fault

    def write(self, offset: int, data: bytes) -> None:
        """Keep it."""
        self._held[offset] = data

    def read(self, offset: int, length: int) -> bytes:
        """Give it back, or what the fault makes of it."""
        return self._fault(offset // DISK_BLOCK, self._held[offset])

    def close(self) -> None:
        """Nothing."""


def _refuse(number: int) -> Callable[[int, bytes], bytes]:
    def fail(block: int, data: bytes) -> bytes:
        raise OSError(number, "the disk says no")

    return fail


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda n, data: data[:-1] + b"!" if n == 2 else data, "1 of 4 MiB read back otherwise"),
        (lambda n, data: data[:-1], "4 of 4 MiB read back otherwise than written, the first at"),
        (_refuse(errno.EIO), "the disk says no after 4 MiB"),
        (_refuse(errno.ENOSPC), "the disk says no after 4 MiB"),
    ],
)
def test_a_disk_that_gives_back_other_bytes_or_refuses_is_unfit(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[int, bytes], bytes], words: str
) -> None:
    monkeypatch.setattr(checks, "TemporaryFile", lambda where: Plate(fault))
    monkeypatch.setattr(checks, "MOST_BLOCKS", 4)
    found = judged("disk", "host", directory="/there")
    assert found.state == "unfit" and words in found.said and "/there" in found.said


def test_a_real_disk_keeps_what_is_written_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MOST_BLOCKS", 4)
    done = measured("disk", "host", directory=str(tmp_path))
    found = said("disk", "host", done)
    assert found.state == "fit" and "4 MiB" in found.said
    assert {one.metric for one in CHECKS["disk"].judge("host", [done])[1]} == {"write_ms", "read"}
    assert list(tmp_path.iterdir()) == []
    assert judged("disk", directory=str(tmp_path / "none")).state == "unfit"
    assert nearest(tmp_path / "a" / "b") == tmp_path


class Keys(dict[str, str]):
    """A store. ``forgets``: the value it gives back wrong."""

    forgets = ""

    def set(self, key: str, value: str) -> None:
        """Keep it."""
        self[key] = "" if value == self.forgets else value

    def get(self, key: str, default: Any = None) -> Any:
        """As torch's, in bytes."""
        return self[key].encode()


def test_round_trips_are_counted_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 1e3))
    monkeypatch.setattr(checks, "connect", lambda port, host: Keys())
    options = {"port": 1, "host": "h"}
    done = measured("store", "host", budget_s=0.3, options=options)
    found = said("store", "host", done)
    assert found.state == "fit" and found.evidence["n"] == 110
    assert found.evidence["median_ms"] == pytest.approx(1.0)
    (rate,) = CHECKS["store"].judge("host", [done])[1]
    assert not rate.high_is_good and len(rate.rounds) == 5
    monkeypatch.setattr(Keys, "forgets", "3/4")
    assert "1 values wrong" in judged("store", "host", options=options).said


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A device whose product takes so long at a time, by the wall and by the process."""

    def make(cost_s: Callable[[float], float], wall_s: float = 0.0, **nvml: float) -> None:
        now = [0.0, 0.0]

        def run() -> None:
            took = cost_s(now[0])
            now[:] = now[0] + took, now[1] + (wall_s or took)

        clocks = SimpleNamespace(thread_time=lambda: now[0], monotonic=lambda: now[1])
        monkeypatch.setattr(checks, "time", clocks)
        monkeypatch.setattr(checks, "products", lambda task: (run, 1e9))
        monkeypatch.setattr(checks, "nvml", lambda place: nvml)

    return make


def test_a_device_that_slows_down_keeps_less(device: Callable[..., None]) -> None:
    device(lambda now_s: 0.01 if now_s < 0.5 else 0.02)
    rate, last = CHECKS["clocks"].judge("cpu:0", [measured("clocks", budget_s=1.0)])[1]
    assert 49.0 < rate.rounds[0] < 101.0
    assert last.rounds == [pytest.approx(0.5)] and last.peers
    device(lambda now_s: 0.01)
    steady = measured("clocks", budget_s=1.0)["rates"]
    assert kept(steady) == pytest.approx(1.0) and len(steady) == pytest.approx(25, abs=1)


def test_clocks_that_hardware_slowed_are_told(device: Callable[..., None]) -> None:
    device(lambda now_s: 0.01, clock_sm=1980.0, temperature=88.0, throttle_reasons=0x44)
    found = judged("clocks", "cuda:0", budget_s=0.2)
    assert "1980 MHz, 88 degC, hardware thermal slowdown" in found.said
    assert "power" not in found.said


@pytest.mark.parametrize(("place", "rate"), [("cpu:0", 100.0), ("cuda:0", 1.0)])
def test_a_processor_that_others_use_is_not_slow(
    device: Callable[..., None], place: str, rate: float
) -> None:
    device(lambda now_s: 0.01, wall_s=1.0, clock_sm=1.0)
    done = measured("clocks", place, budget_s=0.1)
    assert len(done["rates"]) == 3, "the time is over, but a rate needs some slices"
    assert CHECKS["clocks"].judge(place, [done])[1][0].rounds == [pytest.approx(rate)]
