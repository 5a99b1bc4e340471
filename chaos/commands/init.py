"""``chaos init``: watches a command for a moment and writes a scenario for it, or tightens the
limits of one that has run.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import FLAG, PATH, build_catalogue, option
from trainchaos.chaos.commands.shared.quantities import span
from trainchaos.chaos.commands.shared.say import say

DEFAULT_FOR_S = 30.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@option(
    "--from run",
    PATH,
    "Tighten the limits of the scenario of this run instead, to what it observed.",
    metavar="RUN",
)
@option("--out", PATH, "The file to write; default: chaos-NAME.yaml, by the script.")
@option("--force", FLAG, "Overwrite the file if it exists.")
@option(
    "--for for_s",
    span(),
    "How long to watch its steps, at most; the first is waited for three times as long.",
    f"{DEFAULT_FOR_S:g}s",
    metavar="TIME",
)
@option("--steps", click.IntRange(min=1), "How many steps it is to train.")
@option("--env", None, "A variable for it; repeatable.", multiple=True, metavar="NAME=VALUE")
def init(
    command: tuple[str, ...],
    run: Path | None,
    out: Path | None,
    force: bool,
    for_s: float,
    steps: int | None,
    env: tuple[str, ...],
) -> int:
    """Run COMMAND for a moment and write a scenario for it: how it is started, its ranks, its
    progress, its checkpoints, and three faults.

    Prints what was found and what was not, with the line to change. Exit code 3: the scenario was
    written, and something in it is yours to fill in. Exit code 2: the command fails, and nothing
    was written.

    \b
    chaos init -- torchrun --nproc-per-node 4 train.py --max-steps 200
    chaos init --from runs/train/latest
    """
    if bool(command) == (run is not None):
        raise click.UsageError("give a COMMAND (chaos init -- torchrun train.py), or --from RUN")
    if run is not None:
        if for_s != DEFAULT_FOR_S or steps or env:
            raise click.UsageError("--for, --steps and --env go with a COMMAND, not with --from")
        return _tighten(run, out, force)
    if not 1 <= for_s <= 3600:
        raise click.UsageError("--for: watch for 1s to 1h")
    return _draft(command, out, force, for_s, steps, env)


def _draft(
    command: tuple[str, ...],
    out: Path | None,
    force: bool,
    for_s: float,
    steps: int | None,
    env: tuple[str, ...],
) -> int:
    from trainchaos.chaos.loading.load import load
    from trainchaos.harness.draft.draft import draft, target_of
    from trainchaos.harness.draft.findings import FAULTS
    from trainchaos.harness.draft.text import shown

    target = out or target_of(command, Path.cwd())
    _refuse_existing(target, force)
    _refuse_place(target)
    catalogue = build_catalogue()
    say(f"watching {shlex.join(command)}", err=True)
    drafted = draft(
        command,
        named=out,
        directory=Path.cwd(),
        env=_variables(env),
        for_s=for_s,
        steps=steps,
        check=lambda path: load(path, catalogue),
    )
    _write(target, drafted.written.text, force)
    say(f"watched for {drafted.seconds:.0f} s")
    for line in shown(drafted.facts, drafted.written.lines, str(target)):
        say(line)
    say(f"written {target}")
    if drafted.facts.run_s is not None:
        least, most = map(_time, drafted.facts.run_s)
        say(f"time    {least} to {most} for {2 * FAULTS} arms, by how long the faults hold it up")
    if drafted.needs:
        correct = f"correct {', '.join(drafted.needs)} in {target}, then chaos run {target}"
        say(f"next    {drafted.again}, or {correct}" if drafted.again else f"next    {correct}")
        return errors.EXIT_INCONCLUSIVE
    first = f"{drafted.again}, or " if drafted.again else ""
    say(f"next    {first}chaos run {target}")
    return errors.EXIT_PASS


def _tighten(run: Path, out: Path | None, force: bool) -> int:
    from trainchaos.chaos.loading.load import load
    from trainchaos.harness.draft.tighten import tighten

    catalogue = build_catalogue()
    made = tighten(run, out, load=lambda path: load(path, catalogue, env=os.environ))
    if out is not None and out.resolve() != made.source.resolve():
        _refuse_existing(out, force)
    target = out or made.source
    for line in made.said:
        say(line)
    if not made.changed:
        say(f"nothing to tighten: {target} is as it was")
        return errors.EXIT_PASS
    _write(target, made.text, force=True)
    say(f"written {target}")
    return errors.EXIT_PASS


def _refuse_existing(target: Path, force: bool) -> None:
    if not target.absolute().parent.is_dir():
        raise errors.ScenarioError(
            f"{target.parent} is not a directory", hint="name another file with --out"
        )
    if os.path.lexists(target) and not force:
        raise errors.ScenarioError(
            f"{target} exists", hint="--force overwrites it, and --out FILE names another one"
        )


def _refuse_place(target: Path) -> None:
    """Before the command is watched: that nothing can be written there, or found here."""
    if Path.cwd() == Path("/"):
        raise errors.ScenarioError(
            "the working directory is /: the files of a job cannot be told from all others there",
            hint="cd to the directory of the script first",
        )
    try:
        with tempfile.NamedTemporaryFile(dir=target.absolute().parent):
            pass
    except OSError as error:
        raise errors.ScenarioError(
            f"{target.absolute().parent}: cannot be written to: {error.strerror}",
            hint="name a file elsewhere with --out",
        ) from error


def _write(target: Path, text: str, force: bool) -> None:
    """Write it whole or not at all; never over a file that came meanwhile. A link stays one."""
    target = target.resolve() if force else target
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        if force:
            if target.exists():
                beside.chmod(target.stat().st_mode & 0o7777)
            beside.replace(target)
        else:
            os.link(beside, target)
    except FileExistsError:
        _refuse_existing(target, force)
    except OSError as error:
        raise errors.InfrastructureError(
            f"cannot write {target}: {error.strerror}", hint="name another file with --out"
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def _variables(pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--env: {pair!r} is not NAME=VALUE")
        found[name] = value
    return found


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


COMMANDS = [init]
