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

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.search.planted import PLANTED, sought
from trainchaos.harness.fuzz.draw.stories import STORIES

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "results" / "planted.jsonl", ROOT / "docs" / "search.md"
BEGIN, END = "<!-- planted: made by python -m benchmarks.planted -->\n", "<!-- planted: end -->\n"
Row = dict[str, Any]


def searched(name: str, seed: int, *, apart: bool = False) -> Row:
    """One search. ``told``: the stories of the scenario that found the defect; ``apart``: scenarios
    until it was found without them, 0: not found.
    """
    since_s = time.process_time()
    search = sought(PLANTED[name], seed=f"{name} {seed}")
    seconds = round(time.process_time() - since_s, 1)
    row: Row = {
        "name": name,
        "seed": seed,
        "plays": search.runs,
        "seconds": seconds,
        "shown": next(iter(search.finds), ""),
        "told": "".join(found.first.get("description", "") for found in search.finds.values()),
    }
    if apart and row["told"]:
        others = [story for story in STORIES if story.name not in row["told"].split("; ")]
        again = sought(PLANTED[name], seed=f"{name} {seed}", stories=others)
        row["apart"] = again.runs if again.finds else 0
    return row


def merged(rows: Iterable[Row]) -> list[Row]:
    """The last result of each search, in the order of the defects, without defects that no longer
    exist.
    """
    last = {(row["name"], row["seed"]): row for row in rows}
    return [row for name in PLANTED for (of, _), row in sorted(last.items()) if of == name]


def read(paths: Sequence[Path]) -> list[Row]:
    """Lines of several files."""
    return [
        json.loads(line)
        for path in paths
        if path.exists()
        for line in path.read_text().splitlines()
    ]


def summary(rows: Sequence[Row]) -> str:
    """What the searches found, for the page."""
    plays = [row["plays"] for row in rows if row["shown"]]
    seconds = [row["seconds"] for row in rows if row["shown"]]
    missed = [
        name for name in PLANTED if any(row["name"] == name and not row["shown"] for row in rows)
    ]
    names = _names(rows)
    return "\n".join(
        (
            f"{len(names)} defects, {len(rows)} searches: {len(plays)} found theirs, in a median of"
            f" {statistics.median(plays):.0f} scenarios and {statistics.median(seconds):.1f} s of"
            f" one processor, the longest in {max(plays)} and {max(seconds):.0f} s."
            f" {_missed(missed)}{_unsearched(names)}",
            "",
            _by_stories(rows),
            "",
        )
    )


def table(rows: Sequence[Row]) -> str:
    """What became of each defect, for the site of the documentation."""
    lines = [
        "| defect | strategy | found | scenarios | seconds | in a story | by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in _names(rows):
        mine = [row for row in rows if row["name"] == name]
        found = [row for row in mine if row["shown"]]
        plays, seconds = [row["plays"] for row in found], [row["seconds"] for row in found]
        how = (
            f"{statistics.median(plays):.0f} | {statistics.median(seconds):.1f}"
            if found
            else "- | -"
        )
        by = found[0]["shown"].split(": ", 1)[1].split(" fail:")[0] if found else "-"
        strategy = PLANTED[name].strategy
        lines.append(
            f"| {name} | {strategy} | {len(found)} of {len(mine)} | {how} | {_told(found)} | {by} |"
        )
    return "\n".join(lines) + "\n"


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in rows))


def _told(found: Sequence[Row]) -> str:
    return (found[0]["told"] or "none of them") if found else "-"


def _by_stories(rows: Sequence[Row]) -> str:
    """Number of finds made by stories, and of those still found without them."""
    found = [row for row in rows if row["shown"]]
    ours = [row for row in found if row["told"]]
    again = [row for row in ours if "apart" in row]
    names = {name for row in ours for name in row["told"].split("; ")}
    said = (
        f"{len(found) - len(ours)} of {len(found)} finds were made by faults that have nothing to"
        f" do with each other, {len(ours)} by {len(names)} of the {len(STORIES)} stories or by"
        " scenarios near one."
    )
    if again:
        share = sum(row["apart"] > 0 for row in again)
        said += (
            f" Searched for again without the stories that its scenario told, {share} of"
            f" {len(again)} were found all the same."
        )
    return said


def _missed(missed: Sequence[str]) -> str:
    return f"Not found by some search: {', '.join(missed)}." if missed else "None was missed."


def _unsearched(names: Sequence[str]) -> str:
    left = [name for name in PLANTED if name not in names]
    return f" Not searched for to the end yet: {', '.join(left)}." if left else ""


def show(rows: Sequence[Row]) -> None:
    """Write the summary into its page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + summary(rows) + END + rest.partition(END)[2])


def main() -> int:
    """Search and show; 1 when a defect was not found with some seed."""
    parser = argparse.ArgumentParser(description=__doc__)
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
            for seed in range(given.seeds):
                for name in names:
                    row = searched(name, seed, apart=given.apart)
                    print(json.dumps(row), file=stream, flush=True)
                    print(
                        f"{name}: {row['plays']} scenarios, {row['seconds']} s: {row['shown']}",
                        flush=True,
                    )
        if given.into:
            return 0
    rows = merged(read([RESULTS, *(given.table or ())]))
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)
    return 1 if any(not row["shown"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
