"""What is held against places, and what follows: checks, warnings, places avoided, taints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.recovery.health.checks import Answer, Spot
from trainchaos.recovery.health.reputation import (
    Care,
    PlaceCare,
    Reputation,
    Warned,
    why_suspect,
)
from trainchaos.recovery.health.signs import HealthAlarm, HealthReport, Sign
from trainchaos.recovery.health.taints import TaintList

XID_LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."


class Checks:
    """Answers that a test gives."""

    def __init__(self) -> None:
        self.asked: list[Spot] = []
        self.answers: list[Answer] = []

    def begin(self, spot: Spot) -> None:
        self.asked.append(spot)

    def take(self) -> Sequence[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.answers = []


class Job:
    """Two ranks on each of two nodes, each on a device of its own; what it is told is kept. The
    fifth process is on the processors of node 1.
    """

    def __init__(self, taints: Path) -> None:
        self.at: dict[str, Spot] = {f"w{i}": (i // 2, f"cuda:{i % 2}") for i in range(4)}
        self.at["cpu"] = (1, "cpu")
        self.ended: set[str] = set()
        self.warned: dict[str, str] = {}
        self.late: list[str] = []
        self.there = True
        self.checks, self.list = Checks(), TaintList(taints)
        self.events: list[tuple[Kind, dict[str, Any]]] = []
        self.reputation = Reputation(lambda: 0.0)
        self.care = PlaceCare(
            Care(checker=self.checks, taints=self.list),
            self,
            self.reputation,
            lambda kind, **data: self.events.append((kind, data)),
            lambda: 0.0,
            lambda node: f"host-{node}",
        )

    def living(self) -> Iterable[str]:
        return [name for name in self.at if name not in self.ended]

    def gone(self, process: str) -> bool:
        return process in self.ended

    def spot_of(self, name: str) -> Spot | None:
        return self.at.get(name)

    def spots_in_use(self) -> Collection[Spot]:
        return set(self.at.values())

    def on_warnings(self, warnings: Mapping[str, str]) -> None:
        self.warned = dict(warnings)

    def no_better_place(self, processes: Iterable[str]) -> None:
        self.late = list(processes)

    def hears(self, *signs: Sign) -> None:
        """Signs, and then what the supervisor is told."""
        for sign in signs:
            holder = None if sign.rank is None else f"w{sign.rank}"
            self.care.heard(sign, holder if holder in self.at else None)
        self.look()

    def look(self) -> None:
        def supervise(act: Callable[[Warned], None]) -> None:
            if self.there:
                act(self)

        self.care.look(supervise)

    def answers(self, name: str, fit: bool | None, said: str = "", **more: bool) -> None:
        self.checks.answers.append(Answer(self.at[name], fit, said, **more))

    def avoided(self) -> set[str]:
        return {name for name, spot in self.at.items() if self.reputation.avoids(spot)}

    def tainted(self) -> list[tuple[str, str]]:
        """Places and origins, once all is written."""
        self.care.close()
        return [(taint.place, taint.by) for taint in self.list.read()]

    def recalls(self, *said: Mapping[str, Any] | tuple[Kind, Mapping[str, Any]]) -> None:
        """Reports, and events of other kinds, of a supervisor that was lost."""
        known = [one if isinstance(one, tuple) else (Kind.HEALTH_REPORTED, one) for one in said]
        common: Any = {"actor": ORCHESTRATOR, "seq": 1, "time_ns": 1, "generation": 1, "step": None}
        self.care.recall([Event(kind=kind, data=dict(data), **common) for kind, data in known])
        self.look()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "taints.yaml")


def xid(code: int = 79, **place: int | str) -> HealthReport:
    return HealthReport.model_validate({"what": "xid", "code": code, "source": "nvml", **place})


def alarm(what: str, **place: int | str) -> HealthAlarm:
    return HealthAlarm.model_validate({"what": what, "value": 1.0, "threshold": 0.0, **place})


@pytest.mark.parametrize(
    ("sign", "warned", "avoided"),
    [
        (xid(rank=1), {"w1"}, set()),
        (xid(rank=1, node=0), {"w1"}, set()),
        (xid(rank=1, node=0, device="cuda:1"), {"w1"}, {"w1"}),
        (xid(rank=1, device="cuda:1"), {"w1"}, {"w1", "w3"}),
        (xid(node=1, device="cuda:0"), {"w2"}, {"w2"}),
        (xid(node=1), {"w2", "w3", "cpu"}, {"w2", "w3", "cpu"}),
        (xid(), set(), set()),
        (xid(31, node=1), set(), set()),
    ],
)
def test_those_at_the_smallest_named_place_are_warned(
    job: Job, sign: Sign, warned: set[str], avoided: set[str]
) -> None:
    job.care._checker = None
    job.hears(sign)
    assert (set(job.warned), job.avoided()) == (warned, avoided)


@pytest.mark.parametrize(
    ("what", "warns"),
    [
        ("ecc-uncorrected", True),
        ("device-lost", True),
        ("straggler", False),
        ("thermal-limit", False),
    ],
)
def test_an_alarm_warns_and_taints_if_it_announces_a_failure(
    job: Job, what: str, warns: bool
) -> None:
    job.hears(alarm(what, device="cuda:0", node=0))
    assert set(job.warned) == ({"w0"} if warns else set())
    assert job.tainted() == ([("host-0/cuda:0", "alarm")] if warns else [])


def test_a_warning_is_repeated_until_its_process_is_gone(job: Job) -> None:
    job.there = False
    job.hears(xid(node=0))
    assert not job.warned
    job.there = True
    job.look()
    assert set(job.warned) == {"w0", "w1"}
    job.ended.add("w0")
    job.look()
    assert set(job.warned) == {"w1"}


def test_who_starts_later_at_a_place_that_will_fail_has_no_better_one(job: Job) -> None:
    job.hears(xid(node=1))
    job.at["w4"] = (1, "cuda:0")
    job.look()
    assert job.late == ["w4"] and "w4" not in job.warned


def test_a_device_that_is_found_fit_is_used_again_and_a_node_is_not(job: Job) -> None:
    job.hears(xid(node=0, device="cuda:0"), xid(node=1))
    job.answers("w0", True)
    job.answers("w2", True)
    job.look()
    assert job.avoided() == {"w2", "w3", "cpu"}
    assert set(job.warned) >= {"w0", "w2"}, "who was warned leaves it all the same"
    job.hears(xid(node=0, device="cuda:0"))
    assert "w0" in job.avoided(), "until it is warned of again"


@pytest.mark.parametrize(
    ("cause", "detail", "suspect"),
    [
        ("diverged", "parameters of step 3 differ", True),
        ("exit", f"signal 6\n{XID_LINE}", True),
        ("exit", "signal 9", False),
        ("error", "ValueError: a bug of the script's", False),
        ("hang", "silent for 3 s", False),
    ],
)
def test_only_what_hardware_may_have_caused_makes_a_place_suspect(
    job: Job, cause: str, detail: str, suspect: bool
) -> None:
    assert bool(why_suspect(cause, detail)) is suspect
    job.care.failed("w1", cause, detail)
    job.care.failed("nobody", cause, detail)
    assert job.checks.asked == ([job.at["w1"]] if suspect else [])
    assert job.avoided() == ({"w1"} if suspect else set())


def test_a_suspect_place_is_avoided_until_its_check_is_over_and_for_good_if_it_is_unfit(
    job: Job,
) -> None:
    for name in ("w0", "w1", "w2"):
        job.care.failed(name, "diverged", "")
    assert job.avoided() == {"w0", "w1", "w2"}, "nobody waits for a check, or takes it for passed"
    job.answers("w0", True)
    job.answers("w1", None, "gone")
    job.answers("w2", False, "a word\ndiffers")
    job.look()
    assert job.avoided() == {"w2"}
    assert [(data["fit"], data["why"]) for kind, data in job.events] == [
        (fit, "its state differed from the other replicas'") for fit in (True, None, False)
    ]
    job.care.failed("w2", "diverged", "")
    assert len(job.checks.asked) == 3, "it is not asked again"
    assert job.tainted() == [("host-1/cuda:0", "preflight")]
    assert job.events[-1] == (Kind.PLACE_TAINTED, {"place": "host-1/cuda:0", "by": "preflight"})
    assert job.list.read()[0].reason == "preflight: a word differs"


def test_a_place_that_a_fault_made_unfit_is_avoided_and_not_tainted(job: Job) -> None:
    job.care.failed("w0", "diverged", "")
    job.answers("w0", False, "injected", emulated=True)
    job.look()
    assert job.avoided() == {"w0"} and job.tainted() == []


@pytest.mark.parametrize(
    ("place", "source", "asked", "tainted"),
    [
        ({"node": 1, "device": "cuda:0"}, "nvml", {"w2"}, "host-1/cuda:0"),
        ({"node": 1}, "nvml", {"w2", "w3", "cpu"}, "host-1"),
        ({"rank": 2}, "nvml", {"w2"}, "host-1/cuda:0"),
        ({"rank": 9}, "nvml", set(), None),
        ({"node": 1}, "injected", {"w2", "w3", "cpu"}, None),
    ],
)
def test_what_announces_a_failure_is_checked_and_tainted(
    job: Job, place: dict[str, Any], source: str, asked: set[str], tainted: str | None
) -> None:
    sign = xid(48, **place).model_copy(update={"source": source})
    job.hears(sign, sign, sign.model_copy(update={"code": 94}))
    assert set(job.checks.asked) == {job.at[name] for name in asked}
    assert job.tainted() == ([] if tainted is None else [(tainted, "alarm")])
    if tainted is not None:
        (taint,) = job.list.read()
        assert taint.evidence == {"what": "xid", "code": 48}
        assert taint.reason.startswith("XID 48: ")


@pytest.mark.parametrize(
    ("data", "who"),
    [
        (xid(node=1, device="cuda:0"), {"w2"}),
        (xid(node=0), {"w0", "w1"}),
        (xid(node=1, rank=2), set()),
        (xid(), set()),
    ],
)
def test_places_that_were_known_to_fail_are_recalled_and_ranks_are_not(
    job: Job, data: Sign, who: set[str]
) -> None:
    """Another process may hold the rank by now; every node has a first device."""
    job.recalls(data.model_dump())
    assert set(job.warned) == who


def checked(*, fit: bool | None, device: str = "cuda:0") -> Any:
    return Kind.PLACE_CHECKED, {"node": 1, "device": device, "fit": fit}


BAD = xid(node=1, device="cuda:0").model_dump()


@pytest.mark.parametrize(
    ("events", "warned"),
    [
        ([BAD, checked(fit=True)], set()),
        ([checked(fit=True), BAD], {"w2"}),
        ([BAD, checked(fit=None)], {"w2"}),
        ([BAD, checked(fit=True, device="cuda:1")], {"w2"}),
        ([xid(node=1).model_dump(), checked(fit=True)], {"w2", "w3", "cpu"}),
    ],
)
def test_a_device_that_was_found_fit_since_warns_nobody_again(
    job: Job, events: list[Any], warned: set[str]
) -> None:
    job.recalls(*events)
    assert set(job.warned) == warned


def test_what_a_lost_supervisor_had_found_unfit_stays_so(job: Job) -> None:
    job.recalls(checked(fit=False), checked(fit=True, device="cuda:1"))
    assert job.avoided() == {"w2"}
    job.care.failed("w2", "diverged", "")
    assert not job.checks.asked


def test_nobody_waits_for_a_list_that_another_holds_and_what_cannot_be_written_is_said(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fd = os.open(tmp_path / "taints.yaml.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    job.hears(alarm("device-lost", node=0, device="cuda:1"))
    assert not job.events
    os.close(fd)
    assert job.tainted() == [("host-0/cuda:1", "alarm")]
    (tmp_path / "taints.yaml").write_text("version: 1\ntaints: [3]\n")
    job.hears(alarm("device-lost", node=1, device="cuda:1"))
    job.care.close()
    assert "host-1/cuda:1 could not be tainted" in capsys.readouterr().err


def test_a_node_on_which_processes_keep_failing_is_spurned() -> None:
    seen = Reputation(lambda: 0.0)
    for failed_s in (0.0, 10.0, 20.0):
        assert not seen.spurns(1, failed_s)
        seen.failed((1, None), failed_s)
    assert seen.spurns(1, 20.0) and not seen.spurns(0, 20.0) and not seen.spurns(1, 81.0)
    seen.announce((1, None))
    assert seen.spurns(1, 81.0) and seen.avoids((1, "cuda:0")) and not seen.avoids((0, "cuda:0"))
