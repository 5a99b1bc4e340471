"""Memory keeps what is written to it: patterns are written to all blocks, then read back.

The patterns are those of memory testers (van de Goor, Testing Semiconductor Memories, 1991, and
memtest86+): all zeros and ones find stuck cells; 0xAA and 0x55 neighbours that pull each other; the
address in each word finds address lines that are stuck, which no constant pattern can; random words
find what depends on the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trainchaos.harness.preflight.checks.check import (
    Measured,
    PlaceCheck,
    Task,
    is_cuda,
    torch_name,
)
from trainchaos.harness.preflight.checks.findings import Finding, Rate

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


class TorchMemory:
    """Blocks of words of 64 bits on a device. Raises RuntimeError where it gives none."""

    def __init__(self, device: str, size: int) -> None:
        import torch

        self.words = min(BLOCK_BYTES, size) // WORD
        self._held: list[Any] = []
        for _ in range(max(1, size // (self.words * WORD))):
            try:
                self._held.append(torch.empty(self.words, dtype=torch.int64, device=device))
            except torch.cuda.OutOfMemoryError:  # others allocate too: what there is, is tested
                if not self._held:
                    raise
                break

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self._held)

    def write(self, block: int, words: Any) -> None:
        """Write a whole block: int64 tensor of shape (words,)."""
        self._held[block].copy_(words)

    def read(self, block: int) -> Any:
        """The block itself: reading is the comparison's."""
        return self._held[block]


def size_of(device: str) -> int:
    """Bytes to test of a device."""
    if not is_cuda(device):
        return CPU_BYTES
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free * CUDA_SHARE)


@dataclass(frozen=True, kw_only=True)
class MemoryCheck(PlaceCheck):
    """``make``: gives the memory of a torch device, so many bytes of it."""

    name: ClassVar = "memory"
    seconds: ClassVar = (5.0, 20.0)
    make: Callable[[str, int], TorchMemory] = TorchMemory

    def measure(self, task: Task) -> Measured:
        """Each pattern: written to all blocks, then read; none is begun once the time is over."""
        device = torch_name(task.place)
        began_s = time.monotonic()
        memory = self.make(device, size_of(device))
        wrong: list[dict[str, Any]] = []
        words, verified = 0, 0
        done: list[str] = []
        for pattern in PATTERNS:
            if done and time.monotonic() - began_s > task.budget_s:
                break
            for block in range(memory.blocks):
                memory.write(block, _expected(pattern, block, memory.words, device, task.seed))
            for block in range(memory.blocks):
                expected = _expected(pattern, block, memory.words, device, task.seed)
                found = _differences(memory.read(block), expected)
                words += found[0]
                for at, want, got in found[1]:
                    address = (block * memory.words + at) * WORD
                    wrong.append(_wrong(pattern, address, want, got))
                verified += memory.words * WORD
            done.append(pattern)
        return {
            "bytes": memory.blocks * memory.words * WORD,
            "verified_bytes": verified,
            "patterns": done,
            "seed": task.seed,
            "wrong_words": words,
            "wrong": wrong[:MOST_SHOWN],
            "seconds": time.monotonic() - began_s,
        }

    def judge(self, place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
        """One wrong word is unfit: memory that works has none. How fast patterns are made says
        little of the memory.
        """
        (measured,) = rounds
        words, done = int(measured["wrong_words"]), list(measured["patterns"])
        size = f"{measured['bytes'] / 2**20:.0f} MiB"
        missing = ", ".join(one for one in PATTERNS if one not in done)
        finding = Finding(
            said=f"{size}, {len(done)} of {len(PATTERNS)} patterns read back"
            + (f" (no time for {missing})" if missing else ""),
            measured=float(words),
            bound=0.0,
            unit="words",
            evidence=measured,
        )
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


def _expected(pattern: str, block: int, words: int, device: str, seed: int) -> Any:
    """int64 tensor of shape (words,): what a pattern puts into a block."""
    import torch

    if pattern == "address":
        start = block * words
        return torch.arange(start, start + words, dtype=torch.int64, device=device) * WORD
    if pattern == "random":
        generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + block)
        made = torch.empty(words, dtype=torch.int64, device=device)
        return made.random_(-(2**63), None, generator=generator)
    return torch.full((words,), _CONSTANT[pattern], dtype=torch.int64, device=device)


def _differences(read: Any, expected: Any) -> tuple[int, list[tuple[int, int, int]]]:
    """How many words differ; of the first ones: index, expected, read."""
    import torch

    if torch.equal(read, expected):
        return 0, []
    at = (read != expected).nonzero().flatten()
    shown = at[:MOST_SHOWN].tolist()
    return int(at.numel()), [(i, int(expected[i]), int(read[i])) for i in shown]


def _wrong(pattern: str, address: int, want: int, got: int) -> dict[str, Any]:
    bits = (want ^ got) & _UNSIGNED
    return {
        "pattern": pattern,
        "address": address,
        "wrote": f"{want & _UNSIGNED:#018x}",
        "read": f"{got & _UNSIGNED:#018x}",
        "bits": [bit for bit in range(64) if bits >> bit & 1],
    }
