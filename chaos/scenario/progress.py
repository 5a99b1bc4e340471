"""Scenario model of a command's progress: regular expressions for its output, or the name of a
framework whose lines are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from trainchaos.chaos.scenario.fault import Strict


class RegexProgress(Strict):
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


PRESETS: Mapping[str, RegexProgress] = MappingProxyType(
    {
        "hf": RegexProgress(
            regex=r"(?P<step>\d+)/(?P<of>\d+) \[", loss=r"\{'loss': '?(?P<loss>[^',}]+)"
        ),
        "lightning": RegexProgress(
            regex=(
                r"Epoch (?P<epoch>\d+):.*?(?P<step>\d+)/(?P<of>\d+) \["
                r"(?:[^\]]*?\b(?:train_)?loss(?:_step)?=(?P<loss>[^,\]\s]+))?"
            )
        ),
        "nanogpt": RegexProgress(regex=r"\biter (?P<step>\d+): loss (?P<loss>\S+)"),
        "megatron": RegexProgress(
            regex=(r"\biteration\s+(?P<step>\d+)/\s*\d+ \|(?:.*?\blm loss:\s*(?P<loss>\S+))?")
        ),
        "torchtitan": RegexProgress(
            regex=r"(?:\[rank(?P<rank>\d+)\]:.*?)?\bstep:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)"
        ),
        "deepspeed": RegexProgress(
            regex=r"\bsteps?[=:]\s*(?P<step>\d+)\b(?:,| loss:\s*(?P<loss>\S+))"
        ),
        "tqdm": RegexProgress(
            regex=r"(?P<step>\d+)/(?P<of>\d+) \[(?:[^\]]*?\bloss=(?P<loss>[^,\]\s]+))?"
        ),
    }
)
"""Expressions for the lines that frameworks print by default: Hugging Face Trainer and Lightning
with their bars of tqdm, nanoGPT's train.py, Megatron-LM, torchtitan, DeepSpeed's log of steps, and
any one bar of tqdm over all steps.
"""


class PresetProgress(Strict):
    """Progress read from the lines that a framework prints by default."""

    preset: Literal["hf", "lightning", "nanogpt", "megatron", "torchtitan", "deepspeed", "tqdm"]


Progress = Literal["beacon"] | RegexProgress | PresetProgress


def expressions(progress: RegexProgress | PresetProgress) -> RegexProgress:
    """The expressions that a preset stands for, or those given."""
    return PRESETS[progress.preset] if isinstance(progress, PresetProgress) else progress


def key_of(progress: RegexProgress | PresetProgress) -> str:
    """The key of the scenario that says how progress is read."""
    return f"workload.progress.{'preset' if isinstance(progress, PresetProgress) else 'regex'}"
