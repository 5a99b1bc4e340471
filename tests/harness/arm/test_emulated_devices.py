"""Emulated devices: all well until a fault changes what one of them reads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainchaos.harness.arm import emulated_devices
from trainchaos.harness.arm.emulated_devices import METRICS, PAST_S, Changed, EmulatedDevices
from trainchaos.recovery.health.readings import Place, Reading
from trainchaos.recovery.health.service import HealthService, device_detectors


def devices(
    reads: Sequence[str] = tuple(METRICS), there: Sequence[int] = (0, 1, 2, 3)
) -> EmulatedDevices:
    return EmulatedDevices(
        reads,
        4,
        device_of=lambda rank: f"cpu:{rank}" if rank in there else None,
        node_of=lambda rank: rank // 2,
        seed="1/faulted",
    )


@pytest.fixture
def short_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read tells of a minute, where the test is not of that."""
    monkeypatch.setattr(emulated_devices, "PAST_S", 60.0)


def values(readings: Sequence[Reading], metric: str, rank: int) -> list[float]:
    return [one.value for one in readings if one.metric == metric and one.where.rank == rank]


@pytest.mark.slow
def test_the_first_read_tells_of_the_hour_before_and_the_next_of_now() -> None:
    made = devices()
    readings = made.read(5000.0)
    times = [one.time_s for one in readings]
    assert times == sorted(times) and times[-1] == 5000.0 and times[0] < 5000.0 - PAST_S + 5
    assert {one.metric for one in readings} == {m for m, _ in METRICS.values()} | {
        "temperature_slowdown"
    }
    later = made.read(5001.0)
    assert {one.time_s for one in later} == {5001.0}
    assert {one.where for one in later} == {Place(rank=r, device=f"cpu:{r}") for r in range(4)}


@pytest.mark.usefixtures("short_past")
def test_one_seed_reads_the_same() -> None:
    assert devices().read(5000.0) == devices().read(5000.0)


@pytest.mark.usefixtures("short_past")
def test_nothing_is_read_before_every_rank_is_there() -> None:
    there = [0, 1, 2]
    made = devices(there=there)
    assert made.read(5000.0) == ()
    there.append(3)
    assert made.read(5001.0)
    there.remove(3)  # a rank that is being replaced keeps its device
    assert len(values(made.read(5002.0), "utilisation", 3)) == 1


@pytest.mark.usefixtures("short_past")
@pytest.mark.parametrize(("rank", "node", "hit"), [(2, None, {2}), (None, 0, {0, 1})])
def test_only_what_a_fault_hit_reads_otherwise(
    rank: int | None, node: int | None, hit: set[int]
) -> None:
    made = devices()
    made.read(5000.0)
    assert made.said() == []
    changed = Changed("temperature", 89, rank, node, None)
    made.change(changed)
    assert made.said() == [], "no monitor has read it yet"
    readings = made.read(5001.0)
    assert made.said() == [changed] and made.said() == []
    hot = {r for r in range(4) if values(readings, "temperature", r)[0] > 80.0}
    assert hot == hit


@pytest.mark.slow
def test_devices_that_are_well_raise_no_alarm_for_an_hour() -> None:
    made, detectors = devices(), device_detectors()
    now_s = 5000.0
    service = HealthService([made], detectors, clock_s=lambda: now_s)
    for _ in range(3600):
        service.look()
        now_s += 1.0
    assert service.take() == []
