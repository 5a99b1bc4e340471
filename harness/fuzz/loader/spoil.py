"""Spoils scenario files: values, keys and lists of the tree, or the bytes of the text
(``garble``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainchaos.harness.fuzz.draw.draw import Dice
from trainchaos.harness.fuzz.loader.garble import MANY, MOST_BYTES, OF_TEXTS

Tree = Any
Path = tuple[str | int, ...]

WORDS = (
    "",
    "one",
    "all",
    "latest",
    "1",
    "0",
    "-1",
    "1e999",
    "2s",
    "1e300h",
    "${vars.n}",
    "${matrix.a}",
    "${",
    "${env:X:-}",
    "${env:HOME}",
    "${vars.\u001b[31m}",
    "< 3",
    "p95 < 5s",
    "max < 1e999s",
    "none.csv",
    ".",
    "..",
    "/",
    "/dev/zero",
    "\u0000",
    "\ud7ff",
    "\u202e",
    "\u2028",
    "\u001b]0;x\u0007",
    "true",
    "~",
    "x: y",
    "[",
    "NaN",
    "a\nb",
    "\t",
    "\ufeff",
)
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    300,
    10**9,
    2**31,
    2**63,
    10**40,
    -(2**70),
    0.0,
    -1.5,
    0.3,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    [None],
    {"x": {}},
    {"": 1},
)
DEEP = (3, 21, 70)
LONG = (300, 20_000, 400_000)
KEYS = (
    "extends",
    "trace",
    "matrix",
    "include",
    "exclude",
    "command",
    "params",
    "x",
    "",
    "a.b",
    "\u001b",
    "faults",
)
NAMED = 40
"""Characters of a place's name that count its draws."""


@dataclass(frozen=True, kw_only=True)
class SpoiltFile:
    """A spoilt file. ``tree``: its content, None once its text was spoilt; ``how``: what was done,
    in order.
    """

    data: bytes
    tree: Tree
    how: tuple[str, ...]


