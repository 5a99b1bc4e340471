"""Generates docs/metrics.md from the metric catalogue and the docstrings of the computing
functions: ``python -m trainchaos.harness.compare.result.definitions > docs/metrics.md``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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
            "t_end(s) - t_injected, of the first s at or after the first new step with"
            f" median(rate(s), ..., rate(s + {measure.FULL_RATE_STEPS - 1})) >= {measure.FULL_RATE}"
            " x B / T",
            measure.measure,
        ),
        "time_to_redundancy": _of("t_whole - t_injected", redundancy.time_to_redundancy),
        "failure_cost": _of(
            "P x recovery_time / 3600; 0 where nothing stood still", cost.failure_cost
        ),
        "steps_lost": _of(
            "max(0, s_high - s_restored), one value for each rollback", acts.lost_once
        ),
        "samples_lost": _of("|R - L| + B x steps never done, as multisets", measure.account),
        "samples_duplicated": _of("|L - R| of samples that are in R", measure.account),
        "samples_skipped": _of(
            "samples of R that the supervisor said are left out", measure.account
        ),
        "checkpoint_stall": _of(
            "pause after a saved step - median pause after others", pauses.checkpoint_stalls
        ),
        "replicas_diverged": _of("count of failures with cause diverged", digests.diverged),
        "saves_failed": _of("count of checkpoint_failed", measure.measure),
        "alarms_unexplained": _of(
            "count of health_alarm of no place that an earlier fault_injected hit",
            alarms.unexplained,
        ),
        "step_time": _of(
            "median over L of (t_end(s) - t_end(s - 1) - checkpoint stall - evaluation)",
            measure.measure,
        ),
        "steady_overhead": _of("step_time / step_time of the bare loop", measure.measure),
        "goodput": _of(
            "U / W, with U = sum over L of min(T x samples / B, time) x N / P", partition.partition
        ),
        "ettr": _of("sum over L of (time of s - checkpoint stall) / W", partition.partition),
        "mfu": _of("F x B / (step_time x peak)", flops.mfu),
        "throughput": _of("samples of L / W", measure.measure),
        "abort_time": _of("t_parked - t_detected", incidents.incident_of),
        "regroup_time": _of("t_grouped - t_parked", incidents.incident_of),
        "restore_time": _of("t_stated - t_grouped", incidents.incident_of),
        "redo_time": _of("t(s_high committed again) - t_stated", incidents.incident_of),
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
            samples.median_ci95,
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
            " last step"
        ),
    ),
    ("W", "wall time of the arm, run_started to run_finished"),
    (
        "T",
        (
            "ideal time of a step: the median of the control arm's, else of this arm's before its"
            " first fault"
        ),
    ),
    (
        "t_new",
        (
            "the job's first commit of a step beyond s_high, by a generation formed after the"
            " failure, even if a later rollback discards it"
        ),
    ),
    ("s_high", "the highest step that any rank had committed before the failure"),
    ("s_restored", "the lowest step that a generation resumed at before t_new"),
    (
        "t_parked, t_grouped, t_stated",
        "survivors stand still; the last group is formed; all members hold their state",
    ),
    (
        "t_whole",
        "a generation of N ranks is ready, and as many processes wait as there were spares",
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
    yield from _functions()
    yield ""
    yield "### Peaks"
    yield ""
    yield " ".join((flops.PEAK_TFLOPS_DOC).split())
    yield ""
    yield (
        ", ".join(f"{name} {tflops:g} TFLOP/s" for name, tflops in flops.PEAK_TFLOPS.items()) + "."
    )


def _functions() -> Iterator[str]:
    yield "## What the computing functions say"
    for by in dict.fromkeys(
        one.by for one in (*FORMULAS.values(), *RATES.values(), *COMPARED.values())
    ):
        yield ""
        yield f"### `{by.__module__}.{by.__qualname__}`"
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
