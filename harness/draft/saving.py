"""What was found of a command's checkpoints, and of the other files that it wrote."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainchaos.harness.draft.arguments import Argument, added
from trainchaos.harness.draft.facts import MISSING, SCRATCH, UNSURE, Command, Facts
from trainchaos.harness.draft.training import ended_after, longer
from trainchaos.harness.draft.watching.changes import SURE, Kept, checkpoints
from trainchaos.harness.draft.watching.changes import kept as kept_by_changes
from trainchaos.harness.draft.watching.watch import Sighting

SHOWN = 3
_PLAIN = re.compile(r"[\w@%+=:,./$-]+")


def find_checkpoints(facts: Facts, seen: Sighting, directory: Path) -> None:
    """Where its checkpoints go: by their names, else by what changed while it was watched."""
    kept = checkpoints(seen.saved, directory)
    changed = {*seen.after.since(seen.before), *(path for path in seen.opened if path.exists())}
    changed |= {path for path in seen.files if path.exists()} - set(seen.saved)
    beside = sorted(checkpoints(changed, directory))
    proposal, told = facts.proposal, list[Kept]()
    if not (kept or beside):
        told = kept_by_changes(
            seen.files,
            steps=[step for _, step in proposal.steps],
            first_s=proposal.first_s,
            log_size=seen.printed,
        )
    scratch = next((one for one in told if set(one.paths) & set(seen.saved)), None)
    if paths := kept or (scratch.paths if scratch else ()):
        _in_scratch(facts, paths, None if kept else scratch)
        _find_resume(facts, paths[0], seen.scratch)
    elif beside or told:
        _outside(facts, beside, told, directory)
    else:
        facts.saves = False
        _none(facts, seen)
    shown = {*beside, *(path for one in told for path in one.paths)}
    others = [path for path in sorted(changed - shown) if path.is_relative_to(directory)]
    if others:
        facts.add("files", f"the command also wrote {_shown(others, directory)}", key="")


def _how_sure(one: Kept) -> str:
    return f"{SURE[one.grade]}, by what changed: {one.why}"


def _in_scratch(facts: Facts, paths: Sequence[Path], by_changes: Kept | None) -> None:
    names = ", ".join(dict.fromkeys(path.name for path in paths[:SHOWN]))
    text = f"in {SCRATCH} ({names}), {facts.command.sent or 'by the script itself'}"
    facts.add("checkpoints", text + (f"; {_how_sure(by_changes)}" if by_changes else ""))


def _outside(facts: Facts, beside: Sequence[Path], told: Sequence[Kept], directory: Path) -> None:
    """``beside``: those known by their names; else ``told``, of which the surest one counts."""
    paths = beside or told[0].paths
    text = f"written outside {SCRATCH}: {_shown(paths, directory)}"
    text += " (by their names)" if beside else f" ({_how_sure(told[0])})"
    clean = "remove what this watch left, so that the first arm begins at step 1"
    if again := _again(paths, directory, facts.command):
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


def _again(paths: Sequence[Path], directory: Path, command: Command) -> str:
    """The next command, if a variable or an option whose default is their place can send them
    elsewhere, or else if it can be started there; else "".
    """
    rest = shlex.join(command.words)
    there = _started_there(command, directory)
    places = [path.relative_to(directory) for path in paths if path.is_relative_to(directory)]

    def names(default: str) -> bool:
        place = Path(default)
        return place.name != "" and any(path.is_relative_to(place) for path in places)

    for variable, default in command.script.defaults.items():
        if names(default):
            return f"chaos init --force --env {variable}='{SCRATCH}' -- {rest}"
    for head, default in command.script.options.items():
        option = Argument(value=default, head=head)
        if names(default) and (words := added(command.words, option, SCRATCH)):
            return f"chaos init --force -- {shlex.join(words)}"
    return f"chaos init --force -- {shlex.join(there)}" if there else ""


def _started_there(command: Command, directory: Path) -> list[str]:
    """The command started in $CHAOS_SCRATCH, with whole paths; [] if a variable sends them there,
    or if a shell reads its words.
    """
    if command.script.place_variables or "-c" in command.words[:2]:
        return []
    words = [
        str(directory / word) if (directory / word).exists() else word for word in command.words
    ]
    return ["bash", "-c", f"cd {SCRATCH} && exec {_line(words)}"]


def _line(words: Sequence[str]) -> str:
    """The words for a shell, with $CHAOS_SCRATCH as it is."""
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def _find_resume(facts: Facts, kept: Path, scratch: Path | None) -> None:
    """That the command may go on from a checkpoint only if it is told to, which a restart does not
    do. ``kept``: a checkpoint.
    """
    command, option = facts.command, facts.command.script.resume
    name = re.split("[= ]", option)[0]
    if not option or any(name in word for word in [*command.words, *command.inner]):
        return
    place = SCRATCH
    if scratch is not None and kept.is_relative_to(scratch):
        place = str(Path(SCRATCH) / kept.relative_to(scratch).parent)
    line = f'test "$(ls -A {place})" && set -- {option}; exec {_line(command.words)} "$@"'
    again = f"chaos init --force -- {shlex.join(['bash', '-c', line])}"
    facts.add(
        "resume",
        f"the script has {name}, which the command does not give: if it goes on from a checkpoint"
        " only with it, each fault fails a run",
        key="command",
        change=f"have it given once there is one: {again}",
        state=UNSURE,
        again=again,
    )


def _none(facts: Facts, seen: Sighting) -> None:
    proposal, sent = facts.proposal, facts.command.sent
    text = "none was written while it was watched, so a run asks for none"
    text += f" (they are sent to {SCRATCH} {sent})" if sent else ""
    more = longer(seen, proposal)
    if seen.ended is not None and proposal.distinct:
        more = f"have it save them, or more often ({ended_after(seen, proposal)})"
    change = (
        f'{more}, and say steps_lost: ["max <= N"]: as it is, the limit of lost steps'
        " allows a job to begin again from step 1 after a fault, as one without checkpoints does"
    )
    facts.add("checkpoints", text, key="lost", change=change, state=UNSURE)


def _shown(paths: Sequence[Path], directory: Path) -> str:
    names = [
        shlex.quote(str(path.relative_to(directory) if path.is_relative_to(directory) else path))
        for path in paths[:SHOWN]
    ]
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(names) + more
