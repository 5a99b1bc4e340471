"""Whole runs in jobs of a real Slurm: what is lost, told, preempted and left behind."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters.slurm_cluster import SlurmCluster, cluster, lacking, skip_or_fail
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import EXIT_HARNESS, EXIT_PASS, EXIT_SKIPPED, EXIT_TERMINATED
from trainchaos.harness.host.processes import environment_has, since

pytestmark = [pytest.mark.real, pytest.mark.slurm]

ROOT = Path(__file__).resolve().parents[4]
SPARE_NODE = "scenarios/nodes/lost-node-spare-node.yaml"
RUN_LIMIT_S = 120.0
OPTIONS = ("--no-kill", "--cpus-per-task=2")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    reason = lacking()
    if reason:
        skip_or_fail(reason)
    with cluster(4, kill_wait_s=15) as found:
        yield found


class Job:
    """A batch job that runs chaos; its run directories lie below ``runs``."""

    def __init__(
        self,
        slurm: SlurmCluster,
        runs: Path,
        *arguments: str,
        nodes: int,
        options: tuple[str, ...] = (),
    ) -> None:
        self.slurm, self.runs = slurm, runs
        command = [sys.executable, "-m", "trainchaos", "run", *arguments, "--runs", str(runs)]
        script = f"cd {shlex.quote(str(ROOT))}\nexec {shlex.join(command)}"
        slurm.until(lambda: set(slurm.states().values()) == {"IDLE"}, "all nodes to be idle")
        self.id = slurm.submit(script, *OPTIONS, *options, nodes=nodes)

    def until_said(self, words: str, limit_s: float = RUN_LIMIT_S) -> None:
        """Wait until it prints something."""
        self.slurm.until(
            lambda: words in self.slurm.output(self.id), f"{words!r} in {self.said()}", limit_s
        )

    def until_trains(self) -> None:
        """Wait until a first arm has gone some steps."""
        self.until_said("step ")

    def ended(self, limit_s: float = RUN_LIMIT_S) -> int:
        """Wait for its end; chaos's exit code."""
        self.slurm.ended(self.id, limit_s)
        return int(self.slurm.job(self.id)["ExitCode"].partition(":")[0])

    def said(self) -> str:
        """All it printed."""
        return self.slurm.output(self.id)

    def results(self) -> dict[str, Any]:
        """Of its last run."""
        newest = max(self.runs.glob("*/2*/results.json"), key=lambda path: path.stat().st_mtime_ns)
        found: dict[str, Any] = json.loads(newest.read_text())
        return found


def nothing_is_left(slurm: SlurmCluster, runs: Path, job: str) -> None:
    """No process of the job, no step, no run that still needs healing."""
    entry = f"SLURM_JOB_ID={job}"
    slurm.until(
        lambda: not [p for p, _ in since(0) if environment_has(p, entry)],
        "its processes to end",
    )
    assert not list(runs.glob("*/*/live.json"))


@pytest.mark.smoke
def test_a_node_that_is_killed_is_replaced_by_a_spare_node(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, SPARE_NODE, "--launcher", "slurm", nodes=4)
    assert job.ended() == EXIT_PASS, job.said()
    assert "not used unless a node is lost: n4" in job.said()
    (fault,) = job.results()["faults"]
    assert fault["landed"]
    nothing_is_left(slurm, tmp_path, job.id)


