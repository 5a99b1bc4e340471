"""``chaos taint``: the list of nodes and devices that no launcher uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import FLAG, FORMAT, RUN, TAINTS, option
from trainchaos.chaos.commands.shared.say import say, say_json, say_table, tell

if TYPE_CHECKING:
    from trainchaos.harness.explain.incident_places import HistoryOfPlaces
    from trainchaos.recovery.health.lemons import Lemon
    from trainchaos.recovery.health.taints import Taint, TaintList

_LASTS = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


_FALSE_ALARM = option(
    "--false-alarm",
    click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
    "Probability that history names a place although all are alike.",
    0.01,
)


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
@click.argument("runs", nargs=-1, type=RUN)
@option(
    "--history",
    FLAG,
    "Show instead which places the logs of RUNS blame more often than chance allows.",
)
@_FALSE_ALARM
@TAINTS
@FORMAT
def list_taints(
    runs: tuple[Path, ...], history: bool, false_alarm: float, taints: Path | None, form: str
) -> None:
    """Show tainted places, with the evidence and until when; expired ones stay until cleared.

    With --history, propose places by stored RUNS, which are run directories or --events directories
    of recovery.run; nothing is tainted. Faults that a run injected itself do not count.
    """
    if history != bool(runs):
        raise click.UsageError("--history needs RUNS, and RUNS need --history")
    if history:
        _propose(runs, false_alarm, form)
        return
    known = _list(taints)
    now = _now()
    found = known.read()
    if form == "json":
        rows = [{**each.as_data(), "expired": each.expired(now)} for each in found]
        say_json({"file": str(known.path), "taints": rows})
    elif not found:
        say(f"no place is tainted ({known.path})")
    else:
        heads = ("place", "until", "by", "since", "reason", "evidence")
        say_table([heads, *(_row(each, now) for each in found)])


@taint.command("add")
@click.argument("places", nargs=-1, required=True, metavar="PLACE | RUN...")
@option("--from-history", FLAG, "Taint what 'chaos taint list --history' proposes for these RUNS.")
@_FALSE_ALARM
@option("--reason", None, "Why, in a few words; needed for a PLACE.")
@option(
    "--evidence facts",
    None,
    "What shows it: a text, or facts such as xid=79; repeatable.",
    multiple=True,
    metavar="TEXT|NAME=VALUE",
)
@option(
    "--expires",
    None,
    "When it ends by itself: 2026-12-01T08:00:00Z, or 12h, 7d from now. Default: never.",
    metavar="TIME|AGE",
)
@option(
    "--by",
    click.Choice(["person", "preflight", "alarm", "history"]),
    "Who taints it. Default: person, and history with --from-history.",
)
@TAINTS
@FORMAT
def add(
    places: tuple[str, ...],
    from_history: bool,
    false_alarm: float,
    reason: str | None,
    facts: tuple[str, ...],
    expires: str | None,
    by: str | None,
    taints: Path | None,
    form: str,
) -> None:
    """Taint PLACE: a node (host-a, or the number of an emulated one) or a device (host-a/cuda:3).

    Nothing changes if the list has it already with the same reason, evidence and expiry.
    """
    from trainchaos.recovery.health.taints import made, of_place

    now = _now()
    expiry = None if expires is None else _expiry(expires, now)
    if from_history:
        if reason is not None or facts or by not in (None, "history"):
            raise click.UsageError("--from-history says reason, evidence and by itself")
        found = _lemons([Path(each) for each in places], false_alarm)[1]
        _added(_list(taints), [_of_lemon(one, now, expiry) for one in found], now, form)
        return
    if reason is None or len(places) != 1:
        raise click.UsageError("name one PLACE, and say the --reason")
    (place,) = places
    new = made(
        {
            **of_place(place),
            "reason": reason,
            "since": now,
            "evidence": _evidence(facts),
            "expiry": expiry,
            "by": by or "person",
        }
    )
    _added(_list(taints), [new], now, form)


@taint.command("clear")
@click.argument("places", nargs=-1, required=True, shell_complete=complete_place)
@TAINTS
@FORMAT
def clear(places: tuple[str, ...], taints: Path | None, form: str) -> None:
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
    rows = [each.as_data() for each in gone]
    lines = [f"cleared {each.place}: {each.reason}" for each in gone]
    tell(form, {"file": str(known.path), "cleared": rows}, lines)


def _added(known: TaintList, new: Sequence[Taint], now: datetime, form: str) -> None:
    """Add taints, and say which."""
    done = [(each, known.add(each, now)) for each in new]
    rows = [{**each.as_data(), "added": added} for each, added in done]
    lines = [
        f"tainted {each.place} {_until(each, now)}: {each.reason} ({known.path})"
        if added
        else f"{each.place} is tainted already: {each.reason} ({known.path})"
        for each, added in done
    ]
    none = "no place has more incidents than chance allows: nothing is tainted"
    tell(form, {"file": str(known.path), "taints": rows}, lines or [none])


def _lemons(runs: Sequence[Path], false_alarm: float) -> tuple[HistoryOfPlaces, tuple[Lemon, ...]]:
    from trainchaos.harness.explain.incident_places import lemons_of, read_places

    history = read_places(runs)
    return history, lemons_of(history, false_alarm=false_alarm)


def _propose(runs: Sequence[Path], false_alarm: float, form: str) -> None:
    history, found = _lemons(runs, false_alarm)
    if form == "json":
        known = {
            kind: {place: asdict(one) for place, one in records.items()}
            for kind, records in (("nodes", history.nodes), ("devices", history.devices))
        }
        counted = {"arms": history.arms, "false_alarm": false_alarm, **known}
        say_json({**counted, "lemons": [asdict(one) for one in found]})
        return
    places = len(history.nodes) + len(history.devices)
    say(
        f"{history.arms} arms, {places} places; if all are alike, the probability that one is named"
        f" is at most {false_alarm:g}"
    )
    if not found:
        say("no place has more incidents than chance allows")
        return
    rows = [("place", "incidents", "expected", "hours in use", "tail", "limit")]
    for one in found:
        figures = (one.expected, one.used_s / 3600, one.tail, one.limit)
        expected, hours, tail, limit = (f"{figure:.2g}" for figure in figures)
        rows.append((one.place, str(one.incidents), expected, hours, tail, limit))
    say_table(rows)


def _of_lemon(one: Lemon, now: datetime, expiry: Any) -> Taint:
    from trainchaos.recovery.health.taints import made, of_place

    return made(
        {
            **of_place(one.place),
            "reason": f"{one.incidents} incidents, where places like it have {one.expected:.2g}",
            "since": now,
            "expiry": expiry,
            "by": "history",
            "evidence": {
                "incidents": one.incidents,
                "expected": round(one.expected, 3),
                "used_h": round(one.used_s / 3600, 3),
                "tail": float(f"{one.tail:.2g}"),
                "limit": float(f"{one.limit:.2g}"),
            },
        }
    )


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
    from trainchaos.recovery.health.taints import written

    if each.expiry is None:
        return "until cleared"
    return f"{'expired' if each.expired(now) else 'until'} {written(each.expiry)}"


def _row(each: Taint, now: datetime) -> tuple[str, ...]:
    from trainchaos.recovery.health.taints import written

    evidence = each.evidence
    if not isinstance(evidence, str):
        evidence = ", ".join(f"{name}={value}" for name, value in evidence.items())
    return (each.place, _until(each, now), each.by, written(each.since), each.reason, evidence)


COMMANDS = [taint]
