"""The checks of single places: memory, products, clocks, the disk of the runs directory, and the
store by which ranks meet. Each is a measurement and a judgement over what was measured.

- Memory keeps what is written to it: patterns are written to all blocks, then read back (van de
  Goor, Testing Semiconductor Memories, 1991, and memtest86+): all zeros and ones find stuck cells;
  0xAA and 0x55 neighbours that pull each other; the address in each word finds address lines that
  are stuck, which no constant pattern can; random words find what depends on the data.
- A device multiplies matrices rightly, and each time the same. The first product is checked against
  a second computation in float64 on the host; later ones must be equal to it in every bit. The
  bound is that of a product in any order of summation: |C - AB| <= g |A||B| componentwise,
  g = n u / (1 - n u), u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
  eq. 3.13). Of a large product, some rows are computed again, and all rows are summed (Huang and
  Abraham 1984): a sum over a row of C has the bound summed over the row.
- A device keeps its rate under load: the same product over and over, in slices of time. Of a
  processor, the time is what the process got of it: clocks that fall show in it, and other
  processes that take turns on the core do not.
- The disk takes what is written, keeps it, and gives it back; the store answers soon, with what was
  set.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from trainchaos.chaos.stats import percentile
from trainchaos.harness.launch.devices import torch_name
from trainchaos.harness.preflight.check import (
    Finding,
    Measured,
    PlaceCheck,
    Rate,
    Task,
    is_cuda,
)
from trainchaos.harness.preflight.compare import ROUNDS, in_rounds
from trainchaos.recovery.health.estimates import median
from trainchaos.recovery.transport.reverse_dns import nameless

CPU_BYTES = 64 << 20
"""Of a place on the CPU: more than the caches beside a core, and four places take a quarter GiB."""
CUDA_SHARE = 0.8
"""Of the free memory of a CUDA device; the rest is left to the products and to its allocator."""
BLOCK_BYTES = 32 << 20
WORD = 8
PATTERNS = ("0x00", "0xff", "0xaa", "0x55", "address", "random")
_CONSTANT = {"0x00": 0, "0xff": -1, "0xaa": -0x5555_5555_5555_5556, "0x55": 0x5555_5555_5555_5555}
MOST_SHOWN = 8
_UNSIGNED = (1 << 64) - 1


def blocks_of(device: str) -> list[Any]:
    """Memory of a torch device, as blocks of words of 64 bits. Raises RuntimeError where it gives
    none.
    """
    import torch

    size = int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE) if is_cuda(device) else CPU_BYTES
    words = min(BLOCK_BYTES, size) // WORD
    blocks: list[Any] = []
    for _ in range(max(1, size // (words * WORD))):
        try:
            blocks.append(torch.empty(words, dtype=torch.int64, device=device))
        except torch.cuda.OutOfMemoryError:  # others allocate too: what there is, is tested
            if not blocks:
                raise
            break
    return blocks


def write(block: Any, words: Any) -> None:
    """Write a whole block."""
    block.copy_(words)


def measure_memory(task: Task) -> Measured:
    """Each pattern: written to all blocks, then read; none is begun once the time is over."""
    import torch

    device, began_s = torch_name(task.place), time.monotonic()
    blocks = blocks_of(device)
    size = sum(len(block) for block in blocks) * WORD
    wrong: list[dict[str, Any]] = []
    words = 0
    done: list[str] = []
    for pattern in PATTERNS:
        if done and time.monotonic() - began_s > task.budget_s:
            break
        for number, block in enumerate(blocks):
            write(block, _expected(pattern, number, len(block), device, task.seed))
        for number, block in enumerate(blocks):
            expected = _expected(pattern, number, len(block), device, task.seed)
            if torch.equal(block, expected):
                continue
            places = (block != expected).nonzero().flatten()
            words += int(places.numel())
            for at in places[:MOST_SHOWN].tolist():
                address = (number * len(block) + at) * WORD
                wrong.append(_wrong(pattern, address, int(expected[at]), int(block[at])))
        done.append(pattern)
    return {
        "bytes": size,
        "verified_bytes": size * len(done),
        "patterns": done,
        "seed": task.seed,
        "wrong_words": words,
        "wrong": wrong[:MOST_SHOWN],
        "seconds": time.monotonic() - began_s,
    }


def _expected(pattern: str, number: int, words: int, device: str, seed: int) -> Any:
    """int64 tensor of shape (words,): what a pattern puts into a block."""
    import torch

    if pattern == "address":
        start = number * words
        return torch.arange(start, start + words, dtype=torch.int64, device=device) * WORD
    if pattern == "random":
        generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + number)
        made = torch.empty(words, dtype=torch.int64, device=device)
        return made.random_(-(2**63), None, generator=generator)
    return torch.full((words,), _CONSTANT[pattern], dtype=torch.int64, device=device)


def _wrong(pattern: str, address: int, want: int, got: int) -> dict[str, Any]:
    wrote, read = (f"{word & _UNSIGNED:#018x}" for word in (want, got))
    bits = [bit for bit in range(64) if (want ^ got) & _UNSIGNED & 1 << bit]
    return {"pattern": pattern, "address": address, "wrote": wrote, "read": read, "bits": bits}


def judge_memory(place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
    """One wrong word is unfit: memory that works has none. How fast patterns are made says
    little of the memory.
    """
    (measured,) = rounds
    words, done = int(measured["wrong_words"]), list(measured["patterns"])
    size = f"{measured['bytes'] / 2**20:.0f} MiB"
    missing = ", ".join(one for one in PATTERNS if one not in done)
    said = f"{size}, {len(done)} of {len(PATTERNS)} patterns read back"
    said += f" (no time for {missing})" if missing else ""
    wrong = float(words)
    finding = Finding(said=said, measured=wrong, bound=0.0, unit="words", evidence=measured)
    if not words:
        return finding, ()
    first = measured["wrong"][0]
    said = (
        f"{words} wrong words in {size}; the first with pattern {first['pattern']} at byte"
        f" {first['address']:#x}: wrote {first['wrote']}, read {first['read']}"
    )
    todo = (
        "take the device out; nvidia-smi -q -d ECC,ROW_REMAPPER says whether a reset remaps it"
        if is_cuda(place)
        else "take the machine out and test its memory with memtest86+; the kernel's EDAC"
        " counters name the module"
    )
    return replace(finding, state="unfit", said=said, todo=todo), ()


CPU_SIZE, CUDA_SIZE = 256, 4096
"""Rows of the matrices. On the CPU a product takes some milliseconds, and on a GPU its tiles (128 x
128 in cuBLAS) outnumber the multiprocessors (132 on an H100) several times, so that all compute.
"""
ROWS = 256
"""Computed again in float64; others only by their sum."""
LEAST_REPEATS, MOST_REPEATS = 8, 2000
UNIT = 2.0**-24
"""Unit roundoff of float32."""


def gamma(n: int, unit: float = UNIT) -> float:
    """Higham's bound of the relative error of a sum of n products; n * unit < 1."""
    return n * unit / (1.0 - n * unit)


