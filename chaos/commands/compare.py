"""``chaos compare``: runs every recovery stack under the same faults and seeds, or compares stored
runs.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands._compare_output import (
    Progress,
    announced,
    write_archive,
    write_report,
)
from trainchaos.chaos.commands.shared.options import (
    FLAG,
    PATH,
    QUIET,
    SCENARIO,
    complete_stack,
    option,
)
from trainchaos.chaos.commands.shared.say import say

if TYPE_CHECKING:
    from trainchaos.harness.compare.plan.directory import ComparisonPlan, Directory
    from trainchaos.harness.compare.play import ComparisonPlayer
    from trainchaos.harness.compare.prepare import CompareOptions

PLACE = "compare"
SUFFIX = ".tar.xz"
_AS_GIVEN = (
    *("settings", "repeat", "deadline", "against", "same"),
    *("price", "currency", "skip_missing", "closed", "tune"),
)


@click.command(
    epilog=(
        "Exit codes: 0 done, 2 usage, 4 something broke, 5 something is left behind, 130"
        " interrupted."
    )
)
@click.argument("what", nargs=-1, type=SCENARIO)
@option(
    "--stacks",
    None,
    "Stacks to compare; default: all.",
    default="",
    metavar="A,B:tuned",
    shell_complete=complete_stack,
)
@option(
    "--settings",
    click.Choice(["default", "tuned", "both"]),
    "Settings of stacks given without any.",
    "both",
)
@option("--repeat", click.IntRange(1, 1000), "Number of seeds: pairs of each.", 1)
@option("--seed", click.IntRange(0, 2**31), "First seed; default: 1, for a sweep (--tune) 9001.")
@option(
    "--name",
    None,
    "Name of the comparison; default: the time, with --resume the newest.",
    default="",
)
@option("--runs", PATH, "Results are kept in RUNS/compare/NAME.", Path("runs"))
@option(
    "--deadline",
    click.FloatRange(1),
    "Seconds without a new step after which a job counts as never recovered.",
    120.0,
)
@option(
    "--against",
    None,
    "Reference for all others; default: the first built-in.",
    default="",
    metavar="STACK",
)
@option("--same", FLAG, "Play the reference twice, to show the difference between equal stacks.")
@option(
    "--tune",
    None,
    "Sweep this stack's options; the best become its `tuned` settings.",
    default="",
    metavar="STACK",
)
@option("--closed", FLAG, "Require the closed division (docs/benchmark-rules.md), or stop.")
@option(
    "--without",
    None,
    "Leave a stack out of a family; may be repeated.",
    multiple=True,
    metavar="STACK:FAMILY",
)
@option("--archive", PATH, "Also pack plan, event logs and results into this .tar.xz.")
@option("--price", click.FloatRange(0), "Price of one GPU hour, to state the cost of a failure.")
@option("--currency", None, "Currency of --price.", "USD")
@option("--resume", FLAG, "Play what is missing; without WHAT, as it was planned.")
@option("--anew", FLAG, "Start again; the comparison of this name is kept under another.")
@option(
    "--accept-changes", FLAG, "Resume although the code or the machine changed; the report says so."
)
@option("--skip-missing", FLAG, "Leave out stacks that are not installed.")
@option("--dry-run", FLAG, "Show what would be done, and how long it would take.")
@QUIET
def compare(what: tuple[Path, ...], **options: Any) -> int:
    """Compare recovery stacks under the same faults, or stored runs.

    WHAT are fault families (scenario files, such as scenarios/compare/*.yaml): each runs on each
    stack and seed, once with the fault and once without. Or WHAT are run directories, compared as
    they are, or a packed comparison (.tar.xz).
    """
    if options["resume"] and options["anew"]:
        raise click.UsageError("say --resume or --anew, not both")
    if len(what) == 1 and what[0].name.endswith(SUFFIX):
        _packed(what[0], options)
        return errors.EXIT_PASS
    directories = [path for path in what if path.is_dir()]
    if directories and len(directories) < len(what):
        raise click.UsageError(
            "name scenario files to play, or run directories to compare, not both"
        )
    if directories:
        _stored(directories, options)
        return errors.EXIT_PASS
    if not what and not options["resume"]:
        raise click.UsageError(
            "name fault families, such as scenarios/compare/*.yaml, or run directories"
        )
    return _play(what, options)


def _packed(path: Path, options: dict[str, Any]) -> None:
    """Report on a packed comparison in the runs directory; the archive stays unchanged."""
    import tempfile

    from trainchaos.harness.compare.plan.directory import Directory
    from trainchaos.harness.compare.result.archive import unpack
    from trainchaos.harness.compare.result.gather import gather

    with tempfile.TemporaryDirectory(prefix="chaos-archive-") as away:
        unpack(path, Path(away))
        made = gather(Directory(Path(away)))
    target = options["runs"] / PLACE / (options["name"] or path.name.removesuffix(SUFFIX))
    if (target / "plan.json").exists():
        target = target.with_name(f"{target.name}-packed")
    write_report(made, target, quiet=options["quiet"])


def _stored(paths: list[Path], options: dict[str, Any]) -> None:
    from trainchaos.harness.compare.plan.directory import Directory
    from trainchaos.harness.compare.result.gather import gather
    from trainchaos.harness.compare.stored import compare_stored

    single = Directory(paths[0])
    played = len(paths) == 1 and single.plan.is_file()
    if options["archive"] is not None and not played:
        raise click.UsageError("--archive packs one comparison: name its directory alone")
    price = {"price": options["price"], "currency": options["currency"]}
    if played:
        made, target = gather(single), single.root
        if options["price"] is not None:
            made = made.model_copy(update=price)
    else:
        now = f"stored-{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime())}"
        title = options["name"] or (now if len(paths) > 1 else paths[0].name)
        made = compare_stored(paths, name=title, argv=sys.argv[1:], **price)
        target = options["runs"] / PLACE / (options["name"] or now)
    if options["archive"] is not None:
        write_archive(single, options["archive"])
    write_report(made, target, quiet=options["quiet"])


def _play(what: tuple[Path, ...], options: dict[str, Any]) -> int:
    from trainchaos.chaos.commands.shared.options import build_catalogue
    from trainchaos.harness.compare.environments.environments import stacks
    from trainchaos.harness.compare.plan.directory import Directory
    from trainchaos.harness.compare.prepare import prepare

    directory = Directory(options["runs"] / PLACE / _name(options))
    asked = _asked(what, options, directory)
    player = prepare(asked, stacks(), build_catalogue(), directory)
    if options["dry_run"]:
        return _dry_run(player)
    with directory.held():
        player = replace(player, plan=_place(directory, player.plan, options))
        player.check()
        directory.write_plan(player.plan)
        if not options["quiet"]:
            say(announced(directory, player.plan))
        return _played(player, options)


def _played(player: ComparisonPlayer, options: dict[str, Any]) -> int:
    """Play the comparison, and report on all finished arms, also after an interruption."""
    from trainchaos.harness.compare.result.gather import gather
    from trainchaos.harness.run.heal import heal_all

    directory = player.directory
    for one in heal_all(directory.runs):
        if one.state in ("healed", "left"):
            say("\n".join(one.lines), err=True)
    shown = Progress(directory=directory, plan=player.plan, quiet=options["quiet"])
    try:
        code = player.play(shown)
    except KeyboardInterrupt:
        code = errors.EXIT_INTERRUPTED
    except errors.ChaosError as error:
        say(str(error), err=True)
        code = error.exit_code
    if directory.played():
        write_report(gather(directory), directory.root, quiet=options["quiet"])
    if code == errors.EXIT_PASS:
        _finished(player, options)
    else:
        how = f"chaos compare --resume --name {player.plan.name} --runs {options['runs']}"
        say(f"not everything was played; to go on with exactly what is missing:\n  {how}", err=True)
    return code


def _finished(player: ComparisonPlayer, options: dict[str, Any]) -> None:
    """After every arm was played: write the archive, and the tuned settings of a swept stack."""
    if options["archive"] is not None:
        write_archive(player.directory, options["archive"])
    if player.plan.tune:
        from trainchaos.harness.compare.environments import environments, tuned
        from trainchaos.harness.compare.plan.directory import now
        from trainchaos.harness.compare.result.gather import gather
        from trainchaos.harness.compare.tuning import sweep_of

        kind = environments.find(player.plan.tune)
        sweep = sweep_of(player.plan, gather(player.directory).trials, kind, now())
        say(f"{tuned.write(sweep)}: {', '.join(f'{k} = {v}' for k, v in sweep.best.items())}")


def _name(options: dict[str, Any]) -> str:
    """Name of the comparison: as given, the newest one to resume, or the time."""
    from trainchaos.harness.compare.plan.plan import slug

    given = str(options["name"])
    if given:
        if given != slug(given):
            raise click.UsageError(f"--name {given}: it names a directory; write {slug(given)}")
        return given
    if not options["resume"]:
        return time.strftime("%Y-%m-%dt%H-%M-%S", time.gmtime())
    plans = sorted(
        (options["runs"] / PLACE).glob("*/plan.json"), key=lambda path: path.stat().st_mtime
    )
    if not plans:
        raise click.UsageError(f"no comparison to resume in {options['runs'] / PLACE}")
    return plans[-1].parent.name


