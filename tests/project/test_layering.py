"""Who may import whom: read from the source of every module, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.project.parsed import ROOT, statements, tree_at

SHARED = "trainchaos"
OURS = ("chaos", "recovery", "harness", "reports")
HEAVY = ("torch", "pandas", "matplotlib")
FRAMEWORKS = (
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
    "deepspeed",
    "torchtitan",
)
INTEGRATIONS = "chaos.integrations"
"""Loaded in users' scripts, in environments that have nothing else of ours."""
PLUGINS = (
    "chaos.faults",
    "recovery.policy.strategies",
    "harness.launchers",
    "harness.workloads",
    "harness.compare.stacks",
    "reports",
)

COMPOSITION_ROOTS = ("chaos.cli", "chaos.commands")
"""The files of ``chaos`` that may import the other packages."""

RECOVERY_MAY = ("chaos.events.log", "chaos.errors", "chaos.plugins", "chaos.stats")
REPORTS_MAY = (
    "harness.judge",
    "harness.explain",
    "harness.host.rundir",
    "harness.compare.result",
    "harness.projection.result",
)

TORCH_AT_TOP = (
    "recovery.collectives",
    "recovery.state",
    "recovery.data.loader",
    "recovery.checkpoint.checkpointer",
    "recovery.checkpoint.memory_checkpointer",
    "recovery.checkpoint.own",
    "recovery.checkpoint.save_writer",
    "recovery.checkpoint.saves",
    "recovery.checkpoint.background",
    "recovery.checkpoint.chunks",
    "recovery.checkpoint.restore",
    "recovery.spares",
    "recovery.rank",
    "harness.workloads._parallel",
    "harness.workloads._transformer",
    "harness.rank.training",
    "harness.rank.fault_agent",
    "harness.rank.shims.tensors",
    "harness.peers",
)
"""Loaded in rank processes only (or, for the zygote, before forking one)."""

TORCH_IN_FUNCTIONS = (
    "harness.workloads",
    "harness.rank.rank",
    "recovery.process.local",
    "chaos.faults",
    "harness.rank.shims",
    "harness.preflight",
)

PLOTS_AT_TOP = ("reports.content.series",)
"""Private modules of reports, imported by the functions that draw."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, without the name all of ours share. ``lazy``: inside a function;
    ``typing``: under ``if TYPE_CHECKING``; ``bare``: one of ours that the source imports without
    that name.
    """

    module: str
    bare: bool
    line: int
    lazy: bool
    typing: bool


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every module of ours below ``root``."""
    found = {}
    for package in OURS:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.Module, name: str, is_package: bool) -> Iterator[Import]:
    """Every import of a module, wherever it stands; for ``from a import b`` that is ``a.b``."""

    def imported(module: str, line: int, lazy: bool, typing: bool, level: int = 0) -> Import:
        bare = module.split(".")[0] in OURS and not level
        module = module.removeprefix(f"{SHARED}.")
        return Import(module=module, bare=bare, line=line, lazy=lazy, typing=typing)

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in statements(node):
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            checking = typing or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield imported(alias.name, child.lineno, lazy, typing)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = name.split(".")[: len(name.split(".")) - child.level + is_package]
                    base = ".".join([*above, base] if base else above)
                for alias in child.names:
                    yield imported(f"{base}.{alias.name}", child.lineno, lazy, typing, child.level)
            yield from walk(child, inside, checking)

    yield from walk(tree, lazy=False, typing=False)


def within(module: str, allowed: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or inside one of these packages."""
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def may_not(name: str, wanted: str) -> str:
    """Why module ``name`` may not import ``wanted`` of ours, and what to do instead; "" when it
    may.
    """
    package, other = name.split(".")[0], wanted.split(".")[0]
    if other not in OURS or within(name, COMPOSITION_ROOTS):
        return ""
    for room in PLUGINS:
        if within(name, (room,)) and name != room and within(wanted, (room,)) and wanted != room:
            sibling = wanted.split(".")[len(room.split("."))]
            shared = sibling.startswith("_") or Path(ROOT, *room.split("."), sibling).is_dir()
            if not shared and not wanted.startswith(name):
                return f"plugins do not know their siblings: move what both need beside {room}"
    if package == other:
        return ""
    if package == "chaos":
        return (
            "chaos holds the shared words: pass the object in from chaos/cli.py, or move the word"
            " to chaos"
        )
    if package == "recovery" and not within(wanted, ("chaos", *RECOVERY_MAY)):
        return (
            "recovery serves anybody's training script: take it as an argument or through a"
            " Protocol"
        )
    if package == "recovery" and within(wanted, ("chaos",)) and wanted != "chaos":
        only = f"{', '.join(RECOVERY_MAY)} only"
        return "" if within(wanted, RECOVERY_MAY) else f"recovery may use {only}: pass the rest in"
    if package == "harness" and other == "reports":
        return "reports read stored runs: let the caller render"
    if package == "reports" and other == "recovery":
        return "reports read what the harness derived: add it to harness.judge.results"
    if (
        package == "reports"
        and other == "harness"
        and wanted != "harness"
        and not within(wanted, REPORTS_MAY)
    ):
        return "reports read stored runs only: add what is needed to harness.judge"
    return ""


