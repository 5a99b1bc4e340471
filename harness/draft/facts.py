"""Decides what a scenario says of a command, from its words and from what was seen of it.

Each decision says where it is from, or that it could not be made and what to do.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.harness.draft import arguments
from trainchaos.harness.draft.frameworks import Framework, ScriptText
from trainchaos.harness.draft.launchers import Launched
from trainchaos.harness.draft.progress import MOST_LINES, Proposal
from trainchaos.harness.draft.watch import Sighting
from trainchaos.harness.draft.written import checkpoints

SCRATCH = "$CHAOS_SCRATCH"
RESTARTS = 2
LEAST_HOLD_S = 15.0
LEAST_DEADLINE_S = 60.0
LEAST_START_S = 120.0
SHOWN = 3
READABLE = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 450, 600, 900, 1200, 1800)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that was found, or could not be. ``text``: what, and by what; ``value``: in the
    scenario; ``key``: of the line that says it; ``change``: what to change if it is wrong, or
    because it was not found; ``needed``: a run cannot do without it.
    """

    name: str
    text: str
    value: str = ""
    key: str = ""
    change: str = ""
    found: bool = True
    needed: bool = False


@dataclass(kw_only=True)
class Command:
    """The command as the scenario starts it. ``words``, ``env``: with checkpoints sent to
    $CHAOS_SCRATCH where that is possible; ``sent``: how they are sent there, for people.
    """

    words: list[str]
    env: dict[str, str]
    launched: Launched
    frameworks: list[Framework]
    script: ScriptText
    sent: str = ""

    @property
    def group(self) -> str:
        """Variable that may name replica groups."""
        return next((one.group for one in self.frameworks if one.group), "")


@dataclass(kw_only=True)
class Facts:
    """All that the scenario says, and the findings in the order in which they are shown."""

    command: Command
    proposal: Proposal
    ranks: int = 1
    steps: int = 1
    restarts: int = 0
    group: str = ""
    at: int = 1
    hold_s: float = LEAST_HOLD_S
    deadline_s: float = LEAST_DEADLINE_S
    start_s: float = LEAST_START_S
    findings: list[Finding] = field(default_factory=list)

    @property
    def arm_s(self) -> float | None:
        """How long an arm without a fault takes; None if that is not known."""
        step_s = self.proposal.step_s
        if step_s is None or any(one.key == "steps" and not one.found for one in self.findings):
            return None
        return (self.proposal.first_s or 0.0) + step_s * self.steps


def command_of(
    words: Sequence[str],
    env: Mapping[str, str],
    launched: Launched,
    frameworks: Sequence[Framework],
    script: ScriptText,
    steps: int | None,
) -> Command:
    """The command to start: ``steps`` in the argument that says them, checkpoints sent to
    $CHAOS_SCRATCH where an option or a variable of the script names their place.
    """
    new, needed = list(words), dict(launched.kind.env if launched.kind else {})
    if steps is not None and (given := arguments.find(new, arguments.STEPS, r"\d+")):
        new = arguments.replaced(new, given, str(steps))
    sent = ""
    place = arguments.find(new, arguments.CHECKPOINTS, r"(?!\d+$|true$|false$)[^-].*")
    if place is not None and not place.value.startswith(SCRATCH):
        kept = Path(place.value).name
        new = arguments.replaced(new, place, f"{SCRATCH}/{kept}" if kept else SCRATCH)
        sent = f"by {place.name}, which was {place.value}"
    elif place is not None:
        sent = f"by {place.name}"
    else:
        for name in script.place_variables:
            needed.setdefault(name, SCRATCH)
            sent = f"by the variable {name}, which the script reads"
    return Command(
        words=new,
        env=needed | dict(env),
        launched=launched,
        frameworks=list(frameworks),
        script=script,
        sent=sent,
    )


def decide(
    command: Command, seen: Sighting, proposal: Proposal, directory: Path, steps: int | None
) -> Facts:
    """All facts. ``steps``: those that were asked for, if any."""
    facts = Facts(command=command, proposal=proposal)
    facts.findings.append(_launcher(command))
    _ranks(facts, seen)
    _progress(facts, seen)
    _steps(facts, seen, steps)
    _checkpoints(facts, seen, directory)
    _restarts(facts)
    _times(facts)
    return facts


def _launcher(command: Command) -> Finding:
    names = ", ".join(one.name for one in command.frameworks)
    kind = command.launched.kind
    return Finding(
        name="launcher",
        text=command.launched.name + (f"; the script uses {names}" if names else ""),
        key="command",
        change=f"{' and '.join(kind.env)} is set: {kind.note}" if kind and kind.env else "",
    )


