"""Small jobs of compared stacks, started as a comparison starts them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trainchaos import beacon
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.environments.stack import CommonJob, Settings
from trainchaos.harness.compare.environments.tuned import stack_of
from trainchaos.harness.script.listen.progress import ProgressReport, parse_beacon


def interpreter(name: str) -> Path:
    """Of a stack's environment; skips the test where there is none."""
    found = environments.look(name)
    if not found.ready:
        pytest.skip(f"{found.why}: chaos stacks install {name}")
    return found.python


def start(
    name: str, settings: Settings, data: Path, scratch: Path, *, ranks: int = 2, steps: int = 6
) -> subprocess.Popen[bytes]:
    """Start a stack as a comparison does; its output goes to a file in ``scratch``."""
    python = interpreter(name)
    scratch.mkdir()
    (scratch / "beacon").touch()
    job = CommonJob(
        size="nano", ranks=ranks, steps=steps, global_batch=8, every=2, seed=3, data=data
    )
    drive = stack_of(name, environments.find(name), settings).drive(job, python)
    told = {"CHAOS_SCRATCH": str(scratch), beacon.VARIABLE: str(scratch / "beacon")}
    with (scratch / "output").open("wb") as output:
        return subprocess.Popen(
            [word.replace("$CHAOS_SCRATCH", str(scratch)) for word in drive.argv],
            env={**os.environ, **drive.env, **told},
            cwd=scratch,
            stdout=output,
            stderr=output,
        )


def reported(scratch: Path) -> list[ProgressReport]:
    """What ranks have said so far, in order."""
    said = [
        parse_beacon(line) for line in (scratch / "beacon").read_text().splitlines(keepends=False)
    ]
    return [one for one in said if one is not None]


def output(scratch: Path) -> str:
    """The end of what the command has written."""
    return (scratch / "output").read_text(errors="replace")[-3000:]
