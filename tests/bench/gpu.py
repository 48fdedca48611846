"""`python -m tests.bench.gpu`: the attention bench's packs on CUDA.

One rank: every kernel under the executor, forward and backward, against a direct call of flash attention over the
packed documents. Several GPUs: planners over NCCL, one rank a GPU, against DeepSpeed's DistributedAttention around
that call. Then row operations (`tests.bench.gpu_rows`), and the 135M model's training (`tests.bench.gpu_model`).
Medians of runs after a few that don't count; TFLOP/s are those of visible pairs, a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import hsap
from hsap.calibrate.processes import run_ranks
from hsap.cli.plan import read_planner
from hsap.ir.check import Refused
from hsap.ir.effects import FLOPS_PER_PAIR
from hsap.ir.plan import Plan
from hsap.ir.program import Op
from hsap.ir.slice import area
from hsap.ir.span import positions
from hsap.runtime.executor import Executor, Session
from hsap.runtime.groups import connect
from hsap.runtime.kernels import select_kernel
from hsap.runtime.kernels.select import KERNELS
from hsap.runtime.memory import TORCH_DTYPES
from tests.bench import gpu_model, gpu_rows
from tests.bench.attention.cases import OURS, ULYSSES, Case
from tests.bench.attention.peers import Ulysses, VarlenAttention
from tests.bench.gpu_clock import median_seconds
from tests.bench.packs import pack
from tests.bench.record import RESULTS, caption, conditions, record

HEADS, CLUSTER = hsap.HeadShape(32, 8, 128, "bf16"), "dgx-h100"
CASES = (
    Case("ldc@131072", pack("ldc", batch=1), heads=HEADS, cluster=CLUSTER),
    Case("fineweb@131072", pack("fineweb", batch=1), heads=HEADS, cluster=CLUSTER),
    Case("single@32768", (32768,), heads=HEADS, cluster=CLUSTER),
)
QUICK = (Case("ldc@16384", pack("ldc", 16384, 1), heads=HEADS, cluster=CLUSTER),)
DIRECT = "direct"
AIM = 0.95
"""Of the direct call's TFLOP/s, forward and backward together, for the executor on one GPU."""
ON_CUDA = tuple(name for name, can in KERNELS.items() if "cuda" in can.devices and name != "math")
"""Kernels worth timing: `math` keeps whole matrices of scores."""


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> int:
    """Print tables for one GPU and, where there are more, for all; 2 where there is none."""
    asked = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "bench gpu: torch sees no CUDA device here, and this bench times CUDA kernels and NCCL only; run it on a "
            "machine with an NVIDIA GPU and a CUDA build of torch (python -m tests.bench.attention is its counterpart "
            "for CPUs).",
            file=sys.stderr,
        )
        return 2
    found, count = conditions(), torch.cuda.device_count()
    gpu = torch.cuda.get_device_name(0)
    print(f"gpu: {caption(found)}; forward and backward, heads 32:8:128 bf16")
    lines = []
    for case in QUICK if asked.quick else CASES:
        lines += one_rank(case, "cuda", ON_CUDA, asked.runs)
        if count > 1:
            lines += many_ranks(case, "cuda", asked.ranks or count, asked.method or (ULYSSES, *OURS), asked.runs)
    rows = gpu_rows.measure("cuda", 16384 if asked.quick else 131072, HEADS.num_q_heads, HEADS.head_dim, asked.runs)
    print(f"\n{gpu_rows.table(rows)}")
    about = {"quick": asked.quick, "device": gpu, "dtype": HEADS.dtype, "heads": "32:8:128"}
    figures = about | {"lines": lines, "row_operations": rows}
    # Before the model, which may not fit everywhere.
    record("gpu", figures, found, folder)
    tokens, steps = (4096, 6) if asked.quick else (16384, 16)
    model = gpu_model.measure("cuda", gpu, tokens, steps)
    print(f"\n{gpu_model.table(model)}")
    record("gpu-model", model, found, folder)
    return 0


