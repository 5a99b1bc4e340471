"""How long a process group takes to form: the job's own over gloo, and that of torch 2.14 and newer
with new members (``_reconfigure``), in turns.

``python -m benchmarks.loops.forming --ranks 4 --rounds 50``, nothing else running.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import markdown, options, seconds, spread
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.local import start_store

LIMIT_S = 60.0
WARM = 3  # rounds that are not counted


Share = Callable[[str, str], list[str]]
"""What each rank says under a key, by rank, once all have said it."""


def meeting(store: dist.Store, rank: int, ranks: int) -> Share:
    """Ranks that begin each round together, and meet in a store."""

    def share(key: str, value: str = "") -> list[str]:
        store.set(f"{key}/{rank}", value)
        keys = [f"{key}/{of}" for of in range(ranks)]
        store.wait(keys, timedelta(seconds=LIMIT_S))
        return [store.get(key).decode() for key in keys]

    return share


def ours(rank: int, ranks: int, port: int) -> Callable[[int, Share], float]:
    """Forms the group of a new generation; the one before is left first."""
    held: list[Group] = []

    def form(number: int, share: Share) -> float:
        for group in held:
            group.leave()
        held.clear()
        group = Group(
            generation=number,
            rank=rank,
            world=ranks,
            store_port=port,
            backend="gloo",
            timeout_s=LIMIT_S,
            check=lambda: None,
        )
        share(f"ours-{number}", "")
        held.append(group)
        return seconds(group.form)

    return form


def torchs(rank: int, ranks: int, store: dist.Store) -> Callable[[int, Share], float]:
    """Gives torch's default group the same members anew; it is aborted first."""
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT_S),
        enable_reconfigure=True,  # type: ignore[call-arg]
    )
    c10d: Any = dist
    group: Any = dist.group.WORLD

    def form(number: int, share: Share) -> float:
        if number > 1:
            group.abort()
        handles = share(f"torch-{number}", c10d._get_reconfigure_handle())
        return seconds(lambda: c10d._reconfigure(number, handles).wait())

    return form


def play(rank: int, ranks: int, port: int, rounds: int, into: Path) -> None:
    """One rank: each kind in each round, in turns; seconds of each go to a file."""
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    share = meeting(dist.PrefixStore("meeting", store), rank, ranks)
    kinds = {"ours": ours(rank, ranks, port)}
    if hasattr(dist, "_reconfigure"):
        kinds["torch, _reconfigure"] = torchs(rank, ranks, dist.PrefixStore("torch", store))
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(1, rounds + WARM + 1):
        for name, form in kinds.items():
            took[name].append(form(number, share))
            share(f"{name}-{number}-formed", "")  # nobody leaves before all have it
    (into / f"{rank}.json").write_text(json.dumps(took))
    share("end", "")
    os._exit(0)  # as ranks do: groups that are left need no goodbye


def main() -> None:
    """Print the table."""
    usage = options(__doc__)
    usage.add_argument("--ranks", type=int, default=4)
    usage.add_argument("--rounds", type=int, default=50)
    given = usage.parse_args()
    store, port = start_store()  # it is there as long as it is held
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        args = (given.ranks, port, given.rounds, Path(folder))
        each = [context.Process(target=play, args=(rank, *args)) for rank in range(given.ranks)]
        for process in each:
            process.start()
        for process in each:
            process.join(LIMIT_S + given.rounds)
            process.kill()
        del store
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}, gloo")
    rows = []
    for name in told[0]:
        slowest = [max(times) for times in zip(*(of[name] for of in told), strict=True)][WARM:]
        rows.append([name, len(slowest), spread(slowest, 1, 1e3)])
    what = f"{given.ranks} ranks, the slowest of each round"
    print(markdown([what, "n", "median ms (min to max)"], rows))


if __name__ == "__main__":
    main()
