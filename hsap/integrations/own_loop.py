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

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from hsap import clusters
from hsap.data.batch import MicroBatch, build_micro_batch
from hsap.data.document import NO_TARGET
from hsap.data.packing.packs import Piece
from hsap.data.store import DocumentStore
from hsap.ir.cluster import Cluster
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, distinct_masks, parse_layers
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.ir.span import positions
from hsap.models.loss import wide_dtype
from hsap.planning.compiling import PlanningSetup, Shape
from hsap.planning.exchange import PlanExchange
from hsap.planning.pool import PlanPool
from hsap.runtime.attention import attention
from hsap.runtime.executor import Executor, Session
from hsap.runtime.groups import Mesh, job_store, make_mesh
from hsap.runtime.kernels import partial_output
from hsap.runtime.memory import TORCH_DTYPES
from hsap.runtime.upload import sent

_KEPT_PLANS = 64
_MAX_LABEL = (1 << 31) - 1
_MADE: Counter[str] = Counter()
"""How often each SP group was given plans in this process: its members make theirs in the same order, so that the names
under which plans travel are the same on all of them, and of nobody else."""


class Shard:
    """One rank's part of a packed micro-batch; tensors are on the rank's device.

    plan: the micro-batch's. rows: int64 [T], token positions of the rank's rows in the packed batch, in row order; T
    may be 0. positions: int64 [T], within the document. targets: int64 [T], the token that each row predicts, -100
    where there is none; None where `load` was given no labels. layer_masks: of each layer, or a pattern that is
    repeated. No dataclass, because FSDP2 rebuilds those among a forward's arguments with all that is in them.
    """

    __slots__ = ("_executor", "_indices", "_num_targets", "layer_masks", "plan", "positions", "rows", "targets")

    def __init__(
        self,
        plan: Plan,
        rows: Tensor,
        positions: Tensor,
        targets: Tensor | None,
        num_targets: int,
        layer_masks: tuple[Mask, ...],
        indices: tuple[int, ...],
        executor: Executor,
    ) -> None:
        self.plan, self.rows, self.positions, self.targets = plan, rows, positions, targets
        self.layer_masks = layer_masks
        self._num_targets, self._indices, self._executor = num_targets, indices, executor

    @property
    def num_targets(self) -> int:
        """Targets of the whole micro-batch. ValueError where `load` was given no labels, and nothing was counted."""
        if self.targets is None:
            raise ValueError(
                "shard: the batch was loaded without labels, so its targets aren't counted, and a loss scaled by none "
                "would be wrong; give load the labels, or count the targets of the whole batch yourself"
            )
        return self._num_targets

    @property
    def num_tokens(self) -> int:
        """Rows of this rank."""
        return len(self.rows)

    def take(self, values: Tensor | np.ndarray | Sequence, dim: int = 0) -> Tensor:
        """Give this rank's rows of any field of the packed batch, on the rank's device.

        values: as many tokens along `dim` as the batch has; ValueError otherwise.
        """
        values = torch.as_tensor(values)
        whole = self.plan.problem.layout.num_tokens
        if values.shape[dim] != whole:
            raise ValueError(
                f"shard: a field has {values.shape[dim]} tokens, the packed batch {whole}; give the whole batch's, "
                "documents one after the other, the same on every rank of the SP group"
            )
        rows = self.rows
        if rows.device != values.device:
            # Where they are wanted, and not fetched from the GPU, which would stop the host until it is through.
            rows = sent(torch.from_numpy(positions(self.plan.rank_spans(self._executor.rank))), values.device)
        return sent(values.index_select(dim, rows), self.rows.device)

    def mask_of(self, layer: int) -> Mask:
        """The attention mask of a layer."""
        return self.layer_masks[layer % len(self.layer_masks)]

    def attention(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer: int = 0) -> Tensor:
        """Attend the rank's own rows over the whole packed batch, as `hsap.attention`, under the layer's mask."""
        return attention(q_THD, k_THD, v_THD, self._executor, self._indices[layer % len(self._indices)], layer)


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
        self.device = _own_device() if device is None else torch.device(device)
        if group is None:
            self.mesh = make_mesh(self.topology)
        else:
            self.mesh = _given_mesh(self.topology, group, average_over, self.device)
        ranks = dist.get_process_group_ranks(self.mesh.sp)
        cluster = clusters.read(cluster) if isinstance(cluster, str) else cluster or Cluster()
        distinct, self._indices = distinct_masks(self.layer_masks)
        problem = Problem(
            *(Layout.from_lengths([]), heads, self.topology, distinct, _seen_by(cluster, ranks)), wire_dtype=wire_dtype
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
        Errors: ValueError where ranks or `plan_ahead` were given other lengths, or as `hsap.compile`.
        """
        if get_worker_info() is not None:
            raise ValueError(
                "sequence parallel: a batch is loaded in a worker of a DataLoader; the ranks of an SP group load "
                "together, so do it in the training process: num_workers=0 where collate_fn loads"
            )
        micro = _micro_batch(lengths, labels, sequences)
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
        if self._loaded % _KEPT_PLANS == 1:
            self._compare(shape, labels is not None, micro.labels)
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

    def _compare(self, shape: Shape, labelled: bool, labels: np.ndarray) -> None:
        """Refuse a batch whose labels aren't those of the group's other ranks: a plan only knows lengths, and blocks
        of text that all have one length are the usual case. Collective over the SP group; now and then is enough for
        loaders that draw by rank, and it waits for the device.
        """
        if self.topology.num_ranks == 1:
            return
        digest = hashlib.sha256(repr((shape, labelled)).encode() + np.ascontiguousarray(labels).tobytes()).digest()
        mine = torch.tensor([int.from_bytes(digest[:7], "big")], device=self.device)
        others = [torch.empty_like(mine) for _ in range(self.topology.num_ranks)]
        dist.all_gather(others, mine, group=self.mesh.sp)
        differing = [rank for rank, other in enumerate(others) if other.item() != mine.item()]
        if differing:
            raise ValueError(
                f"sequence parallel: rank {self.mesh.sp_rank} of SP group {self.mesh.dp_rank} was given a batch whose "
                f"lengths or labels aren't those of rank {differing[0]} of its group; every rank of an SP group must "
                "load the same documents: draw them by dp_rank, not by rank"
            )

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


def _micro_batch(lengths: Iterable[int], labels: object, sequences: Sequence[int] | None) -> MicroBatch:
    """Make the micro-batch of documents given by their lengths, and labels if there are any."""
    layout = Layout.from_lengths(lengths, sequences)
    if labels is None:
        labels = np.full(layout.num_tokens, NO_TARGET)
    labels = torch.as_tensor(labels).cpu().numpy()
    if labels.shape != (layout.num_tokens,):
        raise ValueError(
            f"sequence parallel: labels have shape {list(labels.shape)}, the documents {layout.num_tokens} tokens "
            "together; give one label a token, documents one after the other, not shifted"
        )
    if labels.size and (labels.dtype.kind not in "iu" or labels.max() > _MAX_LABEL or (labels[labels < 0] + 100).any()):
        raise ValueError(
            f"sequence parallel: labels are {labels.dtype} from {labels.min()} to {labels.max()}; give the ids of "
            f"tokens, whole numbers from 0 to {_MAX_LABEL}, and {NO_TARGET} where a token isn't trained"
        )
    names = tuple(map(str, range(layout.num_documents)))
    store = DocumentStore(labels.astype(np.int32), layout.cu_seqlens, names, labels != NO_TARGET)
    pieces = iter([Piece(i, 0, length) for i, length in enumerate(layout.lengths)])
    packs = [tuple(next(pieces) for _ in range(count)) for count in layout.sequences]
    return build_micro_batch(store, packs, max(layout.num_tokens, 1))


def _given_mesh(
    topology: Topology, group: dist.ProcessGroup, average_over: dist.ProcessGroup | None, device: torch.device
) -> Mesh:
    """This process's place in an SP group that the loop made; which of the groups it is follows from their ranks."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) != topology.num_ranks:
        raise ValueError(
            f"sequence parallel: topology {topology} has {topology.num_ranks} ranks, the group that was given "
            f"{len(ranks)}; give a topology that fits, or another group"
        )
    firsts = torch.zeros(dist.get_world_size(average_over), dtype=torch.int64, device=device)
    mine = torch.tensor([ranks[0]], dtype=torch.int64, device=device)
    dist.all_gather(list(firsts.split(1)), mine, group=average_over)
    members = Counter(firsts.tolist())
    if set(members.values()) != {len(ranks)}:
        raise ValueError(
            f"sequence parallel: gradients are averaged over {len(firsts)} ranks, which aren't whole SP groups of "
            f"{len(ranks)}; give average_over= the ranks that hold the same weights (with tensor parallelism, those of "
            "equal tensor index; with pipeline parallelism, those of one stage)"
        )
    return Mesh(topology, group, dist.get_rank(group), sorted(members).index(ranks[0]), len(members))


def _seen_by(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """Give the machines as an SP group sees them, of whose nodes it has every n-th rank where others stand between."""
    strides = {after - before for before, after in pairwise(ranks)} or {1}
    stride = min(strides)
    per_node = cluster.ranks_per_node
    if len(strides) > 1 or stride < 1 or (per_node % stride and per_node > stride):
        raise ValueError(
            f"sequence parallel: the SP group's ranks {list(ranks)[:8]} don't stand at equal distances that fit into "
            f"nodes of {per_node} ranks, so that planning can't know its nodes; order the job's ranks so that they do"
        )
    return cluster.starting_at(ranks[0] // stride, max(per_node // stride, 1))


def _own_device() -> torch.device:
    if torch.cuda.is_available() and dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
