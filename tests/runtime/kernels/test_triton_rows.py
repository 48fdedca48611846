"""Triton's row operations against float64 mathematics and torch's own: compiled on a GPU, else interpreted.

Whether triton compiles or interprets is settled when it is imported, so without a GPU the cases run in a process of
their own.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.devices import HAS_CUDA, HAS_TRITON

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_CUDA and not INTERPRETED else "cpu"
RUNS_HERE = HAS_TRITON and (HAS_CUDA or INTERPRETED)
cases = pytest.mark.skipif(not RUNS_HERE, reason="runs on a GPU with triton, or in the process that interprets it")
pytestmark = [pytest.mark.gpu] if HAS_CUDA else []

# Rows, heads, head dimension: none, one, odd ones, more than a program holds; 9 heads as in SmolLM2, 80 no power of 2.
SIZES = [(0, 4, 64), (1, 1, 8), (5, 9, 64), (33, 2, 80), (70, 3, 128), (3, 1, 256)]
# (part, accumulator): what plans merge, and what `merge` promises beside.
HALVES = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32)]
DTYPES = [*HALVES, (torch.float32, torch.float64), (torch.float64, torch.float64)]


def triton_rows():
    from hsap.runtime.kernels import triton_rows

    return triton_rows


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def partial(rows: int, heads: int, dim: int, dtype: torch.dtype, stat: torch.dtype, seed: int):
    """A partial result of which every third row sees nothing, as a view into a wider buffer."""
    o = random(rows, heads + 2, dim, dtype=dtype, seed=seed)[:, 1:-1]
    lse = (random(rows, heads + 1, dtype=stat, seed=seed + 1) * 8)[:, 1:]
    empty = torch.arange(seed, rows + seed, device=DEVICE) % 3 == 0
    o[empty], lse[empty] = 0, -torch.inf
    return o, lse


def exact(acc, part):
    """One softmax over both, in float64."""
    lse = torch.stack((acc[1].double(), part[1].double()))
    both = lse.logsumexp(0)
    weight = torch.exp(lse - both.masked_fill(both == -torch.inf, 0))
    return (weight[..., None] * torch.stack((acc[0].double(), part[0].double()))).sum(0), both


@cases
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("part_dtype", "acc_dtype"), DTYPES)
def test_merge_is_one_softmax(size, part_dtype, acc_dtype) -> None:
    acc = partial(*size, acc_dtype, torch.float64, seed=0)
    part = partial(*size, part_dtype, torch.promote_types(part_dtype, torch.float32), seed=1)
    want, plain = exact(acc, part), tuple(x.clone() for x in acc)
    triton_rows().merge(*acc, *part)
    from hsap.runtime.kernels.merge import _merge

    _merge(*plain, *part)
    eps = torch.finfo(acc_dtype).eps
    for got, alike, true in zip(acc, plain, want):
        tolerance = 1e-14 if got.dtype == torch.float64 and acc_dtype == torch.float64 else 8 * eps
        torch.testing.assert_close(got, alike, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got.double(), true, rtol=8 * tolerance, atol=8 * tolerance)


@cases
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_row", [(True, True), (True, False), (False, True)])
def test_gather_merge_and_scatter_in_one(size, by_row) -> None:
    rows, heads, dim = size
    acc = partial(rows + 7, heads, dim, torch.float32, torch.float64, seed=0)
    part = partial(rows + 4, heads, dim, torch.bfloat16, torch.float32, seed=2)
    to, of = (
        torch.randperm(rows + more, generator=torch.Generator().manual_seed(5))[:rows].to(DEVICE) for more in (7, 4)
    )
    if not by_row[0]:
        acc, to = tuple(x[3 : 3 + rows] for x in acc), torch.arange(rows, device=DEVICE)
    if not by_row[1]:
        part, of = tuple(x[1 : 1 + rows] for x in part), torch.arange(rows, device=DEVICE)
    want = [x.double().clone() for x in acc]
    want[0][to], want[1][to] = exact([x[to] for x in want], [x[of] for x in part])
    triton_rows().merge(*acc, *part, to if by_row[0] else None, of if by_row[1] else None)
    torch.testing.assert_close(acc[0].double(), want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(acc[1], want[1], rtol=1e-12, atol=1e-12)


@cases
def test_an_empty_side_changes_no_bit() -> None:
    o, lse = random(9, 3, 80, dtype=torch.float32), random(9, 3, dtype=torch.float64) * 1e4
    nothing = torch.ones(9, 3, 80, device=DEVICE), torch.full((9, 3), -torch.inf, device=DEVICE)
    kept = o.clone(), lse.clone()
    triton_rows().merge(o, lse, *nothing)
    assert torch.equal(o, kept[0]) and torch.equal(lse, kept[1])
    empty = torch.zeros(9, 3, 80, device=DEVICE), torch.full((9, 3), -torch.inf, dtype=torch.float64, device=DEVICE)
    triton_rows().merge(*empty, *nothing)
    assert not empty[0].any() and torch.isneginf(empty[1]).all()
    triton_rows().merge(*empty, *kept)
    assert torch.equal(empty[0], kept[0]) and torch.equal(empty[1], kept[1])


@cases
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_row", [(True, True), (True, False), (False, True), (False, False)])
def test_gather_add_and_scatter_in_one(size, by_row) -> None:
    rows, heads, dim = size
    total = random(rows + 7, 2, heads + 1, dim, dtype=torch.float32)[:, 1, 1:]
    part = random(rows + 4, heads, dim, dtype=torch.bfloat16, seed=3)
    to = torch.randperm(rows + 7)[:rows].to(DEVICE) if by_row[0] else None
    of = torch.randperm(rows + 4)[:rows].to(DEVICE) if by_row[1] else None
    total, part = total if by_row[0] else total[2 : 2 + rows], part if by_row[1] else part[:rows]
    want = total.clone()
    want[slice(None) if to is None else to] += part[slice(None) if of is None else of].float()
    triton_rows().add_rows(total, part, to, of)
    assert torch.equal(total, want)


@cases
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e-18])
def test_delta_and_its_stand_in_output(size, scale) -> None:
    rows, heads, dim = size
    do = (random(rows, heads + 1, dim)[:, 1:] * scale).to(torch.bfloat16)
    o = random(rows, heads, dim, dtype=torch.bfloat16, seed=1)
    do[rows // 2 :: 5] = 0
    delta = triton_rows().row_delta(do, o, torch.float32)
    want = (do.double() * o.double()).sum(-1)
    torch.testing.assert_close(delta.double(), want, rtol=1e-5, atol=1e-5 * scale)
    out = triton_rows().stand_in_output(do, delta)
    assert out.dtype == do.dtype and out.is_contiguous() and bool(out.isfinite().all())
    assert not out[rows // 2 :: 5].any()
    torch.testing.assert_close((do.double() * out.double()).sum(-1), want, rtol=0.04, atol=2e-2 * scale)


@cases
@pytest.mark.parametrize(("topology", "mask"), [("4x1", "causal"), ("2x2", "lambda:3,20")])
def test_plans_run_by_them(topology, mask, monkeypatch) -> None:
    """Every call that the runtime makes, with its views, strides and index tensors; on CPUs with a kernel of theirs."""
    import hsap
    from tests.runtime.oracle import attention, tensors

    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    shape = hsap.HeadShape(6, 2, 16, {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype])
    layout, masks = hsap.Layout.from_lengths([40, 1, 61, 9]), ((mask, 1),)
    problem = hsap.Problem(layout, shape, hsap.Topology.parse(topology), masks)
    inputs = tensors(problem, dtype)
    used = []
    for name in ("merge", "delta"):
        module = importlib.import_module(f"hsap.runtime.kernels.{name}")
        monkeypatch.setattr(module, "fused", lambda device_type: used.append(device_type) or triton_rows())
    kernel = "auto" if DEVICE == "cuda" else importlib.import_module("test_varlen").MathVarlenKernel()
    q, k, v, grad_o = (x.to(DEVICE) for x in inputs)
    got = hsap.reference(hsap.compile(problem, "sap"), q, k, v, grad_o=grad_o, kernel=kernel)
    tolerance = 3e-2 if DEVICE == "cuda" else 2e-5
    for one, want in zip(got, attention(problem, *inputs)):
        torch.testing.assert_close(one.cpu().double(), want, rtol=0, atol=tolerance * float(want.abs().max()))
    assert len(used) > 20


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or HAS_CUDA, reason="the cases themselves run here")
@pytest.mark.skipif(not HAS_TRITON, reason='needs triton (pip install "hsap[triton]"), on CPUs for its interpreter')
def test_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


class Hopper:
    """Stands in for the driver of a GPU that isn't here: all that compiling asks of one."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A kernel whose launches compile it for the arguments at hand, and do no more."""

    def __init__(self, kernel, made: list) -> None:
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid):
        return lambda *given, **flags: self.made.append(self.kernel.warmup(*given, grid=grid, **flags))


