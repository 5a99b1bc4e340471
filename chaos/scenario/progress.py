"""Scenario model of a command's progress: regular expressions for its output, or the name of a
framework whose lines are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from trainchaos.chaos.scenario.fault import Strict
from trainchaos.chaos.scenario.forms import Form
from trainchaos.chaos.scenario.frameworks import FRAMEWORKS, Framework


class _Heard(Strict):
    """Where lines of progress are read."""

    file: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="a file that the command writes, read in place of its output: relative to its"
        " directory, or below $CHAOS_SCRATCH; of several that match wildcards, the newest",
    )


class RegexProgress(_Heard):
    """Progress read from a command's output: a regular expression with a group ``step``, searched
    in each line. Optional groups: ``loss``, ``samples``, ``rank`` and ``group``; ``of``, the total
    that a progress bar states, which has to be workload.steps; with ``epoch``, the steps of an
    epoch.
    """

    regex: str = Field(min_length=1, max_length=1000)
    loss: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="an expression with a group loss, for losses in lines of their own",
    )
    skip: Literal["evaluation"] | None = Field(
        default=None,
        description="evaluation: a line with eval, val, validate or test in front of the step, or"
        " of a loss in a line of its own, is no training",
    )
    epochs_from: int = Field(
        default=0, ge=0, le=1, description="the number of the first epoch, in group epoch"
    )
    steps_from: int = Field(
        default=1,
        ge=0,
        le=1,
        description="the number of the first step, where group of or epoch_steps is given",
    )
    epoch_steps: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="the steps of an epoch, where the lines state none in a group of",
    )


class FrameworkLines(RegexProgress):
    """What a preset stands for. ``also``: further forms of its lines, tried in their order."""

    also: tuple[str, ...] = ()


def _lines(one: Framework) -> FrameworkLines:
    first, *others = [form.step for form in one.forms]
    return FrameworkLines(
        regex=first,
        also=tuple(others),
        loss=one.loss,
        skip="evaluation",
        epochs_from=one.epochs_from or 0,
        steps_from=1 if one.steps_from is None else one.steps_from,
    )


PRESETS: Mapping[str, FrameworkLines] = {
    one.preset: _lines(one) for one in FRAMEWORKS if one.preset
}
"""Expressions for the lines that frameworks print by default, of ``chaos.scenario.frameworks``."""


class PresetProgress(_Heard):
    """Progress read from the lines that a framework prints by default. The numbers are those of the
    framework, unless a script counts in another way.
    """

    preset: Literal[
        "deepspeed",
        "fairseq",
        "hf",
        "imagenet",
        "lightning",
        "litgpt",
        "megatron",
        "mmengine",
        "nanogpt",
        "nanotron",
        "nemo",
        "olmo",
        "returnn",
        "torchft",
        "torchtitan",
        "tqdm",
        "ultralytics",
    ]
    epochs_from: int | None = Field(default=None, ge=0, le=1)
    steps_from: int | None = Field(default=None, ge=0, le=1)
    epoch_steps: int | None = Field(default=None, ge=1, le=10**9)


Progress = Annotated[
    Literal["beacon"] | RegexProgress | PresetProgress,
    Form("beacon, {regex: '...'} or {preset: name}", regex=RegexProgress, preset=PresetProgress),
]


def expressions(progress: RegexProgress | PresetProgress) -> RegexProgress:
    """The expressions that a preset stands for, or those given."""
    if not isinstance(progress, PresetProgress):
        return progress
    said = progress.model_dump(exclude={"preset"}, exclude_none=True)
    return PRESETS[progress.preset].model_copy(update=said)


def key_of(progress: RegexProgress | PresetProgress) -> str:
    """The key of the scenario that says how progress is read."""
    return f"workload.progress.{'preset' if isinstance(progress, PresetProgress) else 'regex'}"
