"""The global sample order: a permutation, pure, for ever the same, and split without loss over any world."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import order

ROOT = Path(__file__).resolve().parent.parent
SEEDS = st.integers(0, 2**32 - 1)


@given(size=st.integers(1, 300), seed=SEEDS, epoch=st.integers(0, 50))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(order.permute(i, size, seed, epoch) for i in range(size)) == list(range(size))


@given(size=st.integers(1, 10**9), seed=SEEDS, epoch=st.integers(0, 50), data=st.data())
def test_any_position_is_found_within_the_data_set(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, size - 1))
    found = order.permute(index, size, seed, epoch)
    assert 0 <= found < size
    assert found == order.permute(index, size, seed, epoch)


@pytest.mark.parametrize("index", [-1, 10, 11])
def test_a_position_outside_is_an_error(index: int) -> None:
    with pytest.raises(ValueError, match=r"is not in \[0, 10\)"):
        order.permute(index, 10, 0, 0)


def test_seeds_and_epochs_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return [order.permute(i, 1000, seed, number) for i in range(1000)]

    orders = [epoch(0, 0), epoch(1, 0), epoch(0, 1), list(range(1000))]
    for number, one in enumerate(orders):
        for other in orders[number + 1 :]:
            same = sum(a == b for a, b in zip(one, other, strict=True))
            assert same < 20  # two random permutations of any size agree in one place on average


@given(batch=st.integers(1, 64), world=st.integers(1, 64))
def test_shares_partition_the_batch_for_any_world(batch: int, world: int) -> None:
    shares = [order.share(rank, world, batch) for rank in range(world)]
    assert [i for share in shares for i in share] == list(range(batch))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(batch=st.integers(1, 40), samples=st.integers(1, 200), seed=SEEDS)
def test_batches_follow_each_other_without_gap_or_repetition(batch: int, samples: int, seed: int) -> None:
    steps = 2 * samples // batch + 1
    stream = [i for step in range(1, steps + 1) for i in order.batch(step, batch, samples, seed)]
    assert stream == [order.sample_at(p, samples, seed) for p in range(len(stream))]
    assert sorted(stream[:samples]) == list(range(min(samples, len(stream))))


def test_the_order_never_changes() -> None:
    """Golden values: a stored run is judged against this order for ever, whatever the machine or Python."""
    assert [order.permute(i, 10, 1, 0) for i in range(10)] == GOLDEN_EPOCH_0
    assert [order.permute(i, 10, 1, 1) for i in range(10)] == GOLDEN_EPOCH_1
    assert order.batch(1, 8, 1000, 17) == GOLDEN_FIRST
    assert order.batch(126, 8, 1000, 17) == GOLDEN_NEXT_EPOCH
    assert order.batch(1, 4, 65535, 2**32 - 1) == GOLDEN_BIG_SEED


def test_the_order_does_not_depend_on_the_hash_seed() -> None:
    code = "from recovery import order; print(order.batch(1, 8, 1000, 17))"
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == str(GOLDEN_FIRST)


GOLDEN_EPOCH_0 = [3, 4, 7, 5, 9, 6, 2, 0, 1, 8]
GOLDEN_EPOCH_1 = [7, 6, 3, 8, 1, 0, 4, 5, 2, 9]
GOLDEN_FIRST = [216, 567, 231, 439, 771, 463, 257, 69]
GOLDEN_NEXT_EPOCH = [37, 842, 767, 264, 758, 464, 101, 841]
GOLDEN_BIG_SEED = [7984, 25261, 3114, 21858]
