"""What a comparison says became of a job: one class each, with its witness, from logs of commands
seen from outside.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.script.test_script_observer import Job, S
from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Kind, Log, make_log
from trainchaos.harness.compare.result.model import Trial
from trainchaos.harness.compare.result.trials import trial_of
from trainchaos.harness.script.listen.progress import ProgressReport

BATCH, STEPS = 8, 60
TARGET = {"process": "w1", "rank": 1}


class Fleet(Job):
    """Two ranks that report each step with loss and samples, and a fault."""

    def __init__(self) -> None:
        super().__init__(steps=STEPS)
        self.events[0].data["global_batch"] = BATCH
        self.found("w0", "w1")

    def reach(
        self,
        first: int,
        last: int,
        *,
        ranks: tuple[int, ...] = (0, 1),
        loss: float | None = None,
        share: int = 4,
    ) -> None:
        for step in range(first, last + 1):
            self.now += S // 10
            self.observer.tick(self.now)
            for rank in ranks:
                told = 5.0 / step if loss is None else loss
                self.observer.on_progress(
                    ProgressReport(step=step, rank=rank, loss=told, samples=share), self.now
                )

    def hit(self, kind: str = "process-kill", *, landed: bool = True, fault: str = "hit") -> None:
        self.now += S // 100
        about: dict[str, Any] = {"fault": fault, "occurrence": 0}
        self.record(Kind.FAULT_PLANNED, fault=fault, kind=kind, target=TARGET, at={"step": 30})
        self.record(Kind.FAULT_INJECTED, **about, kind=kind, target=TARGET, step=30)
        if landed:
            self.record(Kind.FAULT_LANDED, **about, witness="kernel", evidence={"signal": 9})
        else:
            self.record(Kind.FAULT_FAILED, **about, reason="the process was gone already")
        self.record(Kind.FAULT_HEALED, **about, how="nothing to undo")

    def killed(self) -> None:
        self.hit()
        self.ended()
        self.exit("w1", signum=signal.SIGKILL)

    def ended(self) -> None:
        """The process is gone, and nobody has said that a rank failed."""
        self.record(
            Kind.PROCESS_EXITED,
            process="w1",
            pid=1,
            exit_code=None,
            signal=9,
            expected=False,
            last_seq=None,
        )

    def end(self, outcome: str = "completed", reason: str = "") -> Log:
        self.now += S
        self.record(
            Kind.RUN_FINISHED,
            outcome=outcome,
            reason=reason,
            committed_step=self.observer.committed,
        )
        return make_log(
            [ActorLog(actor=ORCHESTRATOR, events=tuple(self.events), problems=(), ended=True)]
        )


def control() -> Log:
    """A job without a fault."""
    fleet = Fleet()
    fleet.reach(1, STEPS)
    return fleet.end()


def trial(log: Log, *, beside: int = 0, ideal: Log | None = None, bare: Log | None = None) -> Trial:
    """As a comparison judges it."""
    bare = bare or control()
    named = {"label": "x", "family": "kill", "run": "r", "control_run": "c", "verdict": "pass"}
    return trial_of(log, bare, ideal or bare, beside=beside, seed=1, reproduce="", **named)


Act = Callable[[Fleet], None]
ONE = (0,)


def reach(first: int, last: int | None = None, **more: Any) -> Act:
    return lambda fleet: fleet.reach(first, last or first, **more)


def later(seconds: float) -> Act:
    return lambda fleet: setattr(fleet, "now", fleet.now + round(seconds * S))


def hit(kind: str = "process-kill", **more: Any) -> Act:
    return lambda fleet: fleet.hit(kind, **more)


def found(*processes: str) -> Act:
    return lambda fleet: fleet.found(*processes)


def ranks(**by_number: str) -> Act:
    known = {int(number[1:]): process for number, process in by_number.items()}
    return lambda fleet: fleet.observer.on_ranks(known, fleet.now)


def ends(process: str, **how: int) -> Act:
    return lambda fleet: fleet.exit(process, **how)


STOOD_STILL = "no failure was seen from outside; its recovery is the time that training stood still"
KILLED: tuple[Act, ...] = (reach(1, 30), Fleet.killed)
REPLACED: tuple[Act, ...] = (*KILLED, found("w0", "w2"))


def played(*acts: Act) -> Fleet:
    fleet = Fleet()
    for act in acts:
        act(fleet)
    return fleet


def case(name: str, acts: tuple[Act, ...], expected: dict[str, object], witness: str = "") -> Any:
    return pytest.param(acts, expected, witness, id=name)


@pytest.mark.parametrize(
    ("acts", "expected", "witness"),
    [
        case(
            "a rank replaced, detected by its replacement, not by the death that the fault was",
            (*REPLACED, reach(31, STEPS)),
            {
                "outcome": "recovered",
                "steps_lost": 0,
                "samples_lost": 0,
                "recovery": 1.1,
                "detection": 1.0,
            },
            "rank 1",
        ),
        case(
            "half of the ranks report the step before the spare is seen, the others after it",
            (
                *KILLED,
                later(0.5),
                reach(31, ranks=ONE),
                ranks(r0="w0", r1="w2"),
                later(-0.05),
                reach(31, ranks=(1,)),
                reach(32, STEPS),
            ),
            {"outcome": "recovered", "steps_lost": 0, "samples_lost": 0, "recovery": 0.6},
        ),
        case(
            "a step that only the lost rank had finished",
            (
                reach(1, 29),
                reach(30, ranks=(1,)),
                Fleet.killed,
                found("w0", "w2"),
                reach(30, STEPS),
            ),
            {"outcome": "recovered", "steps_lost": 0, "samples_lost": 0},
        ),
        case(
            "a step in flight that still completes is no recovery",
            (
                *KILLED,
                reach(31, ranks=ONE),
                later(1.0),
                reach(32, ranks=ONE),
                found("w0", "w2"),
                reach(33, STEPS),
            ),
            {"recovery": 1.2},
        ),
        case(
            "the clock is not stopped between two standstills",
            (*KILLED, later(0.5), reach(31, ranks=ONE), later(0.4), reach(32, STEPS, ranks=ONE)),
            {"recovery": 1.1},
        ),
        case(
            "steps done again, until the first new step",
            (*KILLED, found("w2", "w3"), reach(21, STEPS)),
            {"outcome": "rolled back", "steps_lost": 10, "recovery": 2.1},
            "10 steps from 21 to 30 were done again",
        ),
        case(
            "a replacement found late: the last report of step 38 came after that",
            (
                *KILLED,
                found("w0"),
                reach(31, 35, ranks=ONE, share=8),
                reach(36, 38, ranks=ONE),
                found("w0", "w2"),
                reach(38, ranks=(1,)),
                reach(39, STEPS),
            ),
            {"outcome": "recovered", "steps_lost": 0},
        ),
        case(
            "all begin again",
            (*KILLED, found("w2", "w3"), reach(1, STEPS)),
            {"outcome": "started over", "recovery": math.inf},
            "step 30 had been reached",
        ),
        case(
            "one rank begins again beside the others",
            (
                *REPLACED,
                reach(31, 40, ranks=ONE),
                reach(1, ranks=(1,)),
                reach(41, STEPS, ranks=ONE),
            ),
            {"outcome": "started over"},
            "step 1",
        ),
        case(
            "a rank ends as the others do the last step, for which they had its gradients",
            (reach(1, STEPS - 1), hit(), Fleet.ended, reach(STEPS, ranks=ONE)),
            {"samples_lost": 0},
        ),
        case(
            "fewer ranks to the end: all after the step in which it was lost",
            (*KILLED, reach(31, STEPS, ranks=ONE)),
            {"outcome": "degraded", "samples_lost": (STEPS - 31) * 4},
            "1 of 2 ranks",
        ),
        case(
            "fewer ranks that share the whole batch",
            (*KILLED, reach(31, STEPS, ranks=ONE, share=8)),
            {"outcome": "degraded", "samples_lost": 0},
        ),
        # their median would else be that of slower recoveries alone, and a sweep would call it
        # immediate
        *(
            case(
                f"the others go on without a rank after {stop} s",
                (reach(1, 30), hit("rank-hang"), later(stop), reach(31, STEPS, ranks=ONE)),
                {"outcome": "degraded", "recovery": 0.1 + stop, "full_rate": 0.1 + stop},
            )
            for stop in (0.0, 0.05)
        ),
        *(
            case(
                f"losses of {loss} stay",
                (reach(1, 30), hit("tensor-corrupt"), reach(31, STEPS, loss=loss)),
                {
                    "outcome": "committed bad values",
                    "recovery": math.inf,
                    "detection": math.inf,
                    "goodput": 0.0,
                },
                "step 31 was reported with loss",
            )
            for loss in (math.nan, math.inf)
        ),
        case(
            "bad losses that were taken back",
            (
                reach(1, 30),
                hit("tensor-corrupt"),
                reach(31, 33, loss=math.nan),
                ends("w0", code=1),
                found("w2", "w3"),
                reach(21, STEPS),
            ),
            {"outcome": "rolled back", "steps_lost": 13},
        ),
        case(
            "a restored state that is not the saved one shows in the loss",
            (
                reach(1, 30),
                hit("checkpoint-corrupt", fault="rot"),
                Fleet.killed,
                found("w2", "w3"),
                *(reach(step, loss=9.0 / step) for step in range(21, STEPS + 1)),
            ),
            {"outcome": "committed bad values"},
            "median of 10 steps 1.8 times as large",
        ),
        case(
            "what nobody noticed and did not stop training",
            (reach(1, 30), hit("process-stop"), reach(31, STEPS)),
            {"outcome": "masked", "recovery": None, "note": ""},
        ),
        case(
            "a stop belongs to the fault before it",
            (
                reach(1, 26),
                hit("checkpoint-corrupt", fault="rot"),
                reach(27, 30),
                Fleet.killed,
                found("w2", "w3"),
                reach(21, STEPS),
            ),
            {"outcome": "rolled back", "recovery": 2.1},
        ),
        case(
            "a stop that was too short to be a hang",
            (reach(1, 30), hit("process-stop"), lambda fleet: fleet.wait(2.0), reach(31, STEPS)),
            {
                "outcome": "recovered",
                "recovery": 2.1,
                "note": STOOD_STILL,
            },
        ),
        case(
            "a fault that did not land",
            (reach(1, 30), hit(landed=False), reach(31, STEPS)),
            {"outcome": "not landed", "recovery": None},
            "the process was gone already",
        ),
        case(
            "rank 0 dies after an all-reduce and before its report; rank 1 goes on as rank 0",
            (
                reach(1, 29),
                reach(30, ranks=(1,)),
                hit(),
                ends("w0", signum=signal.SIGKILL),
                reach(31, STEPS, ranks=ONE, share=BATCH),
            ),
            {"samples_lost": 0},
        ),
    ],
)
def test_a_job_has_one_outcome_with_its_witness(
    acts: tuple[Act, ...], expected: dict[str, object], witness: str
) -> None:
    made = trial(played(*acts).end())
    for name, value in expected.items():
        known = pytest.approx(value, abs=0.03) if isinstance(value, float) else value
        assert getattr(made, name) == known, name
    assert witness in made.witness
    if made.phases and made.recovery is not None:
        assert sum(span.seconds for span in made.phases) == pytest.approx(made.recovery)
    assert Trial.model_validate_json(made.model_dump_json()).outcome == made.outcome


@pytest.mark.parametrize(
    ("outcome", "reason", "expected"),
    [
        (
            "gave-up",
            "the command ended with exit code 1 at step 30; its last lines:\n    | Error: x",
            "all ranks died",
        ),
        ("timed-out", "no step for 20 s (workload.progress_deadline) after step 30", "hung"),
        ("halted", "no_committed_step_for > 50s", "hung"),
    ],
)
def test_a_job_that_does_not_come_to_its_end_never_recovers(
    outcome: str, reason: str, expected: str
) -> None:
    made = trial(played(*KILLED).end(outcome, reason))
    assert (made.outcome, made.recovery) == (expected, math.inf)
    assert (made.goodput, made.ettr) == (0.0, 0.0), "of no use to anybody"
    assert "last step 30 of 60" in made.witness
    assert reason.splitlines()[-1].strip(" |") in made.witness
    assert made.samples_lost is None


def test_a_job_that_never_began_says_how_it_ended() -> None:
    reason = "the command ended with exit code 1 before any progress was seen"
    made = trial(Fleet().end("gave-up", reason))
    assert made.outcome == "not landed"
    assert "before any progress" in made.witness


def test_a_control_that_failed_is_said() -> None:
    broken = played(reach(1, 20)).end("gave-up", "exit code 1")
    made = trial(played(reach(1, STEPS)).end(), bare=broken)
    assert "its control did not get to its end" in made.note


def test_the_effective_training_time_of_a_trial_is_the_time_in_its_steps() -> None:
    made, alone = trial(played(*REPLACED, reach(31, STEPS)).end()), trial(control())
    assert made.step_time is not None and made.ettr is not None
    assert made.ettr == pytest.approx(STEPS * made.step_time / made.wall, rel=0.05)
    assert alone.ettr is not None and alone.ettr > made.ettr


def test_spares_are_paid_for() -> None:
    log = played(*REPLACED, reach(31, STEPS)).end()
    alone, spared = trial(log), trial(log, beside=2)
    assert alone.goodput is not None and spared.goodput is not None
    assert spared.goodput == pytest.approx(alone.goodput / 2)
    assert (alone.ranks, spared.ranks) == (2, 4)
    useful = spared.wall * spared.goodput + sum(spared.badput.values())
    assert useful == pytest.approx(spared.wall)
    assert spared.badput["spare_idle"] == pytest.approx(spared.wall / 2)


def test_goodput_is_against_the_bare_loop_so_that_a_slow_stack_pays_for_it() -> None:
    fleet = Fleet()
    for step in range(1, STEPS + 1):
        fleet.now += S // 10
        fleet.reach(step, step)
        if step == 30:
            fleet.hit("process-stop")
    log = fleet.end()
    of_bare, of_own = trial(log).goodput, trial(log, ideal=log).goodput
    assert of_bare is not None and of_own is not None
    assert of_bare < of_own and of_bare == pytest.approx(of_own, rel=0.6)


def test_who_does_not_report_samples_has_none_counted() -> None:
    fleet = played(*REPLACED, reach(31, STEPS))
    for event in fleet.events:
        if event.kind is Kind.STEP_REPORTED:
            event.data["samples"] = None
    made = trial(fleet.end())
    assert made.samples_lost is None and "do not report their samples" in made.note
