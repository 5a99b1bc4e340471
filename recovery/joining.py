"""``recovery.join``: how a training script becomes a rank of a supervised job.

Whoever runs the script (``python -m recovery.run``, or a launcher of the harness) first hands its process a
``Place`` with ``taking``. Without one the script is a job of its own, with one rank and no recovery.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from pydantic import BaseModel, ConfigDict

from chaos.errors import ChaosError
from chaos.events import EventWriter
from recovery.agent import Agent
from recovery.jobconfig import JobConfig
from recovery.marks import MarkPage
from recovery.wire import Channel

if TYPE_CHECKING:
    from recovery.job import Job

KEEP = 3
EVERY = 100


class JoinError(ChaosError):
    """A script and its supervisor do not agree, or the script does not keep to the order of calls."""


class Facts(BaseModel):
    """What a script says about its job; None: it leaves that to the supervisor. ``samples``: size of the data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int
    steps: int | None = None
    global_batch: int | None = None
    seed: int | None = None


class Seat(BaseModel):
    """What a supervisor says about a process's place in the job; None: it leaves that to the script.

    ``supervisor``: its name for error messages; ``world``: ranks of the full job; ``batch``: see Strategy;
    ``restores``: the strategy needs checkpoints.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    supervisor: str
    process: str
    world: int
    batch: Literal["constant", "shrink"] = "constant"
    backend: Literal["gloo", "nccl"] = "gloo"
    device: str = "cpu"
    restores: bool = False
    steps: int | None = None
    global_batch: int | None = None
    samples: int | None = None
    seed: int | None = None
    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    checkpoint_keep: int | None = None


@dataclass(kw_only=True)
class Place:
    """A process's place under a supervisor. ``on_attach``: called with the job once the script has registered its
    model; ``describe``: nothing is to be trained, only these facts are wanted."""

    seat: Seat
    channel: Channel | None = None
    page: MarkPage | None = None
    writer: EventWriter | None = None
    on_attach: Callable[[Job], None] | None = None
    describe: Callable[[Facts], NoReturn] | None = None
    job: Job | None = field(default=None, init=False)


_PLACE: ContextVar[Place | None] = ContextVar("recovery_place", default=None)


@contextmanager
def taking(place: Place) -> Iterator[Place]:
    """What runs inside, such as a user's script, finds this place when it calls ``join``."""
    token = _PLACE.set(place)
    try:
        yield place
    finally:
        _PLACE.reset(token)


def join(
    *, samples: int, steps: int | None = None, global_batch: int | None = None, seed: int | None = None,
    checkpoint_dir: str | Path | None = None, checkpoint_every: int | None = None,
    checkpoint_keep: int | None = None,
) -> Job:  # fmt: skip
    """Become a rank of the job this process was started for; every rank and spare of it calls this once.

    ``samples``: size of the data set; ``steps``: optimizer steps of the whole job; ``global_batch``: samples a step
    over all ranks; ``seed``: of sample order and random generators (default 0); ``checkpoint_dir``: where
    checkpoints go, None for none; ``checkpoint_every``: steps between them (default 100); ``checkpoint_keep``: how
    many of the newest are kept (default 3).

    ``steps``, ``global_batch``, ``samples`` and ``seed`` may be said by the script, by its supervisor, or by both
    alike. Where and how often checkpoints are written is the supervisor's to say if it does.

    Started without a supervisor (``python train.py``) this is a job of one rank that resumes from its newest
    checkpoint, and any failure ends it; ``python -m recovery.run --ranks 4 train.py`` supervises one.

    Raises JoinError when the two do not agree, when something is said by nobody, or when called twice.
    """
    facts = Facts(samples=samples, steps=steps, global_batch=global_batch, seed=seed)
    place = _PLACE.get()
    if place is not None and place.describe is not None:
        place.describe(facts)
    if place is not None and place.job is not None:
        raise JoinError(
            "recovery.join() was called twice", hint="a process is one rank of one job: keep the first"
        )
    config = settle(
        place.seat if place is not None else Seat(supervisor="nobody", process="alone", world=1), facts,
        checkpoint_dir=checkpoint_dir, checkpoint_every=checkpoint_every, checkpoint_keep=checkpoint_keep,
    )  # fmt: skip
    # One rank writes checkpoints, on purpose.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    if place is None:
        from recovery.alone import lone_job

        return lone_job(config)
    from recovery.job import Job

    assert place.channel is not None and place.page is not None and place.writer is not None
    job = Job(config, Agent(place.channel), place.page, place.writer)
    job.on_attach = place.on_attach
    place.job = job
    return job


def settle(
    seat: Seat, facts: Facts, *, checkpoint_dir: str | Path | None, checkpoint_every: int | None,
    checkpoint_keep: int | None,
) -> JobConfig:  # fmt: skip
    """What a process is to do, by what its supervisor (``seat``) and its script say. Raises JoinError."""
    directory = (
        Path(checkpoint_dir) if seat.checkpoint_dir is None and checkpoint_dir else seat.checkpoint_dir
    )
    seed = 0 if facts.seed is None and seat.seed is None else _agree("seed", facts.seed, seat.seed, seat)
    config = JobConfig(
        process=seat.process, world=seat.world, batch=seat.batch, backend=seat.backend, device=seat.device,
        samples=_agree("samples", facts.samples, seat.samples, seat),
        steps=_agree("steps", facts.steps, seat.steps, seat),
        global_batch=_agree("global_batch", facts.global_batch, seat.global_batch, seat),
        seed=seed, checkpoint_dir=directory,
        checkpoint_every=_first(seat.checkpoint_every, checkpoint_every, EVERY),
        checkpoint_keep=_first(seat.checkpoint_keep, checkpoint_keep, KEEP),
    )  # fmt: skip
    for name in ("samples", "steps", "global_batch", "checkpoint_every", "checkpoint_keep"):
        if getattr(config, name) < 1:
            raise JoinError(f"{name} is {getattr(config, name)}", hint="it must be at least 1")
    if config.seed < 0:
        raise JoinError(f"seed is {config.seed}", hint="it must be at least 0")
    if config.global_batch < seat.world:
        raise JoinError(
            f"global_batch {config.global_batch} cannot feed {seat.world} ranks",
            hint=f"use global_batch={seat.world} or more, or fewer ranks",
        )
    if seat.restores and directory is None:
        raise JoinError(
            "the strategy restores checkpoints, and nobody says where they go",
            hint="recovery.join(checkpoint_dir=...), or --checkpoint-dir of python -m recovery.run",
        )
    return config


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _agree(name: str, script: int | None, supervisor: int | None, seat: Seat) -> int:
    if script is not None and supervisor is not None and script != supervisor:
        raise JoinError(
            f"the script joins with {name}={script}, {seat.supervisor} says {supervisor}",
            hint=f"make them the same, or leave {name} out of recovery.join()"
            + (" and use job.seed" if name == "seed" else ""),
        )
    value = supervisor if script is None else script
    if value is None:
        raise JoinError(f"nobody says what {name} is", hint=f"recovery.join({name}=...)")
    return value
