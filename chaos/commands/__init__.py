"""Commands besides those of ``chaos.cli``, one file each; part of the composition root."""

from __future__ import annotations

import importlib
import pkgutil

import click


def all_commands() -> list[click.Command]:
    """``COMMANDS`` of every module here and in the folders here, except private ones and
    ``shared``. Their heavy imports are inside functions.
    """
    found: list[click.Command] = []
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        inner = module.name.removeprefix(f"{__name__}.")
        if not module.ispkg and not inner.startswith("shared.") and not inner.startswith("_"):
            found += importlib.import_module(module.name).COMMANDS
    return found
