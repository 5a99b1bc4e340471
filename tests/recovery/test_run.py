"""``python -m trainchaos.recovery.run``: a script of anybody's, supervised without the harness,
broken and recovered for real.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.decided import decided
from tests.support.running import EPOCHS, LIMIT_S, RECOVERABLE, ROOT, STEPS, Running, kill, readable
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.results import Results
from trainchaos.recovery import run as command
from trainchaos.recovery.health.signs import HealthReport, ReportFile
from trainchaos.recovery.health.taints import TaintList
from trainchaos.recovery.policy import strategies
from trainchaos.recovery.policy.strategy import Strategy

WORKERS = """
import torch
from trainchaos import recovery
job = recovery.join(samples=64, steps=1_000_000, global_batch=4)
model = torch.nn.Linear(2, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
batches = iter(torch.utils.data.DataLoader(torch.arange(64), num_workers=1))
next(batches)
while job.running():
    with job.step() as step:
        step.backward(model(torch.ones(len(step.samples), 2)).sum())
        step.commit()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts jobs; none outlives the test."""
    started: list[Running] = []

    def begin(*arguments: str | Path, folder: str = "job") -> Running:
        (tmp_path / folder).mkdir()
        started.append(Running(tmp_path / folder, *arguments))
        return started[-1]

    yield begin
    for job in started:
        job.process.kill()
        job.process.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Digest of the job nobody disturbs."""
    job = Running(tmp_path_factory.mktemp("unharmed"), "--ranks", "4", RECOVERABLE, EPOCHS)
    assert job.end() == 0, job.said
    return job.digest()


@pytest.mark.real
@pytest.mark.parametrize(
    ("options", "exact"),
    [
        (("--strategy", "hot-spare", "--spares", "1"), True),
        pytest.param(
            ("--strategy", "checkpoint-restart", "--every", "15"), True, marks=pytest.mark.long
        ),
        pytest.param(("--strategy", "drop-replica"), False, marks=pytest.mark.long),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_killed_rank_is_recovered_without_the_harness(
    start: Callable[..., Running],
    unharmed: dict[str, object],
    options: tuple[str, ...],
    exact: bool,
) -> None:
    job = start("--ranks", "4", *options, RECOVERABLE, EPOCHS)
    job.wait_for(lambda: job.trained(40))
    kill(job.pid_of("w2"))
    assert job.end() == 0, job.said
    assert "failure: rank 2 (w2), exit: " in job.said and "w2 ended: signal 9" in job.said
    assert "recovery: decision: " in job.said and "recovery: recovered: step " in job.said
    assert f"recovery: completed: {STEPS} steps committed" in job.said
    if exact:
        assert job.digest() == unharmed
    (finished,) = job.of("orchestrator", Kind.RUN_FINISHED)
    assert (finished.data["outcome"], finished.data["committed_step"]) == ("completed", STEPS)


@pytest.mark.real
@pytest.mark.long
def test_a_rank_that_is_told_to_end_soon_is_replaced_without_a_failure(
    start: Callable[..., Running], unharmed: dict[str, object]
) -> None:
    job = start("--ranks", "4", RECOVERABLE, EPOCHS)
    job.wait_for(lambda: job.trained(40))
    kill(job.pid_of("w1"), signal.SIGTERM)
    assert job.end() == 0, job.said
    assert "recovery: notice: rank 1 (w1)" in job.said and "recovery: failure" not in job.said
    assert "w1" not in job.of("orchestrator", Kind.GENERATION_READY)[-1].data["members"]
    assert job.digest() == unharmed


@pytest.mark.long
@pytest.mark.real
def test_a_rank_whose_device_is_about_to_fail_is_replaced_without_a_failure(
    start: Callable[..., Running], unharmed: dict[str, object], tmp_path: Path
) -> None:
    reports = ReportFile(tmp_path / "reports.jsonl")
    taints = tmp_path / "taints.yaml"
    taints.write_text("version: 1\ntaints: []\n")
    care = ("--taints", taints, "--taint-alarms", "--preflight-rejoins")
    watched = ("--health-reports", tmp_path / "reports.jsonl", *care)
    job = start("--ranks", "4", *watched, RECOVERABLE, EPOCHS)
    job.wait_for(lambda: job.trained(40))
    reports.append(HealthReport(what="xid", code=31, rank=0, source="nvml"))
    reports.append(HealthReport(what="xid", code=48, rank=1, source="nvml"))
    assert job.end() == 0, job.said
    assert "recovery: warning: rank 1 (w1)" in job.said and "recovery: failure" not in job.said
    members = job.of("orchestrator", Kind.GENERATION_READY)[-1].data["members"]
    assert "w1" not in members and "w0" in members, "XID 31 is the application's"
    (taint,) = TaintList(taints).read()
    assert (taint.node, taint.by) == (socket.gethostname(), "alarm")
    assert [e.data["by"] for e in job.of("orchestrator", Kind.PLACE_TAINTED)] == ["alarm"]
    checks = job.of("orchestrator", Kind.PLACE_CHECKED)
    assert all(e.data["fit"] and e.data["device"] == "cpu" for e in checks)
    assert job.digest() == unharmed


@pytest.mark.real
@pytest.mark.long
def test_a_job_goes_on_where_an_interrupted_one_stopped(
    start: Callable[..., Running], unharmed: dict[str, object], tmp_path: Path
) -> None:
    kept = (
        "--ranks",
        "4",
        "--checkpoint-dir",
        tmp_path / "kept",
        "--every",
        "20",
        RECOVERABLE,
        EPOCHS,
    )
    first = start(*kept)
    first.wait_for(lambda: first.trained(45))
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
    again = start(*kept, folder="again")
    assert again.end() == 0, again.said
    (ready,) = again.of("orchestrator", Kind.GENERATION_READY)
    assert ready.data["resume_step"] >= 40
    assert f"restored from {ready.data['checkpoint']}" in again.said
    assert again.digest() == unharmed


@pytest.mark.real
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
@pytest.mark.sample(1)
def test_an_ended_supervisor_leaves_nothing(
    start: Callable[..., Running], tmp_path: Path, number: int, code: int
) -> None:
    # A child that looks after itself, and, where somebody is left to end it, one that does not.
    stubborn = (
        "import subprocess; subprocess.Popen(['sleep', '600'])\n" if number == signal.SIGINT else ""
    )
    (tmp_path / "train.py").write_text(stubborn + WORKERS)
    job = start("--ranks", "2", "--spares", "1", tmp_path / "train.py")
    job.wait_for(lambda: job.trained(3))
    pids = [e.data["pid"] for e in job.of("orchestrator", Kind.PROCESS_SPAWNED)]
    below = [child for pid in [job.process.pid, *pids] for child in children_of(pid)]
    assert len(set(pids + below)) >= 3 + 1 + 3, "ranks, fork server, a data loader's worker each"
    fds = [os.pidfd_open(pid) for pid in {*pids, *below}]
    job.process.send_signal(number)
    assert job.end() == code
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    # One that ended by itself has ended the others before; the kernel and they themselves see to it
    # otherwise.
    deadline, left = time.monotonic() + (LIMIT_S if number == signal.SIGKILL else 0.0), set(fds)
    while left:
        ended = poll.poll(1000)
        assert ended or time.monotonic() < deadline, f"{len(left)} processes are left"
        for fd, _ in ended:
            left.discard(fd)
            poll.unregister(fd)
            os.close(fd)


def children_of(pid: int) -> list[int]:
    """Direct children, by all its threads, of which any may end meanwhile."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        pytest.param(
            "from trainchaos import recovery",
            "broken: w",
            id="before it joins",
            marks=pytest.mark.long,
        ),
        pytest.param("    with job.step() as step:", "gave-up: ", id="in a step"),
        pytest.param(
            "        step.commit()", "gave-up: ", id="after a step", marks=pytest.mark.long
        ),
    ],
)
def test_a_script_that_raises_ends_the_job_and_is_quoted(
    start: Callable[..., Running], tmp_path: Path, where: str, complaint: str
) -> None:
    indent = " " * (len(where) - len(where.lstrip()) + 4 * where.endswith(":"))
    (tmp_path / "train.py").write_text(
        WORKERS.replace(where, f"{where}\n{indent}raise KeyError('the cause')")
    )
    job = start("--ranks", "2", "--strategy", "none", "--logs", "logs", tmp_path / "train.py")
    assert job.end() == 1
    assert "KeyError: 'the cause'" in job.said and complaint in job.said
    log = next(
        text
        for path in job.events.parent.glob("logs/*")
        if "Traceback" in (text := path.read_text())
    )
    assert "raise KeyError('the cause')" in log, "the traceback shows the line of the script"


@pytest.mark.real
@pytest.mark.long
def test_a_script_that_leaves_its_loop_early_is_told_so(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(f"{WORKERS}    if step.number == 3:\n        break\n")
    job = start("--ranks", "2", "--strategy", "none", tmp_path / "train.py")
    assert job.end() == 1
    assert "JoinError: the script ended before the job did" in job.said


@pytest.mark.real
@pytest.mark.long
def test_an_interrupt_while_it_starts_ends_it_too(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WORKERS)
    job = start("--ranks", "2", tmp_path / "train.py")
    job.wait_for((job.events / "orchestrator.jsonl").exists)
    below = [os.pidfd_open(pid) for pid in children_of(job.process.pid)]
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130, job.said
    assert "Traceback" not in job.said
    for fd in below:
        assert readable(fd, 0), "it left the process that pre-imports torch"
        os.close(fd)


@pytest.mark.real
@pytest.mark.long
def test_what_follows_the_loop_can_be_interrupted_too(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    text = WORKERS.replace("1_000_000", "3") + "\nimport signal\nwhile True:\n    signal.pause()\n"
    (tmp_path / "train.py").write_text(text)
    job = start("--ranks", "2", "--spares", "1", tmp_path / "train.py")
    job.wait_for(lambda: job.trained(3))
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert "interrupted: SIGINT" in job.said


@pytest.mark.real
@pytest.mark.long
def test_an_error_after_the_last_step_is_no_success(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    text = (
        WORKERS.replace("1_000_000", "3")
        + "\nif job.rank == 1:\n    raise OSError('the disk is full')\n"
    )
    (tmp_path / "train.py").write_text(text)
    job = start("--ranks", "2", "--spares", "1", tmp_path / "train.py")
    assert job.end() == 1
    assert "completed: 3 steps committed" in job.said
    assert "after the last step w1: OSError: the disk is full" in job.said


# ---- the command line

NODES = ["--nodes", "2", "--listen", "127.0.0.1:9", "--token-file", "token"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.py"], "no script nowhere.py"),
        (
            ["--strategy", "hop-spare", __file__],
            "no strategy 'hop-spare'; there are adaptive, checkpoint-restart",
        ),
        (["--strategy", "drop-replica", "--spares", "2", __file__], "keeps no spares"),
        (["--spares", "0", __file__], "hot-spare: spares"),
        (["--param", "speed=9", __file__], "hot-spare: speed"),
        (["--ranks", "0", __file__], "0 is less than 1"),
        (["--events", "/proc/nowhere", __file__], "choose --events and --logs"),
        ([], "required: script"),
        (["--adopt", __file__], "--adopt, --listen and --token-file are for --nodes"),
        (["--nodes", "2", __file__], "--nodes needs --listen HOST:PORT and --token-file FILE"),
        (["--nodes", "2", "--listen", "here", __file__], "not HOST:PORT: 'here'"),
        (
            [*NODES, "--memory-checkpoints", "5", __file__],
            "--memory-checkpoints and --logs are for one machine",
        ),
        ([*NODES, "--adopt", __file__], "--adopt needs --events DIR"),
        (["--device", "cpu", "--backend", "nccl", __file__], "use --device cuda, or gloo"),
        ([*NODES, "--backend", "nccl", __file__], "use --device cuda, or gloo"),
        (
            ["--ranks", "1", "--spares", "1", *NODES, "--nodes", "3", __file__],
            "3 nodes for 2 processes",
        ),
    ],
)
def test_a_command_line_that_cannot_be_is_refused_before_anything_starts(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_events_of_another_job_are_not_mixed_with_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "orchestrator.jsonl").write_text("")
    with pytest.raises(SystemExit):
        command.main(["--events", str(tmp_path), __file__])
    assert "holds the events of another job" in capsys.readouterr().err


def test_every_strategy_is_found_by_its_name() -> None:
    assert {"hot-spare", "drop-replica", "checkpoint-restart", "none"} <= set(strategies.names())
    for name in strategies.names():
        kind = strategies.find(name)
        assert issubclass(kind, Strategy) and strategies.name_of(kind()) == name


# ---- the same script under the harness


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("phase", ["forward", pytest.param("backward", marks=pytest.mark.long)])
def test_the_harness_runs_it_under_its_faults(tmp_path: Path, phase: str) -> None:
    options = (
        "--set",
        "matrix.recovery=[hot-spare]",
        "--set",
        f"faults.kill.at.phase={phase}",
        "--set",
        "workload.steps=96",
        "--set",
        'workload.params.args=["3"]',
    )
    code, results = harness_run(tmp_path, ROOT / "examples" / "recoverable.yaml", *options)
    assert code == 0, results.reason
    assert [cell.exactness for cell in results.cells] == ["bit for bit"]
    assert [fault.landed and fault.healed for fault in results.faults] == [True]


def harness_run(folder: Path, scenario: Path, *options: str) -> tuple[int, Results]:
    """Run a scenario; exit code and results."""
    code = decided(scenario, folder / "runs", ("-q", *options))
    (latest,) = folder.glob("runs/*/latest")
    return code, Results.model_validate_json((latest / "results.json").read_text())


FAILING = """
import sys, torch
from trainchaos import recovery
job = recovery.join(samples=64, global_batch=4)
torch.manual_seed(job.seed)
model = torch.nn.Linear(2, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
while job.running():
    with job.step() as step:
        loss = model(torch.ones(len(step.samples), 2)).sum()
        if step.number == 20 and job.rank == 1:
            raise KeyError("the cause")
        step.backward(loss)
        step.commit()
"""


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A scenario whose script has a defect of its own, in step 20."""
    (tmp_path / "train.py").write_text(FAILING)
    (tmp_path / "failing.yaml").write_text(
        f"""
version: 1
name: failing
baseline: none
workload:
  kind: script
  params: {{path: {tmp_path / "train.py"}}}
  ranks: 2
  steps: 40
  global_batch: 4
recovery: hot-spare
faults: [{{id: kill, kind: process-kill, target: {{rank: 0}}, at: {{step: 10}}}}]
"""
    )
    return tmp_path / "failing.yaml"


@pytest.mark.long
@pytest.mark.real
def test_a_defect_of_the_script_is_no_fault_of_the_scenario_and_is_quoted(
    failing: Path, tmp_path: Path
) -> None:
    code, results = harness_run(tmp_path, failing)
    assert code == 1
    assert "a failure that no fault explains" in results.reason
    assert "KeyError: 'the cause'" in results.reason
    logs = [path.read_text() for path in tmp_path.glob("runs/failing/latest/logs/*/*.log")]
    assert any('raise KeyError("the cause")' in text for text in logs)


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("workload.global_batch=8", "workload.global_batch is 8, and script"),
        ("workload.params.path=nowhere.py", "the script nowhere.py cannot be read"),
    ],
)
def test_a_script_that_does_not_fit_its_scenario_is_refused_before_anything_starts(
    failing: Path, tmp_path: Path, option: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        invoke(["run", str(failing), "--runs", str(tmp_path / "runs"), "-q", "--set", option]) == 2
    )
    assert complaint in capsys.readouterr().err
