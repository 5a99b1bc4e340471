"""Generates docs/metrics.md from the metric catalogue and the docstrings of the computing
functions: ``python -m trainchaos.harness.compare.result.definitions > docs/metrics.md``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainchaos.chaos import stats
from trainchaos.chaos.scenario.sla import QUANTILES, samples_needed
from trainchaos.harness.compare.result import outcome, redone, summary, trials
from trainchaos.harness.judge import in_steps
from trainchaos.harness.judge.measure import (
    acts,
    cost,
    digests,
    flops,
    incidents,
    measure,
    partition,
    pauses,
    redundancy,
    reliability,
    samples,
)
from trainchaos.harness.judge.measure.catalogue import METRICS
from trainchaos.harness.judge.record import alarms
from trainchaos.harness.judge.results import LEAST_RANK_HOURS


@dataclass(frozen=True, kw_only=True)
class Formula:
    """``text``: in the page's symbols; ``by``: the computing function, whose docstring has the
    details.
    """

    text: str
    by: Callable[..., Any]


def _of(text: str, by: Callable[..., Any]) -> Formula:
    return Formula(text=text, by=by)


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "detection_time": _of("t_detected - t_injected", acts.incidents_of),
        "recovery_time": _of("t_new - t_injected", incidents.incident_of),
        "time_to_full_rate": _of(
            "t_end(s) - t_injected, of the first s of L at or after the first new step (of those"
            " that end after the fault, if nothing stood still) with"
            f" median(rate(s), ..., rate(s + {measure.FULL_RATE_STEPS - 1})) >= {measure.FULL_RATE}"
            " x B / T; rate(s) = samples of s / (time(s) - stall(s - 1) - evaluation(s - 1));"
            f" infinite if {measure.FULL_RATE_STEPS} steps or more are left and no s does, no value"
            " if fewer are left",
            measure.measure,
        ),
        "time_to_redundancy": _of(
            "t_whole - t_injected; infinite if there is no t_whole, but no value if a process was"
            " still starting at the end",
            redundancy.time_to_redundancy,
        ),
        "failure_cost": _of(
            "P x recovery_time / 3600; 0 where nothing stood still", cost.failure_cost
        ),
        "steps_lost": _of(
            "max(0, s_high - s_restored), one value for each rollback", acts.lost_once
        ),
        "samples_lost": _of(
            "|R - L| + B x steps never done, as multisets; no value of a command", measure.account
        ),
        "samples_duplicated": _of("|L - R| of samples that are in R", measure.account),
        "samples_skipped": _of(
            "samples of the order up to the last step of L that are not in R", measure.account
        ),
        "checkpoint_stall": _of(
            "stall(s) of each step s that is saved; the last one of a generation has none",
            pauses.checkpoint_stalls,
        ),
        "replicas_diverged": _of("count of failures with cause diverged", digests.diverged),
        "saves_failed": _of("count of checkpoint_failed", measure.measure),
        "alarms_unexplained": _of(
            "count of health_alarm of no place that an earlier fault_injected hit; of one that"
            " names no place, before any fault_injected",
            alarms.unexplained,
        ),
        "step_time": _of(
            "median over L of (time(s) - stall(s - 1) - evaluation(s - 1))",
            measure.measure,
        ),
        "steady_overhead": _of("step_time / step_time of the bare loop", measure.measure),
        "goodput": _of(
            "U / W, with U = N / P x sum over the contexts c of"
            " min(sum over c of T x samples of s / B, sum over c of kept(s)); 0 if the job gave up"
            " or its time was up",
            partition.partition,
        ),
        "ettr": _of("sum over L of kept(s) / W", partition.partition),
        "mfu": _of("F x B / (step_time x peak)", flops.mfu),
        "throughput": _of("samples of L / W", measure.measure),
        "abort_time": _of("t_parked - t_detected", incidents.incident_of),
        "regroup_time": _of("t_grouped - t_parked", incidents.incident_of),
        "restore_time": _of("t_stated - t_grouped", incidents.incident_of),
        "redo_time": _of(
            "t(s_high committed again) - t_stated; 0 if the job never fell below s_high",
            incidents.incident_of,
        ),
    }
)
RATES: Mapping[str, Formula] = MappingProxyType(
    {
        "survival": _of(
            "k / n, in [p: P(Bin(n, p) >= k) = 2.5 %, p: P(Bin(n, p) <= k) = 2.5 %]",
            reliability.survival,
        ),
        "false alarms": _of(
            f"k / H, from H = {LEAST_RANK_HOURS:g} on; below m / H with P(Poisson(m) <= k) = 5 %",
            reliability.false_alarms,
        ),
        "spares": _of("spares x W / 3600; share spares / P", reliability.spares_of),
        "limit in steps": _of(
            "each value / T of its own repeat's control arm, then as any other limit",
            in_steps.in_steps,
        ),
        "interval of a median": _of(
            "[x_(k), x_(n + 1 - k)] with the largest k such that 1 - 2 P(Bin(n, 1/2) < k) >= 95 %,"
            " of arms",
            stats.median_ci95,
        ),
        "quantiles": _of(
            "x_(ceil(q n)), of arms; "
            + ", ".join(
                f"{name} from {samples_needed(name)} on" for name in QUANTILES if name != "p90"
            ),
            samples.quantile,
        ),
    }
)
COMPARED: Mapping[str, Formula] = MappingProxyType(
    {
        "recovery": _of(
            "max over faults of t_end(standstill) - t_injected; infinite if the job never came to"
            " its end, began again from step 0 or trained on values that are no numbers; nothing"
            " where training did not stand still",
            outcome.judged,
        ),
        "detection": _of(
            "t_reaction - t_injected, of the slowest fault, by what can be seen from outside",
            outcome.judged,
        ),
        "samples lost": _of("samples of R that no rank reported", redone.samples_lost),
        "goodput": _of(
            "U / W as above, x (N + spares of the arm) / P, with T of the stack none of the same"
            " seed where there is one; 0 where the job did not come to its end or trained on bad"
            " values",
            trials.trial_of,
        ),
        "ettr": _of("as above; 0 where goodput is", trials.trial_of),
        "overhead": _of("step_time / step_time of the stack none, same seed", summary.cells_of),
        "cost of a failure": _of("P x recovery / 3600, median over trials", cost.failure_cost),
        "survival": _of("as above, of trials whose fault landed", summary.survival_of),
        "ratio": _of("median over seeds of time of the one / time of the other", summary.ratios_of),
    }
)
SYMBOLS = (
    ("N, P", "ranks; ranks and spares, all that is provisioned"),
    ("B", "samples of a global batch"),
    (
        "L, R",
        (
            "the lineage, whose steps survive to the end; the reference order of samples up to its"
            " last step, without what the supervisor decided to leave out before the generation of"
            " a step began"
        ),
    ),
    ("W", "wall time of the arm, run_started to run_finished"),
    (
        "t_end(s), time(s)",
        (
            "the last member's commit of s; t_end(s) - t_end(s - 1), of a generation's first step"
            " since its members held their state. A command's step ends with its first report, and"
            " steps between two reports are spread evenly"
        ),
    ),
    (
        "pause(s), evaluation(s)",
        (
            "from rank 0's commit of s to its next batch, less the median of those after steps that"
            " are neither saved nor evaluated, at least 0; what of it is an evaluation due after s,"
            " at most its planned length"
        ),
    ),
    ("stall(s)", "of a saved step (checkpoint_saving): pause(s) - evaluation(s); of others 0"),
    ("kept(s)", "time(s) - stall(s - 1), at least 0: a stall may be longer than its step"),
    (
        "c",
        (
            "a context, into which the steps of L fall: by a world smaller than N, else while a"
            " lasting fault acts undetected, else neither"
        ),
    ),
    (
        "T",
        (
            "ideal time of a step: the median of time(s) - stall(s - 1) - evaluation(s - 1) over"
            " those of the control arm's L, else of this arm's that end before its first fault,"
            " that have a world of N; the first step of each generation is left out if there are"
            " others"
        ),
    ),
    (
        "t_new",
        (
            "the job's first commit of a step beyond s_high, by a generation formed after the"
            " failure, even if a later rollback discards it. The job commits a step when the last"
            " member does, or, if a member died first, when a later generation is ready that"
            " resumes at or beyond it. Of a command: of a step that new ones follow"
        ),
    ),
    (
        "s_high",
        "the highest step that any rank of the generation that failed, or of one before, committed",
    ),
    ("s_restored", "the lowest step that a generation resumed at before t_new"),
    (
        "t_parked, t_grouped, t_stated",
        (
            "survivors stand still (or the decision, where they are not kept); of the generation of"
            " t_new, the last group is formed and all members hold their state. None is later than"
            " t_new, nor earlier than the one before it"
        ),
    ),
    (
        "t_whole",
        (
            "since the first generation formed after the fault is ready: the first moment at which"
            " the newest one has N ranks and as many processes wait as there were spares"
        ),
    ),
    (
        "F, peak",
        (
            "operations of one sample by the model's formula; what all devices in use can do in a"
            " second"
        ),
    ),
    ("k, n, H", "events or arms counted; arms; rank-hours in which no fault had acted"),
)
_DEFINED_BY_MODULE = frozenset({incidents.__name__, partition.__name__, in_steps.__name__})
"""Modules whose own docstrings hold the definitions."""


def page() -> str:
    """The page, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    program = "python -m trainchaos.harness.compare.result.definitions"
    yield f"Made by `{program}` from the code that computes them; a test holds it to that."
    yield ""
    yield (
        "All of it is computed from event logs (and, for `mfu`, from what `system.json` says of the"
        " devices)."
    )
    yield (
        "A job that never recovers counts as infinity, never as missing. A masked fault has no"
        " recovery time, and neither has a fault after which the job completed without another new"
        " step."
    )
    yield ""
    yield "| symbol | |"
    yield "| --- | --- |"
    for symbol, meaning in SYMBOLS:
        yield f"| {symbol} | {meaning} |"
    yield ""
    yield from _paragraphs(_told(acts))
    yield ""
    yield "## Of an arm"
    yield ""
    yield "| metric | unit | better | one value an | is | formula |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, known in METRICS.items():
        text = FORMULAS[name].text.replace("|", "\\|")
        yield f"| `{name}` | {known.unit} | {known.better} | {known.per} | {known.doc} | {text} |"
    yield ""
    yield "## Of all arms of a cell"
    yield ""
    for name, formula in RATES.items():
        yield f"- **{name}**: {formula.text}"
    yield ""
    yield "## Of a comparison"
    yield ""
    yield (
        "Of a trial, a faulted arm and its control, by what every stack shows alike"
        " ([compare.md](compare.md))."
    )
    yield ""
    for name, formula in COMPARED.items():
        yield f"- **{name}**: {formula.text}"
    yield ""
    yield (
        "The details of each are in the docstrings of the computing functions, which the site shows"
        " (`make docs`, `reference/computed.html`)."
    )
    yield ""
    yield "## Peaks"
    yield ""
    yield " ".join((flops.PEAK_TFLOPS_DOC).split())
    yield ""
    yield (
        ", ".join(f"{name} {tflops:g} TFLOP/s" for name, tflops in flops.PEAK_TFLOPS.items()) + "."
    )


def computed() -> Iterator[str]:
    """What the computing functions say, as Markdown."""
    yield "# What the computing functions say"
    yield ""
    yield "The docstrings behind the formulas of [metrics](../metrics.md)."
    for by in dict.fromkeys(
        one.by for one in (*FORMULAS.values(), *RATES.values(), *COMPARED.values())
    ):
        yield ""
        yield f"## `{by.__module__}.{by.__qualname__}`"
        yield ""
        if by.__module__ in _DEFINED_BY_MODULE:
            yield from _paragraphs(_told(inspect.getmodule(by)))
            yield ""
        yield from _paragraphs(_told(by))


def _told(what: object) -> str:
    return (inspect.getdoc(what) or "").replace("``", "`")


def _paragraphs(text: str) -> Iterator[str]:
    """Lines as they are: a docstring's lists stay lists."""
    yield from text.splitlines()


if __name__ == "__main__":
    print(page(), end="")