def heavy(name: str, found: Import) -> str:
    """Why a heavy import stands in the wrong place; "" when it may stand there."""
    top = found.module.split(".")[0]
    if top not in HEAVY or found.typing:
        return ""
    if top == "torch":
        if within(name, TORCH_AT_TOP) or (found.lazy and within(name, TORCH_IN_FUNCTIONS)):
            return ""
        where = "recovery/collectives or recovery/state"
        return f"torch belongs in {where}, or inside a function of a workload, fault or rank module"
    if found.lazy or name in PLOTS_AT_TOP:
        return ""
    return f"import {top} inside the function that needs it: chaos --help must not pay for it"


def of_users(name: str, wanted: str) -> str:
    """Why an import breaks the border between us and the frameworks of users' scripts; "" when it
    does not.
    """
    inside = within(name, (INTEGRATIONS,))
    if wanted.split(".")[0] in FRAMEWORKS and not inside:
        return f"a framework is imported in its own file of {INTEGRATIONS} only"
    if within(wanted, (INTEGRATIONS,)) and not inside:
        return f"{INTEGRATIONS} is for users' scripts: nothing of ours needs it"
    ours = wanted.split(".")[0] in OURS and wanted != "chaos"
    if inside and ours and not within(wanted, ("chaos.beacon", INTEGRATIONS)):
        return f"{INTEGRATIONS} may use chaos.beacon only: users' environments have nothing else"
    return ""


def violations(root: Path) -> list[str]:
    """Every breach of the import rule below ``root``, each with what to do instead."""
    wrong = []
    for name, path in modules(root).items():
        tree = tree_at(path)
        where = path.relative_to(root)
        for found in imports(tree, name, path.name == "__init__.py"):
            line = f"{where}:{found.line}: imports {found.module}"
            if found.bare:
                wrong.append(
                    f"{line}; write {SHARED}.{found.module}: a user may have a"
                    f" {found.module.partition('.')[0]} of their own"
                )
            if why := may_not(name, found.module):
                wrong.append(f"{line}; {why}")
            if why := of_users(name, found.module) or heavy(name, found):
                wrong.append(f"{line}; {why}")
    return wrong


