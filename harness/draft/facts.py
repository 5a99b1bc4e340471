"""What a scenario says of a command, and the findings that say where each value is from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.chaos.scenario.frameworks import Framework
from trainchaos.harness.draft import arguments, frameworks, launchers
from trainchaos.harness.draft.frameworks import ScriptText
from trainchaos.harness.draft.launchers import Launched
from trainchaos.harness.draft.progress import Proposal

SCRATCH = "$CHAOS_SCRATCH"
FEW_STEPS = 2
"""Lost steps that are not worth reporting, as for the checker kept-progress."""
LEAST_HOLD_S = 15.0
FAULTS = 3
"""A kill, a hang and a preemption."""
NOTICE_S = 30.0
"""From the SIGTERM of ``process-term`` to its SIGKILL."""
LEAST_DEADLINE_S = 60.0
LEAST_START_S = 120.0


FOUND, UNSURE, MISSING = "found", "not certain", "not found"
"""Of a finding: a run can do without what is not certain, and cannot without what is not found."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that was found, or could not be. ``text``: what, and by what; ``value``: in the
    scenario; ``key``: of the line that says it; ``change``: what to change if it is wrong, or
    because it was not found; ``again``: the next command that finds it.
    """

    name: str
    text: str
    state: str = FOUND
    value: str = ""
    key: str = ""
    change: str = ""
    again: str = ""

    @property
    def found(self) -> bool:
        """Whether the scenario says it."""
        return self.state == FOUND

    @property
    def needed(self) -> bool:
        """Whether a person has to fill it in."""
        return self.state == MISSING


@dataclass(kw_only=True)
class Command:
    """The command as the scenario starts it. ``words``, ``env``: with checkpoints sent to
    $CHAOS_SCRATCH where that is possible; ``sent``: how they are sent there, for people; ``inner``:
    words of the scripts that it was seen to start.
    """

    words: list[str]
    env: dict[str, str]
    launched: Launched
    frameworks: list[Framework]
    script: ScriptText
    sent: str = ""
    inner: list[str] = field(default_factory=list)

    @property
    def group(self) -> str:
        """Variable that may name replica groups."""
        return next((one.group for one in self.frameworks if one.group), "")


@dataclass(kw_only=True)
class Facts:
    """All that the scenario says, and the findings in the order in which they are shown. ``saves``:
    a checkpoint was seen.
    """

    command: Command
    proposal: Proposal
    ranks: int = 1
    steps: int = 1
    restarts: int = 0
    group: str = ""
    saves: bool = True
    at: int = 1
    hold_s: float = LEAST_HOLD_S
    deadline_s: float = LEAST_DEADLINE_S
    start_s: float = LEAST_START_S
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, text: str, *, key: str | None = None, **more: str) -> None:
        """A finding, said by the line of its name unless ``key`` is another one."""
        self.findings.append(
            Finding(name=name, text=text, key=name if key is None else key, **more)
        )

    def of(self, name: str) -> Finding:
        """The finding of this name."""
        return next(one for one in self.findings if one.name == name)

    @property
    def most_lost(self) -> int:
        """Steps that a fault may cost: fewer than were done when it hit, however late it comes. A
        job that goes on from a checkpoint loses those since then; one that saves none loses all.
        """
        if not self.saves:
            return max(self.steps, FEW_STEPS)
        done = self.at - 1  # the fault is due as soon as step ``at`` is under way
        return max(done - 1, FEW_STEPS)

    @property
    def recovery_limit_s(self) -> float:
        """How long a recovery may take; with all steps once more where no checkpoint was seen."""
        again_s = 0.0 if self.saves else (self.proposal.step_s or 0.0) * self.at
        return 2 * (self.deadline_s + math.ceil(again_s))

    @property
    def arm_s(self) -> float | None:
        """How long an arm without a fault takes; None if that is not known."""
        step_s = self.proposal.step_s
        if step_s is None or not self.of("steps").found:
            return None
        return (self.proposal.first_s or 0.0) + step_s * self.steps

    @property
    def recoveries_s(self) -> float:
        """What the three faults may cost a job that recovers, together: each a start and the steps
        before it once more, the hang and the notice of a preemption their time.
        """
        again_s = (self.proposal.first_s or 0.0) + (self.proposal.step_s or 0.0) * (self.at - 1)
        return FAULTS * again_s + self.hold_s + NOTICE_S


def command_of(
    words: Sequence[str], env: Mapping[str, str], script: ScriptText, steps: int | None
) -> Command:
    """The command to start: ``steps`` in the argument that says them, checkpoints sent to
    $CHAOS_SCRATCH where an option or a variable of the script names their place.
    """
    launched, known = launchers.recognise(words), frameworks.recognise(words, script)
    new, needed = list(words), launched.env(known)
    for one in known:
        needed |= one.env
    options = script.options
    if steps is not None and (given := arguments.find(new, arguments.STEPS, r"\d+")):
        new = arguments.replaced(new, given, str(steps))
    elif steps is not None and (option := arguments.declared(options, arguments.STEPS)):
        new = arguments.added(new, option, str(steps)) or new
    sent = ""
    place = arguments.find(new, arguments.CHECKPOINTS, r"(?!\d+$|true$|false$)[^-].*")
    if place is not None:
        sent = f"by {place.name}"
        if not place.value.startswith(SCRATCH):
            new, sent = (
                arguments.replaced(new, place, _below(place)),
                f"{sent}, which was {place.value}",
            )
    elif script.place_variables:
        for name in script.place_variables:
            needed.setdefault(name, SCRATCH)
            sent = f"by the variable {name}, which the script reads"
    elif (option := arguments.declared(options, arguments.CHECKPOINTS)) and (
        longer := arguments.added(new, option, _below(option))
    ):
        new, sent = longer, f"by {option.name}, which the script declares"
    return Command(
        words=new,
        env=needed | dict(env),
        launched=launched,
        frameworks=known,
        script=script,
        sent=sent,
    )


def _below(place: arguments.Argument) -> str:
    """A place of checkpoints in $CHAOS_SCRATCH, of the same name."""
    name = Path(place.value).name
    return f"{SCRATCH}/{name}" if name else SCRATCH
