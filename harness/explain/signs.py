"""Signs of failure in an arm's log, and what the playbook says of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.recovery.playbook.book import playbook, signal_name
from trainchaos.recovery.playbook.entry import Entry, Tells

KINDS = (
    Kind.HEALTH_REPORTED,
    Kind.HEALTH_ALARM,
    Kind.PROCESS_EXITED,
    Kind.COMMAND_ENDED,
    Kind.ERROR_RAISED,
    Kind.NONFINITE_CAUGHT,
    Kind.CHECKPOINT_FAILED,
    Kind.CHECKPOINT_REFUSED,
    Kind.FAILURE_DETECTED,
)
LONGEST = 160  # characters of an error's words
_ORDER = list(Tells)


@dataclass(frozen=True, kw_only=True)
class Sign:
    """One piece of evidence in words. ``entry``: None where the playbook knows nothing of it;
    ``process``: who shows it; None: no single process.
    """

    what: str
    entry: Entry | None
    process: str | None = None


def signs_between(
    log: Log, start_ns: float, end_ns: float, about: Collection[str | None] = ()
) -> tuple[Sign, ...]:
    """Those of a time, each once. First those of the processes ``about`` and of none, then those of
    others; each best first as in ``Playbook.match_text``, unknown ones last.
    """
    events = (event for event in log.of(*KINDS) if start_ns <= event.time_ns <= end_ns)
    found = {sign.what: sign for event in events for sign in _signs_of(event)}

    def rank(sign: Sign) -> tuple[bool, int, bool]:
        others = bool(about) and sign.process is not None and sign.process not in about
        if sign.entry is None:
            return others, len(_ORDER), True
        return others, _ORDER.index(sign.entry.tells), not sign.entry.move

    return tuple(sorted(found.values(), key=rank))


def _signs_of(event: Event) -> Iterator[Sign]:
    data, book = event.data, playbook()
    match event.kind:
        case Kind.HEALTH_REPORTED:
            what, code = data["what"], data["code"]
            entry = book.by_xid(code) if what == "xid" and type(code) is int else None
            named = f"{'XID' if what == 'xid' else what} {code} of {_place(event)}"
            yield Sign(what=f"the health source reported {named}", entry=entry)
        case Kind.HEALTH_ALARM:
            yield Sign(what=_alarm(event), entry=None)
        case Kind.PROCESS_EXITED if not data["expected"]:
            who = str(data["process"])
            yield from _end(who, who, data["exit_code"], data["signal"])
        case Kind.COMMAND_ENDED if not data["asked"]:
            yield from _end("the command", None, data["exit_code"], data["signal"])
        case Kind.ERROR_RAISED:
            yield _said(event.actor, "raised", f"{data['type']}: {data['message']}")
        case Kind.NONFINITE_CAUGHT:
            what = f"{event.actor} caught non-finite values: {data['what']}"
            yield Sign(what=what, entry=book.by_id("nonfinite"))
        case Kind.CHECKPOINT_FAILED:
            yield _said(event.actor, "could not save:", str(data["error"]))
        case Kind.CHECKPOINT_REFUSED:
            yield _said(event.actor, "refused a checkpoint:", str(data["reason"]))
        case Kind.FAILURE_DETECTED if data["cause"] == "error":
            said = _said(data["process"], "was declared failed:", str(data["detail"]))
            if said.entry:  # else it says no more than the failure itself
                yield said
        case _:
            return


def _end(who: str, process: str | None, code: object, signal: object) -> Iterator[Sign]:
    if type(signal) is int:
        name = signal_name(signal) or f"signal {signal}"
        entry = playbook().by_signal(signal)
        yield Sign(what=f"{who} was ended by {name}", entry=entry, process=process)
    elif type(code) is int and code != 0:
        entry = playbook().by_exit_code(code)
        yield Sign(what=f"{who} ended with exit code {code}", entry=entry, process=process)


def _said(process: str | None, did: str, text: str) -> Sign:
    found = playbook().match_text(text.splitlines())
    lines = (line.strip() for line in text.splitlines() if line.strip())
    words = next(lines, "nothing")
    words = words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."
    what = f"{process or 'no process'} {did} {words}"
    return Sign(what=what, entry=found[0].entry if found else None, process=process)


def _place(event: Event) -> str:
    """The place of a health event, the smallest that it names."""
    keys = ("rank",) if event.data["rank"] is not None else ("device", "node")
    named = [f"{key} {event.data[key]}" for key in keys if event.data[key] is not None]
    return ", ".join(named) or "the job"


def _alarm(event: Event) -> str:
    value, threshold = event.data["value"], event.data["threshold"]
    numbers = all(isinstance(one, int | float) for one in (value, threshold))
    said = f"{value:.3g} over {threshold:.3g}" if numbers else "no numbers"
    return f"a health detector raised {event.data['what']} of {_place(event)} ({said})"
