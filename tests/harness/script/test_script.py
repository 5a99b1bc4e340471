"""Real commands, none of them ours: watched, hit, judged, and every way they can go wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.decided import decided
from tests.support.running import PYTHON, chaos_run
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.log import Event, Kind, read_log
from trainchaos.harness.host.rundir import open_run
from trainchaos.harness.judge.results import Results
from trainchaos.harness.launch.storage import lacks_mount
from trainchaos.reports.outlets.terminal import summary

pytestmark = pytest.mark.real

TRAINER = Path(__file__).parents[2] / "support" / "fakes" / "fake_trainer.py"
REGEX = r"{regex: 'step (?P<step>\d+) loss (?P<loss>[0-9.]+)'}"
SEEN = "[fault-landed, detection, liveness, no-orphans, evidence-complete]"
KILL = "{id: hit, kind: process-kill, target: {rank: 1}, at: {step: 12}}"
DEADLINE_S = 120.0


def command(*options: str) -> list[str]:
    """The fake trainer with its launcher."""
    return [sys.executable, str(TRAINER), "launch", *options]


def write(
    path: Path,
    argv: list[str],
    *,
    fault: str = KILL,
    progress: str = REGEX,
    steps: int = 30,
    ranks: int = 2,
    deadline: str = "120s",
    baseline: str = "none",
    invariants: str = SEEN,
    workload: str = "",
    more: str = "",
) -> Path:
    """A scenario file."""
    lines = [
        "version: 1",
        "name: script",
        "seed: 5",
        "workload:",
        f"  command: {json.dumps(argv)}",
        f"  ranks: {ranks}",
        f"  steps: {steps}",
        f"  progress: {progress}",
        f"  progress_deadline: {deadline}",
        workload,
        f"faults: [{fault}]",
        f"baseline: {baseline}",
        f"invariants: {invariants}",
        more,
    ]
    path.write_text("\n".join(line for line in lines if line) + "\n")
    return path


def run(tmp_path: Path, scenario: Path) -> tuple[int, Results]:
    """Exit code and results; nothing of the command may live afterwards."""
    code = decided(scenario, tmp_path / "runs")
    results = tmp_path / "runs/script/latest/results.json"
    assert not living(tmp_path)
    return code, Results.model_validate_json(results.read_text())


def scratches(tmp_path: Path) -> list[str]:
    """The arms whose $CHAOS_SCRATCH is still there."""
    return sorted(path.name for path in (tmp_path / "runs").glob("script/latest/checkpoints/*"))


def living(tmp_path: Path) -> list[int]:
    """Processes whose scratch directory is below this test's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environ = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"CHAOS_SCRATCH={tmp_path}".encode() in environ and state not in "ZX":
                found.append(int(entry.name))
    return found


def events(tmp_path: Path, *kinds: Kind) -> list[Event]:
    """Events of the faulted arm."""
    return list(read_log(tmp_path / "runs/script/latest/events/default.r0.faulted").of(*kinds))


# for ranks that are killed at step 12
ALL_STEPS = ("--steps", "30", "--restarts", "2", "--late-s", "0.15")


def test_a_killed_rank_recovers_and_is_measured(tmp_path: Path) -> None:
    scenario = write(
        tmp_path / "s.yaml",
        command(*ALL_STEPS, "--beacon"),
        progress="beacon",
        baseline="paired",
        more=(
            'sla: {recovery_time: ["max < 120s"], steps_lost: ["max <= 5"],'
            ' goodput: ["median > 0"]}'
        ),
    )
    code, results = run(tmp_path, scenario)
    assert code == 0, results.reason
    (incident,) = results.faults
    assert (incident.outcome, incident.detected_by, incident.blamed_rank) == (
        "recovered",
        "exit",
        1,
    )
    assert incident.recovery_time is not None and incident.first_new_step is not None
    assert sum(span.seconds for span in incident.phases) == pytest.approx(incident.recovery_time)
    assert results.cells[0].strategy == "own"
    assert results.cells[0].metrics["samples_lost"].n == 0
    directory = tmp_path / "runs/script/latest"
    for name in ("report.html", "junit.xml", "summary.md", "trace.json"):
        assert (directory / name).stat().st_size > 0
    before = results.model_dump_json()
    assert invoke(["analyze", str(directory), "--quiet"]) == 0
    assert (
        Results.model_validate_json((directory / "results.json").read_text()).model_dump_json()
        == before
    )


