"""The floors of the house: packages import each other in one direction only, and each can be taken
in at a glance.

Imports inside functions and for types count. A package is a folder; the command line
(``chaos/cli.py``), which puts all together, is none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.project.parsed import tree_at
from tests.project.test_layering import PLUGINS, ROOT, imports, modules

MOST_MODULES = 15
OTHER_ROOMS = ("benchmarks", "examples", "tests")
ENTRY_POINTS = ("chaos.cli",)
CIRCLES = {"harness.sim.rank": 9}
"""Modules of one package that still import each other, if only for types: none may come."""
Edges = Mapping[tuple[str, str], list[str]]


def package_edges(
    root: Path, of: Callable[[str, Mapping[str, Path]], str] | None = None
) -> dict[tuple[str, str], list[str]]:
    """(package, package it imports from) -> the imports, each as ``file:line``. ``of``: what stands
    for a module, by default its package.
    """
    files = modules(root)
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, path in files.items():
        if name in ENTRY_POINTS:
            continue
        for one in imports(tree_at(path), name, path.name == "__init__.py"):
            target = one.module
            while target and target not in files:
                target = target.rpartition(".")[0]
            if not target:
                continue
            here, there = (of or package_of)(name, files), (of or package_of)(target, files)
            if here != there:
                found[here, there].append(
                    f"{path.relative_to(root)}:{one.line} imports {one.module}"
                )
    return found


def package_of(module: str, files: Mapping[str, Path]) -> str:
    """The package a module lies in; of a package itself, that package."""
    return module if files[module].name == "__init__.py" else module.rpartition(".")[0]


def cycles(edges: Iterable[tuple[str, str]]) -> list[frozenset[str]]:
    """Sets of packages that reach each other: strongly connected components of more than one."""
    onward = defaultdict(set)
    for here, there in edges:
        onward[here].add(there)
    reach = {package: _reached(package, onward) for package in list(onward)}
    found = {
        frozenset({package} | {other for other in reached if package in reach.get(other, ())})
        for package, reached in reach.items()
        if package in reached
    }
    return sorted(found, key=sorted)


def _reached(package: str, onward: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [package]
    while todo:
        new = onward.get(todo.pop(), set()) - seen
        seen |= new
        todo.extend(new)
    return seen


def way_out(cycle: frozenset[str], edges: Edges) -> str:
    """The imports that close a cycle, the rarest first: what is easiest to cut."""
    inside = sorted(
        (
            (len(where), here, there, where[0])
            for (here, there), where in edges.items()
            if {here, there} <= cycle
        )
    )
    lines = [f"  {here} -> {there} ({n}): {where}" for n, here, there, where in inside[:6]]
    hint = "  move what both need to the lower of the two, or pass it in from above"
    return "\n".join(
        [f"these packages import each other: {', '.join(sorted(cycle))}", *lines, hint]
    )


@pytest.mark.slow
def test_packages_import_each_other_in_one_direction_only() -> None:
    edges = package_edges(ROOT)
    new = cycles(edges)
    assert not new, "\n".join(way_out(cycle, edges) for cycle in new)


@pytest.mark.slow
def test_no_more_modules_of_one_package_need_each_other() -> None:
    edges = package_edges(ROOT, of=lambda module, files: module)
    found = {min(cycle).rpartition(".")[0]: len(cycle) for cycle in cycles(edges)}
    assert found == CIRCLES, "\n".join(way_out(cycle, edges) for cycle in cycles(edges))


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    """Folders of plugins, and of what tries each plugin, hold as many as there are."""
    plugins = {ROOT / name.replace(".", "/") for name in (*PLUGINS, "tests.faultcases")}
    others = (path for room in OTHER_ROOMS for path in (ROOT / room).rglob("*.py"))
    count: dict[Path, int] = defaultdict(int)
    for path in (*modules(ROOT).values(), *others):
        if path.name != "__init__.py" and path.parent not in plugins:
            count[path.parent.relative_to(ROOT)] += 1
    crowded = {str(folder): n for folder, n in count.items() if n > MOST_MODULES}
    assert not crowded, (
        f"more than {MOST_MODULES} modules: {crowded}; which of them are one floor of their own?"
    )


@pytest.mark.parametrize(
    ("sources", "cycle"),
    [
        ({"chaos/a/x.py": "from trainchaos.chaos.b import y", "chaos/b/y.py": ""}, set()),
        (
            {
                "chaos/a/x.py": "from trainchaos.chaos.b import y",
                "chaos/b/y.py": "from trainchaos.chaos.a import x",
            },
            {"chaos.a", "chaos.b"},
        ),
        (
            {"chaos/a/x.py": "def f():\n    import chaos.b.y", "chaos/b/y.py": "import chaos.a.x"},
            {"chaos.a", "chaos.b"},
        ),
        (
            {
                "chaos/a/x.py": (
                    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from chaos.b.y"
                    " import Y"
                ),
                "chaos/b/y.py": "from trainchaos.chaos.c.z import Z",
                "chaos/c/z.py": "from ..a import x",
            },
            {"chaos.a", "chaos.b", "chaos.c"},
        ),
    ],
)
def test_a_cycle_is_seen_wherever_its_imports_stand(
    sources: dict[str, str], cycle: set[str], tmp_path: Path
) -> None:
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    edges = package_edges(tmp_path)
    assert cycles(edges) == ([frozenset(cycle)] if cycle else [])
    assert all("move what both need" in way_out(one, edges) for one in cycles(edges))
