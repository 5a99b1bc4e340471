"""What torch's flight recorder of collectives holds in a rank, short enough for a message: in which
collective the rank stands while it is suspected to hang.

The recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp, dump versions 2.7 to 2.10, torch 2.11
to 2.13) keeps the last collectives of each process group in a ring, for NCCL and, in a recorder of
its own, for gloo. It is read as JSON (``_dump_nccl_trace_json``, ``_dump_fr_trace_json``); its
other form is a pickle, which is never read here. What is finished is asked for too
(``onlyActive=False``), because a rank that has not begun a collective has nothing active, and only
its last one says how far it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from trainchaos.recovery.process.local import RECORDER, RECORDER_SIZES
from trainchaos.recovery.transport.wire import CollectiveEntry, Recalled

CALLS: Mapping[str, str] = {
    "nccl": "_dump_nccl_trace_json",
    "gloo": "_dump_fr_trace_json",
}
"""Of ``torch._C._distributed_c10d``, by backend; the first is missing where torch has no NCCL."""
MOST_RECORDED = 4096
"""A recorder that was made larger by the user is not read: reading 2000 entries took 175 ms, in
which the training thread got no Python.
"""
MOST_OPEN = 4  # unfinished collectives told of each group
MOST_GROUPS = 8  # a rank of a mesh has one for each dimension, of its cell, and of all
MOST_TEXT = 60  # characters of a name or of sizes
MOST_WHY = 200

Dump = Callable[..., Any]


def recalled(
    number: int,
    backend: str,
    generation: int,
    rank: int,
    find: Callable[[str], Dump | None],
    *,
    environment: Mapping[str, str] = os.environ,
) -> Recalled:
    """The answer to ``recovery.transport.wire.Recall``. ``find``: the function of torch's library
    with a name, None: it has none (``recovery.collectives.nccl.recorder``). Raises nothing: where
    there is nothing, the answer says why.
    """
    entries: list[CollectiveEntry] = []
    try:
        why = _unreadable(backend, environment)
        dump = None if why else find(CALLS[backend])
        if not why and dump is None:
            why = f"this torch has no {CALLS[backend]}"
        if dump is not None:
            entries = shortened(dump(includeCollectives=True, onlyActive=False), generation)
            why = "" if entries else f"the recorder holds nothing of generation {generation}"
    except Exception as error:  # of torch's, of whatever type: evidence never ends a rank
        why = f"the recorder could not be read: {type(error).__name__}: {error}"
    return Recalled(number=number, rank=rank, entries=entries, why=why[:MOST_WHY])


def _unreadable(backend: str, environment: Mapping[str, str]) -> str:
    if backend not in CALLS:
        return f"torch records no collectives of {backend}"
    size = next((environment[name] for name in RECORDER_SIZES if name in environment), RECORDER)
    if not size.isdecimal() or int(size) == 0:
        return f"the recorder is off: {RECORDER_SIZES[0]}={size}"
    if int(size) > MOST_RECORDED:
        return f"the recorder holds {size} entries; at most {MOST_RECORDED} are read"
    return ""


def shortened(dump: bytes | str, generation: int) -> list[CollectiveEntry]:
    """Of each group of a generation: its last finished collective, its first MOST_OPEN unfinished
    ones, and its last, in their order. Point-to-point operations are left out: their numbers differ
    between ranks. Entries of another form are left out. Raises ValueError if it is no JSON, or has
    no entries.
    """
    found = json.loads(dump)
    listed = found.get("entries", []) if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise ValueError("the dump has no list of entries")
    groups: dict[str, dict[int, CollectiveEntry]] = {}
    for one in listed:
        entry = _entry(one)
        if entry is not None and entry.group.split("/")[0] == f"generation-{generation}":
            # operations that were launched as one have one number: the last of them
            groups.setdefault(entry.group, {})[entry.seq] = entry
    return [entry for group in [*groups.values()][:MOST_GROUPS] for entry in _told(group)]


def _told(group: Mapping[int, CollectiveEntry]) -> list[CollectiveEntry]:
    done = [number for number, entry in group.items() if entry.state == "done"]
    unfinished = sorted(number for number, entry in group.items() if entry.state != "done")
    wanted = {*unfinished[:MOST_OPEN], *unfinished[-1:], *([max(done)] if done else [])}
    return [group[number] for number in sorted(wanted)]


def _entry(one: object) -> CollectiveEntry | None:
    """An entry as the recorder writes it, or None. A gloo entry is only ever retired; an NCCL entry
    that is retired without having completed was given up.
    """
    if not isinstance(one, dict) or one.get("is_p2p") is True:
        return None
    group, number, state = one.get("process_group"), one.get("collective_seq_id"), one.get("state")
    if not isinstance(group, list) or not group or not isinstance(group[0], str):
        return None
    if type(number) is not int or not 0 <= number < 1 << 63 or not isinstance(state, str):
        return None
    backend, _, op = str(one.get("profiling_name", "")).rpartition(":")
    done = state == "completed" or (backend == "gloo" and one.get("retired") is True)
    return CollectiveEntry(
        group=group[0][:MOST_TEXT],
        seq=number,
        op=op[:MOST_TEXT],
        sizes=_sizes(one.get("input_sizes"), one.get("input_dtypes")),
        state="done" if done else "started" if state == "started" else "scheduled",
    )


def _sizes(sizes: object, types: object) -> str:
    """For people, and to be compared: ``3x5 Float, 7 Float``."""
    if not isinstance(sizes, list):
        return ""
    kinds = types if isinstance(types, list) else []
    told = []
    for at, dims in enumerate(sizes[:MOST_TEXT]):
        shape = "x".join(str(dim) for dim in dims) or "scalar" if isinstance(dims, list) else "?"
        told.append(f"{shape} {kinds[at]}" if at < len(kinds) else shape)
    return ", ".join(told)[:MOST_TEXT]
