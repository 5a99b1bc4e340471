"""What README.md and docs/ state about recovery times is what the register holds, and what the
register holds they state.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.published import BLOCKS, REGISTER, RESULTS, ROOT, Figure, Register, load
from tests.harness.compare.test_compare_rules import comparison, runs_in
from trainchaos.chaos.errors import ScenarioError
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
    figures:
      - {of: hot-spare, fault: kill, n: 6, median: 0.130, spread: [0.120, 0.141]}
      - {of: torchrun, fault: kill, n: 6, median: 5.20, spread: [4.9, never],
         also: {detection: 0.025}}
"""
IN_WORDS = """<!-- figures: words -->Medians (n = {{ f('six/hot-spare/kill', 'n') }}): {{
f('six/hot-spare/kill') }} s [{{ f('six/hot-spare/kill', 'low') }}, {{
f('six/hot-spare/kill', 'high') }}].<!-- end -->
<!-- figures: cells -->
| torchrun | {{ f('six/torchrun/kill') }} [{{ f('six/torchrun/kill', 'low') }}, never] | {{
f('six/torchrun/kill', 'detection') }} |
<!-- end -->
"""
PAGE = """# A title

- <!-- figures: words -->Medians (n = 6): 0.130 s [0.120, 0.141].<!-- end -->

<!-- figures: cells -->
| torchrun | 5.20 [4.9, never] | 0.025 |
<!-- end -->
"""


@pytest.fixture(scope="module")
def register() -> Register:
    return load(ROOT / REGISTER)


@pytest.fixture
def small(tmp_path: Path) -> Register:
    return loaded(tmp_path, SMALL)


def loaded(tmp_path: Path, text: str) -> Register:
    (tmp_path / "register.yaml").write_text(text)
    return load(tmp_path / "register.yaml")


def test_pages_state_what_the_register_holds_and_all_of_it(register: Register) -> None:
    blocks = (ROOT / BLOCKS).read_text()
    differences = published.problems(register, blocks, published.pages(ROOT))
    assert not differences, "\n".join(differences)


@pytest.mark.long
@pytest.mark.slow
def test_every_archive_gives_what_the_register_says_of_it(register: Register) -> None:
    found = published.archives(register, ROOT / RESULTS)
    assert not found, "\n".join(found)


def test_readme_says_how_many_and_how_sure() -> None:
    blocks = published.BLOCK.findall((ROOT / "README.md").read_text())
    sentences = [text for _, text in blocks if "```" not in text]
    assert sentences, "README.md states no recovery time in a sentence"
    assert all(re.search(r"n = \d+", text) and "95 % interval" in text for text in sentences)


def test_a_page_that_states_what_the_register_holds_is_in_order(small: Register) -> None:
    assert published.problems(small, IN_WORDS, {"README.md": PAGE}) == []


@pytest.mark.parametrize("figure", ["6", "0.130", "0.120", "0.141", "5.20", "4.9", "0.025"])
def test_no_figure_can_be_changed_unnoticed(small: Register, figure: str) -> None:
    """Not on a page, which is made anew, nor in the register."""
    wrong = PAGE.replace(figure, f"{figure}7", 1)
    (said,) = published.problems(small, IN_WORDS, {"README.md": wrong})
    assert said.startswith("README.md: figures") and "--write" in said
    made, _ = published.rendered(small, IN_WORDS)
    assert published.with_figures(wrong, made) == PAGE


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("figures: words", "figures: phrase", "README.md: docs/results/figures.md.j2 has no block"),
        (PAGE[PAGE.index("<!-- figures: cells") :], "", "no page has block cells"),
        ("<!-- end -->\n\n", "\n\n", "a block of figures without a name or an end"),
    ],
)
def test_a_block_that_is_not_where_it_should_be_is_named(
    small: Register, old: str, new: str, said: str
) -> None:
    found = published.problems(small, IN_WORDS, {"README.md": PAGE.replace(old, new, 1)})
    assert any(said in line for line in found), found


def test_an_entry_that_no_page_states_fails(tmp_path: Path) -> None:
    row = "      - {of: warm, fault: kill, n: 6, median: 0.5, spread: [0.4, 0.6]"
    tabled = loaded(tmp_path, f"{SMALL}{row}}}\n")
    assert published.problems(tabled, IN_WORDS, {"README.md": PAGE}) == []
    other = loaded(tmp_path, f"{SMALL}{row}, metric: goodput, also: {{at most: 0.7}}}}\n")
    assert published.problems(other, IN_WORDS, {"README.md": PAGE}) == [
        f"no page states {name} of six/warm/kill/goodput"
        for name in ("at most", "high", "low", "median")
    ]


def test_a_block_of_what_the_register_does_not_have_is_an_error(small: Register) -> None:
    for asked in ("f('six/warm/kill')", "f('six/torchrun/kill', 'high')", "unknown"):
        with pytest.raises(ScenarioError, match="bad: not in the register"):
            published.rendered(small, f"<!-- figures: bad -->{{{{ {asked} }}}}<!-- end -->")


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


def test_the_table_has_like_beside_like_in_seconds(tmp_path: Path) -> None:
    two = SMALL.replace("spread: 95 % interval", "spread: 95 % interval\n    unit: ms", 1)
    alone = """  - id: one
    what: one seed
    date: 2026-11-22
    machine: here
    source: chaos compare
    spread: none, one trial each
    figures:
      - {of: hot-spare, fault: kill, n: 1, median: 0.16}
      - {of: hot-spare, fault: hang, n: 1, median: 0.20}
      - {of: hot-spare, fault: hang, metric: detection, n: 1, median: 0.1}
"""
    old = alone.replace("id: one", "id: old").replace(
        "    spread", "    superseded_by: one\n    spread"
    )
    table = published.table(loaded(tmp_path, f"{two}{alone}{old}"))
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
    figures:
"""
    of = of.replace("COMMIT", commit)
    return loaded(tmp_path, f"{SMALL}{of}{figures}\n")


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
