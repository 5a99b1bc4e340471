"""Every model and object of the zoo, through every way in which a step is done again, ends with the
bits of the undisturbed run: weights, buffers, what is registered, and the output in evaluation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import ROOT, Running
from tests.support.zoo import MEMBERS, Member

pytestmark = pytest.mark.real
SCRIPT = ROOT / "tests" / "support" / "commands" / "menagerie.py"
BASE = ("--ranks", "2", "--every", "4", "--hang-timeout", "2")
STRATEGIES = {
    "hot-spare": ("--spares", "1"),
    "live": ("--spares", "1", "--param", "sync=live"),
    "adaptive": ("--strategy", "adaptive", "--param", "drop=false", "--spares", "1"),
    "drop-replica": ("--strategy", "drop-replica"),
    "disk": ("--strategy", "checkpoint-restart"),
    "memory": ("--strategy", "checkpoint-restart", "--memory-checkpoints", "2"),
    "parts": (
        *("--strategy", "checkpoint-restart", "--saves", "sharded=true"),
        *("--saves", "delta=3", "--saves", "mode=async"),
    ),
}
RESTARTS = ("disk", "memory", "parts")
PHASES = ("data", "forward", "backward", "collective", "optimizer", "checkpoint")
Ends = dict[int, dict[str, Any]]


def played(folder: Path, members: list[str], options: tuple[str, ...], **environment: str) -> Ends:
    """What each rank ended with."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        job = Running(folder, *BASE, *options, SCRIPT, *members)
    assert job.end() == 0, job.said
    assert "was done again" not in job.said, "what is registered gives the same loss again"
    assert ("STRIKE" in environment) == (folder / "struck").exists()
    ends = sorted(folder.glob("end-*.json"))
    found = {int(path.stem[4:]): json.loads(path.read_text()) for path in ends}
    assert 0 in found, job.said
    return found


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ends]:
    """The same job when nothing happens."""
    known: dict[tuple[str, ...], Ends] = {}

    def found(members: list[str], **environment: str) -> Ends:
        key = (*members, *environment)
        if key not in known:
            known[key] = played(
                tmp_path_factory.mktemp("whole") / "job", members, (), **environment
            )
        return known[key]

    return found


def differing(end: Ends, whole: Ends, *, same: Callable[[int, str], bool]) -> list[str]:
    """What differs of all that has to be the ``same``, by rank and name."""
    assert all(one["values"].keys() == whole[rank]["values"].keys() for rank, one in end.items())
    return [
        f"rank {rank}: {name}"
        for rank, one in end.items()
        for name, value in one["values"].items()
        if same(rank, name) and whole[rank]["values"][name] != value
    ]


def chosen(wanted: Callable[[type[Member]], bool]) -> list[str]:
    return [name for name, kind in MEMBERS.items() if wanted(kind)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("nonfinite", ["retry", "rollback"])
@pytest.mark.parametrize("strategy", ["hot-spare", "live", "adaptive", "drop-replica"])
@pytest.mark.parametrize("step", [1, 7])
def test_a_value_that_is_not_finite_leaves_nothing(
    step: int, strategy: str, nonfinite: str, tmp_path: Path, undisturbed: Callable[..., Ends]
) -> None:
    members = [*MEMBERS] if nonfinite == "retry" else chosen(lambda kind: kind.saved)
    options = (*STRATEGIES[strategy], "--param", f"nonfinite={nonfinite}")
    if strategy == "adaptive":
        options = STRATEGIES[strategy]
        members = [*MEMBERS]
    end = played(tmp_path / "job", members, options, STRIKE=f"1:{step}:nan:nan")
    assert [*end] == [0, 1]
    anew = step == 1 and nonfinite == "rollback"  # no checkpoint to go back to
    assert anew or all(one["joined"] == 1 for one in end.values()), "nobody was replaced"
    assert differing(end, undisturbed(members), same=lambda rank, name: True) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", RESTARTS)
@pytest.mark.parametrize(
    "strike", [*(f"{phase}:kill" for phase in PHASES), "forward:hang", "nan:nan"]
)
def test_a_restart_gives_each_rank_its_own(
    strike: str, strategy: str, tmp_path: Path, undisturbed: Callable[..., Ends]
) -> None:
    members = chosen(lambda kind: kind.saved)
    # a save has its phase on the rank that writes
    step, rank = (8, 0) if strike.startswith("checkpoint") else (7, 1)
    end = played(tmp_path / "job", members, STRATEGIES[strategy], STRIKE=f"{rank}:{step}:{strike}")
    assert [*end] == [0, 1]
    assert differing(end, undisturbed(members), same=lambda rank, name: True) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["hot-spare", "live", "adaptive"])
@pytest.mark.parametrize("strike", [*(f"{phase}:kill" for phase in PHASES), "forward:hang"])
def test_who_takes_a_place_goes_on_with_the_same_weights(
    strike: str, strategy: str, tmp_path: Path, undisturbed: Callable[..., Ends]
) -> None:
    """It has buffers and registered objects of the rank that it copies: those that are alike on all
    ranks are the same, and so is everything on the survivor.
    """
    members = chosen(lambda kind: not kind.own)
    step, rank = (8, 0) if strike.startswith("checkpoint") else (7, 1)
    end = played(tmp_path / "job", members, STRATEGIES[strategy], STRIKE=f"{rank}:{step}:{strike}")
    whole = undisturbed(members)
    assert {rank: one["joined"] > 1 for rank, one in end.items()} == {rank: True, 1 - rank: False}
    assert differing(end, whole, same=lambda other, name: other != rank or alike(name, whole)) == []


def alike(name: str, whole: Ends) -> bool:
    """Whether it is the same on all ranks when nothing happens."""
    return len({one["values"][name] for one in whole.values()}) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("strike", [*(f"{phase}:kill" for phase in PHASES[:5]), "forward:hang"])
def test_who_goes_on_with_fewer_ranks_has_the_same_weights(
    strike: str, tmp_path: Path, undisturbed: Callable[..., Ends]
) -> None:
    """A survivor makes more passes meanwhile: what counts passes is not compared."""
    members = chosen(lambda kind: not (kind.own or kind.passes))
    end = played(
        tmp_path / "job", members, STRATEGIES["drop-replica"], STRIKE=f"1:7:{strike}", ELASTIC="1"
    )
    weights = re.compile(r"model\..*(weight|bias)|optimizer|rest$")
    whole = undisturbed(members, ELASTIC="1")
    assert differing(end, whole, same=lambda _, name: bool(weights.match(name))) == []


DRAWS = """
import os, signal, sys, time, torch
from trainchaos import recovery
job = recovery.join(samples=64, steps=20, global_batch=8)
torch.manual_seed(job.seed)
model = torch.nn.Linear(4, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
own = torch.Generator().manual_seed(3)
if "registered" in sys.argv:
    job.register("own", own)
while job.running():
    with job.step() as step:
        loss = model(torch.randn(len(step.samples), 4, generator=own)).square().sum()
        if (job.rank, step.number, job.generation) == (1, 9, 1):
            time.sleep(0.2)  # the other rank gets to its sum
            os.kill(os.getpid(), signal.SIGKILL)
        step.backward(loss)
        step.commit()
"""


@pytest.mark.parametrize("registered", [True, False])
def test_a_generator_that_nobody_registered_is_noticed(registered: bool, tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    arguments = ["registered"] if registered else []
    job = Running(tmp_path, *BASE, "--fresh", "--spares", "1", tmp_path / "draws.py", *arguments)
    assert job.end() == 0, job.said
    noticed = "step 9 was done again with the same state and samples, and its loss is"
    assert (noticed in job.said) != registered
