"""Goals of the recovery benchmark, and its numbers as Markdown."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trainchaos.chaos.stats import median_ci95
from trainchaos.harness.launch.devices import describe

Values = Mapping[str, Sequence[float]]

TORCHRUN = "own SIGKILL"
NAMES = {
    TORCHRUN: "torchrun --max-restarts, SIGKILL",
    "checkpoint-restart SIGKILL": "checkpoint-restart warm, SIGKILL",
    "checkpoint-restart in memory, SIGKILL": "checkpoint-restart warm, from memory, SIGKILL",
}
AHEAD_OF_TORCHRUN = {
    "drop-replica SIGKILL": 40,
    "hot-spare SIGKILL": 40,
    "checkpoint-restart SIGKILL": 5,
    "checkpoint-restart in memory, SIGKILL": 5,
}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """``seconds``: maximum median; ``words``: its derivation."""

    seconds: float
    words: str


def goals(step_s: float, import_s: float) -> dict[str, Goal]:
    """The project's goals with 4 ranks of gpt nano on 2 cores.

    ``step_s``: median step; ``import_s``: one import of torch per rank, at the same time; both from
    the same run.
    """
    detected = max(8 * step_s, 0.25)
    return {
        "drop-replica SIGKILL": Goal(seconds=step_s + 0.03, words="step + 30 ms"),
        "hot-spare SIGKILL": Goal(seconds=step_s + 0.06, words="step + 60 ms"),
        "checkpoint-restart SIGKILL": Goal(seconds=0.5, words="0.5 s"),
        "checkpoint-restart in memory, SIGKILL": Goal(seconds=0.5, words="0.5 s"),
        "checkpoint-restart cold, SIGKILL": Goal(
            seconds=1.3 * import_s, words="1.3 x import torch"
        ),
        "drop-replica SIGSTOP": Goal(
            seconds=detected + step_s + 0.03, words="8 steps (0.25 s) + step + 30 ms"
        ),
        "hot-spare SIGSTOP": Goal(
            seconds=detected + step_s + 0.06, words="8 steps (0.25 s) + step + 60 ms"
        ),
        "checkpoint-restart SIGSTOP": Goal(
            seconds=detected + 0.5, words="8 steps (0.25 s) + 0.5 s"
        ),
    }


def recovery(
    recovered: Values, detected: Values, *, steps: Sequence[float], imports: Sequence[float]
) -> str:
    """Time from the fault to the first new committed step, one row per kind, with the ratio to
    torchrun.
    """
    step_s, import_s = median(steps), median(imports)
    wanted = goals(step_s, import_s)
    head = [
        "recovery of",
        "n",
        "median s",
        "95 % CI",
        "max s",
        "detection, median s",
        "goal s",
        "",
        "torchrun takes",
    ]
    rows = [head, ["---"] * len(head)]
    for row, values in recovered.items():
        goal, peer = wanted.get(row), recovered.get(TORCHRUN)
        rows.append(
            [
                NAMES.get(row, row),
                str(len(values)),
                *_figures(values),
                _s(_median(detected[row])),
                f"{goal.seconds:.3f} ({goal.words})" if goal else "-",
                _met(values, goal),
                _times(values, peer, AHEAD_OF_TORCHRUN.get(row)),
            ]
        )
    facts = (
        f"gpt nano, 4 ranks, CPU gloo, {platform.machine()}, {describe()['cores']} cores; median"
        f" step {step_s * 1e3:.1f} ms (n={len(steps)} arms,"
        f" {min(steps) * 1e3:.1f}-{max(steps) * 1e3:.1f}); 4 imports of torch at once"
        f" {import_s:.2f} s (n={len(imports)})"
    )
    return f"{facts}\n\n{_markdown(rows)}\n"


def phases(found: Mapping[str, Values]) -> str:
    """Medians of the phases of a recovery, milliseconds."""
    names = list(dict.fromkeys(name for spans in found.values() for name in spans))
    rows = [["median ms (max)", *names], ["---"] * (len(names) + 1)]
    for row, spans in found.items():
        cells = [spans.get(name, ()) for name in names]
        rows.append(
            [
                NAMES.get(row, row),
                *(f"{median(c) * 1e3:.1f} ({max(c) * 1e3:.0f})" if c else "-" for c in cells),
            ]
        )
    return f"{_markdown(rows)}\n"


def _figures(values: Sequence[float]) -> list[str]:
    interval = median_ci95(values)
    return [
        _s(_median(values)),
        f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "-",
        _s(max(values, default=None)),
    ]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _met(values: Sequence[float], goal: Goal | None) -> str:
    found = _median(values)
    if goal is None:
        return ""
    return "met" if found is not None and found <= goal.seconds else "MISSED"


def _times(values: Sequence[float], peer: Sequence[float] | None, least: int | None) -> str:
    if not values or not peer or least is None:
        return ""
    ratio = median(peer) / median(values)
    return f"{ratio:.1f} x (goal {least} x, {'met' if ratio >= least else 'MISSED'})"


def _s(value: float | None) -> str:
    return "-" if value is None else "never" if math.isinf(value) else f"{value:.3f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