def _ranks(facts: Facts, seen: Sighting) -> None:
    launched = facts.command.launched
    hidden = any(one.hidden for one in facts.command.frameworks)
    seen_ranks, said = len(seen.ranks), launched.ranks
    if seen.grouped:
        facts.group = facts.command.group
    if seen_ranks:
        facts.ranks = max(seen_ranks, said or 0)
        how = "by their beacons" if seen.hinted else "by the rank in their environments"
        how += f", in groups named by {facts.group}" if facts.group else ""
        text = f"found {how}"
        short = said is not None and said > seen_ranks
        change = ""
        if short and launched.nodes > 1:
            change = "those of other nodes are not seen here: a run needs all ranks on this machine"
        elif short:
            text = f"{seen_ranks} {text}, and the command line says {said}"
            change = "correct ranks, or see why the others do not start"
        facts.findings.append(
            Finding(
                name="ranks",
                text=text,
                value="" if short else str(seen_ranks),
                key="ranks",
                change=change,
                found=not short,
                needed=short,
            )
        )
        return
    if not hidden and (said or 1) == 1 and facts.command.launched.name not in ("srun", "ray"):
        text = "no process names a rank, so the process that prints the steps is the only one"
        facts.findings.append(Finding(name="ranks", text=text, value="1", key="ranks"))
        return
    facts.ranks = said or max(1, len(facts.proposal.ranks))
    kind = launched.kind
    notes = [one.note for one in facts.command.frameworks if one.hidden]
    notes += [kind.note] if kind and not kind.env and kind.note else []
    facts.findings.append(
        Finding(
            name="ranks",
            text="no process was found whose environment or beacon names its rank",
            key="ranks",
            change="; ".join(
                [
                    *notes,
                    "set RANK where the ranks are started, or call chaos.beacon.step(...) in each,"
                    " and correct ranks",
                ]
            ),
            found=False,
            needed=True,
        )
    )


def _progress(facts: Facts, seen: Sighting) -> None:
    proposal = facts.proposal
    if proposal.progress is None:
        facts.findings.append(
            Finding(
                name="progress",
                text=f"no step was seen in {_count(seen.count, 'line')} within"
                f" {seen.seconds:.0f} s",
                key="progress",
                change="watch longer (--for 5m), call chaos.beacon.step(...) after each step, or"
                " give progress: {regex: ...} and try it with chaos try-progress",
                found=False,
                needed=True,
            )
        )
        return
    steps = [step for _, step in proposal.steps]
    text = (
        f"steps {min(steps)} to {max(steps)}, the first after {proposal.first_s or 0:.0f} s,"
        f" {_losses(proposal)}"
    )
    if proposal.step_s is not None:
        text += f", about {proposal.step_s:.2g} s a step"
    if proposal.stride > 1:
        text += f", reported every {proposal.stride} steps"
    change = f"{proposal.doubt}: report the step of the run, or use the beacon"
    if not proposal.doubt:
        old = seen.count <= MOST_LINES and steps[0] > max(1, proposal.stride)
        change = "it goes on from an old checkpoint: move that away" if old else ""
    facts.findings.append(
        Finding(
            name="progress",
            text=text,
            key="progress",
            change=change,
            found=not proposal.doubt,
            needed=bool(proposal.doubt),
        )
    )


def _losses(proposal: Proposal) -> str:
    return f"{proposal.losses} losses" if proposal.losses else "no loss"


def _steps(facts: Facts, seen: Sighting, asked: int | None) -> None:
    proposal, command = facts.proposal, facts.command
    given = arguments.find(command.words, arguments.STEPS, r"\d{1,12}")
    epochs = arguments.find(command.words, arguments.EPOCHS, r"\d{1,6}")
    steps = [step for _, step in proposal.steps]
    guess = command.script.steps_guess
    change, found = "", True
    if proposal.total:
        facts.steps, text = proposal.total, "the lines state that many"
        if asked not in (None, proposal.total):
            change = f"--steps says {asked}, and the lines are the judge of that"
    elif asked is not None:
        facts.steps, text = asked, "as --steps says"
    elif given is not None:
        facts.steps, text = int(given.value), f"{given.name} says so"
        change = "correct it if those are the steps of an epoch" if proposal.per_epoch else ""
    elif proposal.per_epoch and epochs is not None:
        facts.steps = proposal.per_epoch * int(epochs.value)
        text = f"{epochs.name} {epochs.value}, and the lines state {proposal.per_epoch} an epoch"
    elif seen.ended is not None and seen.ended.well and steps:
        facts.steps = max(steps) + (min(steps) == 0) * proposal.stride
        text = "the command ended by itself after these"
    elif guess is not None:
        facts.steps = guess[0]
        text = f"a guess by the script's text: {guess[1]}"
        change = "correct it if that is another number"
    else:
        facts.steps = max(100, 10 * max(steps, default=0))
        text, found = "neither the lines nor the arguments say how many there are", False
        change = "say how many steps it trains, or give chaos init --steps N"
    if found and proposal.doubt:
        found, change = False, "the steps seen are not those of the run: say how many it trains"
    elif found and steps and max(steps) > facts.steps:
        found, change = False, f"step {max(steps)} was seen: correct it"
    facts.findings.append(
        Finding(
            name="steps",
            text=text,
            value=str(facts.steps) if found else "",
            key="steps",
            change=change,
            found=found,
            needed=not found,
        )
    )


