"""Lines that msgspec reads are read as the exact reader reads them, or left to it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.search.simulate import KILL, cell_of, play
from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events import budget as module
from trainchaos.chaos.events.budget import event_of
from trainchaos.chaos.events.log import Kind, read_actor

LINE = {
    "kind": "step_committed",
    "actor": "w0",
    "seq": 7,
    "time_ns": 5,
    "generation": 1,
    "step": 3,
    "data": {
        "rank": 0,
        "world": 2,
        "samples": 4,
        "loss": 0.25,
        "lr": 0.5,
        "grad_norm": None,
        "optimizer_step": 3,
        "scheduler_step": 3,
        "seconds": {"data": 0.5},
    },
}
ODD = (
    *("NaN", "Infinity", "-0", "-0.0", "1e400", "1e-400", "9223372036854775808", "1.0"),
    *("123456789012345678901234567890", "true", "null", '"\\ud800"', '"\\u0000"', "[]", "{}"),
    *('"é\U0001f600"', "[[]]", f"[[{'0,' * 2_000}0]]", "[{}]", '{"data":{"data":[]}}'),
    *(
        "[1,2,true]",
        "[1,1.0]",
        "[-1]",
        "01",
        "+1",
        ".5",
        "1.",
        "tru",
        "[1,]",
        '{"a":1,"a":2}',
        '"\t"',
        '"\\q"',
        "",
    ),
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """All lines of a simulated job."""
    root = tmp_path_factory.mktemp("lines")
    play(cell_of("hot-spare", [KILL], steps=40), root, seed=1)
    (folder,) = {path.parent for path in root.rglob("orchestrator.jsonl")}
    return [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines()]


def told(raw: bytes) -> str:
    """What is read of a line."""
    try:
        return repr(event_of(raw, "w0"))
    except LogError as error:
        return str(error)


def alike(monkeypatch: pytest.MonkeyPatch, raws: list[bytes]) -> None:
    fast = [told(raw) for raw in raws]
    monkeypatch.setattr(module, "_DECODE", None)
    assert fast == [told(raw) for raw in raws]


def test_values_of_a_log_are_those_that_were_written(
    real: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for raw in real:
        due = json.loads(raw)
        event = event_of(raw, due["actor"])
        assert event.kind is Kind(due["kind"]) and repr(event.data) == repr(due["data"])
        assert all(
            type(value) is not float or math.isfinite(value) for value in event.data.values()
        )
    alike(monkeypatch, real)


def changed(rng: random.Random, raw: bytes) -> bytes:
    place, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    match rng.randrange(3):
        case 0:
            return raw[:place] + raw[min(end, place + 3) :]
        case 1:
            return raw[:place] + bytes([rng.randrange(256)]) + raw[place:]
        case _:
            return raw[:place] + rng.choice(ODD).encode() + raw[place:]


@pytest.mark.slow
@pytest.mark.parametrize("count", [4_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_lines_that_were_changed_anywhere_are_read_or_refused_alike(
    real: list[bytes], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rng = random.Random(3)
    alike(monkeypatch, [changed(rng, rng.choice(real)) for _ in range(count)])


def odd_ones() -> Iterator[bytes]:
    text = json.dumps(LINE)
    yield text.encode()
    for name, value in (*LINE.items(), *LINE["data"].items()):  # type: ignore[attr-defined]
        for odd in ODD:
            yield text.replace(f'"{name}": {json.dumps(value)}', f'"{name}": {odd}', 1).encode()
        yield text.replace(f'"{name}": {json.dumps(value)}', "", 1).encode()
        yield text.replace(f'"{name}"', f'"x{name}"', 1).encode()
        yield text.replace("{", f'{{"{name}": 1, ', 1).encode()
    yield text.encode() + b" "
    yield b"\xef\xbb\xbf" + text.encode()
    yield text.replace('"w0"', '"w1"').encode()
    yield text.encode("utf-16")
    yield text.replace("w0", "w\udcff").encode(errors="surrogateescape")
    yield json.dumps({name: value for name, value in LINE.items() if name != "data"}).encode()
    yield json.dumps({**LINE, "kind": "actor_ended", "data": {}}).encode()


def test_odd_values_are_read_or_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    alike(monkeypatch, list(odd_ones()))


def test_numbers_are_the_nearest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, first = random.Random(5), json.dumps(LINE)

    def number() -> str:
        digits = "".join(rng.choices("0123456789", k=rng.randrange(1, 25)))
        return f"{rng.randrange(10)}.{digits}e{rng.randrange(-320, 300)}"

    alike(monkeypatch, [first.replace("0.25", number()).encode() for _ in range(1_500)])


def test_an_actor_is_kept_once_and_as_the_line_names_it(tmp_path: Path) -> None:
    path = tmp_path / "w0.jsonl"
    path.write_text("".join(json.dumps({**LINE, "seq": n}) + "\n" for n in range(9)))
    one, other = read_actor(path).events[-2:]
    assert one.actor is other.actor
    assert event_of(json.dumps(LINE).encode(), "w9").actor == "w0"
