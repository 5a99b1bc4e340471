"""What was found of a command's checkpoints, and of the other files that it wrote."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from trainchaos.harness.draft.facts import SCRATCH, Facts, Finding
from trainchaos.harness.draft.watch import Sighting
from trainchaos.harness.draft.written import checkpoints

SHOWN = 3


def find_checkpoints(facts: Facts, seen: Sighting, directory: Path) -> None:
    """Where its checkpoints go."""
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


def _shown(paths: Sequence[Path], directory: Path) -> str:
    names = [
        shlex.quote(str(path.relative_to(directory) if path.is_relative_to(directory) else path))
        for path in paths[:SHOWN]
    ]
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(names) + more
