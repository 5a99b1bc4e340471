"""What a comparison says became of a job: one class each, with its witness, from logs of commands
seen from outside.
"""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest

from tests.harness.script.test_script_observer import Job, S
from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Kind, Log, make_log
from trainchaos.harness.compare.result.model import Trial
from trainchaos.harness.compare.result.trials import TrialSource, trial_of
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


def trial(log: Log, *, beside: int = 0, ideal: Log | None = None) -> Trial:
    """As a comparison judges it."""
    bare = control()
    return trial_of(
        TrialSource(
            label="x",
            family="kill",
            seed=1,
            log=log,
            control=bare,
            ideal=ideal or bare,
            run="r",
            control_run="c",
            verdict="pass",
            reproduce="",
            beside=beside,
        )
    )


def test_a_rank_replaced_without_a_step_done_again_is_recovered() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w0", "w2")
    fleet.reach(31, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.steps_lost, made.samples_lost) == ("recovered", 0, 0)
    assert made.recovery == pytest.approx(1.1, abs=0.02)
    assert made.detection == pytest.approx(1.0, abs=0.02), (
        "its replacement, not the death that the fault was"
    )
    assert sum(span.seconds for span in made.phases) == pytest.approx(made.recovery)
    assert "rank 1" in made.witness


def test_the_effective_training_time_of_a_trial_is_the_time_in_its_steps() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w0", "w2")
    fleet.reach(31, STEPS)
    made, alone = trial(fleet.end()), trial(control())
    assert made.step_time is not None and made.ettr is not None
    assert made.ettr == pytest.approx(STEPS * made.step_time / made.wall, rel=0.05)
    lost = Fleet()
    lost.reach(1, 30)
    lost.killed()
    assert trial(lost.end("gave-up", "exit code 1")).ettr == 0.0, "of no use to anybody"
    assert alone.ettr is not None and alone.ettr > made.ettr


def test_a_spare_that_joins_in_the_middle_of_a_step_redoes_nothing() -> None:
    """Half of the ranks report the step before the spare is seen, the others after it."""
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.now += S // 2
    fleet.reach(31, 31, ranks=(0,))
    fleet.observer.on_ranks({0: "w0", 1: "w2"}, fleet.now)
    fleet.now -= S // 20
    fleet.reach(31, 31, ranks=(1,))
    fleet.reach(32, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.steps_lost, made.samples_lost) == ("recovered", 0, 0)
    assert made.recovery == pytest.approx(0.6, abs=0.02), "the step that ended the standstill"
    assert sum(span.seconds for span in made.phases) == pytest.approx(made.recovery)


def test_a_step_that_only_the_lost_rank_had_finished_is_not_lost() -> None:
    fleet = Fleet()
    fleet.reach(1, 29)
    fleet.reach(30, 30, ranks=(1,))
    fleet.killed()
    fleet.found("w0", "w2")
    fleet.reach(30, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.steps_lost, made.samples_lost) == ("recovered", 0, 0)


def test_a_step_in_flight_that_still_completes_is_no_recovery() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.reach(31, 31, ranks=(0,))
    fleet.now += S
    fleet.reach(32, 32, ranks=(0,))
    fleet.found("w0", "w2")
    fleet.reach(33, STEPS)
    made = trial(fleet.end())
    assert made.recovery == pytest.approx(1.2, abs=0.02), "until step 32"


def test_the_clock_is_not_stopped_between_two_standstills() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.now += S // 2
    fleet.reach(31, 31, ranks=(0,))
    fleet.now += S * 4 // 10
    fleet.reach(32, STEPS, ranks=(0,))
    assert trial(fleet.end()).recovery == pytest.approx(1.1, abs=0.02)


