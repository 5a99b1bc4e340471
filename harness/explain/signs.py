"""Signs of failure in an arm's log, and what the playbook says of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
_NONFINITE = "nonfinite"  # id of the entry
_ORDER = {tells: number for number, tells in enumerate(Tells)}


@dataclass(frozen=True, kw_only=True)
class Sign:
    """One piece of evidence in words. ``entry``: None where the playbook knows nothing of it;
    ``process``: who shows it; None: no single process.
    """

    what: str
    entry: Entry | None
    process: str | None = None


class Signs:
    """The signs of one arm, found by time."""

    def __init__(self, log: Log) -> None:
        self._events = list(log.of(*KINDS))
        self._times = [event.time_ns for event in self._events]
        self._playbook = playbook()

    def between(
        self, start_ns: float, end_ns: float, about: Collection[str | None] = ()
    ) -> tuple[Sign, ...]:
        """Those of a time, each once. First those of the processes ``about`` and of none, then
        those of others; each best first as in ``Playbook.match_text``, unknown ones last.
        """
        low, high = bisect_left(self._times, start_ns), bisect_right(self._times, end_ns)
        found = {
            sign.what: sign for event in self._events[low:high] for sign in self._signs_of(event)
        }

        def rank(sign: Sign) -> tuple[bool, int, bool]:
            others = bool(about) and sign.process is not None and sign.process not in about
            return others, *_rank(sign)

        return tuple(sorted(found.values(), key=rank))

    def _signs_of(self, event: Event) -> Iterator[Sign]:
        data = event.data
        match event.kind:
            case Kind.HEALTH_REPORTED:
                yield self._health(event)
            case Kind.HEALTH_ALARM:
                yield Sign(what=_alarm(event), entry=None)
            case Kind.PROCESS_EXITED if not data["expected"]:
                who = str(data["process"])
                yield from self._end(who, who, data["exit_code"], data["signal"])
            case Kind.COMMAND_ENDED if not data["asked"]:
                yield from self._end("the command", None, data["exit_code"], data["signal"])
            case Kind.ERROR_RAISED:
                yield self._said(event.actor, "raised", f"{data['type']}: {data['message']}")
            case Kind.NONFINITE_CAUGHT:
                entry = self._playbook.by_id(_NONFINITE)
                yield Sign(
                    what=f"{event.actor} caught non-finite values: {data['what']}", entry=entry
                )
            case Kind.CHECKPOINT_FAILED:
                yield self._said(event.actor, "could not save:", str(data["error"]))
            case Kind.CHECKPOINT_REFUSED:
                yield self._said(event.actor, "refused a checkpoint:", str(data["reason"]))
            case Kind.FAILURE_DETECTED if data["cause"] == "error":
                said = self._said(data["process"], "was declared failed:", str(data["detail"]))
                if said.entry:  # else it says no more than the failure itself
                    yield said
            case _:
                return

    def _health(self, event: Event) -> Sign:
        what, code = event.data["what"], event.data["code"]
        named = "XID" if what == "xid" else str(what)
        where = _place(event)
        entry = self._playbook.by_xid(code) if what == "xid" and type(code) is int else None
        return Sign(what=f"the health source reported {named} {code} of {where}", entry=entry)

    def _end(self, who: str, process: str | None, code: object, signal: object) -> Iterator[Sign]:
        if type(signal) is int:
            name = signal_name(signal) or f"signal {signal}"
            entry = self._playbook.by_signal(signal)
            yield Sign(what=f"{who} was ended by {name}", entry=entry, process=process)
        elif type(code) is int and code != 0:
            entry = self._playbook.by_exit_code(code)
            yield Sign(what=f"{who} ended with exit code {code}", entry=entry, process=process)

    def _said(self, process: str | None, did: str, text: str) -> Sign:
        found = self._playbook.match_text(text.splitlines())
        what = f"{process or 'no process'} {did} {_first(text)}"
        return Sign(what=what, entry=found[0].entry if found else None, process=process)


def _rank(sign: Sign) -> tuple[int, bool]:
    if sign.entry is None:
        return len(_ORDER), True
    return _ORDER[sign.entry.tells], not sign.entry.move


def _place(event: Event) -> str:
    """The place of a health event, the smallest that it names."""
    keys = ("rank",) if event.data["rank"] is not None else ("device", "node")
    named = [f"{key} {event.data[key]}" for key in keys if event.data[key] is not None]
    return ", ".join(named) or "the job"


def _alarm(event: Event) -> str:
    value, threshold = event.data["value"], event.data["threshold"]
    said = f"{value:.3g} over {threshold:.3g}" if _numbers(value, threshold) else "no numbers"
    return f"a health detector raised {event.data['what']} of {_place(event)} ({said})"


def _numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _first(text: str, longest: int = 160) -> str:
    """The first line that says something, not too long."""
    line = next((one.strip() for one in text.splitlines() if one.strip()), "nothing")
    return line if len(line) <= longest else line[: longest - 3] + "..."
