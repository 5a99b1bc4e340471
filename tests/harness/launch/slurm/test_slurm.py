"""What Slurm is asked and told, with its commands imagined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.slurm_commands import (
    Commands,
    ControllerSilent,
    Ran,
    records,
    run_command,
    srun,
)
from trainchaos.harness.host.slurm_facts import facts
from trainchaos.harness.launch.slurm.allocation import (
    allocation,
    too_few,
    without_tainted,
)
from trainchaos.harness.launch.slurm.script import excluded
from trainchaos.harness.launch.slurm.step import step_environment
from trainchaos.harness.launch.slurm.watch import AllocationWatch
from trainchaos.harness.undo.slurm import CancelSteps
from trainchaos.recovery.health.taints import Taint, made, of_place

INSIDE = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-3]"}


class FakeSlurm:
    """Answers by what a command begins with; keeps what it was asked."""

    def __init__(self, answers: Mapping[str, Ran | str]) -> None:
        self.answers = dict(answers)
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str], limit_s: float) -> Ran:
        line = " ".join(command)
        self.asked.append(line)
        answer = next(
            (answer for begins, answer in self.answers.items() if line.startswith(begins)), None
        )
        assert answer is not None, f"nobody expected {line}"
        return Ran(code=0, out=answer) if isinstance(answer, str) else answer


HOSTS = {"scontrol show hostnames n[1-3]": "n1\nn2\nn3\n"}
SILENCE = Ran(
    code=1, err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
)


def test_an_allocation_is_read_from_the_environment_in_the_order_of_its_node_list() -> None:
    found = allocation(
        {**INSIDE, "SLURM_RESTART_COUNT": "2", "SLURM_PROCID": "2"}, Commands(FakeSlurm(HOSTS))
    )
    assert found is not None
    assert (found.job, found.hosts, found.restarts) == ("12", ("n1", "n2", "n3"), 2)


def test_outside_of_an_allocation_there_is_none() -> None:
    assert allocation({"PATH": "/bin"}, Commands(FakeSlurm({}))) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_JOB_ID": "12"}, "SLURM_JOB_NODELIST is not set"),
        ({**INSIDE, "SLURM_STEP_NUM_TASKS": "3"}, "started chaos several times"),
    ],
)
def test_an_allocation_that_nothing_can_be_run_in_is_refused(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(InfrastructureError, match=words) as refused:
        allocation(environment, Commands(FakeSlurm(HOSTS)))
    assert refused.value.hint


def test_too_few_nodes_says_how_many_and_how_to_ask_for_them() -> None:
    found = allocation(INSIDE, Commands(FakeSlurm(HOSTS)))
    assert found is not None
    assert too_few(found, 3) is None
    said = too_few(found, 4) or ""
    for part in (
        "wants 4 nodes",
        "allocation 12 has 3 (n1, n2, n3)",
        "--nodes=4",
        "chaos plan --sbatch",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("shown", "lost", "text"),
    [
        ("NodeName=n1 State=IDLE NodeAddr=10.0.0.1", False, "IDLE"),
        (
            "NodeName=n1 State=ALLOCATED+DRAIN Reason=bad fan [root@2026-01-01]",
            False,
            "ALLOCATED+DRAIN (bad fan)",
        ),
        ("NodeName=n1 State=IDLE*", False, "IDLE+NOT_RESPONDING"),
        ("NodeName=n1 State=MIXED+NOT_RESPONDING", False, "MIXED+NOT_RESPONDING"),
        (
            "NodeName=n1 State=DOWN*+DRAIN Reason=Not responding [slurm@x]",
            True,
            "DOWN+DRAIN+NOT_RESPONDING",
        ),
        ("NodeName=n1 State=DOWN", True, "DOWN"),
        ("NodeName=n1 State=IDLE+POWERED_DOWN", True, "IDLE+POWERED_DOWN"),
    ],
)
def test_a_lost_node_is_told_from_a_slow_and_a_draining_one(
    shown: str, lost: bool, text: str
) -> None:
    node = Commands(FakeSlurm({"scontrol": shown + "\n"})).nodes(["n1"])["n1"]
    assert node.lost is lost
    assert str(node).startswith(text)


def tainted(*places: str) -> list[Taint]:
    fields = {"reason": "XID 79", "since": datetime(2026, 11, 1, tzinfo=UTC), "by": "person"}
    return [made({**of_place(place), **fields}) for place in places]


def test_tainted_hosts_of_an_allocation_are_left_out() -> None:
    found = allocation(INSIDE, Commands(FakeSlurm(HOSTS)))
    assert found is not None
    left, bad = without_tainted(found, tainted("n2.example.com", "n3/cuda:0", "1"))
    assert left.hosts == ("n1", "n3") and list(bad) == ["n2"]
    assert too_few(found, 2, tainted("n2")) is None
    said = too_few(found, 3, tainted("n2")) or ""
    assert "of allocation 12 2 of 3 are not tainted: n2 (XID 79)" in said
    assert too_few(found, 4, tainted("n2")) == too_few(found, 4)


def test_a_job_excludes_tainted_nodes_by_the_names_that_slurm_has() -> None:
    taints = tainted("n2.example.com", "elsewhere", "n3/cuda:0", "1")
    assert excluded(taints, ["n1", "n2", "n3"]) == ("n2",)
    assert excluded(taints, None) == ("n2.example.com", "elsewhere"), "a number names no host"
    slurm = FakeSlurm({SHOW_NODE: "NodeName=n1 A=b\nNodeName=n2 State=IDLE\n"})
    assert Commands(slurm).known() == ("n1", "n2")


def test_values_with_blanks_end_where_the_next_key_begins() -> None:
    line = "NodeName=n1 OS=Linux 6.1 #1 SMP x=y RealMemory=1 Reason=a fan, it said: a=b State=DOWN"
    assert list(records(line)) == [
        {
            "NodeName": "n1",
            "OS": "Linux 6.1 #1 SMP x=y",
            "RealMemory": "1",
            "State": "DOWN",
            "Reason": "a fan, it said: a=b",
        }
    ]


def test_a_silent_controller_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ControllerSilent, match="does not answer: slurm_load_jobs") as silent:
        Commands(FakeSlurm({"scontrol": SILENCE})).job("12")
    assert "scontrol ping" in silent.value.hint


def test_a_command_that_does_not_end_is_a_silent_controller() -> None:
    with pytest.raises(ControllerSilent, match=r"did not end within 0\.05 s"):
        run_command(["sleep", "60"], 0.05)


def test_a_missing_command_says_so() -> None:
    with pytest.raises(InfrastructureError, match="cannot run no-such-srun: No such file"):
        run_command(["no-such-srun"], 1.0)


def test_a_job_that_slurm_has_forgotten_is_none() -> None:
    forgotten = Ran(code=1, err="slurm_load_jobs error: Invalid job id specified\n")
    assert Commands(FakeSlurm({"scontrol": forgotten})).job("12") is None


def test_srun_takes_the_whole_node_once_and_survives_the_loss_of_another() -> None:
    words = srun(
        job="12", host="n2", name="chaos-x-n1.0", command=["python", "-m", "trainchaos", "agent"]
    )
    assert words[0] == "srun"
    assert words[-4:] == ["python", "-m", "trainchaos", "agent"]
    for option in (
        "--jobid=12",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=n2",
        "--overlap",
        "--no-kill",
        "--mem=0",
    ):
        assert option in words


def test_a_step_is_not_subject_to_the_batch_scripts_own_options() -> None:
    own = {
        "SLURM_NTASKS": "4",
        "SLURM_CPU_BIND": "cores",
        "SLURM_CONF": "/x",
        "PATH": "/bin",
        "SRUN_CPUS_PER_TASK": "3",
    }
    assert step_environment(own, {"CHAOS": "1"}) == {
        "SLURM_CONF": "/x",
        "PATH": "/bin",
        "CHAOS": "1",
    }


RUNNING = "JobId=12 JobState=RUNNING Reason=None NodeList=n[1-3]\n"
NODES = "NodeName=n1 State=ALLOCATED\nNodeName=n2 State=DOWN Reason=Not responding [slurm@x]\n"
SHOW_JOB, SHOW_NODE = "scontrol --oneliner show job", "scontrol --oneliner show node"


@contextmanager
def watching(fake: FakeSlurm, now_s: list[float]) -> Iterator[AllocationWatch]:
    """A watch that has looked once, whose clock is ``now_s``."""
    watch = AllocationWatch(
        Commands(fake), "12", ["n1", "n2"], name="chaos-try", clock_s=lambda: now_s[0]
    )
    try:
        watch.look()
        yield watch
    finally:
        watch.close()


def test_the_watch_tells_lost_nodes_and_a_lost_job_and_keeps_both_while_nobody_answers() -> None:
    fake, now_s = FakeSlurm({SHOW_JOB: RUNNING, SHOW_NODE: NODES}), [100.0]
    with watching(fake, now_s) as watch:
        assert not any(watch.ask() for _ in range(1000)), "the controller is asked once a second"
        fake.answers[SHOW_JOB] = SILENCE
        with pytest.raises(ControllerSilent):
            watch.look()
        assert watch.lost("n1") is None and not watch.over()
        assert watch.lost("n2") == "Slurm says that n2 is DOWN (Not responding)"
        fake.answers[SHOW_JOB] = "JobId=12 JobState=PREEMPTED Reason=Preempted\n"
        watch.look()
        assert watch.lost("n1") == "the allocation is over: job 12 is PREEMPTED (Preempted)"
        assert watch.over()
        now_s[0] += 1.0
        assert watch.ask()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Ran(code=0), None),
        (Ran(code=1, err="srun: error: true: not found"), None),
        (
            Ran(code=1, err="srun: error: Task launch for StepId=12.4 failed on node n1: refused"),
            "n1 runs nothing",
        ),
    ],
)
def test_a_silent_node_is_tried_after_a_while_and_only_then(answer: Ran, why: str | None) -> None:
    shown = "NodeName=n1 State=ALLOCATED\nNodeName=n2 State=ALLOCATED\n"
    fake, now_s = FakeSlurm({SHOW_JOB: RUNNING, SHOW_NODE: shown, "srun": answer}), [100.0]
    with watching(fake, now_s) as watch:
        watch.close()  # the test looks in the thread's place
        for passed_s in (0.0, 1.0, 2.0):
            now_s[0] = 100.0 + passed_s
            assert watch.lost("n1", silent=True) is None
            watch.try_doubted()
        assert not any(line.startswith("srun") for line in fake.asked)
        now_s[0] = 103.5
        watch.lost("n1", silent=True)
        watch.try_doubted()
        assert (watch.lost("n1", silent=True) or "").startswith(why or "")
        assert watch.usable("n1") is (why is None)
        assert watch.lost("n2", silent=True) is None
        assert sum(line.startswith("srun") for line in fake.asked) == 1


def test_the_facts_of_a_run_name_its_job_and_that_it_was_requeued() -> None:
    assert facts({"PATH": "/bin"}) == {}
    assert facts(INSIDE) == {"slurm": {"job": "12", "nodes": "n[1-3]", "partition": ""}}
    again = facts({**INSIDE, "SLURM_RESTART_COUNT": "2"})["slurm"]
    assert again["requeued"] == "restart 2: this run began anew"


def test_only_the_runs_own_steps_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = "chaos-0123456789abcdef-", "chaos-fedcba9876543210-"
    listed = [
        f"12.1|n1|{mine}n0.0",
        f"12.2|n2|{other}n0.0",
        "12.batch|n1|batch",
        f"12.3|n2|{mine}n1.0",
    ]
    shown = {
        f"{SHOW_JOB} 12": RUNNING,
        SHOW_NODE: "NodeName=n1 State=IDLE\n",
    }
    fake = FakeSlurm({**HOSTS, **shown})

    def run(command: Sequence[str], limit_s: float) -> Ran:
        line = " ".join(command)
        if line.startswith("squeue"):
            return Ran(code=0, out="\n".join(listed))
        if line.startswith("scancel"):
            listed[:] = [row for row in listed if not row.startswith(f"{command[-1]}|")]
        return fake(command, limit_s) if not line.startswith("scancel") else Ran(code=1, err="odd")

    monkeypatch.setattr("trainchaos.harness.undo.slurm.run_command", run)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    outcome = CancelSteps.of("12", mine).undo()
    assert (outcome.ok, outcome.did, outcome.text) == (
        True,
        True,
        "cancelled steps 12.1, 12.3 of Slurm",
    )
    assert listed == [f"12.2|n2|{other}n0.0", "12.batch|n1|batch"]
    again = CancelSteps.of("12", mine).undo()
    assert (again.ok, again.did) == (True, False)


def test_a_step_on_a_node_that_has_left_the_job_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = "chaos-0123456789abcdef-"
    answers = {
        **HOSTS,
        "squeue": f"12.3|n7|{mine}n1.0",
        "scancel": Ran(code=1, err="odd"),
        f"{SHOW_JOB} 12": RUNNING,
        SHOW_NODE: "NodeName=n7 State=IDLE\n",
    }
    monkeypatch.setattr("trainchaos.harness.undo.slurm.run_command", FakeSlurm(answers))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    outcome = CancelSteps.of("12", mine).undo()
    assert outcome.ok
    assert "12.3 is on a node that Slurm has lost" in outcome.text


def test_steps_of_a_job_that_is_over_need_no_undoing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm(
        {"scontrol": Ran(code=1, err="slurm_load_jobs error: Invalid job id specified")}
    )
    monkeypatch.setattr("trainchaos.harness.undo.slurm.run_command", fake)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    outcome = CancelSteps.of("12", "chaos-0123456789abcdef-").undo()
    assert (outcome.ok, outcome.did) == (True, False)


def test_a_silent_controller_leaves_the_steps_to_be_cancelled_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "trainchaos.harness.undo.slurm.run_command", FakeSlurm({"scontrol": SILENCE})
    )
    monkeypatch.delenv("SLURM_CONF", raising=False)
    outcome = CancelSteps.of("12", "chaos-0123456789abcdef-").undo()
    assert not outcome.ok
    assert "cancel the run's steps of Slurm job 12" in outcome.text
