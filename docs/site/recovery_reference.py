"""The reference of the recovery API, made from signatures, docstrings and parsers: the page
reference/recovery.md of the site.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress

from trainchaos import recovery
from trainchaos.recovery.cli.options import parser
from trainchaos.recovery.nodes import serve

MEMBERS = {
    "Job": (
        "attach register loader at_end ready running step busy mesh generation seed steps device"
        " done"
    ),
    "Step": "phase batches accumulate backward run as_loss commit",
}
"""What a script may use of the classes; all else of them is for the stack itself."""


def page() -> str:
    """The page, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Recovery API"
    yield ""
    yield (
        "`from trainchaos import recovery` does not load torch; `recovery.join` does."
        " [How to use it](../recovery.md); [rules and guarantees](../recovery-rules.md);"
        " parameters of the [strategies](strategies.md)."
    )
    for name in ("join", *sorted(set(recovery.__all__) - {"join"})):
        yield from _entry(f"recovery.{name}", getattr(recovery, name), "##")
        for member in MEMBERS.get(name, "").split():
            yield from _entry(f"{name}.{member}", getattr(getattr(recovery, name), member), "###")
    shown = io.StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        serve.main(["--help"])
    for heading, text in (
        ("Supervisor", parser(None).format_help()),
        ("Agent of a node", shown.getvalue()),
    ):
        yield from ("", f"## {heading}", "", "```", text.rstrip(), "```")


def _entry(name: str, thing: object, level: str) -> Iterator[str]:
    yield from ("", f"{level} `{name}`", "")
    if callable(thing) and not (inspect.isclass(thing) and name != "recovery.Attributes"):
        yield from ("```", f"{name}{str(inspect.signature(thing)).replace(chr(39), '')}", "```", "")
    yield (inspect.getdoc(thing) or "").replace("``", "`").replace("<", "&lt;")
