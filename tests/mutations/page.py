"""The mutations by checker, as the documentation's site lists them (``docs/site/hooks.py``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tests.mutations.tape import Mutation


def listed(corpus: Iterable[Mutation]) -> str:
    """Of each checker the bugs that it must see, by name."""
    by: dict[str, list[str]] = defaultdict(list)
    for mutation in corpus:
        for checker, verdict in mutation.seen.items():
            name = mutation.name.removeprefix(f"{mutation.base}: ")
            open_ = ", inconclusive" if verdict != "fail" else ""
            by[checker].append(f"- {name} ({mutation.base}{open_})")
    return "\n".join(f"\n**`{name}`**\n\n" + "\n".join(by[name]) for name in sorted(by)) + "\n\n"
