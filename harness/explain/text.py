"""What ``chaos explain`` prints: entries, what a log says, and the incidents of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.units import with_unit
from trainchaos.harness.explain.collectives import standing
from trainchaos.recovery.playbook.entry import ABOUT, Entry, Tells

if TYPE_CHECKING:
    from trainchaos.chaos.events.event import Event
    from trainchaos.harness.explain.account import Account, Story, Told, Unexplained
    from trainchaos.harness.explain.signs import Sign
    from trainchaos.recovery.playbook.rank import Match

IN_FULL = 5
"""Of what a log matches; the rest is listed in a line each."""
_OF_ENTRY = (
    "id",
    "matches",
    "meaning",
    "cause",
    "owner",
    "likelihood",
    "action",
    "move",
    "tells",
    "note",
    "sources",
)
_OF_STACK = ("process", "role", "answered", "frames", "file")
SHOWN = 4  # innermost frames of each process
MOST_ALIKE = 2
"""Of signs with one meaning, those that are named."""
LONGEST = 200  # characters of a line of a log


def entry_lines(entry: Entry, asked: str) -> list[str]:
    """An entry in full; ``asked``: what was asked for."""
    lines = [f"{asked}: {entry.meaning}", *_fields(entry)]
    return [*lines, *(f"  source  {source}" for source in entry.sources)]


def match_lines(matches: Sequence[Match], what: str, lines: int) -> list[str]:
    """What a log says, best first."""
    if lines == 1:
        head = [] if len(matches) == 1 else [f"{len(matches)} signs, best first"]
    else:
        head = [f"{what}: {lines} lines, {_count(len(matches), 'sign')}, best first"]
    found = [*head]
    for match in matches[:IN_FULL]:
        again = f", and {_count(match.lines - 1, 'line')} more" if match.lines > 1 else ""
        where = f"line {match.number}{again}  | {_cut(match.line)}"
        found += ["", where] if found else [where]
        found += [f"  {match.entry.id}: {match.entry.meaning}", *_fields(match.entry)]
        found += _chain(match, matches)
    more = matches[IN_FULL:]
    found += [""] if more else []
    found += [f"also {one.entry.id} (line {one.number}): {one.entry.meaning}" for one in more]
    if matches and all(match.entry.tells is Tells.EFFECT for match in matches):
        found += [
            "",
            "All of these are felt when something else failed: what failed first is not here."
            " The cause is not known.",
        ]
    return found


def _chain(match: Match, matches: Sequence[Match]) -> Iterator[str]:
    """Who says it, what explains it, and what it explains."""
    if match.who:
        yield _line("who", match.who)
    for other in matches:
        if other.entry.id == match.because:
            yield _line("because", f"of {other.entry.id} (line {other.number})")
    led = [
        f"{one.entry.id} (line {one.number})" for one in matches if one.because == match.entry.id
    ]
    if led:
        yield _line("then", f"because of it: {', '.join(led)}")


def story_lines(story: Story) -> list[str]:
    """A paragraph for each incident of a run, then the failures that no fault explains."""
    blocks = [_account(one) for one in story.accounts]
    blocks += [_unexplained(one) for one in story.unexplained]
    title = f"{story.results.scenario}: {story.results.title}"
    counts = [_count(len(story.accounts), "incident")]
    if story.unexplained:
        counts.append(f"{_count(len(story.unexplained), 'failure')} that no fault explains")
    if story.idle:
        counts.append(f"{_count(story.idle, 'planned fault')} that never fired")
    lines = [f"{title}, {', '.join(counts)}"]
    for block in blocks:
        lines += ["", *block]
    return lines


def entry_json(entry: Entry | None) -> dict[str, Any] | None:
    """An entry for programs."""
    return {name: getattr(entry, name) for name in _OF_ENTRY} if entry else None


def match_json(match: Match) -> dict[str, Any]:
    """A match for programs."""
    where = {"line": match.number, "text": match.line, "lines": match.lines}
    chain = {"who": match.who or None, "because": match.because or None}
    return {**where, **chain, "entry": entry_json(match.entry)}


def story_json(story: Story) -> dict[str, Any]:
    """A run's incidents for programs; those that never fired are counted only."""
    return {
        "scenario": story.results.scenario,
        "run_id": story.results.run_id,
        "verdict": story.results.verdict,
        "simulated": story.results.simulated,
        "never_fired": story.idle,
        "incidents": [{"arm": one.arm, **_account_json(one)} for one in story.accounts],
        "unexplained": [
            {"arm": one.arm, "step": one.failure.step, "at_s": one.at_s, **_told_json(one)}
            for one in story.unexplained
        ],
    }


