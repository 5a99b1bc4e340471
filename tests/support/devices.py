"""Devices that tests of tensors run on: the CPU, and a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, NO_GPU])]
