"""``chaos doctor``: checks what this machine can do."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from trainchaos.chaos import columns, errors
from trainchaos.chaos.commands.shared.options import FORMAT, RUNS
from trainchaos.chaos.commands.shared.say import say


@click.command()
@RUNS
@FORMAT
def doctor(runs: Path, form: str) -> int:
    """Check what this machine can do: Python, torch, memory, GPUs, containers, Slurm, privileges,
    stacks.

    Exit code 4: something that every run needs is missing. What only some runs need does not count.
    """
    from trainchaos.harness.run.doctor import examine

    findings = examine(runs)
    broken = any(one.state == "broken" for one in findings)
    if form == "json":
        say(json.dumps([asdict(one) for one in findings], indent=2))
        return errors.EXIT_HARNESS if broken else errors.EXIT_PASS
    rows = [
        (f"{one.state:7}", one.name, one.said + (f" -> {one.todo}" if one.todo else ""))
        for one in findings
    ]
    say("\n".join(columns.table(rows, width=columns.width_of(sys.stdout))))
    return errors.EXIT_HARNESS if broken else errors.EXIT_PASS


COMMANDS = [doctor]
