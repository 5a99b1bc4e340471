"""What ``chaos explain`` prints: entries, what a log says, and the incidents of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.units import with_unit
from trainchaos.harness.explain.collectives import standing
from trainchaos.recovery.playbook.entry import ABOUT, Entry, Tells

if TYPE_CHECKING:
    from trainchaos.harness.explain.account import Account, Blame, Story, Unexplained
    from trainchaos.harness.explain.signs import Sign
    from trainchaos.recovery.playbook.rank import Match

IN_FULL = 5
"""Of what a log matches; the rest is listed in a line each."""
_OF_INCIDENT = (
    "fault",
    "kind",
    "cell",
    "repeat",
    "occurrence",
    "target",
    "step",
    "injected_s",
    "landed",
    "outcome",
    "detection_time",
    "recovery_time",
    "steps_lost",
    "restored_step",
    "decision",
)
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
    if entry is None:
        return None
    return {
        "id": entry.id,
        "matches": entry.matches,
        "meaning": entry.meaning,
        "cause": entry.cause.value,
        "owner": entry.owner.value,
        "likelihood": entry.likelihood.value,
        "action": entry.action.value,
        "move": entry.move,
        "tells": entry.tells.value,
        "note": entry.note,
        "sources": [*entry.sources],
    }


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
        "incidents": [_account_json(one) for one in story.accounts],
        "unexplained": [_unexplained_json(one) for one in story.unexplained],
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
    if (signal := account.course.signal) is not None:
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
    facts += [("stack", stack.said) for stack in account.stacks]
    facts += [("waits", line) for line in standing(account.records)]
    return [
        *facts,
        *_reading(account),
        *_evidence(account.signs, account.advice),
        *_action(account),
    ]


def moments_of(account: Account) -> list[tuple[str, str, str]]:
    """The timeline of an incident: seconds after the hit, what, and who."""
    return [(_after(account, m.at_s), m.what, m.who or "") for m in account.course.moments]


def _after(account: Account, at_s: float) -> str:
    return f"+{max(0.0, at_s - account.course.moments[0].at_s):.3f} s"


def _reading(account: Account) -> Iterator[tuple[str, str]]:
    """What the log without its fault events says."""
    if (said := account.diagnosis) is not None:
        who = f" of rank {said.rank}" if said.rank is not None else ""
        who = f" of node {said.node}" if said.node is not None else who
        yield "reads as", f"{said.cause.value}{who}, layer {said.layer.value} ({_cut(said.why)})"


def _action(account: Account) -> Iterator[tuple[str, str]]:
    """What to do by the diagnosis, where the playbook knows none of the signs."""
    if account.advice is None and (said := account.diagnosis) is not None:
        yield "to do", f"{said.action.value}: {ABOUT[said.action]}"


def _account(account: Account) -> Iterator[str]:
    yield f"{account.incident.fault}, arm {account.arm}: {account.incident.outcome}"
    facts = facts_of(account)
    yield from (_line(label, text) for label, text in facts)
    if account.blame is not None:
        then = "; ".join(f"{at} {what}" for at, what, _ in moments_of(account)[1:])
        yield _line("then", then)


def _line(label: str, text: str) -> str:
    return f"  {label:<7} {text}"


def _unexplained(found: Unexplained) -> Iterator[str]:
    at = f"at step {found.step}, " if found.step is not None else ""
    yield f"A failure that no fault explains, arm {found.arm}"
    yield f"  first   {at}{_s(found.at_s)} into the arm"
    yield f"  blame   {_who(found.blame)}"
    yield from (_line("stack", stack.said) for stack in found.stacks)
    yield from (_line("waits", line) for line in standing(found.records))
    yield from (_line(*fact) for fact in _evidence(found.signs, found.advice))


def _blamed(account: Account) -> str:
    if account.blame is None:
        return "nobody: no failure was declared"
    who = _who(account.blame)
    if account.right is None:
        hit = "no process was hit" if not account.hit else "nobody was named"
        return f"{who}; {hit}"
    return f"{who}; {'that is who was hit' if account.right else 'that is not who was hit'}"


def _who(blame: Blame) -> str:
    rank = f" (rank {blame.rank})" if blame.rank is not None else ""
    detail = f" ({_cut(blame.detail)})" if blame.detail else ""
    return f"{blame.process or 'no process'}{rank}, cause {blame.cause}{detail}"


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


def _evidence(signs: Sequence[Sign], advice: Entry | None) -> Iterator[tuple[str, str]]:
    groups: dict[str, list[Sign]] = {}
    for sign in signs:
        groups.setdefault(sign.entry.id if sign.entry else sign.what, []).append(sign)
    for alike in [*groups.values()][:IN_FULL]:
        entry, more = alike[0].entry, len(alike) - MOST_ALIKE
        what = "; ".join(sign.what for sign in alike[:MOST_ALIKE])
        what += f"; and {more} more" if more > 0 else ""
        yield "sign", f"{what}: {entry.meaning if entry else 'the playbook has nothing on it'}"
    if len(groups) > IN_FULL:
        yield "sign", f"and {len(groups) - IN_FULL} more kinds; --format json has all"
    if not signs:
        yield "sign", "none: no exit, error or health event in the log"
    if advice is not None:
        yield "to do", f"{advice.action.value}: {ABOUT[advice.action]} (whose: {advice.blame})"
        if advice.move:
            yield "warns", "the device is failing: move the work off it at once"


def _account_json(account: Account) -> dict[str, Any]:
    one = account.incident.model_dump(mode="json")
    return {
        "arm": account.arm,
        **{name: one[name] for name in _OF_INCIDENT},
        "hit": [*account.hit],
        "blamed": _blame_json(account.blame),
        "blamed_who_was_hit": account.right,
        "timeline": [moment.model_dump() for moment in account.course.moments],
        "first_signal": signal.model_dump() if (signal := account.course.signal) else None,
        "stacks": [asdict(stack) for stack in account.stacks],
        "collectives": standing(account.records),
        "flight_records": [asdict(one) for one in account.records],
        "cost_rank_s": _number(account.rank_s),
        "cheaper": asdict(account.cheaper) if account.cheaper else None,
        "diagnosis": said.model_dump(mode="json") if (said := account.diagnosis) else None,
        **_signs_json(account.signs, account.advice),
    }


def _number(value: float | None) -> float | str | None:
    """As in results.json: JSON has no infinity."""
    return "Infinity" if value == math.inf else value


def _unexplained_json(found: Unexplained) -> dict[str, Any]:
    return {
        "arm": found.arm,
        "step": found.step,
        "at_s": found.at_s,
        "blamed": _blame_json(found.blame),
        "stacks": [asdict(stack) for stack in found.stacks],
        "collectives": standing(found.records),
        "flight_records": [asdict(one) for one in found.records],
        **_signs_json(found.signs, found.advice),
    }


def _blame_json(blame: Blame | None) -> dict[str, Any] | None:
    if blame is None:
        return None
    named = {"process": blame.process, "rank": blame.rank}
    return {"cause": blame.cause, **named, "detail": blame.detail}


def _signs_json(signs: Sequence[Sign], advice: Entry | None) -> dict[str, Any]:
    return {
        "signs": [{"what": sign.what, "entry": entry_json(sign.entry)} for sign in signs],
        "action": advice.action.value if advice else None,
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
