"""A preflight as a whole, over a machine that answers as it is told; baselines; the command."""

from __future__ import annotations

import json
import math
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.commands.machines import doctor as command
from trainchaos.chaos.errors import NewerVersion
from trainchaos.chaos.files import write_json
from trainchaos.harness.preflight import baseline as baselines
from trainchaos.harness.preflight import compare
from trainchaos.harness.preflight.baseline import Baseline, BaselineError, of_repeats, read
from trainchaos.harness.preflight.check import (
    HOST,
    Answer,
    Asking,
    Finding,
    Findings,
    Rate,
    Task,
    as_taints,
)
from trainchaos.harness.preflight.places import ALL_CHECKS
from trainchaos.harness.preflight.preflight import FULL, fit
from trainchaos.recovery.health.taints import MAX_TEXT, TaintList

NAMES = [f"cpu:{i}" for i in range(4)]
Spoil = Callable[[str, str, Task, dict[str, Any]], "dict[str, Any] | Answer"]
HERE = {"processor": "x", "cores": 2, "devices": [], "driver": "", "torch": "2.13.0"}


def healthy(place: str, do: str, task: Task, found: dict[str, Any]) -> dict[str, Any]:
    """Nothing is wrong."""
    return found


class FakeMachine:
    """Places that measure noise around a level. ``spoil``: changes an answer, or gives another."""

    def __init__(self, seed: int = 0, scale: float = 0.05, spoil: Spoil = healthy) -> None:
        self._draw, self._scale, self._spoil = random.Random(seed), scale, spoil
        self.now_s, self.limits_s = 0.0, list[float]()

    def ask(self, do: str, tasks: Mapping[str, Task], *, limit_s: float) -> dict[str, Answer]:
        """Answers at once; the clock goes on by the seconds that were to be measured."""
        self.limits_s.append(limit_s)
        self.now_s += max(task.budget_s for task in tasks.values())
        shared = self._noisy(900.0)
        answers = {}
        for place, task in tasks.items():
            found = self._spoil(place, do, task, self._found(do, shared))
            answers[place] = found if isinstance(found, Answer) else Answer(found=found)
        return answers

    def _found(self, do: str, shared: float) -> dict[str, Any]:
        made: dict[str, Callable[[], dict[str, Any]]] = {
            "memory": lambda: {"bytes": 1 << 20, "patterns": ["0x00"], "wrong_words": 0},
            "product": lambda: {
                "rows": 8,
                "repeats": 9,
                "wrong": 0,
                "different": 0,
                "largest_error_over_bound": 0.1,
            },
            "clocks": lambda: {"rates": [self._noisy(50.0) for _ in range(15)], "nvml": {}},
            "disk": lambda: {
                "directory": "/d",
                "blocks": 9,
                "wrong": [],
                "error": "",
                "seed": 0,
                "writes_s": [self._noisy(0.005) for _ in range(9)],
                "reads_s": [self._noisy(0.001) for _ in range(9)],
            },
            "store": lambda: {"trips_s": [self._noisy(1e-4) for _ in range(60)], "wrong": 0},
            "serve-store": lambda: {"port": 7},
            "bandwidth": lambda: {"rate": shared, "repeats": 4, "wrong": 0},
        }
        return made["bandwidth" if do == "all-reduce" else do]()

    def _noisy(self, level: float) -> float:
        chi = sum(self._draw.gauss(0.0, 1.0) ** 2 for _ in range(3))
        return level * math.exp(self._scale * self._draw.gauss(0.0, 1.0) / math.sqrt(chi / 3.0))


def measured(machine: FakeMachine, *, until_s: float = 60.0, names: list[str] = NAMES) -> Asking:
    """All checks of a machine, on its own clock."""
    one = Asking(machine, names, Path("/"), until_s=until_s, clock=lambda: machine.now_s)
    one.run(ALL_CHECKS)
    return one


def unfit(one: Asking) -> list[tuple[str, str]]:
    """What is unfit, beside peers too."""
    found = compare.with_peers(one.findings, one.rates)
    return [(row.check, row.place) for row in found.values() if row.state == "unfit"]


