"""What the options of ``chaos project`` ask for: costs of recovery, failures, and the setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from trainchaos.harness.projection.costs import Cause, RecoveryCost
    from trainchaos.harness.projection.observed import Stored
    from trainchaos.harness.projection.presets import Preset
    from trainchaos.harness.projection.result import Setting
    from trainchaos.harness.projection.traces import FailureTrace

Choices = Mapping[str, Any]
_OF_SETTING = (
    *("gpus_per_node", "days", "trials", "seed", "replica_nodes", "weibull", "quarantine"),
    *("slow_rate", "availability", "spares", "repair_sigma", "price", "batch", "bandwidth"),
)
"""Options that are a field of the setting as they stand."""


@dataclass(frozen=True)
class Failures:
    """How often nodes fail, and of what. ``rate``: as of a ``Preset``; ``said``: its source."""

    rate: float
    said: str
    preset: Preset | None
    trace: FailureTrace | None

    @property
    def counts(self) -> Mapping[str, int]:
        """Of causes; empty if unknown. Of a trace only its own, as its nodes are."""
        if self.trace:
            return self.trace.causes
        return self.preset.counts if self.preset else {}


def failures(choices: Choices) -> Failures:
    """By the options. Raises UsageError where two of them say the same, ScenarioError at a trace
    that cannot be read.
    """
    from trainchaos.harness.projection.presets import PRESETS, rate_of
    from trainchaos.harness.projection.projection import said_from

    if choices["preset"] and choices["rate"]:
        raise click.UsageError("--preset and --rate both say how often nodes fail")
    preset = None if choices["rate"] else PRESETS[choices["preset"] or "mid"]
    each_has = choices["gpus_per_node"]
    rate = choices["rate"] or rate_of(PRESETS[choices["preset"] or "mid"], each_has)
    said = said_from(preset, choices["rate"], each_has)
    trace = _trace(choices)
    if trace:
        rate, said = _of_trace(trace, choices, rate, said)
    return Failures(rate, said, preset, trace)


def causes(choices: Choices, of: Failures) -> list[Cause]:
    """Causes with their shares; [] where none are known. Raises ScenarioError as ``causes_of``."""
    from trainchaos.harness.projection.costs import Cause, causes_of

    grows = choices["growth"] is not None
    given = [Cause(name=n, share=s, stall_s=t, grows=grows) for n, s, t in choices["causes"]]
    return causes_of(given, of.counts) if given or of.counts else []


def costs(
    choices: Choices, runs: Sequence[Stored], mix: Sequence[Cause]
) -> dict[str, RecoveryCost]:
    """Of each strategy: given, else measured by ``runs``, else published. Raises UsageError at an
    unknown strategy or one that is given twice.
    """
    from dataclasses import replace

    from trainchaos.harness.projection.costs import PUBLISHED, measured
    from trainchaos.harness.projection.laws import Duration

    found = dict(PUBLISHED)
    if runs:
        found |= measured(one.results for one in runs)
    names = [name for name, _ in choices["stalls"]]
    for name, seconds in choices["stalls"]:
        if name not in PUBLISHED:
            raise click.UsageError(f"--stall: no strategy {name}: {', '.join(PUBLISHED)}")
        if names.count(name) > 1:
            raise click.UsageError(f"--stall: {name} is given twice")
        found[name] = replace(
            PUBLISHED[name],
            stall=Duration(median_s=seconds),
            nodes=1.0,
            per_doubling_s=0.0,
            kind="given",
            source=f"{seconds:g} s, as given",
        )
    if choices["growth"] is not None:
        found = {
            name: one
            if runs and one.kind == "published"
            else replace(one, per_doubling_s=choices["growth"])
            for name, one in found.items()
        }
    if wanted := choices["strategies"]:
        if missing := [name for name in wanted if name not in found]:
            raise click.UsageError(f"no costs of {missing[0]}: there are {', '.join(found)}")
        found = {name: one for name, one in found.items() if name in wanted}
    return {name: one.by_cause(mix) for name, one in found.items()}


def setting(
    choices: Choices,
    of: Failures,
    mix: Sequence[Cause],
    runs: Sequence[Stored],
    strategies: Sequence[str],
) -> Setting:
    """Everything else. Raises UsageError where options do not go together, or leave no size."""
    from trainchaos.harness.projection.result import Definitions, Setting

    _refuse_alone(choices)
    lemon_share, lemon_times = choices["lemons"] or (0.0, 1.0)
    step_s, save_s, load_s = _times(choices, runs)
    given = {name: choices[name] for name in _OF_SETTING}
    given |= {f"{name}_s": choices[name] for name in ("interval", "slow_found", "repair")}
    return Setting(
        **given,
        gpus=tuple(dict.fromkeys(choices["gpus"])) or _sizes(choices, strategies),
        rate=of.rate,
        save_s=save_s,
        load_s=load_s,
        step_s=step_s,
        several=choices["several"] or (of.trace.several if of.trace else (1.0,)),
        gaps=of.trace.gaps_s if of.trace else (),
        rate_unsure=of.trace.unsure if of.trace and choices["trace_nodes"] else 0.0,
        lemon_share=lemon_share,
        lemon_times=lemon_times,
        slow_factor=choices["slow_factor"] or usual("slow_factor"),
        processes=_processes(choices, of),
        checkpoint_bytes=choices["checkpoint_size"],
        causes={one.name: one.share or 0.0 for one in mix},
        loads_measured=choices["times_of_runs"] and choices["load"] is None,
        definitions=Definitions(**{name: choices[name] for name in Definitions.model_fields}),
    )


def usual(name: str) -> float:
    """The default of a setting, for options that must be told from those not given."""
    from trainchaos.harness.projection.result import Setting

    return float(Setting.model_fields[name].default)


def _refuse_alone(choices: Choices) -> None:
    """Options of what is not there."""
    if choices["quarantine"] and not choices["lemons"]:
        raise click.UsageError("--quarantine is of --lemons: say how many there are")
    if choices["slow_rate"]:
        return
    for option in ("slow_found", "slow_factor"):
        if choices[option] is not None:
            name = option.replace("_", "-")
            raise click.UsageError(f"--{name} is of --slow-rate: say how often nodes are slow")


def _sizes(choices: Choices, strategies: Sequence[str]) -> tuple[int, ...]:
    from trainchaos.harness.projection.breakeven import LARGEST, sizes, smallest

    per_node = choices["gpus_per_node"]
    least = smallest(per_node, choices["spares"], choices["replica_nodes"], strategies)
    found = sizes(least, LARGEST)
    if not found:
        raise click.UsageError(
            f"--spares {choices['spares']} and --replica-nodes {choices['replica_nodes']} need jobs"
            f" of {least:,} GPUs and more, and sizes end at {LARGEST:,}: say --gpus"
        )
    return found


def _times(choices: Choices, runs: Sequence[Stored]) -> tuple[float, float, float]:
    """Of a step, a save and a load: given, else by the runs where that is asked for, else by the
    size of a checkpoint, else the defaults.
    """
    from trainchaos.harness.projection.observed import steady

    step_s, save_s, load_s = usual("step_s"), usual("save_s"), usual("load_s")
    size, rate = choices["checkpoint_size"], choices["bandwidth"]
    if (size is None) != (rate is None):
        raise click.UsageError("--checkpoint-size and --bandwidth go together")
    if size is not None and rate is not None:
        if choices["times_of_runs"]:
            raise click.UsageError("--times-of-runs and --checkpoint-size both say what a save is")
        if choices["save"] is not None and choices["load"] is not None:
            raise click.UsageError("--save and --load leave nothing for --checkpoint-size to say")
        save_s = load_s = size / rate
    if choices["times_of_runs"]:
        if not runs:
            raise click.UsageError("--times-of-runs is of --runs: give some")
        step_s, save_s = steady(runs)
    given = (choices["step"], choices["save"], choices["load"])
    step_s, save_s, load_s = (
        usual if one is None else one
        for one, usual in zip(given, (step_s, save_s, load_s), strict=True)
    )
    return step_s, save_s, load_s


def _processes(choices: Choices, of: Failures) -> float:
    """Share of the failures that end processes only: as asked, else as the causes say that are in
    force.
    """
    if choices["process_share"] is not None:
        return float(choices["process_share"])
    shares = [share for _, share, _ in choices["causes"] if share is not None]
    return of.preset.processes if of.preset and not of.trace and not shares else 0.0


def _trace(choices: Choices) -> FailureTrace | None:
    from trainchaos.harness.projection.traces import read_failures

    if choices["trace"] is None:
        if choices["trace_nodes"]:
            raise click.UsageError("--trace-nodes says of how many nodes a --trace is")
        return None
    if choices["weibull"]:
        raise click.UsageError("--trace and --weibull both say how failures follow one another")
    if choices["trace_nodes"] and (choices["rate"] or choices["preset"]):
        raise click.UsageError("--trace-nodes gives the rate that --rate or --preset gives too")
    return read_failures(choices["trace"])


def _of_trace(trace: FailureTrace, choices: Choices, rate: float, said: str) -> tuple[float, str]:
    """The rate, and where it is from. Raises ScenarioError where no cluster can fail so often, or
    so rarely.
    """
    from trainchaos.chaos.commands.shared.projection import LEAST_RATE, MOST_RATE
    from trainchaos.chaos.errors import ScenarioError
    from trainchaos.harness.projection.presets import DAY_S

    shape = f"{len(trace.gaps_s) + 1} failures of {choices['trace']}, drawn again one by one"
    if nodes := choices["trace_nodes"]:
        rate = DAY_S * 1000.0 / (trace.mean_s * nodes)
        if not LEAST_RATE <= rate <= MOST_RATE:
            raise ScenarioError(
                f"{choices['trace']} says {rate:.3g} failures per 1,000 nodes and day",
                hint=f"between {LEAST_RATE:g} and {MOST_RATE:g}: is the time in seconds?",
            )
        said = f"{rate:.3g} failures per 1,000 nodes and day, and their gaps, from {shape}"
    else:
        said = f"{said}; their gaps from {shape}"
    if trace.causes:
        total = sum(trace.causes.values())
        each = (f"{name} {count / total:.1%}" for name, count in trace.causes.items())
        said = f"{said}; causes: {', '.join(each)}"
    return rate, said
