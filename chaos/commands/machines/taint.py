"""``chaos taint``: the list of nodes and devices that no launcher uses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from trainchaos.chaos import columns, errors
from trainchaos.chaos.commands.shared.options import FORMAT, TAINTS
from trainchaos.chaos.commands.shared.say import say

if TYPE_CHECKING:
    from trainchaos.recovery.health.taints import Taint, TaintList

_LASTS = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def complete_place(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The places in the list; none if it cannot be read."""
    from trainchaos.recovery.health.taints import TaintList, taints_path

    try:
        known = TaintList(taints_path(ctx.params.get("taints"))).read()
    except errors.ChaosError:
        return []
    places = dict.fromkeys(taint.place for taint in known)
    return [CompletionItem(place) for place in places if place.startswith(incomplete)]


@click.group()
def taint() -> None:
    """Nodes and devices that no run uses: list, add, clear. See docs/health.md, Quarantine."""


@taint.command("list")
@TAINTS
@FORMAT
def list_taints(taints: Path | None, form: str) -> int:
    """Show tainted places, with the evidence and until when; expired ones stay until cleared."""
    known = _list(taints)
    now = _now()
    found = known.read()
    if form == "json":
        rows = [{**each.as_data(), "expired": each.expired(now)} for each in found]
        say(json.dumps({"file": str(known.path), "taints": rows}, indent=2))
        return errors.EXIT_PASS
    if not found:
        say(f"no place is tainted ({known.path})")
        return errors.EXIT_PASS
    heads = ("place", "until", "by", "since", "reason", "evidence")
    cells = [heads, *(_row(each, now) for each in found)]
    say("\n".join(columns.table(cells, width=columns.width_of(sys.stdout))))
    return errors.EXIT_PASS


@taint.command("add")
@click.argument("place")
@click.option("--reason", required=True, help="Why, in a few words.")
@click.option(
    "--evidence",
    "facts",
    multiple=True,
    metavar="TEXT|NAME=VALUE",
    help="What shows it: a text, or facts such as xid=79; repeatable.",
)
@click.option(
    "--expires",
    metavar="TIME|AGE",
    help="When it ends by itself: 2026-12-01T08:00:00Z, or 12h, 7d from now. Default: never.",
)
@click.option(
    "--by",
    type=click.Choice(["person", "preflight", "alarm", "history"]),
    default="person",
    show_default=True,
    help="Who taints it.",
)
@TAINTS
@FORMAT
def add(
    place: str,
    reason: str,
    facts: tuple[str, ...],
    expires: str | None,
    by: str,
    taints: Path | None,
    form: str,
) -> int:
    """Taint PLACE: a node (host-a, or the number of an emulated one) or a device (host-a/cuda:3).

    Nothing changes if the list has it already with the same reason, evidence and expiry.
    """
    from trainchaos.recovery.health.taint import made, of_place

    now = _now()
    new = made(
        {
            **of_place(place),
            "reason": reason,
            "since": now,
            "evidence": _evidence(facts),
            "expiry": None if expires is None else _expiry(expires, now),
            "by": by,
        }
    )
    return _added(_list(taints), [new], now, form)


@taint.command("clear")
@click.argument("places", nargs=-1, required=True, shell_complete=complete_place)
@TAINTS
@FORMAT
def clear(places: tuple[str, ...], taints: Path | None, form: str) -> int:
    """Remove the taints of PLACES, expired ones too. Exit code 2: a place has none; nothing is
    removed then.
    """
    known = _list(taints)
    there = {each.place for each in known.read()}
    unknown = [place for place in places if place not in there]
    if unknown:
        from trainchaos.recovery.health.taints import TaintError

        raise TaintError(
            f"{', '.join(unknown)}: not tainted in {known.path}",
            hint=f"tainted: {', '.join(sorted(there)) or 'nothing'}",
        )
    gone = [each for place in dict.fromkeys(places) for each in known.clear(place)]
    if form == "json":
        rows = [each.as_data() for each in gone]
        say(json.dumps({"file": str(known.path), "cleared": rows}, indent=2))
        return errors.EXIT_PASS
    for each in gone:
        say(f"cleared {each.place}: {each.reason}")
    return errors.EXIT_PASS


def _added(known: TaintList, new: Sequence[Taint], now: datetime, form: str) -> int:
    """Add taints, and say which."""
    done = [(each, known.add(each, now)) for each in new]
    if form == "json":
        rows = [{**each.as_data(), "added": added} for each, added in done]
        say(json.dumps({"file": str(known.path), "taints": rows}, indent=2))
        return errors.EXIT_PASS
    for each, added in done:
        say(
            f"tainted {each.place} {_until(each, now)}: {each.reason} ({known.path})"
            if added
            else f"{each.place} is tainted already: {each.reason} ({known.path})"
        )
    return errors.EXIT_PASS


def _list(path: Path | None) -> TaintList:
    from trainchaos.recovery.health.taints import TaintList, taints_path

    return TaintList(taints_path(path))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _expiry(text: str, now: datetime) -> Any:
    """A time, or an age from now on; what is neither is left to the model to refuse."""
    lasts = _LASTS.fullmatch(text)
    return now + timedelta(seconds=int(lasts[1]) * _SECONDS[lasts[2]]) if lasts else text


def _evidence(words: Sequence[str]) -> str | dict[str, Any]:
    """One text, or facts by name. Whole numbers become numbers. Raises UsageError."""
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    facts: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals) or name in facts:
            raise click.UsageError(f"--evidence {word!r}: give one text, or NAME=VALUE, each once")
        facts[name] = int(value) if re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", value) else value
    return facts or ""


def _until(each: Taint, now: datetime) -> str:
    from trainchaos.recovery.health.taint import written

    if each.expiry is None:
        return "until cleared"
    return f"{'expired' if each.expired(now) else 'until'} {written(each.expiry)}"


def _row(each: Taint, now: datetime) -> tuple[str, ...]:
    from trainchaos.recovery.health.taint import written

    evidence = each.evidence
    if not isinstance(evidence, str):
        evidence = ", ".join(f"{name}={value}" for name, value in evidence.items())
    return (each.place, _until(each, now), each.by, written(each.since), each.reason, evidence)


COMMANDS = [taint]
