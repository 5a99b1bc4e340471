"""House style that a linter does not know: sizes, docstrings, waits, absolute times."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.project.parsed import ROOT, calls, sources, statements, tree_at

PACKAGES = ("chaos", "recovery", "harness", "reports")
LONGEST_FUNCTION = 60
LONGEST_FILE = 800
TOP = {
    *(".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"),
    *("SECURITY.md", "action.yml", "benchmarks", "chaos", "constraints.txt", "docs", "examples"),
    *("harness", "mkdocs.yml", "pyproject.toml", "recovery", "reports", "scenarios", "setup.py"),
    *("templates", "tests", "trainchaos"),
}

UNBOUNDED = {
    "recovery/rank/joining.py: _PLACE.get()": "a context variable: nothing is waited for",
    "recovery/rank/job.py: self.agent.orders.get()": (
        "the agent ends the process when the supervisor is gone"
    ),
    "recovery/checkpoint/files/pieces.py: thread.join()": (
        "each ends with the piece it reads, as this thread did"
    ),
    "recovery/collectives/group.py: work.wait()": (
        "the operation has ended; gloo and NCCL bound it besides"
    ),
    "harness/peers/common.py: word.wait()": "the group's timeout, which is the stack's to choose",
    "harness/peers/torchft_train.py: word.wait()": (
        "torchft's timeout, which is the stack's to choose"
    ),
    "harness/peers/torchft_train.py: self.manager.allreduce(flat).wait()": "the same",
    "harness/peers/torch_reconfigure.py: c10d._reconfigure(uuid, handles, timeout=limit).wait()": (
        "the timeout given; this work refuses another one"
    ),
}
"""Waits without a bound of their own -> what bounds them."""

DEADLINE_S = 60
CLOCK = re.compile(r"\btime\.(monotonic|perf_counter|process_time|thread_time|time)(_ns)?\(\)")
DURATION = re.compile("took|elapsed")

STARTERS = ("subprocess.run", "subprocess.check_output", "subprocess.check_call")

Rule = Callable[[str, ast.Module], Iterator[str]]


def name_of(node: ast.AST) -> str:
    """``a`` or ``a.b``, in which a word of ``a`` alone is looked at; else empty."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def functions(
    tree: ast.AST, outer: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """(qualified name, function, whether a class or the module holds it), nested ones included."""
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}{node.name}"
            yield name, node, not isinstance(tree, ast.FunctionDef)
            yield from functions(node, f"{name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{outer}{node.name}.")
        else:
            yield from functions(node, outer)


