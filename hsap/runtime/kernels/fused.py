"""Fused: whether row operations have one kernel each (Triton, on CUDA) or go through torch one by one."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache
from types import ModuleType

MODULE = "hsap.runtime.kernels.triton_rows"


@cache
def fused(device_type: str) -> ModuleType | None:
    """Give the fused row operations for a kind of device; None where there are none and torch's own are used."""
    if device_type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    try:
        module = importlib.import_module(MODULE)
        module.try_out(device_type)
    except Exception as error:  # of a compiler, a driver or an older triton: whatever it is, torch does without
        told = " ".join(str(error).split())[:200]
        warnings.warn(f"hsap: triton can't be used here, torch's own operations are: {told}", stacklevel=2)
        return None
    return module
