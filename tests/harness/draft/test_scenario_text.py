"""Facts of a command that was seen, and the scenario that is written of them: it loads, and says
what was found and what was not.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.loading.load import LoadedScenario, load
from trainchaos.chaos.scenario.progress import PresetProgress, RegexProgress
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.draft import frameworks
from trainchaos.harness.draft.decide import decide
from trainchaos.harness.draft.draft import Drafted
from trainchaos.harness.draft.facts import Facts, command_of
from trainchaos.harness.draft.progress import propose
from trainchaos.harness.draft.text import ScenarioText, shown, write
from trainchaos.harness.draft.watching.changes import Listing, checkpoints, listing
from trainchaos.harness.draft.watching.watch import Sighting
from trainchaos.harness.script.listen.trial import lines_of, try_lines
from trainchaos.harness.script.processes.command import CommandEnded
from trainchaos.harness.script.processes.tree import FoundRank

LINES = [f"step {n}/200 loss {1 / n:.3f}" for n in range(1, 21)]
WELL = CommandEnded(exit_code=0, signal=None)


def ranks(count: int) -> dict[int, FoundRank]:
    """So many processes, each with its rank."""
    return {n: FoundRank(rank=n, world=count, pid=10 + n, started=1) for n in range(count)}


def saw(
    lines: list[str] = LINES,
    *,
    every_s: float = 0.5,
    quiet_s: float = 0.5,
    found: int = 0,
    ended: CommandEnded | None = None,
    saved: tuple[str, ...] = ("last.ckpt",),
    wrote: dict[Path, tuple[int, int]] | None = None,
) -> Sighting:
    """A sighting, as a watch makes it."""
    seen = Sighting(
        ranks=ranks(found),
        ended=ended,
        seconds=2.0 + every_s * (len(lines) - 1) + quiet_s,
        count=len(lines),
        saved=[Path("/scratch") / name for name in saved],
        after=Listing(files=wrote or {}),
    )
    seen.lines.extend((2.0 + every_s * n, line) for n, line in enumerate(lines))
    return seen


def decided(
    folder: Path, line: str, seen: Sighting, *, text: str = "", steps: int | None = None
) -> Facts:
    """The facts of a command line that was seen."""
    words, script = shlex.split(line), frameworks.ScriptText(name="train", text=text)
    command = command_of(words, {}, script, steps)
    proposal = propose(seen, command.frameworks, steps=steps)
    return decide(command, seen, proposal, folder, steps)


def loaded(folder: Path, facts: Facts) -> tuple[LoadedScenario, ScenarioText]:
    """The scenario, written and loaded."""
    written = write(facts, "train", directory=".")
    path = folder / "chaos-train.yaml"
    path.write_text(written.text)
    return load(path, build_catalogue()), written


def workload(folder: Path, facts: Facts) -> WorkloadSpec:
    """Its workload."""
    return loaded(folder, facts)[0].cells[0].scenario.workload


def missing(facts: Facts) -> list[str]:
    """What was not found."""
    return [one.name for one in facts.findings if not one.found]


def test_a_variable_with_which_a_framework_does_not_start_is_not_set(tmp_path: Path) -> None:
    facts = decided(tmp_path, "torchrun train.py", saw(found=1), text="import torchft\n")
    assert workload(tmp_path, facts).env == {}
    assert "is set" not in " ".join(one.change for one in facts.findings)


def test_a_scenario_says_all_that_was_seen(tmp_path: Path) -> None:
    facts = decided(
        tmp_path,
        "torchrun --nproc-per-node 2 --max-restarts 3 train.py --output_dir out",
        saw(found=2),
    )
    scenario, written = loaded(tmp_path, facts)
    assert not scenario.warnings and missing(facts) == []
    spec = scenario.cells[0].scenario.workload
    assert spec.command is not None and spec.command[-1] == "$CHAOS_SCRATCH/out"
    assert (spec.ranks, spec.steps, spec.restarts) == (2, 200, 0)
    assert spec.env == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    kinds = [cell.scenario.faults[0] for cell in scenario.cells]
    assert [(one.kind, one.duration) for one in kinds] == [
        ("process-kill", None),
        ("process-stop", 20.0),
        ("process-term", None),
    ]
    assert {one.at.step for one in kinds} == {107}
    # to begin again costs the 106 steps that are done once step 107 is under way, or more
    assert scenario.cells[0].scenario.sla["steps_lost"][0].check == "max <= 105"
    assert scenario.cells[0].scenario.invariants == "observable"
    rows = written.text.split("\n")
    for key, part in {
        "command": "command:",
        "ranks": "ranks: 2  # found by",
        "steps": "steps: 200  # the lines state",
        "progress": "progress: {regex:",
        "restarts": "restarts: 0  # torchrun starts",
    }.items():
        assert part in rows[written.lines[key] - 1], key


def test_findings_name_the_line_that_says_them(tmp_path: Path) -> None:
    facts = decided(tmp_path, "python train.py", saw(["hello"], saved=()))
    _, written = loaded(tmp_path, facts)
    said = shown(facts, written.lines, "chaos-train.yaml")
    at = [said.index(title) for title in ("found", "not certain", "not found")]
    assert at == sorted(at)
    assert any("checkpoints" in line for line in said[at[1] : at[2]]), "a run can do without them"
    place = f"[chaos-train.yaml:{written.lines['steps']}]"
    assert any("steps" in line and line.endswith(place) for line in said)
    assert written.text.split("\n")[written.lines["steps"] - 1].strip().startswith("steps:")
    assert missing(facts) == ["progress", "steps", "checkpoints"]
    assert [one.name for one in facts.findings if one.needed] == ["progress", "steps"]
    assert written.text.count("NOT FOUND: ") == 2


@pytest.mark.parametrize(
    ("line", "found", "count", "short"),
    [
        ("python train.py", 0, 1, False),
        ("python train.py", 3, 3, False),
        ("deepspeed --num_gpus 3 train.py", 3, 3, False),
        ("torchrun --nproc-per-node 4 train.py", 4, 4, False),
        ("torchrun --nproc-per-node 4 train.py", 2, 4, True),
        ("torchrun --nproc-per-node 2 --nnodes 2 train.py", 2, 4, True),
        ("torchrun --nproc-per-node 4 train.py", 0, 4, True),
        ("srun -n 8 python train.py", 0, 8, True),
    ],
)
def test_ranks(tmp_path: Path, line: str, found: int, count: int, short: bool) -> None:
    facts = decided(tmp_path, line, saw(found=found))
    assert workload(tmp_path, facts).ranks == count
    unclear = ["restarts"] if line.startswith("python") and found > 1 else []  # who starts them?
    assert missing(facts) == (["ranks"] if short else unclear)


def test_ranks_that_multiprocessing_names_later_are_not_found(tmp_path: Path) -> None:
    facts = decided(tmp_path, "python train.py", saw(), text="mp.spawn(main, nprocs=2)\n")
    assert missing(facts) == ["ranks", "restarts"]
    assert facts.ranks == 2, "with one, what starts them would be taken for the only rank"
    assert "beacon" in next(one.change for one in facts.findings if one.name == "ranks")


PLAIN = [f"step {n} loss {1 / n:.3f}" for n in range(1, 21)]


@pytest.mark.parametrize(
    ("line", "text", "lines", "ended", "asked", "steps", "found"),
    [
        ("python t.py", "", LINES, None, None, 200, True),
        ("python t.py", "", LINES, None, 90, 200, True),
        ("python t.py", "", PLAIN, None, 90, 90, True),
        ("python t.py --max-steps 50", "", PLAIN, None, None, 50, True),
        ("python t.py --max-steps 50", "", PLAIN, None, 70, 70, True),
        ("python t.py", "", PLAIN, WELL, None, 20, True),
        ("python t.py 20 8", "", PLAIN, None, None, 20, True),
        ("python t.py", "max_steps = 40\n", PLAIN, None, None, 40, True),
        ("python t.py", "", PLAIN, None, None, 200, False),
        ("python t.py --max-steps 10", "", PLAIN, None, None, 10, False),
    ],
)
def test_steps(
    tmp_path: Path,
    line: str,
    text: str,
    lines: list[str],
    ended: CommandEnded | None,
    asked: int | None,
    steps: int,
    found: bool,
) -> None:
    facts = decided(tmp_path, line, saw(lines, ended=ended), text=text, steps=asked)
    assert workload(tmp_path, facts).steps == steps
    assert ("steps" not in missing(facts)) is found


@pytest.mark.parametrize(("quiet_s", "steps"), [(3.9, 200), (4.1, 20)])
def test_no_step_for_long_means_that_training_is_over(
    tmp_path: Path, quiet_s: float, steps: int
) -> None:
    """A command may take longer to end than it was watched: the first step came after 2 s."""
    facts = decided(tmp_path, "python train.py", saw(PLAIN, quiet_s=quiet_s))
    assert facts.steps == steps and ("steps" in missing(facts)) is (steps == 200)


def test_steps_from_0_are_one_more(tmp_path: Path) -> None:
    lines = [f"step {n} loss 1.5" for n in range(20)]
    facts = decided(tmp_path, "python train.py", saw(lines, ended=WELL))
    assert facts.steps == 20


def test_the_steps_of_epochs_are_those_of_the_run(tmp_path: Path) -> None:
    lines = [f"Epoch {e} step {n}/5 loss 1.5" for e in range(3) for n in range(1, 6)]
    facts = decided(tmp_path, "python train.py --epochs 8", saw(lines))
    assert facts.steps == 40 and missing(facts) == []
    lines = [f"Epoch {e} step {n}/5 loss 1.5" for e in range(7, 10) for n in range(1, 6)]
    facts = decided(tmp_path, "python train.py --epochs 8", saw(lines))
    assert missing(facts) == ["progress", "steps"]


@pytest.mark.parametrize("of", ["", "/5"])
@pytest.mark.parametrize("step_from", [0, 1])
@pytest.mark.parametrize("epoch_from", [0, 1])
def test_a_run_reads_the_steps_of_epochs_as_they_are_written(
    epoch_from: int, step_from: int, of: str, tmp_path: Path
) -> None:
    lines = [
        f"epoch {epoch} step {step}{of} loss 1.5"
        for epoch in range(epoch_from, epoch_from + 3)
        for step in range(step_from, step_from + 5)
    ]
    facts = decided(tmp_path, "python train.py --steps 5", saw(lines, ended=WELL))
    assert missing(facts) == [] and facts.steps == 15
    spec = workload(tmp_path, facts)
    assert isinstance(spec.progress, RegexProgress) and spec.steps == 15
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    trial = try_lines(lines_of(tmp_path / "log"), spec.progress, spec.steps)
    assert (trial.steps, trial.wrong) == (list(range(1, 16)), [])


def test_epochs_that_are_reported_in_part_are_whole(tmp_path: Path) -> None:
    lines = [f"epoch {e} step {n}/100 loss 1.5" for e in range(3) for n in range(0, 100, 10)]
    facts = decided(tmp_path, "python train.py", saw(lines, ended=WELL))
    assert missing(facts) == [] and facts.steps == 300


def test_an_only_epoch_is_said(tmp_path: Path) -> None:
    lines = [f"epoch 1 step {n} loss 1.5" for n in range(1, 20)]
    facts = decided(tmp_path, "python train.py", saw(lines), steps=40)
    (finding,) = (one for one in facts.findings if one.name == "progress")
    assert "begins again" in finding.change


def test_a_command_that_went_on_from_an_old_checkpoint_is_noticed(tmp_path: Path) -> None:
    lines = [f"step {n}/200 loss 1.5" for n in range(51, 71)]
    for some, old in ((lines, True), (LINES, False)):
        facts = decided(tmp_path, "python train.py", saw(some))
        changes = [one.change for one in facts.findings if one.name == "progress"]
        assert ("old checkpoint" in changes[0]) is old


def test_a_hang_is_held_for_longer_than_slow_steps_take(tmp_path: Path) -> None:
    facts = decided(tmp_path, "python train.py", saw(every_s=3.0))
    assert facts.hold_s == 120.0 and facts.deadline_s == 300.0
    scenario, _ = loaded(tmp_path, facts)
    assert scenario.cells[1].scenario.faults[0].duration == 120.0


@pytest.mark.parametrize("count", [1, 2, 5, 12, 30, 200, 9999])
def test_faults_come_where_steps_are_left(tmp_path: Path, count: int) -> None:
    facts = decided(tmp_path, "python train.py", saw([]), steps=count)
    assert facts.steps == count
    assert 1 <= facts.at <= max(1, round(0.75 * count))
    loaded(tmp_path, facts)


def test_a_fault_comes_after_a_report_where_only_some_steps_are_reported(tmp_path: Path) -> None:
    lines = [f"step {n}/1000 loss 1.5" for n in range(10, 200, 10)]
    assert decided(tmp_path, "python train.py", saw(lines)).at == 571


def test_checkpoints_beside_the_script_are_named_with_what_to_do(tmp_path: Path) -> None:
    wrote = {tmp_path / "model.pt": (1, 1), tmp_path / "train.log": (1, 1)}
    facts = decided(tmp_path, "python train.py", saw(saved=(), wrote=wrote))
    (finding,) = (one for one in facts.findings if not one.found)
    assert "model.pt" in finding.text and "train.log" not in finding.text
    assert finding.needed
    assert "$CHAOS_SCRATCH" in finding.change
    assert any(one.name == "files" and "train.log" in one.text for one in facts.findings)
    _, written = loaded(tmp_path, facts)
    assert "NOT FOUND: checkpoints" in written.text


def test_a_job_without_checkpoints_is_told_what_that_means(tmp_path: Path) -> None:
    facts = decided(tmp_path, "python train.py", saw(saved=()))
    (finding,) = (one for one in facts.findings if not one.found)
    assert finding.name == "checkpoints" and "begin again from step 1" in finding.change
    assert not finding.needed and "watch longer (--for 5m)" in finding.change


def test_a_job_without_checkpoints_has_a_scenario_that_it_can_pass(tmp_path: Path) -> None:
    """To begin again costs all steps that are done, and the time that they take."""
    facts = decided(tmp_path, "python train.py", saw(saved=(), every_s=2.0))
    scenario, written = loaded(tmp_path, facts)
    sla = scenario.cells[0].scenario.sla
    assert sla["steps_lost"][0].check == "max <= 200"
    seconds = float(sla["recovery_time"][0].check.removeprefix("max < ").removesuffix("s"))
    assert seconds >= 2 * (facts.deadline_s + 2.0 * facts.at)
    row = written.text.split("\n")[written.lines["lost"] - 1]
    assert row == '  steps_lost: ["max <= 200"]' or "no checkpoint was seen" in row


RESUMES = 'p.add_argument("--resume", action="store_true")\n'
INIT_FROM = """
out_dir = 'out'
init_from = 'scratch' # 'scratch' or 'resume'
exec(open('configurator.py').read())
if init_from == 'resume':
    load()
