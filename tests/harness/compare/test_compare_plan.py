"""What a comparison plans: stacks and settings by name, families, order, time, and what may be
resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from tests.harness.compare.planned import KILL, Plain, asked, family_file, plan_for, played
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import InfrastructureError, LogError, NoRun, ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.harness.compare.environments.stack import CommonJob, Requirements, Stack
from trainchaos.harness.compare.plan import scenario
from trainchaos.harness.compare.plan.directory import (
    ComparisonPlan,
    Directory,
    differences,
    refuse_other,
)
from trainchaos.harness.compare.plan.plan import (
    Arm,
    Family,
    arms_of,
    check_families,
    control_of,
    entrants,
    family_of,
    seconds_left,
)
from trainchaos.harness.compare.prepare import as_planned, resumed

pytestmark = pytest.mark.usefixtures("names_at_once")


class Tunable(Plain):
    """Two settings, and one fault it cannot be put under."""

    ours: ClassVar[bool] = True

    def chosen(self) -> Mapping[str, object]:
        return {"--wait": 1 if self.settings == "tuned" else 60, "where": Path("x")}

    def provisioned(self, job: CommonJob) -> int:
        return job.ranks + 1

    def not_offered(self, family: str) -> str | None:
        return "it has no checkpoints" if family == "save" else None


STACKS: dict[str, type[Stack]] = {"plain": Plain, "tunable": Tunable}


def family(
    directory: Path, name: str = "kill", *, steps: int = 30, change: tuple[str, str] = ("", "")
) -> Family:
    """A family from a file."""
    path = family_file(directory, name, steps=steps)
    path.write_text(path.read_text().replace(*change) + 'sla: {steps_lost: ["max <= 1"]}\n')
    return family_of(path, load(path, build_catalogue()).cells)


def planned(directory: Path, **more: object) -> ComparisonPlan:
    """The plan of the family ``kill``."""
    options = {"settings": "both"} | more
    return plan_for(asked(family_file(directory, "kill"), **options), STACKS)


def again(plan: ComparisonPlan) -> ComparisonPlan:
    return plan_for(as_planned(plan, skip_missing=False), STACKS)


def test_stacks_are_named_with_their_settings_and_equal_settings_are_played_once() -> None:
    labels = [one.label for one in entrants([], STACKS, "both")]
    assert labels == ["plain default", "tunable default", "tunable tuned"]
    assert [one.label for one in entrants(["tunable:tuned", "plain"], STACKS, "default")] == [
        "tunable tuned",
        "plain default",
    ]


@pytest.mark.parametrize(
    ("word", "message", "hint"),
    [
        ("tuneable", "did you mean 'tunable'?", "chaos stacks list"),
        ("tunable:turned", "did you mean 'tuned'?", "tunable:tuned"),
        ("tunable:", "unknown setting ''", "tunable:default"),
    ],
)
def test_a_wrong_stack_or_setting_is_named_with_the_nearest(
    word: str, message: str, hint: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        entrants([word], STACKS, "both")
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_every_pair_has_one_control_that_families_of_one_workload_share(tmp_path: Path) -> None:
    families = [family(tmp_path), family(tmp_path, "save"), family(tmp_path, "longer", steps=40)]
    arms = arms_of(entrants([], STACKS, "both"), families, [1, 2])
    counts = Counter((arm.label, arm.family is None) for arm in arms)
    assert counts == {
        ("plain default", False): 6,
        ("plain default", True): 4,
        ("tunable default", False): 4,
        ("tunable default", True): 4,
        ("tunable tuned", False): 4,
        ("tunable tuned", True): 4,
    }
    assert len({arm.id for arm in arms}) == len(arms)
    workloads = {one.name: one.workload for one in families}
    for arm in arms:
        control = control_of(arm, arms, workloads)
        assert (control is None) == (arm.family is None)
        if control is not None:
            assert (control.label, control.seed) == (arm.label, arm.seed)
            assert workloads[control.like] == workloads[arm.like]


def test_the_order_is_shuffled_within_a_seed_and_the_same_each_time(tmp_path: Path) -> None:
    families = [family(tmp_path), family(tmp_path, "longer", steps=40)]
    arms = arms_of(entrants([], STACKS, "both"), families, range(4))
    assert [arm.seed for arm in arms] == sorted(arm.seed for arm in arms)
    assert arms == arms_of(entrants([], STACKS, "both"), families, range(4))
    orders = {
        tuple((arm.label, arm.family, arm.like) for arm in arms if arm.seed == seed)
        for seed in range(4)
    }
    assert len(orders) == 4


def test_an_arm_is_the_faults_of_the_family_on_the_command_of_the_stack(tmp_path: Path) -> None:
    made, stack = family(tmp_path), Tunable("tuned")
    drive = stack.drive(made.job(3, tmp_path / "corpus"), Path("/usr/bin/python3"))
    arm = Arm(label="tunable tuned", family="kill", like="kill", seed=3)
    path = tmp_path / "arm.yaml"
    scenario.write(path, scenario.scenario_of(arm, made, drive, deadline_s=20))
    (cell,) = load(path, build_catalogue()).cells
    spec, (fault,) = cell.scenario.workload, cell.scenario.faults
    assert (spec.ranks, spec.steps, spec.global_batch, spec.restarts) == (2, 30, 8, 2)
    assert (spec.env["WHO"], spec.env["JOB_SEED"], spec.progress_deadline) == ("plain", "3", 20)
    assert (fault.kind, fault.at.step, fault.at.phase) == ("process-kill", 12, "any")
    assert fault.expect.outcome is None and not cell.scenario.sla
    control = arm.model_copy(update={"family": None})
    scenario.write(path, scenario.scenario_of(control, made, drive, deadline_s=20))
    (cell,) = load(path, build_catalogue()).cells
    assert not cell.scenario.faults and cell.scenario.workload == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("kind: gpt, size: nano", "kind: mlp"), "trains the workload gpt"),
        (("every: 5", "every: 30s"), "every so many steps"),
        (("size: nano", "params: {lr: 0.1}"), "its workload sets lr"),
        ((f"faults:\n  - {KILL}", "faults: []"), "it has no faults"),
        (
            ("hot-spare", "${matrix.r}\nmatrix: {r: [hot-spare, drop-replica]}"),
            "has 2 cells",
        ),
    ],
)
def test_what_cannot_be_a_family_says_why(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        family(tmp_path, change=change)
    assert message in str(caught.value)


def test_two_families_of_one_name_and_one_that_no_stack_takes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    chosen = entrants(["tunable"], STACKS, "both")
    data = ("size: nano", f"params: {{data: {__file__}}}")
    with pytest.raises(ScenarioError, match="on different data"):
        check_families([family(tmp_path), family(tmp_path, "other", change=data)], chosen)
    with pytest.raises(ScenarioError, match="two fault families are called 'kill'"):
        check_families([family(tmp_path), family(tmp_path / "b")], chosen)
    with pytest.raises(
        ScenarioError, match=r"no stack can be put under save .*it has no checkpoints"
    ):
        check_families([family(tmp_path, "save")], chosen)


def test_a_plan_says_what_each_stack_is(tmp_path: Path) -> None:
    plan = planned(tmp_path, same=True, against="tunable:tuned")
    assert plan.reference == "tunable tuned"
    assert [stack.label for stack in plan.stacks][-1] == "tunable tuned again"
    tuned = next(stack for stack in plan.stacks if stack.label == "tunable tuned")
    assert tuned.chosen == {"--wait": 1, "where": "x"}
    assert tuned.ranks_beside == 1
    assert planned(tmp_path).reference == "tunable default", "the first built-in one"
    assert ComparisonPlan.model_validate_json(plan.model_dump_json()) == plan


def test_the_reference_must_take_part(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="--against torchft"):
        planned(tmp_path, against="torchft")


def test_what_is_not_installed_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tunable, "requirements", Requirements(pins=("no-such-thing==1",)))
    with pytest.raises(ScenarioError) as caught:
        planned(tmp_path)
    assert "chaos stacks install tunable makes it" in caught.value.hint
    plan = planned(tmp_path, skip_missing=True)
    assert [stack.label for stack in plan.stacks] == ["plain default"]
    assert set(plan.skipped) == {"tunable default", "tunable tuned"}


def test_a_plan_can_be_asked_for_again(tmp_path: Path) -> None:
    plan = planned(tmp_path, same=True, price=2.5)
    other = again(plan)
    assert other.arms == plan.arms and other.stacks == plan.stacks
    refuse_other(plan, other)


@pytest.mark.slow
def test_more_is_an_extension_and_less_or_other_is_another_comparison(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    refuse_other(plan, planned(tmp_path, repeat=3))
    for other, message in (
        (planned(tmp_path, repeat=1), "it has seeds that this command leaves out: 8"),
        (
            planned(tmp_path, stacks=["plain"]),
            "it has stacks that this command leaves out: tunable default, tunable tuned",
        ),
        (planned(tmp_path, deadline=30.0), "its deadline is 20 s, not 30 s"),
    ):
        with pytest.raises(ScenarioError, match=message):
            refuse_other(plan, other)
    path, changed = tmp_path / "kill.yaml", planned(tmp_path)
    path.write_text(path.read_text().replace("step: 12", "step: 13"))
    with pytest.raises(ScenarioError, match="the fault family kill has changed"):
        refuse_other(changed, again(changed))


@pytest.mark.slow
def test_seeds_added_after_a_look_stand_in_the_report(tmp_path: Path) -> None:
    """Each interval is of one look: who looks, adds seeds and looks again has more chances to be
    wrong.
    """
    old, more = planned(tmp_path), planned(tmp_path, repeat=4)
    (said,) = resumed(old, more, accepted=False).changes
    assert said.startswith(f"extended {more.started} by {len(more.seeds) - len(old.seeds)} seeds: ")
    later = resumed(resumed(old, more, accepted=False), planned(tmp_path, repeat=4), accepted=False)
    assert later.changes == [said], "going on with it forgets no extension, and is none"


def test_another_version_of_the_code_is_not_mixed_in_unnoticed(tmp_path: Path) -> None:
    old, new = planned(tmp_path), planned(tmp_path)
    assert resumed(old, new, accepted=False).changes == []
    new = new.model_copy(
        update={"provenance": {**new.provenance, "code": "other", "boot": "later"}}
    )
    with pytest.raises(ScenarioError, match="the code of chaos"):
        resumed(old, new, accepted=False)
    changes = resumed(old, new, accepted=True).changes
    assert len(changes) == 2 and "the code of chaos" in changes[0] and "started again" in changes[1]
    assert differences(
        {"cores": 2, "versions": {"torch": "1"}}, {"cores": 4, "versions": {"torch": "2"}}
    ) == ["cores (2 then, 4 now)", "versions (torch 1 then, torch 2 now)"]


def test_what_was_played_is_known_again_also_after_a_torn_line(tmp_path: Path) -> None:
    directory, arms = Directory(tmp_path), planned(tmp_path).arms
    directory.add(played(arms[0], f"runs/{arms[0].id}", directory))
    directory.add(played(arms[1], f"runs/{arms[1].id}", directory, usable=False))
    with directory.trials.open("a") as stream:
        stream.write('{"arm": {"label"')
    assert list(directory.played()) == [arms[0]]
    directory.add(played(arms[1], f"runs/{arms[1].id}", directory))
    assert list(directory.played()) == [arms[0], arms[1]]
    (directory.runs / arms[0].id).rmdir()
    assert list(directory.played()) == [arms[1]], "a run that is gone is played again"
    directory.trials.write_text("{}\n" + directory.trials.read_text())
    with pytest.raises(LogError, match=r"trials.jsonl:1 is damaged"):
        directory.played()


def test_one_directory_is_played_by_one_at_a_time(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "x")
    another = pytest.raises(InfrastructureError, match="another chaos compare")
    with directory.held(), another, directory.held():
        pass
    with directory.held():
        pass


def test_a_directory_without_a_plan_or_with_a_damaged_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoRun):
        Directory(tmp_path).read_plan()
    Directory(tmp_path).plan.write_text("{")
    with pytest.raises(LogError, match="is damaged"):
        Directory(tmp_path).read_plan()


def test_time_is_what_arms_like_it_took_and_else_a_guess(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    seconds, guessed = seconds_left(plan.arms, {}, plan.workloads)
    assert guessed == len(plan.arms) and seconds > 0
    took = {arm: 10.0 for arm in plan.arms if arm.seed == 7}
    seconds, guessed = seconds_left(
        [arm for arm in plan.arms if arm.seed == 8], took, plan.workloads
    )
    assert (seconds, guessed) == (60.0, 0)
