"""The time until a command's first step: what is said meanwhile, and what stops a run at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.script.test_script import command, living, run, write
from tests.harness.script.test_script_observer import Job
from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.host.rundir import open_run
from trainchaos.harness.run.progress import _Lines
from trainchaos.harness.script.outcome_text import UNRANKED_S, UNREAD_S, CommandFindings
from trainchaos.harness.script.processes.command import CommandEnded
from trainchaos.reports.outlets.terminal import summary

STEPS = [f"step {n} loss {1 / n:.3f}" for n in range(1, 61)]
START = [f"[rank0] NCCL INFO channel {n % 8:02d}/{n} ring 0 1 2 3" for n in range(300)]
BARS = [f"Map: {n}%| {10 * n}/1000 [00:0{n % 9}<00:09, 100.0 examples/s]" for n in range(100)]
WELL = CommandEnded(exit_code=0, signal=None)


class Begun:
    """The start of a command, on a clock that is set by hand."""

    def __init__(self, *, ranks: int = 2, steps: int = 200, progress: Any = None) -> None:
        self.now = 0
        self.listener = SimpleNamespace(
            text=SimpleNamespace(count=0, recent=()),
            output=SimpleNamespace(last=()),
            reader=SimpleNamespace(refused=0, other_total=None, unread=()),
            waiting=False,
        )
        self.observer = SimpleNamespace(
            reports=0,
            generation=0,
            committed=0,
            finished=False,
            members={},
            began_again=False,
            preempted=False,
        )
        self.living: list[str] = []
        self.spec = WorkloadSpec(
            command=["x"],
            ranks=ranks,
            steps=steps,
            progress=progress or RegexProgress(regex=r"STEP=(?P<step>\d+)"),
        )

    def startup(self, *, check: bool = True, **more: Any) -> CommandFindings:
        """Of its first arm, or of another."""
        ranks: Any = SimpleNamespace(living=lambda: self.living)
        listener: Any = self.listener
        observer: Any = self.observer
        return CommandFindings(
            spec=self.spec,
            ranks=ranks,
            listener=listener,
            observer=observer,
            now_ns=lambda: self.now,
            check=check,
            **more,
        )

    def prints(self, lines: Sequence[str]) -> None:
        """All of its lines so far."""
        self.listener.text = SimpleNamespace(count=len(lines), recent=tuple(lines))
        self.listener.output = SimpleNamespace(last=tuple(lines[-6:]))


def stopped(begun: Begun, startup: CommandFindings, seconds: float) -> str:
    """Why it is stopped within that time, or ""."""
    end = begun.now + int(seconds * 1e9)
    while begun.now < end:
        begun.now += 10**8
        if why := startup.blind():
            return why
    return ""


def test_steps_that_are_printed_and_not_read_stop_the_run_and_say_how_to_read_them() -> None:
    begun = Begun()
    begun.prints([*START[:50], *STEPS])
    startup = begun.startup()
    assert stopped(begun, startup, UNREAD_S - 1) == ""
    why = stopped(begun, startup, 3)
    assert why.startswith(
        "workload.progress.regex matched none of 110 lines, of which 60 look like"
    )
    found = re.search(r"give progress: \{regex: '(.*)'\}; its last lines", why)
    assert found is not None
    assert [int(match["step"]) for one in STEPS if (match := re.search(found[1], one))] == list(
        range(1, 61)
    )
    assert "| step 60 loss" in why


@pytest.mark.parametrize(("ranks", "number", "stops"), [(1, 0, False), (1, 1, True), (2, 1, False)])
def test_a_rank_beyond_those_of_the_scenario_stops_the_run(
    ranks: int, number: int, stops: bool
) -> None:
    begun = Begun(ranks=ranks)
    begun.observer.reports, begun.observer.generation = 5, 1
    begun.observer.members = dict.fromkeys(range(ranks - 1), "w1") | {number: "w0"}
    why = stopped(begun, begun.startup(), 3)
    assert bool(why) is stops
    assert not stops or why.startswith("a process names itself rank 1, so that there are 2 ranks")
    assert stopped(begun, begun.startup(check=False), 3) == ""


def test_part_of_the_ranks_stops_the_run() -> None:
    begun = Begun(ranks=3)
    begun.observer.reports, begun.observer.generation = 5, 1
    begun.observer.members = {0: "w0", 2: "w1"}
    why = stopped(begun, begun.startup(), 3)
    assert why == "steps are reported, and 2 of 3 ranks were found"
    begun.observer.generation = 2
    assert stopped(begun, begun.startup(), 3) == "", "one was lost before this was looked at"
    begun.observer.generation = 1
    assert stopped(begun, begun.startup(check=False), 3) == ""


def test_a_job_that_goes_on_with_fewer_ranks_was_observed() -> None:
    begun = Begun(ranks=3)
    startup = begun.startup()
    begun.observer.reports, begun.observer.generation = 5, 1
    begun.observer.members = {0: "w0", 1: "w1", 2: "w2"}
    assert stopped(begun, startup, 3) == "" and startup.observed
    begun.observer.members = {0: "w3"}
    assert stopped(begun, startup, 3) == "" and startup.observed


def test_the_same_with_a_beacon_that_is_not_heard() -> None:
    begun = Begun(progress="beacon")
    begun.prints(STEPS)
    why = stopped(begun, begun.startup(), 10)
    assert "no beacon was heard: call beacon.step(...)" in why
    assert "as 60 steps were printed, give progress: {regex: " in why


@pytest.mark.parametrize(
    ("line", "stops"),
    [
        ("it={n} train_loss={loss}", True),
        ("update {n}: loss {loss}", True),
        ("batch {n} of the data is read", False),
        ("epoch {n} loss {loss}", False),
    ],
)
def test_a_weak_word_beside_a_loss_is_a_step_too(line: str, stops: bool) -> None:
    begun = Begun()
    begun.prints([line.format(n=n, loss=1 / n) for n in range(1, 61)])
    assert bool(stopped(begun, begun.startup(), 10)) is stops


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "lines",
    [[], START, BARS, STEPS[:20], [f"epoch {n} of many" for n in range(90)]],
    ids=["silent", "chatty", "bars", "few steps", "epochs"],
)
def test_a_slow_start_is_waited_for_whatever_it_prints(lines: list[str]) -> None:
    begun = Begun()
    begun.prints(lines)
    assert stopped(begun, begun.startup(), 60) == ""


def test_of_a_short_run_fewer_steps_are_plenty() -> None:
    begun = Begun(steps=30)
    begun.prints(STEPS[:15])
    assert stopped(begun, begun.startup(), 10)


def test_steps_without_a_rank_stop_the_run() -> None:
    begun = Begun()
    begun.observer.reports, begun.observer.committed = 40, 40
    startup = begun.startup()
    assert stopped(begun, startup, UNRANKED_S - 1) == ""
    assert "steps up to 40 are reported, and no rank was found" in stopped(begun, startup, 3)


def test_ranks_that_are_found_late_are_waited_for() -> None:
    begun = Begun()
    begun.observer.reports = 1
    startup = begun.startup()
    assert stopped(begun, startup, UNRANKED_S - 2) == ""
    begun.observer.generation, begun.observer.members = 1, {0: "w0", 1: "w1"}
    assert stopped(begun, startup, 60) == ""
    begun.observer.generation = 0  # whatever comes later is no start
    assert stopped(begun, startup, 60) == ""


def test_only_the_first_arm_is_a_check() -> None:
    begun = Begun()
    begun.prints(STEPS)
    assert stopped(begun, begun.startup(check=False), 60) == ""


def test_what_is_known_is_said() -> None:
    begun = Begun(ranks=4)
    startup = begun.startup()
    begun.now = 25 * 10**9
    assert startup.known() == "0 of 4 ranks found, no output yet, start-up 25 s"
    begun.living = ["w0", "w1", "w2", "w3"]
    begun.prints(START)
    assert startup.known() == (
        "4 of 4 ranks found, 300 lines printed, no line matched yet, start-up 25 s"
    )
    begun.listener.waiting = True
    assert startup.known() == "4 of 4 ranks found, start-up 25 s"
    begun.observer.reports, begun.observer.committed = 3, 3
    assert startup.known() == "4 of 4 ranks found, steps up to 3 reported, start-up 25 s"
    begun.observer.generation = 1
    assert startup.known() == ""
    alone = Begun(ranks=1, progress="beacon")
    assert alone.startup().known() == "no output yet, no beacon heard yet, start-up 0 s"


def test_a_line_says_what_is_known_and_then_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = _Lines(1)
    setup: Any = SimpleNamespace(
        cell=SimpleNamespace(scenario=SimpleNamespace(workload=SimpleNamespace(steps=30)))
    )
    watcher.on_waiting(setup, "4 of 4 ranks found, start-up 6 s")
    watcher.on_progress(setup, 0, 6 * 10**9)
    watcher.on_waiting(setup, "")
    watcher.on_progress(setup, 9, 12 * 10**9)
    said = capsys.readouterr().err
    assert re.findall(r"s\s+(\S.*)", said) == ["4 of 4 ranks found, start-up 6 s", "step 9/30"]


# ---- what is said at the end


def reason(begun: Begun, ended: CommandEnded | None, injected: str = "", starts: int = 1) -> str:
    """Of the arm's end."""
    return begun.startup(injected=injected, starts=starts).outcome(ended)[1]