def _fields(entry: Entry) -> Iterator[str]:
    yield f"  cause   {entry.cause.value}"
    yield f"  whose   {entry.blame}"
    yield f"  to do   {entry.action.value}: {ABOUT[entry.action]}"
    if entry.move:
        yield "  warns   the device is failing: move the work off it at once"
    if entry.note:
        yield f"  note    {entry.note}"


def facts_of(account: Account) -> list[tuple[str, str]]:
    """An incident's post-mortem as pairs of a label and what is to be said; labels may repeat."""
    one = account.incident
    hit = ", ".join(account.hit) or _target(one.target)
    rank = one.target.get("rank")
    named = f" (rank {rank})" if rank is not None and len(account.hit) == 1 else ""
    at = f"at step {one.step}, " if one.step is not None else ""
    landed = "" if one.landed else "; it was not seen to land"
    facts = [
        ("first", f"{at}{_s(one.injected_s)} into the arm, {one.kind} hit {hit}{named}{landed}")
    ]
    if (signal := account.signal) is not None:
        facts.append(("shown", f"{_after(account, signal.at_s)} by {signal.who}: {signal.what}"))
    facts += [("blame", _blamed(account)), ("cost", _cost(account))]
    if (other := account.cheaper) is not None:
        facts.append(
            (
                "cheaper",
                f"{other.label}: {_rank_s(other.rank_s)}, median of {other.n}; each of them cost"
                " less than this one. Idle time of spares is not counted",
            )
        )
    facts += _stood(account)
    if (said := account.diagnosis) is not None:
        who = f" of rank {said.rank}" if said.rank is not None else ""
        who = f" of node {said.node}" if said.node is not None else who
        reads = f"{said.cause.value}{who}, layer {said.layer.value} ({_cut(said.why)})"
        facts.append(("reads as", reads))
    facts += _evidence(account)
    if account.advice is None and said is not None:
        facts.append(("to do", f"{said.action.value}: {ABOUT[said.action]}"))
    return facts


def moments_of(account: Account) -> list[tuple[str, str, str]]:
    """The timeline of an incident: seconds after the hit, what, and who."""
    return [(_after(account, m.at_s), m.what, m.who or "") for m in account.moments]


def _after(account: Account, at_s: float) -> str:
    return f"+{max(0.0, at_s - account.moments[0].at_s):.3f} s"


def _stood(told: Told) -> Iterator[tuple[str, str]]:
    """Where ranks that hung stood."""
    yield from (("stack", _stack(event)) for event in told.stacks)
    yield from (("waits", line) for line in standing(told.records))


def _stack(dumped: Event) -> str:
    """Where the training thread of one process stood, the innermost frames first."""
    data = dumped.data
    who = f"{data['process']} ({data['role']})"
    if not data["answered"]:
        return f"{who} did not answer: it was stopped, or waited in the kernel"
    frames = data["frames"] if isinstance(data["frames"], list | tuple) else ()
    shown = " < ".join(_short(str(frame)) for frame in frames[:SHOWN])
    return f"{who} in {shown or 'no Python code'}" + (f"; {data['file']}" if data["file"] else "")


def _short(frame: str) -> str:
    """A frame with its file's last folder only: ``rank/step.py:178 in backward``."""
    path, _, rest = frame.rpartition(":")
    return f"{'/'.join(PurePath(path).parts[-2:])}:{rest}" if path else frame


def _account(account: Account) -> Iterator[str]:
    yield f"{account.incident.fault}, arm {account.arm}: {account.incident.outcome}"
    yield from (_line(label, text) for label, text in facts_of(account))
    if account.failure is not None:
        then = "; ".join(f"{at} {what}" for at, what, _ in moments_of(account)[1:])
        yield _line("then", then)


def _line(label: str, text: str) -> str:
    return f"  {label:<7} {text}"


def _unexplained(found: Unexplained) -> Iterator[str]:
    step = found.failure.step
    at = f"at step {step}, " if step is not None else ""
    yield f"A failure that no fault explains, arm {found.arm}"
    yield _line("first", f"{at}{_s(found.at_s)} into the arm")
    yield _line("blame", _who(found.failure))
    yield from (_line(*fact) for fact in (*_stood(found), *_evidence(found)))


