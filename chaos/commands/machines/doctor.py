"""``chaos doctor``: checks what this machine can do, and whether its devices are fit."""

from __future__ import annotations

import socket
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import FLAG, FORMAT, PATH, RUNS, option
from trainchaos.chaos.commands.shared.quantities import span
from trainchaos.chaos.commands.shared.say import say, say_json, say_table

if TYPE_CHECKING:
    from trainchaos.harness.preflight.check import Findings
    from trainchaos.recovery.health.taints import TaintList

DEFAULT_S, SAVING_S = 60.0, 180.0
"""A baseline repeats the rates, which take most of the time."""
LONGEST_S = 3600.0


@click.command()
@RUNS
@FORMAT
@option("--preflight", FLAG, "Measure instead whether devices, disk and links are fit.")
@option(
    "--preflight-time",
    span(positive=True, most_s=LONGEST_S),
    "Most that the measurements may take.  [default: "
    f"{DEFAULT_S:g}s, to save a baseline {SAVING_S:g}s]",
)
@option("--baseline", PATH, "Compare with a baseline of this machine.", metavar="FILE")
@option("--save-baseline", PATH, "Write a baseline if all is fit.", metavar="FILE")
@option("--other-hardware", FLAG, "Compare even with a baseline of other hardware.")
@option("--taint", FLAG, "Add what is unfit to the list of tainted places (chaos taint).")
def doctor(runs: Path, form: str, preflight: bool, **choices: Any) -> int:
    """Check what this machine can do: Python, torch, memory, GPUs, containers, Slurm, privileges,
    stacks.

    Exit code 4: something that every run needs is missing. What only some runs need does not count.

    With --preflight: memory, products, clocks, disk, store and bandwidth are measured. Exit code 1:
    something is unfit; 7: nothing could be measured.
    """
    if preflight:
        return _preflight(runs, form, **choices)
    for name in (name for name, value in choices.items() if value):
        raise click.UsageError(f"--{name.replace('_', '-')} needs --preflight")
    from trainchaos.harness.run.doctor import examine

    findings = examine(runs)
    broken = any(one.state == "broken" for one in findings)
    if form == "json":
        say_json([asdict(one) for one in findings])
    else:
        say_table([(f"{one.state:7}", one.name, _to_do(one)) for one in findings])
    return errors.EXIT_HARNESS if broken else errors.EXIT_PASS


def _preflight(
    runs: Path,
    form: str,
    *,
    preflight_time: float | None,
    baseline: Path | None,
    save_baseline: Path | None,
    other_hardware: bool,
    taint: bool,
) -> int:
    """Measure, compare, print; returns the exit code. Raises BaselineError, and TaintError with
    ``taint``, before anything is measured.
    """
    from trainchaos.chaos.files import write_json
    from trainchaos.harness.preflight import baseline as baselines
    from trainchaos.harness.preflight.places import places_here
    from trainchaos.harness.preflight.preflight import preflight

    save = save_baseline
    total_s = preflight_time or (DEFAULT_S if save is None else SAVING_S)
    if other_hardware and baseline is None:
        raise click.UsageError("--other-hardware needs --baseline")
    if save is not None and not save.absolute().parent.is_dir():
        raise baselines.BaselineError(f"{save} cannot be written: its directory does not exist")
    names = places_here()
    against = baselines.read(baseline) if baseline is not None else None
    if baseline is not None and against is not None and not other_hardware:
        baselines.refuse_other(baseline, against, baselines.hardware(names))
    known = _taints() if taint else None
    repeats = baselines.REPEATS if save is not None else 1
    found, repeated = preflight(names, runs, total_s=total_s, baseline=against, repeats=repeats)
    if form == "json":
        say_json(found.as_json())
    else:
        say_table(
            [(f"{one.state:10}", f"{one.check} {one.place}", _to_do(one)) for one in found.findings]
        )
        say(f"{_verdict(found.exit_code)} in {found.seconds:.1f} s")
    if known is not None:
        _add_to(known, found)
    if save is not None:
        made = baselines.of_repeats(repeated, found.hardware)
        if found.fit and made.rates:
            write_json(save, made, "choose another file")
            say(f"{save}: {len(made.rates)} rates, {len(repeated)} repeats each", err=True)
        else:
            why = "nothing was measured often enough" if found.fit else "not all is fit"
            say(f"{save} was not written: {why}", err=True)
    return found.exit_code


def _to_do(finding: Any) -> str:
    return f"{finding.said} -> {finding.todo}" if finding.todo else str(finding.said)


def _taints() -> TaintList:
    """The list, which can be read."""
    from trainchaos.recovery.health.taints import TaintList, taints_path

    known = TaintList(taints_path())
    known.read()
    return known


def _add_to(known: TaintList, found: Findings) -> None:
    from trainchaos.harness.preflight.check import as_taints

    now = datetime.now(UTC)
    for each in as_taints(found.unfit, socket.gethostname(), now):
        new = known.add(each, now)
        say(f"{each.place} is tainted{'' if new else ' already'}: {each.reason}", err=True)


def _verdict(code: int) -> str:
    words = {errors.EXIT_PASS: "fit", errors.EXIT_FAIL: "unfit"}
    return words.get(code, "nothing could be measured")


COMMANDS = [doctor]
