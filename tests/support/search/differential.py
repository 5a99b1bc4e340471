"""Plays the scenarios that the simulator can play with another revision and with this tree, and
says where the logs differ: ``python -m tests.support.search.differential REVISION [RANDOM]``.

RANDOM scenarios (200) are drawn by this tree besides those of the folder. Exits 1 on a difference.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]


def trees(drawn: int) -> dict[str, Any]:
    """Scenarios by name, all on the simulator."""
    from trainchaos.harness.fuzz.draw.draw import Dice, World, scenario
    from trainchaos.harness.fuzz.play.play import kinds, simulated, strategies

    files = [path for path in ROOT.glob("scenarios/**/*.yaml") if path.name.count(".") == 1]
    read = {str(path.relative_to(ROOT)): yaml.safe_load(path.read_text()) for path in files}
    kept = {name: {**tree, "launcher": tree.get("launcher", {})} for name, tree in read.items()}
    for name, tree in kept.items():
        if isinstance(tree["launcher"], str):
            tree["launcher"] = {"kind": tree["launcher"]}
        kept[name] = simulated({**tree, "launcher": {"kind": "local", **tree["launcher"]}})
    world, dice = World(kinds=kinds(), strategies=strategies()), Dice(rng=random.Random(48))
    return kept | {f"drawn {number}": scenario(dice, world) for number in range(drawn)}


def play(names: Path) -> None:
    """Print a line of JSON for each scenario: its name, and the lines of its logs."""
    from trainchaos.chaos.commands.shared.options import build_catalogue
    from trainchaos.harness.fuzz.play.play import SimPlayer

    player = SimPlayer(catalogue=build_catalogue())
    for name, tree in json.loads(names.read_text()).items():
        result = player.play(tree)
        lines = [
            event.to_line() for arm in sorted(result.logs) for event in result.logs[arm].events
        ]
        refused = re.sub(r"\S*/fuzz-\w+", "", result.refused)  # its folder is another each time
        print(json.dumps([name, [refused, result.crash, *lines]]), flush=True)


def main(revision: str, drawn: int = 200) -> int:
    """Play with both, compare."""
    with tempfile.TemporaryDirectory() as place:
        before, names = Path(place) / "before", Path(place) / "scenarios.json"
        names.write_text(json.dumps(trees(drawn), default=str))
        git = ["git", "-C", str(ROOT), "archive", "--format=tar", revision]
        before.mkdir()
        subprocess.run(
            ["tar", "-x", "-C", str(before)], input=subprocess.check_output(git), check=True
        )
        players = [
            subprocess.Popen(
                [sys.executable, __file__, "--play", str(names)],
                env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"},
                cwd=tree,
                stdout=subprocess.PIPE,
                text=True,
            )
            for tree in (before, ROOT)
        ]
        count = differing = 0
        for old, new in zip(*(player.stdout or () for player in players), strict=True):
            count += 1
            (name, was), (_, now) = json.loads(old), json.loads(new)
            if was != now:
                differing += 1
                pairs = zip_longest(was, now)
                old, new = next(pair for pair in pairs if pair[0] != pair[1])
                print(f"{name}\n  was {old}\n  now {new}")
        print(f"{differing} of {count} scenarios differ")
        return 1 if differing or any(player.wait() for player in players) else 0


if __name__ == "__main__":
    if sys.argv[1] == "--play":
        play(Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
