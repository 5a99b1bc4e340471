"""Spares that a job cannot keep ready as it is asked to are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.recovery.cli import options
from trainchaos.recovery.cli.options import UsageError
from trainchaos.recovery.policy.jobconfig import SpareSync
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare


@pytest.mark.parametrize(
    ("sync", "ranks", "shards", "spares", "why"),
    [
        (SpareSync("live"), 4, 1, 1, ""),
        (SpareSync("live", rehearse=True), 4, 1, 1, ""),
        (SpareSync("live"), 4, 2, 2, ""),
        (SpareSync("live"), 8, 2, 5, ""),
        (SpareSync("none"), 4, 4, 1, ""),
        (SpareSync("live"), 4, 2, 1, "use --spares 2 or more"),
        (SpareSync("live"), 256, 128, 64, "would find none: use sync=none"),
        (SpareSync("live"), 4, 4, 4, "the 4 ranks hold one copy of the model"),
        (SpareSync("none", rehearse=True), 4, 2, 2, "rehearse=true serves models that each rank"),
        (SpareSync("live", rehearse=True), 4, 2, 2, "rehearse=true serves models that each rank"),
    ],
)
def test_what_does_not_fit_the_job_says_why(
    sync: SpareSync, ranks: int, shards: int, spares: int, why: str
) -> None:
    said = sync.misfit(ranks, shards, spares)
    assert why in said and bool(said) == bool(why)


def test_the_command_line_refuses_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    asked = ["--ranks", "4", "--shards", "2", "--strategy", "hot-spare", str(script)]
    given = options.parser(None).parse_args(asked)
    with pytest.raises(UsageError, match="sync=live: a spare follows one of the 2 parts"):
        options.check(given, HotSpare(sync="live"))
    options.check(given, HotSpare(sync="live", spares=2))