"""


@pytest.mark.parametrize(
    ("text", "line", "option"),
    [
        (RESUMES, "python t.py", "--resume"),
        (RESUMES, "python t.py --resume", ""),
        (INIT_FROM, "python t.py", "--init_from=resume"),
        (INIT_FROM, "python t.py --init_from=resume", ""),
        ('p.add_argument("--resume", default="auto")\n', "python t.py", ""),
        ("", "python t.py", ""),
    ],
)
def test_a_script_that_resumes_only_when_told_is_said_how(
    tmp_path: Path, text: str, line: str, option: str
) -> None:
    seen = saw(saved=("out/ckpt.pt",))
    seen.scratch = Path("/scratch")
    facts = decided(tmp_path, line, seen, text=text)
    assert ("resume" in [one.name for one in facts.findings]) is bool(option)
    if option:
        (again,) = (one.again for one in facts.findings if one.again)
        command = again.removeprefix("chaos init --force -- ")
        assert again in of(facts, "resume")
        *_, inner = shlex.split(command)
        head = f'test "$(ls -A $CHAOS_SCRATCH/out)" && set -- {option}; exec python t.py '
        assert inner.startswith(head) and inner.endswith(' "$@"')


def test_a_script_that_nothing_sends_elsewhere_is_started_in_scratch(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    saved = {tmp_path / "checkpoints" / "model.pt": (1, 1)}
    facts = decided(tmp_path, "python train.py --lr 1", saw(saved=(), wrote=saved))
    again = f"bash -c 'cd $CHAOS_SCRATCH && exec python {tmp_path}/train.py --lr 1'"
    assert f"chaos init --force -- {again} sends them" in of(facts, "checkpoints")


def test_ranks_that_nothing_names_are_those_started_alike(tmp_path: Path) -> None:
    seen = saw()
    seen.alike = 3
    facts = decided(tmp_path, "python train.py", seen, text="mp.spawn(main, nprocs=3)\n")
    assert facts.ranks == 3 and missing(facts) == ["restarts"]
    assert decided(tmp_path, "python train.py", seen).ranks == 1, "its workers, perhaps"


def test_a_command_that_ended_is_not_to_be_watched_longer(tmp_path: Path) -> None:
    for lines in (LINES, ["hello"], [f"epoch 1 step {n} loss 1.5" for n in range(1, 21)]):
        facts = decided(tmp_path, "python train.py", saw(lines, saved=(), ended=WELL))
        changes = " ".join(one.change for one in facts.findings)
        assert "longer" not in changes and "(it ended by itself after " in changes
        saving = next(one.change for one in facts.findings if one.name == "checkpoints")
        assert ("have it save them, or more often" in saving) is (len(lines) > 1)
        assert ("have it train more steps" in saving) is (len(lines) == 1)
        epoch = "in the next one, have it train two epochs (it ended by itself after 12.0 s and"
        assert (epoch in changes) is lines[0].startswith("epoch")


@pytest.mark.parametrize(
    ("line", "found", "together", "said"),
    [
        ("torchrun --nproc-per-node 2 train.py", 2, 3, "does not start its ranks again without"),
        ("srun -n 2 python train.py", 2, 1, "srun does not start its ranks again: a run"),
        ("python train.py", 0, 1, "one process, which nothing starts again"),
        ("python train.py", 0, 2, ""),
        ("python launch.py", 3, 4, ""),
        ("bash -c 'until python train.py; do :; done'", 0, 2, ""),
        ("./launch train.py", 2, 3, ""),
    ],
)
def test_who_starts_ranks_again_is_said_only_where_it_is_known(
    tmp_path: Path, line: str, found: int, together: int, said: str
) -> None:
    seen = saw(found=found)
    seen.together = together
    facts = decided(tmp_path, line, seen)
    (finding,) = (one for one in facts.findings if one.name == "restarts")
    assert finding.found is bool(said) and not finding.needed and facts.restarts == 2
    assert (said or "by itself is not known") in finding.text
    assert ("set restarts: 0 if it does" in finding.change) is not bool(said)
    loaded(tmp_path, facts)


def test_no_process_is_said_to_print_steps_where_none_was_printed(tmp_path: Path) -> None:
    for lines in (LINES, ["hello"]):
        facts = decided(tmp_path, "python train.py", saw(lines))
        (finding,) = (one for one in facts.findings if one.name == "ranks")
        assert ("prints the steps" in finding.text) is (lines is LINES)


@pytest.mark.parametrize(
    "word",
    ["a b", "it's", 'say "x"', "2", "true", "-", "=", "a: b", "# no", "ü", "null", "*x", "{a}", ""],
)
def test_every_word_of_a_command_comes_back_as_it_was(tmp_path: Path, word: str) -> None:
    facts = decided(tmp_path, f"python train.py {shlex.quote(word)}", saw())
    assert workload(tmp_path, facts).command == ["python", "train.py", word]


def test_quotes_in_an_expression_come_back_as_they_were(tmp_path: Path) -> None:
    lines = [f"it's step='{n}' loss='{1 / n:.2f}'" for n in range(1, 21)]
    facts = decided(tmp_path, "python train.py", saw(lines))
    assert workload(tmp_path, facts).progress == facts.proposal.progress


def test_listings_are_bounded_and_show_what_changed(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").touch()
    (tmp_path / "old.pt").write_text("1")
    before = listing(tmp_path)
    assert list(before.files) == [tmp_path / "old.pt"]
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-5" / "weights").touch()
    (tmp_path / "run.log").touch()
    (tmp_path / "old.pt").write_text("12")
    new = listing(tmp_path).since(before)
    assert [path.name for path in new] == ["old.pt", "weights", "run.log"]
    assert [path.name for path in checkpoints(new, tmp_path)] == ["old.pt", "weights"]


def test_the_time_of_a_run_has_the_recoveries_in_it(tmp_path: Path) -> None:
    """Six arms without a fault; and at most three starts, the steps before each fault once more,
    the hang and the notice of a preemption.
    """
    facts = decided(tmp_path, "torchrun --nproc-per-node 2 train.py", saw(found=2))
    made = Drafted(facts=facts, written=write(facts, "train", directory="."), seconds=9)
    first_s, step_s = facts.proposal.first_s, facts.proposal.step_s
    assert first_s and step_s and made.run_s is not None
    assert made.arms == 6
    least, most = made.run_s
    assert least == pytest.approx(6 * (first_s + 200 * step_s))
    again_s = 3 * (first_s + (facts.at - 1) * step_s)
    assert most - least == pytest.approx(again_s + facts.hold_s + 30.0)


def of(facts: Facts, name: str) -> str:
    """What is said of it, and what to change."""
    one = next(one for one in facts.findings if one.name == name)
    return f"{one.text} -> {one.change}"


def test_merged_lines_of_ray_are_named_with_the_next_command(tmp_path: Path) -> None:
    merged = "(Worker pid=7) loading [repeated 3x across cluster] (Set RAY_DEDUP_LOGS=0 to disable)"
    said = of(decided(tmp_path, "python my.py --x 1", saw([merged] * 4)), "progress")
    assert "Ray merges lines" in said
    assert "chaos init --env RAY_DEDUP_LOGS=0 -- python my.py --x 1" in said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import lightning\n", "callbacks=[ChaosCallback()]"),
        ("import deepspeed\n", "watch(engine)"),
        ("import deepspeed\n", '"log_level": "info" in its configuration'),
        ("import torch\n", "beacon.step(...)"),
    ],
)
def test_the_line_that_helps_is_that_of_the_framework(text: str, line: str, tmp_path: Path) -> None:
    facts = decided(tmp_path, "python train.py", saw(["hello"]), text=text)
    assert line in of(facts, "progress")


def test_ranks_that_were_not_seen_are_named(tmp_path: Path) -> None:
    facts = decided(tmp_path, "torchrun --nproc-per-node 4 train.py", saw(found=2))
    assert "not seen: 2, 3" in of(facts, "ranks") and "beacon.step" in of(facts, "ranks")


def test_what_makes_it_print_each_step_is_said(tmp_path: Path) -> None:
    lines = [f"iter {n}: loss 2.5, time 3ms" for n in range(0, 100, 10)]
    text = "import torchtitan\n"
    said = of(decided(tmp_path, "python train.py", saw(lines), text=text), "progress")
    assert "reported every 10 steps (each with --metrics.log_freq 1)" in said


def test_checkpoints_elsewhere_are_sent_to_scratch_by_the_next_command(tmp_path: Path) -> None:
    saved = {tmp_path / "results" / "model.pt": (1, 1)}
    facts = decided(
        tmp_path, "bash run.sh", saw(saved=(), wrote=saved), text="R=${RESULTS:-results}\n"
    )
    again = "chaos init --force --env RESULTS='$CHAOS_SCRATCH' -- bash run.sh"
    assert again in of(facts, "checkpoints")
    assert [one.again for one in facts.findings if one.again] == [again]


def test_a_preset_with_numbers_of_its_own_is_loaded(tmp_path: Path) -> None:
    lines = [f"Epoch {e}: {n}/50 [00:01, loss=1.5]" for e in (1, 2) for n in range(51)]
    facts = decided(tmp_path, "python train.py", saw(lines, ended=WELL))
    spec = workload(tmp_path, facts)
    assert spec.progress == PresetProgress(preset="lightning", epochs_from=1)
    assert spec.steps == 100
