"""A divergence that was found sends the job back to the last agreement, which is no loss; without
it, it is one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.mutations.tape import Tape
from tests.support.search.simulate import cell_of, evidence, play
from trainchaos.chaos.events.log import Event, Kind, read_actor
from trainchaos.harness.judge.checkers import CHECKERS, Evidence, check
from trainchaos.recovery.checkpoint.files.custody import Custody
from trainchaos.recovery.supervise.divergence import DigestBook
from trainchaos.recovery.supervise.failures import FailureBook

DESYNC: dict[str, Any] = {"id": "d", "kind": "replica-desync", "at": {"step": 35}}
ONE, TWO = {"target": {"rank": 2}}, {"target": {"select": {"count": 2}}}
ABOUT = ("no-lost-commit", "checkpoint-integrity")


def verdicts(made: Evidence) -> dict[str, str]:
    return {name: check(CHECKERS[name], made).verdict for name in ABOUT}


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, tuple[Event, ...]]]:
    """An arm that restarts from the checkpoint before a divergence."""
    cell = cell_of("checkpoint-restart", [{**DESYNC, **ONE}], verify_every=15, memory={"every": 2})
    played = play(cell, tmp_path_factory.mktemp("arm"), seed=5)
    return played, {
        path.stem: read_actor(path).events for path in sorted(played.directory.glob("*.jsonl"))
    }


def judged(tape: tuple[Any, dict[str, tuple[Event, ...]]], change: Any) -> dict[str, str]:
    played, actors = tape
    made = Tape.of(actors)
    change(made)
    return verdicts(
        Evidence(
            arm="control",
            cell=played.cell,
            log=made.log(),
            controls=(),
            exact=evidence(played, None).exact,
        )
    )


@pytest.mark.slow
def test_without_its_detection_the_step_back_is_lost_work(tape: Any) -> None:
    assert judged(tape, lambda _: None) == dict.fromkeys(ABOUT, "pass")

    def unnoticed(log: Tape) -> None:
        for row in log.find(Kind.FAILURE_DETECTED, cause="diverged"):
            row.data["cause"] = "exception"

    assert judged(tape, unnoticed)["no-lost-commit"] == "fail"


def test_a_step_back_beyond_the_last_agreement_is_lost_work(tape: Any) -> None:
    def further(log: Tape) -> None:
        for row in log.find(Kind.REPLICAS_AGREED):
            if row.step and row.step < 35:
                row.step = 44  # the agreement is said to be newer than it was

    assert judged(tape, further)["no-lost-commit"] == "fail"


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, tuple[Event, ...]]]:
    """Two replicas train apart without a supervisor, save, and one is lost before the next takes
    over.
    """
    faults = [
        {"id": "c", "kind": "coordinator-kill", "at": {"step": 11}},
        {"id": "d", "kind": "replica-desync", "at": {"step": 12}, "target": {"rank": 1}},
        {"id": "k", "kind": "process-kill", "at": {"step": 21}, "target": {"rank": 0}},
    ]
    cell = cell_of(
        "checkpoint-restart", faults, ranks=2, every=10, verify_every=1, memory={"every": 7}
    )
    played = play(cell, tmp_path_factory.mktemp("apart"), seed=5)
    return played, {path.stem: read_actor(path).events for path in played.directory.glob("*.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["", "nobody was told", "it went on with it"])
def test_a_difference_that_nobody_compared_is_no_matter_once_all_of_it_is_given_up(
    apart: Any, change: str
) -> None:
    """What they saved is in doubt, and the job goes back behind it."""
    played, actors = apart
    made = Tape.of(actors)
    told = made.find(Kind.GENERATION_STARTED, generation=2)[0]
    assert (told.data["doubts"], told.data["state"]) == ([[2, 10]], "checkpoint")
    if change == "nobody was told":
        del told.data["doubts"]
    elif change == "it went on with it":
        told.data["doubts"] = [[2, 9]]
    judged = evidence(replace(played, log=made.log()), None)
    found = check(CHECKERS["replica-equality"], judged)
    assert found.verdict == ("fail" if change else "pass"), found
    lost = check(CHECKERS["no-lost-commit"], judged)  # what was in memory was dropped
    assert lost.verdict == ("fail" if "told" in change else "pass"), lost


def test_a_doubt_without_a_reason_is_lost_work(tmp_path: Path) -> None:
    """Nothing differed, and there was a supervisor all the time."""
    fault = {"id": "k", "kind": "process-kill", "at": {"step": 25}, "target": {"rank": 0}}
    cell = cell_of("checkpoint-restart", [fault], ranks=2, every=10, memory={"every": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DigestBook, "_in_doubt", True)
        played = play(cell, tmp_path, seed=5)
    found = check(CHECKERS["no-lost-commit"], evidence(played, None))
    assert found.verdict == "fail", found


def test_a_checkpoint_in_doubt_that_is_restored_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Custody, "distrust", lambda *_, **__: None)
    played = play(
        cell_of("checkpoint-restart", [{**DESYNC, **TWO}], verify_every=15), tmp_path, seed=5
    )
    found = check(CHECKERS["checkpoint-integrity"], evidence(played, None))
    assert (
        found.verdict == "fail"
        and "restored step-00000040, which is corrupt or doubtful" in found.witness
    )


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ("refused", "fail"),
        ("refused saving", "pass"),
        ("saving refused", "fail"),
        ("refused saving failed", "fail"),
        ("refused saving aside", "fail"),
    ],
)
def test_what_is_saved_anew_and_not_acknowledged_may_be_what_goes_by_the_name_of_a_bad_one(
    tape: Any, lines: str, verdict: str
) -> None:
    kinds = {
        "refused": Kind.CHECKPOINT_REFUSED,
        "saving": Kind.CHECKPOINT_SAVING,
        "failed": Kind.CHECKPOINT_FAILED,
        "aside": Kind.CHECKPOINT_SET_ASIDE,
    }

    def planted(log: Tape) -> None:
        ready = log.find(Kind.GENERATION_READY, generation=2)[0]
        data = {"checkpoint": ready.data["checkpoint"], "reason": "", "error": ""}
        for before_ns, word in enumerate(reversed(lines.split()), start=1):
            step = ready.data["resume_step"]
            log.add(
                ready, kind=kinds[word], time_ns=ready.time_ns - before_ns, step=step, data=data
            )

    assert judged(tape, planted)["checkpoint-integrity"] == verdict


@pytest.mark.slow
def test_a_job_that_begins_anew_though_it_had_saved_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rot = {
        "id": "rot",
        "kind": "checkpoint-corrupt",
        "at": {"step": 12},
        "target": {"checkpoint": "latest"},
    }
    kill = {"id": "kill", "kind": "process-kill", "at": {"step": 14}, "target": {"rank": 2}}
    cell = cell_of("checkpoint-restart", [rot, kill], every=8)
    lost = check(CHECKERS["no-lost-commit"], evidence(play(cell, tmp_path / "ends", seed=5), None))
    monkeypatch.setattr(Custody, "nothing_left", lambda *_, **__: None)
    anew = check(CHECKERS["no-lost-commit"], evidence(play(cell, tmp_path / "anew", seed=5), None))
    assert lost.verdict == "pass"
    assert (
        anew.verdict == "fail" and "began anew, though step-00000008 had been saved" in anew.witness
    )


def test_what_is_known_to_be_rotten_is_not_left_to_agree_on(tmp_path: Path) -> None:
    rot = {
        "id": "rot",
        "kind": "checkpoint-corrupt",
        "at": {"step": 5},
        "target": {"checkpoint": "latest"},
    }
    cell = cell_of("drop-replica", [rot], every=1, keep=2, steps=12, verify_every=4)
    played = play(cell, tmp_path, seed=5)
    files = {
        path.stem: read_actor(path).events for path in sorted(played.directory.glob("*.jsonl"))
    }
    unknown = judged((played, files), lambda _: None)

    def noticed(log: Tape) -> None:
        gone = log.find(Kind.CHECKPOINT_DELETED, step=3)[0]
        data = {"checkpoint": "step-00000004", "reason": "its data are not those that were saved"}
        log.add(gone, kind=Kind.CHECKPOINT_REFUSED, time_ns=gone.time_ns - 1, step=4, data=data)

    assert unknown == dict.fromkeys(ABOUT, "pass")
    assert judged((played, files), noticed)["checkpoint-integrity"] == "fail"


@pytest.mark.parametrize(("answers", "verdict"), [(True, "pass"), (False, "fail")])
def test_a_job_that_ends_with_a_difference_that_was_named_is_seen(
    answers: bool, verdict: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor is lost when replicas were found to differ after the last step: the next one
    must not take the job for done.
    """
    if not answers:
        monkeypatch.setattr(FailureBook, "states_are_wrong", False)
    lost = {"id": "lost", "kind": "coordinator-kill", "at": {"event": "recovery_started"}}
    cell = cell_of("hot-spare", [{**DESYNC, **ONE, "at": {"step": 60}}, lost])
    played = play(cell, memory, seed=5)
    causes = [event.data["cause"] for event in played.log.of(Kind.FAILURE_DETECTED)]
    assert (played.outcome, causes) == ("completed", ["diverged"])
    assert check(CHECKERS["replica-equality"], evidence(played, None)).verdict == verdict
