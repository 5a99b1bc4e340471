"""What was found of a command's steps: how they are read, and how many there are."""

from __future__ import annotations

import re
import shlex

from trainchaos.harness.draft import arguments
from trainchaos.harness.draft.facts import FOUND, MISSING, Facts
from trainchaos.harness.draft.progress import MOST_LINES, Proposal
from trainchaos.harness.draft.watching.watch import Sighting
from trainchaos.harness.script.outcome_text import BEACON

QUIET_S = 3.0
QUIET = 2.0
"""No step for so many times the longest wait for one: training is over."""
SHOWN = 3
_MERGED = re.compile(r"\[repeated \d+x across cluster\]")
FOREGROUND = "have it run them in the foreground (without & and nohup) and wait for them"
ENDED = "the command ended by itself after these"


def find_progress(facts: Facts, seen: Sighting) -> None:
    """How its progress is read."""
    proposal = facts.proposal
    if proposal.progress is None:
        _unseen(facts, seen)
        return
    steps = [step for _, step in proposal.steps]
    text = f"steps {min(steps)} to {max(steps)}, the first after {proposal.first_s or 0:.0f} s,"
    text += f" {proposal.losses} losses" if proposal.losses else " no loss"
    if proposal.step_s is not None:
        text += f", about {proposal.step_s:.2g} s a step"
    if proposal.stride > 1:
        text += f", reported every {proposal.stride} steps"
        every = next((one.every for one in facts.command.frameworks if one.every), "")
        text += f" (each with {every})" if every else ""
    file = None if proposal.progress == "beacon" else proposal.progress.file
    text += f", in the file {file}" if file else ""
    change = ""
    if proposal.doubt:
        change = f"{proposal.doubt}: report the step of the run, or use the beacon"
    elif proposal.one_epoch:
        change = (
            "one epoch was seen only: if the step begins again in the next one,"
            f" {longer(seen, proposal, 'two epochs')}"
        )
    elif seen.count <= MOST_LINES and steps[0] > max(1, proposal.stride):
        change = "it goes on from an old checkpoint: move that away"
    daemon = _daemon(seen) if file else ""
    if daemon:
        text, change = f"{text}; {daemon}", FOREGROUND
    facts.add("progress", text, change=change, state=MISSING if proposal.doubt or daemon else FOUND)


def _daemon(seen: Sighting) -> str:
    """That the job outlives the command, which therefore cannot be watched; "" if it does not."""
    names = ", ".join(seen.remains[:SHOWN])
    ended = f"it is a daemon: the command ended and left processes running: {names}"
    return ended if names else ""


def _unseen(facts: Facts, seen: Sighting) -> None:
    """That no step was seen, and what helps."""
    known = facts.command.frameworks
    text = f"no step was seen in {_count(seen.count, 'line')} within {seen.seconds:.0f} s"
    hook = next((f"for {one.name}, {one.hook}" for one in known if one.hook), "")
    every = next((f"for {one.name}, {one.every}, " for one in known if one.every), "")
    change = (
        f"{longer(seen, facts.proposal)}, {every}{hook or f'call {BEACON} after each step'}, or"
        " give progress: {regex: ...} and try it with chaos try-progress"
    )
    if any(_MERGED.search(line) for _, line in seen.lines):
        text += "; Ray merges lines that look alike"
        change = f"chaos init --env RAY_DEDUP_LOGS=0 -- {shlex.join(facts.command.words)}"
    if daemon := _daemon(seen):
        text, change = f"{text}; {daemon}", f"{FOREGROUND}; {change}"
    facts.add("progress", text, change=change, state=MISSING)


def longer(seen: Sighting, proposal: Proposal, need: str = "more steps") -> str:
    """What to do if too little was seen; ``need``: what has to be seen."""
    if seen.ended is None:
        return "watch longer (--for 5m)"
    return f"have it train {need} ({ended_after(seen, proposal)})"


def ended_after(seen: Sighting, proposal: Proposal) -> str:
    """That it ended by itself, and when."""
    steps = f" and {_count(proposal.distinct, 'step')}" if proposal.distinct else ""
    return f"it ended by itself after {seen.seconds:.1f} s{steps}"


def find_steps(facts: Facts, seen: Sighting, asked: int | None) -> None:
    """How many steps it trains."""
    proposal, command = facts.proposal, facts.command
    last = max((step for _, step in proposal.steps), default=0)
    again = f"chaos init --force --steps N -- {shlex.join(command.words)}"
    known = _steps(facts, seen, asked)
    state, change = FOUND, known[2] if known else f"say how many it trains: {again}"
    if known is None:
        facts.steps = max(100, 10 * last)
        state, text = MISSING, "neither the lines nor the arguments say how many there are"
    else:
        facts.steps, text = known[:2]
    if known and proposal.doubt:
        state, change = MISSING, "the steps seen are not those of the run: say how many it trains"
    elif known and last > facts.steps:
        state, change = MISSING, f"step {last} was seen: correct it"
    facts.add(
        "steps",
        text,
        state=state,
        value=str(facts.steps) if state == FOUND else "",
        change=change,
        again="" if state == FOUND or proposal.doubt else again,
    )


def _steps(facts: Facts, seen: Sighting, asked: int | None) -> tuple[int, str, str] | None:
    """The number of steps, what says so, and what to change: by the surest evidence there is; None
    if there is none.
    """
    proposal, command = facts.proposal, facts.command
    words = [*command.inner, *command.words]  # the last counts
    given = arguments.find(words, arguments.STEPS, r"\d{1,12}")
    epochs = arguments.find(words, arguments.EPOCHS, r"\d{1,6}")
    steps = [step for _, step in proposal.steps]
    ended = seen.ended is not None and seen.ended.well and bool(steps)
    each, last, goes_on = proposal.per_epoch, max(steps, default=0), "correct it if it goes on"
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
    if guess := command.script.steps_guess:
        text = f"a guess by the script's text: {guess[1]}"
        return guess[0], text, "correct it if that is another number"
    if steps and str(last) in words:
        return last, "the last that was seen, and the command line names it", goes_on
    if (quiet_s := _quiet_s(seen, proposal)) is not None:
        return last, f"none came for {quiet_s:.0f} s after these", goes_on
    return None


def _quiet_s(seen: Sighting, proposal: Proposal) -> float | None:
    """For how long no step has come, if that is much longer than any wait between two: a command
    may take its time to end after the last one. None: steps still came.
    """
    if not proposal.steps:
        return None
    quiet_s = seen.seconds - max(seconds for seconds, _ in proposal.steps)
    usual_s = max(proposal.longest_s, proposal.first_s or 0.0)
    return quiet_s if quiet_s > max(QUIET_S, QUIET * usual_s) else None


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("s") else "s")
    return f"{number} {what if number == 1 else plural}"
