"""What README.md and docs/ state about recovery times is in the register, and what the register
holds they state.
"""

from __future__ import annotations

import io
import lzma
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from benchmarks.published import check as published
from benchmarks.published import stated
from benchmarks.published.check import REGISTER, RESULTS, ROOT, TABLE_IN
from benchmarks.published.register import Figure, Register, load
from tests.harness.compare.test_compare_rules import comparison, runs_in
from tests.support.pages.sample_comparison import build
from tests.support.portions import long_but
from trainchaos.chaos.errors import LogError, ScenarioError
from trainchaos.harness.compare.result import archive

SMALL = """
machines: {here: two cores}
measurements:
  - id: six
    what: six seeds
    date: 2026-11-23
    commit: abcdef0
    machine: here
    source: chaos compare x.yaml
    spread: 95 % interval
    stated: [README.md]
    figures:
      - {of: hot-spare, fault: kill, n: 6, median: 0.130, spread: [0.120, 0.141]}
      - {of: torchrun, fault: kill, n: 6, median: 5.20, spread: [4.9, never],
         also: {detection: 0.025}}
excused: [{file: README.md, says: recovers within 60 s or ends, why: a limit}]
"""
PAGE = """# A title

<!-- figures: six -->
Medians of six seeds: hot-spare recovered in 0.130 s [0.120, 0.141].

| | s | detection |
| --- | --- | --- |

<!-- figures: six/torchrun -->
| of six | recovered in, s | detected, s |
| --- | --- | --- |
| torchrun | 5.20 [4.9, never] | 0.025 |

- It recovers within 60 s or ends.
- A rank has `--park-timeout 5 s` to leave, and a step takes 50 ms.
"""


@pytest.fixture(scope="module")
def register() -> Register:
    return load(ROOT / REGISTER)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return published.pages(ROOT)


@pytest.fixture
def small(tmp_path: Path) -> Register:
    return loaded(tmp_path, SMALL)


def loaded(tmp_path: Path, text: str) -> Register:
    (tmp_path / "register.yaml").write_text(text)
    return load(tmp_path / "register.yaml")


# the pages as they are


@pytest.mark.slow
def test_every_figure_of_recovery_is_in_the_register_and_every_entry_is_stated(
    register: Register, texts: dict[str, str]
) -> None:
    found = published.problems(register, texts)
    assert not found, "\n".join(found)


def test_the_table_is_the_one_made_from_the_register(
    register: Register, texts: dict[str, str]
) -> None:
    made = stated.made(texts[TABLE_IN])
    assert made == published.table(register), "python -m benchmarks.published --write"


@pytest.mark.long
@pytest.mark.slow
def test_every_archive_gives_what_the_register_says_of_it(register: Register) -> None:
    found = published.archives(register, ROOT / RESULTS)
    assert not found, "\n".join(found)


def test_readme_says_how_many_and_how_sure(register: Register, texts: dict[str, str]) -> None:
    told = [
        block for block in stated.blocks(texts["README.md"]) if block.marks and block.kind == "text"
    ]
    assert told, "README.md states no recovery time in a sentence"
    for block in told:
        assert re.search(r"\bn = \d+", block.text) and "95 % interval" in block.text, block.text


def altered(page: str) -> Iterator[tuple[str, str]]:
    """(what was changed, the page with that change): each figure of each marked block once."""
    lines = page.splitlines()
    for block in stated.blocks(page):
        end = next((n for n in range(block.line, len(lines)) if not lines[n].strip()), len(lines))
        if block.kind == "fence":
            end = next(n for n in range(block.line, len(lines)) if lines[n].startswith("```"))
        raw = "\n".join(lines[block.line - 1 : end])
        for value in sorted(set(block.figures())) if block.marks else ():
            other = re.sub(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)", f"{value}7", raw, count=1)
            assert other != raw, (block.line, value)
            whole = "\n".join([*lines[: block.line - 1], other, *lines[end:]])
            yield f"line {block.line}: {value}", whole


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    long_but(
        ["README.md", "docs/performance.md", "docs/comparison.md", "docs/clusters.md"],
        "README.md",
        "docs/clusters.md",
    ),
)
def test_no_figure_can_be_changed_unnoticed(
    register: Register, texts: dict[str, str], name: str
) -> None:
    # entries of other pages, always the same
    before = published.problems(register, {name: texts[name]})
    changes = list(altered(texts[name]))
    assert len(changes) > 5
    unseen = [
        what for what, page in changes if published.problems(register, {name: page}) == before
    ]
    assert not unseen, unseen