@pytest.mark.long
def test_a_hundred_healthy_machines_have_no_finding_with_or_without_a_baseline() -> None:
    for seed in range(100):
        machine = FakeMachine(seed, scale=0.02 + 0.08 * (seed % 3) / 2.0)
        passes = [measured(machine, until_s=machine.now_s + 60.0) for _ in range(6)]
        baseline = of_repeats([one.rates for one in passes[:5]], HERE)
        assert len(baseline.rates) == 4 * 2 + 2 + 1 + 2 + 1
        last = passes[5]
        assert len(last.findings) == 4 * 3 + 1 + 1 + 2 + 1
        assert unfit(last) == [], seed
        found = compare.with_baseline(last.findings, last.rates, baseline)
        assert [row for row in found.values() if row.state != "fit"] == [], seed


def exchanged(asked: str, do: str) -> bool:
    """Whether it is this; ``exchange``: either check of links."""
    return asked == do or (do == "exchange" and asked in ("bandwidth", "all-reduce"))


def spoiler(place: str, do: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Changes what one place measures of one kind."""

    def spoil(at: str, asked: str, task: Task, found: dict[str, Any]) -> dict[str, Any] | Answer:
        return change(found) if at == place and exchanged(asked, do) else found

    return spoil


@pytest.mark.parametrize(
    ("place", "do", "change", "expected"),
    [
        (
            "cpu:2",
            "memory",
            lambda found: (
                found
                | {
                    "wrong_words": 1,
                    "wrong": [{"pattern": "0x00", "address": 64, "wrote": "0x0", "read": "0x1"}],
                }
            ),
            ("memory", "cpu:2"),
        ),
        ("cpu:0", "product", lambda found: found | {"different": 1}, ("product", "cpu:0")),
        (
            "cpu:3",
            "clocks",
            lambda found: found | {"rates": [r / 3 for r in found["rates"]]},
            ("clocks", "cpu:3"),
        ),
        ("host", "disk", lambda found: found | {"wrong": [4]}, ("disk", "host")),
        ("host", "store", lambda found: found | {"wrong": 1}, ("store", "host")),
        ("cpu:1", "exchange", lambda found: found | {"rate": 90.0}, ("bandwidth", "cpu:1")),
        (
            "cpu:1",
            "memory",
            lambda found: Answer(error="CUDA error: ECC", kind="RuntimeError"),
            ("memory", "cpu:1"),
        ),
        (
            "cpu:1",
            "memory",
            lambda found: Answer(error="it ended with signal 7", kind="ended"),
            ("memory", "cpu:1"),
        ),
    ],
)
def test_what_is_wrong_is_seen_and_named(
    place: str, do: str, change: Callable[[dict[str, Any]], Any], expected: tuple[str, str]
) -> None:
    one = measured(FakeMachine(spoil=spoiler(place, do, change)))
    assert unfit(one) == [expected]
    rows = compare.with_peers(one.findings, one.rates).values()
    assert all(row.said and row.todo for row in rows if row.state == "unfit")


@pytest.mark.parametrize(
    "answer",
    [
        Answer(error="Torch not compiled with CUDA enabled", kind="AssertionError"),
        Answer(error="CUDA out of memory", kind="OutOfMemoryError"),
        Answer(error="DefaultCPUAllocator: can't allocate memory", kind="RuntimeError"),
        Answer(error="its process ended with signal 9", kind="ended"),
    ],
)
def test_what_says_nothing_of_a_device_leaves_it_unmeasured(answer: Answer) -> None:
    one = measured(FakeMachine(spoil=spoiler("cpu:1", "memory", lambda found: answer)))
    assert unfit(one) == []
    (row,) = (row for row in one.findings.values() if (row.check, row.place) == ("memory", "cpu:1"))
    assert row.state == "unmeasured" and answer.error in row.said


def test_a_place_that_is_silent_is_unfit_once_and_not_asked_again() -> None:
    asked = []

    def spoil(place: str, do: str, task: Task, found: dict[str, Any]) -> dict[str, Any] | Answer:
        if place != "cpu:1":
            return found
        asked.append(do)
        return Answer(error="it did not answer", kind="silent")

    one = measured(FakeMachine(spoil=spoil))
    assert unfit(one) == [("memory", "cpu:1")] and asked == ["memory"]
    of_it = {row.check: row.state for row in one.findings.values() if row.place == "cpu:1"}
    assert of_it == {"memory": "unfit", "product": "unmeasured", "clocks": "unmeasured"}
    pairs = {row.place for row in one.findings.values() if row.check == "bandwidth"}
    assert pairs == {"cpu:0+cpu:2", "cpu:0+cpu:3"}
    (every,) = (row for row in one.findings.values() if row.check == "all-reduce")
    assert every.state == "fit" and "3 places" in every.said


def test_a_disk_that_hangs_does_not_take_the_store_along() -> None:
    silent = Answer(error="it did not answer", kind="silent")
    one = measured(FakeMachine(spoil=spoiler("host", "disk", lambda found: silent)))
    assert unfit(one) == [("disk", "host")]
    assert {row.state for row in one.findings.values() if row.check == "store"} == {"unmeasured"}
    assert {row.state for row in one.findings.values() if row.check == "bandwidth"} == {"fit"}


def test_time_that_is_over_is_said_and_finds_nobody_guilty() -> None:
    machine = FakeMachine(spoil=spoiler("cpu:0", "product", lambda found: Answer(kind="silent")))
    one = measured(machine, until_s=4.0)
    assert unfit(one) == [], "its own limit would have been longer than the time that was left"
    late = {row.check for row in one.findings.values() if row.state == "unmeasured"}
    assert "all-reduce" in late and "memory" not in late
    assert all(limit_s <= 4.0 for limit_s in machine.limits_s)
    nothing = measured(FakeMachine(), until_s=0.1)
    assert {row.state for row in nothing.findings.values()} == {"unmeasured"}
    assert {row.check for row in nothing.findings.values()} == set(FULL)
    assert Findings(findings=list(nothing.findings.values())).exit_code == 7


def test_exit_codes() -> None:
    good, bad, none = (
        Finding(check="a", place="p", state=state, said="")
        for state in ("fit", "unfit", "unmeasured")
    )
    codes = [
        Findings(findings=f).exit_code for f in ([good, none], [good, bad], [none], [none, bad])
    ]
    assert codes == [0, 1, 7, 1]
    assert Findings(findings=[good]).fit and not Findings(findings=[none]).fit


def test_one_place_has_no_bandwidth() -> None:
    one = measured(FakeMachine(), names=["cpu:0"])
    assert [row.state for row in one.findings.values() if row.place == "all"] == ["unmeasured"] * 2
    with pytest.raises(ValueError, match="no such check: speed"):
        fit("cpu:0", ["speed"])


def baseline_of(machine: FakeMachine) -> Baseline:
    """Five passes."""
    runs = [measured(machine, until_s=machine.now_s + 60.0) for _ in range(5)]
    return of_repeats([one.rates for one in runs], HERE)


@pytest.mark.parametrize(
    ("do", "change", "expected"),
    [
        ("exchange", lambda f: f | {"rate": f["rate"] / 3}, {"bandwidth", "all-reduce"}),
        ("clocks", lambda f: f | {"rates": [r / 3 for r in f["rates"]]}, {"clocks"}),
        ("store", lambda f: f | {"trips_s": [t * 5 for t in f["trips_s"]]}, {"store"}),
        ("disk", lambda f: f | {"writes_s": [t * 5 for t in f["writes_s"]]}, {"disk"}),
    ],
)
def test_what_all_places_lost_shows_beside_the_baseline_alone(
    do: str, change: Callable[[dict[str, Any]], Any], expected: set[str]
) -> None:
    baseline = baseline_of(FakeMachine(scale=0.02))
    slow = measured(
        FakeMachine(
            9, scale=0.02, spoil=lambda at, asked, t, f: change(f) if exchanged(asked, do) else f
        )
    )
    assert unfit(slow) == []
    rows = compare.with_baseline(slow.findings, slow.rates, baseline)
    found = [row for row in rows.values() if row.state == "unfit"]
    assert {row.check for row in found} == expected
    assert all(row.bound and "in the baseline" in row.said and row.todo for row in found)
    for row in found:
        assert (row.measured < row.bound) == (row.check not in ("store", "disk")), row


def test_better_than_the_baseline_is_fit() -> None:
    rate = Rate(check="c", metric="m", place="p", rounds=[500.0], unit="MiB/s")
    late = Rate(check="c", metric="l", place="p", rounds=[0.1], unit="ms", high_is_good=False)
    was = of_repeats([[rate, late]] * 2, HERE)
    better = [
        Rate(check="c", metric="m", place="p", rounds=[5000.0], unit="MiB/s"),
        Rate(check="c", metric="l", place="p", rounds=[0.01], unit="ms", high_is_good=False),
    ]
    assert compare.with_baseline({}, better, was) == {}
    (row,) = compare.with_baseline({}, [], was).values()
    assert row.state == "unmeasured" and row.check == "baseline"


@pytest.mark.parametrize(("value", "unfit"), [(1.9, False), (2.1, True)])
def test_a_latency_below_twice_the_baseline_is_left_alone(value: float, unfit: bool) -> None:
    late = Rate(check="c", metric="l", place="p", rounds=[1.0], unit="ms", high_is_good=False)
    now = Rate(check="c", metric="l", place="p", rounds=[value], unit="ms", high_is_good=False)
    rows = compare.with_baseline({}, [now], of_repeats([[late]] * 5, HERE))
    assert [row.state for row in rows.values()] == ["unfit"] * unfit


def test_a_baseline_is_written_and_read_back(tmp_path: Path) -> None:
    made = baseline_of(FakeMachine())
    write_json(tmp_path / "b.json", made, "")
    assert read(tmp_path / "b.json") == made
    short = of_repeats([[Rate(check="c", metric="m", place="p", rounds=[1.0], unit="s")], []], HERE)
    assert short.rates == []


def test_files_that_are_no_baseline_are_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text('{"made": "x",\n "hardware": }')
    with pytest.raises(BaselineError, match=r"b\.json:2: it is no JSON"):
        read(path)
    path.write_text('{"made": "x", "hardware": {}, "rates": [{"check": 1}]}')
    with pytest.raises(BaselineError, match=r"rates\.0"):
        read(path)
    path.write_text('{"schema_version": 2}')
    with pytest.raises(NewerVersion, match="newer version"):
        read(path)
    with pytest.raises(BaselineError, match="No such file") as caught:
        read(tmp_path / "none.json")
    assert caught.value.exit_code == 2 and "--save-baseline" in caught.value.hint


def test_other_hardware_is_refused_by_name() -> None:
    baseline = Baseline(made="", hardware=HERE | {"cores": 64, "devices": ["H100"]}, rates=[])
    baselines.refuse_other(Path("b"), baseline, baseline.hardware)
    with pytest.raises(BaselineError, match="cores was 64 and is 2; devices was H100 and is none"):
        baselines.refuse_other(Path("b"), baseline, HERE)


def test_taints_name_devices_and_keep_the_numbers() -> None:
    def row(place: str, state: Any = "unfit") -> Finding:
        return Finding(
            check="c",
            place=place,
            state=state,
            said="slow",
            measured=1.0,
            bound=2.0,
            unit="u",
            evidence={"k": 3},
        )

    rows = [row("cuda:1"), row(HOST), row("cuda:2+cuda:3"), row("all"), row("cuda:0", "fit")]
    now = datetime(2026, 11, 26, 8, tzinfo=UTC)
    taints = as_taints(rows, "host-a", now)
    assert [one.place for one in taints] == ["host-a/cuda:1", "host-a", "host-a/cuda:3"]
    assert {(one.by, one.since) for one in taints} == {("preflight", now)}
    assert taints[0].reason == "preflight c: slow"
    facts = {"check": "c", "place": "cuda:1", "measured": 1.0, "bound": 2.0, "unit": "u"}
    assert taints[0].evidence == facts
    (odd,) = as_taints([replace(row(HOST), said="a\nb" * 5000, bound=None)], "host-a", now)
    assert "\n" not in odd.reason and len(odd.reason) == MAX_TEXT and "bound" not in odd.evidence


def test_what_failed_is_tainted_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Finding(check="memory", place="cpu:1", state="unfit", said="wrong words")
    found = Findings(findings=[bad, replace(bad, place="cpu:0", state="fit")])
    measured: list[object] = []

    def preflight(*given: object, **_: object) -> tuple[Findings, list[object]]:
        measured.append(given)
        return found, []

    monkeypatch.setattr("trainchaos.harness.preflight.preflight.preflight", preflight)
    monkeypatch.setenv("CHAOS_TAINTS", str(tmp_path / "taints.yaml"))
    known = TaintList(tmp_path / "taints.yaml")
    assert invoke(["doctor", "--preflight"]) == 1 and known.read() == ()
    for said in ("is tainted", "is tainted already"):
        assert invoke(["doctor", "--preflight", "--taint"]) == 1
        assert f"{socket.gethostname()}/cpu:1 {said}" in capsys.readouterr().err
    assert [one.place for one in known.read()] == [f"{socket.gethostname()}/cpu:1"]
    known.path.write_text("nonsense")
    measured.clear()
    assert invoke(["doctor", "--preflight", "--taint"]) == 2 and not measured


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--baseline", "b"], "--baseline needs --preflight"),
        (["--taint"], "--taint needs --preflight"),
        (["--preflight-time", "9s"], "--preflight-time needs --preflight"),
        (["--preflight", "--other-hardware"], "--other-hardware needs --baseline"),
        (["--preflight", "--preflight-time", "soon"], "is not a duration"),
        (["--preflight", "--preflight-time", "0s"], "is no time"),
        (["--preflight", "--save-baseline", "/none/here/b"], "directory does not exist"),
    ],
)
def test_wrong_use_measures_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("state", "code"), [("fit", 0), ("unfit", 1), ("unmeasured", 7)])
def test_the_command_says_what_was_found_and_ends_with_its_code(
    state: Any, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = Finding(check="memory", place="cpu:1", state=state, said="64 MiB", todo="do it")
    rates = [Rate(check="c", metric="m", place="p", rounds=[1.0], unit="s")]

    def preflight(*args: Any, repeats: int, **more: Any) -> Any:
        return Findings(findings=[row], rates=rates, seconds=2.0), [rates] * repeats

    monkeypatch.setattr("trainchaos.harness.preflight.preflight.preflight", preflight)
    call = CliRunner()
    text = call.invoke(command.doctor, ["--preflight"], standalone_mode=False)
    assert text.return_value == code and "memory cpu:1  64 MiB -> do it" in text.output
    form = ["--preflight", "--format", "json", "--save-baseline", str(tmp_path / "b.json")]
    found = call.invoke(command.doctor, form, standalone_mode=False)
    answer = json.loads(found.stdout)
    assert answer["fit"] == (code == 0) and answer["findings"][0]["state"] == state
    assert (tmp_path / "b.json").exists() == (code == 0), "a baseline is of a machine that is fit"
    assert isinstance(command.doctor, click.Command)


def test_what_was_found_before_the_time_was_over_is_not_lost() -> None:
    wrong = {"pattern": "0x00", "address": 64, "wrote": "0x0", "read": "0x1"}
    spoil = spoiler("cpu:0", "memory", lambda f: f | {"wrong_words": 1, "wrong": [wrong]})
    one = measured(FakeMachine(spoil=spoil), until_s=0.6)
    assert unfit(one) == [("memory", "cpu:0")]
    assert {row.state for row in one.findings.values() if row.place != "cpu:0"} == {"unmeasured"}


def test_wrong_bytes_are_not_lost_when_the_time_is_over() -> None:
    machine = FakeMachine()

    def spoil(place: str, do: str, task: Task, found: dict[str, Any]) -> dict[str, Any]:
        if exchanged(do, "exchange"):
            machine.now_s += 20.0
            return found | {"wrong": 1}
        return found

    machine._spoil = spoil
    one = measured(machine, until_s=70.0)
    assert unfit(one) == [("bandwidth", "cpu:0+cpu:1")], one.findings
    assert {row.state for row in one.findings.values() if row.place == "all"} == {"unmeasured"}


def test_who_waited_for_a_place_that_hangs_is_not_blamed() -> None:
    def spoil(place: str, do: str, task: Task, found: dict[str, Any]) -> dict[str, Any] | Answer:
        if not exchanged(do, "exchange"):
            return found
        if place == "cpu:2":
            return Answer(error="it did not answer within 21 s", kind="silent")
        if place == "cpu:3" and task.options["world"] == 2 and not waited:
            waited.append(place)
            return Answer(error="Timed out waiting 5000ms", kind="DistBackendError")
        return found

    waited: list[str] = []
    one = measured(FakeMachine(spoil=spoil), until_s=300.0)
    assert unfit(one) == [("bandwidth", "cpu:2")] and waited
    (pair,) = (row for row in one.findings.values() if row.place == "cpu:2+cpu:3")
    assert pair.state == "unmeasured" and "cpu:2: it did not answer" in pair.said
    (every,) = (row for row in one.findings.values() if row.check == "all-reduce")
    assert every.state == "fit" and "3 places" in every.said


def test_bytes_that_arrive_wrong_with_every_partner_name_the_place() -> None:
    def spoil(place: str, do: str, task: Task, found: dict[str, Any]) -> dict[str, Any]:
        return found | {"wrong": 2} if place == "cpu:3" and exchanged(do, "exchange") else found

    one = measured(FakeMachine(spoil=spoil))
    assert unfit(one) == [("bandwidth", "cpu:3"), ("all-reduce", "all")]
    (row,) = (row for row in one.findings.values() if row.place == "cpu:3" and row.state == "unfit")
    assert "did not arrive as they were sent" in row.said