def test_a_control_that_failed_is_said() -> None:
    fleet = Fleet()
    fleet.reach(1, STEPS)
    broken = Fleet()
    broken.reach(1, 20)
    made = trial_of(
        TrialSource(
            label="x",
            family="kill",
            seed=1,
            log=fleet.end(),
            control=broken.end("gave-up", "exit code 1"),
            ideal=None,
            run="r",
            control_run="c",
            verdict="pass",
            reproduce="",
        )
    )
    assert "its control did not get to its end" in made.note


def test_steps_done_again_are_rolled_back() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w2", "w3")
    fleet.reach(21, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.steps_lost) == ("rolled back", 10)
    assert "10 steps from 21 to 30 were done again" in made.witness
    assert made.recovery == pytest.approx(2.1, abs=0.02), (
        "until the first new step, the redone ones included"
    )
    assert made.goodput is not None and made.control_goodput is not None
    assert 0 < made.goodput < made.control_goodput <= 1


def test_the_rest_of_a_step_in_which_a_replacement_is_found_late_is_not_done_again() -> None:
    """It joined some steps before it was seen from outside: the last report of step 38 came after
    that.
    """
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w0")
    fleet.reach(31, 35, ranks=(0,), share=8)
    fleet.reach(36, 38, ranks=(0,))
    fleet.found("w0", "w2")
    fleet.reach(38, 38, ranks=(1,))
    fleet.reach(39, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.steps_lost) == ("recovered", 0)


def test_a_job_that_begins_again_is_started_over_and_never_recovered() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w2", "w3")
    fleet.reach(1, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.recovery) == ("started over", math.inf)
    assert "step 30 had been reached" in made.witness


def test_one_rank_that_begins_again_beside_the_others_is_started_over_too() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w0", "w2")
    fleet.reach(31, 40, ranks=(0,))
    fleet.reach(1, 1, ranks=(1,))
    fleet.reach(41, STEPS, ranks=(0,))
    made = trial(fleet.end())
    assert made.outcome == "started over"
    assert "step 1" in made.witness


def test_a_rank_that_ends_as_the_others_do_the_last_step_loses_no_sample() -> None:
    """The job is over before its failure would be declared; they had its gradients."""
    fleet = Fleet()
    fleet.reach(1, STEPS - 1)
    fleet.hit()
    fleet.ended()
    fleet.reach(STEPS, STEPS, ranks=(0,))
    assert trial(fleet.end()).samples_lost == 0


def test_fewer_ranks_to_the_end_are_degraded_and_their_samples_lost() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.reach(31, STEPS, ranks=(0,))
    made = trial(fleet.end())
    assert made.outcome == "degraded"
    assert "1 of 2 ranks" in made.witness
    assert made.samples_lost == (STEPS - 31) * 4, "all after the step in which it was lost"


@pytest.mark.parametrize("stop", [0.0, 0.05])
def test_a_job_that_goes_on_at_once_without_a_rank_has_a_recovery_time_as_every_other_has(
    stop: float,
) -> None:
    """Its median would else be that of its slower recoveries alone, and a sweep would call it
    immediate.
    """
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.hit("rank-hang")
    fleet.now += round(stop * S)
    fleet.reach(31, STEPS, ranks=(0,))
    made = trial(fleet.end())
    assert made.outcome == "degraded"
    assert made.recovery == pytest.approx(0.1 + stop, abs=0.02), (
        "to the first step that the others did without it"
    )
    assert made.full_rate is not None
    assert made.full_rate >= made.recovery


def test_fewer_ranks_that_share_the_whole_batch_lose_no_sample() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.reach(31, STEPS, ranks=(0,), share=8)
    made = trial(fleet.end())
    assert (made.outcome, made.samples_lost) == ("degraded", 0)


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
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    made = trial(fleet.end(outcome, reason))
    assert (made.outcome, made.recovery, made.goodput) == (expected, math.inf, 0.0)
    assert "last step 30 of 60" in made.witness
    assert reason.splitlines()[-1].strip(" |") in made.witness
    assert made.samples_lost is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_no_numbers_and_stay_are_committed_bad_values(loss: float) -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.hit("tensor-corrupt")
    fleet.reach(31, STEPS, loss=loss)
    made = trial(fleet.end())
    assert (made.outcome, made.recovery) == ("committed bad values", math.inf)
    assert "step 31 was reported with loss" in made.witness
    assert (made.detection, made.goodput) == (math.inf, 0.0)
    assert Trial.model_validate_json(made.model_dump_json()).outcome == made.outcome


