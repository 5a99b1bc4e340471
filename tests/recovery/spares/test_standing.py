"""Who of a new generation needs what of its state."""

from __future__ import annotations

import pytest

from trainchaos.recovery.spares.standing import (
    MOST_STEPS,
    Standing,
    in_want,
    number_of,
    one_behind,
    pause_steps,
)

GIVER = Standing(receives=False, step=7, digest=70, retained=7)


def spare(step: int, digest: int) -> Standing:
    return Standing(receives=True, step=step, digest=digest, retained=-1)


@pytest.mark.parametrize(
    ("brought", "wants", "behind"),
    [
        (spare(7, 70), False, False),
        (spare(7, 71), True, False),  # the same step of another history
        (spare(6, 60), True, True),
        (spare(5, 50), True, False),
        (spare(8, 80), True, False),
        (spare(-1, 0), True, False),
    ],
)
def test_a_spare_gets_what_it_lacks(brought: Standing, wants: bool, behind: bool) -> None:
    standings = {0: GIVER, 1: Standing(receives=False, step=6, digest=1, retained=6), 2: brought}
    assert in_want(standings, 0) == ((2,) if wants else ())
    assert one_behind(standings, 0) == ((2,) if behind else ())


def test_nobody_is_told_a_step_whose_gradients_are_gone() -> None:
    forgetful = Standing(receives=False, step=7, digest=70, retained=6)
    assert one_behind({0: forgetful, 1: spare(6, 60)}, 0) == ()


def test_a_process_that_claims_nothing_is_not_one_behind_the_beginning() -> None:
    assert (
        one_behind({0: Standing(receives=False, step=0, digest=0, retained=0), 1: spare(-1, 0)}, 0)
        == ()
    )


def test_a_standing_survives_its_message() -> None:
    mine = spare(3, number_of("parameters:ff"))
    assert Standing.of(mine.words()) == mine and 0 < mine.digest < 2**63
    assert number_of("") == 0


def test_a_spare_that_cannot_follow_is_copied_to_less_and_less_often() -> None:
    assert [pause_steps(tries) for tries in (0, 1, 2, 50)] == [8, 16, 32, MOST_STEPS]
