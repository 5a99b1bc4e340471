"""The measured part of docs/gpu-results.md."""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.gpu.jobs import EVERY, GpuMeasured

Parts = Mapping[str, tuple[Mapping[str, Any], str]]
"""Part -> its measurements, and why there are none."""
BEGIN, END = "<!-- made by make bench-gpu -->\n", "<!-- end of make bench-gpu -->\n"
OF_ONE_PROCESS = {
    "form_s": "form a group of one",
    "first_s": "its first all-reduce (4 MiB)",
    "abort_s": "abort while the device is busy, until the training thread is free",
    "plain_step_s": "a step, {size}, plain torch",
    "step_s": "the same step with the job's reducer",
    "digest_s": "digests of the whole state, for the log",
    "fingerprint_s": "fingerprint, to compare replicas",
    "finite_s": "look for values that are not finite, before a save",
}


def page(
    device: str,
    size: str,
    batch: int,
    about: Mapping[str, Any],
    parts: Parts,
    jobs: Mapping[str, GpuMeasured],
    skipped: Mapping[str, str],
) -> str:
    """What was measured, as a page. ``skipped``: job -> why it was not run."""
    what = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [
        "# Results on GPUs",
        "",
        f"Made by `make bench-gpu` ({datetime.now(UTC):%Y-%m-%d %H:%M} UTC). {driver()}{what}.",
    ]
    if device == "cpu":
        lines += [
            "",
            "**A rehearsal without a GPU: gloo on the CPU. None of these figures is of a GPU.**",
        ]
    lines += ["", "Seconds unless said otherwise; n, median, smallest to largest."]
    lines += _recovery(size, batch, jobs, skipped)
    lines += _one_process(size, parts)
    lines += _faults(parts)
    lines += [f"\n{name}: {reason}." for name, (_, reason) in parts.items() if reason]
    return "\n".join(lines) + "\n"


def placed(measured: str, there: str) -> str:
    """The page ``there`` with ``measured`` in place of what it holds between ``BEGIN`` and ``END``;
    ``measured`` alone if it has no such place.
    """
    if BEGIN not in there or END not in there:
        return measured
    inside = measured.split("\n", 2)[2]  # the page has a title of its own
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    return between.sub(lambda _: f"{BEGIN}\n{inside}\n{END}", there, count=1)


def _recovery(
    size: str, batch: int, jobs: Mapping[str, GpuMeasured], skipped: Mapping[str, str]
) -> list[str]:
    return [
        "",
        "## Recovery",
        "",
        (
            f"Model {size}, global batch {batch}, AdamW, a checkpoint every {EVERY} steps, SIGKILL"
            " at a step boundary."
        ),
        "",
        "| job | step | | | SIGKILL to detection | | | SIGKILL to the next new step | | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {spread(job.steps)} | {spread(job.detected)} | {spread(job.recovered)} |"
            for name, job in jobs.items()
        ),
        *(f"- {name}: {job.note}" for name, job in jobs.items() if job.note),
        *(f"- Not run: {name}: {why}" for name, why in skipped.items()),
    ]


def _one_process(size: str, parts: Parts) -> list[str]:
    lines = [
        "",
        "## One process",
        "",
        "| what | n | median | smallest to largest |",
        "| --- | --- | --- | --- |",
    ]
    for found, _ in parts.values():
        lines += [
            f"| {text.format(size=size)} | {spread(found[key], digits=5)} |"
            for key, text in OF_ONE_PROCESS.items()
            if key in found
        ]
    if "bytes" in parts["state"][0]:
        lines.append(f"\nThe state: {parts['state'][0]['bytes'] / 1e9:.2f} GB.")
    return lines


def _faults(parts: Parts) -> list[str]:
    landed = parts["faults"][0].get("landed", {})
    missed = [name for name, yes in landed.items() if not yes]
    where = " and ".join(parts["faults"][0].get("where", []))
    return [
        "",
        "## Faults that change tensors",
        "",
        (
            f"{len(landed) - len(missed)} of {len(landed)} landed on {where} tensors, by the rank's"
            f" own digests{'; not ' + ', '.join(missed) if missed else ''}."
        ),
    ]


def spread(values: Sequence[float], *, unit: float = 1.0, digits: int = 3) -> str:
    """n, median, and the smallest and largest."""
    if not values:
        return "0 | - | -"
    shown = [value * unit for value in values]
    return (
        f"{len(shown)} | {statistics.median(shown):.{digits}f} | {min(shown):.{digits}f} to"
        f" {max(shown):.{digits}f}"
    )


def driver() -> str:
    """The driver version from nvidia-smi."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"driver {ran.stdout.split()[0]}, " if ran.returncode == 0 and ran.stdout.split() else ""
