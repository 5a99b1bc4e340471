"""What was found of a command's steps: how they are read, and how many there are."""

from __future__ import annotations

import re
import shlex

from trainchaos.harness.draft import arguments
from trainchaos.harness.draft.facts import Facts, Finding
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
        facts.findings.append(_unseen(facts, seen))
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
        every = next((one.every for one in facts.command.frameworks if one.every), "")
        text += f" (each with {every})" if every else ""
    file = None if proposal.progress == "beacon" else proposal.progress.file
    text += f", in the file {file}" if file else ""
    change = f"{proposal.doubt}: report the step of the run, or use the beacon"
    if not proposal.doubt:
        old = seen.count <= MOST_LINES and steps[0] > max(1, proposal.stride)
        change = "it goes on from an old checkpoint: move that away" if old else ""
        if proposal.one_epoch:
            change = (
                "one epoch was seen only: if the step begins again in the next one,"
                f" {longer(seen, proposal, 'two epochs')}"
            )
    daemon = _daemon(seen) if file else ""
    if daemon:
        text, change = f"{text}; {daemon}", FOREGROUND
    facts.findings.append(
        Finding(
            name="progress",
            text=text,
            key="progress",
            change=change,
            found=not (proposal.doubt or daemon),
            needed=bool(proposal.doubt or daemon),
        )
    )


def _daemon(seen: Sighting) -> str:
    """That the job outlives the command, which therefore cannot be watched; "" if it does not."""
    names = ", ".join(seen.remains[:SHOWN])
    ended = f"it is a daemon: the command ended and left processes running: {names}"
    return ended if names else ""


def _unseen(facts: Facts, seen: Sighting) -> Finding:
    """That no step was seen, and what helps."""
    proposal, known = facts.proposal, facts.command.frameworks
    text = f"no step was seen in {_count(seen.count, 'line')} within {seen.seconds:.0f} s"
    hook = next((f"for {one.name}, {one.hook}" for one in known if one.hook), "")
    every = next((f"for {one.name}, {one.every}, " for one in known if one.every), "")
    change = (
        f"{longer(seen, proposal)}, {every}{hook or f'call {BEACON} after each step'}, or give"
        " progress: {regex: ...} and try it with chaos try-progress"
    )
    if any(_MERGED.search(line) for _, line in seen.lines):
        text += "; Ray merges lines that look alike"
        change = f"chaos init --env RAY_DEDUP_LOGS=0 -- {shlex.join(facts.command.words)}"
    if daemon := _daemon(seen):
        text, change = f"{text}; {daemon}", f"{FOREGROUND}; {change}"
    return Finding(
        name="progress", text=text, key="progress", change=change, found=False, needed=True
    )


def longer(seen: Sighting, proposal: Proposal, need: str = "more steps") -> str:
    """What to do if too little was seen; ``need``: what has to be seen."""
    if seen.ended is None:
        return "watch longer (--for 5m)"
    return f"have it train {need} ({ended_after(seen, proposal)})"


def ended_after(seen: Sighting, proposal: Proposal) -> str:
    """That it ended by itself, and when."""
    steps = f" and {_count(proposal.distinct, 'step')}" if proposal.distinct else ""
    return f"it ended by itself after {seen.seconds:.1f} s{steps}"


def _losses(proposal: Proposal) -> str:
    return f"{proposal.losses} losses" if proposal.losses else "no loss"


def find_steps(facts: Facts, seen: Sighting, asked: int | None) -> None:
    """How many steps it trains."""
    proposal, command = facts.proposal, facts.command
    words = [*command.inner, *command.words]  # the last counts
    given = arguments.find(words, arguments.STEPS, r"\d{1,12}")
    epochs = arguments.find(words, arguments.EPOCHS, r"\d{1,6}")
    steps = [step for _, step in proposal.steps]
    ended = seen.ended is not None and seen.ended.well and bool(steps)
    guess = command.script.steps_guess
    change, found = "", True
    again = f"chaos init --force --steps N -- {shlex.join(command.words)}"
    if proposal.total:
        facts.steps, text = proposal.total, "the lines state that many"
        if asked not in (None, proposal.total):
            change = f"--steps says {asked}, and the lines are the judge of that"
    elif asked is not None:
        facts.steps, text = asked, "as --steps says"
    elif ended and proposal.stride == 1:
        facts.steps, text = max(steps) + (min(steps) == 0), ENDED
    elif given is not None and int(given.value) != proposal.per_epoch:
        facts.steps, text = int(given.value), f"{given.name} says so"
        change = "correct it if those are the steps of an epoch" if proposal.per_epoch else ""
    elif proposal.per_epoch and epochs is not None:
        facts.steps = proposal.per_epoch * int(epochs.value)
        text = f"{epochs.name} {epochs.value}, and the lines state {proposal.per_epoch} an epoch"
    elif ended and proposal.per_epoch:
        facts.steps = -(-max(steps) // proposal.per_epoch) * proposal.per_epoch
        text = f"{ENDED}, in whole epochs of {proposal.per_epoch}"
    elif ended:
        facts.steps, text = max(steps) + (min(steps) == 0) * proposal.stride, ENDED
    elif guess is not None:
        facts.steps = guess[0]
        text = f"a guess by the script's text: {guess[1]}"
        change = "correct it if that is another number"
    elif steps and str(max(steps)) in words:
        facts.steps, text = max(steps), "the last that was seen, and the command line names it"
        change = "correct it if it goes on"
    elif (quiet_s := _quiet_s(seen, proposal)) is not None:
        facts.steps, text = max(steps), f"none came for {quiet_s:.0f} s after these"
        change = "correct it if it goes on"
    else:
        facts.steps = max(100, 10 * max(steps, default=0))
        text, found = "neither the lines nor the arguments say how many there are", False
        change = f"say how many it trains: {again}"
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
            again="" if found or proposal.doubt else again,
        )
    )


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
