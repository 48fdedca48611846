"""Devices: the marks of tests that are written for a GPU and tried on CPUs first."""

from __future__ import annotations

import importlib.util

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device"))
DEVICES = ("cpu", pytest.param("cuda", marks=needs_gpu))
"""For parametrize: the same test on CPUs, so that a GPU's first user meets no slip of the pen."""