def test_the_table_is_put_where_it_was(register: Register, texts: dict[str, str]) -> None:
    page = texts[TABLE_IN]
    other = stated.with_made(page, "| another |")
    assert stated.made(other) == "| another |"
    assert stated.with_made(other, published.table(register)) == page
    assert stated.made("no marks") is None


# a small register and a small page


def test_a_page_that_states_what_the_register_holds_is_in_order(small: Register) -> None:
    assert published.problems(small, {"README.md": PAGE}) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.130 s", "0.131 s", "states 0.131, which the register does not hold"),
        ("0.130 s", "0.13 s", "states 0.13,"),
        ("0.130 s", "a moment", "README.md does not state 0.130 of six/hot-spare/kill"),
        ("[0.120, 0.141]", "[0.110, 0.141]", "states 0.110,"),
        (" [0.120, 0.141]", "", "does not state 0.120, 0.141 of six/hot-spare/kill"),
        ("[4.9, never] | 0.025", "[4.9, never] | 4.9", "states 4.9,"),
        ("six seeds", "some seeds", "does not say n = 6"),
        ("figures: six -->", "figures: seven -->", "names 'seven', which is not in the register"),
        ("<!-- figures: six -->\n", "", "states a time of recovery without a mark"),
        ("<!-- figures: six/torchrun -->\n", "", "states a time of recovery without a mark"),
        (
            "60 s or ends",
            "90 s or ends",
            "the register excuses 'recovers within 60 s or ends', which is not",
        ),
        ("takes 50 ms", "takes 50 ms, and a rank is back after 0.2 s", "without a mark"),
        ("takes 50 ms", "takes 50 ms. hot-spare recovers in 90 ms", "without a mark"),
        ("# A title\n", "A new step comes 0.3 to 0.4 s after it.\n", "without a mark"),
    ],
)
def test_a_page_that_states_something_else_is_not(
    small: Register, old: str, new: str, said: str
) -> None:
    assert old in PAGE
    found = published.problems(small, {"README.md": PAGE.replace(old, new, 1)})
    assert any(said in line for line in found), found


def test_an_entry_that_no_page_states_fails(tmp_path: Path) -> None:
    more = "      - {of: warm, fault: kill, n: 6, median: 0.5, spread: [0.4, 0.6]}\nexcused:"
    register = loaded(tmp_path, SMALL.replace("excused:", more))
    (said,) = published.problems(register, {"README.md": PAGE})
    assert said == "README.md does not state 0.5, 0.4, 0.6 of six/warm/kill, as the register says"


def test_a_page_that_is_gone_is_excused_of_nothing(tmp_path: Path) -> None:
    register = loaded(tmp_path, SMALL.replace("{file: README.md", "{file: docs/gone.md"))
    found = published.problems(register, {"README.md": PAGE})
    assert any(line.startswith("docs/gone.md: ") and "no such page" in line for line in found), (
        found
    )


