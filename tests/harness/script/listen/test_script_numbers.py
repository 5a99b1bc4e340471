"""Numbers as programs print them, and what is judged of the losses a command reports."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.script.test_script_observer import COMMAND, Job, begun
from tests.harness.script.test_script_sustained import inject
from tests.support import arms
from trainchaos import beacon
from trainchaos.chaos.events.log import Kind, Log
from trainchaos.chaos.scenario.model import InvariantExclusion
from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.harness.judge.checkers import Evidence, check_all
from trainchaos.harness.judge.checkers.job.observed import LACKING, OBSERVABLE, unjudged
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.script.listen import numbers, rules
from trainchaos.harness.script.listen.progress import GrowingFile, RegexReader, parse_beacon
from trainchaos.reports.content import figures

READ = {
    "4.47": 4.47,
    "4.47,": 4.47,
    "tensor(4.47)": 4.47,
    "tensor(4.47,": 4.47,
    "4.": 4.0,
    ".5": 0.5,
    "-3e-05;": -3e-05,
    "tensor(4.4700, device='cuda:0', grad_fn=<NllLossBackward0>)": 4.47,
    "np.float32(4.47)": 4.47,
    "[4.47]": 4.47,
    "'4.47'": 4.47,
    "(4.47)": 4.47,
    "4.47.": 4.47,
    "4.47|": 4.47,
    "1,234.5": 1234.5,
    "1_000.5": 1000.5,
    "7": 7.0,
    "+2E+1": 20.0,
    "Array(4.47, dtype=float32)": 4.47,
    "inf": math.inf,
    "-Infinity,": -math.inf,
    "tensor(inf)": math.inf,
    "1e999": math.inf,
}
NO_NUMBERS = (
    "nan",
    "'nan'",
    "NaN,",
    "-nan",
    "-nan(ind)",
    "tensor(nan, device='cuda:0')",
    "1.#QNAN",
    "float('nan')",
)
UNREAD = (
    "4,47",
    "1,234",
    "4.47%",
    "4.47 4.50",
    "4.47 (4.50)",
    "tensor([4.47, 4.50])",
    "None",
    "n/a",
    "-",
    "4.47ms",
    "0x1p3",
    "4.4.7",
    "--",
    "٣",
    "4" * 500,
    "nano",
    "info",
    "infinite",
)


@pytest.mark.parametrize("text", READ)
def test_a_loss_is_read_as_it_is_printed(text: str) -> None:
    assert numbers.real(text) == numbers.ParsedNumber(value=READ[text])


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_a_loss_that_is_none_is_read_too(text: str) -> None:
    found = numbers.real(text)
    assert found.value is not None and math.isnan(found.value) and not found.unread


@pytest.mark.parametrize("text", UNREAD)
def test_what_may_be_something_else_is_not_read(text: str) -> None:
    assert numbers.real(text) == numbers.ParsedNumber(unread=text[: numbers.SHOWN])


@pytest.mark.parametrize("text", [None, "", "  "])
def test_nothing_says_nothing(text: str | None) -> None:
    assert numbers.real(text) == numbers.ParsedNumber()


@given(st.floats())
def test_every_float_is_read_back(value: float) -> None:
    assert repr(numbers.real(repr(value)).value) == repr(value)


@given(st.text(max_size=60))
def test_no_text_gives_an_exception(text: str) -> None:
    assert isinstance(numbers.real(text), numbers.ParsedNumber)
    assert numbers.whole(text, 100) is None or numbers.whole(text, 100) < 100


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("12,", 12),
        ("1,200", 1200),
        ("[12]", 12),
        ("12/99", 12),
        ("12.0", 12),
        ("12:", 12),
        ("12.5", None),
        ("-1", None),
        ("1e3", None),
        ("a", None),
        ("1" * 20, None),
        ("99999", None),
        (None, None),
    ],
)
def test_a_count_is_read_as_it_is_printed(text: str | None, value: int | None) -> None:
    assert numbers.whole(text, 5000) == value


def test_what_an_expression_finds_and_cannot_be_read_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text(
        "step 1, loss 4,47 rank x n none\nstep 2, loss tensor(4.47) rank 1 n 8\nstep x, loss 1\n"
    )
    reader = RegexReader(
        GrowingFile(path),
        RegexProgress(
            regex=(
                r"step (?P<step>\S+?), loss (?P<loss>\S+)"
                r"(?: rank (?P<rank>\S+) n (?P<samples>\S+))?"
            )
        ),
        steps=100,
    )
    first, second = reader.read()
    assert (first.loss, dict(first.unread)) == (
        None,
        {"loss": "4,47", "rank": "x", "samples": "none"},
    )
    assert (second.loss, second.rank, second.samples, dict(second.unread)) == (4.47, 1, 8, {})
    assert reader.refused == 1


@pytest.mark.parametrize(
    ("line", "losses"),
    [
        ("[d0]:step 5 loss 0.25[d1]:step 5 loss 0.75", [0.25, 0.75]),
        ("[d0]:step 5 loss 0.25[d1]:step 5 loss 0.75[d2]:step 5 loss -1.50", [0.25, 0.75, -1.5]),
        ("step 5 loss infstep 5 loss inf", [math.inf, math.inf]),
        ("[d0]:step 5 loss 0.2[d1]:step 5 loss 0.25", [None]),  # was it cut?
        ("step 5 loss 4.step 5 loss 4.5", [None]),
        ("step 5 loss 0.25eval step 5 loss 0.75", [None]),
    ],
)
def test_lines_that_ranks_wrote_at_once_are_read(line: str, losses: list[float | None]) -> None:
    reader = RegexReader(None, RegexProgress(regex=r"step (?P<step>\d+) loss (?P<loss>\S+)"), 100)
    assert [one.loss for one in reader.parse(line)] == losses


def test_a_loss_that_the_beacon_cannot_say_does_not_cost_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "beacon.txt"
    path.touch()
    monkeypatch.setenv(beacon.VARIABLE, str(path))
    beacon.step(7, loss="4.47,")  # type: ignore[arg-type]
    said = parse_beacon(path.read_text().rstrip())
    assert said is not None and (said.step, said.loss, dict(said.unread)) == (
        7,
        None,
        {"loss": "?"},
    )


# ---- what is judged of them


def evidence(job: Job, control: Job | None = None, arm: str = "faulted", **more: Any) -> Evidence:
    """An arm of a command; ``control``: the other one."""
    cell = arms.cell_of("own", more.pop("faults", []), workload=COMMAND, **more)
    paired: Log | None = control.log() if control is not None else None
    return Evidence(arm=arm, cell=cell, log=job.log(), control=paired)


def found(job: Job, control: Job | None = None, **more: Any) -> dict[str, Finding]:
    """What all checkers say that a usual scenario asks."""
    more.setdefault("invariants", ["fault-landed", "loss-equality"])
    return check_all(evidence(job, control, **more))


def trained(loss: float | None = 4.5, *, unread: str = "") -> Job:
    """To the end, every step with the same loss."""
    return begun(*range(1, 101), loss=loss, unread=unread)


def test_what_a_command_does_not_tell_is_only_judged_where_it_is_asked_for() -> None:
    asked = found(trained(), trained(), invariants="default")
    assert asked["sample-accounting"].verdict == "inconclusive"
    observable = found(trained(), trained(), invariants=OBSERVABLE)
    assert asked.keys() - observable.keys() == LACKING.keys()
    assert observable["loss-equality"].verdict == "pass"


@pytest.mark.parametrize(
    ("before", "after", "proven"), [(4.5, 4.75, True), (4.25, 4.75, False), (4.75, 4.75, False)]
)
def test_a_step_that_is_done_again_with_another_loss_shows_a_state_that_was_not_restored(
    before: float, after: float, proven: bool
) -> None:
    """Proven only where the arm itself had the control arm's loss at that step before."""
    job = begun(*range(1, 21), loss=4.5)
    job.train(*range(21, 31), loss=before)
    job.restarted(*range(21, 101), loss=after)
    findings = found(job, trained(), invariants=OBSERVABLE)
    assert findings["loss-equality"].verdict == "inconclusive"
    left_out = unjudged(evidence(job, invariants=OBSERVABLE).cell.scenario, findings)
    results: Any = SimpleNamespace(
        cells=[SimpleNamespace(id="c", label="", absent={}, unjudged=left_out, invariants={})]
    )
    assert any("loss-equality" in line for line in figures.to_see(results)) is proven
    assert any("loss-equality is" in line for line in figures.absent(results)) is not proven
    assert ("it may not restore all" in left_out["loss-equality"]) is proven


