"""Whether a diagnosis is right: every kind of fault is injected, its traces in the log are hidden,
and what is said of the rest is compared with what was done: ``docs/attribution.md``.

    python -m benchmarks.attribution --seed 11               # plays an exam, asks our diagnosis
    python -m benchmarks.attribution --answers answers.json  # scores another tool's answers to it
    python -m benchmarks.attribution --nvrx VENV/bin/python  # asks NVIDIA's restart agent

The exam is ``INTO/paper``, its key ``INTO/paper.key.json``; the answers, their scores and a page of
them are written beside as ``answers.json``, ``results.json`` and ``attribution.md``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.attribution import nvrx
from benchmarks.attribution.exam import CATALOGUE, STRATEGIES, Key, key_path, questions, read, sit
from benchmarks.attribution.score import Answers, page, score
from benchmarks.harness import options
from trainchaos.chaos.errors import ChaosError
from trainchaos.chaos.events.log import read_log
from trainchaos.chaos.files import write_whole
from trainchaos.harness.explain.diagnose import diagnose


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: scored, however badly; 2: wrong usage, or a file that cannot be used."""
    parser = options(__doc__)
    add = parser.add_argument
    add("--into", type=Path, default=Path("attribution"), help="directory")
    add("--answers", type=Path, help="score these answers to the exam in INTO")
    add("--nvrx", type=Path, help="Python of an environment with NVRx, to be asked")
    add("--kinds", metavar="A,B", help="only these kinds of fault")
    add("--strategy", action="append", help="only this one; may be repeated")
    add("--launcher", choices=["sim", "local"], default="sim")
    add("--runs", type=int, default=1, help="of each variant and strategy")
    add("--unfaulted", type=int, default=100, help="runs in which nothing happens")
    add("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    paper = given.into / "paper"
    try:
        if given.answers or given.nvrx:
            key = read(key_path(paper), Key)
        else:
            kinds = given.kinds.split(",") if given.kinds else sorted(CATALOGUE.kind)
            names = ("runs", "seed", "launcher", "unfaulted")
            about = {name: getattr(given, name) for name in names}
            asked = questions(kinds, given.strategy or STRATEGIES, **about)
            key = sit(asked, paper, launcher=given.launcher, seed=given.seed)
        answers = read(given.answers, Answers) if given.answers else _asked(key, paper, given.nvrx)
        _conclude(key, answers, given.into)
    except ChaosError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _asked(key: Key, paper: Path, python: Path | None) -> Answers:
    """The answers of our diagnosis, or of NVIDIA's agent, to the logs of a paper."""
    logs = {of.id: read_log(paper / of.id) for of in key.questions}
    if python is not None:
        runs = {name: nvrx.ask(python, name, log) for name, log in logs.items()}
        return Answers(tool=nvrx.TOOL, runs=runs)
    return Answers(tool="trainchaos", runs={name: diagnose(log) for name, log in logs.items()})


def _conclude(key: Key, answers: Answers, into: Path) -> None:
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "played": "in simulation" if key.launcher == "sim" else "with processes of one machine",
        "processors": len(os.sched_getaffinity(0)),
        "seed": key.seed,
        "questions": len(key.questions),
        "left out": len(key.left_out),
    }
    found = score(key.questions, answers)
    tree = {"version": 2, **about, **found.model_dump(mode="json"), "why left out": key.left_out}
    write_whole(into / "answers.json", answers.model_dump_json(indent=1) + "\n")
    write_whole(into / "results.json", json.dumps(tree, indent=1) + "\n")
    write_whole(into / "attribution.md", page(found, about))
    print(page(found, about))
    for name, why in key.left_out.items():
        print(f"left out: {name}, {why}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
