"""Sequence parallelism in a training loop of one's own: groups, plans, shards of every field, and the loss's scale.

A loop gives the document lengths of each packed micro-batch, the same on all ranks of an SP group, and gets what one
rank needs of it. Model, optimizer and whatever averages gradients (DDP, FSDP2, DeepSpeed) stay the loop's own; on GPUs
DeepSpeed's overlap_comm is to be false, for the reason that `hsap.train.engine` gives.

Tensor parallelism beside it: heads are those of one tensor-parallel rank (`HeadShape.shares` says which), `group` holds
the ranks of equal tensor index, and every such group has its own plans. Pipeline parallelism: `group` holds the ranks
of one stage, masks are those of the stage's layers; a `Shard` is bound to its own plan, so several micro-batches may be
under way. `average_over` is then the group over which gradients are averaged, a number of whole SP groups.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from hsap import clusters
from hsap.integrations.documents import Sameness, micro_batch
from hsap.integrations.places import given_mesh, own_device, seen_by
from hsap.integrations.shard import Shard
from hsap.ir.cluster import Cluster
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, distinct_masks, parse_layers
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.ir.span import positions
from hsap.models.wide import wide_dtype
from hsap.planning.compiling import PlanningSetup, Shape
from hsap.planning.exchange import PlanExchange
from hsap.planning.pool import PlanPool
from hsap.runtime.executor import Session
from hsap.runtime.groups import job_store, make_mesh
from hsap.runtime.kernels import partial_output
from hsap.runtime.memory import TORCH_DTYPES
from hsap.runtime.upload import sent

_KEPT_PLANS = 64
_MADE: Counter[str] = Counter()
"""How often each SP group was given plans in this process: its members make theirs in the same order, so that the names
under which plans travel are the same on all of them, and of nobody else."""


class SequenceParallel:
    """This process's place in sequence-parallel groups, and their plans. Collective over the job, as `load` is.

    topology: "4x2" is 4 InterSP by 2 IntraSP. heads: of one layer, with the dtype of q, k and v. masks: one for all
    layers, a pattern that is repeated (`window:1024*5+causal`), or a list with one a layer. planner, options: as
    `hsap.compile`'s; with auto one rank of a group chooses for all. cluster: a `Cluster`, a preset or a YAML file.
    device: None for this process's CUDA device, or the CPU where there is none or ranks talk by gloo. kernel:
    attention's. wire_dtype: of partial results on the network (None: q's). verify: whether every plan is proved right
    before it is used. workers: processes of this rank that plan; 0: planning takes place in `load` and `plan_ahead`.
    group: this process's SP group, ranks in plan order; None: the world is dp × inter_sp × intra_sp, SP innermost.
    average_over: the ranks over which the loop averages gradients; None: all.
    Errors: ValueError if there is no process group, or world, heads, masks or options don't fit.
    """

    def __init__(
        self,
        topology: str | Topology,
        heads: HeadShape,
        masks: str | Sequence[Mask | str] = "causal",
        *,
        planner: str = "sap",
        options: Mapping[str, object] | None = None,
        cluster: Cluster | str | None = None,
        device: torch.device | str | None = None,
        kernel: str = "auto",
        wire_dtype: str | None = None,
        verify: bool = True,
        workers: int = 0,
        group: dist.ProcessGroup | None = None,
        average_over: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "sequence parallel: there is no process group; call torch.distributed.init_process_group (or what your "
                "framework has for it) first, in a program that torchrun or another launcher started"
            )
        self.topology = topology if isinstance(topology, Topology) else Topology.parse(topology)
        self.layer_masks = _layer_masks(masks)
        self.device = own_device() if device is None else torch.device(device)
        if group is None:
            self.mesh = make_mesh(self.topology)
        else:
            self.mesh = given_mesh(self.topology, group, average_over, self.device)
        ranks = dist.get_process_group_ranks(self.mesh.sp)
        cluster = clusters.read(cluster) if isinstance(cluster, str) else cluster or Cluster()
        distinct, self._indices = distinct_masks(self.layer_masks)
        problem = Problem(
            *(Layout.from_lengths([]), heads, self.topology, distinct, seen_by(cluster, ranks)), wire_dtype=wire_dtype
        )
        setup = PlanningSetup(problem, planner, dict(options or {}), verify)
        # The plan of nothing: already it knows whether planner, options and masks fit.
        setup.compile(problem.layout)
        output = partial_output(self.device)
        self._session = Session(self.mesh.sp, kernel, self.device, TORCH_DTYPES[heads.dtype], output=output)
        self._session.kernel(heads.head_dim)
        self._averaged = average_over
        self._pool = PlanPool(setup, workers) if workers else None
        name = f"{ranks[0]}-{ranks[-1]}-{len(ranks)}"
        store = job_store() if len(ranks) > 1 else None
        self._exchange = PlanExchange(
            store, f"loop/{name}/{_MADE[name]}", self.mesh.sp_rank, len(ranks), setup, self._pool
        )
        _MADE[name] += 1
        self._same = Sameness(self.mesh, self.device)
        self._number = 0
        self._loaded = 0
        self._ahead: deque[Shape] = deque()

    @property
    def heads(self) -> HeadShape:
        """Head shape and dtype of q, k and v."""
        return self._exchange.setup.problem.heads

    @property
    def dp_rank(self) -> int:
        """Which of the SP groups this is: the index of its share of the data."""
        return self.mesh.dp_rank

    @property
    def dp_size(self) -> int:
        """SP groups that have data of their own."""
        return self.mesh.dp_size

    def plan_ahead(self, lengths: Iterable[int], sequences: Sequence[int] | None = None) -> None:
        """Have the plan made of a micro-batch that will be loaded later.

        What is planned ahead is loaded in the same order, before anything else. The ranks of a group plan in turn, so
        that as many plans are made at a time as are called for; with `workers` this returns at once.
        """
        layout = Layout.from_lengths(lengths, sequences)
        self._plan(Shape(layout.lengths, layout.sequences))

    def load(
        self,
        lengths: Iterable[int],
        labels: Tensor | np.ndarray | Sequence[int] | None = None,
        sequences: Sequence[int] | None = None,
    ) -> Shard:
        """Compile and verify a micro-batch's plan, make it ready to run, and give this rank's part of the batch.

        lengths: tokens of each document, in packed order; every rank of the SP group gives the same. labels: int [all
        tokens], the tokens themselves in packed order, not shifted, -100 where a token isn't trained. sequences:
        documents of each pack, where the micro-batch has several (one planner, basp, needs to know).
        Errors: ValueError where ranks or `plan_ahead` were given other lengths, or as `hsap.compile`; where ranks were
        given other labels, the first time at once, later by the load after that one, so that none waits.
        """
        if get_worker_info() is not None:
            raise ValueError(
                "sequence parallel: a batch is loaded in a worker of a DataLoader; the ranks of an SP group load "
                "together, so do it in the training process: num_workers=0 where collate_fn loads"
            )
        micro = micro_batch(lengths, labels, sequences)
        shape = Shape.of(micro)
        if not self._ahead:
            self._plan(shape)
        planned = self._ahead[0]
        if planned != shape:
            raise ValueError(
                f"sequence parallel: a batch of {len(shape.lengths)} documents is loaded where plan_ahead was given "
                f"another one, of {len(planned.lengths)} documents; load in the order of plan_ahead, the same documents"
            )
        self._ahead.popleft()
        plan = self._fetch()
        layout = plan.problem.layout
        self._same.settle()
        self._same.begin(shape, None if labels is None else micro.labels)
        if self._loaded == 1:
            self._same.settle()  # before anything is trained
        if (layout.lengths, layout.sequences) != (shape.lengths, shape.sequences):
            raise ValueError(
                f"sequence parallel: rank {self.mesh.sp_rank} of SP group {self.mesh.dp_rank} was given documents of "
                f"{sum(shape.lengths)} tokens together, a plan for {layout.num_tokens} was made by another rank of its "
                "group; every rank of an SP group must load the same documents: draw them by dp_rank, not by rank"
            )
        rows = positions(plan.rank_spans(self.mesh.sp_rank))
        return Shard(
            plan,
            self._tensor(rows),
            self._tensor(micro.positions[rows]),
            None if labels is None else self._tensor(micro.labels[rows]),
            micro.num_targets,
            self.layer_masks,
            self._indices,
            self._session.load(plan),
        )

    def loss_scale(self, num_targets: int, accumulation: int = 1) -> Tensor:
        """Give what a rank's sum of token losses is multiplied by: gradients averaged over all ranks are then those of
        the mean over all targets of all ranks, ZeRO, FSDP and DDP alike. Collective over the ranks that average.

        num_targets: of this SP group, over all micro-batches of the step (`Shard.num_targets`, summed). accumulation:
        what the wrapper divides the loss by (DeepSpeed and accelerate do), 1 for those that don't. Returns a float32
        scalar (float64 for float64) on the device, without waiting for it.
        """
        own = num_targets if self.mesh.sp_rank == 0 else 0
        total = torch.tensor(own, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=self._averaged)
        scale = dist.get_world_size(self._averaged) * accumulation / total.clamp(min=1).double()
        return scale.to(wide_dtype(TORCH_DTYPES[self.heads.dtype]))

    def close(self) -> None:
        """End the processes that plan."""
        self._exchange.closed.set()
        if self._pool is not None:
            self._pool.close()

    def _plan(self, shape: Shape) -> None:
        self._exchange.publish(shape, self._number)
        self._ahead.append(shape)
        self._number += 1

    def _fetch(self) -> Plan:
        number = self._loaded
        self._loaded += 1
        plan = self._exchange.get(number)
        if self._loaded % _KEPT_PLANS == 0:
            # Behind this nobody still waits for an earlier plan, whatever the loop does with its shards.
            dist.barrier(self.mesh.sp)
            for old in range(self._loaded - _KEPT_PLANS, self._loaded):
                self._exchange.forget(old)
        return plan

    def _tensor(self, values: np.ndarray) -> Tensor:
        return sent(torch.from_numpy(values.astype(np.int64)), self.device)


def _layer_masks(masks: str | Sequence[Mask | str]) -> tuple[Mask, ...]:
    if isinstance(masks, str | Mask):
        return parse_layers(masks) if isinstance(masks, str) else (masks,)
    layers = tuple(mask if isinstance(mask, Mask) else Mask.parse(mask) for mask in masks)
    if not layers:
        raise ValueError(
            "sequence parallel: masks is an empty list; give a mask, as in 'causal', or one for each layer"
        )
    return layers
