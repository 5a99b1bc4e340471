"""Imported before ranks are forked: makes Python and torch do in advance the imports that each rank
would otherwise do in its first step while the other ranks wait. Starts no thread and touches no
GPU.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - a socket that connects asks for it

import torch

with torch.autograd.profiler.record_function("warmth"):  # as every step of an optimizer does
    pass