@pytest.mark.slow
def test_import_rule() -> None:
    others = (
        path
        for room in ("benchmarks", "examples", "tests")
        for path in ROOT.glob(f"{room}/**/*.py")
    )
    bare = [
        f"{path.relative_to(ROOT)}:{found.line}: imports {found.module} as a bare name"
        for path in others
        for found in imports(tree_at(path), "", False)
        if found.bare
    ]
    found = [*violations(ROOT), *bare]
    assert not found, "\n".join(["the import rule of docs/architecture.md is broken:", *found])


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        (
            "chaos/fault/base.py",
            "from trainchaos.harness import measure",
            "chaos holds the shared words",
        ),
        (
            "chaos/fault/base.py",
            "def f():\n    from trainchaos.recovery.transport import wire",
            "chaos holds the shared words",
        ),
        ("chaos/plan.py", "import torch", "torch belongs in"),
        (
            "chaos/faults/a.py",
            "from trainchaos.chaos.faults.b import B",
            "plugins do not know their siblings",
        ),
        (
            "chaos/faults/a.py",
            "from trainchaos.chaos.faults import b",
            "plugins do not know their siblings",
        ),
        ("chaos/faults/a.py", "from . import b", "plugins do not know their siblings"),
        ("chaos/faults/a.py", "import torch", "torch belongs in"),
        (
            "recovery/data/order.py",
            "from trainchaos.chaos.scenario.model import Cell",
            "recovery may use chaos.events.log, chaos.errors, chaos.plugins, chaos.stats only",
        ),
        (
            "recovery/data/order.py",
            "from trainchaos.harness.host.corpus import prepare",
            "recovery serves anybody's",
        ),
        (
            "recovery/policy/strategies/a.py",
            "from trainchaos.recovery.policy.strategies.b import B",
            "plugins do not know",
        ),
        ("recovery/supervise/controller.py", "def f():\n    import torch", "torch belongs in"),
        (
            "harness/judge/measure/measure.py",
            "from trainchaos.reports import html",
            "reports read stored runs",
        ),
        ("harness/judge/measure/measure.py", "import pandas", "import pandas inside the function"),
        ("harness/run/orchestrator.py", "def f():\n    import torch", "torch belongs in"),
        ("harness/workloads/a.py", "import torch", "torch belongs in"),
        (
            "reports/html.py",
            "from trainchaos.harness.run.orchestrator import Orchestrator",
            "reports read stored runs only",
        ),
        (
            "reports/html.py",
            "from trainchaos.recovery.transport.wire import Join",
            "reports read what the harness derived",
        ),
        ("reports/html.py", "import matplotlib.pyplot", "import matplotlib inside the function"),
        ("harness/rank/rank.py", "import recovery.rank", "a user may have a recovery"),
        ("reports/html.py", "def f():\n    from chaos import errors", "write trainchaos.chaos"),
        ("harness/script/arm.py", "import lightning.pytorch", "in its own file of"),
        ("chaos/plan.py", "from trainchaos.chaos.integrations import plain", "for users' scripts"),
        (
            "chaos/integrations/a.py",
            "from trainchaos.chaos.errors import ChaosError",
            "chaos.beacon only",
        ),
    ],
)
def test_a_breach_is_found_and_says_what_to_do(
    tmp_path: Path, module: str, source: str, complaint: str
) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found = violations(tmp_path)
    assert found, "a breach was not seen"
    assert all(complaint in line for line in found), found
    assert found[0].startswith(f"{module}:")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("chaos/cli.py", "def run():\n    from trainchaos.harness.run import runner"),
        (
            "chaos/faults/a.py",
            "from trainchaos.chaos.fault.base import Fault\ndef f():\n    import torch",
        ),
        (
            "recovery/data/order.py",
            "from trainchaos.chaos.events.log import Kind\nfrom trainchaos.chaos import errors",
        ),
        ("recovery/collectives/a.py", "import torch"),
        (
            "harness/workloads/a.py",
            "def f():\n    from trainchaos.harness.workloads._shared import x\n    import torch",
        ),
        (
            "harness/launch/workload.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        ),
        (
            "reports/html.py",
            "from trainchaos.harness.judge.results import Results\n"
            "from trainchaos.chaos.events.log import Event",
        ),
    ],
)
def test_what_is_allowed_is_not_complained_about(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == []
