"""What was found of a command's checkpoints, and of the other files that it wrote."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainchaos.harness.draft.arguments import Argument, added
from trainchaos.harness.draft.facts import SCRATCH, Command, Facts, Finding
from trainchaos.harness.draft.progress import Proposal
from trainchaos.harness.draft.training import ended_after, longer
from trainchaos.harness.draft.watching.changes import SURE, Kept
from trainchaos.harness.draft.watching.changes import kept as kept_by_changes
from trainchaos.harness.draft.watching.watch import Sighting
from trainchaos.harness.draft.watching.written import checkpoints

SHOWN = 3
_PLAIN = re.compile(r"[\w@%+=:,./$-]+")


def find_checkpoints(facts: Facts, seen: Sighting, directory: Path) -> None:
    """Where its checkpoints go: by their names, else by what changed while it was watched."""
    kept, command = checkpoints(seen.saved, directory), facts.command
    changed = {*seen.after.since(seen.before), *(path for path in seen.opened if path.exists())}
    changed |= {path for path in seen.files if path.exists()} - set(seen.saved)
    beside = sorted(checkpoints(changed, directory))
    told = [] if kept or beside else _by_changes(facts, seen)
    scratch = [one for one in told if set(one.paths) & set(seen.saved)]
    if kept or scratch:
        finding = _in_scratch(
            kept or scratch[0].paths, "" if kept else _how_sure(scratch[0]), command
        )
    elif beside or told:
        finding = _outside(beside, told, directory, command)
    else:
        facts.saves = False
        finding = _none(seen, facts.proposal, command)
    facts.findings.append(finding)
    if kept or scratch:
        _find_resume(facts, (kept or scratch[0].paths)[0], seen.scratch)
    shown = {*beside, *(path for one in told for path in one.paths)}
    others = [path for path in sorted(changed - shown) if path.is_relative_to(directory)]
    if others:
        facts.findings.append(
            Finding(name="files", text=f"the command also wrote {_shown(others, directory)}")
        )


def _by_changes(facts: Facts, seen: Sighting) -> list[Kept]:
    proposal = facts.proposal
    return kept_by_changes(
        seen.files,
        steps=[step for _, step in proposal.steps],
        first_s=proposal.first_s,
        log_size=seen.printed,
    )


def _how_sure(one: Kept) -> str:
    return f"{SURE[one.grade]}, by what changed: {one.why}"


def _in_scratch(paths: Sequence[Path], how: str, command: Command) -> Finding:
    names = ", ".join(dict.fromkeys(path.name for path in paths[:SHOWN]))
    text = f"in {SCRATCH} ({names}), {command.sent or 'by the script itself'}"
    text += f"; {how}" if how else ""
    return Finding(name="checkpoints", text=text, key="checkpoints")


def _outside(
    beside: Sequence[Path], told: Sequence[Kept], directory: Path, command: Command
) -> Finding:
    """``beside``: those known by their names; else ``told``, of which the surest one counts."""
    variables = command.script.place_variables
    text = f"written outside {SCRATCH}: {_shown(beside or told[0].paths, directory)}"
    text += " (by their names)" if beside else f" ({_how_sure(told[0])})"
    if again := _again(beside or told[0].paths, directory, command):
        clean = "remove what this watch left, so that the first arm begins at step 1"
        return Finding(
            name="checkpoints",
            text=text,
            key="checkpoints",
            change=f"{again} sends them to {SCRATCH}; {clean}",
            found=False,
            needed=True,
            again=again,
        )
    variable = next(iter(variables), "CHECKPOINT_DIR")
    read = ", which the script reads" if variables else ""
    return Finding(
        name="checkpoints",
        text=text,
        key="checkpoints",
        change="send them there, by an option (command: [..., $CHAOS_SCRATCH]) or a variable"
        f" (env: {{{variable}: $CHAOS_SCRATCH}}{read}); a script that has neither is started there"
        ' (command: [bash, -c, "cd $CHAOS_SCRATCH && ..."], with whole paths):'
        " otherwise one arm goes on from those of the last; remove what this watch left, so that"
        " the first arm begins at step 1",
        found=False,
        needed=bool(beside) or told[0].grade > 1,
    )


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
        option = Argument(name=head.rstrip("= "), value=default, index=0, head=head)
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
    command = facts.command
    told = command.script.resume
    if not told or any(told[0].rstrip("=") in word for word in [*command.words, *command.inner]):
        return
    place = SCRATCH
    if scratch is not None and kept.is_relative_to(scratch):
        place = str(Path(SCRATCH) / kept.relative_to(scratch).parent)
    option = "".join(told) if told[0].endswith("=") else " ".join(told).rstrip()
    line = f'test "$(ls -A {place})" && set -- {option}; exec {_line(command.words)} "$@"'
    again = f"chaos init --force -- {shlex.join(['bash', '-c', line])}"
    facts.findings.append(
        Finding(
            name="resume",
            text=f"the script has {told[0].rstrip('=')}, which the command does not give: if it"
            " goes on from a checkpoint only with it, each fault fails a run",
            key="command",
            change=f"have it given once there is one: {again}",
            found=False,
            again=again,
        )
    )


def _none(seen: Sighting, proposal: Proposal, command: Command) -> Finding:
    text = "none was written while it was watched, so a run asks for none"
    text += f" (they are sent to {SCRATCH} {command.sent})" if command.sent else ""
    more = longer(seen, proposal)
    if seen.ended is not None and proposal.distinct:
        more = f"have it save them, or more often ({ended_after(seen, proposal)})"
    return Finding(
        name="checkpoints",
        text=text,
        key="lost",
        change=f'{more}, and say steps_lost: ["max <= N"]: as it is, the limit of lost steps'
        " allows a job to begin again from step 1 after a fault, as one without checkpoints does",
        found=False,
    )


def _shown(paths: Sequence[Path], directory: Path) -> str:
    names = [
        shlex.quote(str(path.relative_to(directory) if path.is_relative_to(directory) else path))
        for path in paths[:SHOWN]
    ]
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(names) + more