def test_what_a_fence_holds_is_read_and_where_it_ends_is_seen() -> None:
    page = "<!-- figures: a -->\n```\n- recovery 1.82 s\n\n| 0.614* |\n```\nIt restarts in 3 s.\n"
    fence, text = stated.blocks(page)
    assert (fence.kind, fence.marks, fence.line, fence.figures()) == (
        "fence",
        ("a",),
        2,
        ["1.82", "0.614"],
    )
    assert (text.kind, text.marks, text.speaks_of_recovery()) == ("text", (), True)


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("10 to 75 ms, 103 [89-115], 15 times, 76 x", ["10", "75", "103", "89", "115", "15", "76"]),
        ("2026-11-21, 4 ranks, 95 % of 6 seeds, 243ff42, x86-64, 3.11.7, 60s, `0.25 s`", []),
        ("| hot-spare | 0.137 [0.130, 0.157] | 6 of 6 | 153 |", ["0.137", "0.130", "0.157", "153"]),
    ],
)
def test_what_counts_as_a_figure(text: str, figures: list[str]) -> None:
    (block,) = stated.blocks(text)
    assert block.figures() == figures


# the register


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "n: 6, median: 0.130",
            "n: 0, median: 0.130",
            "measurements.0.figures.0.n: Input should be greater",
        ),
        ("median: 0.130", "median: fast", "measurements.0.figures.0.median: String should match"),
        ("machine: here", "machine: there", "machine 'there' is none of here"),
        ("of: torchrun", "of: hot-spare", "six/hot-spare/kill is there 2 times"),
        ("commit: abcdef0", "comit: abcdef0", "measurements.0.comit: Extra inputs"),
        (", spread: [0.120, 0.141]", "", "has no spread of its 6 values"),
        (
            "spread: 95 % interval",
            "spread: not kept",
            "has a spread, where the measurement says 'not kept'",
        ),
        ("source: chaos", "superseded_by: later\n    source: chaos", "no measurement 'later'"),
        ("machines: {here", "machines: {here: x, here", "duplicate key"),
        ("machines:", "machines: [", "expected"),
    ],
)
def test_a_register_with_an_error_is_refused_in_a_line(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in SMALL
    with pytest.raises(ScenarioError) as caught:
        loaded(tmp_path, SMALL.replace(old, new, 1))
    (line,) = str(caught.value).splitlines()
    assert said in line and line.startswith(str(tmp_path / "register.yaml"))


def test_no_register_is_an_error_of_a_line(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"none.yaml: No such file"):
        load(tmp_path / "none.yaml")


def test_the_table_has_like_beside_like_in_seconds(tmp_path: Path) -> None:
    two = SMALL.replace("spread: 95 % interval", "spread: 95 % interval\n    unit: ms", 1)
    alone = """  - id: one
    what: one seed
    date: 2026-11-22
    machine: here
    source: chaos compare
    spread: none, one trial each
    stated: [README.md]
    figures:
      - {of: hot-spare, fault: kill, n: 1, median: 0.16}
      - {of: hot-spare, fault: hang, n: 1, median: 0.20}
      - {of: hot-spare, fault: hang, metric: detection, n: 1, median: 0.1}
"""
    old = alone.replace("id: one", "id: old").replace(
        "    spread", "    superseded_by: one\n    spread"
    )
    table = published.table(loaded(tmp_path, two.replace("excused", f"{alone}{old}excused")))
    assert table.splitlines()[2:] == [
        (
            "| kill | hot-spare | 0.000130 | 6 | 0.000120 to 0.000141, 95 % interval | six seeds "
            "| abcdef0, 2026-11-23 | here |"
        ),
        (
            "| kill | torchrun | 0.00520 | 6 | 0.0049 to never, 95 % interval | six seeds "
            "| abcdef0, 2026-11-23 | here |"
        ),
        "| kill, hang | hot-spare | 0.16, 0.20 | 1 each | none | one seed | 2026-11-22 | here |",
        "",
        "- here: two cores",
    ]


# archives


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed comparison of simulated arms."""
    place = tmp_path_factory.mktemp("packed")
    runs_in(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainchaos.harness.host.dns_check.slowest_lookup_s", lambda: 0.0)
        made = comparison(place, place)
    results = place / "results"
    archive.pack(made, results / "sims.tar.xz")
    return results


def of_the_archive(tmp_path: Path, figures: str, commit: str) -> Register:
    of = """  - id: sims
    what: simulated
    date: 2026-11-23
    commit: "COMMIT"
    machine: here
    source: chaos compare
    archive: sims.tar.xz
    spread: none, one trial each
    stated: [README.md]
    figures:
"""
    of = of.replace("COMMIT", commit)
    return loaded(tmp_path, SMALL.replace("excused", f"{of}{figures}\nexcused"))


def indented(rows: list[Figure]) -> str:
    return "\n".join(f"      {line}" for line in published.yaml_of(rows).splitlines())


@pytest.mark.slow
def test_rows_of_an_archive_are_recomputed(packed: Path, tmp_path: Path) -> None:
    made = published.archived(packed / "sims.tar.xz")
    rows, commit = published.rows_of(made), str(made.machine["commit"])[:7]
    recovery = next(row for row in rows if row.metric == "recovery")
    assert (recovery.of, recovery.fault, recovery.n) == ("ours default", "family", 1)
    register = of_the_archive(tmp_path, indented(rows), commit)
    assert published.archives(register, packed) == []
    wrong = recovery.model_copy(update={"median": f"{recovery.median}1"})
    unknown = recovery.model_copy(update={"of": "theirs"})
    first, second = published.archives(
        of_the_archive(tmp_path, indented([wrong, unknown]), commit), packed
    )
    assert (
        f"the register has {recovery.median}1" in first
        and f"the archive {recovery.median}" in first
    )
    assert "sims.tar.xz has no such row" in second


def test_an_archive_is_of_the_commit_that_the_register_says(packed: Path, tmp_path: Path) -> None:
    made = published.archived(packed / "sims.tar.xz")
    one = made.model_copy(update={"machine": {**made.machine, "commit": "1234567890"}})
    rows = indented(published.rows_of(made))
    for commit, said in (
        ("1234567", ""),
        ("1234568", "has commit 1234568"),
        ("", "has commit none"),
    ):
        measurement = of_the_archive(tmp_path, rows, commit).measurements[-1]
        found = published.departures(measurement, one)
        assert len(found) == bool(said) and all(said in line for line in found), (commit, found)


def test_an_archive_and_the_register_name_each_other(
    packed: Path, tmp_path: Path, small: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unnamed,) = published.archives(small, packed)
    assert "no measurement of the register is of it" in unnamed
    named = of_the_archive(tmp_path, "      - {of: x, fault: y, n: 1, median: 1.0}", "")
    (gone,) = published.archives(named, tmp_path)
    assert "it is not there" in gone
    monkeypatch.setattr(published, "MOST_ARCHIVED", 10)
    (large,) = published.archives(named, packed)
    assert "is larger than 10 bytes" in large


@pytest.mark.parametrize("name", ["../outside", "/absolute"])
def test_a_hostile_archive_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "sims.tar.xz"
    with lzma.open(path, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(LogError, match="not a plain file below it"):
        published.archived(path)


@pytest.mark.slow
def test_rows_are_printed_as_the_register_reads_them() -> None:
    rows = published.rows_of(build(6))
    read = YAML(typ="base", pure=True).load(published.yaml_of(rows))
    assert [Figure.model_validate(row) for row in read] == rows
    ours = next(row for row in rows if row.id == "hot-spare/kill")
    never = next(row for row in rows if row.id == "none/kill")
    ratio = next(row for row in rows if row.id == "torchrun-tuned/kill/times-hot-spare")
    assert (
        ours.n == 6
        and ours.spread
        and float(ours.spread[0]) <= float(ours.median) <= float(ours.spread[1])
    )
    assert never.median == "never" and never.values == []
    assert float(ratio.median) > 50 and ratio.spread
    assert any(row.id == "hot-spare/kill/full-rate" for row in rows)


@pytest.mark.slow
def test_the_program_says_where_it_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.published", "--rows", str(tmp_path / "none.tar.xz")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        done.returncode == 4
        and "cannot be unpacked" in done.stderr
        and "Traceback" not in done.stderr
    )