@pytest.mark.parametrize(
    ("mine", "theirs", "verdict", "judged"),
    [
        (4.5, 4.5, "pass", True),
        (4.5, 4.0, "inconclusive", False),  # it need not be deterministic
        (None, None, "inconclusive", False),
        (math.nan, 4.0, "fail", True),
    ],
)
def test_losses_that_cannot_be_compared_are_not_judged(
    mine: float | None, theirs: float | None, verdict: str, judged: bool
) -> None:
    findings = found(trained(mine), trained(theirs), invariants=OBSERVABLE)
    assert findings["loss-equality"].verdict == verdict
    scenario = evidence(trained(mine), invariants=OBSERVABLE).cell.scenario
    left_out = unjudged(scenario, findings)
    assert ("loss-equality" not in left_out) is judged
    if not judged:
        why = "the control arm had 4.0" if mine else "no losses of the same rank and step"
        assert why in left_out["loss-equality"] and "leave_out" not in left_out["loss-equality"]
        cell = SimpleNamespace(id="c", absent={}, unjudged=left_out)
        results: Any = SimpleNamespace(cells=[cell])
        said = f"loss-equality is not judged: {left_out['loss-equality']}"
        assert said in figures.absent(results)
    assert not unjudged(evidence(trained(), invariants="default").cell.scenario, findings)


