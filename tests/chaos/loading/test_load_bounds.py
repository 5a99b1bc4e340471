"""Whatever a scenario file holds, it is judged as soon as a large one that is valid, in little
memory, and in few words.
"""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.costs import times_as_long
from tests.support.limited import limited
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import EXIT_PASS, EXIT_USAGE
from trainchaos.chaos.source import bounds

BASE = """version: 1
name: x
workload: {kind: gpt, size: nano, ranks: 4, steps: 60, global_batch: 16}
launcher: {kind: sim}
recovery: {strategy: hot-spare}
"""
FAULT = "  - {id: a, kind: process-kill, at: {step: 5}}\n"
FAULTS = "faults:\n" + FAULT
WHOLE = BASE + FAULTS
MOST_TIMES = 5
"""By what the largest valid scenario takes, 0.2 s of a processor: the slowest of these takes 1.7
times as long, and most took 15 s to minutes.
"""
HALVED = 2.6  # what twice the size may take; four times would be quadratic
MOST_BYTES = 128 << 20
MOST_SAID = 24_000  # of 50 errors, of which each names the file


def faults(count: int) -> str:
    lines = (
        f"  - {{id: f{n}, kind: process-kill, at: {{step: {5 + n % 50}}}}}\n" for n in range(count)
    )
    return "faults:\n" + "".join(lines)


def numbers(count: int) -> str:
    return "[" + ",".join(map(str, range(count))) + "]"


KEYS = ", ".join(f"k{n}: 0" for n in range(3000))
HUGE = {
    "thousands of faults": BASE + faults(4000),
    "many faults": BASE + faults(600),
    "faults that are none": BASE + "faults: [" + "1," * 9000 + "1]\n",
    "many errors": WHOLE + "tags: [" + "{}," * 5000 + "1]\n",
    "many keys": WHOLE + "".join(f"k{n}: 1\n" for n in range(3000)),
    "many keys in faults": (
        BASE + faults(2).replace("}}", f"}}, target: {{select: {{percent: 5, {KEYS}}}}}}}")
    ),
    "a deep trace": (
        BASE + "faults:\n  - {id: a, kind: process-kill, at: {trace: {times:"
        f" {'[' * 2000 + ']' * 2000}}}}}}}\n"
    ),
    "brackets": BASE + "faults: " + "[" * 300_000 + "\n",
    "dashes": BASE + "faults:\n  " + "- " * 9000 + "1\n",
    "a long trace": (
        BASE + f"faults:\n  - {{id: a, kind: process-kill, at: {{trace: {numbers(30_000)}}}}}\n"
    ),
    "four billion ranks": (
        WHOLE.replace("ranks: 4", "ranks: 4000000000").replace(": 16}", ": 4000000000}")
    ),
    "ranks by a reference": (
        WHOLE.replace("ranks: 4", "ranks: '${vars.n}'").replace(": 16}", ": 4000000000}")
        + "vars: {n: 4000000000}\n"
    ),
    "cells of many faults": BASE + faults(300) + f"matrix: {{a: {numbers(200)}}}\n",
    "a long extends": f"extends: {'a' * 5000}\n{WHOLE}",
    "a path that is too long": f"extends: {'../' * 2000}x\n{WHOLE}",
    "a long name": WHOLE.replace("hot-spare", "h" * 200_000),
    "a scalar of 900 kB": WHOLE.replace("hot-spare", "h" * 900_000),
    "a kind of 900 kB": WHOLE.replace("process-kill", "h" * 900_000),
    "a reference of 900 kB": WHOLE + f"description: '${{vars.{'h' * 900_000}}}'\n",
    "a long key": WHOLE + "k" * 200_000 + ": 1\n",
    "a long line": WHOLE + 'description: "' + "x" * 200_000 + '"\nbogus: 1\n',
    "references that grow": (
        WHOLE + f"vars: {{a: '{'x' * 90_000}'}}\ndescription: '{'${vars.a}' * 9000}'\n"
    ),
    "references to lists": (
        BASE
        + f"vars: {{a: {numbers(5000)}}}\nfaults: []\ntags: ["
        + ",".join(["'${vars.a}'"] * 4000)
        + "]\n"
    ),
}


@cache
def largest_s(folder: Path) -> float:
    """What the largest valid scenario takes."""
    path = folder / "largest.yaml"
    path.write_text(BASE + faults(bounds.MAX_FAULTS))
    return min(limited(folder / "said", ["validate", str(path)])[1] for _ in range(3))


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is imported first counts for nobody."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "s.yaml").write_text(WHOLE)
    assert invoke(["validate", "-q", str(folder / "s.yaml")]) == EXIT_PASS
    return folder


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("command", ["validate", "plan"])
@pytest.mark.parametrize("what", HUGE)
def test_it_is_refused_soon_in_little_memory_and_in_few_words(
    what: str, command: str, imported: Path, tmp_path: Path
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(HUGE[what])
    code, took_s, said = limited(tmp_path / "said", [command, str(path)])
    assert code == EXIT_USAGE, said[-2000:]
    assert took_s < MOST_TIMES * largest_s(imported)
    assert str(path) in said and "nothing was started" in said and len(said) < MOST_SAID
    echoed = re.findall(r"([hkxa])\1{100,}", said)
    assert len(echoed) <= 1, "a long text is shown once, in its line"
    assert not re.search(r"([hkxa])\1{200,}", said)


def test_a_huge_number_of_ranks_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(HUGE["four billion ranks"])
    tracemalloc.start()
    try:
        assert invoke(["validate", str(path)]) == EXIT_USAGE
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "text",
    [
        lambda part: BASE + faults(bounds.MAX_FAULTS // part),
        lambda part: WHOLE.replace("ranks: 4", f"ranks: {bounds.MAX_RANKS // part}").replace(
            ": 16}", f": {bounds.MAX_RANKS // part}}}"
        ),
        lambda part: (
            BASE
            + FAULTS.replace("5}", "'${matrix.a}'}")
            + f"matrix: {{a: [{','.join(map(str, range(5, 5 + 50 // part)))}]}}\n"
        ),
        lambda part: WHOLE + "description: " + "x" * (100_000 // part) + "\n",
    ],
    ids=["faults", "ranks", "matrix", "description"],
)
def test_what_is_large_and_within_the_limits_is_valid_and_costs_by_its_size(
    text: Callable[[int], str], tmp_path: Path
) -> None:
    def valid(part: int) -> Callable[[], None]:
        path = tmp_path / f"{part}.yaml"
        path.write_text(text(part))

        def judge() -> None:
            assert invoke(["validate", str(path)]) == EXIT_PASS

        return judge

    assert times_as_long(valid(1), valid(2), HALVED) < HALVED


def test_a_line_is_shown_around_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.yaml"
    text = WHOLE.replace("{strategy: hot-spare}", "{" + " " * 5000 + "strategy: hotspare}")
    path.write_text(text)
    assert invoke(["validate", str(path)]) == EXIT_USAGE
    head, line, caret, *_ = capsys.readouterr().err.splitlines()
    column = text.splitlines()[4].index("hotspare") + 1
    assert head.startswith(f"{path}:5:{column}: ")
    assert line[caret.index("^") :].startswith("hotspare") and len(line) < 250


def test_files_that_extend_one_another_by_links_in_a_circle_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").symlink_to("b.yaml")
    (tmp_path / "b.yaml").symlink_to("a.yaml")
    path = tmp_path / "s.yaml"
    path.write_text("extends: a.yaml\n" + WHOLE)
    assert invoke(["validate", str(path)]) == EXIT_USAGE
    assert "s.yaml:1:10" in capsys.readouterr().err
