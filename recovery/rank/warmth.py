"""Imported before ranks are forked: has Python and torch import what they otherwise do in the first
step of each rank, while the others wait for it. No thread is started and no GPU is touched.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - a socket that connects asks for it

import torch

with torch.autograd.profiler.record_function("warmth"):  # as every step of an optimizer does
    pass
