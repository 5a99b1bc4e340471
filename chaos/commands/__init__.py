"""Commands besides those of ``chaos.cli``, one file each; part of the composition root."""

from __future__ import annotations

import importlib
import pkgutil

import click


def all_commands() -> list[click.Command]:
    """``COMMANDS`` of every non-private module here. Their heavy imports are inside functions."""
    found: list[click.Command] = []
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_") and not module.ispkg:
            found += importlib.import_module(f"{__name__}.{module.name}").COMMANDS
    return found