def one_rank(case: Case, device: str, kernels: Sequence[str], runs: int) -> list[dict]:
    """Time every kernel under the executor, and the direct call, on one device."""
    backend = "nccl" if device == "cuda" else "gloo"
    (told,) = run_ranks(1, _one, case, device, tuple(kernels), runs, backend=backend)
    print(f"\n{case.name} on one rank\n{'kernel':<22}{'forward ms':>12}{'TFLOP/s':>9}{'backward ms':>13}{'TFLOP/s':>9}"
          f"{'direct':>8}{'error':>9}")  # fmt: skip
    lines = []
    for name, figures in told.items():
        lines.append({"case": case.name, "ranks": 1, "method": name} | figures)
        if "refused" in figures:
            print(f"{name:<22}  refused: {figures['refused']}")
            continue
        times = [(figures[key], _tera(case, op, figures[key])) for key, op in _OF_DIRECTION]
        whole = sum(seconds for seconds, _ in times)
        share = sum(told[DIRECT][key] for key, _ in _OF_DIRECTION) / whole
        lines[-1] |= {"tflops_per_s": [tera for _, tera in times], "of_direct": share}
        cells = f"{times[0][0] * 1e3:>12.2f}{times[0][1]:>9.1f}{times[1][0] * 1e3:>13.2f}{times[1][1]:>9.1f}"
        print(f"{name:<22}{cells}{share:>8.2f}{figures['error']:>9.1e}")
    print(_verdict(lines))
    return lines


def _verdict(lines: list[dict]) -> str:
    """The fastest kernel's share of the direct call, beside what is aimed at."""
    ours = [line for line in lines if line["method"] != DIRECT and "refused" not in line]
    if not ours:
        return "no kernel ran"
    best = max(ours, key=lambda line: line["of_direct"])
    told = "reached" if best["of_direct"] >= AIM else "missed"
    return f"{best['method']}: {best['of_direct']:.1%} of the direct call, forward and backward; aim {AIM:.0%}, {told}"


def many_ranks(case: Case, device: str, num_ranks: int, methods: Sequence[str], runs: int) -> list[dict]:
    """Time every method over several ranks; wall of forward and backward, the slowest rank's."""
    backend = "nccl" if device == "cuda" else "gloo"
    told = run_ranks(num_ranks, _many, case, device, tuple(methods), runs, backend=backend)
    print(f"\n{case.name} on {num_ranks} ranks\n{'method':<22}{'ms':>10}{'TFLOP/s a rank':>16}")
    lines = []
    for name in methods:
        line = {"case": case.name, "ranks": num_ranks, "method": name} | told[0][name]
        if "refused" not in line:
            line["wall_s"] = max(one[name]["wall_s"] for one in told)
            flops = sum(_flops(case, op) for _, op in _OF_DIRECTION)
            line["tflops_per_s"] = flops / line["wall_s"] / num_ranks / 1e12
            print(f"{name:<22}{line['wall_s'] * 1e3:>10.2f}{line['tflops_per_s']:>16.1f}")
        else:
            print(f"{name:<22}  refused: {line['refused']}")
        lines.append(line)
    return lines


class Flash(torch.nn.Module):
    """The direct call: torch's CUDA flash attention over packed causal documents; on CPUs the kernel that we have.

    num_heads: query heads; on CPUs there are as many KV heads.
    """

    def __init__(self, case: Case, num_heads: int, device: str) -> None:
        super().__init__()
        self.on_cpu = None
        if device == "cpu":
            kernel = select_kernel("auto", "cpu", TORCH_DTYPES[case.heads.dtype], head_dim=case.heads.head_dim)
            self.on_cpu = VarlenAttention(kernel, case.problem(1).slices(0), num_heads)
        edges = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
        self.cu_seqlens, self.longest = torch.from_numpy(edges).to(device), max(case.lengths)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.on_cpu is not None:
            return self.on_cpu(q, k, v)
        return _Flash.apply(q, k, v, self.cu_seqlens, self.longest)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        ctx.places = (cu_seqlens, cu_seqlens, longest, longest, 0.0, True)
        ctx.scale = q.shape[-1] ** -0.5
        o, lse, *rest = torch.ops.aten._flash_attention_forward(q, k, v, *ctx.places, False, scale=ctx.scale)
        ctx.save_for_backward(q, k, v, o, lse, *rest[:2])
        return o

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple:
        q, k, v, o, lse, state, unused = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            do.contiguous(), q, k, v, o, lse, *ctx.places, state, unused, scale=ctx.scale
        )
        return *grads, None, None


