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

from trainchaos.harness.preflight.checks import product as products
from trainchaos.harness.preflight.checks.check import Measured, PlaceCheck, Task, nearest
from trainchaos.harness.preflight.checks.clocks import ClocksCheck, kept
from trainchaos.harness.preflight.checks.disk import BLOCK_BYTES, DiskCheck, TemporaryFile
from trainchaos.harness.preflight.checks.findings import Finding
from trainchaos.harness.preflight.checks.memory import PATTERNS, WORD, MemoryCheck, TorchMemory
from trainchaos.harness.preflight.checks.product import ProductCheck, excess, factors, gamma
from trainchaos.harness.preflight.checks.store import StoreCheck

WORDS = 1 << 10
BAD = (2, 77)
"""Block and word that are faulty."""


def said(check: PlaceCheck, place: str, *rounds: Measured) -> Finding:
    """Its judgement alone."""
    return replace(check.judge(place, rounds)[0], place=place)


def judged(check: PlaceCheck, place: str = "cpu:1", **task: Any) -> Finding:
    """What a check says of what it measures."""
    return said(check, place, check.measure(Task(place=place, budget_s=30.0, seed=3, **task)))


class FaultyMemory(TorchMemory):
    """Memory of four blocks, of which one word is changed by what is done to it."""

    def __init__(self, fault: Callable[[int], int]) -> None:
        super().__init__("cpu", WORDS * WORD)
        self.words, self._fault = WORDS, fault
        self._held = [torch.empty(WORDS, dtype=torch.int64) for _ in range(4)]

    def write(self, block: int, words: Any) -> None:
        """Write it, with the fault."""
        super().write(block, words)
        if block == BAD[0]:
            word = self._held[block][BAD[1]]
            word.fill_(self._fault(int(word)))


class Aliased(TorchMemory):
    """A stuck address line: two blocks are the same cells."""

    def __init__(self) -> None:
        super().__init__("cpu", WORDS * WORD)
        self.words = WORDS
        one = torch.empty(WORDS, dtype=torch.int64)
        self._held = [one, one]


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (lambda word: word | 1 << 5, "0x00"),
        (lambda word: word & ~(1 << 62), "0xff"),
        (lambda word: word ^ 2 if word == 0x5555_5555_5555_5555 else word, "0x55"),
        (lambda word: word ^ 2 if word == -0x5555_5555_5555_5556 else word, "0xaa"),
        (
            lambda word: word ^ 8 if word == (2 * WORDS + 77) * WORD else word,
            "address",
        ),
    ],
)
def test_a_bit_that_does_not_hold_is_found_with_its_address(
    fault: Callable[[int], int], first: str
) -> None:
    found = judged(MemoryCheck(make=lambda device, size: FaultyMemory(fault)))
    assert (found.state, found.place) == ("unfit", "cpu:1")
    wrong = found.evidence["wrong"][0]
    assert wrong["pattern"] == first
    assert wrong["address"] == (BAD[0] * WORDS + BAD[1]) * WORD
    assert len(wrong["bits"]) == 1
    assert f"at byte {wrong['address']:#x}" in found.said and "memtest86+" in found.todo


def test_what_only_random_words_show_is_found() -> None:
    seen: list[int] = []

    def fault(word: int) -> int:
        seen.append(word)
        return word ^ 1 if len(seen) == len(PATTERNS) else word

    found = judged(MemoryCheck(make=lambda device, size: FaultyMemory(fault)))
    assert [one["pattern"] for one in found.evidence["wrong"]] == ["random"]


def test_an_address_line_that_is_stuck_is_seen_by_addresses_and_no_constant() -> None:
    found = judged(MemoryCheck(make=lambda device, size: Aliased()))
    assert found.state == "unfit"
    assert {one["pattern"] for one in found.evidence["wrong"]} == {"address"}
    assert found.measured is not None and found.measured >= WORDS


