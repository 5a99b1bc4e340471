"""Retention: the newest checkpoint that replicas agreed on is never lost, and a doubtful one never
restored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recovery.checkpoint.test_checkpoints import flip, put
from tests.support.arms import judged
from tests.support.search.simulate import Played, cell_of, evidence, play
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.checkpoint.files import checkpoints, retention
from trainchaos.recovery.checkpoint.files.checkpoints import MANIFEST, Checkpoint, Hand
from trainchaos.recovery.checkpoint.files.retention import Agreement

STRATEGIES = ["checkpoint-restart", "drop-replica", "hot-spare"]


def steps(directory: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.newest_first(directory)]


def saved(directory: Path, *numbers: int, **facts: Any) -> list[Checkpoint]:
    return [put(directory, step, **facts) for step in numbers]


# ---- what stays


def test_the_newest_that_was_agreed_on_stays_however_old(tmp_path: Path) -> None:
    saved(tmp_path, 40, 50, 60, 70, 80, 90)
    gone = retention.prune(tmp_path, 3, agreed=Agreement(step=50, every=50))
    assert [c.step for c in gone.gone] == [60, 40]
    assert steps(tmp_path) == [90, 80, 70, 50]


def test_one_kept_is_two_until_the_newest_is_agreed_on(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    retention.prune(tmp_path, 1, agreed=Agreement(step=20))
    assert steps(tmp_path) == [30, 20]
    retention.prune(tmp_path, 1, agreed=Agreement(step=30))
    assert steps(tmp_path) == [30]


@pytest.mark.parametrize("every", [None, 10, 40])
@pytest.mark.parametrize("lag", [0, 15, 35, 95])
def test_word_of_an_agreement_may_come_late(tmp_path: Path, lag: int, every: int | None) -> None:
    """The rank that saves hears of an agreement ``lag`` steps after it: one that is agreed on is
    always there, and never older than two comparisons and twice that time.
    """
    compared = [step for step in range(10, 400) if step % (every or 10) == 0]
    for step in range(10, 400, 10):
        put(tmp_path, step)
        known = max((at for at in compared if at + lag <= step), default=0)
        retention.prune(tmp_path, 1, agreed=Agreement(step=known, every=every))
        left = [at for at in steps(tmp_path) if at <= known]
        assert left or not known, f"step {step}, agreed at {known}: {steps(tmp_path)}"
        assert not left or left[0] >= step - 2 * lag - 2 * (every or 10), (
            f"step {step}: {steps(tmp_path)}"
        )
        assert len(steps(tmp_path)) <= 3


def test_nothing_goes_while_nobody_knows_of_an_agreement(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    assert retention.prune(tmp_path, 1, agreed=Agreement(step=-1)).gone == []
    assert steps(tmp_path) == [30, 20, 10]


def test_a_later_generation_comes_first_whatever_its_step(tmp_path: Path) -> None:
    saved(tmp_path, 40, 50, 60, 70, 80, generation=1, since=0)
    saved(tmp_path, 55, generation=2, since=50)
    assert steps(tmp_path) == [55, 50, 40, 80, 70, 60], (
        "what generation 1 saved beyond 50 was abandoned"
    )
    retention.prune(tmp_path, 2)
    assert steps(tmp_path) == [55, 50]


def test_a_damaged_manifest_hides_no_other(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, generation=1, since=0)
    (last,) = saved(tmp_path, 30, generation=2, since=20)
    flip(last.path / MANIFEST, 0)
    refused: list[str] = []
    found = checkpoints.newest_good(tmp_path, lambda bad, why: refused.append(bad.name))
    assert (found and found[0].step, refused) == (20, ["step-00000030"])


def test_one_that_was_refused_takes_no_place(tmp_path: Path) -> None:
    made = saved(tmp_path, 10, 20, 30, 40)
    checkpoints.note_refused(made[3], "a bit flipped")
    retention.prune(tmp_path, 2)
    assert steps(tmp_path) == [30, 20]
    assert checkpoints.verify(made[2]), "a note changes nothing about what verifies"


def test_what_was_recorded_as_written_is_not_read_again(tmp_path: Path) -> None:
    made = saved(tmp_path, 10, 20, 30)
    touched: list[int] = []
    watched = Hand(progress=lambda: touched.append(1))
    flip(made[2].path / "a.bin", 0)
    deleted = sum(1 + len(list(one.path.iterdir())) for one in made[:2])
    retention.prune(tmp_path, 1, recorded={made[2].name}, hand=watched)
    assert (steps(tmp_path), len(touched)) == ([30], deleted), "its writer vouches for it"
    saved(tmp_path, 40)
    retention.prune(tmp_path, 1, recorded={made[2].name}, hand=watched)
    assert steps(tmp_path) == [40] and touched, "what has to be read shows that it goes on"


def test_what_was_recorded_and_is_torn_is_not_counted_on(tmp_path: Path) -> None:
    made = saved(tmp_path, 10, 20)
    (made[1].path / "a.bin").write_bytes(b"short")
    assert retention.prune(tmp_path, 1, recorded={made[1].name}).gone == []


# ---- what is set aside


def test_what_is_in_doubt_is_renamed_and_no_longer_found(tmp_path: Path) -> None:
    saved(tmp_path, 50, 60, 70, generation=3)
    done = retention.set_aside(tmp_path, lambda c: c.step > 50)
    assert ([c.step for c in done.moved], done.gone_aside) == ([60, 70], [])
    assert steps(tmp_path) == [50]
    assert retention.aside_in(tmp_path) == [
        "doubtful-step-00000060-0-3",
        "doubtful-step-00000070-0-3",
    ]
    assert (tmp_path / "doubtful-step-00000060-0-3" / "a.bin").exists()


def test_few_stay_set_aside_the_first_of_the_latest(tmp_path: Path) -> None:
    for generation in (1, 2):
        saved(tmp_path, 50, 60, 70, 80, 90, generation=generation)
        done = retention.set_aside(tmp_path, lambda c: c.step > 50)
        assert [c.step for c in done.moved] == [60, 70, 80, 90]
    assert retention.aside_in(tmp_path) == [
        f"doubtful-step-000000{step}-0-2" for step in (60, 70, 80)
    ]
    gone = sorted(done.gone_aside)
    assert gone[-1] == "doubtful-step-00000090-0-2" and len(gone) == 4


def test_one_that_cannot_be_renamed_stays_whole(tmp_path: Path) -> None:
    saved(tmp_path, 50, 60)

    def broken(what: str, path: Path) -> None:
        raise OSError(30, "Read-only file system")

    done = retention.set_aside(tmp_path, lambda c: c.step > 50, hand=Hand(disk=broken))
    assert (done.moved, steps(tmp_path)) == ([], [60, 50]) and "Read-only" in done.kept[0][1]


# ---- whole arms


def desync(step: int, **more: Any) -> dict[str, Any]:
    """One value of one rank changes at a step."""
    fault = {"id": "bad", "kind": "replica-desync", "target": {"rank": 1}, "at": {"step": step}}
    return {**fault, **more}


def arm(cell: Any, root: Path) -> tuple[Played, dict[str, str]]:
    """A faulted arm, and what did not pass."""
    faulted, control = (play(cell, root, seed=3, arm=arm) for arm in ("faulted", "control"))
    findings = judged(evidence(faulted, control))
    return faulted, {name: f.witness for name, f in findings.items() if f.verdict != "pass"}


def of(played: Played, kind: Kind) -> list[Event]:
    return list(played.log.of(kind))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", STRATEGIES)
@pytest.mark.parametrize(
    ("keep", "verify_every", "back"), [(3, 50, 50), (1, None, 80), (1, 50, 50)]
)
def test_a_value_changed_long_before_it_is_noticed_costs_no_more_than_since_the_agreement(
    recovery: str, keep: int, verify_every: int | None, back: int, memory: Path
) -> None:
    cell = cell_of(recovery, [desync(85)], ranks=2, steps=120, keep=keep, verify_every=verify_every)
    faulted, problems = arm(cell, memory)
    assert faulted.outcome == "completed"
    # Digests of the log show at step 90 already what is found at step 100, and everything since 50
    # is done again.
    assert problems == {}
    ready = of(faulted, Kind.GENERATION_READY)[1]
    assert (ready.step, ready.data["checkpoint"]) == (back, f"step-{back:08d}")
    (failed,) = [e for e in of(faulted, Kind.FAILURE_DETECTED) if e.data["cause"] == "diverged"]
    doubtful = [e.step or 0 for e in of(faulted, Kind.CHECKPOINT_SET_ASIDE)]
    assert all(back < step <= (failed.step or 0) for step in doubtful)
    # checkpoint-restart kills the rank that saves before it has
    assert doubtful or (recovery, verify_every) == ("checkpoint-restart", None)
    assert f"step-{back:08d}" not in [
        e.data["checkpoint"]
        for e in of(faulted, Kind.CHECKPOINT_DELETED)
        if e.time_ns < ready.time_ns
    ]


@pytest.mark.parametrize("recovery", STRATEGIES)
def test_with_nothing_left_to_restore_the_job_ends_and_says_so(recovery: str, memory: Path) -> None:
    """Every checkpoint there was is damaged, and then every rank is lost."""
    faults = [
        {
            "id": "rot",
            "kind": "checkpoint-corrupt",
            "params": {"mode": "truncate"},
            "target": {"checkpoint": "latest"},
            "at": {"step": 25},
        },
        {"id": "all", "kind": "process-kill", "target": {"select": "all"}, "at": {"step": 27}},
    ]
    cell = cell_of(recovery, faults, keep=1)
    faulted = play(cell, memory, seed=3)
    (finished,) = of(faulted, Kind.RUN_FINISHED)
    assert faulted.outcome == "gave-up", finished.data
    assert finished.data["reason"].startswith("nothing is left to restore")
    assert max(event.step or 0 for event in of(faulted, Kind.STEP_COMMITTED)) <= 27
