"""Error of split attention over the same kernel's on one device, per tensor: `python -m tests.bench.accuracy`.

RMSE against float64 mathematics, divided by that of topology 1x1; DESIGN's bars: fp32 1.1; bf16 1.2 with the kernel's
native output, 1.1 with float32 output (and float32 on the wire). The slope is the ratio's growth per doubling of ranks.
"""

from __future__ import annotations

import functools

import numpy as np

import hsap
from hsap.planners import PLANNERS
from hsap.runtime.kernels import select_kernel
from hsap.runtime.memory import TORCH_DTYPES
from hsap.train.budget import JUDGED, TENSORS, errors, exact

LENGTHS = [900, 300, 5, 243, 88]
HEADS = (4, 2, 64)
DEGREES = (2, 4, 8, 16)
SETTINGS = (  # dtype, kernel output, wire dtype, bar
    ("fp32", "native", "fp32", 1.1),
    ("bf16", "native", "bf16", 1.2),
    ("bf16", "native", "fp32", 1.2),
    ("bf16", "float32", "fp32", 1.1),
)


@functools.cache
def answer(dtype: str) -> list:
    """The exact one."""
    return exact(hsap.Problem(hsap.Layout.from_lengths(LENGTHS), hsap.HeadShape(*HEADS, dtype), hsap.Topology(1, 1)))


def measured(topology: hsap.Topology, planner: str, dtype: str, output: str, wire: str) -> np.ndarray:
    """RMSE of each tensor."""
    problem = hsap.Problem(hsap.Layout.from_lengths(LENGTHS), hsap.HeadShape(*HEADS, dtype), topology, wire_dtype=wire)
    kernel = select_kernel("auto", "cpu", TORCH_DTYPES[dtype], output=output)
    return errors(problem, planner, {}, kernel, answer(dtype))[0]


def main() -> None:
    """Print a table for every setting and planner."""
    judged = [TENSORS.index(name) for name in JUDGED]
    for dtype, output, wire, bar in SETTINGS:
        alone = measured(hsap.Topology(1, 1), "ring", dtype, output, wire)
        print(f"\n{dtype}, kernel output {output}, {wire} on the wire; one device's RMSE: "
              + ", ".join(f"{n} {e:.1e}" for n, e in zip(TENSORS, alone)) + f"; bar {bar}")  # fmt: skip
        print(f"{'planner':10} {'ranks':>5}  " + " ".join(f"{n:>6}" for n in TENSORS))
        for planner in PLANNERS:
            ratios = [measured(hsap.Topology(d, 1), planner, dtype, output, wire) / alone for d in DEGREES]
            for degree, ratio in zip(DEGREES, ratios):
                over = "  over the bar" if ratio[judged].max() > bar else ""
                print(f"{planner:10} {degree:5}  " + " ".join(f"{r:6.3f}" for r in ratio) + over)
            slope = np.polyfit(np.log2(DEGREES), np.stack(ratios), 1)[0]
            print(f"{'':10} slope  " + " ".join(f"{s:6.3f}" for s in slope))


if __name__ == "__main__":
    main()
