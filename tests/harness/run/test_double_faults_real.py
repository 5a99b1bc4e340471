"""Two faults at once, or one in the middle of the recovery from another, with real processes under
``recovery.run``.

Ranks end at the very point that a case is about; ``test_double_faults_sim.py`` has hundreds of
seeds of each.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.running import supervised
from trainchaos.chaos.events.log import Event, Kind

pytestmark = [pytest.mark.real, pytest.mark.long]

STEPS, LOST_AT, EVERY = 24, 13, 5

SCRIPT = f"""
import json, os, signal, sys, threading, torch
from trainchaos import recovery
from trainchaos.recovery.collectives import transfer
from trainchaos.recovery.rank import acquire_state
from trainchaos.recovery.checkpoint.checkpointer import Checkpointer
from trainchaos.recovery.collectives.group import Group

case = json.loads(sys.argv[1])
job = recovery.join(samples=96, steps={STEPS}, global_batch=8, seed=3, checkpoint_dir="checkpoints",
                    checkpoint_every={EVERY})
torch.manual_seed(job.seed)
model = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2))
transfer.CHUNK_BYTES = 128  # a transfer of several messages

def end_in(generation, ranks):
    if job.generation == generation and job.rank in ranks:
        os.kill(os.getpid(), signal.SIGKILL)

def end_together(ranks):
    # Whoever comes last ends all of them, and itself.
    if job.generation != 1 or job.rank not in ranks:
        return
    with open(f"here-{{job.rank}}.tmp", "w") as stream:
        stream.write(str(os.getpid()))
    os.rename(stream.name, f"here-{{job.rank}}")
    while not all(os.path.exists(f"here-{{rank}}") for rank in ranks):
        job.check()
        threading.Event().wait(0.002)
    for rank in sorted(ranks, key=lambda rank: rank == job.rank):
        os.kill(int(open(f"here-{{rank}}").read()), signal.SIGKILL)

form, copy, restore = Group.form, acquire_state.copy_state, Checkpointer.restore

def forming(group):
    end_in(2, case["forming"])
    return form(group)

def copying(state, group, *, receive, progress, **how):
    def one_chunk():
        if receive:
            end_in(2, case["receiving"])
        else:
            end_in(2, case["sending"])
        progress()
    copy(state, group, receive=receive, progress=one_chunk, **how)

def restoring(checkpoints, *arguments):
    end_in(2, case["restoring"])
    return restore(checkpoints, *arguments)

