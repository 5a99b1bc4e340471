"""The source of every Python file, parsed once for all tests, and what rules look for in it."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("chaos", "recovery", "harness", "reports", "benchmarks", "examples", "tests")


@cache
def sources(*folders: str) -> dict[str, str]:
    """Path below the root -> text of every Python file."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def tree_at(path: Path) -> ast.Module:
    """Of a file: of one of ours, parsed before."""
    return _trees().get(path) or ast.parse(path.read_text())


@cache
def _trees() -> dict[Path, ast.Module]:
    """Of all files. The collector, which would walk the trees again and again, takes two thirds of
    the time where it may.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        found = {ROOT / path: ast.parse(text) for path, text in sources(*FOLDERS).items()}
    finally:
        if enabled:
            gc.enable()
    gc.freeze()
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that are, or hold, statements: no import and no function is anywhere
    else, and most of a tree is.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child


@cache
def calls(tree: ast.Module) -> list[ast.Call]:
    """Every call."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
