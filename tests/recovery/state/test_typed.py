"""Values come back from another process with their types and bits, or are refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta
from enum import Enum
from typing import Any
from zoneinfo import ZoneInfo

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, scalar_dtypes

from trainchaos.recovery.state import typed


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Window:
    size: int
    values: list[float]

    def __post_init__(self) -> None:
        raise AssertionError("no code of the class runs")


Pair = namedtuple("Pair", "left right")

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.builds(bytearray, st.binary()),
    st.datetimes(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    arrays(scalar_dtypes(), array_shapes(min_dims=0, max_side=3)).filter(
        lambda array: array.dtype.kind not in "mM"
    ),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.builds(deque, st.lists(inner, max_size=3), st.integers(4, 5)),
        st.sets(st.one_of(st.integers(), st.text()), max_size=3),
        st.frozensets(st.integers(), max_size=3),
    ),
    max_leaves=8,
)


def sent(value: Any, live: Any = None) -> Any:
    """As another process gets it, which has ``live`` in its place."""
    return typed.decode(json.loads(json.dumps(typed.encode(value, "it"))), live)


@given(VALUES)
def test_a_value_comes_back_as_it_is(value: Any) -> None:
    assert typed.difference(value, sent(value), "it") is None
    typed.round_trip(value, "it")


@pytest.mark.parametrize(
    "value",
    [
        Counter({"a": 2, 3: 1}),
        {Colour.RED: [Colour.BLUE]},
        Window.__new__(Window),
        Pair(1, (2,)),
        datetime(2026, 1, 2, tzinfo=UTC),
        [torch.tensor([1.0, math.nan]), torch.zeros((), dtype=torch.bool)],
        numpy.float32("nan"),
        -0.0,
        {1: "a", True + 1: "b", "1": "c"},
    ],
    ids=lambda value: type(value).__name__,
)
def test_classes_that_a_script_has_named(value: Any) -> None:
    for kind in (Colour, Window, Pair):
        typed.keep_type(kind)
    if isinstance(value, Window):
        value.size, value.values = 3, [math.inf]
    assert typed.difference(value, sent(value), "it") is None


def test_a_difference_is_found_to_the_type_and_the_bit() -> None:
    for one, other, where in (
        ({"a": (1, 2)}, {"a": [1, 2]}, "it.a is a list in place of a tuple"),
        ({1: 0}, {"1": 0}, "it has the keys"),
        ([1, True], [1, 1], "it.1 is a int in place of a bool"),
        ([0.0], [-0.0], "it.0 is -0.0 in place of 0.0"),
        ((1,), (1, 2), "it has 2 items in place of 1"),
        (numpy.zeros(2), numpy.zeros(2, dtype=numpy.float32), "it is array"),
        ({"b": {2}}, {"b": {2, 3}}, "it.b is {2, 3} in place of {2}"),
        (torch.zeros(1), -torch.zeros(1), "it is tensor"),
    ):
        assert (typed.difference(one, other, "it") or "").startswith(where)


class Held:
    pass


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a": [Held()]}, "it.a.0 is a Held, which can be neither saved nor copied"),
        ({"a": defaultdict(int, {"x": 1})}, "it.a is a dict in place of a defaultdict"),
        (numpy.array([Held()]), "it is a ndarray"),
        (datetime(2026, 1, 2, tzinfo=ZoneInfo("Europe/Berlin")), "it is"),
        (namedtuple("Unnamed", "a")(1), "it is a tuple in place of a Unnamed"),
        (numpy.zeros(1, dtype=[("a", "i4")]), "it is"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_would_come_back_otherwise_is_refused_with_its_place(
    value: Any, complaint: str
) -> None:
    with pytest.raises(TypeError, match=complaint.replace("(", r"\(")):
        typed.round_trip(value, "it")


def test_a_class_is_never_looked_up_that_the_script_has_not_named() -> None:
    for forged in ({"!kept": ["os.system", {}]}, {"!enum": ["RED", "Shade"]}):
        with pytest.raises(ValueError, match="name it with recovery"):
            typed.decode(forged)
    with pytest.raises(TypeError, match="Held is no dataclass, named tuple or enum"):
        typed.keep_type(Held)


def test_what_was_written_before_is_read() -> None:
    assert sent({"x": 1}) == {"x": 1}
    assert typed.decode({"!enum": "RED"}, Colour.BLUE) is Colour.RED
    assert typed.decode({"!deque": [1, 2]}) == deque([1, 2])
    assert typed.decode({"!set": [1, 2]}) == {1, 2}
    moments = (date(2026, 1, 2), time(3, 4), timedelta(days=1))
    assert sent(moments) == moments