def test_a_short_stop_is_masked_and_healed(tmp_path: Path) -> None:
    at = "at: {time: 0.2}, duration: 0.5s, expect: {outcome: masked}"
    fault = f"{{id: hit, kind: process-stop, target: {{rank: 1}}, {at}}}"
    scenario = write(tmp_path / "s.yaml", command("--steps", "30"), fault=fault, baseline="paired")
    code, results = run(tmp_path, scenario)
    assert code == 0, results.reason
    assert results.faults[0].witness == "kernel: process state" and results.faults[0].healed


@pytest.mark.long
def test_a_hang_is_detected_and_blamed(tmp_path: Path) -> None:
    expect = "expect: {outcome: recovered, detected_by: hang}"
    fault = f"{{id: hit, kind: process-stop, target: {{rank: 1}}, at: {{step: 12}}, {expect}}}"
    scenario = write(tmp_path / "s.yaml", command(*ALL_STEPS, "--timeout-s", "7"), fault=fault)
    code, results = run(tmp_path, scenario)
    assert code == 0, results.reason
    assert results.faults[0].blamed_rank == 1


def test_ranks_of_a_shell_script(tmp_path: Path) -> None:
    trainer = f'"{sys.executable}" "{TRAINER}" --steps 30 --late-s 0.15 --timeout-s 6'
    shell = (
        f"for rank in 0 1; do RANK=$rank WORLD_SIZE=2 {trainer} & done; "
        "for job in $(jobs -p); do wait $job || exit 1; done"
    )
    scenario = write(tmp_path / "s.yaml", ["bash", "-c", shell], workload="  restarts: 1")
    code, results = run(tmp_path, scenario)
    assert code == 0, results.reason
    assert len(events(tmp_path, Kind.COMMAND_STARTED)) == 2
    assert scratches(tmp_path) == []
    (decision,) = events(tmp_path, Kind.DECISION)
    assert "started again (1 of 1)" in decision.data["reason"]


TERM = "{id: hit, kind: process-term, target: {rank: 0}, at: {step: 12}}"


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.sample(1)
def test_a_preempted_command_that_ends_well_is_started_again(tmp_path: Path, restarts: int) -> None:
    argv = [sys.executable, str(TRAINER), "--steps", "30", "--late-s", "0.15", "--polite"]
    workload = f"  restarts: {restarts}"
    more = [*SEEN.strip("[]").split(", "), "ending", "kept-progress"]
    scenario = write(
        tmp_path / "s.yaml",
        argv,
        fault=TERM,
        ranks=1,
        workload=workload,
        invariants=f"[{', '.join(more)}]",
    )
    code, results = run(tmp_path, scenario)
    (incident,) = results.faults
    assert (incident.landed, incident.detected_by) == (True, "notice"), results.reason
    assert code == (0 if restarts else 1), results.reason
    if restarts:
        assert (incident.outcome, incident.steps_lost) == ("recovered", 0)
    else:
        assert "process-term had told it to end; workload.restarts: 1 starts it" in results.reason


