"""Error of split attention over the same kernel's on one device, per tensor: `python -m tests.bench.accuracy`.

RMSE against float64 mathematics, divided by that of topology 1x1; DESIGN's bars: fp32 1.1; bf16 1.2 with the kernel's
native output, 1.1 with float32 output (and float32 on the wire). The slope is the ratio's growth per doubling of ranks.
"""

from __future__ import annotations

import numpy as np
import torch

import hsap
from hsap.planners import PLANNERS
from hsap.runtime.kernels import select_kernel
from tests.runtime.oracle import attention, rmse, tensors

LENGTHS = [900, 300, 5, 243, 88]
HEADS = (4, 2, 64)
DEGREES = (2, 4, 8, 16)
SETTINGS = (  # dtype, kernel output, wire dtype, bar
    ("fp32", "native", "fp32", 1.1),
    ("bf16", "native", "bf16", 1.2),
    ("bf16", "native", "fp32", 1.2),
    ("bf16", "float32", "fp32", 1.1),
)
NAMES = ("o", "lse", "dq", "dk", "dv")


def errors(topology: hsap.Topology, planner: str, dtype: str, output: str, wire: str, want=None):
    """(RMSE of each tensor, the float64 answer)."""
    problem = hsap.Problem(hsap.Layout.from_lengths(LENGTHS), hsap.HeadShape(*HEADS, dtype), topology, wire_dtype=wire)
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    inputs = tensors(problem, torch_dtype)
    want = attention(problem, *inputs) if want is None else want
    kernel = select_kernel("auto", "cpu", torch_dtype, output=output)
    got = hsap.reference(hsap.compile(problem, planner), *inputs[:3], grad_o=inputs[3], kernel=kernel)
    return np.array([rmse(g, w) for g, w in zip(got, want)]), want


def main() -> None:
    """Print a table for every setting and planner."""
    for dtype, output, wire, bar in SETTINGS:
        alone, want = errors(hsap.Topology(1, 1), "ring", dtype, output, wire)
        print(f"\n{dtype}, kernel output {output}, {wire} on the wire; one device's RMSE: "
              + ", ".join(f"{n} {e:.1e}" for n, e in zip(NAMES, alone)) + f"; bar {bar}")  # fmt: skip
        print(f"{'planner':10} {'ranks':>5}  " + " ".join(f"{n:>6}" for n in NAMES))
        for planner in PLANNERS:
            ratios = [errors(hsap.Topology(d, 1), planner, dtype, output, wire, want)[0] / alone for d in DEGREES]
            for degree, ratio in zip(DEGREES, ratios):
                over = "  over the bar" if ratio[[0, 2, 3, 4]].max() > bar else ""
                print(f"{planner:10} {degree:5}  " + " ".join(f"{r:6.3f}" for r in ratio) + over)
            slope = np.polyfit(np.log2(DEGREES), np.stack(ratios), 1)[0]
            print(f"{'':10} slope  " + " ".join(f"{s:6.3f}" for s in slope))


if __name__ == "__main__":
    main()
