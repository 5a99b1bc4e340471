"""How long ``chaos fuzz`` takes to find each planted defect: ``python -m benchmarks.planted
[--seeds N] [NAME...]``.

Each seed is a separate search in one process; it ends with the first find, and counts scenarios and
processor seconds until then. ``--apart`` repeats the search for a defect found by a story without
the stories of its scenario, to see what the others find. Results are kept in
``docs/results/planted.jsonl``, one line per search; ``docs/search.md`` has their summary, and the
site of the documentation the table; ``--table`` only renews the summary. ``--part I/N`` searches
every Nth defect from I on, and ``--into FILE`` writes elsewhere, so that several processes can
share the work; ``--table FILE...`` merges their results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import ROOT, Tree, markdown, options, placed
from tests.support.search.planted import PLANTED, sought
from trainchaos.harness.fuzz.draw.stories import STORIES

RESULTS, PAGE = ROOT / "docs" / "results" / "planted.jsonl", ROOT / "docs" / "search.md"
BEGIN, END = "<!-- planted: made by python -m benchmarks.planted -->\n", "<!-- planted: end -->\n"


def searched(name: str, seed: int, *, apart: bool = False) -> Tree:
    """One search. ``told``: the stories of the scenario that found the defect; ``apart``: scenarios
    until it was found without them, 0: not found.
    """
    since_s = time.process_time()
    search = sought(PLANTED[name], seed=f"{name} {seed}")
    row: Tree = {
        "name": name,
        "seed": seed,
        "plays": search.runs,
        "seconds": round(time.process_time() - since_s, 1),
        "shown": next(iter(search.finds), ""),
        "told": "".join(found.first.get("description", "") for found in search.finds.values()),
    }
    if apart and row["told"]:
        others = [story for story in STORIES if story.name not in row["told"].split("; ")]
        again = sought(PLANTED[name], seed=f"{name} {seed}", stories=others)
        row["apart"] = again.runs if again.finds else 0
    return row


def merged(rows: Iterable[Tree]) -> list[Tree]:
    """The last result of each search, in the order of the defects, without defects that no longer
    exist.
    """
    last = {(row["name"], row["seed"]): row for row in rows}
    return [row for name in PLANTED for (of, _), row in sorted(last.items()) if of == name]


def read(paths: Sequence[Path]) -> list[Tree]:
    """Lines of several files."""
    texts = (path.read_text() for path in paths if path.exists())
    return [json.loads(line) for text in texts for line in text.splitlines()]


def summary(rows: Sequence[Tree]) -> str:
    """What the searches found, for the page, and how many of the finds were made by stories."""
    found = [row for row in rows if row["shown"]]
    names = {row["name"]: True for row in rows}
    plays, seconds = [row["plays"] for row in found], [row["seconds"] for row in found]
    missed = {row["name"]: True for row in rows if not row["shown"]}
    left = [name for name in PLANTED if name not in names]
    said = f"Not found by some search: {', '.join(missed)}." if missed else "None was missed."
    said += f" Not searched for to the end yet: {', '.join(left)}." if left else ""
    ours = [row for row in found if row["told"]]
    again = [row for row in ours if "apart" in row]
    stories = {name for row in ours for name in row["told"].split("; ")}
    by = (
        f"{len(found) - len(ours)} of {len(found)} finds were made by faults that have nothing to"
        f" do with each other, {len(ours)} by {len(stories)} of the {len(STORIES)} stories or by"
        " scenarios near one."
    )
    if again:
        by += (
            " Searched for again without the stories that its scenario told,"
            f" {sum(row['apart'] > 0 for row in again)} of {len(again)} were found all the same."
        )
    return (
        f"{len(names)} defects, {len(rows)} searches: {len(found)} found theirs, in a median of"
        f" {median(plays):.0f} scenarios and {median(seconds):.1f} s of one processor, the longest"
        f" in {max(plays)} and {max(seconds):.0f} s. {said}\n\n{by}\n"
    )


def table(rows: Sequence[Tree]) -> str:
    """What became of each defect, for the site of the documentation."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        found = [row for row in mine if row["shown"]]
        cells = [name, PLANTED[name].strategy, f"{len(found)} of {len(mine)}"]
        if found:
            cells += [f"{median(row['plays'] for row in found):.0f}"]
            cells += [f"{median(row['seconds'] for row in found):.1f}"]
            cells += [found[0]["told"] or "none of them"]
            cells += [found[0]["shown"].split(": ", 1)[1].split(" fail:")[0]]
        lines.append(cells + ["-"] * (7 - len(cells)))
    head = ["defect", "strategy", "found", "scenarios", "seconds", "in a story", "by"]
    return markdown(head, lines) + "\n"


def main() -> int:
    """Search and show; 1 when a defect was not found with some seed."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--table", type=Path, nargs="*")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.table is None:
        part, of = map(int, given.part.split("/"))
        names = [name for name in PLANTED if not given.names or name in given.names][part::of]
        with (given.into or RESULTS).open("a") as stream:
            for seed, name in ((seed, name) for seed in range(given.seeds) for name in names):
                row = searched(name, seed, apart=given.apart)
                print(json.dumps(row), file=stream, flush=True)
                print(f"{name}: {row['plays']} scenarios, {row['seconds']} s: {row['shown']}")
        if given.into:
            return 0
    rows = merged(read([RESULTS, *(given.table or ())]))
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    PAGE.write_text(placed(summary(rows), PAGE.read_text(), BEGIN, END))
    return 1 if any(not row["shown"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