def _one(rank: int, case: Case, device: str, kernels: tuple[str, ...], runs: int) -> dict[str, dict]:
    """(forward, backward) seconds of the direct call and of the executor with each kernel."""
    inputs = _inputs(case, device, np.arange(case.num_tokens))
    flash = Flash(case, case.heads.num_q_heads, device)
    q, k, v, do = inputs
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    told = {}
    wanted = flash(*leaves)
    seconds = median_seconds(
        (lambda: flash(*leaves), lambda o: torch.autograd.grad(o, leaves, do, retain_graph=True)), device, runs
    )
    told[DIRECT] = dict(zip(_DIRECTIONS, seconds)) | {"error": 0.0}
    plan = hsap.compile(case.problem(1), "ring")
    for name in kernels:
        try:
            session = Session(kernel=name, device=device, dtype=TORCH_DTYPES[case.heads.dtype])
            executor = session.load(plan)
        except (ValueError, ImportError) as error:
            told[name] = {"refused": " ".join(str(error).split())}
            continue
        kept = executor.forward(q, k, v)
        error = float((kept.o - wanted).abs().max() / wanted.abs().max())
        del kept
        steps = (lambda e=executor: e.forward(q, k, v), lambda kept, e=executor: e.backward(do, kept))
        told[name] = dict(zip(_DIRECTIONS, median_seconds(steps, device, runs))) | {"error": error}
    return told


def _many(rank: int, case: Case, device: str, methods: tuple[str, ...], runs: int) -> dict[str, dict]:
    """Seconds of forward and backward together, by method."""
    connect(device=device)
    dist.barrier()
    session = Session(device=device, dtype=TORCH_DTYPES[case.heads.dtype])
    return {name: _method(rank, case, device, name, session, runs) for name in methods}


def _method(rank: int, case: Case, device: str, name: str, session: Session, runs: int) -> dict:
    size, extra = dist.get_world_size(), {}
    if name == ULYSSES:
        heads = (case.heads.num_q_heads, case.heads.num_kv_heads)
        if case.num_tokens % size or any(count % size for count in heads):
            return {"refused": f"needs tokens and heads that {size} divides"}
        rows = np.array_split(np.arange(case.num_tokens), size)[rank]
        run = Ulysses(Flash(case, heads[0] // size, device)).run
    else:
        try:
            plan = _compiled(case, name, size)
        except (Refused, ImportError) as error:
            return {"refused": str(error)}
        rows, extra = positions(plan.rank_spans(rank)), {"planner": plan.planner}
        run = _executed(session.load(plan))
    inputs = _inputs(case, device, rows)
    dist.barrier()
    (seconds,) = median_seconds((lambda: run(*inputs),), device, runs)
    dist.barrier()
    return extra | {"wall_s": seconds}


def _compiled(case: Case, method: str, num_ranks: int) -> Plan:
    """Every rank compiles: planners are deterministic."""
    name, options = read_planner(method)
    plan = hsap.compile(case.problem(num_ranks), name, **options)
    report = hsap.verify(plan)
    assert report.ok, str(report)
    return plan


def _executed(executor: Executor) -> Callable:
    return lambda q, k, v, do: executor.backward(do, executor.forward(q, k, v))


def _inputs(case: Case, device: str, rows: np.ndarray) -> list[Tensor]:
    """Random q, k, v, do of some rows, drawn where they are needed."""
    generator = torch.Generator(device).manual_seed(len(rows))
    heads = case.heads
    counts = (heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_q_heads)
    dtype = TORCH_DTYPES[heads.dtype]
    return [
        torch.randn(len(rows), count, heads.head_dim, generator=generator, device=device).to(dtype) for count in counts
    ]


_DIRECTIONS = ("forward_s", "backward_s")
_OF_DIRECTION = tuple(zip(_DIRECTIONS, (Op.ATTEND, Op.ATTEND_GRAD)))


def _flops(case: Case, op: Op) -> float:
    pairs = float(area(case.problem(1).slices(0)).sum())
    return FLOPS_PER_PAIR[op] * pairs * case.heads.num_q_heads * case.heads.head_dim


def _tera(case: Case, op: Op, seconds: float) -> float:
    return _flops(case, op) / seconds / 1e12


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.bench.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pack of 16,384 tokens")
    parser.add_argument("--ranks", type=int, metavar="R", help="GPUs of the second table (default: all)")
    parser.add_argument("--method", nargs="+", metavar="NAME", help=f"of {', '.join((ULYSSES, *OURS))}")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="runs that count (default 10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
