"""Lines that are read fast are read as the exact reader reads them, or left to it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from operator import is_
from pathlib import Path
from typing import Any

import pytest

from tests.support.search.simulate import KILL, cell_of, play
from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events import lines as module
from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.log import Kind, read_actor

OF_AN_ACTOR = 300  # bytes of its name, which its file is charged for
NEED = "msgspec is not installed"
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
    "NaN",
    "Infinity",
    "-0",
    "-0.0",
    "1e400",
    "1e-400",
    "123456789012345678901234567890",
    "9223372036854775808",
    "1.0",
    "true",
    "null",
    '"\\ud800"',
    '"\\u0000"',
    '"é\U0001f600"',
    "[]",
    "{}",
    "[[]]",
    f"[[{'0,' * 2_000}0]]",
    f'{{"data":[{"[]," * 500}0]}}',
    "[{}]",
    '{"data":{"data":{"data":[]}}}',
    "[1,2,3,4,5,6,7,8,99999,100000]",
    "[1,2,3,4,5,6,7,8,true]",
    "[1,2,3,4,5,6,7,8,1.0]",
    "[1,2,3,4,5,6,7,8,-1]",
    "[1,2,3,4,5,6,7,8,9,10]",
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
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """All lines of a simulated job."""
    root = tmp_path_factory.mktemp("lines")
    play(cell_of("hot-spare", [KILL], steps=40), root, seed=1)
    (folder,) = {path.parent for path in root.rglob("orchestrator.jsonl")}
    files = sorted(folder.glob("*.jsonl"))
    return [line for path in files for line in path.read_bytes().splitlines()]


def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DECODE", None)


def said(budget: Budget, raw: bytes, actor: str) -> str:
    try:
        event = budget.read(raw, actor)
    except LogError as error:
        return str(error)
    return repr(event)


def actor_of(raw: bytes) -> str:
    """The name of its file, which is no longer than file names are."""
    try:
        name = str(json.loads(raw)["actor"])
    except (ValueError, LookupError, TypeError):
        return "w0"
    return name if len(name) < OF_AN_ACTOR else "w0"


def told(raws: list[bytes]) -> list[tuple[str, int]]:
    """What is read of each line, and the bytes that it is charged."""
    budget, found = Budget(1 << 40), []
    for raw in raws:
        before = budget.charged
        found.append((said(budget, raw, actor_of(raw)), budget.charged - before))
    return found


def alike(monkeypatch: pytest.MonkeyPatch, raws: list[bytes]) -> None:
    fast = told(raws)
    exact(monkeypatch)
    slow = told(raws)
    assert [one for one, _ in fast] == [one for one, _ in slow]
    pairs = [(mine, due) for (_, mine), (_, due) in zip(fast, slow, strict=True)]
    assert [pair for pair in pairs if pair[0] < 0.98 * pair[1] - OF_AN_ACTOR] == []


def test_a_whole_job_is_read_alike(real: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    alike(monkeypatch, real)


def changed(rng: random.Random, raw: bytes) -> bytes:
    place, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    match rng.randrange(4):
        case 0:
            return raw[:place] + raw[min(end, place + 3) :]
        case 1:
            return raw[:place] + bytes([rng.randrange(256)]) + raw[place:]
        case 2:
            return raw[:place] + rng.choice(ODD).encode() + raw[place:]
        case _:
            return raw[:place] + raw[place : place + 9] + raw[place:]


@pytest.mark.slow
@pytest.mark.parametrize("count", [4_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_lines_that_were_changed_anywhere_are_read_or_refused_alike(
    real: list[bytes], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rng = random.Random(3)
    alike(monkeypatch, [*real, *(changed(rng, rng.choice(real)) for _ in range(count))])


@pytest.mark.slow
def test_a_file_is_read_alike_however_many_of_its_lines_are_odd(
    real: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    mine = [raw for raw in real if actor_of(raw) == "w0"] * 16
    path = tmp_path / "w0.jsonl"
    read = []
    for share in (0.0, 0.002, 0.1, 1.0):
        made = [changed(rng, raw) if rng.random() < share else raw for raw in mine]
        path.write_bytes(b"\n".join([*made, b""] if rng.random() < 0.5 else made))
        read.append((path.read_bytes(), read_actor(path)))
    assert len(read[0][0]) > 5 * (1 << 16), "several blocks"
    exact(monkeypatch)
    for content, fast in read:
        path.write_bytes(content)
        slow = read_actor(path)
        assert list(map(repr, fast.events)) == list(map(repr, slow.events))
        assert (fast.problems, fast.ended) == (slow.problems, slow.ended)


def odd_ones() -> Iterator[bytes]:
    text = json.dumps(LINE)
    yield text.encode()
    for name, value in (*LINE.items(), *LINE["data"].items()):  # type: ignore[attr-defined]
        for odd in ODD:
            yield text.replace(f'"{name}": {json.dumps(value)}', f'"{name}": {odd}', 1).encode()
        yield text.replace(f'"{name}": {json.dumps(value)}', "", 1).encode()
        yield text.replace(f'"{name}"', f'"x{name}"', 1).encode()
        yield text.replace("{", f'{{"{name}": 1, ', 1).encode()
        yield text.replace("{", f'{{"other": {json.dumps(value)}, ', 1).encode()
    for odd in ODD:
        yield text.replace("{", f'{{"other": {odd}, ', 1).encode()
        yield text.replace("{", f'{{"other": [{odd}], ', 1).encode()
    long = "9" * 5_000  # more digits than a whole number may have
    yield text.replace("{", f'{{"other": {long}, ', 1).encode()
    yield text.replace("0.25", long, 1).encode()
    yield text.encode() + b" "
    yield b"\xef\xbb\xbf" + text.encode()
    yield text.replace('"w0"', '"w1"').encode()
    yield text.encode("utf-16")
    yield text.replace("w0", "w\udcff").encode(errors="surrogateescape")
    yield json.dumps({name: value for name, value in LINE.items() if name != "data"}).encode()
    yield json.dumps({**LINE, "kind": "actor_ended", "data": {}}).encode()
    yield json.dumps({**LINE, "kind": "actor_ended", "data": {}})[:-12].encode() + b"}"


def test_odd_values_are_read_or_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    alike(monkeypatch, [raw for raw in odd_ones() for _ in range(2)])


def test_numbers_are_the_nearest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    first = json.dumps(LINE)

    def number() -> str:
        digits = "".join(rng.choices("0123456789", k=rng.randrange(1, 25)))
        return f"{rng.randrange(10)}.{digits}e{rng.randrange(-320, 300)}"

    made = [first.replace("0.25", number()).encode() for _ in range(1_500)]
    alike(monkeypatch, [first.encode(), *made])


@pytest.mark.skipif(module.DECODE is None, reason=NEED)
def test_only_the_first_line_of_its_like_takes_the_exact_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w0.jsonl"
    path.write_text("".join(json.dumps({**LINE, "seq": n}) + "\n" for n in range(50)))
    taken: list[Any] = []
    known = Event.from_line.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Event], *given: Any) -> Event:
        taken.append(given)
        return known(cls, *given)

    monkeypatch.setattr(Event, "from_line", classmethod(counted))
    log = read_actor(path)
    assert len(log.events) == 50 and not log.problems and len(taken) == 1


def test_keys_names_and_samples_are_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "w0.jsonl"
    many = list(range(70_000, 70_040))
    line = {**LINE, "data": {**LINE["data"], "took": many}}  # type: ignore[dict-item]
    path.write_text("".join(json.dumps({**line, "seq": n}) + "\n" for n in range(9)))
    one, other = read_actor(path).events[-2:]
    # msgspec may have to make a key again for another with the same place in its table
    assert one.actor is other.actor and sum(map(is_, one.data, other.data)) >= len(one.data) - 2
    assert one.data["took"] == many and all(map(is_, one.data["took"], other.data["took"]))


def test_a_line_keeps_the_actor_that_it_names() -> None:
    budget, raw = Budget(), json.dumps(LINE).encode()
    assert [budget.read(raw, name).actor for name in ("w0", "w0", "w9")] == ["w0"] * 3


@pytest.mark.skipif(module.DECODE is None, reason=NEED)
def test_keys_that_are_made_again_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, charged = json.dumps(LINE).encode(), []
    for decode in (module.DECODE, lambda raw: Event.from_line(raw.decode())):
        monkeypatch.setattr(module, "DECODE", decode)
        budget = Budget(1 << 40)
        for _ in range(3):
            budget.read(raw, "w0")
        before = budget.charged
        budget.read(raw, "w0")
        charged.append(budget.charged - before)
    assert charged[1] - charged[0] > 50 * (len(LINE["data"]) - 2)  # type: ignore[arg-type]


def test_values_of_a_log_are_those_that_were_written(real: list[bytes]) -> None:
    budget = Budget()
    for raw in real:
        due = json.loads(raw)
        event = budget.read(raw, due["actor"])
        assert event.kind is Kind(due["kind"]) and repr(event.data) == repr(due["data"])
        assert all(
            type(value) is not float or math.isfinite(value) for value in event.data.values()
        )