def test_a_slow_start_is_not_blamed_on_the_expression() -> None:
    begun = Begun()
    begun.prints(START)
    why = reason(begun, None)
    assert "printed 300 lines, and none of them is surely a step: raise" in why
    assert "workload.start_deadline if it takes longer to start" in why


def test_steps_that_were_not_read_are_blamed_on_it() -> None:
    begun = Begun()
    begun.prints([*START, *STEPS])
    for ended in (None, WELL):
        assert "matched none of 360 lines, of which 60 look like steps" in reason(begun, ended)


def test_lines_that_state_the_number_of_steps_are_steps_whatever_they_call_them() -> None:
    begun = Begun()
    steps = begun.spec.steps
    begun.prints([f"=== refinement no. {i} of {steps} ===" for i in range(1, 61)])
    for ended in (None, WELL):
        why = reason(begun, ended)
        assert "of which 60 look like steps: give progress: {regex: " in why, why
    other = Begun()
    other.prints([f"=== refinement no. {i} of {steps + 7} ===" for i in range(1, 61)])
    assert "60 may be steps: if they are, give progress: {regex: " in reason(other, WELL)
    assert "none of them is surely a step" in reason(other, None)


def test_steps_of_an_epoch_are_not_a_wrong_number_of_steps() -> None:
    begun = Begun()
    job = Job(steps=200)
    job.found("w0", "w1")
    for _ in range(3):
        job.train(*range(1, 21))
    assert job.observer.began_again
    begun.observer = SimpleNamespace(
        reports=60,
        generation=1,
        committed=20,
        finished=False,
        members={0: "w0", 1: "w1"},
        began_again=True,
        preempted=False,
    )
    why = reason(begun, WELL)
    assert "those of an epoch" in why and "set workload.steps" not in why
    begun.observer.began_again = False
    assert "set workload.steps to what it does" in reason(begun, WELL)
    why = reason(begun, WELL, "process-term")
    assert "process-term had hit it" in why and "set workload.steps" not in why
    why = reason(begun, WELL, "process-term", starts=2)
    assert "it was started again after process-term, and ended with exit code 0" in why
    begun.observer.members = {}
    assert "no rank was found" in reason(begun, WELL)