def text_of(tree: Tree) -> str:
    """A tree as YAML, with each fault on its own line."""
    if not isinstance(tree, dict) or not tree:
        return json.dumps(tree) + "\n"
    lines = []
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            lines += [f"{_key(key)}:", *(f"  - {json.dumps(one)}" for one in value)]
        else:
            lines.append(f"{_key(key)}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.isidentifier() else json.dumps(key)


def fresh(tree: Tree) -> SpoiltFile:
    """An unspoilt file."""
    return SpoiltFile(data=text_of(tree).encode(), tree=tree, how=())


def spoilt(before: SpoiltFile, dice: Dice) -> SpoiltFile:
    """The same, spoilt once more."""
    if before.tree is not None and dice.chance(0.75):
        how = dice.pick("spoil", tuple(OF_TREES))
        try:
            tree = OF_TREES[how](copy.deepcopy(before.tree), dice)
            text = None if tree is None else text_of(tree)
        except RecursionError:  # nested again and again
            text = None
        if text is not None:
            return SpoiltFile(data=text.encode(), tree=tree, how=(*before.how, how))
    how = dice.pick("spoil", tuple(OF_TEXTS))
    return SpoiltFile(data=OF_TEXTS[how](before.data, dice), tree=None, how=(*before.how, how))


# ---- ways to spoil a tree: each changes its copy, or returns None if it cannot


def places(tree: Tree, path: Path = ()) -> Iterator[Path]:
    """Every place below the root."""
    inside: Any = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, child in inside:
        yield (*path, key)
        yield from places(child, (*path, key))


def at(tree: Tree, path: Path) -> Any:
    """The value at a place."""
    for part in path:
        tree = tree[part]
    return tree


def _place(tree: Tree, dice: Dice, fits: Callable[[Any], bool] = lambda value: True) -> Path | None:
    """A random place; rarely drawn names are preferred."""
    found: dict[str, list[Path]] = {}
    for path in places(tree):
        if fits(at(tree, path)):
            name = ".".join("#" if isinstance(part, int) else part for part in path)[:NAMED]
            found.setdefault(name, []).append(path)
    return dice.rng.choice(found[dice.pick("place", sorted(found))]) if found else None


def _put(tree: Tree, path: Path | None, value: Any) -> Tree | None:
    if path is None:
        return None
    at(tree, path[:-1])[path[-1]] = value
    return tree


def _valued(tree: Tree, dice: Dice) -> Tree | None:
    return _put(tree, _place(tree, dice), copy.deepcopy(dice.rng.choice(ODD)))


def _nudged(tree: Tree, dice: Dice) -> Tree | None:
    """A nearby number of the same type, which may well be valid."""
    path = _place(tree, dice, lambda value: type(value) in (int, float))
    if path is None:
        return None
    value = at(tree, path)
    return _put(
        tree,
        path,
        dice.rng.choice((value + 1, value - 1, value * 2, value * 10, value * 1000, 0, 1)),
    )


def _worded(tree: Tree, dice: Dice) -> Tree | None:
    return _put(tree, _place(tree, dice), dice.rng.choice(WORDS))


def _removed(tree: Tree, dice: Dice) -> Tree | None:
    path = _place(tree, dice)
    if path is None:
        return None
    del at(tree, path[:-1])[path[-1]]
    return tree


def _keyed(tree: Tree, dice: Dice) -> Tree | None:
    """Another key in some mapping, with any value of the file."""
    path = _place(tree, dice, lambda value: isinstance(value, dict))
    holder = tree if path is None or dice.chance(0.3) else at(tree, path)
    other = _place(tree, dice)
    if not isinstance(holder, dict) or other is None:
        return None
    name = dice.rng.choice([*KEYS, *(part for part in other if isinstance(part, str))])
    holder[name] = copy.deepcopy(at(tree, other))
    return tree


def _renamed(tree: Tree, dice: Dice) -> Tree | None:
    path = _place(tree, dice)
    if path is None or not isinstance(path[-1], str):
        return None
    holder = at(tree, path[:-1])
    name = dice.rng.choice((path[-1][:-1], path[-1] + "s", path[-1].upper(), *KEYS))
    holder[name] = holder.pop(path[-1])
    return tree


def _doubled(tree: Tree, dice: Dice) -> Tree | None:
    """A list with its elements repeated, with or without distinct names."""
    path = _place(tree, dice, lambda value: isinstance(value, list) and bool(value))
    if path is None:
        return None
    value, own = at(tree, path), dice.chance(0.7)
    made = []
    most = MOST_BYTES // (1 + len(json.dumps(value)) // len(value))
    for number in range(min(max(len(value), dice.rng.choice(MANY)), most)):
        one = copy.deepcopy(value[number % len(value)])
        if own and isinstance(one, dict) and "id" in one:
            one["id"] = f"n{number}"
        made.append(one + number if own and type(one) is int else one)
    return _put(tree, path, made)


def _grown(tree: Tree, dice: Dice) -> Tree | None:
    """A mapping with very many keys."""
    path = _place(tree, dice, lambda value: isinstance(value, dict))
    if path is None:
        return None
    at(tree, path).update({f"k{number}": number for number in range(dice.rng.choice(MANY))})
    return tree


def _nested(tree: Tree, dice: Dice) -> Tree | None:
    path = _place(tree, dice)
    if path is None:
        return None
    value, lists = at(tree, path), dice.chance(0.5)
    for _ in range(dice.rng.choice(DEEP)):
        value = [value] if lists else {"x": value}
    return _put(tree, path, value)


def _wrapped(tree: Tree, dice: Dice) -> Tree | None:
    path = _place(tree, dice)
    return None if path is None else _put(tree, path, [at(tree, path)])


def _long(tree: Tree, dice: Dice) -> Tree | None:
    letter, count = (
        dice.rng.choice(("x", "9", "\u202e", " ", "${vars.n}", "(a+)+")),
        dice.rng.choice(LONG),
    )
    return _put(tree, _place(tree, dice), letter * (count // len(letter)))


def _multiplied(tree: Tree, dice: Dice) -> Tree | None:
    """A matrix of many axes, or of long ones."""
    if not isinstance(tree, dict):
        return None
    axes, values = dice.rng.choice(
        ((1, 900), (2, 40), (2, 900), (5, 3), (9, 9), (60, 2), (1000, 2))
    )
    matrix = {f"a{number}": list(range(values)) for number in range(axes)}
    kept = tree.get("matrix")
    tree["matrix"] = {**kept, **matrix} if isinstance(kept, dict) and dice.chance(0.5) else matrix
    return tree


def _referred(tree: Tree, dice: Dice) -> Tree | None:
    """A value replaced by a reference to vars, or vars that refer to themselves."""
    path = _place(tree, dice)
    if path is None or not isinstance(tree, dict):
        return None
    value = copy.deepcopy(at(tree, path))
    given = tree.get("vars")
    name = dice.rng.choice(("n", "m"))
    tree["vars"] = {
        **(given if isinstance(given, dict) else {}),
        name: dice.rng.choice((value, "${vars.n}")),
    }
    return _put(tree, path, f"${{vars.{name}}}") if path[0] != "vars" else tree


OF_TREES: Mapping[str, Callable[[Tree, Dice], Tree | None]] = {
    "an odd value": _valued,
    "another number": _nudged,
    "an odd word": _worded,
    "a key removed": _removed,
    "an unknown key": _keyed,
    "a key renamed": _renamed,
    "a list repeated": _doubled,
    "many keys": _grown,
    "nested": _nested,
    "wrapped": _wrapped,
    "a long text": _long,
    "a matrix": _multiplied,
    "a reference": _referred,
}