def short_functions(path: str, tree: ast.Module) -> Iterator[str]:
    """No function over LONGEST_FUNCTION lines."""
    for name, node, _ in functions(tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > LONGEST_FUNCTION:
            yield (
                f"{path}:{node.lineno}: {name} has {lines} lines, over {LONGEST_FUNCTION}: split it"
            )


@cache
def told() -> frozenset[str]:
    """Methods that some class documents: a class that has one too need not say it again."""
    classes = (
        node
        for path in sources(*PACKAGES)
        for node in ast.walk(tree_at(ROOT / path))
        if isinstance(node, ast.ClassDef)
    )
    methods = (node for found in classes for node in found.body)
    return frozenset(
        method.name
        for method in methods
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
    )


def documented(path: str, tree: ast.Module) -> Iterator[str]:
    """Modules, public classes and functions, and public methods where they are first of a name."""
    if ast.get_docstring(tree) is None:
        yield f"{path}:1: the module has no docstring"

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if child.name.startswith("_"):
                    continue
                overload = any("setter" in ast.unparse(d) for d in child.decorator_list)
                again = isinstance(node, ast.ClassDef) and child.name in told()
                if ast.get_docstring(child) is None and not overload and not again:
                    yield f"{path}:{child.lineno}: {child.name} has no docstring"
                if isinstance(child, ast.ClassDef):
                    yield from walk(child)

    yield from walk(tree)


def bounded(path: str, tree: ast.Module) -> Iterator[str]:
    """No .wait(), .get(), .join(), .acquire() without arguments, except as listed in UNBOUNDED."""
    for node in calls(tree):
        if not isinstance(node.func, ast.Attribute):
            continue
        method = node.func.attr
        if method in ("wait", "get", "join", "acquire", "communicate"):
            call = "" if node.args or node.keywords else ast.unparse(node)
            if call and f"{path}: {call}" not in UNBOUNDED:
                yield f"{path}:{node.lineno}: {call} may wait for ever: give it a timeout"
        elif any(k.arg == "timeout" for k in node.keywords):
            continue
        elif (
            any(name.endswith(f".{method}") for name in STARTERS)
            and ast.unparse(node.func) in STARTERS
        ):
            yield f"{path}:{node.lineno}: {ast.unparse(node.func)} has no timeout"


def no_mutable_state(path: str, tree: ast.Module) -> Iterator[str]:
    """No list, dict or set at module level that somebody could change (constants are upper
    case).
    """
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            literal = isinstance(
                node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp
            )
            if literal and not target.lstrip("_").isupper() and target != "__all__":
                yield f"{path}:{node.lineno}: {target} is mutable module state: pass it in"


def number(node: ast.AST, known: dict[str, float]) -> float | None:
    """What a literal, a constant of the module, or their product is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        left, right = number(node.left, known), number(node.right, known)
        if left is not None and right:
            return left * right if isinstance(node.op, ast.Mult) else left / right
    return None


def assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names, and what each is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))


def bounds(test: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is to be less than what."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
                if isinstance(op, ast.Lt | ast.LtE):
                    yield left, right
                elif isinstance(op, ast.Gt | ast.GtE):
                    yield right, left


def no_absolute_time(path: str, tree: ast.Module) -> Iterator[str]:
    """No assert that something took less than so many seconds: a slow machine takes longer. A
    deadline of minutes only ends a hang.
    """
    known: dict[str, float] = {}
    for name, value in assigned(tree):
        if name.isupper() and (found := number(value, known)) is not None:
            known[name] = found
    for _, function, _ in functions(tree):
        clocked = {name for name, value in assigned(function) if CLOCK.search(ast.unparse(value))}
        for check in ast.walk(function):
            if not isinstance(check, ast.Assert):
                continue
            for less, more in bounds(check.test):
                limit = number(more, known)
                words = set(re.findall(r"\w+", ast.unparse(less)))
                timed = CLOCK.search(ast.unparse(less)) or words & clocked
                if limit is not None and (timed or any(map(DURATION.search, words))):
                    in_ns = any(word.endswith("_ns") for word in words)
                    if limit < DEADLINE_S * (1e9 if in_ns else 1):
                        yield (
                            f"{path}:{check.lineno}: {ast.unparse(less)} < {limit:g} fails on a"
                            " slow machine: count calls, messages or bytes, or hold it against"
                            " another act in the same run (tests/support/costs.py); a figure of"
                            " performance belongs into benchmarks/"
                        )


RULES: list[Rule] = [short_functions, documented, bounded, no_mutable_state]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_product_keeps(rule: Rule) -> None:
    found = [line for path in sources(*PACKAGES) for line in rule(path, tree_at(ROOT / path))]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_the_tests_keep_to_no_absolute_time() -> None:
    found = [
        line for path in sources("tests") for line in no_absolute_time(path, tree_at(ROOT / path))
    ]
    assert not found, "\n".join(found)


def test_files_are_short() -> None:
    long = {path: text.count("\n") for path, text in sources(*PACKAGES).items()}
    found = [
        f"{path} has {lines} lines, over {LONGEST_FILE}"
        for path, lines in long.items()
        if lines > LONGEST_FILE
    ]
    assert not found, "\n".join(found)


def test_what_commands_leave_here_is_not_committed() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert {name.split("/")[0] for name in said.stdout.splitlines()} == TOP


def test_no_promises_in_comments() -> None:
    marks = re.compile("#.*(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + ")")
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in sources(*PACKAGES, "tests").items()
        for number, line in enumerate(text.splitlines(), start=1)
        if marks.search(line)
    ]
    assert not found, "\n".join(found)


def test_tests_do_not_sleep() -> None:
    found = [
        f"{path}:{node.lineno}: wait for an event with a deadline instead"
        for path, text in sources("tests").items()
        if "sleep" in text
        for node in calls(tree_at(ROOT / path))
        if name_of(node.func) in ("time.sleep", "sleep")
    ]
    assert not found, "\n".join(found)


def test_every_listed_wait_still_exists() -> None:
    for entry in UNBOUNDED:
        path, call = entry.split(": ", 1)
        made = {ast.unparse(n) for n in calls(tree_at(ROOT / path))}
        assert call in made, f"{entry} is gone: remove it from the list"


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (short_functions, "def f() -> None:\n" + "    pass\n" * LONGEST_FUNCTION),
        (documented, "x = 1"),
        (documented, "'''m'''\nclass A:\n    '''a'''\n    def f(self) -> None: ..."),
        (bounded, "event.wait()"),
        (bounded, "queue.get()"),
        (bounded, "subprocess.run(['x'])"),
        (no_mutable_state, "seen = []"),
        (no_absolute_time, "def f():\n    assert time.monotonic() - began_s < 5.0"),
        (no_absolute_time, "def f():\n    a = b = 1\n    assert 1 > time.process_time() - a"),
        (no_absolute_time, "MOST_S = 2.0\ndef f():\n    assert took_s <= MOST_S / 2"),
        (no_absolute_time, "def f():\n    at = time.monotonic()\n    assert end - at < 3"),
        (no_absolute_time, "def f():\n    s = time.perf_counter_ns()\n    assert e_ns - s < 5e9"),
        (no_absolute_time, "def f():\n    assert 0 <= run.elapsed_s < 10"),
        (no_mutable_state, "cache: dict[str, int] = {}"),
    ],
)
def test_a_breach_is_seen(rule: Rule, source: str) -> None:
    assert list(rule("somewhere.py", ast.parse(source)))
