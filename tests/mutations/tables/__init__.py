"""Mutations by what they are about; a new file is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from tests.mutations.tape import Mutation


def all_mutations() -> list[Mutation]:
    """Those of all tables, in the order of their names."""
    return [
        mutation
        for table in sorted(found.name for found in pkgutil.iter_modules(__path__))
        for mutation in importlib.import_module(f"{__name__}.{table}").MUTATIONS
    ]