def factors(n: int, device: str, seed: int) -> tuple[Any, Any]:
    """Two float32 matrices (n, n), uniform in [-1, 1), made on the host: the same everywhere."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(n, n, generator=generator) * 2.0 - 1.0 for _ in range(2))
    return a.to(device), b.to(device)


def multiply(a: Any, b: Any) -> Any:
    """torch's product in full float32, whatever the environment prefers."""
    import torch

    torch.set_float32_matmul_precision("highest")
    return a @ b


def measure_product(task: Task) -> Measured:
    """Products until the time is over, LEAST_REPEATS at least."""
    import torch

    began_s = time.monotonic()
    device = torch_name(task.place)
    n = CUDA_SIZE if is_cuda(task.place) else CPU_SIZE
    a, b = factors(n, device, task.seed)
    first = multiply(a, b).clone()
    worst = excess(a, b, first)
    repeats, different, wrong, largest = 1, 0, int(worst > 1.0), worst
    while repeats < MOST_REPEATS and (
        repeats < LEAST_REPEATS or time.monotonic() - began_s < task.budget_s
    ):
        again = multiply(a, b)
        repeats += 1
        if not torch.equal(again, first):
            different += 1
            worst = excess(a, b, again)
            wrong += worst > 1.0
            largest = max(largest, worst)
    return {
        "rows": n,
        "repeats": repeats,
        "different": different,
        "wrong": int(wrong),
        "largest_error_over_bound": min(largest, 1e300),
        "seed": task.seed,
        "seconds": time.monotonic() - began_s,
    }


