"""Any file loads, or is refused with one clear error (``tests.support.search.reading``): arbitrary
text, arbitrary trees, and scenarios whose tree or text was spoilt. Defects planted in the loader
are found, and what was found once is mended.
"""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tests.support.fakes.fake_catalogue import CATALOGUE
from tests.support.search.reading import Reader
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.schedule.arrivals import read_trace
from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.play.play import kinds, strategies

ROOT = Path(__file__).resolve().parents[3]
VALID: dict[str, Any] = {
    "version": 1,
    "name": "fuzz",
    "description": "d",
    "tags": ["a"],
    "seed": 3,
    "vars": {"n": 4},
    "workload": {
        "kind": "gpt",
        "size": "nano",
        "ranks": "${vars.n}",
        "steps": 60,
        "global_batch": 16,
        "checkpoint": {"every": 10, "keep": 2},
    },
    "launcher": {"kind": "sim", "nodes": 2, "nodes_per_rack": 2, "params": {}},
    "recovery": "${matrix.recovery}",
    "faults": [
        {
            "id": "a",
            "kind": "process-kill",
            "target": {"role": "worker", "select": "majority"},
            "at": {"step": 5, "phase": "backward", "probability": 0.5},
            "verify": {"signal": 9},
        },
        {
            "id": "b",
            "kind": "straggler",
            "params": {"factor": 2, "grace_s": "1s"},
            "duration": "2s",
            "target": {"select": {"count": 1}, "exclude": {"ranks": [0], "nodes": [1]}},
            "at": {"mtbf": "30s", "max": 3},
        },
        {
            "id": "c",
            "kind": "checkpoint-corrupt",
            "target": {"checkpoint": {"step": 20}},
            "at": {"event": "checkpoint_committed", "nth": 2},
            "retrigger": {"max": 2},
        },
        {
            "id": "d",
            "kind": "node-kill",
            "target": {"rack": 0, "select": {"percent": 50}},
            "at": {"weibull": {"mean": "3s", "shape": 0.7}},
        },
        {
            "id": "e",
            "kind": "partition",
            "target": {"link": {"src": 0, "dst": 1}},
            "duration": {"steps": 3},
            "at": {"from": 3, "until": 9, "every": 2},
            "expect": {"outcome": "masked", "blame": "none"},
        },
        {"id": "f", "kind": "disk-full", "at": {"trace": {"file": "t", "times": [1, 2.5]}}},
    ],
    "sla": {"recovery_time": ["median < 2s", {"check": "max < 5s", "severity": "warn"}]},
    "invariants": ["liveness"],
    "requires": {"cores": 1, "root": False},
    "stop_conditions": [{"when": "failures > 3"}],
    "steady_state": ["committed_steps >= 5 within 60s"],
    "blast_radius": {"max_concurrent_faults": 2, "min_healthy_replicas": 1, "protected_ranks": [3]},
    "matrix": {"recovery": [{"strategy": "hot-spare"}], "include": [], "exclude": []},
    "repeat": 1,
    "baseline": "paired",
}
WORDS = (
    *("", "one", "all", "latest", "1", "0", "-1", "1e999", "2s", "1e300h", "true", "~", "NaN"),
    *("${vars.n}", "${matrix.a}", "${matrix.recovery}", "${", "${env:X:-}", "${env:HOME}"),
    *("${vars.\u001b[31m}", "< 3", "p95 < 5s", "max < 1e999s", "x: y", "[", "a\nb", "\t"),
    *("none.csv", ".", "..", "/", "/dev/zero", "a" * 300),
    *("\u0000", "\ud7ff", "\u202e", "\u2028", "\u001b]0;x\u0007", "\ufeff"),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([10**9, 2**31, 2**63, 10**40, -(2**70), 1e308, 5e-324]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
MANY = st.sampled_from((2, 30, 400, 3000))
LARGE = st.one_of(
    MANY.map(lambda count: {f"k{number}": number for number in range(count)}),
    MANY.map(lambda count: list(range(count))),
    st.builds(
        lambda letter, count: letter * (count // len(letter)),
        st.sampled_from(("x", "9", "\u202e", " ", "${vars.n}", "(a+)+")),
        st.sampled_from((300, 20_000, 400_000)),
    ),
    st.builds(
        lambda depth, lists: json.loads(
            ("[" * depth + "]" * depth) if lists else '{"x":' * depth + "1" + "}" * depth
        ),
        st.sampled_from((3, 21, 70)),
        st.booleans(),
    ),
)
MATRICES = st.sampled_from(((1, 900), (2, 40), (2, 900), (5, 3), (9, 9), (60, 2), (1000, 2))).map(
    lambda size: {f"a{number}": list(range(size[1])) for number in range(size[0])}
)
KEYS = st.one_of(
    st.sampled_from(sorted({*VALID, "extends", "at", "kind", "trace", "select", "from"})),
    st.text(max_size=4),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
FUZZ = settings(
    max_examples=min(50, settings().max_examples),
    deadline=None,
    database=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
Check = Callable[[str | bytes], bool]


def checking(reader: Reader) -> Check:
    """Whether a file loads; fails where it is handled badly."""

    def check(text: str | bytes) -> bool:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        read = reader.read(data)
        assert not read.flaw, read.flaw
        return not read.said

    return check


def reader_of(folder: Path, catalogue: Any) -> Reader:
    """One that has read a good file: the cost of first imports does not count."""
    (folder / "t.csv").write_text("time\n1\n")
    reader = Reader(catalogue=catalogue, folder=folder)
    reader.read(yaml_of(VALID).encode())
    return reader


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """With a small catalogue of our own."""
    return checking(reader_of(tmp_path_factory.mktemp("fuzz"), CATALOGUE))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """With all that ships."""
    return reader_of(tmp_path_factory.mktemp("real"), build_catalogue())


def yaml_of(tree: Any) -> str:
    yaml = YAML(typ="safe", pure=True)
    stream = io.StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()


def places(tree: Any, loc: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place below the root."""
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, child in inside:
        yield (*loc, key)
        yield from places(child, (*loc, key))


PLACES = sorted(places(VALID), key=repr)


def changed(how: str, loc: tuple[Any, ...], value: Any, tree: Any = VALID) -> Any:
    """A copy of the tree with the value at a place deleted, replaced, doubled, wrapped, or under
    another key.
    """
    out = copy.deepcopy(tree)
    holder, key = out, loc[-1]
    try:
        for part in loc[:-1]:
            holder = holder[part]
        holder[key]
    except (KeyError, IndexError, TypeError):  # an earlier change took it away
        return out
    if not isinstance(holder, dict | list):
        return out
    if how == "delete":
        del holder[key]
    elif how == "replace":
        holder[key] = value
    elif how == "wrap":
        holder[key] = [holder[key]] if value else {"x": holder[key]}
    elif how == "double" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    elif how == "repeat" and isinstance(holder, list):
        first = holder[key] if isinstance(holder[key], dict) else {}
        holder += [{**first, "id": f"n{number}"} for number in range(value)]
    elif how == "rename" and isinstance(holder, dict):
        holder[str(value)[:20]] = holder.pop(key)
    return out


HOW = st.sampled_from(["delete", "replace", "wrap", "double", "rename"])


# ---- scenarios of all that ships, spoilt

WORLD = World(kinds=kinds(), strategies=strategies())
TOKENS = (
    *(
        b"&a ",
        b"*a",
        b"\t",
        b"\x00",
        b"\x1b[2J",
        b"\xff",
        b"\xc3",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
    ),
    *(b"\xe2\x80\xa8", b"\xc2\x85", b"%YAML 1.1\n---\n", b"---\n", b"...\n", b"!!binary ", b"? "),
    *(b"!!python/object:os.system ", b"| ", b"> ", b"<<: ", b"# ", b"'", b'"', b"{", b"}", b"["),
    *(b"]", b": ", b"- ", b", ", b"\r", b"\r\n", b"\n", b"\\", b"`", b"@", b"${", b"0x", b"0o9"),
    *(b"1:30", b"[" * 70, b"{a: " * 30, b"- " * 70, b"x" * 5000, b"9" * 5000, b"!\x1b[2J "),
)


def lines_of(tree: Any) -> bytes:
    """A tree as YAML, with each key at the top on its own line."""
    if not isinstance(tree, dict) or not tree:
        return json.dumps(tree).encode()
    return "".join(f"{json.dumps(key)}: {json.dumps(tree[key])}\n" for key in tree).encode()


@st.composite
def garbled(take: st.DrawFn, data: bytes) -> bytes:
    """A text with bits flipped, a part cut out, a token put in, lines repeated, moved or indented,
    or an anchor and an alias.
    """
    somewhere = st.integers(0, len(data))
    how = take(st.sampled_from(("bits", "cut", "token", "again", "moved", "indented", "anchor")))
    if how == "bits":
        made = bytearray(data)
        for place in take(st.lists(somewhere, min_size=1, max_size=20)):
            made[place % len(made)] ^= 1 << take(st.integers(0, 7))
        return bytes(made)
    if how in ("cut", "token"):
        first, last = sorted((take(somewhere), take(somewhere)))
        put = take(st.sampled_from(TOKENS)) if how == "token" else b""
        return data[:first] + put + data[first if put else last :]
    lines = data.splitlines(keepends=True)
    number, other = (take(st.integers(0, len(lines) - 1)) for _ in range(2))
    line = lines[number]
    if how == "anchor":
        lines[number] = line.replace(b": ", b": &a ", 1)
        lines[other] = lines[other].partition(b": ")[0] + take(
            st.sampled_from((b": *a\n", b": &a 1\n"))
        )
    elif how == "again":
        lines[number] = line * min(take(MANY), 1 + 2_000_000 // len(line))
    elif how == "indented":
        lines[number] = take(st.sampled_from((b" ", b"  ", b"\t", b"- "))) + line
    else:
        lines.insert(other, lines.pop(number))
    return b"".join(lines)


@st.composite
def spoilt(take: st.DrawFn) -> bytes:
    """A scenario as ``chaos fuzz`` draws them, whose tree and text were spoilt."""
    dice = Dice(rng=random.Random(take(st.integers(0, 1000))))
    tree: Any = {"vars": {"n": 4}, "matrix": {"a": [1, 2]}, **draw.scenario(dice, WORLD)}
    changes = take(st.integers(0, 3))
    for _ in range(changes):
        path = take(st.sampled_from(sorted(places(tree), key=repr) or [("x",)]))
        if take(st.booleans()) and "faults" in path:
            tree = changed("repeat", ("faults", 0), take(MANY), tree)
        elif path[0] == "matrix":
            tree = changed("replace", ("matrix",), take(MATRICES), tree)
        else:
            tree = changed(take(HOW), path, take(st.one_of(SCALARS, LARGE)), tree)
    data = lines_of(tree)
    for _ in range(take(st.integers(0 if changes else 1, 2))):
        data = take(garbled(data)) if data else data
    return data


PIECES = (
    "a:",
    "- ",
    "\n",
    "  ",
    "{",
    "}",
    "]",
    "&a",
    "*a",
    "!!x",
    "|",
    "\t",
    "faults:",
    "%YAML 1.1",
)
YAML_LIKE = st.lists(st.sampled_from((*WORDS, *PIECES))).map("".join)


@FUZZ
@given(st.one_of(st.text(max_size=200), st.binary(max_size=200), YAML_LIKE))
def test_any_text(check: Check, text: str | bytes) -> None:
    check(text)


@FUZZ
@given(TREES)
def test_any_tree(check: Check, tree: Any) -> None:
    check(json.dumps(tree))


@pytest.mark.slow
@FUZZ
@example([("rename", ("matrix", "recovery"), "\U00010000")])  # JSON writes it as two halves
@given(st.lists(st.tuples(HOW, st.sampled_from(PLACES), TREES), min_size=1, max_size=5))
def test_a_valid_scenario_with_changes(check: Check, changes: list[Any]) -> None:
    tree = VALID
    for how, loc, value in changes:
        tree = changed(how, loc, value, tree)
    check(json.dumps(tree))


@FUZZ
@given(st.one_of(st.text(max_size=80), st.binary(max_size=80)), st.sampled_from(["csv", "json"]))
def test_any_trace(tmp_path_factory: pytest.TempPathFactory, text: str | bytes, kind: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"trace.{kind}"
    path.write_bytes(
        text if isinstance(text, bytes) else f"time\n{text}".encode("utf-8", "surrogatepass")
    )
    try:
        read = read_trace(path)
    except ScenarioError:
        return
    assert read.problems or read.times or read.steps


@pytest.mark.slow
@settings(FUZZ, max_examples=8 if FUZZ.max_examples < 50 else 50)
@given(st.text(max_size=30), SCALARS)
def test_any_override(
    check: Check, tmp_path_factory: pytest.TempPathFactory, path: str, value: Any
) -> None:
    file = tmp_path_factory.getbasetemp() / "valid.yaml"
    file.write_text(json.dumps(VALID))
    for override in (
        f"{path}={value}",
        f"faults.a.{path}={value}",
        f"workload.steps={value}",
        path,
    ):
        try:
            load(file, CATALOGUE, overrides=[override], env={})
        except ScenarioError as error:
            assert str(error)


@pytest.mark.slow
@settings(FUZZ, max_examples=10 if FUZZ.max_examples < 50 else 60)
@given(spoilt())
def test_a_spoilt_scenario_of_all_that_ships(reader: Reader, data: bytes) -> None:
    checking(reader)(data)


@pytest.mark.slow
def test_most_of_what_is_not_spoilt_loads(reader: Reader) -> None:
    dice = Dice(rng=random.Random(1))
    said = [reader.read(lines_of(draw.scenario(dice, WORLD))).said for _ in range(8)]
    assert sum(map(bool, said)) < 6, said


# ---- defects of the loader are seen


REGRESSIONS = sorted((ROOT / "scenarios" / "regressions").glob("*.loader.yaml"))


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_was_found_once_is_mended(path: Path, reader: Reader) -> None:
    assert path.with_suffix(".txt").read_text().startswith("Showed: ")
    checking(reader)(path.read_bytes())
