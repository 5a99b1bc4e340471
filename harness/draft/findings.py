"""Decides what a scenario says of a command, from its words and from what was seen of it. Each
finding says where a value is from, or that it was not found and what to do.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.harness.draft.command import EPOCHS, GROUP, SCRATCH, STEPS, Command, find
from trainchaos.harness.draft.files import Kept, kept, named_checkpoints
from trainchaos.harness.draft.progress import MOST_LINES, Proposal
from trainchaos.harness.draft.watch import Sighting
from trainchaos.harness.script.outcome_text import BEACON

FEW_STEPS = 2
"""Lost steps that are not worth reporting, as for the checker kept-progress."""
FAULTS = 3
"""A kill, a hang and a preemption."""
NOTICE_S = 30.0
"""From the SIGTERM of ``process-term`` to its SIGKILL."""
LEAST_HOLD_S = 15.0
LEAST_DEADLINE_S = 60.0
LEAST_START_S = 120.0
RESTARTS = 2
READABLE = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 450, 600, 900, 1200, 1800)
SHOWN = 3
FOREGROUND = "have it run them in the foreground (without & and nohup) and wait for them"
ENDED = "the command ended by itself after these"

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
        key = name if key is None else key
        self.findings.append(Finding(name=name, text=text, key=key, **more))

    def of(self, name: str) -> Finding:
        """The finding of this name."""
        return next(one for one in self.findings if one.name == name)

    @property
    def most_lost(self) -> int:
        """Steps that a fault may cost: fewer than were done when it hit, however late it comes. A
        job that goes on from a checkpoint loses those since then; one that saves none loses all.
        """
        done = self.at - 1  # the fault is due as soon as step ``at`` is under way
        return max(done - 1 if self.saves else self.steps, FEW_STEPS)

    @property
    def recovery_limit_s(self) -> float:
        """How long a recovery may take; with all steps once more where no checkpoint was seen."""
        again_s = 0.0 if self.saves else (self.proposal.step_s or 0.0) * self.at
        return 2 * (self.deadline_s + math.ceil(again_s))

    @property
    def run_s(self) -> tuple[float, float] | None:
        """How long a run takes, at least, and if each recovery takes long: a start and the steps
        before the fault once more, the hang and the notice of a preemption. None if that is not
        known.
        """
        step_s, first_s = self.proposal.step_s, self.proposal.first_s or 0.0
        if step_s is None or self.of("steps").state != FOUND:
            return None
        least_s = 2 * FAULTS * (first_s + step_s * self.steps)
        again_s = FAULTS * (first_s + step_s * (self.at - 1))
        return least_s, least_s + again_s + self.hold_s + NOTICE_S


def decide(
    command: Command, seen: Sighting, proposal: Proposal, directory: Path, steps: int | None
) -> Facts:
    """All facts. ``steps``: those that were asked for, if any."""
    facts = Facts(command=command, proposal=proposal)
    _launcher(facts)
    _ranks(facts, seen)
    _progress(facts, seen)
    _steps(facts, seen, steps)
    _checkpoints(facts, seen, directory)
    _restarts(facts, seen)
    _times(facts)
    return facts


# ---- launcher and ranks


def _launcher(facts: Facts) -> None:
    launched, frameworks = facts.command.launched, facts.command.frameworks
    kind, needed = launched.kind, launched.env(frameworks)
    text = launched.name + (f", started by {launched.by}" if launched.by else "")
    if frameworks:
        text += f"; the script uses {', '.join(one.name for one in frameworks)}"
    change = f"{' and '.join(needed)} is set: {kind.note}" if kind and needed else ""
    facts.add("launcher", text, key="command", change=change)


def _ranks(facts: Facts, seen: Sighting) -> None:
    launched = facts.command.launched
    hidden = any(one.hidden for one in facts.command.frameworks)
    due, by = launched.ranks, "the command line says"
    worlds = [one.world for one in seen.ranks.values() if one.world]
    if due is None and worlds and not seen.grouped:
        due, by = max(worlds), "their environments say"
    if seen.grouped:
        facts.group = facts.command.group or GROUP
    least = max(seen.ranks, default=-1) + 1  # of those that there are
    if least > max(len(seen.ranks), due or 0):
        due, by = least, f"one names itself rank {least - 1}: there are at least"
    if seen.ranks:
        _found_ranks(facts, seen, due, by, least)
    elif not hidden and (due or 1) == 1 and launched.name not in ("srun", "ray"):
        text = "no process names a rank, so the process that prints the steps is the only one"
        if facts.proposal.progress is None:
            text = "no process names a rank, so the command is taken for the only one"
        facts.add("ranks", text, value="1")
    elif hidden and seen.alike and due in (None, seen.alike):
        facts.ranks = seen.alike
        text = "processes that were started alike and meet each other; nothing names their ranks,"
        text += " so they are numbered in the order in which they started"
        facts.add("ranks", text, value=str(seen.alike))
    else:  # with one, a run would take what starts the ranks for the only rank
        facts.ranks = due or max(2, len(facts.proposal.ranks))
        kind = launched.kind
        notes = [one.note for one in facts.command.frameworks if one.hidden]
        notes += [kind.note] if kind and not kind.env and kind.note else []
        line = f"set RANK where the ranks are started, or {_hook(facts)} in each, and correct ranks"
        text = "no process was found whose environment or beacon names its rank"
        facts.add("ranks", text, state=MISSING, change="; ".join([*notes, line]))


def _found_ranks(facts: Facts, seen: Sighting, due: int | None, by: str, least: int) -> None:
    """Ranks that were found. ``due``: how many there are ``by`` what, if anything says so;
    ``least``: by the numbers that they name.
    """
    count = len(seen.ranks)
    facts.ranks = max(count, due or 0)
    text = "found by their beacons" if seen.hinted else "found by the rank in their environments"
    text += f", in groups named by {facts.group}" if facts.group else ""
    if due is None or due <= count:
        facts.add("ranks", text, value=str(count))
        return
    if facts.command.launched.nodes > 1:
        change = "those of other nodes are not seen here: a run needs all ranks on this machine"
    else:
        missing = ", ".join(map(str, sorted({*range(due)} - {*seen.ranks})))
        text = f"{count} {text}, and {by} {due}; not seen: {missing}"
        change = f"correct ranks, or have each name itself: {_hook(facts)} in each"
    if count < least:
        change = f"have each rank name itself: {_hook(facts)} in each"
    facts.add("ranks", text, state=MISSING, change=change)


def _hook(facts: Facts) -> str:
    """The line that has a rank name itself."""
    return next((one.hook for one in facts.command.frameworks if one.hook), f"call {BEACON}")


def _restarts(facts: Facts, seen: Sighting) -> None:
    launched, kind = facts.command.launched, facts.command.launched.kind
    facts.restarts = 0 if launched.restarts else RESTARTS
    ours = f"a run starts the command again, up to {RESTARTS} times"
    alone = facts.ranks == 1 and seen.together <= 1 and facts.of("ranks").state == FOUND
    change = ""
    if launched.restarts:
        text = f"{launched.name} starts its ranks again, up to {launched.restarts} times"
    elif kind and kind.ranks:
        without = f" without --{kind.restarts}" if kind.restarts else ""
        text = f"{launched.name} does not start its ranks again{without}: {ours}"
    elif kind and kind.name == "python" and alone:
        text = f"one process, which nothing starts again: {ours}"
    else:
        text = f"whether the job starts its ranks again by itself is not known: {ours}"
        change = "set restarts: 0 if it does"
    facts.add("restarts", text, change=change, state=UNSURE if change else FOUND)


# ---- steps


def _progress(facts: Facts, seen: Sighting) -> None:
    """How its progress is read, or that no step was seen, and what helps."""
    proposal, frameworks = facts.proposal, facts.command.frameworks
    every = next((one.every for one in frameworks if one.every), "")
    daemon = ""
    if seen.remains:
        names = ", ".join(seen.remains[:SHOWN])
        daemon = f"; it is a daemon: the command ended and left processes running: {names}"
    if proposal.progress is None:
        text = f"no step was seen in {_count(seen.count, 'line')} within {seen.seconds:.0f} s"
        change = f"{_longer(seen, proposal)}, " + (f"{every}, " if every else "")
        change += f"{_hook(facts)} after each step, or give progress: {{regex: ...}}"
        change += " and try it with chaos try-progress"
        change = f"{FOREGROUND}; {change}" if daemon else change
        facts.add("progress", text + daemon, change=change, state=MISSING)
        return
    steps = [step for _, step in proposal.steps]
    text = f"steps {min(steps)} to {max(steps)}, the first after {proposal.first_s or 0:.0f} s,"
    text += f" {proposal.losses} losses" if proposal.losses else " no loss"
    if proposal.step_s is not None:
        text += f", about {proposal.step_s:.2g} s a step"
    if proposal.stride > 1:
        text += f", reported every {proposal.stride} steps"
        text += f" (each with {every})" if every else ""
    file = None if proposal.progress == "beacon" else proposal.progress.file
    text += f", in the file {file}" if file else ""
    change = ""
    if proposal.doubt:
        change = f"{proposal.doubt}: report the step of the run, or use the beacon"
    elif proposal.one_epoch:
        change = "one epoch was seen only: if the step begins again in the next one,"
        change += f" {_longer(seen, proposal, 'two epochs')}"
    elif seen.count <= MOST_LINES and steps[0] > max(1, proposal.stride):
        change = "it goes on from an old checkpoint: move that away"
    if file and daemon:
        text, change = text + daemon, FOREGROUND
    missing = proposal.doubt or change == FOREGROUND
    facts.add("progress", text, change=change, state=MISSING if missing else FOUND)


def _longer(seen: Sighting, proposal: Proposal, need: str = "more steps") -> str:
    """What to do if too little was seen; ``need``: what has to be seen."""
    if seen.ended is None:
        return "watch longer (--for 5m)"
    return f"have it train {need} ({_ended_after(seen, proposal)})"


def _ended_after(seen: Sighting, proposal: Proposal) -> str:
    steps = f" and {_count(proposal.distinct, 'step')}" if proposal.distinct else ""
    return f"it ended by itself after {seen.seconds:.1f} s{steps}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _steps(facts: Facts, seen: Sighting, asked: int | None) -> None:
    """How many steps it trains."""
    proposal, last = facts.proposal, max((step for _, step in facts.proposal.steps), default=0)
    again = f"chaos init --force --steps N -- {shlex.join(facts.command.words)}"
    evidence = _number_of_steps(facts, seen, asked)
    if evidence is None:
        facts.steps, state = max(100, 10 * last), MISSING
        text = "neither the lines nor the arguments say how many there are"
        change = f"say how many it trains: {again}"
    else:
        facts.steps, text, change = evidence
        state = MISSING if proposal.doubt or last > facts.steps else FOUND
        if proposal.doubt:
            change = "the steps seen are not those of the run: say how many it trains"
        elif last > facts.steps:
            change = f"step {last} was seen: correct it"
    facts.add(
        "steps",
        text,
        state=state,
        value=str(facts.steps) if state == FOUND else "",
        change=change,
        again="" if state == FOUND or proposal.doubt else again,
    )


def _number_of_steps(
    facts: Facts, seen: Sighting, asked: int | None
) -> tuple[int, str, str] | None:
    """The number of steps, what says so, and what to change: by the surest evidence there is; None
    if there is none.
    """
    proposal, command = facts.proposal, facts.command
    words = [*command.inner, *command.words]  # the last counts
    given, epochs = find(words, STEPS, r"\d{1,12}"), find(words, EPOCHS, r"\d{1,6}")
    steps = [step for _, step in proposal.steps]
    ended = seen.ended is not None and seen.ended.well and bool(steps)
    each, last = proposal.per_epoch, max(steps, default=0)
    if proposal.total:
        wrong = f"--steps says {asked}, and the lines are the judge of that"
        right = asked in (None, proposal.total)
        return proposal.total, "the lines state that many", "" if right else wrong
    if asked is not None:
        return asked, "as --steps says", ""
    if ended and proposal.stride == 1:
        return last + (min(steps) == 0), ENDED, ""
    if given is not None and int(given.value) != each:
        unsure = "correct it if those are the steps of an epoch" if each else ""
        return int(given.value), f"{given.name} says so", unsure
    if each and epochs is not None:
        text = f"{epochs.name} {epochs.value}, and the lines state {each} an epoch"
        return each * int(epochs.value), text, ""
    if ended and each:
        return -(-last // each) * each, f"{ENDED}, in whole epochs of {each}", ""
    if ended:
        return last + (min(steps) == 0) * proposal.stride, ENDED, ""
    default = command.script.declared(STEPS)
    if default is not None and default.value.isdigit():
        text = f"the default of {default.name}"
        return int(default.value), text, "correct it if that is another number"
    return None


# ---- checkpoints


def _checkpoints(facts: Facts, seen: Sighting, directory: Path) -> None:
    """Where its checkpoints go: by their names, else by what changed while it was watched."""
    proposal, sent = facts.proposal, facts.command.sent
    named = named_checkpoints(seen.saved, directory)
    beside = named_checkpoints(seen.wrote, directory)
    told = list[Kept]()
    if not (named or beside):
        steps = [step for _, step in proposal.steps]
        told = kept(seen.files, steps=steps, first_s=proposal.first_s, log_size=seen.printed)
    scratch = next((one for one in told if {*one.paths} & {*seen.saved}), None)
    if paths := named or (scratch.paths if scratch else ()):
        names = ", ".join(dict.fromkeys(path.name for path in paths[:SHOWN]))
        text = f"in {SCRATCH} ({names}), {sent or 'by the script itself'}"
        text += "" if named or scratch is None else f"; {scratch.how_sure}"
        facts.add("checkpoints", text)
        _resume(facts, paths[0], seen.scratch)
    elif beside or told:
        _outside(facts, beside, told, directory)
    else:
        facts.saves = False
        text = "none was written while it was watched, so a run asks for none"
        text += f" (they are sent to {SCRATCH} {sent})" if sent else ""
        more = _longer(seen, proposal)
        if seen.ended is not None and proposal.distinct:
            more = f"have it save them, or more often ({_ended_after(seen, proposal)})"
        change = f'{more}, and say steps_lost: ["max <= N"]: as it is, the limit of lost steps'
        change += " allows a job to begin again from step 1 after a fault, as one without"
        change += " checkpoints does"
        facts.add("checkpoints", text, key="lost", change=change, state=UNSURE)
    shown = {*beside, *(path for one in told for path in one.paths)}
    others = [path for path in seen.wrote if path.is_relative_to(directory) and path not in shown]
    if others:
        facts.add("files", f"the command also wrote {_shown(others, directory)}", key="")


def _outside(facts: Facts, beside: Sequence[Path], told: Sequence[Kept], directory: Path) -> None:
    """``beside``: those known by their names; else ``told``, of which the surest one counts."""
    paths = beside or told[0].paths
    text = f"written outside {SCRATCH}: {_shown(paths, directory)}"
    text += " (by their names)" if beside else f" ({told[0].how_sure})"
    clean = "remove what this watch left, so that the first arm begins at step 1"
    if again := _sent_again(paths, directory, facts.command):
        change = f"{again} sends them to {SCRATCH}; {clean}"
        facts.add("checkpoints", text, change=change, state=MISSING, again=again)
        return
    variables = facts.command.script.place_variables
    read = ", which the script reads" if variables else ""
    change = (
        "send them there, by an option (command: [..., $CHAOS_SCRATCH]) or a variable"
        f" (env: {{{next(iter(variables), 'CHECKPOINT_DIR')}: $CHAOS_SCRATCH}}{read}); a script"
        " that has neither is started there"
        ' (command: [bash, -c, "cd $CHAOS_SCRATCH && ..."], with whole paths):'
        f" otherwise one arm goes on from those of the last; {clean}"
    )
    needed = beside or told[0].grade > 1
    facts.add("checkpoints", text, change=change, state=MISSING if needed else UNSURE)


def _sent_again(paths: Sequence[Path], directory: Path, command: Command) -> str:
    """The next command, if a variable or an option whose default is their place can send them
    elsewhere, or else if it can be started there; else "".
    """
    places = [path.relative_to(directory) for path in paths if path.is_relative_to(directory)]

    def names(default: str) -> bool:
        place = Path(default)
        return place.name != "" and any(path.is_relative_to(place) for path in places)

    script = command.script
    for variable, default in script.defaults.items():
        if names(default):
            rest = shlex.join(command.words)
            return f"chaos init --force --env {variable}='{SCRATCH}' -- {rest}"
    for option in script.options:
        if names(option.value) and (words := option.put(command.words, SCRATCH)):
            return f"chaos init --force -- {shlex.join(words)}"
    if script.place_variables or "-c" in command.words[:2]:
        return ""  # a variable sends them there, or a shell reads its words
    whole = [
        str(directory / word) if (directory / word).exists() else word for word in command.words
    ]
    return f"chaos init --force -- {_in_shell(f'cd {SCRATCH} && exec {_line(whole)}')}"


def _line(words: Sequence[str]) -> str:
    """The words for a shell, with $CHAOS_SCRATCH as it is."""
    plain = re.compile(r"[\w@%+=:,./$-]+")
    return " ".join(word if plain.fullmatch(word) else shlex.quote(word) for word in words)


def _in_shell(line: str) -> str:
    return shlex.join(["bash", "-c", line])


def _resume(facts: Facts, checkpoint: Path, scratch: Path | None) -> None:
    """That the command may go on from a checkpoint only if it is told to, which a restart does not
    do.
    """
    command, option = facts.command, facts.command.script.resume
    name = re.split("[= ]", option)[0]
    if not option or any(name in word for word in [*command.words, *command.inner]):
        return
    place = SCRATCH
    if scratch is not None and checkpoint.is_relative_to(scratch):
        place = str(Path(SCRATCH) / checkpoint.relative_to(scratch).parent)
    line = f'test "$(ls -A {place})" && set -- {option}; exec {_line(command.words)} "$@"'
    again = f"chaos init --force -- {_in_shell(line)}"
    text = f"the script has {name}, which the command does not give: if it goes on from a"
    text += " checkpoint only with it, each fault fails a run"
    change = f"have it given once there is one: {again}"
    facts.add("resume", text, key="command", change=change, state=UNSURE, again=again)


def _shown(paths: Sequence[Path], directory: Path) -> str:
    below = [
        path.relative_to(directory) if path.is_relative_to(directory) else path for path in paths
    ]
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(shlex.quote(str(path)) for path in below[:SHOWN]) + more


# ---- times


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