def test_a_job_that_goes_back_to_a_checkpoint_has_not_begun_again() -> None:
    job = Job(steps=200)
    job.found("w0", "w1")
    job.train(*range(1, 31))
    job.lose("w1", 1, None)
    job.found("w2", "w3")
    job.train(*range(1, 31))
    assert not job.observer.began_again, "it was begun again after a failure"
    other = Job(steps=200)
    other.found("w0", "w1")
    other.train(*range(1, 31), *range(20, 40))
    assert not other.observer.began_again, "it did not go back to its first steps"


# ---- for real

ENDLESS = """
import time
for n in range(1, 10**6):
    print("step", n, "loss", 1 / n)
    time.sleep(0.01)
"""
ALONE = [sys.executable, "-c", ENDLESS]


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "progress", "ranks", "words"),
    [
        (
            command("--steps", "5000", "--step-s", "0.01"),
            r"{regex: 'STEP=(?P<step>\d+)'}",
            2,
            r"s\.yaml:8 .*look like steps: give progress: ",
        ),
        pytest.param(
            ALONE,
            "beacon",
            1,
            r"s\.yaml:\d+ .*no beacon was heard: call .* \d+ steps were printed",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ALONE,
            r"{regex: 'step (?P<step>\d+)'}",
            2,
            r"s\.yaml:6 .*0 of 2 ranks were found",
            marks=pytest.mark.long,
        ),
        (
            command("--steps", "5000", "--step-s", "0.01"),
            r"{regex: 'step (?P<step>\d+)'}",
            3,
            r"s\.yaml:6 .*2 of 3 ranks were found",
        ),
    ],
    ids=["unread", "unheard", "unranked", "in part"],
)
def test_a_run_stops_at_its_first_arm(
    tmp_path: Path, argv: list[str], progress: str, ranks: int, words: str
) -> None:
    scenario = write(
        tmp_path / "s.yaml",
        argv,
        progress=progress,
        ranks=ranks,
        steps=5000,
        deadline="200s",
        baseline="paired",
        fault='{id: hit, kind: "${matrix.kind}", target: {rank: 0}, at: {step: 3000}}',
        invariants="observable",
        more="matrix: {kind: [process-kill, process-term]}\nsla: {recovery_time: ['max < 9s']}",
    )
    code, results = run(tmp_path, scenario)
    assert code == 3 and re.search(words, results.reason, re.DOTALL), results.reason
    assert len(results.arms) == 1
    said = summary(results, open_run(tmp_path / "runs/script/latest"))
    assert len(re.findall("(?m)inconclusive", said, re.IGNORECASE)) == 1, said
    assert not living(tmp_path)
