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
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import ROOT, ROWS, GpuMeasured, play, why_not
from benchmarks.gpu.page import page, placed
from trainchaos.chaos.errors import EXIT_FAIL, EXIT_PASS, EXIT_SKIPPED

PART_LIMIT_S = 100.0
JOBS_SHARE = 0.7  # share of the time for jobs; the rest is for parts


def part(name: str, device: str, size: str, until_s: float) -> tuple[dict[str, Any], str]:
    """Measurements of a part, made in a separate process; or why they failed."""
    left_s = min(PART_LIMIT_S, until_s - time.monotonic())
    if left_s < 1:
        return {}, "not run: no time left"
    index = f"{device}:0" if device == "cuda" else device
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.parts", name, index, size],
            cwd=ROOT,
            timeout=left_s,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"not done within {left_s:.0f} s"
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return {}, f"failed: {(ran.stderr.strip().splitlines() or ['?'])[-1]}"
    found: dict[str, Any] = json.loads(lines[-1])
    return found, ""


def gpus() -> int:
    """Number of GPUs seen by torch, asked in another process, as this one must not touch them."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    return int(ran.stdout.strip() or 0) if ran.returncode == 0 else 0


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
    batch = 8
    about, reason = part("machine", given.device, given.size, until_s)
    jobs: dict[str, GpuMeasured] = {}
    skipped = {row.name: why for row in ROWS if (why := why_not(row, count, given.device))}
    only: list[str] = given.only
    rows = [row for row in ROWS if row.name not in skipped]
    rows = [row for row in rows if not only or any(text in row.name for text in only)]
    share = 1.0 if only else JOBS_SHARE
    jobs_until_s = time.monotonic() + share * (until_s - time.monotonic())
    for place, row in enumerate(rows):
        share_s = max(0.0, jobs_until_s - time.monotonic()) / (len(rows) - place)
        print(f"{datetime.now(UTC):%H:%M:%S} {row.name}", file=sys.stderr, flush=True)
        jobs[row.name] = play(row, given.device, given.size, batch, time.monotonic() + share_s)
    left_out: tuple[dict[str, Any], str] = {}, "not run: --only"
    parts = {
        name: left_out if only else part(name, given.device, given.size, until_s)
        for name in ("faults", "nccl", "state")
    }
    text = page(given.device, given.size, batch, about, parts, jobs, skipped)
    given.out.write_text(placed(text, given.out.read_text() if given.out.is_file() else ""))
    print(text)
    wrong = [reason, *(job.note for job in jobs.values())]
    failed = any(wrong) or (not only and any(why for _, why in parts.values()))
    return EXIT_FAIL if failed else EXIT_PASS


if __name__ == "__main__":
    sys.exit(main())
