"""Row operations around attention: torch's one by one against Triton's fused ones, in bytes that must move a second."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module

import torch

from hsap.runtime.kernels import fused as fusing
from tests.bench.gpu_clock import median_seconds

# By name, as the package's `merge` is the function.
MERGE, DELTA = (import_module(f"hsap.runtime.kernels.{name}") for name in ("merge", "delta"))


def measure(device: str, num_rows: int, heads: int, dim: int, runs: int) -> list[dict]:
    """Seconds and GB/s of each operation by torch and, where it runs, by Triton; inputs bf16, accumulators float32."""
    lines = []
    for name, (call, num_bytes) in _operations(device, num_rows, heads, dim).items():
        line = {"operation": name, "rows": num_rows, "heads": heads, "head_dim": dim, "bytes": num_bytes}
        with _by_torch():
            (line["torch_s"],) = median_seconds((call,), device, runs)
        (line["triton_s"],) = median_seconds((call,), device, runs) if fusing.fused(device) is not None else (None,)
        line |= {
            f"{who}_gb_per_s": line[f"{who}_s"] and num_bytes / line[f"{who}_s"] / 1e9 for who in ("torch", "triton")
        }
        lines.append(line)
    return lines


def table(lines: list[dict]) -> str:
    """What was measured, a line an operation."""
    head = f"{'row operation':<28}{'torch ms':>10}{'GB/s':>8}{'triton ms':>11}{'GB/s':>8}"
    rows = [
        f"{line['operation']:<28}{line['torch_s'] * 1e3:>10.3f}{line['torch_gb_per_s']:>8.0f}"
        + (
            f"{line['triton_s'] * 1e3:>11.3f}{line['triton_gb_per_s']:>8.0f}"
            if line["triton_s"] is not None
            else f"{'–':>11}{'–':>8}"
        )
        for line in lines
    ]
    return "\n".join([head, *rows])


def _operations(device: str, num_rows: int, heads: int, dim: int) -> dict[str, tuple[Callable, int]]:
    """A call, and the bytes that it can't do without: read once, written once."""
    generator = torch.Generator(device).manual_seed(0)
    o, part, do = (torch.randn(num_rows, heads, dim, generator=generator, device=device) for _ in range(3))
    part, do = part.bfloat16(), do.bfloat16()
    lse, lse_part = (torch.randn(num_rows, heads, generator=generator, device=device) for _ in range(2))
    lse = lse.double()
    delta = torch.randn(num_rows, heads, generator=generator, device=device)
    index = torch.randperm(num_rows, generator=generator, device=device)
    size, stats = num_rows * heads * dim, num_rows * heads
    merging = (4 + 4 + 2) * size + (8 + 8 + 4) * stats
    return {
        "merge": (lambda: MERGE.merge(o, lse, part, lse_part), merging),
        "gather, merge, scatter": (lambda: MERGE.merge(o, lse, part, lse_part, index, index), merging + 8 * num_rows),
        "gather, add, scatter": (lambda: MERGE.add_rows(o, part, index, index), (4 + 4 + 2) * size + 8 * num_rows),
        "delta": (lambda: DELTA.row_delta(do, part, torch.float32), (2 + 2) * size + 4 * stats),
        "stand-in output": (lambda: DELTA.stand_in_output(do, delta), (2 + 2) * size + 4 * stats),
    }


@contextmanager
def _by_torch():
    """Have the operations go through torch whatever is installed."""
    kept = MERGE.fused, DELTA.fused
    MERGE.fused = DELTA.fused = lambda _: None
    try:
        yield
    finally:
        MERGE.fused, DELTA.fused = kept
