"""Which of the machine's NVIDIA devices a job may use, and what CUDA calls each. Pure.

NVML counts all devices in the order of their PCI bus; CUDA counts those that
``CUDA_VISIBLE_DEVICES`` names, in that order, and by default puts faster models first (CUDA C++
Programming Guide, environment variables).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BY_BUS = "PCI_BUS_ID"


def cuda_names(
    uuids: Sequence[str], models: Sequence[str], environ: Mapping[str, str]
) -> dict[int, str]:
    """NVML's index -> torch's name, such as ``cuda:0``, of each visible device. ``uuids``,
    ``models``: of all devices, in NVML's order. As in CUDA, the first word that names no device
    ends the list. Raises LookupError where the environment does not say which device is which.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    numbered = len(set(models)) <= 1 or environ.get("CUDA_DEVICE_ORDER") == BY_BUS
    words = [str(i) for i in range(len(uuids))] if visible is None else visible.split(",")
    found: dict[int, str] = {}
    for word in map(str.strip, words):
        if word.startswith("MIG"):
            raise LookupError(f"{word} is a part of a device, which NVML counts in another way")
        if word.isdigit() and not all(uuids):
            raise LookupError("a device cannot be read, and CUDA may not count it")
        if word.isdigit() and not numbered:
            raise LookupError(f"models differ: set CUDA_DEVICE_ORDER={BY_BUS}")
        index = _index(word, uuids)
        if index is None or index in found:
            break
        found[index] = f"cuda:{len(found)}"
    return found


def _index(word: str, uuids: Sequence[str]) -> int | None:
    if word.isdigit():
        return int(word) if int(word) < len(uuids) else None
    if not word.startswith("GPU-"):
        return None
    alike = [i for i, uuid in enumerate(uuids) if uuid.startswith(word)]
    return alike[0] if len(alike) == 1 else None