def test_memory_that_works_is_read_back_whole() -> None:
    measured = MemoryCheck(make=lambda device, size: TorchMemory(device, 1 << 22)).measure(
        Task(place="cpu:0", budget_s=30.0)
    )
    assert measured["wrong_words"] == 0 and measured["patterns"] == list(PATTERNS)
    assert measured["verified_bytes"] == measured["bytes"] * len(PATTERNS) == 6 << 22


def test_without_time_one_pattern_is_tried_and_the_others_are_named() -> None:
    check = MemoryCheck(make=lambda device, size: FaultyMemory(lambda word: word))
    measured = check.measure(Task(place="cpu:0", budget_s=0.0))
    found = said(check, "cpu:0", measured)
    assert found.state == "fit" and "1 of 6 patterns" in found.said
    assert "no time for 0xff, 0xaa, 0x55, address, random" in found.said


def wrong_once(n: int, by: float) -> Callable[[Any, Any], Any]:
    """A product that is wrong in one element, the n-th time."""
    turn = itertools.count(1)

    def multiply(a: Any, b: Any) -> Any:
        made = a @ b
        if next(turn) == n:
            made[3, 5] += by
        return made

    return multiply


@pytest.mark.parametrize(("by", "wrong"), [(0.5, 1), (1e-6, 0), (float("nan"), 1)])
def test_a_product_that_is_wrong_once_is_seen(by: float, wrong: int) -> None:
    found = judged(ProductCheck(multiply=wrong_once(37, by), size=64, most=50))
    assert found.state == "unfit"
    assert (found.evidence["different"], found.evidence["wrong"]) == (1, wrong)
    assert "50 products of 64 x 64" in found.said and found.place == "cpu:1"


def test_a_product_that_is_always_wrong_is_seen_though_all_are_alike() -> None:
    found = judged(ProductCheck(multiply=lambda a, b: a @ b * 1.0001, size=64, most=8))
    assert (found.state, found.evidence["different"], found.evidence["wrong"]) == ("unfit", 0, 1)
    assert found.measured is not None and found.measured > 1.0 == found.bound


def test_a_sum_in_another_order_is_within_the_bound() -> None:
    def backwards(a: Any, b: Any) -> Any:
        return a.flip(1).contiguous() @ b.flip(0).contiguous()

    assert judged(ProductCheck(multiply=backwards, size=128, most=8)).state == "fit"
    assert gamma(256) == pytest.approx(256 * 2.0**-24, rel=1e-4)


