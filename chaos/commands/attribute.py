"""``chaos attribute``: the fault catalogue as an exam of whoever diagnoses."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import FORMAT, PATH
from trainchaos.chaos.commands.shared.say import say

if TYPE_CHECKING:
    from trainchaos.harness.attribute.postmortem import Aftermath
    from trainchaos.harness.attribute.score import Score
    from trainchaos.harness.attribute.sit import Exam

DEFAULT_INTO = Path("attribution")


@click.command()
@click.option("--strategy", "strategies", multiple=True, metavar="NAME", help="Only these.")
@click.option("--kinds", metavar="A,B", help="Only these kinds of fault.  [default: all]")
@click.option(
    "--launcher",
    type=click.Choice(["sim", "local"]),
    default="sim",
    show_default=True,
    help="Where the questions are played: in simulation, or with processes of this machine.",
)
@click.option(
    "--runs",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Questions for each variant of a kind and strategy.",
)
@click.option(
    "--unfaulted",
    type=click.IntRange(0, 10_000),
    default=100,
    show_default=True,
    help="Runs in which nothing happens.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--into",
    type=PATH,
    default=DEFAULT_INTO,
    show_default=True,
    help="Directory for results.json, attribution.md and diagnoses.json.",
)
@click.option("--export", type=PATH, help="Write the logs without answers here, the key beside.")
@click.option("--score", "paper", type=PATH, help="Score answers to an exported exam.")
@click.option("--diagnoses", type=PATH, help="With --score: the answers, a JSON file.")
@FORMAT
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def attribute(
    strategies: tuple[str, ...],
    kinds: str | None,
    launcher: str,
    runs: int,
    unfaulted: int,
    seed: int,
    into: Path,
    export: Path | None,
    paper: Path | None,
    diagnoses: Path | None,
    form: str,
    quiet: bool,
) -> int:
    """Examine a diagnosis: every kind of fault is injected, its traces in the log are hidden, and
    what is said of the rest is compared with what was done; see docs/attribution.md.

    Without --score the built-in diagnosis is examined. Exit code 0: scored; 2: wrong usage, or a
    file that cannot be used.
    """
    if (paper is None) != (diagnoses is None):
        raise click.UsageError("--score and --diagnoses go together")
    if paper is not None and export is not None:
        raise click.UsageError("--export is for an exam that is played, not for --score")
    _refuse_file(into)
    if paper is not None and diagnoses is not None:
        return _score(paper, diagnoses, into, form)
    return _play(
        strategies,
        kinds,
        launcher=launcher,
        runs=runs,
        unfaulted=unfaulted,
        seed=seed,
        into=into,
        export=export,
        form=form,
        quiet=quiet,
    )


def _refuse_file(into: Path) -> None:
    """Before an exam is played for minutes."""
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.ScenarioError(f"--into {into}: {error.strerror}") from error


def _score(paper: Path, diagnoses: Path, into: Path, form: str) -> int:
    from trainchaos.harness.attribute.paper import read_key
    from trainchaos.harness.attribute.score import score
    from trainchaos.harness.explain.diagnosis import read_diagnosis

    key = read_key(paper)
    found = score(key.questions, read_diagnosis(diagnoses))
    about = _about(key.launcher, key.seed)
    return _conclude(found, about, [], into, form)


def _play(
    strategies: Sequence[str],
    kinds: str | None,
    *,
    launcher: str,
    runs: int,
    unfaulted: int,
    seed: int,
    into: Path,
    export: Path | None,
    form: str,
    quiet: bool,
) -> int:
    from trainchaos.chaos import plugins
    from trainchaos.chaos.cli import build_catalogue
    from trainchaos.chaos.fault.base import Fault
    from trainchaos.harness.attribute import paper
    from trainchaos.harness.attribute.exam import STRATEGIES, questions
    from trainchaos.harness.attribute.score import score
    from trainchaos.harness.attribute.sit import sit
    from trainchaos.recovery.playbook.book import playbook

    known = plugins.load(plugins.FAULTS, Fault)
    names = [one.strip() for one in kinds.split(",")] if kinds else sorted(known)
    asked = questions(
        known,
        names=names,
        strategies=strategies or STRATEGIES,
        runs=runs,
        seed=seed,
        launcher=launcher,
        unfaulted=unfaulted,
    )
    if export is not None:
        paper.begin(export)
    exam = sit(
        asked,
        catalogue=build_catalogue(),
        launcher=launcher,
        playbook=playbook(),
        export=export,
        tell=(lambda line: None) if quiet else (lambda line: say(line, err=True)),
    )
    if export is not None:
        key = paper.Key(launcher=launcher, seed=seed, questions=exam.keys)
        paper.finish(export, key, {one.id: one.tree for one in asked})
        say(f"paper   {export}; its key is {paper.key_path(export)}", err=form == "json")
    (into / "diagnoses.json").write_text(exam.diagnosis.model_dump_json(indent=1) + "\n")
    about = {**_about(launcher, seed), "runs": runs, **_left_out(exam)}
    found = score(exam.keys, exam.diagnosis)
    return _conclude(found, about, exam.aftermaths, into, form)


def _left_out(exam: Exam) -> dict[str, Any]:
    """Say which questions do not count, and count them."""
    for name, why in exam.skipped.items():
        say(f"not played  {name}, {why}", err=True)
    for name in exam.silent:
        say(f"never hit   {name}: left out", err=True)
    return {
        "questions": len(exam.keys),
        "not played": len(exam.skipped),
        "never hit": len(exam.silent),
    }


def _about(launcher: str, seed: int) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "played": "in simulation" if launcher == "sim" else "with processes of one machine",
        "simulated": launcher == "sim",
        "processors": len(os.sched_getaffinity(0)),
        "seed": seed,
    }


def _conclude(
    found: Score,
    about: dict[str, Any],
    aftermaths: Sequence[Aftermath],
    into: Path,
    form: str,
) -> int:
    from trainchaos.chaos.files import write_whole
    from trainchaos.harness.attribute.page import markdown, results_json, summary_lines

    tree = results_json(found, about, aftermaths)
    try:
        write_whole(into / "results.json", json.dumps(tree, indent=1) + "\n")
        write_whole(into / "attribution.md", markdown(found, about))
    except OSError as error:
        raise errors.InfrastructureError(f"{into}: cannot be written: {error.strerror}") from error
    if form == "json":
        say(json.dumps({name: tree[name] for name in tree if name != "incidents"}, indent=1))
    else:
        for line in summary_lines(found):
            say(line)
        say(f"results {into / 'results.json'}, {into / 'attribution.md'}")
    return errors.EXIT_PASS


COMMANDS = [attribute]
