"""Who is warned of what, and which places are avoided."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import pytest

from trainchaos.recovery.health.readings.reports import HealthReport
from trainchaos.recovery.health.readings.signs import HealthAlarm, Sign
from trainchaos.recovery.health.warnings import PlaceWarnings, Warned


class Job:
    """Two ranks on each of two nodes, each on a device of its own; what it is told is kept."""

    def __init__(self) -> None:
        self.at = {f"w{i}": (i // 2, f"cuda:{i % 2}@{i // 2}") for i in range(4)}
        self.ended: set[str] = set()
        self.avoided: tuple[set[int], set[str]] = (set(), set())
        self.warned: dict[str, str] = {}
        self.late: list[str] = []
        self.there = True
        self.warnings = PlaceWarnings(self, self.process_of)

    def living(self) -> Iterable[str]:
        """By name."""
        return [name for name in self.at if name not in self.ended]

    def gone(self, process: str) -> bool:
        """By name."""
        return process in self.ended

    def node_of(self, process: str) -> int | None:
        """By name."""
        return self.at[process][0]

    def device_of(self, process: str) -> str | None:
        """By name."""
        return self.at[process][1]

    def process_of(self, rank: int) -> str | None:
        """The process of that number."""
        name = f"w{rank}"
        return name if name in self.living() else None

    def avoid(self, *, nodes: Collection[int], devices: Collection[str]) -> None:
        """Kept."""
        self.avoided = set(nodes), set(devices)

    def on_warnings(self, warnings: Mapping[str, str]) -> None:
        """Kept."""
        self.warned = dict(warnings)

    def no_better_place(self, processes: Iterable[str]) -> None:
        """Kept."""
        self.late = list(processes)

    def hears(self, *signs: Sign) -> None:
        """Signs, and then what the supervisor is told."""
        for sign in signs:
            self.warnings.heard(sign)
        self.warnings.tell(self._supervise)

    def _supervise(self, act: Callable[[Warned], None]) -> None:
        if self.there:
            act(self)


def xid(code: int = 48, **place: int | str) -> HealthReport:
    return HealthReport.model_validate({"what": "xid", "code": code, "source": "nvml", **place})


@pytest.mark.parametrize(
    ("sign", "warned", "avoided"),
    [
        (xid(rank=1), {"w1"}, (set(), set())),
        (xid(rank=1, node=0), {"w1"}, (set(), set())),
        (xid(rank=1, node=0, device="cuda:1@0"), {"w1"}, (set(), {"cuda:1@0"})),
        (xid(node=1, device="cuda:0@1"), {"w2"}, (set(), {"cuda:0@1"})),
        (xid(node=1), {"w2", "w3"}, ({1}, set())),
        (xid(), set(), (set(), set())),
        (xid(31, node=1), set(), (set(), set())),
    ],
)
def test_those_at_the_smallest_named_place_are_warned(
    sign: Sign, warned: set[str], avoided: tuple[set[int], set[str]]
) -> None:
    job = Job()
    job.hears(sign)
    assert (set(job.warned), job.avoided, job.late) == (warned, avoided, [])


@pytest.mark.parametrize(
    ("what", "warns"),
    [
        ("ecc-uncorrected", True),
        ("device-lost", True),
        ("straggler", False),
        ("idle-device", False),
    ],
)
def test_an_alarm_warns_if_it_announces_a_failure(what: str, warns: bool) -> None:
    job = Job()
    job.hears(HealthAlarm(what=what, device="cuda:0@0", node=0, value=1.0, threshold=0.0))
    assert set(job.warned) == ({"w0"} if warns else set())


def test_a_warning_is_repeated_until_its_process_is_gone() -> None:
    job = Job()
    job.there = False
    job.hears(xid(node=1))
    assert not job.warned
    job.there = True
    job.hears()
    assert set(job.warned) == {"w2", "w3"}
    job.ended.add("w2")
    job.hears()
    assert set(job.warned) == {"w3"}


def test_who_starts_there_later_has_no_better_place() -> None:
    job = Job()
    job.hears(xid(node=1))
    job.at["w4"] = (1, "cuda:0@1")
    job.hears()
    assert job.late == ["w4"] and "w4" not in job.warned


def test_a_device_that_was_found_fit_is_used_again_and_a_node_is_not() -> None:
    job = Job()
    job.hears(xid(node=0, device="cuda:0@0"), xid(node=1))
    assert job.avoided == ({1}, {"cuda:0@0"})
    job.warnings.lift("cuda:0@0")
    job.warnings.lift("cuda:0@1")
    assert job.avoided == ({1}, set())
    job.hears()
    assert set(job.warned) == {"w0", "w2", "w3"}, "who was warned leaves it all the same"
    job.hears(xid(node=0, device="cuda:0@0"))
    assert job.avoided == ({1}, {"cuda:0@0"}), "until it is warned of again"