def test_bad_losses_that_were_taken_back_are_no_harm() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.hit("tensor-corrupt")
    fleet.reach(31, 33, loss=math.nan)
    fleet.exit("w0", code=1)
    fleet.found("w2", "w3")
    fleet.reach(21, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.steps_lost) == ("rolled back", 13)


def test_a_restored_state_that_is_not_the_saved_one_shows_in_the_loss() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.hit("checkpoint-corrupt", fault="rot")
    fleet.killed()
    fleet.found("w2", "w3")
    for step in range(21, STEPS + 1):
        fleet.reach(step, step, loss=9.0 / step)
    made = trial(fleet.end())
    assert made.outcome == "committed bad values"
    assert "median of 10 steps 1.8 times as large" in made.witness


def test_what_nobody_noticed_and_did_not_stop_training_is_masked() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.hit("process-stop")
    fleet.reach(31, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.recovery, made.note) == ("masked", None, "")


def test_a_stop_belongs_to_the_fault_before_it() -> None:
    fleet = Fleet()
    fleet.reach(1, 26)
    fleet.hit("checkpoint-corrupt", fault="rot")
    fleet.reach(27, 30)
    fleet.killed()
    fleet.found("w2", "w3")
    fleet.reach(21, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.recovery) == ("rolled back", pytest.approx(2.1, abs=0.02))


def test_a_stop_that_was_too_short_to_be_a_hang_is_measured_all_the_same() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.hit("process-stop")
    fleet.wait(2.0)
    fleet.reach(31, STEPS)
    made = trial(fleet.end())
    assert made.outcome == "recovered"
    assert made.recovery == pytest.approx(2.1, abs=0.05)
    assert "stood still" in made.note


def test_a_fault_that_did_not_land_says_nothing() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.hit(landed=False)
    fleet.reach(31, STEPS)
    made = trial(fleet.end())
    assert (made.outcome, made.recovery) == ("not landed", None)
    assert "the process was gone already" in made.witness


def test_a_job_that_never_began_says_how_it_ended() -> None:
    fleet = Fleet()
    made = trial(
        fleet.end("gave-up", "the command ended with exit code 1 before any progress was seen")
    )
    assert made.outcome == "not landed"
    assert "before any progress" in made.witness


def test_spares_are_paid_for() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w0", "w2")
    fleet.reach(31, STEPS)
    log = fleet.end()
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
    assert trial(log).goodput == pytest.approx(trial(log, ideal=log).goodput or 0.0, rel=0.6)
    assert (trial(log).goodput or 1.0) < (trial(log, ideal=log).goodput or 0.0)


def test_a_share_is_lost_by_whoever_had_the_number_then() -> None:
    """Rank 0 dies after the all-reduce of step 30 and before its report; rank 1 goes on as rank 0
    with all samples.
    """
    fleet = Fleet()
    fleet.reach(1, 29)
    fleet.reach(30, 30, ranks=(1,))
    fleet.hit()
    fleet.exit("w0", signum=signal.SIGKILL)
    fleet.reach(31, STEPS, ranks=(0,), share=BATCH)
    assert trial(fleet.end()).samples_lost == 0


def test_who_does_not_report_samples_has_none_counted() -> None:
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w0", "w2")
    fleet.reach(31, STEPS)
    for event in fleet.events:
        if event.kind is Kind.STEP_REPORTED:
            event.data["samples"] = None
    made = trial(fleet.end())
    assert made.samples_lost is None and "do not report their samples" in made.note
