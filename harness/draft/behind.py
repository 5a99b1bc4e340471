"""Looks behind a shell script or a program, by the command lines of the processes that it started.

A launcher that a script starts decides as much as one that the user types: how many ranks there
are, and whether they are started again.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from trainchaos.harness.draft import frameworks, launchers
from trainchaos.harness.draft.facts import Command
from trainchaos.harness.draft.watching.ran import Ran

_INSTALLED = ("site-packages", "dist-packages", "lib/python")
"""In the paths of scripts that are no user's."""


def behind(command: Command, ran: Ran) -> Command:
    """The command, with the launcher, the frameworks and the arguments of what it started."""
    texts = [command.script]
    inner: list[str] = []
    launched = command.launched
    for words, place in ran.items():
        plain = _without_interpreter(words)
        own = [word for word in words if not any(part in word for part in _INSTALLED)]
        script = frameworks.read_scripts(own, place)
        if script.name and script.text not in [one.text for one in texts]:
            texts.append(script)
        inner += plain if script.name else ()
        if launched.kind is None or not (launched.kind.ranks or launched.kind.note):
            one = launchers.recognise(plain)
            if one.kind is not None and one.kind.ranks:
                launched = replace(one, by=shlex.join(command.words[:2]))
    script = frameworks.ScriptText(
        name=command.script.name, text="\n".join(one.text for one in texts)
    )
    known = frameworks.recognise([*command.words, *inner], script)
    return replace(
        command,
        launched=launched,
        frameworks=known,
        script=script,
        inner=inner,
        env=launched.env(known) | command.env,
    )


def _without_interpreter(words: tuple[str, ...]) -> list[str]:
    """``torchrun ...`` of ``python /bin/torchrun ...``, as the kernel says of a script."""
    program = Path(words[0]).name
    script = len(words) > 1 and not words[1].startswith("-") and Path(words[1]).suffix == ""
    return list(words[1:] if program.startswith(("python", "pypy")) and script else words)
