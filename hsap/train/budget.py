"""Error budget: what splitting attention costs in accuracy, measured before the first step and held to a limit.

Errors are root mean squares against float64 mathematics, of o, dq, dk and dv under each of the model's masks, over
those of the same kernel on one device in the same number format. What is measured is a plan as the run would make it
of its first micro-batch, all ranks of a group in one process; documents are cut so that the exact answer, whose cost
grows with the square of their length, takes seconds; q, k, v and the gradient of o are drawn, standard normal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.api import compile
from hsap.data.batch import MicroBatch
from hsap.data.loader import StepLoader
from hsap.gathering import gather_texts
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.runtime.accuracy import exact_attention, random_inputs, rmse
from hsap.runtime.kernels import Kernel, select_kernel
from hsap.runtime.memory import TORCH_DTYPES
from hsap.runtime.reference import reference
from hsap.train.attention import kernel_options, planned_heads
from hsap.train.config import TrainConfig
from hsap.train.inputs import Inputs

TENSORS = ("o", "lse", "dq", "dk", "dv")
JUDGED = ("o", "dq", "dk", "dv")
_PAIRS = 1 << 24
"""Pairs of query and key, over all heads, that the exact answer has at most."""


def exact(problem: Problem) -> list[tuple[Tensor, ...]]:
    """The answer to a problem's random inputs in float64, for each of its masks; the same at every topology."""
    inputs = random_inputs(problem, TORCH_DTYPES[problem.heads.dtype])
    return [exact_attention(problem, *inputs, mask=mask) for mask in range(len(problem.masks))]


def errors(
    problem: Problem,
    planner: str,
    options: Mapping[str, object],
    kernel: Kernel,
    want: Sequence[tuple[Tensor, ...]],
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Root mean square errors of a problem's attention against float64: [masks, `TENSORS`], forward and backward.

    planner, options: as `hsap.compile`'s; all ranks take turns in this process, with the kernel. want: `exact` of it.
    """
    inputs = random_inputs(problem, TORCH_DTYPES[problem.heads.dtype])
    plan = compile(problem, planner, **options)
    q, k, v, grad_o = (tensor.to(device) for tensor in inputs)
    found = []
    for mask in range(len(problem.masks)):
        got = reference(plan, q, k, v, grad_o=grad_o, mask=mask, kernel=kernel)
        found.append([rmse(one.cpu(), right) for one, right in zip(got, want[mask], strict=True)])
    return np.array(found)


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors under one wire dtype: split over the ranks and on one device, [masks, `TENSORS`]; masks: their names."""

    wire: str
    split: np.ndarray
    alone: np.ndarray
    masks: tuple[str, ...]

    @property
    def ratios(self) -> np.ndarray:
        """How many times one device's each error is; 1 where neither has any."""
        return np.where(self.split == self.alone, 1.0, self.split / np.maximum(self.alone, np.finfo(float).tiny))

    @property
    def worst(self) -> tuple[float, str, str]:
        """The highest ratio among those that are judged, its tensor and its mask."""
        judged = self.ratios[:, [TENSORS.index(name) for name in JUDGED]]
        mask, tensor = np.unravel_index(int(judged.argmax()), judged.shape)
        return float(judged[mask, tensor]), JUDGED[tensor], self.masks[mask]


def measure(config: TrainConfig, inputs: Inputs, micro: MicroBatch, wire: str, device: torch.device) -> Measured:
    """Measure the attention of a micro-batch as the run would compute it with this wire dtype."""
    setup = planned_heads(replace(config, wire_dtype=wire), inputs.model, 0).setups[0]
    heads = setup.problem.heads
    layout = Layout.from_lengths(_cut(micro.lengths, heads.num_q_heads), micro.sequences)
    problem = replace(setup.problem, layout=layout, arena_multiple=None)
    dtype = TORCH_DTYPES[config.engine.dtype]
    kernel = select_kernel(config.kernel, device, dtype, head_dim=heads.head_dim, **kernel_options(config))
    want = exact(problem)
    split = errors(problem, setup.planner, setup.options, kernel, want, device)
    alone = errors(replace(problem, topology=Topology(1, 1), cluster=Cluster()), "ring", {}, kernel, want, device)
    return Measured(wire, split, alone, tuple(str(mask) for mask, _ in problem.masks))


def first_micro_batch(config: TrainConfig, inputs: Inputs) -> MicroBatch:
    """The first SP group's first micro-batch of the run."""
    train, cursor = config.train, None if inputs.checkpoint is None else inputs.checkpoint["cursor"]
    with StepLoader(
        inputs.train_data, config.packing, packs_per_step=train.packs_per_step, micro_packs=train.micro_packs,
        dp_size=config.dp, seed=train.seed, lookahead=1, cursor=cursor,
    ) as loader:  # fmt: skip
        return next(loader).micro_batches[0]


def weigh(config: TrainConfig, inputs: Inputs, device: torch.device) -> list[Measured]:
    """Measure with the run's wire dtype and, where that is over the budget, with float32's: the last one is what the
    run should take."""
    micro = first_micro_batch(config, inputs)
    found = [measure(config, inputs, micro, config.wire_dtype, device)]
    assert config.check.error_budget is not None
    if found[0].worst[0] > config.check.error_budget and config.wire_dtype != "fp32":
        found.append(measure(config, inputs, micro, "fp32", device))
    return found


def judge(config: TrainConfig, worst: Sequence[tuple[str, float, str, str]]) -> tuple[TrainConfig, str]:
    """Give the configuration that keeps to the budget, and one line on it.

    worst: of each wire dtype that was measured, in turn, its name, the highest ratio, its tensor and mask. ValueError
    where none keeps to it.
    """
    budget = config.check.error_budget
    assert budget is not None
    told = [f"{tensor} under {mask} has {ratio:.2f} times one device's error with {wire} on the wire"
            for wire, ratio, tensor, mask in worst]  # fmt: skip
    wire, ratio, _, _ = worst[-1]
    if ratio > budget:
        raise ValueError(
            f"check.error_budget={budget:g}: {'; '.join(told)}, at topology {config.topology} and engine.dtype="
            f"{config.engine.dtype}; take a topology with fewer ranks, another kernel (float32 output), or a higher "
            "budget"
        )
    if len(worst) > 1:
        told[-1] += "; this run takes wire_dtype=fp32"
    return replace(config, wire_dtype=wire), f"error budget {budget:g}: {'; '.join(told)}"


def keep_budget(config: TrainConfig, inputs: Inputs, device: torch.device) -> tuple[TrainConfig, str]:
    """Have the first rank measure and all decide alike, as `judge` does. Collective over the job."""
    said: dict = {}
    if dist.get_rank() == 0:
        try:
            said = {"worst": [(one.wire, *one.worst) for one in weigh(config, inputs, device)]}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
    said = json.loads(gather_texts(json.dumps(said), device=device)[0])
    if "error" in said:
        raise ValueError(f"check.error_budget={config.check.error_budget:g} couldn't be measured: {said['error']}")
    return judge(config, said["worst"])


def _cut(lengths: Sequence[int], num_heads: int) -> list[int]:
    """Cut documents to the greatest length at which the exact answer is cheap."""
    limit = max(lengths, default=1)
    while limit > 1 and sum(min(n, limit) ** 2 for n in lengths) * num_heads > _PAIRS:
        limit = limit * 7 // 8
    return [min(n, limit) for n in lengths]
