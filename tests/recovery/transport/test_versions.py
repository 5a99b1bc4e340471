"""Software versions: a process that does not fit the others is refused in words, and the job goes
on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.sim.test_sim import of
from tests.recovery.supervise.test_controller import Rig
from tests.recovery.test_run import Running, kill, start
from tests.support.search.simulate import cell_of, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.rank.rank import SimRank
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.supervise.supervision import Stage
from trainchaos.recovery.transport.versions import misfit, versions
from trainchaos.recovery.transport.wire import Ready

__all__ = ["start"]  # a fixture
JOB = versions(torch="2.13.0", backend="gloo", dtype="torch.float32")
KILL = {"id": "kill", "kind": "process-kill", "target": {"rank": 2}, "at": {"step": 20}}
SCRIPT = """
import torch
from trainchaos import recovery
from trainchaos.recovery.rank.joining import _PLACE
if _PLACE.get().settings.process == "s3":
    torch.__version__ = "1.0.0"
job = recovery.join(samples=100, steps=400, global_batch=4)
torch.manual_seed(job.seed)
model = torch.nn.Linear(50, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
while job.running():
    with job.step() as step:
        step.backward(model(torch.ones(len(step.samples), 50)).sum())
        step.commit()
"""


def test_equal_versions_fit_and_unknown_ones_are_not_held_against_anybody() -> None:
    assert misfit(JOB, JOB) == misfit(JOB, {}) == misfit({}, JOB) == ""
    assert set(JOB) == {"python", "torch", "recovery format", "backend", "default dtype"}


@pytest.mark.parametrize("name", JOB)
def test_what_differs_is_named_with_what_would_work(name: str) -> None:
    words = misfit(JOB | {name: "other"}, JOB)
    assert words.startswith(f"{name} other where the job has {JOB[name]}: ")
    assert "environment of the others" in words


def told(rig: Rig, name: str, **other: str) -> None:
    rig.control.on_message(name, Ready(versions=JOB | other))


def trains(rig: Rig) -> Rig:
    for name in list(rig.hands.marks):
        told(rig, name)
    rig.join("w0", "w1", "w2", "w3", step=0)
    assert rig.stage is Stage.TRAINING
    return rig


def test_a_spare_that_does_not_fit_is_refused_and_not_started_again() -> None:
    rig = trains(Rig(HotSpare()))
    rig.die("s4")
    assert rig.hands.spawned[-1][0] == "s5"
    told(rig, "s5", torch="2.11.0")
    assert rig.hands.killed == ["s5"]
    failure = [data for kind, data in rig.hands.events if kind is Kind.FAILURE_DETECTED][-1]
    assert (failure["cause"], failure["process"]) == ("unfit", "s5")
    assert "torch 2.11.0 where the job has 2.13.0" in failure["detail"]
    rig.die("s5")
    rig.wait(30)
    assert rig.stage is Stage.TRAINING and rig.hands.spawned[-1][0] == "s5"


def test_a_job_of_processes_that_do_not_fit_does_not_start() -> None:
    rig = Rig(DropReplica())
    told(rig, "w0")
    told(rig, "w1", python="3.9.1")
    assert rig.control.outcome == "broken"
    assert "w1 failed before training began: python 3.9.1 where the job has" in rig.control.reason


class Older(Behaviour):
    """Whoever starts after the first five runs other software."""

    def versions(self, rank: SimRank) -> dict[str, str]:
        """Of the simulated process."""
        first = int(rank.process.name[1:]) < 5
        return super().versions(rank) if first else {"torch": "older"}


def test_a_simulated_job_goes_on_without_those_that_do_not_fit(memory: Path) -> None:
    played = play(cell_of("hot-spare", [KILL]), memory, seed=3, behaviour=Older())
    assert played.outcome == "completed"
    causes = [event.data["cause"] for event in of(played, Kind.FAILURE_DETECTED)]
    assert causes == ["exit", "unfit"]
    assert len(of(played, Kind.PROCESS_SPAWNED)) == 6


@pytest.mark.long
@pytest.mark.real
def test_a_real_spare_with_another_torch_is_refused(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = start("--ranks", "2", "--spares", "1", script)
    job.wait_for(lambda: job.trained(20))
    kill(job.pid_of("w1"))
    assert job.end() == 0, job.said
    assert "failure: s3, unfit: torch 1.0.0 where the job has 2." in job.said
    members = [e.data["members"] for e in job.of("orchestrator", Kind.GENERATION_READY)]
    assert members == [["w0", "w1"], ["w0", "s2"]]