AN_OLD_CHECKPOINT = (
    'mkdir $CHAOS_SCRATCH/saved; echo \'{"step": 9}\' > $CHAOS_SCRATCH/saved/checkpoint.json; "$0"'
    ' "$@"'
)
BAD = {
    "exits at once": (
        ["bash", "-c", "echo hello; echo cannot find data >&2; exit 3"],
        {},
        r"s\.yaml:5 \(workload\.command\): the command ended with exit code 3 .*cannot find data",
    ),
    "never begins": (
        ["sleep", "100"],
        {"deadline": "60s", "workload": "  start_deadline: 1s"},
        r"no progress within 1 s \(workload.start_deadline\).*it printed nothing",
    ),
    "another format": (
        command("--steps", "30"),
        {"progress": r"{regex: 'STEP=(?P<step>\d+)'}"},
        r"s\.yaml:8 \(workload\.progress\): .*matched none of 30 lines.*step 30 loss",
    ),
    "no number": (
        command("--steps", "30"),
        {"progress": r"{regex: '(?P<step>step) '}"},
        r"group step was never a number",
    ),
    "no ranks": (
        ["bash", "-c", "for i in $(seq 30); do echo step $i loss 1.0; sleep 0.05; done"],
        {},
        r"s\.yaml:6 \(workload\.ranks\): 0 of 2 ranks were found",
    ),
    "over before the fault": (
        command("--steps", "10"),
        {"steps": 10},
        r"due at step 12, the run ended at 10",
    ),
    "from an earlier run": (
        ["bash", "-c", AN_OLD_CHECKPOINT, *command(*ALL_STEPS)],
        {},
        r"first step reported was 10: .*CHAOS_SCRATCH",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.sample(4)
def test_bad_input_is_inconclusive_and_says_what_to_do(tmp_path: Path, name: str) -> None:
    argv, options, reason = BAD[name]
    code, results = run(tmp_path, write(tmp_path / "s.yaml", argv, **options))  # type: ignore[arg-type]
    assert code == 3, results.reason
    assert re.search(reason, results.reason, re.DOTALL), results.reason


def test_a_command_that_is_not_there_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = write(tmp_path / "s.yaml", ["no-such-program"])
    assert invoke(["run", str(scenario), "--runs", str(tmp_path / "runs")]) == 2
    assert (
        "s.yaml:5: workload.command: 'no-such-program' is not found in PATH"
        in capsys.readouterr().err
    )
    assert not list((tmp_path / "runs").glob("script/*/events"))


def test_a_job_that_does_not_recover_fails(tmp_path: Path) -> None:
    scenario = write(
        tmp_path / "s.yaml", command("--steps", "30"), more='sla: {recovery_time: ["max < 120s"]}'
    )
    code, results = run(tmp_path, scenario)
    assert code == 1
    assert results.faults[0].outcome == "fail-stop" and "never recovered" in results.reason
    # What the command left shows why it failed.
    (kept,) = scratches(tmp_path)
    assert f"checkpoints/{kept}: what the command of this arm left" in summary(
        results, open_run(tmp_path / "runs/script/latest")
    )


FORKS = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
open(os.environ["CHAOS_SCRATCH"] + "/child", "w").write(str(child.pid))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("children", ["take", "leave"])
def test_children_of_a_killed_rank_are_taken_along_or_left(tmp_path: Path, children: str) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    rank = f"{PYTHON} {tmp_path}/forks.py '{TRAINER}' --steps 30 --late-s 0.15"
    lives = "grep -q 'State:.[RSD]' /proc/$(cat $CHAOS_SCRATCH/child)/status"
    # whoever is taken along ends a moment after the rank
    waits = f"for n in $(seq 20); do {lives} || break; sleep 0.1; done; {lives} && echo LIVES"
    shell = f"RANK=0 WORLD_SIZE=1 {rank}; {waits}; exit 1"
    scenario = write(
        tmp_path / "s.yaml",
        ["bash", "-c", shell],
        fault="{id: hit, kind: process-kill, target: {rank: 0}, at: {step: 12}}",
        ranks=1,
        workload=f"  children: {children}",
    )
    run(tmp_path, scenario)
    (output,) = (tmp_path / "runs/script/latest").resolve().glob("logs/*faulted/output.log")
    assert ("LIVES" in output.read_text()) == (children == "leave")


@pytest.mark.parametrize("kind", ["process-kill", "process-term", "process-stop"])
@pytest.mark.sample(1)
def test_a_launcher_is_hit_alone(tmp_path: Path, kind: str) -> None:
    trainer = " ".join([PYTHON, f"'{TRAINER}'", "launch", "--steps", "40", "--step-s", "0.06"])
    lasts = ", duration: 0.3s" if kind == "process-stop" else ""
    fault = f"{{id: hit, kind: {kind}, target: {{role: launcher}}, at: {{step: 12}}{lasts}}}"
    scenario = write(
        tmp_path / "s.yaml",
        ["bash", "-c", f"{trainer}; exit $?"],
        fault=fault,
        steps=40,
        workload="  restarts: 1",
        baseline="paired",
        invariants="observable",
    )
    code, results = run(tmp_path, scenario)
    assert code == 0, results.reason
    (incident,) = results.faults
    masked = kind == "process-stop"
    assert incident.landed and incident.outcome == ("masked" if masked else "recovered")
    assert len(events(tmp_path, Kind.COMMAND_STARTED)) == 2 - masked
    (hit,) = events(tmp_path, Kind.FAULT_INJECTED)
    assert hit.data["target"] == {"process": "launcher1", "rank": None}


def test_a_command_whose_ranks_keep_ending_is_stopped_at_once(tmp_path: Path) -> None:
    once = f"RANK=0 {PYTHON} -c \"raise SystemExit('no config given')\""
    argv = ["bash", "-c", f"while true; do {once}; done"]
    scenario = write(tmp_path / "s.yaml", argv, ranks=1, deadline="600s", baseline="paired")
    code, results = run(tmp_path, scenario)
    assert code == 3, results.reason
    assert re.search(r"its ranks were started \d times, and ended before a step", results.reason)
    assert "| no config given" in results.reason


def test_paths_that_a_command_is_told_are_plain(tmp_path: Path) -> None:
    trainer = f"{PYTHON} '{TRAINER}' --steps 30"
    fault = "{id: hit, kind: process-stop, target: {rank: 0}, at: {step: 12}, duration: 0.1s}"
    scenario = write(
        tmp_path / "s.yaml",
        ["bash", "-c", f"echo $CHAOS_SCRATCH $CHAOS_BEACON >> {tmp_path}/told; exec {trainer}"],
        fault=fault,
        ranks=1,
        more="matrix: {restarts: [0, 1]}",
    )
    run(tmp_path, scenario)
    told = (tmp_path / "told").read_text().split()
    ours = [Path(one).relative_to(tmp_path) for one in told]
    assert len({*told}) == 4, "each arm has its own"
    assert all(re.fullmatch(r"[A-Za-z0-9._/-]+", str(one)) for one in ours), ours


@pytest.mark.long
def test_one_that_does_not_end_is_ended(tmp_path: Path) -> None:
    scenario = write(tmp_path / "s.yaml", command(*ALL_STEPS, "--stubborn"), deadline="3s")
    code, results = run(tmp_path, scenario)
    assert code == 1
    assert "all 30 steps were reported, but the command had not ended 3 s" in results.reason


@pytest.mark.long
def test_a_node_is_the_ranks_on_it(tmp_path: Path) -> None:
    fault = "{id: hit, kind: node-kill, target: {node: 1}, at: {step: 12}}"
    scenario = write(
        tmp_path / "s.yaml",
        command(*ALL_STEPS),
        fault=fault,
        more="launcher: {kind: local, nodes: 2}",
    )
    code, results = run(tmp_path, scenario)
    assert code == 0, results.reason
    assert results.faults[0].outcome == "recovered"


@pytest.mark.skipif(lacks_mount() is not None, reason=f"{lacks_mount()}")
@pytest.mark.long
def test_a_full_disk_under_the_scratch_directory(tmp_path: Path) -> None:
    fault = "{id: full, kind: disk-full, at: {step: 12}, duration: 0.5s}"
    argv = command("--steps", "90", "--restarts", "100", "--save-every", "1")
    code, results = run(tmp_path, write(tmp_path / "s.yaml", argv, fault=fault, steps=90))
    assert code == 0, results.reason
    assert results.faults[0].evidence == {"errno": "ENOSPC"} and results.faults[0].healed
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize(
    "mode",
    [
        "truncate",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("missing", "bitflip", "stale")),
    ],
)
def test_a_corrupt_checkpoint_of_its_own(tmp_path: Path, mode: str) -> None:
    what = f"kind: checkpoint-corrupt, params: {{mode: {mode}}}, target: {{checkpoint: latest}}"
    rot = f"{{id: rot, {what}, at: {{step: 12}}}}"
    scenario = write(
        tmp_path / "s.yaml",
        command(*ALL_STEPS, "--save-every", "11"),
        fault=f"{rot}, {KILL}",
        workload="  checkpoint: {directory: $CHAOS_SCRATCH/saved}",
        baseline="paired",
        more='sla: {steps_lost: ["max <= 30"]}',  # without it, from the beginning is too much
    )
    code, results = run(tmp_path, scenario)
    rotten, killed = results.faults
    assert rotten.landed and rotten.evidence["complaint"].startswith("checkpoint.json ")
    # without it, from the beginning; with it, never again
    assert code == (0 if mode == "missing" else 1)
    # the command trains on until the kill is noticed, and would save again at step 22
    if mode == "missing":
        assert killed.outcome == "recovered" and 11 <= killed.steps_lost < 22
    else:
        assert (killed.outcome, killed.steps_lost) == ("fail-stop", 0)


@pytest.mark.long
def test_a_fault_fires_again_at_its_step_and_not_while_the_job_starts(tmp_path: Path) -> None:
    fault = "{id: hit, kind: process-kill, target: {rank: 0}, at: {step: 13}, retrigger: {max: 2}}"
    code, results = run(tmp_path, write(tmp_path / "s.yaml", command(*ALL_STEPS), fault=fault))
    assert code == 0, results.reason
    second = events(tmp_path, Kind.FAULT_INJECTED)[1]
    before = [
        e.step for e in events(tmp_path, Kind.STEP_REPORTED) if e.generation == second.generation
    ]
    assert second.generation == 2 and second.step == 13 and before[:2] == [11, 12]


def start(tmp_path: Path, scenario: Path) -> subprocess.Popen[bytes]:
    """The harness as a process of its own, in the middle of training."""
    harness = subprocess.Popen(
        chaos_run(scenario, tmp_path / "runs", "--quiet"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + DEADLINE_S
    log = tmp_path / "runs/script/latest/events/default.r0.faulted/orchestrator.jsonl"
    while not (log.exists() and "step_reported" in log.read_text()):
        assert time.monotonic() < deadline and harness.poll() is None
        select_briefly()
    assert living(tmp_path)
    return harness


def select_briefly() -> None:
    """Give the processor away."""
    signal.sigtimedwait([], 0.02)


def gone(tmp_path: Path) -> bool:
    """Whether nothing lives before the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while living(tmp_path) and time.monotonic() < deadline:
        select_briefly()
    return not living(tmp_path)


def test_ctrl_c_ends_everything_and_judges_what_there_is(tmp_path: Path) -> None:
    harness = start(tmp_path, write(tmp_path / "s.yaml", command("--steps", "3000"), steps=3000))
    harness.send_signal(signal.SIGINT)
    assert harness.wait(DEADLINE_S) == 130
    assert gone(tmp_path)
    results = Results.model_validate_json(
        (tmp_path / "runs/script/latest/results.json").read_text()
    )
    assert results.verdict == "interrupted"


def test_a_killed_harness_leaves_nothing(tmp_path: Path) -> None:
    argv = command("--steps", "3000", "--daemon", "--stubborn")
    harness = start(tmp_path, write(tmp_path / "s.yaml", argv, steps=3000))
    harness.kill()
    harness.wait(DEADLINE_S)
    assert gone(tmp_path)


@pytest.mark.long
def test_a_killed_guard_leaves_nothing(tmp_path: Path) -> None:
    argv = command("--steps", "3000", "--daemon")
    harness = start(tmp_path, write(tmp_path / "s.yaml", argv, steps=3000))
    (guard,) = [
        pid for pid in living(tmp_path) if "guard.py" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(guard, signal.SIGKILL)
    assert harness.wait(DEADLINE_S) == 4  # that is not the command's failure
    assert gone(tmp_path)
