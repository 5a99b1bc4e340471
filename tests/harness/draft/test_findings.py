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
from trainchaos.harness.draft.command import ScriptText, command_of
from trainchaos.harness.draft.findings import FOUND, MISSING, Facts, decide
from trainchaos.harness.draft.progress import propose
from trainchaos.harness.draft.text import ScenarioText, shown, write
from trainchaos.harness.draft.watch import Sighting
from trainchaos.harness.script.listen.trial import lines_of, try_lines
from trainchaos.harness.script.processes.command import CommandEnded
from trainchaos.harness.script.processes.finding import FoundRank

LINES = [f"step {n}/200 loss {1 / n:.3f}" for n in range(1, 21)]
PLAIN = [f"step {n} loss {1 / n:.3f}" for n in range(1, 21)]
WELL = CommandEnded(exit_code=0, signal=None)


def saw(
    lines: list[str] = LINES,
    *,
    every_s: float = 0.5,
    found: int = 0,
    ended: CommandEnded | None = None,
    saved: tuple[str, ...] = ("last.ckpt",),
    wrote: tuple[Path, ...] = (),
) -> Sighting:
    """A sighting, as a watch makes it; ``found``: ranks, each with its process."""
    seen = Sighting(
        ranks={n: FoundRank(rank=n, world=found, pid=10 + n, started=1) for n in range(found)},
        ended=ended,
        seconds=2.0 + every_s * len(lines),
        count=len(lines),
        scratch=Path("/scratch"),
        saved=[Path("/scratch") / name for name in saved],
        wrote=[*wrote],
    )
    seen.lines.extend((2.0 + every_s * n, line) for n, line in enumerate(lines))
    return seen


def decided(
    folder: Path, line: str, seen: Sighting, *, text: str = "", steps: int | None = None
) -> Facts:
    """The facts of a command line that was seen."""
    command = command_of(shlex.split(line), {}, ScriptText(name="train", text=text), steps)
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
    """What was not found, or is not certain."""
    return [one.name for one in facts.findings if one.state != FOUND]


def of(facts: Facts, name: str) -> str:
    """What is said of it, and what to change."""
    one = facts.of(name)
    return f"{one.text} -> {one.change}"


def test_a_scenario_says_all_that_was_seen(tmp_path: Path) -> None:
    line = "torchrun --nproc-per-node 2 --max-restarts 3 train.py --output_dir out"
    facts = decided(tmp_path, line, saw(found=2))
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
    # six arms without a fault, and at most three starts, the steps before each fault once more, the
    # hang and the notice of a preemption
    first_s, step_s = facts.proposal.first_s, facts.proposal.step_s
    assert first_s and step_s and facts.run_s is not None
    least, most = facts.run_s
    assert least == pytest.approx(6 * (first_s + 200 * step_s))
    again_s = 3 * (first_s + (facts.at - 1) * step_s)
    assert most - least == pytest.approx(again_s + facts.hold_s + 30.0)


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
    assert [one.name for one in facts.findings if one.state == MISSING] == ["progress", "steps"]
    assert written.text.count("NOT FOUND: ") == 2
    assert "command is taken for the only one" in of(facts, "ranks")


@pytest.mark.parametrize(
    ("line", "found", "count", "short"),
    [
        ("python train.py", 0, 1, []),
        ("python train.py", 3, 3, ["restarts"]),  # who starts them?
        ("deepspeed --num_gpus 3 train.py", 3, 3, []),
        ("torchrun --nproc-per-node 4 train.py", 4, 4, []),
        ("torchrun --nproc-per-node 4 train.py", 2, 4, ["ranks"]),
        ("torchrun --nproc-per-node 2 --nnodes 2 train.py", 2, 4, ["ranks"]),
        ("torchrun --nproc-per-node 4 train.py", 0, 4, ["ranks"]),
        ("srun -n 8 python train.py", 0, 8, ["ranks"]),
    ],
)
def test_ranks(tmp_path: Path, line: str, found: int, count: int, short: list[str]) -> None:
    facts = decided(tmp_path, line, saw(found=found))
    assert workload(tmp_path, facts).ranks == count
    assert missing(facts) == short
    if "--nproc-per-node 4" in line and found == 2:
        assert "not seen: 2, 3" in of(facts, "ranks") and "beacon.step" in of(facts, "ranks")


def test_ranks_that_their_environments_announce_are_missed(tmp_path: Path) -> None:
    seen = saw(found=4)
    seen.ranks = {rank: one for rank, one in seen.ranks.items() if rank < 3}
    facts = decided(tmp_path, "bash train.sh", seen)
    assert "3 found" in of(facts, "ranks") and "say 4" in of(facts, "ranks") and facts.ranks == 4
    # as with Lightning's own launcher: the first process is rank 0 and starts the others
    seen.ranks = {1: FoundRank(rank=1, world=None, pid=11, started=1)}
    facts = decided(tmp_path, "python job.py", seen)
    assert "one names itself rank 1: there are at least 2" in of(facts, "ranks")
    assert facts.ranks == 2 and "-> have each rank name itself" in of(facts, "ranks")