@pytest.mark.slow
@pytest.mark.skipif(
    INTERPRETED or HAS_CUDA, reason="what is interpreted can't be compiled, and a GPU has its own driver"
)
@pytest.mark.skipif(not HAS_TRITON, reason='needs triton (pip install "hsap[triton]"), whose compiler needs no GPU')
def test_every_launch_compiles_once_for_all_packs(tmp_path, monkeypatch) -> None:
    """The runtime's own calls, for packs of three lengths, of which two aren't multiples of 16."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, made = triton_rows(), []
    for name in ("_merge", "_add", "_delta", "_stand_in"):
        monkeypatch.setattr(module, name, Compiled(getattr(module, name), made))
    monkeypatch.setattr(driver, "_active", Hopper())
    for rows in (64, 67, 101):
        o, part = torch.zeros(rows, 8, 128), torch.zeros(rows, 8, 128, dtype=torch.bfloat16)
        lse, lse_part, index = torch.zeros(rows, 8, dtype=torch.float64), torch.zeros(8, rows).T, torch.arange(rows)
        module.merge(o, lse, part, lse_part)
        module.merge(o, lse, part, lse_part, index, index)
        module.add_rows(o, part, index)
        module.stand_in_output(part, module.row_delta(part, part, torch.float32))
    assert len(made) == 15 and len({kernel.hash for kernel in made}) == 5
    assert all(len(kernel.asm["cubin"]) > 1000 for kernel in made)
    for kernel in made[:2]:
        # Several threads read each lse of an accumulator that a merge changes in place: first all read it.
        before = kernel.asm["ptx"].partition("st.global")[0]
        assert before.rfind("bar.sync") > before.rfind("ld.global") > 0