def _asked(what: tuple[Path, ...], options: dict[str, Any], directory: Directory) -> CompareOptions:
    """Options from the command line or, with only --resume, from the stored plan."""
    from trainchaos.harness.compare.prepare import CompareOptions, as_planned

    if options["resume"] and not what:
        return as_planned(directory.read_plan(), skip_missing=options["skip_missing"])
    return CompareOptions(
        name=directory.root.name,
        scenarios=what,
        stacks=[word for word in options["stacks"].split(",") if word.strip()],
        seed=_seed(options),
        argv=sys.argv[1:],
        without=[_left_out(word) for word in options["without"]],
        **{name: options[name] for name in _AS_GIVEN},
    )


def _seed(options: dict[str, Any]) -> int:
    """The first seed. Sweeps use separate seeds, so that nothing is tuned on the data of a later
    comparison.
    """
    from trainchaos.harness.compare.tuning import FIRST_SEED

    if options["seed"] is not None:
        return int(options["seed"])
    return FIRST_SEED if options["tune"] else 1


def _left_out(word: str) -> tuple[str, str]:
    stack, colon, family = word.partition(":")
    if not colon or not stack or not family:
        raise click.UsageError(f"--without {word}: write STACK:FAMILY")
    return stack, family


def _place(directory: Directory, plan: ComparisonPlan, options: dict[str, Any]) -> ComparisonPlan:
    """The plan to keep in the directory, merged with a plan already there."""
    from trainchaos.harness.compare.prepare import resumed, set_aside

    if directory.plan.is_file() and options["anew"]:
        set_aside(directory)
    if not directory.plan.is_file():
        return plan
    if not options["resume"]:
        raise errors.ScenarioError(
            f"{directory.root} holds a comparison already",
            hint=(
                "--resume goes on with it, --anew begins again, --name begins another one beside it"
            ),
        )
    return resumed(directory.read_plan(), plan, accepted=options["accept_changes"])


def _dry_run(player: ComparisonPlayer) -> int:
    """Load every scenario as it would be played, in a temporary directory, and print what would be
    done.
    """
    import tempfile

    from trainchaos.harness.compare.plan.directory import Directory

    with tempfile.TemporaryDirectory() as away:
        replace(player, directory=Directory(Path(away))).check()
    say(announced(player.directory, player.plan))
    return errors.EXIT_PASS


COMMANDS = [compare]