@pytest.mark.long
def test_a_node_that_slurm_loses_too_is_replaced_by_a_spare_node(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    long = (
        "--set",
        "workload.steps=300",
        "--set",
        "faults=[]",
        "--set",
        "baseline=none",
        "--set",
        "sla={}",
    )
    job = Job(slurm, tmp_path, SPARE_NODE, "--launcher", "slurm", *long, nodes=4)
    job.until_trains()
    slurm.lose("n2")
    try:
        job.until_said("node 1 is lost")
        job.until_said("take over from")
        job.ended()
        assert "300 steps" in job.said(), job.said()
    finally:
        slurm.until(lambda: slurm.states()["n2"].startswith("DOWN"), "Slurm to give n2 up")
        slurm.start_node("n2")


@pytest.mark.long
def test_sigterm_heals_and_gives_a_verdict_that_names_slurm(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(
        slurm, tmp_path, SPARE_NODE, "--launcher", "slurm", "--set", "workload.steps=2000", nodes=3
    )
    job.until_trains()
    slurm.run("scancel", "--signal=TERM", "--batch", job.id)
    assert job.ended(30.0) == EXIT_TERMINATED
    results = job.results()
    assert results["verdict"] == "interrupted"
    assert f"Slurm told job {job.id} to end" in results["reason"]
    nothing_is_left(slurm, tmp_path, job.id)


@pytest.mark.long
def test_a_preempted_job_heals_in_its_grace_and_begins_anew_when_requeued(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(
        slurm,
        tmp_path,
        SPARE_NODE,
        "--launcher",
        "slurm",
        "--set",
        "workload.steps=2000",
        nodes=3,
        options=("--requeue",),
    )
    job.until_trains()
    # All four nodes, so that it begins when the last of the preempted job is over.
    urgent = slurm.submit("exec true", "--partition=urgent", "--exclusive", nodes=4)
    job.until_said("told by SIGTERM that it will be ended soon")
    slurm.ended(urgent, 60.0)
    assert job.results()["verdict"] == "interrupted"
    nothing_is_left(slurm, tmp_path, job.id)
    slurm.until(lambda: slurm.job(job.id)["JobState"] == "PENDING", "the job to be queued again")
    slurm.run("scontrol", "update", f"jobid={job.id}", "starttime=now")
    job.until_said("it was requeued (restart 1): this run begins anew")
    slurm.run("scancel", "--signal=TERM", "--batch", job.id)
    slurm.ended(job.id)
    assert len(list(tmp_path.glob("lost-node-spare-node/2*"))) == 2


@pytest.mark.long
def test_two_runs_in_one_allocation_do_not_know_each_other(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    one = [sys.executable, "-m", "trainchaos", "run", SPARE_NODE, "--launcher", "slurm", "-q"]
    runs = [shlex.join([*one, "--runs", str(tmp_path / name)]) for name in ("a", "b")]
    script = (
        f"cd {ROOT}\n{runs[0]} & first=$!\n{runs[1]}; second=$?\nwait $first; exit $(( $? +"
        " second ))"
    )
    slurm.until(lambda: set(slurm.states().values()) == {"IDLE"}, "all nodes to be idle")
    job = slurm.submit(script, *OPTIONS, nodes=3)
    try:
        assert slurm.ended(job, 2 * RUN_LIMIT_S) == "COMPLETED", slurm.output(job)
    finally:  # else the next tests would wait for its nodes
        slurm.run("scancel", "--quiet", job, check=False)
    assert slurm.output(job).count("PASS") == 2
    for name in ("a", "b"):
        nothing_is_left(slurm, tmp_path / name, job)


@pytest.fixture
def inside(slurm: SlurmCluster) -> Iterator[dict[str, str]]:
    """The environment in an allocation that outlives what runs in it, as with salloc."""
    slurm.until(lambda: set(slurm.states().values()) == {"IDLE"}, "all nodes to be idle")
    holder = slurm.submit("exec sleep 600", *OPTIONS, nodes=3)
    slurm.until(lambda: slurm.job(holder).get("JobState") == "RUNNING", "the allocation")
    nodelist = slurm.job(holder)["NodeList"]
    yield {**slurm.environment, "SLURM_JOB_ID": holder, "SLURM_JOB_NODELIST": nodelist}
    slurm.run("scancel", holder)
    slurm.ended(holder)
    slurm.until(lambda: not processes_of(holder), "its processes to end")


def processes_of(job: str) -> list[int]:
    """Living processes of a job."""
    entry = f"SLURM_JOB_ID={job}"
    return [pid for pid, _ in since(0) if environment_has(pid, entry)]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_ended_at_any_moment_leaves_nothing(
    slurm: SlurmCluster, inside: dict[str, str], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    number = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[seed]
    chaos, log = [sys.executable, "-m", "trainchaos"], tmp_path / "log"
    command = [
        *chaos,
        "run",
        SPARE_NODE,
        "--launcher",
        "slurm",
        "--set",
        "workload.steps=2000",
        "--runs",
        str(tmp_path),
    ]
    with log.open("wb") as out:
        harness = subprocess.Popen(command, env=inside, stdout=out, stderr=out, cwd=ROOT)
    try:
        words = rng.choice(["Slurm job", "[1/2]", "step "])
        slurm.until(lambda: words in log.read_text(), f"{words!r} in the output", RUN_LIMIT_S)
        with pytest.raises(subprocess.TimeoutExpired):
            harness.wait(timeout=rng.uniform(0.0, 2.0))
        harness.send_signal(number)
        harness.wait(timeout=60.0)
    finally:
        harness.kill()
        harness.wait(timeout=120)
    healed = chaos_in(slurm, tmp_path, "heal", **inside)
    assert healed.returncode == EXIT_PASS, healed.stdout + healed.stderr + log.read_text()
    steps = slurm.run(
        "squeue", "--steps", "--noheader", "--format=%j", f"--jobs={inside['SLURM_JOB_ID']}"
    ).split()
    assert not [name for name in steps if name.startswith("chaos-")]
    assert not list(tmp_path.glob("*/*/live.json"))


def chaos_in(
    slurm: SlurmCluster, runs: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``chaos`` as a user would run it."""
    return subprocess.run(
        [sys.executable, "-m", "trainchaos", *arguments, "--runs", str(runs)],
        env={**slurm.environment, **environment},
        capture_output=True,
        text=True,
        timeout=60.0,
        cwd=ROOT,
        check=False,
    )


def test_outside_of_an_allocation_it_says_how_to_get_one(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    ran = chaos_in(slurm, tmp_path, "run", SPARE_NODE, "--launcher", "slurm", "-q")
    assert ran.returncode == EXIT_SKIPPED
    assert "not inside a Slurm allocation" in ran.stdout
    assert "chaos plan --sbatch" in ran.stdout


def test_too_few_nodes_are_named_with_what_to_ask_for(slurm: SlurmCluster, tmp_path: Path) -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    ran = chaos_in(slurm, tmp_path, "run", SPARE_NODE, "--launcher", "slurm", "-q", **inside)
    assert ran.returncode == EXIT_SKIPPED
    assert (
        "wants 3 nodes (spare ones included), allocation 7 has 2 (n1, n2): ask for them with"
        " --nodes=3" in ran.stdout
    )


@pytest.mark.long
def test_a_silent_controller_at_the_start_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    reason = lacking()
    if reason:
        skip_or_fail(reason)
    with cluster(1) as own:
        own.stop_controller()
        inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
        one = (
            "--set",
            "launcher={kind: slurm, nodes: 1}",
            "--set",
            "faults=[]",
            "--set",
            "sla={}",
            "--set",
            "recovery=none",
        )
        ran = chaos_in(own, tmp_path, "run", SPARE_NODE, "-q", *one, **inside)
        assert ran.returncode == EXIT_HARNESS, ran.stdout + ran.stderr
        assert "the Slurm controller does not answer" in ran.stdout
        assert "scontrol ping" in ran.stdout


def test_the_printed_batch_script_is_one_that_slurm_takes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    launcher = (
        "launcher={kind: slurm, nodes: 3, params: {reserve_nodes: 1, partition: urgent, extra:"
        " [--comment=x]}}"
    )
    planned = subprocess.run(
        [sys.executable, "-m", "trainchaos", "plan", "--sbatch", SPARE_NODE, "--set", launcher],
        capture_output=True,
        text=True,
        timeout=60.0,
        cwd=ROOT,
        env=dict(os.environ),
        check=True,
    )
    script = tmp_path / "job.sh"
    script.write_text(planned.stdout)
    job = slurm.run("sbatch", "--parsable", "--hold", str(script)).strip()
    try:
        said = slurm.job(job)
        assert (said["NumNodes"], said["Partition"], said["Comment"]) == ("4-4", "urgent", "x")
        assert said["TimeLimit"] == "00:10:00"
    finally:
        slurm.run("scancel", job)


def test_the_script_excludes_tainted_nodes_that_slurm_knows(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """It is submitted to Slurm itself, which refuses a script that excludes a node it has not."""
    host = sorted(slurm.states())[1]
    taints = tmp_path / "taints.yaml"
    for place in (f"{host}.example.com", "no-node-of-slurm", "0"):
        assert invoke(["taint", "add", place, "--reason", "XID 79", "--taints", str(taints)]) == 0
    launcher = "launcher={kind: slurm, nodes: 3, params: {extra: [--exclude=n9]}}"
    words = ("--sbatch", SPARE_NODE, "--set", launcher, "--taints", str(taints))
    ran = subprocess.run(
        [sys.executable, "-m", "trainchaos", "plan", *words],
        capture_output=True,
        text=True,
        timeout=60.0,
        cwd=ROOT,
        env={**os.environ, **slurm.environment},
        check=True,
    )
    assert f"#SBATCH --exclude={host},n9\n" in ran.stdout, ran.stderr
    assert f"--taints {taints}" in ran.stdout
    script = tmp_path / "job.sh"
    script.write_text(ran.stdout)
    refused = slurm.run("sbatch", "--parsable", "--hold", str(script), check=False)
    assert not refused.strip().isdecimal(), "the user's own exclusion of a node that is not there"
    script.write_text(ran.stdout.replace(",n9", ""))
    job = slurm.run("sbatch", "--parsable", "--hold", str(script)).strip()
    try:
        assert slurm.job(job)["ExcNodeList"] == host
    finally:
        slurm.run("scancel", job)