def spoilt_by_a_kill(loss: float = math.nan, last: float | None = None) -> Job:
    """A rank was killed; after the restart losses are no numbers."""
    job = begun(*range(1, 31), loss=4.5)
    inject(job, fault="kill")
    job.restarted(*range(21, 100), loss=loss)
    job.train(100, loss=loss if last is None else last)
    return job


@pytest.mark.parametrize("last", [None, 4.5])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_job_that_ends_on_no_numbers_fails_whatever_was_done_to_it(
    loss: float, last: float | None
) -> None:
    job = spoilt_by_a_kill(loss, last)
    said = found(job, trained())
    assert (
        said["finite-losses"].verdict == "fail"
        and "step 100, from step 21 on" in said["finite-losses"].witness
    )
    assert said["loss-equality"].verdict == "fail" and "at step 21" in said["loss-equality"].witness
    (incident,) = measure(job.log(), None).incidents
    assert (incident.outcome, incident.recovery_time) == ("sdc-escape", math.inf)
    assert incident.evidence["committed_step"] == 21


def test_it_fails_in_the_control_arm_and_with_any_list_of_invariants() -> None:
    job = trained(math.nan)
    assert found(job, arm="control", invariants=[])["finite-losses"].verdict == "fail"
    assert "finite-losses" not in found(
        job, invariants=InvariantExclusion(leave_out=["finite-losses"])
    )


def test_a_job_that_never_had_numbers_was_not_spoilt_by_the_fault() -> None:
    job = begun(*range(1, 31), loss=math.nan)
    inject(job, fault="kill")
    job.restarted(*range(21, 101), loss=math.nan)
    (incident,) = measure(job.log(), None).incidents
    assert incident.outcome == "recovered" and found(job)["finite-losses"].verdict == "fail"


def test_values_that_are_no_numbers_are_compared() -> None:
    both = found(trained(math.nan), trained(math.nan))
    assert both["loss-equality"].verdict == "pass" and both["finite-losses"].verdict == "fail"
    one = begun(*range(1, 50), loss=4.5)
    one.train(50, loss=math.inf)
    one.train(*range(51, 101), loss=4.5)
    said = found(one, trained())
    assert (
        said["loss-equality"].verdict == "fail"
        and "inf at step 50" in said["loss-equality"].witness
    )
    assert said["finite-losses"].verdict == "pass", (
        "it was passing, and nobody said that it must not be"
    )


def test_nothing_about_losses_passes_with_some_unread() -> None:
    said = found(trained(None, unread="4,47"), trained())
    assert {said[name].verdict for name in ("finite-losses", "loss-equality")} == {"inconclusive"}
    assert "100 losses could not be read, such as '4,47'" in said["finite-losses"].witness
    assert "100 values of loss could not be read" in said["progress"].witness
    other = found(trained(), trained(None, unread="4,47"))
    assert (
        other["loss-equality"].verdict == "inconclusive"
        and "of the control arm" in other["loss-equality"].witness
    )


@pytest.mark.parametrize(("torn", "verdict"), [(50, "pass"), (95, "pass"), (96, "inconclusive")])
def test_a_torn_line_matters_where_the_job_is_judged(torn: int, verdict: str) -> None:
    one = begun(*range(1, torn), loss=4.5)
    one.train(torn, unread="4.step")
    one.train(*range(torn, 101), loss=4.5)
    said = found(one, trained())
    assert said["finite-losses"].verdict == verdict
    assert "1 could not be read" in said["finite-losses"].witness or verdict != "pass"
    assert said["loss-equality"].verdict == "inconclusive", "any value may be the one that differs"


