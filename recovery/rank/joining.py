"""``recovery.join``: how a training script becomes a rank of a supervised job.

The supervisor (``python -m trainchaos.recovery.run``, or a launcher of the harness) first hands the
script's process a ``SupervisedPlace`` with ``taking``. Without one the script is a job of its own,
with one rank and no recovery.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from trainchaos.chaos.errors import ChaosError
from trainchaos.chaos.events.log import EventWriter
from trainchaos.recovery.policy.interval import parse
from trainchaos.recovery.policy.jobconfig import Determinism, JobConfig, RankSettings, Saves
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.progress_counters import MarkPage

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job

KEEP = 3
EVERY = 100


class JoinError(ChaosError):
    """A script and its supervisor do not agree, or the script calls ``recovery`` in the wrong
    order.
    """


class ScriptSettings(BaseModel):
    """What a script says about its job; None leaves a value to the supervisor. ``samples``: size of
    the data set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int
    steps: int | None = None
    global_batch: int | None = None
    seed: int | None = None


class SupervisorSettings(RankSettings):
    """What a supervisor says about a process's place in the job; None leaves a value to the script.
    ``supervisor``: its name for error messages; ``restores``: the strategy needs checkpoints.
    """

    supervisor: str
    restores: bool = False
    determinism: Determinism | None = None
    steps: int | None = None
    global_batch: int | None = None
    samples: int | None = None
    seed: int | None = None
    checkpoint_every: int | str | None = None
    checkpoint_keep: int | None = None
    saves: Saves | None = None


@dataclass(kw_only=True)
class SupervisedPlace:
    """A process's place under a supervisor. ``on_attach``: called with the job once the script has
    registered its model; ``describe``: called with the script's facts instead of training.
    """

    settings: SupervisorSettings
    channel: Channel | None = None
    page: MarkPage | None = None
    writer: EventWriter | None = None
    on_attach: Callable[[Job], None] | None = None
    describe: Callable[[ScriptSettings], NoReturn] | None = None
    job: Job | None = field(default=None, init=False)


_PLACE: ContextVar[SupervisedPlace | None] = ContextVar("recovery_place", default=None)


@contextmanager
def taking(place: SupervisedPlace) -> Iterator[SupervisedPlace]:
    """Let ``join`` find ``place`` in code that runs inside the block, such as a user's script."""
    token = _PLACE.set(place)
    try:
        yield place
    finally:
        _PLACE.reset(token)


def join(
    *,
    samples: int,
    steps: int | None = None,
    global_batch: int | None = None,
    seed: int | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    checkpoint_keep: int | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    determinism: Determinism | None = None,
) -> Job:
    """Become a rank of the job this process was started for; every rank and spare calls this once.

    ``samples``: size of the data set; ``steps``: optimizer steps of the whole job;
    ``global_batch``: samples a step over all ranks; ``seed``: of sample order and random generators
    (default 0); ``checkpoint_dir``: where checkpoints go, None for none; ``checkpoint_every``:
    steps between them (default 100), or a time such as "30s", or "auto"; ``checkpoint_keep``: how
    many of the newest are kept (default 3); ``checkpoint``: how they are written, see
    ``recovery.policy.jobconfig.Saves``; ``determinism``: "elastic" for the same result, bit for
    bit, however many ranks take part in a step (the loop uses ``step.batches()`` then), "default"
    (the default) if that does not matter.

    The script, its supervisor, or both alike may set ``steps``, ``global_batch``, ``samples``,
    ``seed`` and ``determinism``. Where and how often checkpoints are written is the supervisor's
    choice if it makes one.

    Started without a supervisor (``python train.py``) this is a job of one rank that resumes from
    its newest checkpoint, and any failure ends it; ``python -m trainchaos.recovery.run --ranks 4
    train.py`` supervises one.

    Raises JoinError when the two do not agree, when neither sets a required value, or when called
    twice.
    """
    facts = ScriptSettings(samples=samples, steps=steps, global_batch=global_batch, seed=seed)
    place = _PLACE.get()
    if place is not None and place.describe is not None:
        place.describe(facts)
    if place is not None and place.job is not None:
        raise JoinError(
            "recovery.join() was called twice",
            hint="a process is one rank of one job: keep the first",
        )
    config = settle(
        place.settings
        if place is not None
        else SupervisorSettings(supervisor="nobody", process="alone", world=1),
        facts,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        checkpoint_keep=checkpoint_keep,
        checkpoint=checkpoint,
        determinism=determinism,
    )
    return _job(config, place)