def test_ranks_that_nothing_names_are_those_started_alike(tmp_path: Path) -> None:
    seen, spawns = saw(), "mp.spawn(main, nprocs=3)\n"
    facts = decided(tmp_path, "python train.py", seen, text=spawns)
    assert missing(facts) == ["ranks", "restarts"] and "beacon" in of(facts, "ranks")
    assert facts.ranks == 2, "with one, what starts them would be taken for the only rank"
    seen.alike = 3
    facts = decided(tmp_path, "python train.py", seen, text=spawns)
    assert facts.ranks == 3 and missing(facts) == ["restarts"]
    assert decided(tmp_path, "python train.py", seen).ranks == 1, "its workers, perhaps"


@pytest.mark.parametrize(
    ("line", "lines", "ended", "asked", "steps", "found"),
    [
        ("python t.py", LINES, None, None, 200, True),
        ("python t.py", LINES, None, 90, 200, True),
        ("python t.py", PLAIN, None, 90, 90, True),
        ("python t.py --max-steps 50", PLAIN, None, None, 50, True),
        ("python t.py --max-steps 50", PLAIN, None, 70, 70, True),
        ("python t.py", PLAIN, WELL, None, 20, True),
        ("python t.py", [f"step {n} loss 1.5" for n in range(20)], WELL, None, 20, True),
        ("python t.py", PLAIN, None, None, 200, False),
        ("python t.py --max-steps 10", PLAIN, None, None, 10, False),
    ],
)
def test_steps(
    tmp_path: Path,
    line: str,
    lines: list[str],
    ended: CommandEnded | None,
    asked: int | None,
    steps: int,
    found: bool,
) -> None:
    facts = decided(tmp_path, line, saw(lines, ended=ended), steps=asked)
    assert workload(tmp_path, facts).steps == steps
    assert ("steps" not in missing(facts)) is found


def test_the_default_of_an_option_says_how_many_steps(tmp_path: Path) -> None:
    text = 'parser.add_argument("--max-steps", type=int, default=40)\n'
    facts = decided(tmp_path, "python t.py", saw(PLAIN), text=text)
    assert facts.steps == 40 and "the default of --max-steps -> correct it" in of(facts, "steps")


def test_the_steps_of_epochs_are_those_of_the_run(tmp_path: Path) -> None:
    lines = [f"Epoch {e} step {n}/5 loss 1.5" for e in range(3) for n in range(1, 6)]
    facts = decided(tmp_path, "python train.py --epochs 8", saw(lines))
    assert facts.steps == 40 and missing(facts) == []
    lines = [f"Epoch {e} step {n}/5 loss 1.5" for e in range(7, 10) for n in range(1, 6)]
    facts = decided(tmp_path, "python train.py --epochs 8", saw(lines))
    assert missing(facts) == ["progress", "steps"]
    lines = [f"epoch {e} step {n}/100 loss 1.5" for e in range(3) for n in range(0, 100, 10)]
    facts = decided(tmp_path, "python train.py", saw(lines, ended=WELL))
    assert missing(facts) == [] and facts.steps == 300, "those reported in part are whole"