def test_a_wrong_row_that_is_not_computed_again_is_seen_by_its_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "ROWS", 8)
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
        return self._fault(offset // BLOCK_BYTES, self._held[offset])

    def close(self) -> None:
        """Nothing."""


def test_a_block_that_reads_back_otherwise_is_named() -> None:
    def flip(block: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if block == 2 else data

    found = judged(
        DiskCheck(open=lambda where: Plate(flip), blocks=5), place="host", directory="/there"
    )
    assert (found.state, found.measured) == ("unfit", 1.0)
    assert "the first at MiB 2" in found.said and "/there" in found.said


def test_a_short_read_is_no_block() -> None:
    found = judged(
        DiskCheck(open=lambda where: Plate(lambda block, data: data[:-1]), blocks=4), place="host"
    )
    assert found.evidence["wrong"] == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_is_unfit(number: int) -> None:
    def fail(block: int, data: bytes) -> bytes:
        raise OSError(number, "the disk says no")

    found = judged(DiskCheck(open=lambda where: Plate(fail), blocks=4), place="host")
    assert found.state == "unfit" and "the disk says no after 4 MiB" in found.said


def test_a_real_disk_keeps_what_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    check = DiskCheck(blocks=4)
    measured = check.measure(Task(place="host", budget_s=10.0, directory=str(tmp_path)))
    found = said(check, "host", measured)
    assert found.state == "fit" and "4 MiB" in found.said
    assert {one.metric for one in check.judge("host", [measured])[1]} == {"write_ms", "read"}
    assert list(tmp_path.iterdir()) == []
    assert judged(check, directory=str(tmp_path / "none")).state == "unfit"
    assert nearest(tmp_path / "a" / "b") == tmp_path


class Keys(dict[str, str]):
    """A store. ``forgets``: the value it gives back wrong."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self._forgets = forgets

    def set(self, key: str, value: str) -> None:
        """Keep it."""
        self[key] = "" if value == self._forgets else value

    def get(self, key: str, default: Any = None) -> Any:
        """As torch's, in bytes."""
        return self[key].encode()


def store_check(forgets: str = "") -> StoreCheck:
    """With a clock that goes on by a millisecond a look."""
    ticks = itertools.count()
    return StoreCheck(connect=lambda port, host: Keys(forgets), clock=lambda: next(ticks) / 1e3)


def test_round_trips_are_counted_and_checked() -> None:
    options = {"port": 1, "host": "h"}
    measured = store_check().measure(Task(place="host", budget_s=0.3, seed=1, options=options))
    found = said(store_check(), "host", measured)
    assert found.state == "fit" and found.evidence["n"] == 110
    assert found.evidence["median_ms"] == pytest.approx(1.0)
    (rate,) = store_check().judge("host", [measured])[1]
    assert not rate.high_is_good and len(rate.rounds) == 5
    bad = store_check("3/4")
    assert "1 values wrong" in judged(bad, place="host", options=options).said


def clocks_check(cost_s: Callable[[float], float], said: dict[str, float]) -> ClocksCheck:
    """A device whose product takes so long at a time."""
    now = [0.0]

    def clock() -> float:
        return now[0]

    def run() -> None:
        now[0] += cost_s(now[0])

    return ClocksCheck(
        clock=clock, wall=clock, work=lambda task: (run, 1e9), says=lambda place: said
    )


def test_a_device_that_slows_down_keeps_less() -> None:
    check = clocks_check(lambda now_s: 0.01 if now_s < 0.5 else 0.02, {})
    rate, last = check.judge("cpu:0", [check.measure(Task(place="cpu:0", budget_s=1.0))])[1]
    assert 49.0 < rate.rounds[0] < 101.0
    assert last.rounds == [pytest.approx(0.5)] and last.peers
    steady = clocks_check(lambda now_s: 0.01, {}).measure(Task(place="cpu:0", budget_s=1.0))
    assert kept(steady["rates"]) == pytest.approx(1.0)
    assert len(steady["rates"]) == pytest.approx(25, abs=1)


def test_clocks_that_hardware_slowed_are_told() -> None:
    nvml = {"clock_sm": 1980.0, "temperature": 88.0, "throttle_reasons": 0x44}
    check = clocks_check(lambda now_s: 0.01, nvml)
    found = said(check, "cuda:0", check.measure(Task(place="cuda:0", budget_s=0.2)))
    assert "1980 MHz, 88 degC, hardware thermal slowdown" in found.said
    assert "power" not in found.said


@pytest.mark.parametrize(("place", "rate"), [("cpu:0", 100.0), ("cuda:0", 1.0)])
def test_a_processor_that_others_use_is_not_slow(
    place: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, wall = [0.0], [0.0]

    def run() -> None:
        mine[0] += 0.01
        wall[0] += 1.0

    clocks = SimpleNamespace(thread_time=lambda: mine[0], monotonic=lambda: wall[0])
    monkeypatch.setattr("trainchaos.harness.preflight.checks.clocks.time", clocks)
    check = ClocksCheck(
        wall=lambda: wall[0], work=lambda task: (run, 1e9), says=lambda place: {"clock_sm": 1.0}
    )
    measured = check.measure(Task(place=place, budget_s=0.1))
    assert len(measured["rates"]) == 3, "the time is over, but a rate needs some slices"
    assert check.judge(place, [measured])[1][0].rounds == [pytest.approx(rate)]