def _job(config: JobConfig, place: SupervisedPlace | None) -> Job:
    # Only one rank writes checkpoints, on purpose.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    from trainchaos.recovery.collectives.lasting.wrapper import serve_wrappers

    serve_wrappers()
    if place is None:
        from trainchaos.recovery.rank.standalone import lone_job

        return lone_job(config)
    from trainchaos.recovery.rank.job import Job

    assert place.channel is not None and place.page is not None and place.writer is not None
    job = Job(config, RankAgent(place.channel), place.page, place.writer)
    job.on_attach = place.on_attach
    place.job = job
    return job


def settle(
    settings: SupervisorSettings,
    facts: ScriptSettings,
    *,
    checkpoint_dir: str | Path | None,
    checkpoint_every: int | str | None,
    checkpoint_keep: int | None,
    checkpoint: Mapping[str, Any] | None = None,
    determinism: Determinism | None = None,
) -> JobConfig:
    """Merge what the supervisor (``settings``) and the script say into the process's configuration.
    Raises JoinError.
    """
    every = _first(settings.checkpoint_every, checkpoint_every, EVERY)
    _check_every(every)
    said = {name: getattr(settings, name) for name in RankSettings.model_fields}
    said["checkpoint_dir"] = settings.checkpoint_dir or (
        Path(checkpoint_dir) if checkpoint_dir else None
    )
    config = JobConfig(
        **said,
        determinism=_agree("determinism", determinism, settings.determinism, settings, "default"),
        samples=_agree("samples", facts.samples, settings.samples, settings),
        steps=_agree("steps", facts.steps, settings.steps, settings),
        global_batch=_agree("global_batch", facts.global_batch, settings.global_batch, settings),
        seed=_agree("seed", facts.seed, settings.seed, settings, 0),
        checkpoint_every=every,
        checkpoint_keep=_first(settings.checkpoint_keep, checkpoint_keep, KEEP),
        saves=settings.saves or _saves(checkpoint or {}),
    )
    _check_numbers(config)
    _check_together(config, restores=settings.restores)
    return config


def _check_numbers(config: JobConfig) -> None:
    at_least_one = {
        "samples": config.samples,
        "steps": config.steps,
        "global_batch": config.global_batch,
        "checkpoint_keep": config.checkpoint_keep,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise JoinError(f"{name} is {value}", hint="it must be at least 1")
    if config.seed < 0:
        raise JoinError(f"seed is {config.seed}", hint="it must be at least 0")


def _check_together(config: JobConfig, *, restores: bool) -> None:
    """Check values that are valid alone but may not go together. ``restores``: the strategy needs
    checkpoints.
    """
    sharded = config.shards > 1
    if config.determinism == "elastic" and (sharded or config.batch == "shrink"):
        why = "the model is sharded" if sharded else "samples of missing ranks are left out"
        raise JoinError(
            f"determinism is elastic, and {why}",
            hint=f"use determinism=default, or {'one shard' if sharded else 'batch=constant'}",
        )
    shares = config.arranged.shares(config.world)
    if config.global_batch < shares:
        raise JoinError(
            f"global_batch {config.global_batch} cannot feed {shares} ranks",
            hint=f"use global_batch={shares} or more, or fewer ranks",
        )
    if restores and config.checkpoint_dir is None and config.memory is None:
        raise JoinError(
            "the strategy restores checkpoints, and nobody says where they go",
            hint=(
                "recovery.join(checkpoint_dir=...), or --checkpoint-dir or --memory-checkpoints of "
                "python -m trainchaos.recovery.run"
            ),
        )


def _check_every(value: int | str) -> None:
    try:
        parse(value)
    except ValueError as error:
        raise JoinError(f"checkpoint_every is {value}", hint=str(error)) from error


def _saves(said: Mapping[str, Any]) -> Saves:
    try:
        return Saves.model_validate(dict(said))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise JoinError(
            f"recovery.join(checkpoint=...): {name}: {first['msg']}",
            hint=(
                'such as checkpoint={"mode": "async", "sharded": True, "delta": 10, "mtbf_s": 3600}'
            ),
        ) from error


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _agree(
    name: str,
    script: Any,
    supervisor: Any,
    settings: SupervisorSettings,
    default: Any = None,
) -> Any:
    """What either says, or both alike."""
    if script is not None and supervisor is not None and script != supervisor:
        raise JoinError(
            f"the script joins with {name}={script}, {settings.supervisor} says {supervisor}",
            hint=f"make them the same, or leave {name} out of recovery.join()"
            + (" and use job.seed" if name == "seed" else ""),
        )
    value = next((one for one in (script, supervisor, default) if one is not None), None)
    if value is None:
        raise JoinError(f"nobody says what {name} is", hint=f"recovery.join({name}=...)")
    return value
