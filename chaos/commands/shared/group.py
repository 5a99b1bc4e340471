"""The group of all commands."""

from __future__ import annotations

from collections.abc import Sequence

import click


class CommandGroup(click.Group):
    """Names the commands there are when it is given another one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in the base; its error names the nearest command, or all."""
        word = args[0] if args else ""
        if word and not word.startswith("-") and self.get_command(ctx, word) is None:
            ctx.fail(_unknown(word, self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


def _unknown(word: str, commands: Sequence[str]) -> str:
    from trainchaos.chaos.scenario.sla import nearest

    near = nearest(word, commands)
    rest = f"did you mean {near!r}?" if near else f"use one of: {', '.join(commands)}"
    return f"no command {word!r}; {rest}"
