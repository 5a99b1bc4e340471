"""A comparison judges the record of each arm again: what cannot be what happened counts for
nothing, and is named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.compare.test_compare_rules import comparison, run
from tests.harness.judge.test_mutations import CORPUS
from tests.mutations.tape import FAIL, Mutation, Tape
from tests.mutations.trials import BASE, NOT_REFUTED, trial
from trainchaos.chaos.errors import DamagedRun
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.compare.plan.directory import Directory
from trainchaos.harness.compare.result.gather import gather
from trainchaos.harness.compare.result.records import CONTRADICTS
from trainchaos.reports.compare.pages import markdown

pytestmark = pytest.mark.usefixtures("names_at_once")
__all__ = ["run"]
OURS = [mutation for mutation in CORPUS if mutation.base == BASE]
REFUTED = [
    one
    for one in OURS
    if one.name not in NOT_REFUTED and any(one.seen.get(name) == FAIL for name in CONTRADICTS)
]


def test_the_unchanged_arms_are_a_trial() -> None:
    made = trial()
    assert (made.outcome, made.verdict, made.note) == ("rolled back", "pass", "")


@pytest.mark.parametrize("mutation", REFUTED, ids=repr)
def test_a_record_that_contradicts_itself_or_its_plan_counts_for_nothing(
    mutation: Mutation,
) -> None:
    made = trial(mutation)
    assert made.outcome == "refuted" and made.witness.partition(":")[0] in CONTRADICTS
    assert (made.recovery, made.goodput, made.step_time, made.samples_lost, made.losses) == (
        *[None] * 4,
        (),
    )


@pytest.mark.parametrize("mutation", [one for one in OURS if one not in REFUTED], ids=repr)
def test_what_else_is_wrong_shows_in_the_trial(mutation: Mutation) -> None:
    made = trial(mutation)
    if mutation.name not in NOT_REFUTED:
        assert made.verdict != "pass"
    for field, value in NOT_REFUTED.get(mutation.name, {}).items():
        said = getattr(made, field)
        assert said.startswith(value) if field == "note" else said == value, (field, said)
        assert made.outcome != "refuted"


@pytest.mark.long
def test_each_checker_that_refutes_is_needed() -> None:
    found = [trial(one).witness.partition(":")[0] for one in REFUTED]
    # how a command recovers is left open where its log does not show it
    assert {*found} == {*CONTRADICTS} - {"recovery-shown"} and len(found) >= 10
    assert NOT_REFUTED.keys() <= {one.name for one in OURS}


def _doubled(tape: Tape) -> None:
    for row in tape.find(Kind.STEP_REPORTED, generation=2):
        row.data["samples"] *= 2


def test_no_step_of_a_comparison_has_more_samples_than_its_batch() -> None:
    made = trial(Mutation("twice the samples", BASE, _doubled, progress=FAIL))
    assert made.outcome == "refuted"
    assert "had 16 samples, the global batch is 8" in made.witness


def _of_another_seed(directory: Directory) -> str:
    """The control says another seed, in its scenario and in its log."""
    place = next(directory.runs.glob("*control*/1"))
    resolved = place / "scenario.resolved.yaml"
    resolved.write_text(resolved.read_text().replace("seed: 7", "seed: 8"))
    for path in place.glob("events/*/*.jsonl"):
        path.write_text(path.read_text().replace('"seed":7', '"seed":8'))
    return "seed 8, planned is 7"


def _whole_of_another(directory: Directory) -> str:
    """Where the fault was lies the run without it, scenario and all."""
    (there,), (here,) = (
        list(directory.runs.glob(f"{name}/1")) for name in ("*control*", "*.family.*")
    )
    shutil.rmtree(here)
    shutil.copytree(there, here)
    return "its run is one of ours-default.control-of-family"


def _later_hit(directory: Directory) -> str:
    """The fault is said to have acted a second later than it did, so that the recovery seems
    shorter.
    """
    for path in directory.runs.glob("*.family.*/1/events/*/orchestrator.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["time_ns"] += 10**9 if line["kind"] == "fault_injected" else 0
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return "its clock runs backwards"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("change", [_of_another_seed, _whole_of_another, _later_hit])
def test_what_was_changed_after_it_was_played_is_named(
    tmp_path: Path, run: Path, change: Callable[[Directory], str]
) -> None:
    directory = comparison(tmp_path, run)
    assert gather(directory).cautions == []
    plan = directory.read_plan()
    directory.write_plan(plan.model_copy(update={"closed": True}))
    expected = change(directory)
    made = gather(directory)
    (said,) = {line for line in made.cautions if expected in line}
    assert "cannot be what happened, and counts for nothing" in said and said in made.broken
    assert expected in markdown(made)


@pytest.mark.slow
def test_a_run_whose_seal_is_broken_is_in_no_comparison(tmp_path: Path, run: Path) -> None:
    directory = comparison(tmp_path, run, sealed=True)
    made = gather(directory)
    assert made.cautions == [] and made.fidelity[0].startswith("sim: ")
    for path in directory.runs.glob("*/1/results.json"):
        path.write_text("")  # nothing is taken from there
    assert gather(directory) == made
    _later_hit(directory)
    with pytest.raises(DamagedRun, match=r"orchestrator\.jsonl was changed"):
        gather(directory)


@pytest.mark.slow
def test_of_every_stack_it_is_told_whom_it_suspects_while_nothing_fails(
    tmp_path: Path, run: Path
) -> None:
    directory = comparison(tmp_path, run)
    (told,) = gather(directory).at_rest
    alarms = told.false_alarms
    assert (told.label, told.ranks, told.spares, told.share) == ("ours default", 2, 1, 1 / 3)
    assert alarms.count == 0
    assert 0 < alarms.rank_hours < 1 and alarms.upper is not None and alarms.upper > 3
    _later_hit(directory)
    (refuted,) = gather(directory).at_rest
    assert refuted.false_alarms.rank_hours < alarms.rank_hours, (
        "what cannot be what happened counts for nothing"
    )


def test_a_run_that_does_not_say_what_it_was_to_be_is_named_and_kept(
    tmp_path: Path, run: Path
) -> None:
    directory = comparison(tmp_path, run)
    for path in directory.runs.glob("*.family.*/1/scenario.resolved.yaml"):
        path.write_text("another: version\n")
    made = gather(directory)
    assert made.trials[0].outcome == "recovered"
    assert len(made.cautions) == 1 and "does not say what it was to be" in made.cautions[0]
