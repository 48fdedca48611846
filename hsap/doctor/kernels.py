"""Kernels: every attention kernel that may be chosen here, forward and backward beside float64, and how far it is off.

Documents of odd lengths, one of one token; causal, in a window, with sinks and unmasked; query heads in groups. The
error is the relative RMSE over all rows, its bound that of the number format (`hsap.doctor.oracle.BOUNDS`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hsap.doctor.oracle import BOUNDS, oracle, relative_rmse, run_backward, run_forward, tensors
from hsap.doctor.report import FAILED, OK, WARNING, Line
from hsap.ir.check import one_line
from hsap.ir.heads import HeadRun
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, mask_slices
from hsap.runtime.kernels import Kernel, Work, select_kernel
from hsap.runtime.kernels.fused import fused
from hsap.runtime.kernels.select import KERNELS, usable_kernels
from hsap.runtime.memory import DTYPE_NAMES

LENGTHS = (131, 1, 300, 77)
MASKS = ("causal", "window:33", "lambda:3,50", "full")
HEADS = (HeadRun(0, 4, 0, 2),)
DIMS = {"cpu": (64,), "cuda": (64, 128)}


@dataclass(frozen=True, slots=True)
class Errors:
    """The largest relative errors of a kernel, and under which mask (or that with heads of which dimension)."""

    forward: float
    backward: float
    where: str

    def over(self, dtype: torch.dtype) -> float:
        """How many times the bound; infinite for what isn't finite."""
        times = max(error / bound for error, bound in zip((self.forward, self.backward), BOUNDS[dtype], strict=True))
        return times if times == times else float("inf")  # NaN


def try_kernels(device: torch.device) -> list[Line]:
    """Try all kernels that may be chosen on a device, in every number format and both kinds of output."""
    lines = []
    for about, kernel, dtype in _candidates(device):
        try:
            worst = measure(kernel, dtype, device)
        except Exception as error:  # a kernel's library, its compiler, the driver: whatever it is, it can't be used
            told = (
                f"raised {type(error).__name__}: {one_line(error)}; choose another by kernel=, or reinstall its package"
            )
            lines.append(Line(about, FAILED, told))
            continue
        forward, backward = BOUNDS[dtype]
        told = f"forward {worst.forward:.1e} (bound {forward:.0e}), backward {worst.backward:.1e} ({backward:.0e})"
        bad = worst.over(dtype) > 1
        advice = f", worst with {worst.where}: wrong on this hardware; choose another by kernel=, and report it"
        lines.append(Line(about, FAILED if bad else OK, told + (advice if bad else "")))
    if device.type == "cuda":
        fine = fused("cuda") is not None
        told = "compiled and agree with torch's" if fine else "can't be used: torch's own run, some launches more"
        lines.append(Line("triton row operations", OK if fine else WARNING, told))
    return lines


def _candidates(device: torch.device) -> Iterator[tuple[str, Kernel, torch.dtype]]:
    for dtype in BOUNDS:
        for name in usable_kernels(device, dtype):
            for output in ("native", "float32") if KERNELS[name].float32_output and name != "math" else ("native",):
                kernel = select_kernel(name, device, dtype, output=output)
                if output == "float32" and dtype not in (torch.bfloat16, torch.float16):
                    continue
                about = f"kernel {name} {DTYPE_NAMES[dtype]}" + (" float32 output" if output == "float32" else "")
                yield about, kernel, dtype


def measure(kernel: Kernel, dtype: torch.dtype, device: torch.device) -> Errors:
    """Measure a kernel's largest errors over masks, and heads of the usual dimensions."""
    layout, forward, backward, where = Layout.from_lengths(LENGTHS), 0.0, 0.0, ""
    for dim in DIMS[device.type]:
        for text in MASKS:
            table = mask_slices(layout, Mask.parse(text))
            of_mask = _errors(kernel, table, dim, dtype, device)
            found = Errors(*of_mask, f"mask {text}, heads of {dim}")
            if found.over(dtype) >= Errors(forward, backward, where).over(dtype):
                where = found.where
            forward, backward = (_larger(a, b) for a, b in zip((forward, backward), of_mask, strict=True))
    return Errors(forward, backward, where)


def _larger(one: float, other: float) -> float:
    return other if other != other or other > one else one


def _errors(
    kernel: Kernel, table: np.ndarray, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    rows, scale = sum(LENGTHS), dim**-0.5
    inputs = tensors(rows, rows, HEADS, dim, dtype)
    want_o, want_lse, want_dq, want_dkv = oracle(table, HEADS, *inputs, scale)
    q, kv, do = (x.to(device) for x in inputs)
    works = [Work(table, HEADS)]
    o, lse = run_forward(kernel, works, q, kv, scale)
    dq, dkv = run_backward(kernel, works, q, kv, do, o, lse, scale)
    forward = max(relative_rmse(got.cpu(), want) for got, want in ((o, want_o), (lse, want_lse)))
    return forward, max(relative_rmse(got.cpu(), want) for got, want in ((dq, want_dq), (dkv, want_dkv)))