@pytest.mark.parametrize(("every", "last", "verdict"), [(1, 60, 3), (10, 60, 3), (10, 80, 0)])
def test_losses_that_stop_coming_leave_it_open(every: int, last: int, verdict: int) -> None:
    job = begun()
    for step in range(1, 101):
        job.train(step, loss=4.5 if step <= last and step % every == 0 else None)
    said = found(job, trained())["finite-losses"]
    assert said.verdict == ("inconclusive" if verdict else "pass"), said.witness
    assert f"there is no loss since step {last}" in said.witness or not verdict


def test_losses_that_stop_being_read_are_not_said_to_stop() -> None:
    job = begun(*range(1, 31), loss=4.5)
    job.train(*range(31, 101), unread="4,47")
    said = found(job, trained())["finite-losses"]
    assert said.verdict == "inconclusive"
    assert said.witness.startswith("70 losses could not be read, such as '4,47'")


@pytest.mark.parametrize(
    ("every", "spoilt", "verdict"),
    [
        (1, range(31, 101), "fail"),
        (10, range(40, 101, 10), "fail"),
        (1, range(31, 60), "pass"),  # a scaler found its scale
        (1, [100], "pass"),
    ],
)
def test_gradients_that_are_no_numbers_to_the_end_fail(
    every: int, spoilt: Sequence[int], verdict: str
) -> None:
    job = begun()
    for step in range(every, 101, every):
        job.train(step, loss=0.0, spoilt=step in spoilt)
    said = found(job, trained())["finite-losses"]
    assert said.verdict == verdict, said.witness
    first = f"not a number from step {spoilt[0]} to the end"
    assert (first in said.witness) == (verdict == "fail")


@pytest.mark.parametrize(
    ("line", "spoilt"),
    [
        ("{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '1e-05'}", True),
        (" iteration 6/ 10 | loss scale: 1.0 | grad norm: nan | skipped: 0 |", True),
        ("step:  6  loss:  1.2  grad_norm:  inf  memory: 1GiB", True),
        ("step 6 | loss 1.2 | gradient norm nan", True),
        ("iteration 6/ 10 | grad norm: 1.2 | number of nan iterations: 0 |", False),
        ("grad_norm: 0.5, nan_count: 3", False),
    ],
)
def test_a_gradient_norm_that_is_no_number_is_seen(line: str, spoilt: bool) -> None:
    assert rules.spoilt(line) == spoilt


def test_without_losses_nothing_is_said_of_them() -> None:
    said = found(trained(None), trained(None))
    assert "finite-losses" not in said and said["loss-equality"].verdict == "inconclusive"


def by_rank(first: int, losses: tuple[float, float], rank: int | None = None) -> Job:
    """Both ranks report their own loss, ``first`` first; ``rank``: only that one."""
    job = begun()
    for step in range(1, 101):
        for one in (first, 1 - first):
            if rank in (None, one):
                job.train(step, seconds=0.01, rank=one, loss=losses[one])
    return job


def test_a_rank_is_compared_with_itself_whoever_reports_first() -> None:
    assert found(by_rank(0, (1.0, 2.0)), by_rank(1, (1.0, 2.0)))["loss-equality"].verdict == "pass"
    other = found(by_rank(0, (1.0, 2.0)), by_rank(0, (1.0, 3.0)))["loss-equality"]
    assert other.verdict == "fail", "a list is taken at its word"
    assert other.witness.startswith("rank 1: reported loss 2.0 at step 1")
    none = found(by_rank(0, (1.0, 2.0), rank=0), by_rank(0, (1.0, 2.0), rank=1))["loss-equality"]
    assert none.verdict == "inconclusive" and "same rank" in none.witness


def test_an_escape_that_is_expected_is_no_failure() -> None:
    fault = arms.KILL | {"at": {"step": 27}, "expect": {"outcome": "sdc-escape"}}
    said = found(spoilt_by_a_kill(), trained(), faults=[fault])
    assert said["finite-losses"].verdict == said["loss-equality"].verdict == "pass"


def test_what_came_before_the_last_fault_did_no_harm() -> None:
    job = begun(*range(1, 31), loss=4.5)
    inject(job, fault="kill")
    job.restarted(*range(21, 61), loss=4.5)
    about = {"fault": "again", "occurrence": 0}
    job.record(
        Kind.FAULT_INJECTED, **about, kind="process-kill", target={"process": "w3", "rank": 1}
    )
    job.record(Kind.FAULT_LANDED, **about, witness="kernel", evidence={"signal": 9})
    job.exit("w3", signum=signal.SIGKILL)
    job.found("w4", "w5")
    job.train(*range(51, 101), loss=math.nan)
    first, second = measure(job.log(), None).incidents
    assert (first.outcome, second.outcome) == ("recovered", "sdc-escape")