Group.form, acquire_state.copy_state, Checkpointer.restore = forming, copying, restoring
job.attach(
    model, lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
    clip_norm=0.5, units=[model[0]],
)
while job.running():
    with job.step() as step:
        x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 96 for i in step.samples])
        loss = model(x).square().sum()
        if step.number == {LOST_AT}:
            end_together(case["first"])
        step.backward(loss)
        step.commit()
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks that are lost: in step ``LOST_AT`` of the first generation, then at a point of the
    second one.

    ``says``: what the decisions have to say; ``worlds``: sizes of the generations (where it is not
    ``exact``, the first ones: a replacement may come before the end or not); ``exact``: the result
    is the unfaulted one, bit for bit; ``args``: of the supervisor.
    """

    first: tuple[int, ...] = (3,)
    forming: tuple[int, ...] = ()
    sending: tuple[int, ...] = ()
    receiving: tuple[int, ...] = ()
    restoring: tuple[int, ...] = ()
    args: tuple[str, ...] = ("--spares", "2")
    says: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (4, 4, 4)
    exact: bool = True


DROP = ("--strategy", "drop-replica", "--param", "rejoin=false", "--spares", "0")
RESTART = ("--strategy", "checkpoint-restart", "--spares", "0")
COPY = "only a checkpoint or a memory copy can help"
DROPPED = "what they cannot fill is dropped"
CASES: dict[str, dict[int, Case]] = {
    "two at once": {
        1: Case(first=(1, 2), worlds=(4, 4)),
        2: Case(first=(1, 2), worlds=(4, 4), says=("take over from w1, w2",)),
    },
    "two at once, dropped": {
        1: Case(first=(0, 3), args=DROP, worlds=(4, 2), exact=False, says=("2 of 4 ranks go on",)),
        2: Case(first=(0, 3), args=DROP, worlds=(4, 2), exact=False, says=("2 of 4 ranks go on",)),
    },
    "while the group forms": {1: Case(forming=(0,)), 2: Case(forming=(0,))},
    "the source while it sends": {1: Case(sending=(0,)), 2: Case(sending=(1,))},
    "the spare while it is promoted": {
        1: Case(receiving=(3,)),
        2: Case(
            receiving=(3,),
            args=("--spares", "1"),
            worlds=(4, 4, 2),
            exact=False,
            says=(DROPPED, "waiting"),
        ),
    },
    "while the state is restored": {
        1: Case(restoring=(0,), args=RESTART),
        2: Case(restoring=(1,), args=RESTART),
        4: Case(restoring=(2,), says=("no second copy of shard 3", COPY)),
    },
    "more than there are spares, dropped": {
        1: Case(first=(1, 2), args=("--spares", "1"), worlds=(4, 3), exact=False, says=(DROPPED,)),
        2: Case(first=(2, 3), args=("--spares", "1"), worlds=(4, 2), exact=False, says=(DROPPED,)),
    },
    "more than there are spares, restored": {
        1: Case(
            first=(0, 1, 2, 3),
            args=("--spares", "1"),
            worlds=(4, 4),
            says=("no rank holds a whole state",),
        ),
        2: Case(
            first=(1, 3),
            args=("--spares", "1"),
            worlds=(4, 4),
            says=("nobody is left who holds shard 1", COPY),
        ),
    },
}


def supervise(folder: Path, case: Case, shards: int) -> dict[str, list[Event]]:
    """Run the script to its end; events by process."""
    words = json.dumps(
        {name: value for name, value in asdict(case).items() if isinstance(value, tuple)}
    )
    options = ("--ranks", "4", "--shards", str(shards), *case.args)
    return supervised(folder, SCRIPT, *options, arguments=(words,))


@cache
def unfaulted(folder: Path, shards: int) -> dict[int, dict[str, object]]:
    """The result without a fault."""
    return digests(supervise(folder, Case(first=()), shards))


def digests(events: dict[str, list[Event]]) -> dict[int, dict[str, object]]:
    """Of each rank's part of the state after the last step."""
    return {
        int(event.data["rank"]): {
            name: value for name, value in event.data.items() if name != "rank"
        }
        for log in events.values()
        for event in log
        if event.kind is Kind.STATE_DIGEST and event.step == STEPS
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unfaulted")


@pytest.mark.parametrize(
    ("name", "shards"), [(name, shards) for name, cases in CASES.items() for shards in cases]
)
def test_a_second_fault(name: str, shards: int, tmp_path: Path, folder: Path) -> None:
    case = CASES[name][shards]
    events = supervise(tmp_path / "faulted", case, shards)
    supervisor = events["orchestrator"]
    decided = "; ".join(e.data["reason"] for e in supervisor if e.kind is Kind.DECISION)
    assert [words for words in case.says if words not in decided] == [], decided
    started = [e for e in supervisor if e.kind is Kind.GENERATION_STARTED]
    worlds = tuple(len(e.data["members"]) for e in started)
    assert worlds[: None if case.exact else len(case.worlds)] == case.worlds, decided
    dead = [
        e.data["process"]
        for e in supervisor
        if e.kind is Kind.PROCESS_EXITED and e.data["signal"] == 9
    ]
    second = (*case.forming, *case.sending, *case.receiving, *case.restoring)
    hit = [f"w{rank}" for rank in case.first] + [
        started[1].data["members"][rank] for rank in second
    ]
    assert set(hit) <= set(dead), "they died where the case says"
    ended = digests(events)
    assert len(ended) == worlds[-1]
    for rank, found in ended.items():
        assert found == ended[rank % shards] | {"rng": found["rng"]}, "holders of a shard are equal"
    if case.exact:
        assert ended == unfaulted(folder / str(shards), shards)
