"""Writes the list of mutations in docs/verdicts.md: ``python -m tests.mutations.page``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.mutations.tables import all_mutations
from tests.mutations.tape import Mutation

PAGE = Path("docs/verdicts.md")
BEGIN, END = "<!-- mutations -->\n", "<!-- end of mutations -->"


def listed(corpus: Iterable[Mutation]) -> str:
    """Of each checker the bugs that it must see, by name."""
    by: dict[str, list[str]] = defaultdict(list)
    for mutation in corpus:
        for checker, verdict in mutation.seen.items():
            name = mutation.name.removeprefix(f"{mutation.base}: ")
            open_ = ", inconclusive" if verdict != "fail" else ""
            by[checker].append(f"- {name} ({mutation.base}{open_})")
    return "\n".join(f"\n**`{name}`**\n\n" + "\n".join(by[name]) for name in sorted(by)) + "\n\n"


def with_list(text: str, corpus: Iterable[Mutation]) -> str:
    """The page with its list as it should be."""
    return re.sub(
        f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{listed(corpus)}{END}", text, flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text(), all_mutations()))