def judge_product(place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
    """One product beyond the bound, or one that differs in a bit, is unfit. The clocks' check
    measures the rate.
    """
    (measured,) = rounds
    n, wrong, different = measured["rows"], measured["wrong"], measured["different"]
    largest = float(measured["largest_error_over_bound"])
    what = f"{measured['repeats']} products of {n} x {n}"
    finding = Finding(
        said=f"{what}, all alike; error {largest:.2g} of the bound",
        measured=largest,
        bound=1.0,
        unit="of the bound",
        evidence=measured,
    )
    if not wrong and not different:
        return finding, ()
    said = f"{what}: {wrong} beyond the error bound ({largest:.3g} times it), {different}"
    said += " differ from the first in a bit"
    todo = (
        "take the device out; dcgmi diag -r 3 tests it for hours, and a device that is wrong"
        " now and then is replaced"
        if is_cuda(place)
        else "take the machine out: its processor or memory computes wrongly"
    )
    return replace(finding, state="unfit", said=said, todo=todo), ()


def excess(a: Any, b: Any, product: Any) -> float:
    """Largest error of a product, as a part of its bound; inf where it is no number."""
    import torch

    n = int(a.shape[0])
    a64, b64, c64 = (one.to("cpu", torch.float64) for one in (a, b, product))
    if not bool(torch.isfinite(c64).all()):
        return float("inf")
    step = -(-n // ROWS)
    some = slice(0, n, step)
    # The reference has an error of its own, by the unit roundoff of float64.
    g = gamma(n) + gamma(n, 2.0**-53)
    size = g * (a64[some].abs() @ b64.abs())
    worst = float(((c64[some] - a64[some] @ b64).abs() / size).max())
    if step > 1:
        sums = (c64.sum(1) - a64 @ b64.sum(1)).abs()
        bound = g * (a64.abs() @ b64.abs().sum(1))
        worst = max(worst, float((sums / bound).max()))
    return worst


SLICE_S = 0.04
LEAST_SLICES, MOST_SLICES = 3, 5000
_SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Clocks event reasons of NVML that mean a fault of cooling or supply (nvml.h,
nvmlClocksEventReason*); a power cap (0x4) under load is normal.
"""


def measure_clocks(task: Task) -> Measured:
    """One round: rates of slices, in GFLOP/s, and NVML's clocks at its end."""
    run, operations = products(task)
    run()  # the first one allocates
    clock = time.monotonic if is_cuda(task.place) else time.thread_time
    rates: list[float] = []
    began_s, last_s = time.monotonic(), clock()
    done = 0
    while len(rates) < MOST_SLICES:
        run()
        done += 1
        now_s = clock()
        if now_s - last_s >= SLICE_S:
            rates.append(done * operations / (now_s - last_s) / 1e9)
            done, last_s = 0, now_s
            if time.monotonic() - began_s >= task.budget_s and len(rates) >= LEAST_SLICES:
                break
    said = dict(nvml(task.place)) if is_cuda(task.place) else {}
    return {"rates": rates, "nvml": said, "seconds": time.monotonic() - began_s}


def judge_clocks(place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
    """What it is. Compared are the rate of each round, and the part of it that its last third
    kept.
    """
    by_round = [list(one["rates"]) for one in rounds]
    rates = [rate for one in by_round for rate in one]
    said = f"{median(rates):.1f} GFLOP/s, the last third {100 * kept(rates):.0f} % of the first"
    shown = [one["nvml"] for one in rounds if one["nvml"]]
    if shown:
        last = shown[-1]
        said += f"; SM {last.get('clock_sm', 0):.0f} MHz, {last.get('temperature', 0):.0f} degC"
        reasons = 0
        for one in shown:
            reasons |= int(one.get("throttle_reasons", 0))
        said += "".join(f", {text}" for bit, text in _SLOWED.items() if reasons & bit)
    finding = Finding(
        said=said,
        measured=median(rates),
        unit="GFLOP/s",
        evidence={"slices": len(rates), "nvml": shown},
    )
    cooler = (
        "look at cooling and power: nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE"
        if is_cuda(place)
        else "look for other load (top), a limit of processor time, and heat"
    )
    compared = (
        ("rate", "GFLOP/s", [median(one) for one in by_round]),
        ("kept", "of the first third", [kept(one) for one in by_round]),
    )
    return finding, [
        Rate(metric=metric, unit=unit, peers=True, rounds=values, todo=cooler)
        for metric, unit, values in compared
    ]


def kept(rates: Sequence[float]) -> float:
    """Median of the last third of the slices over that of the first; 1 of fewer than three."""
    third = len(rates) // 3
    if not third:
        return 1.0
    first, last = median(rates[:third]), median(rates[-third:])
    return last / first if first > 0.0 else 0.0


def products(task: Task) -> tuple[Callable[[], None], float]:
    """One product of float32 matrices, and its 2 n^3 operations."""
    import torch

    device = torch_name(task.place)
    n = CUDA_SIZE if is_cuda(task.place) else CPU_SIZE
    a, b = factors(n, device, task.seed)

    def run() -> None:
        multiply(a, b)
        if is_cuda(task.place):
            torch.cuda.synchronize(device)

    return run, 2.0 * n**3


def nvml(place: str) -> Mapping[str, float]:
    """Clock (MHz), temperature (degC) and throttle reasons of a CUDA device, found by its UUID, as
    torch counts visible devices only; empty where NVML does not say.
    """
    import torch

    found: dict[str, float] = {}
    try:
        library: Any = importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception:  # not installed, or no driver
        return found
    with contextlib.suppress(library.NVMLError, AttributeError, OSError):
        uuid = str(torch.cuda.get_device_properties(place).uuid)
        named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        handle = library.nvmlDeviceGetHandleByUUID(named)
        sensor = library.NVML_TEMPERATURE_GPU
        found["clock_sm"] = library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)
        found["temperature"] = library.nvmlDeviceGetTemperature(handle, sensor)
        found["throttle_reasons"] = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return found


DISK_BLOCK = 1 << 20
MOST_BLOCKS, LEAST_BLOCKS = 64, 4


class TemporaryFile:
    """A file without a name, so that nothing is left of it however this process ends. Raises
    OSError.
    """

    def __init__(self, directory: str) -> None:
        self._file = tempfile.TemporaryFile(prefix=".preflight-", dir=directory)  # noqa: SIM115

    def write(self, offset: int, data: bytes) -> None:
        """Write, and wait until the disk has it."""
        self._file.seek(offset)
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def read(self, offset: int, length: int) -> bytes:
        """Read from the disk: pages that are on it are dropped from memory first, as far as the
        kernel allows.
        """
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
        self._file.seek(offset)
        return self._file.read(length)

    def close(self) -> None:
        """Give it up; nothing is left of it."""
        self._file.close()


def measure_disk(task: Task) -> Measured:
    """Blocks of random bytes: all written, each with fsync, then all read and compared. An
    error of the disk is part of what is measured.
    """
    began_s = time.monotonic()
    source = random.Random(task.seed)
    written: list[bytes] = []
    writes_s, reads_s, wrong, error = [], [], [], ""
    try:
        with contextlib.closing(TemporaryFile(task.directory)) as file:
            while len(written) < MOST_BLOCKS and (
                len(written) < LEAST_BLOCKS or time.monotonic() - began_s < task.budget_s / 2
            ):
                data = source.randbytes(DISK_BLOCK)
                at_s = time.monotonic()
                file.write(len(written) * DISK_BLOCK, data)
                writes_s.append(time.monotonic() - at_s)
                written.append(hashlib.sha256(data).digest())
            for block, digest in enumerate(written):
                at_s = time.monotonic()
                data = file.read(block * DISK_BLOCK, DISK_BLOCK)
                reads_s.append(time.monotonic() - at_s)
                if hashlib.sha256(data).digest() != digest:
                    wrong.append(block)
    except OSError as caught:
        error = f"{caught.strerror or caught}"
    return {
        "directory": task.directory,
        "blocks": len(written),
        "writes_s": writes_s,
        "reads_s": reads_s,
        "wrong": wrong,
        "error": error,
        "seed": task.seed,
    }


def judge_disk(place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
    """A block that reads wrong, or an error, is unfit. Compared are the latency of a block with
    fsync, and reading.
    """
    (measured,) = rounds
    where, blocks, wrong = measured["directory"], measured["blocks"], measured["wrong"]
    writes_s, reads_s = measured["writes_s"], measured["reads_s"]
    shown: dict[str, Any] = {
        "directory": where,
        "blocks": blocks,
        "wrong": wrong[:8],
        "error": measured["error"],
        "seed": measured["seed"],
    }
    if measured["error"]:
        after = f" after {blocks} MiB" if blocks else ""
        said = f"{where}: {measured['error']}{after}"
        todo = "repair or free the disk, or say another directory with --runs"
        return Finding(state="unfit", said=said, todo=todo, evidence=shown), ()
    middle, late = (1e3 * percentile(writes_s, share) for share in (0.5, 0.99))
    finding = Finding(
        said=f"{blocks} MiB at {where}: write with fsync {blocks / sum(writes_s):.0f} MiB/s,"
        f" median {middle:.1f} ms a MiB, 99th percentile {late:.1f} ms; read back"
        f" {blocks / max(1e-9, sum(reads_s)):.0f} MiB/s, all as written",
        measured=float(len(wrong)),
        bound=0.0,
        unit="MiB",
        evidence=shown,
    )
    if wrong:
        finding = replace(
            finding,
            state="unfit",
            said=f"{where}: {len(wrong)} of {blocks} MiB read back otherwise than written,"
            f" the first at MiB {wrong[0]}",
            todo="write no checkpoint there: replace the disk (smartctl -a says what it knows)",
        )
    todo = "look for other writers (iostat -x 1), a full or failing disk, or a slow mount"
    writes = [1e3 * one for one in in_rounds(writes_s)]
    reads = [1.0 / max(1e-9, one) for one in in_rounds(reads_s)]
    return finding, (
        Rate(metric="write_ms", rounds=writes, unit="ms", high_is_good=False, todo=todo),
        Rate(metric="read", rounds=reads, unit="MiB/s", todo=todo),
    )


LEAST_TRIPS, MOST_TRIPS = 30, 2000
TIMEOUT_S = 10.0
"""Of one request; torch's own default is 5 minutes."""


def connect(port: int, host: str, timeout_s: float = TIMEOUT_S) -> Any:
    """A client of torch's TCPStore. Raises RuntimeError."""
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    return nameless(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    )


def measure_store(task: Task) -> Measured:
    """Round trips of a set and a get, each checked, until the time is over. ``options``:
    ``port``, ``host``.
    """
    client = connect(int(task.options["port"]), str(task.options["host"]))
    trips_s: list[float] = []
    wrong = 0
    began_s = time.monotonic()
    while len(trips_s) < MOST_TRIPS and (
        len(trips_s) < LEAST_TRIPS or time.monotonic() - began_s < task.budget_s
    ):
        value = f"{task.seed}/{len(trips_s)}"
        at_s = time.monotonic()
        client.set("preflight", value)
        wrong += client.get("preflight").decode() != value
        trips_s.append(time.monotonic() - at_s)
    return {"trips_s": trips_s, "wrong": wrong}


def judge_store(place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
    """Another value than was set is unfit. Compared are medians of successive parts; the 99th
    percentile is shown only: of a hundred trips it is one of them.
    """
    (measured,) = rounds
    trips, wrong = measured["trips_s"], int(measured["wrong"])
    middle, late = (1e3 * percentile(trips, share) for share in (0.5, 0.99))
    finding = Finding(
        said=f"{len(trips)} round trips (set, get): median {middle:.2f} ms, 99th percentile"
        f" {late:.2f} ms",
        measured=middle,
        unit="ms",
        evidence={"n": len(trips), "median_ms": middle, "p99_ms": late, "wrong": wrong},
    )
    if wrong:
        finding = replace(
            finding,
            state="unfit",
            said=f"{finding.said}; {wrong} values wrong",
            todo="see what else writes to the store; test the memory of its machine",
            measured=float(wrong),
            bound=0.0,
            unit="values",
        )
    rate = Rate(
        metric="trip_ms",
        rounds=in_rounds([1e3 * one for one in trips]),
        unit="ms",
        high_is_good=False,
        todo="look for load on the machine of the store (top), and for a slow name server",
    )
    return finding, [rate]


PLACE_CHECKS = (
    PlaceCheck(name="memory", seconds=(5.0, 20.0), measure=measure_memory, judge=judge_memory),
    PlaceCheck(name="product", seconds=(0.7, 5.0), measure=measure_product, judge=judge_product),
    PlaceCheck(
        name="clocks",
        seconds=(0.4, 2.0),
        measure=measure_clocks,
        judge=judge_clocks,
        rounds=ROUNDS,
    ),
    PlaceCheck(
        name="disk", seconds=(2.0, 2.0), measure=measure_disk, judge=judge_disk, of_host=True
    ),
    PlaceCheck(
        name="store",
        seconds=(0.5, 0.5),
        measure=measure_store,
        judge=judge_store,
        of_host=True,
        stored=True,
    ),
)
