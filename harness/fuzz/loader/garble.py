"""Spoils the text of a file: bits, parts, words and lines of it, regardless of their meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainchaos.harness.fuzz.draw.draw import Dice

TOKENS = (
    b"&a ",
    b"*a",
    b"\t",
    b"\x00",
    b"\x1b[2J",
    b"\xff",
    b"\xc3",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\xe2\x80\xa8",
    b"\xc2\x85",
    b"%YAML 1.1\n---\n",
    b"---\n",
    b"...\n",
    b"!!python/object:os.system ",
    b"!!binary ",
    b"? ",
    b"| ",
    b"> ",
    b"<<: ",
    b"# ",
    b"'",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b": ",
    b"- ",
    b", ",
    b"\r",
    b"\r\n",
    b"\n",
    b"\\",
    b"`",
    b"@",
    b"${",
    b"0x",
    b"0o9",
    b"1:30",
    b"[" * 70,
    b"{a: " * 30,
    b"- " * 70,
    b"x" * 5000,
    b"9" * 5000,
)
MANY = (2, 30, 400, 3000)
MOST_BYTES = 2_000_000
"""Size limit of a repeated list or repeated lines: more than is ever read."""


def _somewhere(data: bytes, dice: Dice) -> int:
    return dice.rng.randint(0, len(data))


def _flipped(data: bytes, dice: Dice) -> bytes:
    made = bytearray(data)
    for _ in range(dice.rng.choice((1, 1, 3, 20)) if made else 0):
        made[dice.rng.randrange(len(made))] ^= 1 << dice.rng.randrange(8)
    return bytes(made)


def _cut(data: bytes, dice: Dice) -> bytes:
    first, last = sorted((_somewhere(data, dice), _somewhere(data, dice)))
    return data[:first] if dice.chance(0.5) else data[:first] + data[last:]


def _token(data: bytes, dice: Dice) -> bytes:
    token = dice.rng.choice(TOKENS)
    place = _somewhere(data, dice)
    return data[:place] + token + data[place:]


def _lines(data: bytes, dice: Dice) -> bytes:
    """Some lines repeated, removed, moved, or indented."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    first = dice.rng.randrange(len(lines))
    some = lines[first : first + dice.rng.choice((1, 1, 2, 5))]
    how = dice.rng.choice(("again", "again", "gone", "moved", "indented"))
    if how == "again":
        times = min(dice.rng.choice(MANY), 1 + MOST_BYTES // (1 + sum(map(len, some))))
        return b"".join([*lines[:first], *some * times, *lines[first + len(some) :]])
    rest = [*lines[:first], *lines[first + len(some) :]]
    if how == "gone":
        return b"".join(rest)
    if how == "indented":
        some = [dice.rng.choice((b" ", b"  ", b"\t", b"- ")) + line for line in some]
    else:
        first = dice.rng.randint(0, len(rest))
    return b"".join([*rest[:first], *some, *rest[first:]])


def _anchored(data: bytes, dice: Dice) -> bytes:
    """An anchor at a value, and an alias of it."""
    lines = data.splitlines(keepends=True)
    marked = [number for number, line in enumerate(lines) if b": " in line]
    if len(marked) < 2:
        return b"a: &a [1]\nb: *a\n" + data
    one, other = sorted(dice.rng.sample(marked, 2))
    lines[one] = lines[one].replace(b": ", b": &a ", 1)
    lines[other] = lines[other].partition(b": ")[0] + b": *a\n"
    return b"".join(lines)


OF_TEXTS: Mapping[str, Callable[[bytes, Dice], bytes]] = {
    "bits flipped": _flipped,
    "cut": _cut,
    "a token": _token,
    "lines": _lines,
    "an anchor": _anchored,
}