def _checkpoints(facts: Facts, seen: Sighting, directory: Path) -> None:
    kept, command = checkpoints(seen.saved, directory), facts.command
    changed = {*seen.after.since(seen.before), *(path for path in seen.opened if path.exists())}
    beside = sorted(checkpoints(changed, directory))
    if kept:
        names = ", ".join(dict.fromkeys(path.name for path in kept[:SHOWN]))
        finding = Finding(
            name="checkpoints",
            text=f"in {SCRATCH} ({names}), {command.sent or 'by the script itself'}",
            key="checkpoints",
        )
    elif beside:
        finding = Finding(
            name="checkpoints",
            text=f"written outside {SCRATCH}: {_shown(beside, directory)}",
            key="checkpoints",
            change="send them there, by an option (command: [..., $CHAOS_SCRATCH]) or a variable"
            " (env: {CHECKPOINT_DIR: $CHAOS_SCRATCH}): otherwise one arm goes on from those of the"
            " last; remove what this watch left, so that the first arm begins at step 1",
            found=False,
            needed=True,
        )
    else:
        finding = Finding(
            name="checkpoints",
            text="none was written while it was watched"
            + (f" (they are sent to {SCRATCH} {command.sent})" if command.sent else ""),
            key="checkpoints",
            change="watch longer (--for 5m); without one the job begins again from step 1 after"
            " each fault",
            found=False,
        )
    facts.findings.append(finding)
    others = sorted(changed - set(beside))
    others = [path for path in others if path.is_relative_to(directory)]
    if others:
        facts.findings.append(
            Finding(name="files", text=f"the command also wrote {_shown(others, directory)}")
        )


def _restarts(facts: Facts) -> None:
    launched = facts.command.launched
    facts.restarts = 0 if launched.restarts else RESTARTS
    text = (
        f"{launched.name} starts its ranks again, up to {launched.restarts} times"
        if launched.restarts
        else f"the job does not start its ranks again by itself: a run starts the command again, up"
        f" to {RESTARTS} times"
    )
    facts.findings.append(Finding(name="restarts", text=text, key="restarts"))


def _times(facts: Facts) -> None:
    """Hold of the hang, deadlines and the step of the faults."""
    proposal = facts.proposal
    report_s = (proposal.step_s or 0.0) * proposal.stride
    start_s = proposal.first_s or 0.0
    # twice what the harness takes for a hang, at least (harness.script.listen.observer)
    facts.hold_s = readable(max(LEAST_HOLD_S, 40 * report_s, 8 * proposal.longest_s))
    facts.deadline_s = readable(max(LEAST_DEADLINE_S, 2 * facts.hold_s + 3 * start_s))
    facts.start_s = readable(max(LEAST_START_S, 5 * start_s))
    reports = _middle(facts.steps // proposal.stride)
    # after a report, so that it comes at once
    facts.at = max(1, reports * proposal.stride + (proposal.stride > 1))


def _middle(count: int) -> int:
    """Somewhat behind the middle: the harness knows the usual time by then, and steps are left to
    go on with. Not where most checkpoints are saved: a fault right after one costs nothing.
    """
    half = count // 2
    for digit, every in ((7, 10), (3, 5)):
        near = half + (digit - half) % every
        if near <= 0.7 * count:
            return near
    return half


def readable(seconds: float) -> float:
    """The next number above that people like to read."""
    steps = next((one for one in READABLE if one >= seconds), None)
    return float(steps or math.ceil(seconds / 600) * 600)


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("s") else "s")
    return f"{number} {what if number == 1 else plural}"


def _shown(paths: Sequence[Path], directory: Path) -> str:
    names = [
        shlex.quote(str(path.relative_to(directory) if path.is_relative_to(directory) else path))
        for path in paths[:SHOWN]
    ]
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(names) + more
