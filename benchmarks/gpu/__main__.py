"""Measures on a GPU, and puts the results into docs/gpu-results.md, within ten minutes.

    python -m benchmarks.gpu [--device cuda] [--size 124m] [--minutes 9] [--out docs/gpu-results.md]
        [--only TEXT...]

Runs jobs of ``recovery.run`` whose ranks are killed, and measures single parts in separate
processes; ``--only``: jobs whose names contain one of the texts, and no parts. Parts skipped for
lack of time are listed. ``--device cpu --size tiny`` rehearses it without a GPU. Needs pydantic
besides torch, numpy and xxhash, and no network. Exit status: 0 done, 1 a part failed, 7 no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import EVERY, ROOT, ROWS, GpuMeasured, play
from trainchaos.chaos.errors import EXIT_FAIL, EXIT_PASS, EXIT_SKIPPED

PART_LIMIT_S = 100.0
JOBS_SHARE = 0.7  # share of the time for jobs; the rest is for parts
BATCH = 8
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


def part(name: str, device: str, size: str, until_s: float) -> tuple[dict[str, Any], str]:
    """Measurements of a part, made in a separate process; or why they failed."""
    left_s = min(PART_LIMIT_S, until_s - time.monotonic())
    if left_s < 1:
        return {}, "not run: no time left"
    index = f"{device}:0" if device == "cuda" else device
    command = [sys.executable, "-m", "benchmarks.gpu.parts", name, index, size]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, timeout=left_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"not done within {left_s:.0f} s"
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return {}, f"failed: {(ran.stderr.strip().splitlines() or ['?'])[-1]}"
    found: dict[str, Any] = json.loads(lines[-1])
    return found, ""


def asked(*command: str) -> str:
    """What a command prints; "" if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip()


def gpus() -> int:
    """Number of GPUs seen by torch, asked in another process, as this one must not touch them."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    return int(asked(sys.executable, "-c", code) or 0)


def page(
    given: argparse.Namespace,
    about: Mapping[str, Any],
    parts: Parts,
    jobs: Mapping[str, GpuMeasured],
    skipped: Mapping[str, str],
) -> str:
    """What was measured, as a page. ``skipped``: job -> why it was not run."""
    driver = asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    what = ", ".join(f"{name} {value}" for name, value in about.items())
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    on = f"driver {driver.split()[0]}, {what}" if driver else what
    lines = ["# Results on GPUs\n", f"Made by `make bench-gpu` ({when}). {on}.\n"]
    if given.device == "cpu":
        warning = "A rehearsal without a GPU: gloo on the CPU. None of these figures is of a GPU."
        lines.append(f"**{warning}**\n")
    lines += [
        "Seconds unless said otherwise; n, median, smallest to largest.\n",
        "## Recovery\n",
        f"Model {given.size}, global batch {BATCH}, AdamW, a checkpoint every {EVERY} steps,"
        " SIGKILL at a step boundary.\n",
        "| job | step | | | SIGKILL to detection | | | SIGKILL to the next new step | | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, job in jobs.items():
        cells = (spread(values) for values in (job.steps, job.detected, job.recovered))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [f"- {name}: {job.note}" for name, job in jobs.items() if job.note]
    lines += [f"- Not run: {name}: {why}" for name, why in skipped.items()]
    lines += ["\n## One process\n", "| what | n | median | smallest to largest |"]
    lines.append("| --- | --- | --- | --- |")
    for found, _ in parts.values():
        for key, text in OF_ONE_PROCESS.items():
            if key in found:
                lines.append(f"| {text.format(size=given.size)} | {spread(found[key], 5)} |")
    if "bytes" in parts["state"][0]:
        lines.append(f"\nThe state: {parts['state'][0]['bytes'] / 1e9:.2f} GB.")
    landed = parts["faults"][0].get("landed", {})
    missed = [name for name, yes in landed.items() if not yes]
    lines += [
        "\n## Faults that change tensors\n",
        f"{len(landed) - len(missed)} of {len(landed)} landed on {given.device} tensors, by the"
        f" rank's own digests{'; not ' + ', '.join(missed) if missed else ''}.",
    ]
    lines += [f"\n{name}: {reason}." for name, (_, reason) in parts.items() if reason]
    return "\n".join(lines) + "\n"


def placed(measured: str, there: str) -> str:
    """The page ``there`` with ``measured`` in place of what it holds between ``BEGIN`` and ``END``;
    ``measured`` alone if it has no such place.
    """
    before, begin, rest = there.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return measured
    inside = measured.split("\n", 2)[2]  # the page has a title of its own
    return f"{before}{BEGIN}\n{inside}\n{END}{after}"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """n, median, and the smallest and largest."""
    if not values:
        return "0 | - | -"
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{len(values)} | {middle:.{digits}f} | {low:.{digits}f} to {high:.{digits}f}"


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    usage = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usage.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    usage.add_argument("--size", choices=("124m", "tiny"), default="124m")
    usage.add_argument("--minutes", type=float, default=9.0)
    usage.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu-results.md")
    usage.add_argument("--only", nargs="+", default=[])
    given = usage.parse_args(argv)
    until_s = time.monotonic() + 60 * given.minutes
    count = gpus() if given.device == "cuda" else 1
    if not count:
        print("bench-gpu: skipped: torch sees no CUDA device here", file=sys.stderr)
        return EXIT_SKIPPED
    about, reason = part("machine", given.device, given.size, until_s)
    jobs: dict[str, GpuMeasured] = {}
    skipped = {row.name: why for row in ROWS if (why := row.why_not(count, given.device))}
    only: list[str] = given.only
    rows = [row for row in ROWS if row.name not in skipped]
    rows = [row for row in rows if not only or any(text in row.name for text in only)]
    share = 1.0 if only else JOBS_SHARE
    jobs_until_s = time.monotonic() + share * (until_s - time.monotonic())
    for place, row in enumerate(rows):
        share_s = max(0.0, jobs_until_s - time.monotonic()) / (len(rows) - place)
        print(f"{datetime.now(UTC):%H:%M:%S} {row.name}", file=sys.stderr, flush=True)
        jobs[row.name] = play(row, given.device, given.size, BATCH, time.monotonic() + share_s)
    left_out: tuple[dict[str, Any], str] = {}, "not run: --only"
    parts = {
        name: left_out if only else part(name, given.device, given.size, until_s)
        for name in ("faults", "nccl", "state")
    }
    text = page(given, about, parts, jobs, skipped)
    given.out.write_text(placed(text, given.out.read_text() if given.out.is_file() else ""))
    print(text)
    wrong = [reason, *(job.note for job in jobs.values())]
    failed = any(wrong) or (not only and any(why for _, why in parts.values()))
    return EXIT_FAIL if failed else EXIT_PASS


if __name__ == "__main__":
    sys.exit(main())
