"""``chaos completion``: the lines with which a shell completes this program's command lines."""

from __future__ import annotations

import click

from trainchaos.chaos.commands.shared.say import say

NAMES = ("chaos", "trainchaos")
"""Of the installed program."""
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the shell's completion: commands, options, built-in scenarios, launchers, cells, stacks
    and runs.

    For bash add 'eval "$(chaos completion bash)"' to ~/.bashrc, for zsh the same with zsh to
    ~/.zshrc; for fish write it to ~/.config/fish/conf.d/chaos.fish.
    """
    from click.shell_completion import get_completion_class

    from trainchaos.chaos.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    if shell == "bash":  # else it splits builtin:NAME and CELL=VALUE into words
        say("COMP_WORDBREAKS=${COMP_WORDBREAKS//[:=]}")
    for name in NAMES:  # both are asked by the variable of ``chaos``, as which both know themselves
        say(kind(cli, {}, name, "_CHAOS_COMPLETE").source())


COMMANDS = [completion]