def _blamed(account: Account) -> str:
    if account.failure is None:
        return "nobody: no failure was declared"
    who = _who(account.failure)
    if account.right is None:
        hit = "no process was hit" if not account.hit else "nobody was named"
        return f"{who}; {hit}"
    return f"{who}; {'that is who was hit' if account.right else 'that is not who was hit'}"


def _who(failure: Event) -> str:
    data = failure.data
    rank = f" (rank {data['rank']})" if data["rank"] is not None else ""
    detail = f" ({_cut(str(data['detail']))})" if data["detail"] else ""
    return f"{data['process'] or 'no process'}{rank}, cause {data['cause']}{detail}"


def _cost(account: Account) -> str:
    one = account.incident
    parts = []
    if one.detection_time is not None:
        never = math.isinf(one.detection_time)
        parts.append("never detected" if never else f"detected after {_s(one.detection_time)}")
    if one.recovery_time is not None:
        never = math.isinf(one.recovery_time)
        parts.append("never recovered" if never else f"recovered after {_s(one.recovery_time)}")
    if account.rank_s and math.isfinite(account.rank_s):
        parts.append(_rank_s(account.rank_s))
    lost = _count(one.steps_lost, "step") + " lost"
    if one.never_recovered:
        lost = "all steps lost"
    elif one.answered_with:
        lost = f"its lost steps are counted with {one.answered_with}"
    elif one.steps_lost and one.restored_step is not None:
        lost += f" (back to step {one.restored_step})"
    return ", ".join([*parts, lost])


def _evidence(told: Told) -> Iterator[tuple[str, str]]:
    groups: dict[str, list[Sign]] = {}
    for sign in told.signs:
        groups.setdefault(sign.entry.id if sign.entry else sign.what, []).append(sign)
    for alike in [*groups.values()][:IN_FULL]:
        entry, more = alike[0].entry, len(alike) - MOST_ALIKE
        what = "; ".join(sign.what for sign in alike[:MOST_ALIKE])
        what += f"; and {more} more" if more > 0 else ""
        yield "sign", f"{what}: {entry.meaning if entry else 'the playbook has nothing on it'}"
    if len(groups) > IN_FULL:
        yield "sign", f"and {len(groups) - IN_FULL} more kinds; --format json has all"
    if not told.signs:
        yield "sign", "none: no exit, error or health event in the log"
    if (advice := told.advice) is not None:
        yield "to do", f"{advice.action.value}: {ABOUT[advice.action]} (whose: {advice.blame})"
        if advice.move:
            yield "warns", "the device is failing: move the work off it at once"


def _account_json(account: Account) -> dict[str, Any]:
    return {
        **account.incident.model_dump(mode="json"),
        "hit": account.hit,
        "blamed_who_was_hit": account.right,
        "timeline": [asdict(moment) for moment in account.moments],
        "first_signal": asdict(account.signal) if account.signal else None,
        # As in results.json: JSON has no infinity.
        "cost_rank_s": "Infinity" if account.rank_s == math.inf else account.rank_s,
        "cheaper": asdict(account.cheaper) if account.cheaper else None,
        "diagnosis": said.model_dump(mode="json") if (said := account.diagnosis) else None,
        **_told_json(account),
    }


def _told_json(told: Told) -> dict[str, Any]:
    """What an incident and an unexplained failure have in common."""
    data = told.failure.data if told.failure else {}
    names = ("cause", "process", "rank", "detail")
    return {
        "blamed": {name: data[name] for name in names} if data else None,
        "stacks": [{name: event.data[name] for name in _OF_STACK} for event in told.stacks],
        "collectives": standing(told.records),
        "flight_records": [asdict(one) for one in told.records],
        "signs": [{"what": sign.what, "entry": entry_json(sign.entry)} for sign in told.signs],
        "action": told.advice.action if told.advice else None,
    }


def _target(target: dict[str, Any]) -> str:
    named = [f"{key} {value}" for key, value in target.items() if key != "processes"]
    return ", ".join(named) or "the job"


def _s(seconds: float) -> str:
    return with_unit(seconds, "s", "lower")


def _rank_s(value: float) -> str:
    return with_unit(value, "rank-s", "lower")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _cut(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