@pytest.mark.parametrize("of_each", ["", "/5"])
@pytest.mark.parametrize("step_from", [0, 1])
@pytest.mark.parametrize("epoch_from", [0, 1])
def test_a_run_reads_the_steps_of_epochs_as_they_are_written(
    epoch_from: int, step_from: int, of_each: str, tmp_path: Path
) -> None:
    lines = [
        f"epoch {epoch} step {step}{of_each} loss 1.5"
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


@pytest.mark.parametrize(
    ("lines", "text", "steps", "said"),
    [
        ([f"epoch 1 step {n} loss 1.5" for n in range(1, 20)], "", 40, "begins again"),
        ([f"step {n}/200 loss 1.5" for n in range(51, 71)], "", None, "an old checkpoint"),
        (
            [f"iter {n}: loss 2.5, time 3ms" for n in range(0, 100, 10)],
            "import torchtitan\n",
            None,
            "reported every 10 steps (each with --metrics.log_freq 1)",
        ),
        (["hello"], "import lightning\n", None, "callbacks=[ChaosCallback()]"),
        (["hello"], "import deepspeed\n", None, "watch(engine)"),
        (["hello"], "import deepspeed\n", None, '"log_level": "info" in its configuration'),
        (["hello"], "import torch\n", None, "beacon.step(...)"),
    ],
)
def test_what_is_said_of_progress(
    tmp_path: Path, lines: list[str], text: str, steps: int | None, said: str
) -> None:
    assert said in of(
        decided(tmp_path, "python train.py", saw(lines), text=text, steps=steps), "progress"
    )
    assert said not in of(decided(tmp_path, "python train.py", saw()), "progress")


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


@pytest.mark.parametrize(
    ("line", "text", "path", "again"),
    [
        (
            "bash run.sh",
            "R=${RESULTS:-results}\n",
            "results/model.pt",
            "--env RESULTS='$CHAOS_SCRATCH' -- bash run.sh",
        ),
        (
            "python train.py --lr 1",
            "",
            "checkpoints/model.pt",
            "-- bash -c 'cd $CHAOS_SCRATCH && exec python {}/train.py --lr 1'",
        ),
        ("bash -c 'python train.py'", "", "model.pt", ""),
    ],
)
def test_checkpoints_elsewhere_are_sent_to_scratch_by_the_next_command(
    tmp_path: Path, line: str, text: str, path: str, again: str
) -> None:
    (tmp_path / "train.py").touch()
    seen = saw(saved=(), wrote=(tmp_path / path, tmp_path / "train.log"))
    facts = decided(tmp_path, line, seen, text=text)
    finding = facts.of("checkpoints")
    assert finding.state == MISSING and path in finding.text and "train.log" not in finding.text
    assert "train.log" in of(facts, "files") and "$CHAOS_SCRATCH" in finding.change
    assert finding.again == (f"chaos init --force {again.format(tmp_path)}" if again else "")
    assert "NOT FOUND: checkpoints" in loaded(tmp_path, facts)[1].text


def test_a_job_without_checkpoints_has_a_scenario_that_it_can_pass(tmp_path: Path) -> None:
    """To begin again costs all steps that are done, and the time that they take."""
    facts = decided(tmp_path, "python train.py", saw(saved=(), every_s=2.0))
    said = of(facts, "checkpoints")
    assert "begin again from step 1" in said and "watch longer (--for 5m)" in said
    assert missing(facts) == ["checkpoints"]
    sla = loaded(tmp_path, facts)[0].cells[0].scenario.sla
    assert sla["steps_lost"][0].check == "max <= 200"
    seconds = float(sla["recovery_time"][0].check.removeprefix("max < ").removesuffix("s"))
    assert seconds >= 2 * (facts.deadline_s + 2.0 * facts.at)


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
    ],
)
def test_a_script_that_resumes_only_when_told_is_said_how(
    tmp_path: Path, text: str, line: str, option: str
) -> None:
    facts = decided(tmp_path, line, saw(saved=("out/ckpt.pt",)), text=text)
    assert ("resume" in [one.name for one in facts.findings]) is bool(option)
    if option:
        again = facts.of("resume").again
        *_, inner = shlex.split(again.removeprefix("chaos init --force -- "))
        head = f'test "$(ls -A $CHAOS_SCRATCH/out)" && set -- {option}; exec python t.py '
        assert inner.startswith(head) and inner.endswith(' "$@"')


def test_a_command_that_ended_is_not_to_be_watched_longer(tmp_path: Path) -> None:
    for lines in (LINES, ["hello"], [f"epoch 1 step {n} loss 1.5" for n in range(1, 21)]):
        facts = decided(tmp_path, "python train.py", saw(lines, saved=(), ended=WELL))
        changes = " ".join(one.change for one in facts.findings)
        assert "longer" not in changes and "(it ended by itself after " in changes
        saving = of(facts, "checkpoints")
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
    ],
)
def test_who_starts_ranks_again_is_said_only_where_it_is_known(
    tmp_path: Path, line: str, found: int, together: int, said: str
) -> None:
    seen = saw(found=found)
    seen.together = together
    facts = decided(tmp_path, line, seen)
    finding = facts.of("restarts")
    assert (finding.state == FOUND) is bool(said) and finding.state != MISSING
    assert (said or "by itself is not known") in finding.text and facts.restarts == 2
    assert ("set restarts: 0 if it does" in finding.change) is not bool(said)
    loaded(tmp_path, facts)


@pytest.mark.parametrize(
    "word",
    ["a b", "it's", 'say "x"', "2", "true", "-", "=", "a: b", "# no", "ü", "null", "*x", "{a}", ""],
)
def test_every_word_of_a_command_comes_back_as_it_was(tmp_path: Path, word: str) -> None:
    facts = decided(tmp_path, f"python train.py {shlex.quote(word)}", saw())
    assert workload(tmp_path, facts).command == ["python", "train.py", word]


def test_progress_comes_back_as_it_was(tmp_path: Path) -> None:
    lines = [f"it's step='{n}' loss='{1 / n:.2f}'" for n in range(1, 21)]
    facts = decided(tmp_path, "python train.py", saw(lines))
    assert workload(tmp_path, facts).progress == facts.proposal.progress
    lines = [f"Epoch {e}: {n}/50 [00:01, loss=1.5]" for e in (1, 2) for n in range(51)]
    facts = decided(tmp_path, "python train.py", saw(lines, ended=WELL))
    spec = workload(tmp_path, facts)
    assert spec.progress == PresetProgress(preset="lightning", epochs_from=1)
    assert spec.steps == 100
